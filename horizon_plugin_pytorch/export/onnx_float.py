"""Functions of float and float16 tensors as ONNX operators; their results are close, not equal."""

from __future__ import annotations

import math
from typing import Any

import torch

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_aten import ATEN, lowers, unary
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site

_PADDING = ("zeros", "border", "reflection")


def _with(g: OnnxGraph, operator: str, x: str, number: float) -> str:
    """The tensor with one number, such as its product."""
    return g.node(operator, x, g.scalar(number, torch.float32))


for _name, _operator in (
    ("sin", "Sin"), ("cos", "Cos"), ("tan", "Tan"), ("asin", "Asin"), ("acos", "Acos"), ("atan", "Atan"),
    ("sinh", "Sinh"), ("cosh", "Cosh"), ("asinh", "Asinh"), ("acosh", "Acosh"), ("atanh", "Atanh"), ("erf", "Erf"),
    ("sign", "Sign"),
):  # fmt: skip
    lowers(_name, f"{_name}_")(unary(_operator))
lowers("isnan")(unary("IsNaN"))
lowers("hardsigmoid", "hardsigmoid_")(unary("HardSigmoid", alpha=1 / 6, beta=0.5))


@lowers("hardswish", "hardswish_")
def hardswish(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Mul", x, g.node("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@lowers("elu", "elu_")
def elu(g: OnnxGraph, site: Site, x: str, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> str:
    """``scale * (max(x, 0) + min(alpha * (exp(input_scale * x) - 1), 0))``; selu is one of them."""
    below = g.node("Elu", x if input_scale == 1 else _with(g, "Mul", x, input_scale), alpha=float(alpha))
    out = g.node("Add", g.node("Relu", x), _with(g, "Min", below, 0.0))
    return out if scale == 1 else _with(g, "Mul", out, scale)


@lowers("celu", "celu_")
def celu(g: OnnxGraph, site: Site, x: str, alpha: float = 1.0) -> str:
    return elu(g, site, x, alpha, 1.0, 1.0 / alpha)


@lowers("softplus")
def softplus(g: OnnxGraph, site: Site, x: str, beta: float = 1.0, threshold: float = 20.0) -> str:
    """Above the threshold torch gives x itself, which differs by less than float16 shows."""
    out = g.node("Softplus", x if beta == 1 else _with(g, "Mul", x, beta))
    return out if beta == 1 else _with(g, "Div", out, beta)


@lowers("mish", "mish_")
def mish(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Mul", x, g.node("Tanh", g.node("Softplus", x)))


@lowers("log_sigmoid_forward")
def log_sigmoid(g: OnnxGraph, site: Site, x: str) -> list[str | None]:
    return [g.node("Neg", g.node("Softplus", g.node("Neg", x))), None]


@lowers("glu")
def glu(g: OnnxGraph, site: Site, x: str, dim: int = -1) -> str:
    half = g.constant([site.input_shape[dim] // 2] * 2, torch.int64, "split")
    first, gate = g.node("Split", x, half, outputs=2, axis=dim % site.rank)
    return g.node("Mul", first, g.node("Sigmoid", gate))


for _name, _base in (("log2", 2.0), ("log10", 10.0)):
    lowers(_name)(lambda g, site, x, base=_base: _with(g, "Mul", g.node("Log", x), 1 / math.log(base)))
for _name, _bias in (("softshrink", 1.0), ("hardshrink", 0.0)):
    lowers(_name)(
        lambda g, site, x, size=0.5, bias=_bias: g.node("Shrink", x, lambd=float(size), bias=float(size) * bias)
    )
lowers("isinf")(unary("IsInf"))


@lowers("threshold", "threshold_")
def threshold(g: OnnxGraph, site: Site, x: str, limit: float, value: float) -> str:
    return g.node("Where", _with(g, "Greater", x, limit), x, g.scalar(value, torch.float32))


@lowers("expm1")
def expm1(g: OnnxGraph, site: Site, x: str) -> str:
    """``2 exp(x / 2) sinh(x / 2)``, which keeps its digits near 0."""
    half = _with(g, "Mul", x, 0.5)
    return _with(g, "Mul", g.node("Mul", g.node("Exp", half), g.node("Sinh", half)), 2.0)


@lowers("sinc")
def sinc(g: OnnxGraph, site: Site, x: str) -> str:
    angle = _with(g, "Mul", x, math.pi)
    is_zero = g.node("Equal", angle, g.scalar(0.0, torch.float32))
    safe = g.node("Where", is_zero, g.scalar(1.0, torch.float32), angle)
    return g.node("Where", is_zero, g.scalar(1.0, torch.float32), g.node("Div", g.node("Sin", safe), safe))


@lowers("trunc")
def trunc(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Where", _with(g, "Less", x, 0.0), g.node("Ceil", x), g.node("Floor", x))


@lowers("fmod")
def fmod(g: OnnxGraph, site: Site, a: str, b: Any) -> str:
    return g.node("Mod", a, b if isinstance(b, str) else g.constant(b, site.input_dtype), fmod=1)


@lowers("nan_to_num")
def nan_to_num(
    g: OnnxGraph, site: Site, x: str, nan: float | None = None, high: float | None = None, low: float | None = None
) -> str:
    largest = torch.finfo(torch.float32).max
    x = g.node("Where", g.node("IsNaN", x), g.scalar(nan or 0.0, torch.float32), x)
    for sign, value in ((1, largest if high is None else high), (-1, -largest if low is None else low)):
        is_end = g.node("Equal", x, g.scalar(sign * math.inf, torch.float32))
        x = g.node("Where", is_end, g.scalar(value, torch.float32), x)
    return x


@lowers("fmax", "fmin")
def fmax(g: OnnxGraph, site: Site, a: str, b: str) -> str:
    """What is not a number counts only where both are not."""
    both = g.node("Max" if site.name == "aten::fmax" else "Min", a, b)
    return g.node("Where", g.node("IsNaN", a), b, g.node("Where", g.node("IsNaN", b), a, both))


def _is_negative(g: OnnxGraph, x: str) -> str:
    """Also of a negative zero, whose reciprocal is -inf."""
    return _with(g, "Less", g.node("Min", x, g.node("Reciprocal", x)), 0.0)


@lowers("copysign")
def copysign(g: OnnxGraph, site: Site, a: str, b: Any) -> str:
    size = g.node("Abs", a)
    if not isinstance(b, str):
        return g.node("Neg", size) if math.copysign(1.0, b) < 0 else size
    return g.node("Where", _is_negative(g, b), g.node("Neg", size), size)


@lowers("baddbmm")
def baddbmm(g: OnnxGraph, site: Site, x: str, a: str, b: str, *, beta: float = 1, alpha: float = 1) -> str:
    product = g.node("MatMul", a, b)
    product = product if alpha == 1 else _with(g, "Mul", product, alpha)
    return product if beta == 0 else g.node("Add", x if beta == 1 else _with(g, "Mul", x, beta), product)


lowers("addmv")(baddbmm)


@lowers("log1p", "log1p_")
def log1p(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Log", _with(g, "Add", x, 1.0))


@lowers("exp2", "exp2_")
def exp2(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Exp", _with(g, "Mul", x, math.log(2)))


@lowers("clamp_min", "clamp_min_")
def clamp_min(g: OnnxGraph, site: Site, x: str, low: Any) -> str:
    return ATEN["aten::clamp"](g, site, x, low)


@lowers("clamp_max", "clamp_max_")
def clamp_max(g: OnnxGraph, site: Site, x: str, high: Any) -> str:
    return ATEN["aten::clamp"](g, site, x, None, high)


@lowers("_prelu_kernel")
def prelu(g: OnnxGraph, site: Site, x: str, slope: str) -> str:
    return g.node("PRelu", x, slope)


@lowers("cumsum", "cumsum_")
def cumsum(g: OnnxGraph, site: Site, x: str, dim: int, **kwargs: Any) -> str:
    if site.input_dtype != site.outputs[0].dtype:  # of booleans, say
        x = g.cast(x, site.outputs[0].dtype)
    return g.node("CumSum", x, g.constant(dim % site.rank, torch.int64, "axis"))


def _deviation(g: OnnxGraph, x: str, dims: list[int]) -> str:
    return g.node("Sub", x, g.axes("ReduceMean", x, dims, True))


@lowers("var")
def var(
    g: OnnxGraph, site: Site, x: str, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> str:
    dims = [dim] if isinstance(dim, int) else list(dim or range(site.rank))
    dims = [d % site.rank for d in dims]
    count = math.prod(site.input_shape[d] for d in dims)
    deviation = _deviation(g, x, dims)
    total = g.axes("ReduceSum", g.node("Mul", deviation, deviation), dims, keepdim)
    return _with(g, "Div", total, count - (1 if correction is None else correction))


@lowers("var_mean", "std_mean")
def var_mean(
    g: OnnxGraph, site: Site, x: str, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> list[str]:
    dims = [dim] if isinstance(dim, int) else list(dim or range(site.rank))
    spread = var(g, site, x, dim, correction=correction, keepdim=keepdim)
    is_root = site.name == "aten::std_mean"
    dims = [d % site.rank for d in dims]
    rounding = g.axes("ReduceMean", _deviation(g, x, dims), dims, keepdim)  # norms of nearly equal numbers show it
    mean = g.node("Add", g.axes("ReduceMean", x, dims, keepdim), rounding)
    return [g.node("Sqrt", spread) if is_root else spread, mean]


@lowers("linalg_vector_norm")
def vector_norm(
    g: OnnxGraph, site: Site, x: str, ord: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> str:
    dims = [dim] if isinstance(dim, int) else list(dim or range(site.rank))
    dims = [d % site.rank for d in dims]
    if ord in (1, 2):
        return g.axes(f"ReduceL{int(ord)}", x, dims, keepdim)
    if math.isinf(ord):
        return g.axes("ReduceMax" if ord > 0 else "ReduceMin", g.node("Abs", x), dims, keepdim)
    raise ExportError(f"a float norm with p={ord} has no ONNX form; 1, 2 and infinity have.")


def _normalized(g: OnnxGraph, deviation: str, variance: str, eps: float) -> str:
    return g.node("Div", deviation, g.node("Sqrt", _with(g, "Add", variance, eps)))


def _affine(g: OnnxGraph, site: Site, x: str, weight: str | None, bias: str | None) -> str:
    shape = [1, -1, *[1] * (site.rank - 2)]
    x = x if weight is None else g.node("Mul", x, g.reshape(weight, shape))
    return x if bias is None else g.node("Add", x, g.reshape(bias, shape))


@lowers("native_batch_norm")
def batch_norm(
    g: OnnxGraph, site: Site, x: str, weight: str | None, bias: str | None, mean: str | None, variance: str | None,
    training: bool, momentum: float, eps: float,
) -> list[str | None]:  # fmt: skip
    """With the statistics of a model in eval mode, or of the input, which is how torch normalizes instances."""
    if training:
        dims = [d for d in range(site.rank) if d != 1]
        deviation = _deviation(g, x, dims)
        out = _normalized(g, deviation, g.axes("ReduceMean", g.node("Mul", deviation, deviation), dims, True), eps)
        return [_affine(g, site, out, weight, bias), None, None]
    assert mean is not None and variance is not None
    channels = [site.input_shape[1]]
    weight = g.constant(torch.ones(channels, dtype=site.input_dtype)) if weight is None else weight
    bias = g.constant(torch.zeros(channels, dtype=site.input_dtype)) if bias is None else bias
    return [g.node("BatchNormalization", x, weight, bias, mean, variance, epsilon=float(eps)), None, None]


@lowers("grid_sampler_2d")
def grid_sample(g: OnnxGraph, site: Site, x: str, grid: str, mode: int, padding: int, align_corners: bool) -> str:
    linear = "linear" if g.opset >= 20 else "bilinear"
    return g.node(
        "GridSample", x, grid, mode="nearest" if mode == 1 else linear, padding_mode=_PADDING[padding],
        align_corners=int(align_corners),
    )  # fmt: skip


@lowers("atan2")
def atan2(g: OnnxGraph, site: Site, y: str, x: str) -> str:
    """By quadrants, as torch counts them: a zero has a sign, too."""

    def is_zero(value: str) -> str:
        return g.node("Equal", value, g.scalar(0.0, torch.float32))

    angle = g.node("Atan", g.node("Div", g.node("Abs", y), g.node("Abs", x)))
    angle = g.node("Where", g.node("And", is_zero(x), is_zero(y)), g.scalar(0.0, torch.float32), angle)
    angle = g.node("Where", _is_negative(g, x), g.node("Sub", g.scalar(math.pi, torch.float32), angle), angle)
    return g.node("Where", _is_negative(g, y), g.node("Neg", angle), angle)
