"""How many values a model finds in its example inputs is no part of what is recorded, handed over or exported of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.nn.functional import rle
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    export_hbir,
    perf_model,
    visualize_model,
)
from horizon_plugin_pytorch.quantization.hbdk4 import export
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, mismatches, prepared

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
OTHERS = [X + 0.7, X - 0.2, torch.full_like(X, -1.0)]


class Finds(nn.Module):
    """What follows of the values of a quantized layer."""

    def __init__(self, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.quant, self.dequant, self.layer, self.after = QuantStub(), DeQuantStub(), nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.dequant(self.layer(self.quant(x))))


def _converted(after: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return convert_fx(prepared(Finds(after).eval(), (X,)))


ANY_COUNT: dict[str, Callable[[Tensor], Any]] = {
    "positions": lambda y: (y > 0).nonzero(),
    "mean of positions": lambda y: (y > 0).nonzero().float().mean(0),
    "chosen": lambda y: y[y > 0],
    "chosen rows": lambda y: y[y[:, 0] > 0],
    "chosen columns": lambda y: y[:, y[0] > 0].sum(1),
    "masked": lambda y: y.masked_select(y > 0).sum(),
    "distinct": lambda y: (y * 2).round().unique(),
    "counted": lambda y: torch.bincount((y > 0).long().flatten()).float().max(),
    "runs": lambda y: rle((y > 0).long()[None])[0].tile(1, 2),
    "a row of masked": lambda y: y.masked_select(y > 0).reshape(1, -1),
    "of a constant mask": lambda y: y[:, torch.tensor([True, False, True, True])].reshape(-1),
}
ONE_COUNT: dict[str, Callable[[Tensor], Any]] = {
    "divided": lambda y: (y > 0).nonzero().float().sum(0) / (y > 0).nonzero().shape[0],
    "numbered": lambda y: torch.arange((y > 0).nonzero().shape[0]) + (y > 0).nonzero()[:, 0],
    "counts": lambda y: [y, (y > 0).nonzero().shape[0]],
    "mean of chosen": lambda y: y[y > 0].sum() / y[y > 0].numel(),
    "masked": lambda y: y.masked_select(y > 0).sum() / y.masked_select(y > 0).numel(),
    "distinct": lambda y: y.sum() / (y * 2).round().unique().shape[0],
    "repeated": lambda y: y.sum() / torch.repeat_interleave((y[0] > 0).long()).shape[0],
    "runs": lambda y: y / rle((y > 0).long()[None])[0].shape[0],
}


@pytest.mark.parametrize("after", ANY_COUNT)
def test_a_program_holds_for_any_count(after: str) -> None:
    quantized = _converted(ANY_COUNT[after])
    program = record_program(quantized, X)
    for x in OTHERS:
        found, wanted = as_numbers(program(x)), as_numbers(quantized(x))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("after", ONE_COUNT)
def test_a_count_of_the_example_is_refused_with_its_line(after: str) -> None:
    line = "" if after == "counts" else r"test_open_sizes.py:\d+.*"  # it is no operator that has it
    with pytest.raises(ExportError, match=line + "how many values there are depends on the numbers"):
        record_program(_converted(ONE_COUNT[after]), X)


EXPORTS: dict[str, Callable[[nn.Module], Any]] = {
    "export_hbir": lambda model: export_hbir(model, (X,), "model.onnx"),
    "hbdk4.export": lambda model: export(model, (X,)),
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "onnx": lambda model: export_quantized_onnx(model, (X,), io.BytesIO()),
    "fast": lambda model: export_quantized_onnx(model, (X,), io.BytesIO(), fast=True),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_no_export_has_the_count(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match=r"test_open_sizes.py:\d+.*how many values there are depends"):
        EXPORTS[name](_converted(ONE_COUNT["divided"]))
    assert list(tmp_path.iterdir()) == []


def test_who_only_looks_at_a_model_takes_it(tmp_path: Any) -> None:
    quantized = _converted(ONE_COUNT["divided"])
    perf_model(quantized, (X,), out_dir=tmp_path)
    visualize_model(quantized, (X,), save_path=tmp_path / "model.svg")


@pytest.mark.parametrize("after", ["positions", "runs", "chosen"])
def test_torch_exports_an_open_count(after: str) -> None:
    quantized = _converted(ANY_COUNT[after])
    exported = torch.export.export(quantized, (X,)).module()
    for x in OTHERS:
        assert mismatches(as_numbers(exported(x)), as_numbers(quantized(x))) == 0


def test_a_model_that_knows_the_count_is_warned_of() -> None:
    def both(y: Tensor) -> Tensor:
        return torch.cat([(y > 0).nonzero()[:, 0], (y <= 0).nonzero()[:, 0]]).float() + y.flatten()

    with pytest.warns(QuantizationWarning, match="does not run with another count"):
        record_program(_converted(both), X)
