"""Files for other batch sizes than the example's: the same proof as for one size."""

from __future__ import annotations

import io
import sys
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    calibrate,
    convert,
    convert_fx,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.runtime.arguments import argument_names, data_arguments, positional_arguments
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.models import ZOO, make
from tests.operators.cases import CASES
from tests.operators.cases.base import Body, bench
from tests.routes import as_numbers, mismatches, prepared, run_onnx

BATCH = {0: "batch"}


def _batches(inputs: tuple[Tensor, ...], size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, *x.shape[1:], generator=generator) for x in inputs]


def _axes(inputs: Any) -> dict[str, Any]:
    return {"input": BATCH} if len(inputs) == 1 else {f"input_{i}": BATCH for i in range(len(inputs))}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name != "surrounded"])  # its float code is not exact
def test_one_file_for_every_batch_size_gives_the_same_integers(name: str) -> None:
    model, inputs = make(name)
    inputs = tuple(x.repeat(2 // x.shape[0], *[1] * (x.dim() - 1)) for x in inputs)
    quantized = convert_fx(prepared(model, inputs))
    file = export_quantized_onnx(quantized, inputs, io.BytesIO(), dynamic_axes=_axes(inputs))
    assert all(x.type.tensor_type.shape.dim[0].dim_param == "batch" for x in file.graph.input)
    onnx.checker.check_model(file, full_check=True)
    for size in (1, 4, 7):
        batch = _batches(inputs, size)
        with torch.no_grad():
            wanted = as_numbers(quantized(*batch))
        for optimization in ("off", "on"):
            assert mismatches(run_onnx(file, batch, optimization), wanted) == 0


@pytest.mark.slow
@pytest.mark.parametrize("opset", [11, 21])
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_float_and_qat_models_too(name: str, opset: int) -> None:
    model, inputs = make(name)
    axes = {"input": [0]}
    floats = export_to_onnx(model.eval(), inputs, io.BytesIO(), opset_version=opset, dynamic_axes=axes)
    for size in (1, 3, 6):
        batch = _batches(inputs, size)
        with torch.no_grad():
            torch.testing.assert_close(run_onnx(floats, batch)[0], model(*batch), rtol=1e-4, atol=1e-5)
    qat = prepared(model, inputs)
    set_fake_quantize(qat, FakeQuantState.QAT)
    file = export_to_onnx(qat, inputs, io.BytesIO(), opset_version=opset, dynamic_axes=axes)
    for size in (1, 3, 6):
        batch = _batches(inputs, size)
        with torch.no_grad():
            wanted = qat(*batch)
        step = float(wanted.abs().max()) / 100
        assert (run_onnx(file, batch)[0] - wanted).abs().max() <= step


BATCHED = [
    case for case in CASES if len({shape[:1] for shape in case.shapes}) == 1 and case.shapes[0] and case.others is None
][::30]


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_operators_at_other_batch_sizes(case: Any) -> None:
    inputs = case.inputs()
    quantized = convert_fx(prepared(case.model(), inputs, case.formats[0]))
    try:
        file = export_quantized_onnx(quantized, inputs, io.BytesIO(), dynamic_axes=_axes(inputs))
    except ExportError as error:
        message = str(error)
    else:
        message = ""
    if message:  # it depends on the size, and says where
        assert "at `body" in message or "does not run with" in message or "`squeeze()` drops every axis" in message
        return
    # Along the time axis a loop after the first step has none at size 1, which ONNX Runtime refuses (docs/export.md).
    has_loop = any(node.op_type == "Scan" for node in file.graph.node)
    for size in (2 if has_loop else 1, 6):
        batch = _batches(inputs, size)
        with torch.no_grad():
            wanted = as_numbers(quantized(*batch))
        assert mismatches(run_onnx(file, batch), wanted) == 0


def _exported(function: Any, inputs: tuple[Tensor, ...], axes: Any) -> tuple[nn.Module, onnx.ModelProto]:
    quantized = convert_fx(prepared(bench(Body(function), len(inputs)), inputs))
    return quantized, export_quantized_onnx(quantized, inputs, io.BytesIO(), dynamic_axes=axes)


X = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(x.shape[0] * 2, 3, 16).flatten(1),
        lambda x: x.expand(x.shape[0], 6, 4, 4) + x[:1].expand(x.shape[0], 6, 4, 4),
        lambda x: x[torch.arange(x.shape[0]), 1],
        lambda x: x + torch.zeros(x.shape[0], 6, 4, 4),
        lambda x: torch.cat([x, x[: x.shape[0] - 1]]),
        lambda x: x.unflatten(1, (2, 3)).transpose(0, 1).reshape(2, -1, 3, 16),
        lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    ],
    ids=["reshape", "expand", "positions", "zeros", "slice", "open", "grid"],
)
def test_sizes_that_the_model_reads_follow_the_batch(function: Any) -> None:
    quantized, file = _exported(function, (X,), {"input": BATCH})
    for size in (2, 3, 8):
        batch = _batches((X,), size)
        with torch.no_grad():
            assert mismatches(run_onnx(file, batch), as_numbers(quantized(*batch))) == 0


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dequant(self.quant(x))
        return torch.stack([x[i] * i for i in range(x.shape[0])])


