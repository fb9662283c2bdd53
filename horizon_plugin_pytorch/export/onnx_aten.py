"""Ordinary torch operators as ONNX operators: those that keep the scale, and the float ones around the integer part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.export.onnx_order import extreme, of_numbers
from horizon_plugin_pytorch.fixed_point.accumulator_plan import Geometry

AtenLowering = Callable[..., Any]
ATEN: dict[str, AtenLowering] = {}


def lowers(*names: str) -> Callable[[AtenLowering], AtenLowering]:
    """Register the lowering of ``aten::<name>``; it gets graph, site, value names for tensors and plain arguments."""

    def register(function: AtenLowering) -> AtenLowering:
        for name in names:
            ATEN[f"aten::{name}"] = function
        return function

    return register


@lowers("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten", "_reshape_alias", "view_as")
def reshape(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> str:
    return g.reshape(x, site.output_shape)


@lowers(
    "clone",
    "contiguous",
    "alias",
    "detach",
    "lift_fresh",
    "lift_fresh_copy",
    "dropout",
    "native_dropout",
    "resolve_conj",
)
def identity(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> str:
    return x


@lowers("_to_copy")
def to_copy(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> str:
    return g.cast(x, site.outputs[0].dtype)


@lowers("permute")
def permute(g: OnnxGraph, site: Site, x: str, dims: list[int]) -> str:
    rank = len(site.input_shape)
    return g.node("Transpose", x, perm=[d % rank for d in dims])


@lowers("transpose")
def transpose(g: OnnxGraph, site: Site, x: str, a: int, b: int) -> str:
    order = list(range(len(site.input_shape)))
    order[a], order[b] = order[b], order[a]
    return g.node("Transpose", x, perm=order)


@lowers("t")
def t(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Transpose", x, perm=list(range(len(site.input_shape)))[::-1])


@lowers("expand")
def expand(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> str:
    return g.node("Expand", x, g.constant(site.output_shape, torch.int64, "shape"))


@lowers("repeat")
def repeat(g: OnnxGraph, site: Site, x: str, repeats: list[int]) -> str:
    extra = len(repeats) - len(site.input_shape)
    if extra:
        x = g.reshape(x, [1] * extra + site.input_shape)
    return g.node("Tile", x, g.constant(list(repeats), torch.int64, "repeats"))


@lowers("cat")
def cat(g: OnnxGraph, site: Site, tensors: list[str], dim: int = 0) -> str:
    # torch leaves out an empty tensor of one axis, whatever the axes of the others: a list that starts empty.
    filled = [name for name, x in zip(tensors, site.inputs, strict=True) if tuple(x.shape) != (0,)]
    return g.node("Concat", *(filled or tensors), axis=dim)


@lowers("stack")
def stack(g: OnnxGraph, site: Site, tensors: list[str], dim: int = 0) -> str:
    rank = len(site.output_shape)
    axes = g.constant([dim % rank], torch.int64, "axes")
    return g.node("Concat", *(g.node("Unsqueeze", x, axes) for x in tensors), axis=dim % rank)


@lowers("slice")
def slice_(
    g: OnnxGraph, site: Site, x: str, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> str:
    bounds = [0 if start is None else start, 2**62 if end is None else end]
    starts, ends, axes, steps = (g.constant([v], torch.int64, "slice") for v in (*bounds, dim, step))
    return g.node("Slice", x, starts, ends, axes, steps)


@lowers("select")
def select(g: OnnxGraph, site: Site, x: str, dim: int, index: int) -> str:
    return g.node("Gather", x, g.constant(index, torch.int64, "index"), axis=dim)


@lowers("index_select")
def index_select(g: OnnxGraph, site: Site, x: str, dim: int, index: str) -> str:
    return g.node("Gather", x, index, axis=dim)


@lowers("split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk", "tensor_split")
def split(g: OnnxGraph, site: Site, x: str, sizes: Any, dim: int = 0) -> list[str]:
    dim = dim % len(site.input_shape)
    lengths = [out.shape[dim] for out in site.outputs]
    if len(lengths) == 1:
        return [x]
    return g.node("Split", x, g.constant(lengths, torch.int64, "split"), outputs=len(lengths), axis=dim)


@lowers("unbind")
def unbind(g: OnnxGraph, site: Site, x: str, dim: int = 0) -> list[str]:
    return [g.node("Gather", x, g.constant(i, torch.int64, "index"), axis=dim) for i in range(len(site.outputs))]


@lowers("as_strided")
def as_strided(g: OnnxGraph, site: Site, x: str, size: list[int], stride: list[int], offset: int | None = None) -> str:
    """What shows a part of a memory that was written to; the program has all its numbers along one axis."""
    positions = torch.arange(site.input_shape[0]).as_strided(size, stride, offset or 0)
    return g.node("Gather", x, g.constant(positions, torch.int64, "positions"), axis=0)


@lowers("as_strided_scatter")
def as_strided_scatter(
    g: OnnxGraph, site: Site, x: str, part: str, size: list[int], stride: list[int], offset: int | None = None
) -> str:
    """A memory with a part of it written anew."""
    positions = torch.arange(site.input_shape[0]).as_strided(size, stride, offset or 0).reshape(-1)
    return g.node("ScatterElements", x, g.constant(positions, torch.int64, "positions"), g.reshape(part, [-1]), axis=0)


@lowers("copy")
def copy(g: OnnxGraph, site: Site, x: str, source: str) -> str:
    """The numbers of another tensor in the shape and type of the first one."""
    if site.inputs[1].dtype != site.outputs[0].dtype:
        source = g.cast(source, site.outputs[0].dtype)
    if tuple(site.inputs[1].shape) == tuple(site.output_shape):
        return source
    return g.node("Expand", source, g.constant(site.output_shape, torch.int64, "shape"))


@lowers("fill", "zero")
def fill(g: OnnxGraph, site: Site, x: str, value: Any = 0) -> str:
    number = value if isinstance(value, str) else g.constant(value, site.outputs[0].dtype)
    return g.node("Expand", number, g.constant(site.output_shape, torch.int64, "shape"))


@lowers("flip")
def flip(g: OnnxGraph, site: Site, x: str, dims: list[int]) -> str:
    dims = [d % len(site.input_shape) for d in dims]
    starts, ends, axes, steps = (
        g.constant(v, torch.int64, "flip") for v in ([-1] * len(dims), [-(2**62)] * len(dims), dims, [-1] * len(dims))
    )
    return g.node("Slice", x, starts, ends, axes, steps)


@lowers("roll")
def roll(g: OnnxGraph, site: Site, x: str, shifts: list[int], dims: list[int] | None = None) -> str:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    flat = not dims
    if flat:
        x = g.reshape(x, [-1])
    size_of = [math.prod(site.input_shape)] if flat else site.input_shape
    for shift, dim in zip(shifts, [0] if flat else list(dims or []), strict=True):
        size = size_of[dim]
        index = (torch.arange(size) - shift) % size
        x = g.node("Gather", x, g.constant(index, torch.int64, "roll"), axis=dim)
    return g.reshape(x, site.output_shape) if flat else x


def _pads(pad: list[int], rank: int) -> list[int]:
    begins, ends = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        begins[rank - 1 - i], ends[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return begins + ends


@lowers("constant_pad_nd")
def constant_pad(g: OnnxGraph, site: Site, x: str, pad: list[int], value: float = 0.0) -> str:
    pads = g.constant(_pads(pad, len(site.input_shape)), torch.int64, "pads")
    return g.node("Pad", x, pads, g.constant(value, site.outputs[0].dtype), mode="constant")


@lowers("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(g: OnnxGraph, site: Site, x: str, pad: list[int]) -> str:
    return _pad_by_position(g, site, x, pad, "edge")


@lowers("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(g: OnnxGraph, site: Site, x: str, pad: list[int]) -> str:
    return _pad_by_position(g, site, x, pad, "reflect")


def _pad_by_position(g: OnnxGraph, site: Site, x: str, pad: list[int], mode: str) -> str:
    """Values of other positions; where a number is negative, what torch crops is seen from the other side's padding.

    So the padding comes first: cropping first would leave too little to take values from, or nothing.
    """
    pads = _pads(pad, site.rank)
    if any(p > 0 for p in pads):
        x = g.node("Pad", x, g.constant([max(p, 0) for p in pads], torch.int64, "pads"), mode=mode)
    begins, ends = pads[: site.rank], pads[site.rank :]
    axes = [axis for axis in range(site.rank) if min(begins[axis], ends[axis]) < 0]
    if not axes:
        return x
    starts = [max(-begins[axis], 0) for axis in axes]
    stops = [ends[axis] if ends[axis] < 0 else 2**62 for axis in axes]
    return g.node("Slice", x, *(g.constant(v, torch.int64, "crop") for v in (starts, stops, axes)))


@lowers("pixel_shuffle")
def pixel_shuffle(g: OnnxGraph, site: Site, x: str, factor: int) -> str:
    *lead, c, h, w = site.input_shape
    n = len(lead)
    x = g.reshape(x, [*lead, c // factor**2, factor, factor, h, w])
    return g.reshape(g.node("Transpose", x, perm=[*range(n), n, n + 3, n + 1, n + 4, n + 2]), site.output_shape)


@lowers("pixel_unshuffle")
def pixel_unshuffle(g: OnnxGraph, site: Site, x: str, factor: int) -> str:
    *lead, c, h, w = site.input_shape
    n = len(lead)
    x = g.reshape(x, [*lead, c, h // factor, factor, w // factor, factor])
    return g.reshape(g.node("Transpose", x, perm=[*range(n), n, n + 2, n + 4, n + 1, n + 3]), site.output_shape)


@lowers("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(g: OnnxGraph, site: Site, x: str, groups: int) -> str:
    n, c, *rest = site.input_shape
    x = g.reshape(x, [n, groups, c // groups, *rest])
    return g.reshape(g.node("Transpose", x, perm=[0, 2, 1, *range(3, 3 + len(rest))]), site.output_shape)


@lowers("relu", "relu_")
def relu(g: OnnxGraph, site: Site, x: str) -> str:
    if not site.input_dtype.is_floating_point:  # ONNX Runtime has it for float numbers
        return extreme(g, "Max", x, g.constant(0, site.input_dtype), site.input_dtype)
    return g.node("Relu", x)


@lowers("clamp", "clamp_", "hardtanh", "hardtanh_")
def clamp(g: OnnxGraph, site: Site, x: str, low: Any = None, high: Any = None) -> str:
    is_float = site.input_dtype == site.outputs[0].dtype == torch.float32
    if (
        is_float
        and isinstance(low, (int, float))
        and isinstance(high, (int, float))
        and -math.inf < low <= high < math.inf
    ):
        return g.clip(x, low, high)  # which ONNX Runtime makes part of a convolution
    is_relu = is_float and low == 0
    limits = {"Max": None if low == -math.inf or is_relu else low, "Min": None if high == math.inf else high}
    limits = {operator: limit for operator, limit in limits.items() if limit is not None}
    dtype = site.outputs[0].dtype
    x, *ends = _in_type(g, site, [x, *limits.values()], dtype)
    x = g.node("Relu", x) if is_relu else x
    for operator, end in zip(limits, ends, strict=True):
        x = extreme(g, operator, x, end, dtype)
    return x


@lowers(*(f"max_pool{axes}d{end}" for axes in (1, 2, 3) for end in ("", "_with_indices")))
def max_pool(
    g: OnnxGraph, site: Site, x: str, kernel: list[int], stride: list[int] | None = None, padding: list[int] | int = 0,
    dilation: list[int] | int = 1, ceil_mode: bool = False,
) -> list[str | None]:  # fmt: skip
    axes = int(site.name.split("max_pool")[1][0])

    def sizes(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * axes if len(values) == 1 else values

    kernel, begins, dilation = sizes(kernel), sizes(padding), sizes(dilation)
    steps = sizes(stride) if stride else kernel
    if not site.input_dtype.is_floating_point:  # positions: ONNX Runtime pools float numbers and bytes
        x = g.cast(x, torch.float64)
    is_single = site.rank == axes + 1  # one image without a batch axis
    if is_single:
        x = g.reshape(x, [1, *site.input_shape])
    # ONNX counts windows differently in ceil mode, so the end is padded to exactly the windows that torch has.
    ends = [
        max((out - 1) * s + d * (k - 1) + 1 - size - begin, 0)
        for out, s, d, k, size, begin in zip(
            site.output_shape[-axes:], steps, dilation, kernel, site.input_shape[-axes:], begins, strict=True
        )
    ]
    if any(
        pad >= k for pad, k in zip(begins + ends, kernel * 2, strict=True)
    ):  # more than ONNX Runtime's MaxPool takes
        lead = [0, 0]
        pads = g.constant([*lead, *begins, *lead, *ends], torch.int64, "pads")
        outside = g.scalar(-math.inf, site.input_dtype if site.input_dtype.is_floating_point else torch.float64)
        x, begins, ends = g.node("Pad", x, pads, outside), [0] * axes, [0] * axes
    x = g.apart_from_pad(x)
    out = g.node("MaxPool", x, kernel_shape=kernel, strides=steps, pads=begins + ends, dilations=dilation)
    out = out if site.input_dtype.is_floating_point else g.cast(out, site.outputs[0].dtype)
    found = g.reshape(out, site.output_shape) if is_single else out
    return [found, None][: len(site.outputs)]


@lowers("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(g: OnnxGraph, site: Site, x: str, size: list[int]) -> list[str | None]:
    """Along one axis after the other: the positions of each window, the last one repeated to a common length."""
    shape = list(site.input_shape)
    for axis in range(site.rank - len(size), site.rank):
        source, target = shape[axis], site.output_shape[axis]
        starts = [i * source // target for i in range(target)]
        ends = [-(-(i + 1) * source // target) for i in range(target)]
        length = max(end - start for start, end in zip(starts, ends, strict=True))
        index = [[min(start + j, end - 1) for j in range(length)] for start, end in zip(starts, ends, strict=True)]
        windows = g.node("Gather", x, g.constant(index, torch.int64, "windows"), axis=axis)
        x = g.axes("ReduceMax", windows, [axis + 1], False)
        shape[axis] = target
    return [x, None]


@lowers(*(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)))
def upsample_nearest(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> str:
    """The positions that torch reads, found by resizing a ramp with the same arguments."""
    resize = getattr(torch.ops.aten, site.name.removeprefix("aten::"))
    for axis in range(2, site.rank):
        size = site.input_shape[axis]
        shape = [1] * site.rank
        shape[axis] = size
        ramp = torch.arange(size, dtype=torch.float32).reshape(shape).expand(1, 1, *site.input_shape[2:]).contiguous()
        index = resize(ramp, *args, **kwargs).movedim(axis, -1).flatten(0, -2)[0]
        x = g.node("Gather", x, g.constant(index, torch.int64, "nearest"), axis=axis)
    return x


def _reduction(operator: str) -> AtenLowering:
    def lower(g: OnnxGraph, site: Site, x: str, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> str:
        rank = len(site.input_shape)
        if rank == 0:
            return x  # of one value
        dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
        if site.input_dtype != site.outputs[0].dtype:  # the sum of booleans, say
            x = g.cast(x, site.outputs[0].dtype)
        return g.axes(operator, x, [d % rank for d in dims], keepdim)

    return lower


for _name, _operator in (("mean", "ReduceMean"), ("sum", "ReduceSum")):
    lowers(_name)(_reduction(_operator))
for _name, _operator in (("amax", "ReduceMax"), ("amin", "ReduceMin")):
    lowers(_name)(of_numbers(_reduction(_operator)))


@lowers("argmax", "argmin")
@of_numbers
def argmax(g: OnnxGraph, site: Site, x: str, dim: int | None = None, keepdim: bool = False) -> str:
    operator = "ArgMax" if site.name == "aten::argmax" else "ArgMin"
    if dim is None or not site.input_shape:
        return g.reshape(g.node(operator, g.reshape(x, [-1]), axis=0), site.output_shape)
    return g.node(operator, x, axis=dim % len(site.input_shape), keepdims=int(keepdim))


@lowers("max", "min")
def max_(g: OnnxGraph, site: Site, x: str, dim: Any = None, keepdim: bool = False) -> Any:
    """Of all values, of two tensors, or along an axis (values and positions)."""
    word = "Max" if site.name == "aten::max" else "Min"
    if isinstance(dim, str):
        return _binary(word)(g, site, x, dim)
    return _largest(g, site, x, word, dim, keepdim)


@of_numbers
def _largest(g: OnnxGraph, site: Site, x: str, word: str, dim: int | None, keepdim: bool) -> Any:
    if not site.input_shape:
        return x if dim is None else [x, g.constant(torch.zeros((), dtype=torch.int64))]
    if dim is None:
        return g.axes(f"Reduce{word}", x, list(range(len(site.input_shape))), False)
    axis = dim % len(site.input_shape)
    return [g.axes(f"Reduce{word}", x, [axis], keepdim), g.node(f"Arg{word}", x, axis=axis, keepdims=int(keepdim))]


def _in_type(g: OnnxGraph, site: Site, operands: list[Any], dtype: torch.dtype) -> list[str]:
    """Tensors and numbers in one type: ONNX does not make an integer a float by itself."""
    tensors = iter(site.inputs[-sum(isinstance(v, str) for v in operands) :])
    return [
        g.constant(v, dtype) if not isinstance(v, str) else v if next(tensors).dtype == dtype else g.cast(v, dtype)
        for v in operands
    ]


def _common_type(site: Site, operands: list[Any]) -> torch.dtype:
    """The type in which torch computes with tensors and numbers."""
    tensors = iter(site.inputs)
    a, b = (next(tensors).meta() if isinstance(v, str) else v for v in operands)
    return torch.result_type(a, b)


_OF_BOOLEANS = {"Mul": "And", "Min": "And", "Max": "Or"}


def _binary(operator: str, dtype: torch.dtype | None = None) -> AtenLowering:
    def lower(g: OnnxGraph, site: Site, a: Any, b: Any, *, alpha: float = 1) -> str:
        common = dtype or _common_type(site, [a, b])
        if common == torch.bool and operator in _OF_BOOLEANS:
            return g.node(_OF_BOOLEANS[operator], a, b)
        is_zero = any(not isinstance(v, str) and v == 0 for v in (a, b))
        a, b = _in_type(g, site, [a, b], common)
        if operator == "Add" and is_zero and common.is_floating_point:
            return g.node("Sum", a, b)  # which makes -0 +0; an optimizer takes such an `Add` for nothing
        if operator in ("Max", "Min"):
            return extreme(g, operator, a, b, common)
        return g.node(operator, a, b if alpha == 1 else g.node("Mul", b, g.constant(alpha, common)))

    return lower


for _name, _operator in (("add", "Add"), ("sub", "Sub"), ("mul", "Mul")):
    lowers(_name, f"{_name}_")(_binary(_operator))
for _name, _operator in (
    ("pow", "Pow"), ("gt", "Greater"), ("ge", "GreaterOrEqual"), ("lt", "Less"), ("le", "LessOrEqual"), ("eq", "Equal"),
    ("maximum", "Max"), ("minimum", "Min"), ("bitwise_and", "And"), ("bitwise_or", "Or"),
):  # fmt: skip
    lowers(_name)(_binary(_operator))
lowers("logical_and")(_binary("And", torch.bool))
lowers("logical_or")(_binary("Or", torch.bool))


_of_booleans = ATEN["aten::bitwise_and"]


@lowers("bitwise_and")
def bitwise_and(g: OnnxGraph, site: Site, a: Any, b: Any) -> str:
    """``x & 1`` of integers says whether they are odd; others have an ONNX form from opset 18 on."""
    dtype = site.outputs[0].dtype
    if dtype == torch.bool:
        return _of_booleans(g, site, a, b)
    if isinstance(b, int) and b == 1:
        odd = g.node("Mod", g.cast(a, torch.int64), g.constant(2, torch.int64))
        return odd if dtype == torch.int64 else g.cast(odd, dtype)
    if g.opset < 18:
        raise ExportError("`&` of integers has an ONNX form from opset 18 on; export with opset_version=18.")
    return g.node("BitwiseAnd", *_in_type(g, site, [a, b], dtype))


@lowers("div", "div_")
def div(g: OnnxGraph, site: Site, a: Any, b: Any, *, rounding_mode: str | None = None) -> str:
    """ONNX divides integers to integers and drops the fraction; torch does so where it is told to."""
    if rounding_mode == "floor":
        return ATEN["aten::floor_divide"](g, site, a, b)
    if rounding_mode == "trunc" and site.outputs[0].dtype.is_floating_point:
        raise ExportError(
            "a division of float numbers that drops the fraction has no exact ONNX form; leave it out of the exported "
            "model."
        )
    return _binary("Div", site.outputs[0].dtype)(g, site, a, b)


@lowers("rsub")
def rsub(g: OnnxGraph, site: Site, a: Any, b: Any, alpha: float = 1) -> str:
    """``b - alpha * a``."""
    dtype = site.outputs[0].dtype
    a, b = _in_type(g, site, [a, b], dtype)
    return g.node("Sub", b, a if alpha == 1 else g.node("Mul", a, g.constant(alpha, dtype)))


@lowers("where")
def where(g: OnnxGraph, site: Site, condition: str, a: Any, b: Any) -> str:
    dtype = site.outputs[0].dtype
    a, b = _in_type(g, site, [a, b], dtype)
    return g.where(condition, a, b, dtype)


def unary(operator: str, **attributes: Any) -> AtenLowering:
    """A function of each number; integers become what torch computes with."""

    def lower(g: OnnxGraph, site: Site, x: str) -> str:
        is_integer, dtype = not site.input_dtype.is_floating_point, site.outputs[0].dtype
        if is_integer and operator in _OF_FRACTIONS:
            return x
        return g.node(operator, g.cast(x, dtype) if is_integer and dtype.is_floating_point else x, **attributes)

    return lower


_OF_FRACTIONS = ("Floor", "Ceil", "Round")  # integers stay what they are


for _name, _operator in (
    ("sigmoid", "Sigmoid"), ("tanh", "Tanh"), ("exp", "Exp"), ("log", "Log"), ("sqrt", "Sqrt"), ("neg", "Neg"),
    ("abs", "Abs"), ("floor", "Floor"), ("ceil", "Ceil"), ("reciprocal", "Reciprocal"),
):  # fmt: skip
    lowers(_name, f"{_name}_")(unary(_operator))


@lowers("round", "round_")
def round_(g: OnnxGraph, site: Site, x: str, decimals: int = 0) -> str:
    if decimals:
        raise ExportError("torch.round with decimals has no ONNX form; multiply, round and divide instead.")
    return unary("Round")(g, site, x)


@lowers("rsqrt", "rsqrt_")
def rsqrt(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Reciprocal", unary("Sqrt")(g, site, x))


@lowers("_softmax", "_log_softmax")
def softmax(g: OnnxGraph, site: Site, x: str, dim: int, half_to_float: bool = False) -> str:
    operator, last = "LogSoftmax" if site.name == "aten::_log_softmax" else "Softmax", site.rank - 1
    if g.opset >= 13 or dim % site.rank == last:
        return g.node(operator, x, axis=dim)
    return transpose(g, site, g.node(operator, transpose(g, site, x, dim, last), axis=last), dim, last)


@lowers("silu", "silu_")
def silu(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Mul", x, g.node("Sigmoid", x))


@lowers("leaky_relu", "leaky_relu_")
def leaky_relu(g: OnnxGraph, site: Site, x: str, slope: float = 0.01) -> str:
    return g.node("LeakyRelu", x, alpha=float(slope))


@lowers("gelu")
def gelu(g: OnnxGraph, site: Site, x: str, approximate: str = "none") -> str:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, or its tanh form."""

    def times(a: str, number: float) -> str:
        return g.node("Mul", a, g.scalar(number, torch.float32))

    if approximate == "tanh":
        cube = g.node("Mul", x, g.node("Mul", x, x))
        bend = g.node("Tanh", times(g.node("Add", x, times(cube, 0.044715)), math.sqrt(2 / math.pi)))
    else:
        bend = g.node("Erf", times(x, math.sqrt(0.5)))
    return g.node("Mul", times(x, 0.5), g.node("Add", bend, g.scalar(1.0, torch.float32)))


