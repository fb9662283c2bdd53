"""A forward may write into the containers that it is given: each run has its own, and the caller's stay as they are."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    auto_calibrate,
    calibrate,
    check_model,
    convert,
    prepare,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import run_onnx


@dataclass
class Data:
    x: Any


class Box(dict):
    """A dict of another class."""


class Net(nn.Module):
    """Reads and writes its input as the functions say."""

    def __init__(self, take: Callable[[Any], Tensor], put: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.fc, self.take, self.put = QuantStub(), DeQuantStub(), nn.Linear(4, 4), take, put

    def forward(self, data: Any) -> Tensor:
        x = self.quant(self.take(data))
        self.put(data, x)
        return self.dequant(self.fc(x))


def x() -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4)


WRITERS: dict[str, tuple[Callable[[], Any], Callable, Callable]] = {
    "dict": (lambda: {"x": x()}, lambda d: d["x"], lambda d, y: d.update(x=y)),
    "dict-popped": (lambda: {"x": x(), "id": 3}, lambda d: d.pop("x"), lambda d, y: d.clear()),
    "dict-grown": (lambda: {"x": x()}, lambda d: d["x"], lambda d, y: d.setdefault("feature", y)),
    "dict-in-dict": (lambda: {"a": {"x": x()}}, lambda d: d["a"]["x"], lambda d, y: d["a"].update(x=y)),
    "list": (lambda: [x()], lambda d: d[0], lambda d, y: d.append(y)),
    "list-popped": (lambda: [x(), 1], lambda d: d.pop(0), lambda d, y: d.clear()),
    "list-in-tuple": (lambda: ([x()], 1), lambda d: d[0].pop(), lambda d, y: d[0].append(y)),
    "dataclass": (lambda: Data(x()), lambda d: d.x, lambda d, y: setattr(d, "x", y)),
    "list-in-dataclass": (lambda: Data([x()]), lambda d: d.x.pop(), lambda d, y: d.x.append(y)),
    "namespace": (lambda: SimpleNamespace(x=x()), lambda d: d.x, lambda d, y: setattr(d, "x", y)),
    "own-dict": (lambda: Box(x=x()), lambda d: d["x"], lambda d, y: d.update(x=y)),
    "ordered": (lambda: collections.OrderedDict(x=x()), lambda d: d["x"], lambda d, y: d.update(x=y)),
    "default": (lambda: collections.defaultdict(list, x=x()), lambda d: d["x"], lambda d, y: d["more"].append(y)),
}


def _is_untouched(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return type(found) is Tensor and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(_is_untouched(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(_is_untouched, found, wanted))
    return _is_untouched(vars(found), vars(wanted)) if hasattr(wanted, "__dict__") else found == wanted


@pytest.mark.parametrize("name", WRITERS)
def test_what_the_caller_gives_stays_as_it_is(name: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    new, take, put = WRITERS[name]
    given, net = new(), Net(take, put).eval()
    model = prepare(net, (given,), default_calibration_qconfig_setter, out_dir=tmp_path)
    check_qat_model(model, (given,), save_results=False)
    calibrate(model, [(given,)] * 2, progress=False)
    auto_calibrate(model, [(given,)] * 2)
    converted = convert(model)
    file = export_quantized_onnx(converted, (given,), tmp_path / "model.onnx")
    assert _is_untouched(given, new())
    with torch.no_grad():
        wanted, found = net(new()), converted(new())
        assert torch.equal(model(new()), found) and (found - wanted).norm() < 0.05 * wanted.norm()
    assert torch.equal(run_onnx(file, [x()])[0], found)


class WritesByKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

    def forward(self, data: Any) -> Tensor:
        data["x"] = data["x"] * 2 - 1
        data["meta"] = None
        return self.dequant(self.fc(self.quant(data["x"])))


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
def test_a_converted_model_that_writes_by_key_is_checked_and_exported(method: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    given = {"x": x()}
    model = prepare(WritesByKey().eval(), (given,), default_calibration_qconfig_setter, method, out_dir=None)
    calibrate(model, [(given,)], progress=False)
    converted = convert(model)
    assert check_model(converted, (given,)) == 0
    file = export_quantized_onnx(converted, (given,), tmp_path / "model.onnx")
    assert _is_untouched(given, {"x": x()})
    with torch.no_grad():
        assert torch.equal(run_onnx(file, [x()])[0], converted({"x": x()}))