class Weighs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / x.shape[0])


@pytest.mark.parametrize("model", [Loops(), Weighs()], ids=["loop", "number"])
def test_a_size_that_is_baked_in_is_refused_with_its_line(model: nn.Module) -> None:
    with pytest.raises(ExportError, match=r"\(test_dynamic_axes.py:\d+\).*(loop over an axis|cannot compute)"):
        export_to_onnx(model, X, io.BytesIO(), dynamic_axes={"input": BATCH})


class Sums(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


def test_names_of_axes() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    named = {"input_0": BATCH, "input_1": {0: "batch", 1: "width"}}
    with pytest.raises(ExportError, match="does not run with.*need one name"):
        export_to_onnx(Sums(), (a, b), io.BytesIO(), dynamic_axes=named)
    named["input_0"] = {0: "batch", 1: "width"}
    file = export_to_onnx(Sums(), (a, b), io.BytesIO(), dynamic_axes={**named, "output": BATCH})
    assert [d.dim_param for d in file.graph.output[0].type.tensor_type.shape.dim] == ["batch", "width"]
    with pytest.raises(ExportError, match="has 2 axes, and none is 5"):
        export_to_onnx(Sums(), (a, b), io.BytesIO(), dynamic_axes={"input_0": [5]})
    with pytest.raises(ExportError, match="there is no input 'image'"):
        export_to_onnx(Sums(), (a, b), io.BytesIO(), dynamic_axes={"image": [0]}, output_names=["sum"])


def _converted(model: nn.Module, example: Any, batch: Any) -> nn.Module:
    """A model that was prepared with an example, and has seen a batch."""
    qat = prepare(model.eval(), example, default_calibration_qconfig_setter, out_dir=None)
    calibrate(qat, [batch], progress=False)
    return convert(qat)


class _Positions(nn.Module):
    """It adds positions along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.fc(self.quant(x)) + torch.arange(x.shape[1])[None, :, None].float())


@pytest.mark.parametrize("steps", [1, 2])
def test_an_open_length_whose_example_has_one_step(steps: int) -> None:
    x, longer = torch.randn(2, steps, 4), torch.randn(2, 7, 4)
    quantized = _converted(_Positions(), x, longer)
    file = export_quantized_onnx(quantized, (x,), io.BytesIO(), dynamic_axes={"input": {1: "time"}})
    with torch.no_grad():
        assert mismatches(run_onnx(file, [longer]), as_numbers(quantized(longer))) == 0


class _OneLine(nn.Module):
    """A convolution, and what a function does with its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(x))
        return self.dequant(self.function(y))


def _doubled_at(axis: int) -> Any:
    return lambda y: y + y if y.shape[axis] == 1 else y


def _swapped(y: Tensor) -> Tensor:
    a, b = y[:, :2], y[:, 2:]
    left, right = (a, b) if y.shape[2] == 1 else (b, a)
    return left - right


def _in_one_and_the_other(y: Tensor) -> Tensor:
    return y + y if y.shape[0] == y.shape[2] == 1 else y