@lowers("native_layer_norm")
def layer_norm(
    g: OnnxGraph, site: Site, x: str, shape: list[int], weight: str | None, bias: str | None, eps: float
) -> list[str | None]:
    rank = len(site.input_shape)
    dims = list(range(rank - len(shape), rank))
    deviation = g.node("Sub", x, g.axes("ReduceMean", x, dims, True))
    variance = g.axes("ReduceMean", g.node("Mul", deviation, deviation), dims, True)
    out = g.node("Div", deviation, g.node("Sqrt", g.node("Add", variance, g.scalar(eps, torch.float32))))
    out = out if weight is None else g.node("Mul", out, weight)
    return [out if bias is None else g.node("Add", out, bias), None, None]


@lowers("native_group_norm")
def group_norm(
    g: OnnxGraph, site: Site, x: str, weight: str | None, bias: str | None, batch: int, channels: int, size: int,
    groups: int, eps: float,
) -> list[str | None]:  # fmt: skip
    grouped = g.reshape(x, [batch, groups, channels // groups * size])
    deviation = g.node("Sub", grouped, g.axes("ReduceMean", grouped, [2], True))
    variance = g.axes("ReduceMean", g.node("Mul", deviation, deviation), [2], True)
    out = g.node("Div", deviation, g.node("Sqrt", g.node("Add", variance, g.scalar(eps, torch.float32))))
    out = g.reshape(out, site.input_shape)
    one_each = [1, channels, *[1] * (len(site.input_shape) - 2)]
    out = out if weight is None else g.node("Mul", out, g.reshape(weight, one_each))
    return [out if bias is None else g.node("Add", out, g.reshape(bias, one_each)), None, None]


@lowers("addmm")
def addmm(g: OnnxGraph, site: Site, bias: str, a: str, b: str, *, beta: float = 1, alpha: float = 1) -> str:
    return g.node("Gemm", a, b, bias, alpha=float(alpha), beta=float(beta))


@lowers("mm")
def mm(g: OnnxGraph, site: Site, a: str, b: str) -> str:
    """A `Gemm`: where `MatMul` reads a `DequantizeLinear` of 8-bit weights, ONNX Runtime puts in `MatMulNBits`, which
    rounds the other operand to 8 bits.
    """
    is_real = site.input_dtype in (torch.float32, torch.float64)  # which all versions of it take
    return g.node("Gemm" if is_real else "MatMul", a, b)


@lowers("bmm", "matmul")
def matmul(g: OnnxGraph, site: Site, a: str, b: str) -> str:
    return g.node("MatMul", a, b)


@lowers("convolution", "_convolution")  # the second is that of scripts
def convolution(
    g: OnnxGraph, site: Site, x: str, weight: str, bias: str | None, stride: list[int], padding: list[int],
    dilation: list[int], is_transposed: bool, output_padding: list[int], groups: int,
    *of_kernels: bool,
) -> str:  # fmt: skip
    axes = len(site.inputs[1].shape) - 2
    stride, padding, dilation, output_padding = (
        list(sizes) * (axes // len(sizes)) for sizes in (stride, padding, dilation, output_padding)
    )
    return g.conv(x, weight, bias, Geometry(stride, padding, dilation, output_padding, groups, is_transposed))
