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

from horizon_plugin_pytorch.errors import HorizonError
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


class Written(nn.Module):
    """Writes into its input what is quantized, and reads it back."""

    def __init__(self, write: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.write = QuantStub(), DeQuantStub(), write
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, data: Any) -> Tensor:
        x = data["x"] if isinstance(data, dict) else data[0]
        return self.dequant(self.second(self.write(data, self.first(self.quant(x)))))


def _set(d: Any, y: Tensor) -> Tensor:
    d["feature"] = y
    return d["feature"]


def _replace(d: Any, y: Tensor) -> Tensor:
    d["x"] = y
    return d["x"]


def _default(d: Any, y: Tensor) -> Tensor:
    assert d.setdefault("x", None) is not None
    return d.setdefault("feature", y)


def _pop(d: Any, y: Tensor) -> Tensor:
    d.pop("x")
    assert "x" not in d and d.pop("nothing", None) is None and len(d) == 1
    return y


def _update(d: Any, y: Tensor) -> Tensor:
    d.update({"feature": y}, more=y)
    return d["feature"] + d["more"]


def _delete(d: Any, y: Tensor) -> Tensor:
    d["feature"] = y
    del d["x"]
    return sum(value for key, value in d.items() if key != "a")  # type: ignore[return-value]


def _nested(d: Any, y: Tensor) -> Tensor:
    d["a"]["feature"] = y
    d["a"]["b"] = {"y": y}
    return d["a"]["feature"] + d["a"]["b"]["y"]


def _clear(d: Any, y: Tensor) -> Tensor:
    d.clear()
    return y if not d else y + y


def _merge(d: Any, y: Tensor) -> Tensor:
    d |= {"feature": y}
    return {**d}["feature"]


def _append(d: Any, y: Tensor) -> Tensor:
    d.append(y)
    assert len(d) == 2
    return d[-1]


def _insert(d: Any, y: Tensor) -> Tensor:
    d.insert(0, y)
    d[0] = d[0] + y
    return d[0]


def _extend(d: Any, y: Tensor) -> Tensor:
    d.extend([y, y])
    d += [y]
    d.pop()
    return torch.cat(d[1:], 1)[:, :4]


def _delete_first(d: Any, y: Tensor) -> Tensor:
    d.append(y)
    del d[0]
    d.reverse()
    return d[0]


ROUND_TRIPS = {
    _set: dict, _replace: dict, _default: dict, _pop: dict, _update: dict, _delete: dict, _nested: dict,
    _clear: dict, _merge: dict, _append: list, _insert: list, _extend: list, _delete_first: list,
}  # fmt: skip


def _new(kind: type) -> Any:
    return {"x": x(), "a": {"id": 3}} if kind is dict else [x()]


def _layout(value: Any) -> Any:
    """What a caller sees in a container, up to rounding."""
    if isinstance(value, dict):
        return {key: _layout(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_layout(item) for item in value]
    return (value.dequantize() if hasattr(value, "dequantize") else value).shape if isinstance(value, Tensor) else value


@pytest.mark.in_turns("method", "write")
@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize("write", ROUND_TRIPS, ids=lambda write: write.__name__)
def test_what_is_written_is_read_and_the_caller_sees_it(write: Callable, method: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    kind, net = ROUND_TRIPS[write], Written(write).eval()
    model = prepare(net, (_new(kind),), default_calibration_qconfig_setter, method, out_dir=None)
    calibrate(model, [(_new(kind),)] * 2, progress=False)
    converted = convert(model)
    given, seen, in_float = _new(kind), _new(kind), _new(kind)
    with torch.no_grad():
        wanted, found = net(in_float), converted(given)
        assert torch.equal(model(seen), found) and (found - wanted).norm() < 0.05 * wanted.norm()
    assert _layout(given) == _layout(seen) == _layout(in_float)
    file = export_quantized_onnx(converted, (_new(kind),), tmp_path / "model.onnx")
    assert torch.equal(run_onnx(file, [x()])[0], found)


class WritesUnknown(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc, self.write = QuantStub(), DeQuantStub(), nn.Linear(4, 4), write

    def forward(self, data: Any) -> Tensor:
        y = self.fc(self.quant(data["x"]))
        return self.dequant(y + self.write(data, y))


def _items(d: Any, y: Tensor) -> Tensor:
    return sum(value for _, value in d.items())  # type: ignore[return-value]


def _write_nested(d: Any, y: Tensor) -> Tensor:
    d["a"]["feature"] = y
    return d["a"]["feature"]


@pytest.mark.parametrize(
    "write", [_default, _update, _delete, _nested, _write_nested, _clear, _append, _extend, _items]
)
def test_without_example_inputs_tracing_says_to_give_them(write: Callable) -> None:
    set_march(March.NASH_M)
    with pytest.raises(HorizonError, match=r"test_inputs_that_are_written.py:\d+.*example_inputs"):
        prepare(WritesUnknown(write).eval(), None, default_calibration_qconfig_setter, "symbolic", out_dir=None)


class PopsUnread(nn.Module):
    """What it takes away is read by nobody but the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

    def forward(self, data: Any) -> Tensor:
        data.pop("meta")
        return self.dequant(self.fc(self.quant(data["x"])))


@pytest.mark.parametrize("has_example", [True, False])
def test_what_is_taken_away_unread_is_gone(has_example: bool) -> None:
    set_march(March.NASH_M)
    example = ({"x": x(), "meta": 1},) if has_example else None
    model = prepare(PopsUnread().eval(), example, default_calibration_qconfig_setter, "symbolic", out_dir=None)
    given = {"x": x(), "meta": 1}
    model(given)
    assert list(given) == ["x"]