AT_ONE = {
    "branch": (_doubled_at(2), {2: "h"}, r"of `add` depends|constant of `Mul` depends"),
    "branch on a batch": (_doubled_at(0), {0: "n"}, "With n=1 .* is another one than the file's"),
    "other order": (_swapped, {2: "h"}, "other operators .*With h=1 .* is another one than the file's"),
    "squeeze of an axis": (lambda y: y.squeeze(2), {2: "h"}, r"with h=1 .* other axes .*`squeeze\(\)` drops"),
    "squeeze": (lambda y: y.squeeze(), {2: "h"}, r"with h=1 .* other axes .*`squeeze\(\)` drops"),
    "both": (_in_one_and_the_other, {0: "n", 2: "h"}, "With n=1, h=1 .* is another one than the file's"),
}


@pytest.mark.parametrize("name", AT_ONE)
@pytest.mark.parametrize("is_zero", [False, True], ids=["data", "zeros"])
def test_what_the_model_does_at_size_one_only_is_refused(name: str, is_zero: bool) -> None:
    function, axes, message = AT_ONE[name]
    x = torch.randn(1 if 0 in axes else 2, 4, 1, 8)
    quantized = _converted(_OneLine(function), x, torch.cat([x, -x], 2) if len(axes) == 1 else x)
    given = torch.zeros_like(x) if is_zero else x
    with pytest.raises(ExportError, match=message):
        export_quantized_onnx(quantized, (given,), io.BytesIO(), dynamic_axes={"input": axes})


FOR_ALL = {
    "convolution and sum": lambda y: y + y,
    "an axis of channels": lambda y: y.unsqueeze(1).squeeze(1),
    "mean": lambda y: y.mean(2, keepdim=True),
    "pool": lambda y: F.adaptive_avg_pool2d(y, 1),
    "flat": lambda y: y.flatten(1, 2),
    "softmax": lambda y: torch.softmax(y.flatten(2), 1),
    "product": lambda y: y.flatten(2) @ y.flatten(2).transpose(1, 2),
    "expanded": lambda y: y[:, :, :1].expand(-1, -1, y.shape[2], -1) + y,
}


OF_A_COUNT = ("mean", "pool")  # how many numbers there are is in their factor


@pytest.mark.parametrize(("name", "axis"), [(name, 0) for name in FOR_ALL] + [(name, 2) for name in FOR_ALL
                                            if name not in OF_A_COUNT])  # fmt: skip
def test_an_open_axis_of_size_one_is_taken(name: str, axis: int) -> None:
    x = torch.randn(1, 4, 1, 8)
    quantized = _converted(_OneLine(FOR_ALL[name]), x, x)
    file = export_quantized_onnx(quantized, (x,), io.BytesIO(), dynamic_axes={"input": {axis: "n"}})
    for size in (1, 2, 5):
        shape = [size if i == axis else n for i, n in enumerate(x.shape)]
        batch = torch.randn(shape)
        with torch.no_grad():
            assert mismatches(run_onnx(file, [batch]), as_numbers(quantized(batch))) == 0


class _Unwritable(nn.Module):
    """One sample has no ONNX form."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.pinv(x) if x.shape[0] == 1 else x


def test_what_cannot_be_written_at_size_one_is_refused() -> None:
    with pytest.raises(ExportError, match="with batch=1 the model cannot be written.*no ONNX form"):
        export_to_onnx(_Unwritable(), torch.randn(2, 4), io.BytesIO(), dynamic_axes={"input": BATCH})


def test_sizes_that_grow_in_steps_are_left_open() -> None:
    x = torch.randn(2, 4, 8)
    file = export_to_onnx(nn.MaxPool1d(2), x, io.BytesIO(), dynamic_axes={"input": {2: "w"}})
    for size in (2, 5, 8):
        batch = torch.randn(2, 4, size)
        assert torch.equal(run_onnx(file, [batch])[0], F.max_pool1d(batch, 2))


class _NeedsTwo(nn.Module):
    """It takes two steps or more."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] > 1, "two steps or more"
        return x[:, 1:] - x[:, :-1]


