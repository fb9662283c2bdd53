"""Numbers, sizes, axes and indices as real code writes them: of numpy, as enums, ranges, lists of slices."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import HorizonError, TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, prepare
from tests.routes import assert_one_arithmetic, calibrate, qconfig

I, F32, F64 = np.int64, np.float32, np.float64  # noqa: E741 - short, for the tables


class Axis(enum.IntEnum):
    CHANNEL = 1


class Gain(float, enum.Enum):
    HALF = 0.5


class Net(nn.Module):
    """QuantStub, a function of the model, DeQuantStub; its modules are made with numbers of numpy too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.function, self.ff = QuantStub(), DeQuantStub(), function, FloatFunctional()
        self.conv = nn.Conv2d(I(4), I(4), I(3), padding=I(1))
        self.pool, self.act, self.up = nn.AvgPool2d(I(2)), nn.LeakyReLU(F32(0.1)), nn.Upsample(scale_factor=F32(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        out = self.function(self, self.quant(x))
        return [self.dequant(y) for y in (out if isinstance(out, (tuple, list)) else [out])]


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, [I(0)]] = 0.5
    return y


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "number-first": lambda m, x: F32(2) * x,
    "number-second": lambda m, x: x * F64(2),
    "quotient": lambda m, x: x / np.sqrt(4.0),
    "difference": lambda m, x: F32(1) - x,
    "power": lambda m, x: x ** I(2),
    "integer": lambda m, x: np.int32(2) * x,
    "array-without-axes": lambda m, x: x * np.array(2.0, np.float32),
    "array": lambda m, x: x + np.full((8, 8), 0.5, np.float32),
    "array-of-doubles": lambda m, x: (x - np.linspace(0, 1, 8)) / np.full(8, 2.0),
    "comparison": lambda m, x: (x > F32(0)).float() * x,
    "comparison-first": lambda m, x: (F32(0) > x).float() * x,
    "where": lambda m, x: torch.where(x > F32(0), x, F32(0)),
    "alpha": lambda m, x: torch.add(x, x, alpha=F32(2)),
    "bool": lambda m, x: x * True,
    "enum": lambda m, x: x * Gain.HALF,
    "functional": lambda m, x: m.ff.add_scalar(m.ff.mul_scalar(x, F32(2)), F64(1)),
    "functional-mul": lambda m, x: m.ff.mul(x, F32(2)),
    "functional-mean": lambda m, x: m.ff.mean(x, I(1)),
    "size": lambda m, x: x / np.sqrt(x.shape[-1]) * np.log2(x.size(1)),
    "sizes": lambda m, x: x / np.sum(x.shape) + np.max(x.shape) * x - x / np.min(x.shape),
    "numpy-function": lambda m, x: np.sqrt(np.maximum(x, 0.1)),
    "modules": lambda m, x: m.up(m.act(m.conv(m.pool(x)))),
}
SHAPES: dict[str, Callable[..., Any]] = {
    "view": lambda m, x: x.view(I(2), -1),
    "view-of-product": lambda m, x: x.view(-1, np.prod(x.shape[1:])),
    "view-of-array": lambda m, x: x.view(*np.array([2, 256])),
    "view-of-size": lambda m, x: x.view(torch.Size([2, 256])),
    "view-of-tensors": lambda m, x: x.view(torch.tensor(2), torch.tensor(256)),
    "reshape": lambda m, x: x.reshape([np.int32(2), -1]),
    "interpolate": lambda m, x: F.interpolate(x, size=(I(16), I(16)), mode="bilinear", align_corners=False),
    "interpolate-tensors": lambda m, x: F.interpolate(x, size=(torch.tensor(4), torch.tensor(4))),
    "interpolate-factor": lambda m, x: F.interpolate(x, scale_factor=F32(2)),
    "pad": lambda m, x: F.pad(x, [*np.array([1, 1])], value=F32(1)),
    "permute": lambda m, x: x.permute(*np.array([0, 2, 3, 1])),
    "mean": lambda m, x: x.mean(tuple(np.array([2, 3]))),
    "mean-of-enum": lambda m, x: x.mean(Axis.CHANNEL),
    "softmax": lambda m, x: x.softmax(dim=np.int32(1)),
    "clamp": lambda m, x: x.clamp(F32(-1), F32(1)),
    "leaky-relu": lambda m, x: F.leaky_relu(x, F32(0.1)),
    "expand": lambda m, x: x[:, :1].expand(-1, I(4), -1, -1),
    "repeat": lambda m, x: x.repeat(1, I(2), 1, 1),
    "chunk": lambda m, x: list(x.chunk(I(2), I(1))),
    "split": lambda m, x: list(x.split([I(1), I(3)], 1)),
    "pools": lambda m, x: [F.avg_pool2d(x, (k, k), stride=(k, k)) for k in np.array([2, 4], np.int32)],
    "max-pool": lambda m, x: F.max_pool2d(x, tuple(np.array([2, 2]))),
    "adaptive-pool": lambda m, x: F.adaptive_avg_pool2d(x, np.array([2, 2])),
    "stack": lambda m, x: torch.stack([x, x], I(1)),
    "cat": lambda m, x: torch.cat((x, x), dim=np.int32(1)),
    "topk": lambda m, x: x.topk(I(2), 1)[0],
    "layer-norm": lambda m, x: F.layer_norm(x, (I(8),)),
    "roll": lambda m, x: x.roll(tuple(np.array([1, 1])), (2, 3)),
    "narrow": lambda m, x: x.narrow(I(1), I(0), I(2)),
    "sum": lambda m, x: x.sum(dim=[*np.array([1, 2])]),
}
INDICES: dict[str, Callable[..., Any]] = {
    "slices": lambda m, x: x[[slice(None), slice(0, 2)]],
    "slices-and-list": lambda m, x: x[[slice(None), [0, 1]]],
    "none-in-list": lambda m, x: x[[None, 0]],
    "ellipsis-in-list": lambda m, x: x[[Ellipsis, 0]],
    "tensors-in-list": lambda m, x: x[[torch.tensor([0, 1]), torch.tensor([1, 2])]],
    "lists-in-list": lambda m, x: x[[[0, 1], [1, 2]]],
    "list": lambda m, x: x[[0, 1]],
    "range": lambda m, x: x[:, range(2)],
    "array": lambda m, x: x[np.array([0, 1])],
    "array-of-two-axes": lambda m, x: x[:, np.array([[0, 1], [2, 3]])],
    "mask": lambda m, x: x[:, np.array([True, False, True, False])],
    "mask-as-list": lambda m, x: x[:, [True, False, True, False]],
    "number": lambda m, x: x[:, I(-1)],
    "slice": lambda m, x: x[:, I(0) : np.array(2)],
    "slice-of-tensor": lambda m, x: x[:, : torch.tensor(2)],
    "tensor": lambda m, x: x[:, torch.tensor(1)],
    "mixed": lambda m, x: x[..., None, I(1), [0, 2]],
    "true": lambda m, x: x[True],
    "write": lambda m, x: written(x),
}
CALLS = {**ARITHMETIC, **SHAPES, **{f"index-{name}": function for name, function in INDICES.items()}}


