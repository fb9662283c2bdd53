"""Random geometry, formats and extreme values: the routes agree wherever the float operator itself runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub
from tests.operators.cases import bench
from tests.routes import assert_one_arithmetic, prepared

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FORMATS = st.sampled_from(["qint8", "qint16"])
pytestmark = [
    pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.AccumulatorWarning"),
    pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.CalibrationWarning"),
]

# What a tensor can look like: ordinary, tiny, huge, all zero, constant, one outlier, only the ends of the range.
KINDS = st.sampled_from(["normal", "tiny", "huge", "zero", "constant", "outlier", "ends", "positive"])


def _values(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "tiny":
        return x * 1e-6
    if kind == "huge":
        return x * 1e5
    if kind == "zero":
        return x * 0
    if kind == "constant":
        return torch.full(shape, 0.37)
    if kind == "outlier":
        x.view(-1)[0] = 1e3
        return x
    if kind == "ends":
        return torch.sign(x) * 3
    return x.abs() if kind == "positive" else x


def _check(model: nn.Module, inputs: tuple[Tensor, ...], dtype: str) -> None:
    with torch.no_grad():
        try:
            wanted = model.eval()(*inputs)
        except RuntimeError:
            assume(False)  # torch itself refuses this geometry
        # a window that lies in the padding altogether has no value
        assume(all(x.numel() > 0 and bool(x.isfinite().all()) for x in wanted))
        qat = prepared(model, inputs, dtype)
        with tempfile.TemporaryDirectory() as folder:
            assert_one_arithmetic(qat, inputs, Path(folder), [tuple(-2 * x for x in inputs)])


@st.composite
def _layers(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 4))
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    kernel, stride, dilation = (
        draw(pair),
        draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        draw(st.sampled_from([1, 2])),
    )
    padding = tuple(draw(st.integers(0, 3)) for _ in range(2))
    bias = draw(st.booleans())
    shape = (draw(st.integers(1, 2)), inputs, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    kind = draw(st.sampled_from(["conv", "transpose", "linear"]))
    if kind == "conv":
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias, mode), shape
    if kind == "transpose":
        extra = tuple(draw(st.integers(0, max(s, dilation) - 1)) for s in stride)
        return nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding, extra, groups, bias, dilation), shape
    return nn.Linear(shape[-1], outputs, bias), shape[4 - draw(st.integers(1, 4)) :]


@pytest.mark.slow
@SETTINGS
@given(_layers(), KINDS, KINDS, KINDS, FORMATS, st.integers(0, 99))
def test_layers(layer: tuple, weights: str, biases: str, kind: str, dtype: str, seed: int) -> None:
    module, shape = layer
    with torch.no_grad():
        module.weight.copy_(_values(weights, tuple(module.weight.shape), seed + 1))
        if module.bias is not None:
            module.bias.copy_(_values(biases, tuple(module.bias.shape), seed + 2))
    _check(bench(module), (_values(kind, shape, seed),), dtype)


class Sum(nn.Module):
    """A convolution with a residual and ReLU6, which are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.conv, self.add, self.relu = nn.Conv2d(4, 4, 3, padding=1), FloatFunctional(), nn.ReLU6()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.relu(self.add.add(self.conv(self.quant(x)), self.other(y)))
        return z, self.dequant(z)


@pytest.mark.slow
@SETTINGS
@given(KINDS, KINDS, KINDS, FORMATS, st.integers(0, 99))
def test_fused_residuals(weights: str, kind: str, other: str, dtype: str, seed: int) -> None:
    model = Sum()
    with torch.no_grad():
        model.conv.weight.copy_(_values(weights, (4, 4, 3, 3), seed))
    _check(model, (_values(kind, (1, 4, 5, 5), seed + 1), _values(other, (1, 4, 5, 5), seed + 2)), dtype)


class Two(nn.Module):
    """One method of a FloatFunctional."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.op, self.method = FloatFunctional(), method

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.method == "cat":
            return self.op.cat((x, y), dim=1)
        return getattr(self.op, self.method)(x, y)


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(["add", "sub", "mul", "cat", "add_relu", "matmul"]), KINDS, KINDS, FORMATS, st.integers(0, 99))
def test_pairs(method: str, kind: str, other: str, dtype: str, seed: int) -> None:
    _check(bench(Two(method), 2), (_values(kind, (2, 3, 6, 6), seed), _values(other, (2, 3, 6, 6), seed + 1)), dtype)


class One(nn.Module):
    """A FloatFunctional with a number."""

    def __init__(self, method: str, number: float) -> None:
        super().__init__()
        self.op, self.method, self.number = FloatFunctional(), method, number

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.op, self.method)(x, self.number)


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e-6, 1e6]), st.floats(-100, 100, allow_nan=False))


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(["add_scalar", "mul_scalar"]), NUMBERS, KINDS, FORMATS, st.integers(0, 99))
def test_numbers(method: str, number: float, kind: str, dtype: str, seed: int) -> None:
    _check(bench(One(method, number)), (_values(kind, (2, 3, 4, 5), seed),), dtype)


@st.composite
def _windows(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    kind = draw(st.sampled_from(["max", "avg", "adaptive", "nearest", "bilinear"]))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    if kind in ("max", "avg"):
        stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        ceil = draw(st.booleans())
        if kind == "max":
            return nn.MaxPool2d(kernel, stride, padding, draw(st.integers(1, 2)), ceil_mode=ceil), shape
        return nn.AvgPool2d(
            kernel, stride, padding, ceil, draw(st.booleans()), draw(st.sampled_from([None, None, 3]))
        ), shape
    size = draw(st.tuples(st.integers(1, 15), st.integers(1, 15)))
    if kind == "adaptive":
        return nn.AdaptiveAvgPool2d(size), shape
    corners = draw(st.booleans()) if kind == "bilinear" else None
    if draw(st.booleans()):
        return horizon_nn.Interpolate(size, mode=kind, align_corners=corners), shape
    factor = draw(st.floats(0.3, 4.0, allow_nan=False))
    recompute = draw(st.sampled_from([None, True]))
    return horizon_nn.Interpolate(None, factor, kind, corners, recompute), shape


@pytest.mark.slow
@SETTINGS
@given(_windows(), KINDS, FORMATS, st.integers(0, 99))
def test_windows(window: tuple, kind: str, dtype: str, seed: int) -> None:
    module, shape = window
    _check(bench(module), (_values(kind, shape, seed),), dtype)


TABLES = (
    nn.Sigmoid,
    nn.Tanh,
    nn.SiLU,
    nn.GELU,
    horizon_nn.Exp,
    horizon_nn.Reciprocal,
    horizon_nn.Sqrt,
    nn.ReLU,
    nn.ReLU6,
)


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(TABLES), KINDS, FORMATS, st.integers(0, 99))
def test_functions_of_one_variable(cls: type, kind: str, dtype: str, seed: int) -> None:
    _check(bench(cls()), (_values(kind, (2, 3, 4, 5), seed),), dtype)


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(["softmax", "layer_norm", "batch_norm"]), KINDS, FORMATS, st.integers(0, 99))
def test_normalisations(which: str, kind: str, dtype: str, seed: int) -> None:
    module = {"softmax": nn.Softmax(1), "layer_norm": nn.LayerNorm(5), "batch_norm": nn.BatchNorm2d(3)}[which]
    _check(bench(module), (_values(kind, (2, 3, 4, 5), seed),), dtype)