def test_a_model_that_does_not_run_at_size_one_is_written_for_more() -> None:
    x = torch.randn(2, 3, 4)
    file = export_to_onnx(_NeedsTwo(), x, io.BytesIO(), dynamic_axes={"input": {1: "time"}})
    assert torch.equal(run_onnx(file, [x])[0], x[:, 1:] - x[:, :-1])


def test_without_onnx_runtime_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _OneLine(_doubled_at(0))
    x = torch.randn(1, 4, 2, 8)
    quantized = _converted(model, x, x)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.warns(QuantizationWarning, match="with n=1 the model runs other operators"):
        export_quantized_onnx(quantized, (x,), io.BytesIO(), dynamic_axes={"input": {0: "n"}})


def _crossed(x: Tensor) -> Tensor:
    a, b = x.relu(), x.sigmoid()
    return a - b if x.shape[0] % 2 else b - a


def test_the_same_operators_on_other_values_are_refused() -> None:
    class Crossed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _crossed(x)

    with pytest.raises(ExportError, match="runs other operators at other sizes"):
        export_to_onnx(Crossed(), torch.randn(2, 4), io.BytesIO(), dynamic_axes={"input": BATCH})


class _Weighted(nn.Module):
    """Its weight may be given, and may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.second, self.third = QuantStub(), QuantStub(), QuantStub()
        self.dequant, self.fc = DeQuantStub(), nn.Linear(4, 4)

    def forward(self, x: Tensor, w: Tensor = torch.ones(4) * 3, y: Tensor | None = None) -> Tensor:  # noqa: B008
        out = self.fc(self.quant(x)) * self.second(w)
        return self.dequant(out if y is None else out + self.third(y))


@pytest.mark.parametrize("axes", [None, {"x": BATCH, "y": BATCH}], ids=["fixed", "open"])
@pytest.mark.parametrize("is_fast", [False, True], ids=["exact", "fast"])
def test_a_default_that_is_a_tensor_is_a_constant(axes: Any, is_fast: bool) -> None:
    given = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    quantized = _converted(_Weighted(), given, given)
    args = positional_arguments(quantized, given)
    assert len(args) == 3 and [x is y for x, y in zip(tensors_of(args), given.values(), strict=True)] == [True, True]
    program = record_program(quantized, given)
    assert program.input_paths == (("x",), ("y",))
    with torch.no_grad():
        wanted = as_numbers(quantized(**given))
    assert mismatches(as_numbers(program(*data_arguments(quantized, given))), wanted) == 0
    written = io.BytesIO()
    export_quantized_onnx(quantized, given, written, dynamic_axes=axes, fast=is_fast)
    file = onnx.load_from_string(written.getvalue())
    assert [x.name for x in file.graph.input] == ["x", "y"]
    if not is_fast:
        assert mismatches(run_onnx(file, list(given.values())), wanted) == 0


def test_an_argument_that_is_left_out_between_two_others_has_its_default() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.state, self.dequant, self.fc = QuantStub(), QuantStub(), DeQuantStub(), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None = None, h: Tensor | None = None, gain: float = 1.0) -> Tensor:
            y = self.fc(self.quant(x))
            return self.dequant(y if h is None else y + self.state(h))

    given = {"x": torch.randn(2, 4), "h": torch.randn(2, 4)}
    assert argument_names(Optional(), given) == ["x", "mask", "h"]
    quantized = _converted(Optional(), given, given)
    file = export_quantized_onnx(quantized, given, io.BytesIO())
    assert [x.name for x in file.graph.input] == ["x", "h"]
    with torch.no_grad():
        assert mismatches(run_onnx(file, list(given.values())), as_numbers(quantized(**given))) == 0


@pytest.mark.parametrize("shape", [(2, 6, 16), (1, 6, 16), (2, 1, 16), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("name", ["squeeze", "branch"])
def test_axes_that_are_of_size_one_together_are_compared(name: str, shape: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if name == "squeeze":
                return x.flatten(0, 1).squeeze().mean(-1)
            return x * 2 if x.shape[0] * x.shape[1] > 1 else x * 3

    with pytest.raises(ExportError, match=r"[wW]ith b=1, t=1"):
        export_to_onnx(Net(), torch.randn(shape), io.BytesIO(), input_names=["x"], dynamic_axes={"x": {0: "b", 1: "t"}})
