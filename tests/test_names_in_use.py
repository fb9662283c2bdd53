"""Names that public code imports from the vendor's package: those that there are, and those that are refused."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch import quantization
from horizon_plugin_pytorch.nn.qat.stubs import QuantStub, _WrappedCalibFakeQuantize
from horizon_plugin_pytorch.quantization import fake_quantize, get_default_qconfig, prepare_qat_fx, qconfig
from horizon_plugin_pytorch.quantization.quantize_fx import QuantizationTracer

REFUSED = {
    "compile_model": (quantization.compile_model, "vendor's compiler.*export_hbir"),
    "batched_nms_with_padding": (horizon.functional.batched_nms_with_padding, "batched_nms"),
    "multi_tensor_legacynadamex": (horizon.multi_tensor_legacynadamex, "torch.optim.NAdam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_the_call_by_a_sentence(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises((NotImplementedError, RuntimeError), match=message) as raised:
        function(nn.ReLU(), torch.zeros(1), "file")
    assert str(raised.value).startswith(name)
    assert inspect.getdoc(function)


def test_readers_of_record_files_say_what_they_were() -> None:
    for _ in range(2):  # a failed import is not remembered
        with pytest.raises(ImportError, match=r"MXNet's record files.*mxnet\.recordio"):
            importlib.import_module("horizon_plugin_pytorch.utils.mxrecordio")


MISSING = [
    "utils.mxrecordio", "prune",
    "utils.auto_cast", "quantization.fx.fusion_patterns",
]  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_in_the_docs(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    table = page[page.index("What is not there:") : page.index("## Stricter")]
    assert f"`{name}`" in table
    with pytest.raises(ImportError):
        importlib.import_module(f"horizon_plugin_pytorch.{name}")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_in_the_docs(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    assert f"{name}`" in page[page.index("What is not there:") : page.index("## Stricter")]


def test_second_paths_give_the_same_thing() -> None:
    assert horizon.qconfig.default_calib_8bit_fake_quant_qconfig is qconfig.default_calib_8bit_fake_quant_qconfig
    path = importlib.import_module("horizon_plugin_pytorch.qconfig")
    names = [name for name in vars(qconfig) if name.startswith(("default_", "get_")) and name.endswith("qconfig")]
    assert all(getattr(path, name) is getattr(qconfig, name) for name in names)
    assert quantization.per_channel_qat_8bit_qconfig() is qconfig.default_qat_8bit_fake_quant_qconfig
    parameters = (
        inspect.signature(f).parameters for f in (quantization.mix_calibration, quantization.weight_reconstruction)
    )
    assert list(next(parameters)) == list(next(parameters))


def test_mix_calibration_is_weight_reconstruction(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = importlib.import_module("horizon_plugin_pytorch.calibration.weight_reconstruction")
    monkeypatch.setattr(module, "weight_reconstruction", lambda *args: seen.append(args))
    quantization.mix_calibration("model", "batches", custom_config_dict={"num_steps": 1})
    assert seen == [("model", "batches", None, {"num_steps": 1})]


def test_the_first_generations_quantizer_counts_what_it_sees() -> None:
    quantizer = fake_quantize.CalibFakeQuantize(dtype="qint16", averaging_constant=0.5)
    quantizer(torch.linspace(-1, 2, 100))
    assert str(quantizer.dtype) == "qint16" and quantizer.activation_post_process.sketch.total == 100


def test_the_stub_after_an_operator_of_the_cpu_has_the_name_that_the_guide_prints() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.PReLU(), nn.Conv2d(1, 1, 1))
    model = prepare_qat_fx(quantization.QuantWrapper(net), {"": get_default_qconfig()}, hybrid=True)
    stubs = [m for name, m in model.named_children() if name.endswith("_activation_post_process")]
    assert [type(stub) for stub in stubs] == [_WrappedCalibFakeQuantize] and isinstance(stubs[0], QuantStub)
    shown = repr(stubs[0]).splitlines()
    assert shown[0] == "_WrappedCalibFakeQuantize(" and shown[1] == "  (activation_post_process): FakeQuantize("
    assert type(model.quant) is QuantStub


def test_fake_quantizers_are_where_the_documents_list_them() -> None:
    for name in ("_LearnableFakeQuantize", "PACTFakeQuantize", "_WrappedCalibFakeQuantize", "CalibFakeQuantize"):
        assert getattr(fake_quantize, name) is getattr(quantization, name)


def test_the_tracer_takes_what_torchs_takes() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + 1

    net = nn.Sequential(Block(), Block())
    counts = {
        arguments: [node.op for node in QuantizationTracer(*arguments).trace(net).nodes].count("call_module")
        for arguments in ((), ((), ()), (("1",), ()), ((), (Block,)))
    }
    assert list(counts.values()) == [0, 0, 1, 2]
