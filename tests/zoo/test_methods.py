"""Methods side by side, and copies of prepared models: the same integers everywhere."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.capture.graph_text import graph_text
from horizon_plugin_pytorch.errors import ConversionError, OperatorInputError, TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, prepare, set_fake_quantize
from horizon_plugin_pytorch.workflow.prepare import FuseMode
from tests.routes import as_numbers, calibrate, mismatches, qconfig
from tests.tiers import in_soak

architectures = pytest.importorskip("tests.zoo.architectures", exc_type=ImportError)
torch_modules = pytest.importorskip("tests.zoo.torch_modules", exc_type=ImportError)
from tests.zoo.test_architectures import STOPS as ARCHITECTURE_STOPS  # noqa: E402
from tests.zoo.test_torch_modules import STOPS as MODULE_STOPS  # noqa: E402

_STOPS = {**ARCHITECTURE_STOPS, **MODULE_STOPS}
NAMES = [n for n in (*torch_modules.MODULES, *architectures.ARCHITECTURES) if n not in _STOPS]

# Architectures that fx can trace. The others ask a tensor for its shape or its type to decide what to do.
TRACED = {"efficientnet", "poolformer", "pvt_v2"}

# fx passes a tuple of tensors to the module as one argument, which has no length.
NOT_TRACED = {"LSTMwithHiddenDynamicModel"}

# Modules that EAGER cannot take: those that call functions where it wants modules, and those with float layers in front
# of their QuantStub, where it quantizes whatever has a qconfig.
CALLS_FUNCTIONS = """
    LinearAddModel LinearReluAddModel ConvReluAddModel ConvBnAddReluModel FunctionalLinear DenseTopMLP
    SingleLayerFunctionalLinearModel TwoLayerFunctionalLinearModel FunctionalLinearAddModel FunctionalLinearReluModel
    FunctionalLinearReluLinearModel FunctionalConv2d SingleLayerFunctionalConvModel TwoLayerFunctionalConvModel
    FunctionalConvReluModel FunctionalConvReluConvModel DeFusedEmbeddingBagLinear helper_Conv2dWithObsSharingOps
    helper_Conv2dWithCat helper_Conv2dWithTwoCat helper_Conv2dWithSplit helper_ThreeAdd helper_AddInplaceAdd
    helper_MulInplaceMul helper_AddMulScalar SparseNNModel
""".split()
# Modules whose bags of embeddings, float tensors made of indices, meet quantized ones: by running they get a stub.
FLOAT_OF_INDICES = ["SparseNNModel"]
FLOAT_BEFORE_STUB = """
    AnnotatedTwoLayerLinearModel AnnotatedNestedModel AnnotatedSubNestedModel AnnotatedCustomConfigNestedModel
    QuantSubModel
""".split()


def _sampled(first: int) -> list[Any]:
    """One of the architectures that fx can trace, of the others every tenth, of the modules every fourth.

    `make soak` takes the rest.
    """
    traced, modules = sorted(TRACED), [name for name in NAMES if name not in architectures.ARCHITECTURES]
    others = [name for name in NAMES if name in architectures.ARCHITECTURES and name not in TRACED]
    broad = set(NAMES) - {traced[first], *others[first::10], *modules[first::4]}
    return [*(name for name in NAMES if name not in broad), *in_soak(*(name for name in NAMES if name in broad))]


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_march(March.NASH_E)


def _build(name: str) -> tuple[nn.Module, tuple]:
    model, inputs = (architectures if name in architectures.ARCHITECTURES else torch_modules).build(name)
    with torch.no_grad():
        model(*inputs)  # some keep what the first run computed, and the second does not compute it again
    return model, inputs


def _numbers(model: nn.Module, inputs: tuple) -> list[torch.Tensor]:
    with torch.no_grad():
        return as_numbers(model(*inputs))


def _prepared(model: nn.Module, inputs: tuple, **kwargs: Any) -> nn.Module:
    return prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None, **kwargs)


def _can_be_pickled(model: nn.Module) -> bool:
    try:
        pickle.dumps(model)
    except (AttributeError, RuntimeError, pickle.PicklingError):
        return False
    return True


@pytest.mark.parametrize("name", _sampled(0))
def test_two_prepares_agree_and_copies_run(name):
    model, inputs = _build(name)
    first = calibrate(_prepared(model, inputs), inputs)
    second = _prepared(model, inputs).eval()
    assert graph_text(first.graph) == graph_text(second.graph)
    second.load_state_dict(first.state_dict(), strict=True)
    set_fake_quantize(second, FakeQuantState.VALIDATION)
    wanted = _numbers(first, inputs)
    assert mismatches(_numbers(second, inputs), wanted) == 0
    assert mismatches(_numbers(copy.deepcopy(first), inputs), wanted) == 0
    if _can_be_pickled(model):  # some models hook themselves with functions that pickle does not know
        assert mismatches(_numbers(pickle.loads(pickle.dumps(first)), inputs), wanted) == 0


@pytest.mark.parametrize("name", _sampled(1))
def test_running_and_tracing_give_the_same_integers(name):
    model, inputs = _build(name)
    if name in FLOAT_OF_INDICES:
        with pytest.raises(ConversionError, match="Put a QuantStub where this tensor enters"):
            calibrate(_prepared(model, inputs, method="symbolic"), inputs)
        return
    refused = ""
    try:
        traced = calibrate(_prepared(model, inputs, method="symbolic"), inputs)
    except (TraceError, OperatorInputError) as error:
        refused = str(error)
    if refused:  # so is a tuple of tensors that a module takes as one argument
        assert re.search(r"symbolic trace cannot follow|got a tuple instead of a tensor", refused)
        assert name in NOT_TRACED or name in set(architectures.ARCHITECTURES) - TRACED, refused
        return
    by_running = calibrate(_prepared(model, inputs), inputs)
    assert mismatches(_numbers(traced, inputs), _numbers(by_running, inputs)) == 0


@pytest.mark.parametrize("name", [n for n in NAMES if n in torch_modules.MODULES])
def test_eager_gives_the_same_integers(name):
    model, inputs = _build(name)
    by_running = calibrate(_prepared(model, inputs, fuse_mode=FuseMode.NoFuse), inputs)
    model.qconfig = qconfig()
    eager = prepare(model, method="eager", out_dir=None)
    reason = dict.fromkeys(CALLS_FUNCTIONS, (NotImplementedError, "is not implemented for QTensor"))
    reason |= dict.fromkeys(FLOAT_BEFORE_STUB, (ConversionError, "Put a QuantStub where"))
    if name.partition("-")[0] in reason:
        error, text = reason[name.partition("-")[0]]
        with pytest.raises(error, match=text):
            calibrate(eager, inputs)(*inputs)
        return
    assert mismatches(_numbers(calibrate(eager, inputs), inputs), _numbers(by_running, inputs)) == 0
