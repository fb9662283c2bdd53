"""The last layer of a model hands out its accumulators, whatever does nothing between it and the DeQuantStub."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    fuse_modules,
    get_default_qat_qconfig,
    prepare,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import run_onnx


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


def _fused(model: nn.Module, fuse: Callable[..., Any]) -> nn.Module:
    pairs = [["first", "bn", "relu"], ["last", "bn2"]]
    is_for_training = fuse.__name__ == "fuse_modules_qat"
    return fuse(model.train(is_for_training), pairs, inplace=True).eval()


class _Ending(nn.Module):
    """Two layers, and what is between the last one and the DeQuantStub."""

    def __init__(self, ending: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.relu, self.ending = QuantStub(), DeQuantStub(), nn.ReLU(), ending
        self.first, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.last, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.first(self.quant(x))))
        return self.dequant(self.ending(self.bn2(self.last(x))))


# A deployed model has nothing for these.
NOTHINGS: dict[str, Callable[[], Callable]] = {
    "identity": nn.Identity,
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.1)),
    "alpha dropout": nn.AlphaDropout,
    "function": lambda: lambda x: nn.functional.dropout(x, 0.5, False),
    "contiguous": lambda: lambda x: x.contiguous().clone(),
    "detach": lambda: lambda x: x.detach(),
}
FUSED_BEFORE = {
    "ours": fuse_modules,
    "torch": torch.ao.quantization.fuse_modules,
    "torch, training": torch.ao.quantization.fuse_modules_qat,
}


@pytest.mark.in_turns("method", "fuse", of=2)
@pytest.mark.parametrize("method", [None, *PrepareMethod])
@pytest.mark.parametrize(
    ("fuse", "ending"), [*(("ours", name) for name in NOTHINGS), ("torch", "identity"), ("torch, training", "identity")]
)
def test_an_output_has_high_precision_through_what_does_nothing(
    method: PrepareMethod | None, fuse: str, ending: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 10, 10)
    model = _fused(_Ending(NOTHINGS[ending]()), FUSED_BEFORE[fuse])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "outputs that are not in high precision")
        if method is None:
            prepared = prepare_qat_fx(model, qconfig_setter=default_calibration_qconfig_setter)
        else:
            setter = default_calibration_qconfig_setter
            prepared = prepare(model, (x,), qconfig_setter=setter, method=method, out_dir=None)
    calibrate(prepared, [(x,)], progress=False)
    assert prepared.get_submodule("last").activation_post_process is None
    with torch.no_grad():
        got = prepared(x)
    assert got.unique().numel() > 256  # more than int8 has
    quantized = convert(prepared)
    assert torch.equal(quantized(x), got)
    file = export_quantized_onnx(quantized, (x,), tmp_path / "ending.onnx")
    assert torch.equal(run_onnx(file, [x])[0], got)


def test_what_moves_values_is_still_between_a_layer_and_its_output() -> None:
    with pytest.warns(QuantizationWarning, match=r"`last` \(flatten is between\)"):
        prepare_qat_fx(_Ending(lambda x: x.clone().flatten(1)), qconfig_setter=default_calibration_qconfig_setter)


@pytest.mark.parametrize("ending", NOTHINGS)
def test_the_check_asks_for_high_precision_through_what_does_nothing(ending: str) -> None:
    torch.manual_seed(0)
    model = _fused(_Ending(NOTHINGS[ending]()), fuse_modules)
    prepared = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        check_qat_model(prepared, (torch.randn(2, 3, 6, 6),), save_results=False)
    assert "high precision is possible: give this module" in printed.getvalue()
