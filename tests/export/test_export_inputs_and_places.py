"""What export refuses, with the input, module and line that it is about; and paddings that optimizers must not move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    convert,
    get_default_qconfig,
    prepare,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.routes import calibrate, qconfig

METHODS = [PrepareMethod.SYMBOLIC, PrepareMethod.JIT, PrepareMethod.JIT_STRIP]


class Net(nn.Module):
    """A function of a quantized input, and one of its float result."""

    def __init__(self, function: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.quant, self.dequant, self.block = QuantStub(), DeQuantStub(), Block(function)
        self.after = Block(after) if after is not None else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.after(self.dequant(self.block(self.quant(x))))


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


def _converted(net: nn.Module, x: Tensor, method: PrepareMethod = PrepareMethod.JIT_STRIP) -> nn.Module:
    qat = prepare(net.eval(), (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    return convert(calibrate(qat, (x,)))


LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]


def _sessions(file: Path) -> list[ort.InferenceSession]:
    found = []
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        found.append(ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]))
    return found


PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: F.pad(x, (1, 1, 1, 1)),
    "one side": lambda x: F.pad(x, (0, 1, 2, 0)),
    "a value": lambda x: F.pad(x, (1, 1, 1, 1), value=-1.0),
    "edge": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)),
    "crop": lambda x: F.pad(x, (-1, 1, 1, -1)),
}
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 1),
    "max with padding": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average": lambda x: F.avg_pool2d(x, 3, 1),
    "average with padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "max of max": lambda x: F.max_pool2d(F.max_pool2d(x, 2, 1), 2, 1),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 2),
    "relu, max": lambda x: F.max_pool2d(x.relu(), 3, 1),
    "pad, max": lambda x: F.max_pool2d(F.pad(x, (1, 0, 1, 0)), 2, 1),
}


@pytest.mark.in_turns("after", "pad", of=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("pad", PADS)
def test_a_padding_means_the_same_at_every_level_of_optimization(pad: str, after: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 6) - 2  # zeros are the largest values
    net = Net(lambda t: AFTER[after](PADS[pad](t)))
    quantized = _converted(net, x)
    export_quantized_onnx(quantized, x, tmp_path / "m.onnx")
    for session in _sessions(tmp_path / "m.onnx"):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.array_equal(found, quantized(x).numpy())


@pytest.mark.parametrize("pad", [name for name in PADS if name != "channels"])
def test_a_padding_before_a_convolution_means_the_same(pad: str, tmp_path: Path) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(PADS[pad](self.quant(x))))

    x = torch.randn(1, 2, 6, 6) - 2
    quantized = _converted(Padded(), x)
    export_quantized_onnx(quantized, x, tmp_path / "m.onnx")
    for session in _sessions(tmp_path / "m.onnx"):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.array_equal(found, quantized(x).numpy())


@pytest.mark.parametrize("pool", ["max", "average"])
def test_a_float_padding_means_the_same_too(pool: str, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 6, 6) - 2
    kernel = F.max_pool2d if pool == "max" else F.avg_pool2d
    quantized = _converted(Net(lambda t: t.neg(), lambda t: kernel(F.pad(-t, (1, 1, 1, 1)), 3, 1)), x)
    export_quantized_onnx(quantized, x, tmp_path / "m.onnx")
    for session in _sessions(tmp_path / "m.onnx"):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.allclose(found, quantized(x).numpy(), atol=1e-6)


TYPES = [torch.float32, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
         torch.bool]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_inputs_of_these_types_are_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    quantized = _converted(Net(lambda t: t.relu()), x)
    export_quantized_onnx(quantized, x.to(dtype), tmp_path / "m.onnx")
    session = _sessions(tmp_path / "m.onnx")[-1]
    (found,) = session.run(None, {session.get_inputs()[0].name: x.to(dtype).numpy()})
    assert np.array_equal(found, quantized(x.to(dtype)).numpy())


BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "bfloat16": (
        lambda x: x.bfloat16(),
        r"input 'image' is a tensor of torch.bfloat16.*expected float32.*x\.float\(\)",
    ),
    "complex": (lambda x: x.to(torch.complex64), "input 'image' is a tensor of torch.complex64"),
    "uint16": (lambda x: x.abs().to(torch.uint16), "torch.uint16"),
    "sparse": (lambda x: x.to_sparse(), "input 'image' is a tensor of layout torch.sparse_coo"),
    "meta": (lambda x: x.to("meta"), "on the meta device"),
    "numpy": (lambda x: x.numpy(), r"argument 0 is a `numpy.ndarray`.*torch\.as_tensor"),
    "numpy in a list": (lambda x: [x.numpy()], "argument 0 is a `numpy.ndarray`"),
    "a number": (lambda x: 3, "no tensor among the example inputs"),
    "nothing": (lambda x: None, "no tensor among the example inputs"),
    "a string": (lambda x: "x", "no tensor among the example inputs"),
    "none at all": (lambda x: (), "no tensor among the example inputs"),
}


@pytest.mark.parametrize("kind", BAD)
def test_inputs_that_a_file_cannot_have_are_named(kind: str, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    quantized = _converted(Net(lambda t: t.relu()), x)
    make, message = BAD[kind]
    with pytest.raises(ExportError, match=message):
        export_quantized_onnx(quantized, make(x), tmp_path / "m.onnx", input_names=["image"])
    assert not (tmp_path / "m.onnx").exists()


def _only_two(x: Tensor) -> Tensor:
    if len(x) != 2:
        raise ValueError("two rows, please")
    return x + 1


def test_a_model_that_does_not_run_on_the_inputs_says_which_they_were(tmp_path: Path) -> None:
    quantized = _converted(Net(lambda t: t.relu(), _only_two), torch.rand(2, 8))
    with pytest.raises(ExportError, match=r"example inputs \(float32\[3, 8\]\): ValueError: two rows, please"):
        export_quantized_onnx(quantized, torch.rand(3, 8), tmp_path / "m.onnx")


def _erf(x: Tensor) -> Tensor:
    return torch.special.i0(x)  # the line of this is what errors name


FLOAT_CODE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an operator without a form": (_erf, "`aten::i0` has no ONNX form"),
    "an argument without one": (lambda x: torch.round(x, decimals=2), "round with decimals"),
    "division": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), "`//` of float numbers"),
    "a number": (lambda x: x * float(x.sum()), "reads a number out of a computed tensor"),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("kind", FLOAT_CODE)
def test_what_has_no_form_is_named_with_module_and_line(kind: str, method: PrepareMethod, tmp_path: Path) -> None:
    if kind == "a number" and method is PrepareMethod.SYMBOLIC:
        return  # symbolic trace refuses it
    function, message = FLOAT_CODE[kind]
    line = function.__code__.co_firstlineno + (function is _erf)
    quantized = _converted(Net(lambda t: t.relu(), function), torch.rand(2, 8), method)
    with pytest.raises(ExportError, match=message) as error:
        export_quantized_onnx(quantized, torch.rand(2, 8), tmp_path / "m.onnx")
    assert f"({Path(__file__).name}:{line})" in str(error.value)
    assert "at `after` (" in str(error.value)


def test_a_quantized_operator_without_a_form_is_named_with_module_and_line(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(1, 1, 40)
            nn.init.ones_(self.conv.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(self.quant(x)))

    x = torch.rand(1, 1, 41, 41)
    with pytest.raises(ExportError, match=r"at `conv` \(test_export_inputs_and_places.py:\d+\): a layer whose sums"):
        export_quantized_onnx(_converted(Large(), x), x, tmp_path / "m.onnx")


# -- products of any rank ----------------------------------------------------------------------------------------------
EQUATIONS = ["i,j->ij", "i,i->i", "i,j->ji", "ij,ij->ij", "ij,k->ijk", "ij,ik->ijk", "ij,jk->ik", "i,i->", "ij,j->i",
             "ij,ij->", "...i,...j->...ij", "ij,i->ij", "ij,i->ji"]  # fmt: skip


@pytest.mark.in_turns("method", "equation")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_as_outputs_of_a_model(equation: str, method: PrepareMethod, tmp_path: Path) -> None:
    """An output that is a matrix product leaves as real numbers, one where nothing is summed too."""
    torch.manual_seed(0)
    left, right = equation.split("->")[0].split(",")
    sizes = [len(side.replace("...", "b")) for side in (left, right)]

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.dequant(torch.einsum(equation, self.quant(a), self.other(b)))

    inputs = tuple(torch.randn([4] * n) for n in sizes)
    net = Products().eval()
    qat = prepare(net, inputs, default_calibration_qconfig_setter, method=method, out_dir=None)
    calibrate(qat, inputs)
    quantized = convert(qat)
    with torch.no_grad():
        found, wanted = qat(*inputs), net(*inputs)
        assert torch.equal(found, quantized(*inputs))
    assert float((found - wanted).norm()) <= 0.05 * float(wanted.norm())
    export_quantized_onnx(quantized, inputs, tmp_path / "m.onnx")
    for session in _sessions(tmp_path / "m.onnx"):
        feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
        assert np.array_equal(session.run(None, feed)[0], found.numpy())


def test_an_operator_without_a_high_precision_output_says_so_in_eager_mode() -> None:
    from horizon_plugin_pytorch.errors import HorizonError
    from horizon_plugin_pytorch.nn.quantized import FloatFunctional
    from horizon_plugin_pytorch.quantization import get_default_qat_out_qconfig, prepare_qat

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.add, self.dequant = QuantStub(), FloatFunctional(), DeQuantStub()
            self.qconfig, self.add.qconfig = get_default_qconfig(), get_default_qat_out_qconfig()

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.add.add(x, x))

    x = torch.randn(2, 3)
    with pytest.raises(HorizonError, match="without activation quantization"):
        calibrate(prepare_qat(Sum().eval()), (x,))(x)


def test_every_stage_is_exported_under_inference_mode(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    net = Net(F.relu, lambda y: F.conv2d(F.layer_norm(y, y.shape[-1:]), torch.ones(2, 3, 1, 1)))
    qat = prepare(net.eval(), (x,), qconfig_dict={"": qconfig()}, method=PrepareMethod.JIT_STRIP, out_dir=None)
    quantized = convert(calibrate(qat, (x,)))
    for export, model in ((export_to_onnx, net), (export_to_onnx, qat), (export_quantized_onnx, quantized)):
        with torch.no_grad():
            export(model, x, tmp_path / "a.onnx", opset_version=13)
        with torch.inference_mode():
            export(model, x + 0, tmp_path / "b.onnx", opset_version=13)
        assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "opset as text": ({"opset_version": "13"}, "whole number, got '13'"),
    "opset of a fast file": ({"opset_version": "13", "fast": True}, "whole number, got '13'"),
    "opset as float": ({"opset_version": 13.0}, "whole number, got 13.0"),
    "one text": ({"input_names": "image"}, "must be a list of names, got 'image'"),
    "a number": ({"input_names": [1]}, "input_names: 1 is no name"),
    "empty": ({"output_names": [""]}, "output_names: '' is no name"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_arguments_of_another_kind_are_named(kind: str, tmp_path: Path) -> None:
    options, message = WRONG[kind]
    x = torch.randn(1, 3, 6, 6)
    quantized = _converted(Net(F.relu), x)
    with pytest.raises(ExportError, match=message):
        export_quantized_onnx(quantized, x, tmp_path / "x.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_named_before_any_work(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 6, 6)
    with pytest.raises(TypeError, match="a path or a binary file object as `f`, got None"):
        export_to_onnx(nn.ReLU(), x, None)
    with (tmp_path / "text").open("w") as file, pytest.raises(TypeError, match="open it with mode 'wb'"):
        export_to_onnx(nn.ReLU(), x, file)


def test_scripts_are_written_or_told_how(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 6, 6)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).eval()
    script = torch.jit.trace(net, x)
    export_to_onnx(script, x, tmp_path / "float.onnx")
    for session in _sessions(tmp_path / "float.onnx"):
        (found,) = session.run(None, {"input": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), net(x).detach(), rtol=1e-5, atol=1e-6)
    traced = torch.jit.trace(_converted(Net(F.relu), x), x)
    with pytest.raises(ExportError, match="`Net` is a TorchScript module.*export_hbir"):
        export_quantized_onnx(traced, x, tmp_path / "x.onnx")
