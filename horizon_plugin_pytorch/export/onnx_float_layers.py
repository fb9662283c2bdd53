"""Pools, resizing, and recurrent layers of float models as ONNX operators; results are close, not equal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_aten import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site

_GATES = (0, 3, 1, 2)  # torch has input, forget, cell, output; ONNX has input, output, forget, cell


def _sizes(value: Any, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    g: OnnxGraph, site: Site, x: str, kernel: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> str:  # fmt: skip
    axes = int(site.name[-2])
    kernel, pads = _sizes(kernel, axes), _sizes(padding, axes)
    steps = _sizes(stride, axes) if stride else kernel
    is_single = site.rank == axes + 1  # one image without a batch axis
    x = g.apart_from_pad(g.reshape(x, [1, *site.input_shape]) if is_single else x)
    if not ceil_mode and divisor_override is None:
        out = g.node(
            "AveragePool", x, kernel_shape=kernel, strides=steps, pads=pads * 2,
            count_include_pad=int(count_include_pad),
        )  # fmt: skip
        return g.reshape(out, site.output_shape) if is_single else out
    # ONNX counts windows and what is in them differently: here every window is whole, and divided as torch divides it.
    shape, lead = site.input_shape[-axes:], [0, 0]
    ends = [
        max((count - 1) * s + k - size - p, 0)
        for count, s, k, size, p in zip(site.output_shape[-axes:], steps, kernel, shape, pads, strict=True)
    ]
    around = g.constant([*lead, *pads, *lead, *ends], torch.int64, "pads")
    whole = g.apart_from_pad(g.node("Pad", x, around, g.scalar(0.0, torch.float32)))
    mean = g.node("AveragePool", whole, kernel_shape=kernel, strides=steps)
    out = g.node("Mul", mean, g.constant(_shares(site, axes, kernel, steps, pads, ceil_mode, count_include_pad,
                                                 divisor_override), hint="shares"))  # fmt: skip
    return g.reshape(out, site.output_shape) if is_single else out


def _shares(site: Site, axes: int, kernel: list[int], *options: Any) -> Tensor:
    """For each window, how many times the mean of a whole one its mean is."""
    pool = getattr(torch.nn.functional, f"avg_pool{max(axes, 2)}d")
    shape = site.input_shape[-axes:]
    steps, pads, ceil_mode, count_include_pad, divisor = options
    if axes == 1:
        shape, kernel, steps, pads = [1, *shape], [1, *kernel], [1, *steps], [0, *pads]
    ones = torch.ones(1, 1, *shape, dtype=torch.float32)
    values = pool(ones, kernel, steps, pads, ceil_mode, count_include_pad, divisor)
    sums = pool(ones, kernel, steps, pads, ceil_mode, count_include_pad, 1)
    out = values / sums.clamp(min=1) * math.prod(kernel)
    return out.squeeze(2) if axes == 1 else out


@lowers(
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool3d",
)  # fmt: skip
def separable(g: OnnxGraph, site: Site, x: str, wanted: Any, *args: Any, **kwargs: Any) -> str:
    """One axis after the other, each by the matrix that torch itself uses."""
    axes = int(site.name[-2])
    name = site.name.removeprefix("aten::")
    operator = getattr(torch.ops.aten, f"_{name}" if name.startswith("adaptive") else name)
    align, *factors = args if args else (kwargs.get("align_corners", False),)
    for axis in range(axes):
        source, size = site.input_shape[site.rank - axes + axis], [1] * axes
        size[axis] = site.output_shape[site.rank - axes + axis]
        shape = [source, *[1] * (axes + 1)]
        shape[axis + 2] = source
        unit = torch.eye(source, dtype=torch.float32).reshape(shape)
        if "adaptive" in name:
            image = operator(unit, size)
        else:
            scales = [factors[axis] if i == axis and len(factors) == axes else None for i in range(axes)]
            image = operator(unit, size, align, *scales)
        x = _along(g, x, image.reshape(source, -1), site.rank - axes + axis, site.rank)
    return x


def _along(g: OnnxGraph, x: str, matrix: Tensor, axis: int, rank: int) -> str:
    """The product with a matrix along an axis."""
    if axis == rank - 2:
        return g.node("MatMul", g.constant(matrix.T.contiguous(), hint="rows"), x)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    is_last = axis == rank - 1
    out = g.node("MatMul", x if is_last else g.node("Transpose", x, perm=order), g.constant(matrix, hint="columns"))
    return out if is_last else g.node("Transpose", out, perm=order)


@lowers("mkldnn_rnn_layer")
def lstm(
    g: OnnxGraph, site: Site, x: str, w_ih: str, w_hh: str, b_ih: str, b_hh: str, hidden: str, cell: str,
    is_reversed: bool, batch_sizes: list[int], mode: int, hidden_size: int, num_layers: int, has_biases: bool,
    bidirectional: bool, batch_first: bool, train: bool,
) -> list[str | None]:  # fmt: skip
    """A layer of an `nn.LSTM` in one direction; `x` has the steps first."""
    if mode != 2 or batch_sizes:
        raise ExportError("a packed sequence has no ONNX form; give the layer padded tensors.")
    rows = [gate * hidden_size + row for gate in _GATES for row in range(hidden_size)]
    front = g.constant([0], torch.int64, "axes")

    def ordered(weight: str) -> str:
        return g.node("Gather", weight, g.constant(rows, torch.int64, "gates"), axis=0)

    def first(value: str) -> str:
        return g.node("Unsqueeze", value, front)

    bias = g.node("Concat", ordered(b_ih), ordered(b_hh), axis=0)
    out, last, state = g.node(
        "LSTM", x, first(ordered(w_ih)), first(ordered(w_hh)), first(bias), "", _one_state(g, site, 5, hidden),
        _one_state(g, site, 6, cell), outputs=3, hidden_size=hidden_size,
        direction="reverse" if is_reversed else "forward",
    )  # fmt: skip
    shapes = [value.shape for value in site.outputs]
    return [
        g.node("Squeeze", out, g.constant([1], torch.int64, "axes")), g.reshape(last, shapes[1]),
        g.reshape(state, shapes[2]), None,
    ]  # fmt: skip


def _one_state(g: OnnxGraph, site: Site, index: int, name: str) -> str:
    """A state as ONNX has it: one direction, samples, features."""
    shape = site.inputs[index].shape
    return name if len(shape) == 3 else g.reshape(name, [1, *shape])


@lowers("col2im")
def fold(
    g: OnnxGraph, site: Site, x: str, size: list[int], kernel: list[int], dilation: list[int], padding: list[int],
    stride: list[int],
) -> str:  # fmt: skip
    """Windows that lie side by side are moved to their places."""
    is_apart = list(kernel) == list(stride) and not any(padding) and list(dilation) == [1, 1]
    if not is_apart or any(s % k for s, k in zip(size, kernel, strict=True)):
        raise ExportError("a fold of windows that overlap has no ONNX form; write it as a transposed convolution.")
    lead, channels = site.output_shape[:-3], site.output_shape[-3]
    rows, columns = (s // k for s, k in zip(size, kernel, strict=True))
    n = len(lead)
    x = g.reshape(x, [*lead, channels, *kernel, rows, columns])
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return g.reshape(g.node("Transpose", x, perm=order), site.output_shape)


@lowers("median", "kthvalue")
def kth(g: OnnxGraph, site: Site, x: str, *args: Any) -> Any:
    """The k-th smallest value; the median of an even count is the lower one."""
    whole = site.name == "aten::median" and not args
    if whole:
        x, axis, count, keep = g.reshape(x, [-1]), 0, math.prod(site.input_shape), False
    else:
        *first, dim, keep = [*args, False][: 3 if site.name == "aten::kthvalue" else 2]
        axis, count = dim % site.rank, site.input_shape[dim]
    k = (count - 1) // 2 + 1 if site.name == "aten::median" else int(first[0])
    found = g.node("TopK", x, g.constant([k], torch.int64, "k"), outputs=2, axis=axis, largest=0, sorted=1)
    last = g.constant([k - 1] if keep else k - 1, torch.int64, "index")
    out = [g.node("Gather", part, last, axis=axis) for part in found]
    return out[0] if whole else out