@pytest.mark.in_turns("method", "name")
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_what_torch_takes_is_quantized(name: str, method: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    net, x = Net(CALLS[name]).eval(), torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    qat = prepare(net, (x,), qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)
    converted = assert_one_arithmetic(calibrate(qat, (x,)), (x,), tmp_path)
    with torch.no_grad():
        for found, wanted in zip(converted(x), net(x), strict=True):
            assert found.shape == wanted.shape and (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize(
    "function", [lambda m, x: np.linalg.norm(x), lambda m, x: np.add.reduce(x), lambda m, x: np.sinc(x)]
)
def test_a_function_of_numpy_that_torch_does_not_have_is_refused(function: Any) -> None:
    set_march(March.NASH_M)
    net, x = Net(function).eval(), torch.randn(2, 4, 8, 8)
    for method in ("jit-strip", "symbolic"):
        with pytest.raises((HorizonError, NotImplementedError), match="(?i)numpy|test_values_of_numpy"):
            calibrate(prepare(net, (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (x,))


def test_steps_backwards_are_refused_as_torch_does() -> None:
    set_march(March.NASH_M)
    net, x = Net(lambda m, x: x[:, :: I(-1)]).eval(), torch.randn(2, 4, 8, 8)
    for method in ("jit-strip", "symbolic"):
        with pytest.raises((HorizonError, ValueError), match="step must be greater than zero"):
            calibrate(prepare(net, (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (x,))


@pytest.mark.parametrize(
    "function", [lambda m, x: x / math.sqrt(x.size(-1)), lambda m, x: x / x.shape[1], lambda m, x: x.div(x.shape[1])]
)
def test_a_quotient_by_a_size_has_the_same_names_and_numbers_on_both_routes(function: Any) -> None:
    set_march(March.NASH_M)
    net, x = Net(function).eval(), torch.randn(2, 4, 8, 8)
    both = [
        calibrate(prepare(net, (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (x,))
        for method in ("jit-strip", "symbolic")
    ]
    assert both[0].state_dict().keys() == both[1].state_dict().keys()
    with torch.no_grad():
        assert torch.equal(both[0](x)[0], both[1](x)[0])


def test_int_of_a_size_is_refused_with_what_to_write() -> None:
    set_march(March.NASH_M)
    net = Net(lambda m, x: x.view(-1, int(np.prod(x.shape[1:])))).eval()
    with pytest.raises(TraceError, match=r"test_values_of_numpy.py:\d+: .*without int\(\)"):
        prepare(net, (torch.randn(2, 4, 8, 8),), qconfig_dict={"": qconfig()}, method="symbolic", out_dir=None)
