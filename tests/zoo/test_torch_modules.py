"""The modules that torch tests its own quantization with go all the way, or are listed with the reason."""

from __future__ import annotations

import pytest
import torch

from docs.generate_models import disagreement
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import prepare
from tests.routes import qconfig
from tests.zoo.stages import STAGES, walk

torch_modules = pytest.importorskip("tests.zoo.torch_modules", exc_type=ImportError)

pytestmark = pytest.mark.slow


# Modules that stop early: the stages that they pass, and a part of the error's text.
STOPS: dict[str, tuple[int, str]] = {
    # Normalises numbers that it repeated itself: its output is zero, in float too.
    "NormalizationTestModel": (2, "every gradient is zero"),
    # Bags of embeddings have ragged lengths, which the chips do not have; in float code a file has them.
    "EmbeddingBagModule": (0, "EmbeddingBag` at `model.emb`"),
    "EmbBagWrapper": (0, "EmbeddingBag` at `model.emb_bag`"),
}

# Modules with float layers after a DeQuantStub, or with bags of embeddings, whose sums are float.
HAVE_FLOAT_CODE = {
    "QuantSubModel", "AnnotatedSkipQuantModel", "ModelForFusion",
    "ManualEmbeddingBagLinear", "EmbeddingWithStaticLinear", "SparseNNModel",
}  # fmt: skip


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", torch_modules.MODULES)
def test_module(name, dtype, tmp_path):
    set_march(March.NASH_E)
    model, inputs = torch_modules.build(name)
    result = walk(model, inputs, tmp_path, dtype, name in HAVE_FLOAT_CODE)
    stages, reason = STOPS.get(name, (len(STAGES), ""))
    assert len(result.passed) == stages, result.trace
    assert reason in result.error
    assert result.distance < (0.02 if dtype == "qint16" else 0.2)
    assert disagreement(name, model, dtype, result) == ""


def test_a_qconfig_of_another_toolkit_is_refused():
    model, inputs = torch_modules.bare("AnnotatedConvModel")
    with pytest.raises(QuantizationConfigError, match=r"the model is torch\.ao.*delete a `qconfig` attribute"):
        prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None)
    del model.qconfig
    prepared = prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None)
    assert {type(prepared.quant).__module__, type(prepared.dequant).__module__} == {
        "horizon_plugin_pytorch.nn.qat.stubs"
    }
    assert torch.is_tensor(prepared.eval()(*inputs))
