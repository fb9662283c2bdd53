"""Choosing, sorting and indexing as ONNX operators.

ONNX's TopK and ArgMax take the lowest position among equal values, as `fixed_point.selection` does.
"""

from __future__ import annotations

from typing import Any

import torch

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export import onnx_aten, onnx_fixed_point
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.export.onnx_order import of_numbers


@of_numbers
def _topk(g: OnnxGraph, site: Site, x: str, k: int, dim: int, largest: bool) -> list[str]:
    if site.rank == 0:
        return [x, g.constant(0, torch.int64, "position")]
    count = g.constant([k], torch.int64, "k")
    return g.node("TopK", x, count, outputs=2, axis=dim % site.rank, largest=int(largest), sorted=1)


@onnx_fixed_point.lowers("topk")
def topk(g: OnnxGraph, site: Site, q: str, k: int, dim: int, largest: bool) -> list[str]:
    return _topk(g, site, q, k, dim, largest)


@onnx_aten.lowers("topk")
def float_topk(
    g: OnnxGraph, site: Site, x: str, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[str]:
    return _topk(g, site, x, k, dim, largest)


@onnx_aten.lowers("sort")
def sort(
    g: OnnxGraph, site: Site, x: str, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> list[str]:
    return _topk(g, site, x, site.input_shape[dim] if site.rank else 1, dim, descending)


@onnx_aten.lowers("aminmax")
@of_numbers
def aminmax(g: OnnxGraph, site: Site, x: str, *, dim: int | None = None, keepdim: bool = False) -> list[str]:
    axes = list(range(site.rank)) if dim is None else [dim % max(site.rank, 1)]
    return [g.axes(f"Reduce{word}", x, axes, keepdim) for word in ("Min", "Max")]


@onnx_aten.lowers("gather")
def gather(g: OnnxGraph, site: Site, x: str, dim: int, index: str, sparse_grad: bool = False) -> str:
    return g.node("GatherElements", x, index, axis=dim % max(site.rank, 1))


@onnx_aten.lowers("remainder")
def remainder(g: OnnxGraph, site: Site, a: str, b: Any) -> str:
    if site.input_dtype.is_floating_point:
        raise ExportError("a remainder of float numbers has no exact ONNX form; leave it out of the exported model.")
    return g.node("Mod", a, b if isinstance(b, str) else g.constant(b, site.input_dtype))


@onnx_aten.lowers("floor_divide")
def floor_divide(g: OnnxGraph, site: Site, a: str, b: Any) -> str:
    """ONNX's division of integers drops the fraction; without the remainder there is none."""
    if site.input_dtype.is_floating_point:
        raise ExportError("`//` of float numbers has no exact ONNX form; leave it out of the exported model.")
    divisor = b if isinstance(b, str) else g.constant(b, site.input_dtype)
    return g.node("Div", g.node("Sub", a, g.node("Mod", a, divisor)), divisor)


@onnx_aten.lowers("index")
def index(g: OnnxGraph, site: Site, x: str, positions: list[str | None]) -> str:
    """``x[:, p, q]``: axes with positions go to the front, are chosen together, and go where torch puts them."""
    axes = [axis for axis, name in enumerate(positions) if name is not None]
    names = [name for name in positions if name is not None]
    mask = g.numbers_of(names[0]) if len(axes) == 1 and site.inputs[1].dtype == torch.bool else None
    if mask is not None and (mask.dim() == 1 or axes == [0]):  # how many it chooses is known
        chosen = g.constant(mask.nonzero() if mask.dim() > 1 else mask.nonzero().flatten(), torch.int64, "positions")
        return g.node("GatherND", x, chosen) if mask.dim() > 1 else g.node("Gather", x, chosen, axis=axes[0])
    if any(value.dtype == torch.bool for value in site.inputs[1:]):
        raise ExportError(
            "a choice by a mask that the model computes gives as many values as the mask has ones, and the file has "
            "fixed shapes; keep all values, and set the others to 0 with `torch.where`."
        )
    if len(axes) == 1:
        return g.node("Gather", x, names[0], axis=axes[0])
    rest = [axis for axis in range(site.rank) if axis not in axes]
    lead = len(site.output_shape) - len(rest)
    is_adjacent = axes == list(range(axes[0], axes[-1] + 1))
    before = axes[0] if is_adjacent else 0
    shape = site.output_shape[before : before + lead]
    last = g.constant([-1], torch.int64, "axes")
    whole = g.constant(shape, torch.int64, "shape")
    stacked = g.node("Concat", *(g.node("Unsqueeze", g.node("Expand", n, whole), last) for n in names), axis=-1)
    chosen = g.node("GatherND", g.node("Transpose", x, perm=[*axes, *rest]), stacked)
    order = [*range(lead, lead + before), *range(lead), *range(lead + before, lead + len(rest))]
    return g.node("Transpose", chosen, perm=order)


@onnx_aten.lowers("take")
def take(g: OnnxGraph, site: Site, x: str, positions: str) -> str:
    return g.node("Gather", g.reshape(x, [-1]), positions, axis=0)


@onnx_aten.lowers("tril", "triu")
def tril(g: OnnxGraph, site: Site, x: str, diagonal: int = 0) -> str:
    keep = torch.ones(site.input_shape[-2:], dtype=torch.bool)
    keep = keep.tril(diagonal) if site.name == "aten::tril" else keep.triu(diagonal)
    return g.where(g.constant(keep, hint="keep"), x, g.constant(0, site.input_dtype), site.input_dtype)


@onnx_aten.lowers("diagonal")
def diagonal(g: OnnxGraph, site: Site, x: str, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    first, second = dim1 % site.rank, dim2 % site.rank
    rest = [axis for axis in range(site.rank) if axis not in (first, second)]
    rows, columns = site.input_shape[first], site.input_shape[second]
    moved = g.node("Transpose", x, perm=[*rest, first, second])
    flat = g.reshape(moved, [*(site.input_shape[axis] for axis in rest), rows * columns])
    positions = torch.arange(rows * columns).reshape(rows, columns).diagonal(offset)
    return g.node("Gather", flat, g.constant(positions, torch.int64, "diagonal"), axis=len(rest))


@onnx_aten.lowers("rot90")
def rot90(g: OnnxGraph, site: Site, x: str, k: int = 1, dims: tuple[int, int] = (0, 1)) -> str:
    first, second = (d % site.rank for d in dims)
    order = list(range(site.rank))
    order[first], order[second] = second, first
    flipped = {0: [], 1: [first], 2: [first, second], 3: [second]}[k % 4]  # of the result, after the swap
    out = g.node("Transpose", x, perm=order) if k % 2 else x
    return onnx_aten.flip(g, site, out, flipped) if flipped else out


def _windows(kernel: int, dilation: int, stride: int, count: int) -> torch.Tensor:
    """For each place in the window and each window, the position that is read."""
    return torch.arange(kernel).unsqueeze(1) * dilation + torch.arange(count).unsqueeze(0) * stride


@onnx_aten.lowers("im2col")
def im2col(
    g: OnnxGraph, site: Site, x: str, kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> str:
    *lead, height, width = site.input_shape
    n = len(lead)
    if any(padding):
        pads = g.constant([*[0] * n, *padding] * 2, torch.int64, "pads")
        x = g.node("Pad", x, pads, g.scalar(0.0, torch.float32))
    for axis, size, k, d, p, s in zip((n, n + 2), (height, width), kernel, dilation, padding, stride, strict=True):
        count = (size + 2 * p - d * (k - 1) - 1) // s + 1
        positions = _windows(k, d, s, count)
        x = g.node("Gather", x, g.constant(positions, torch.int64, "window"), axis=axis)
    order = [*range(n), n, n + 2, n + 1, n + 3]
    return g.reshape(g.node("Transpose", x, perm=order), site.output_shape)


@onnx_aten.lowers("unfold")
def unfold(g: OnnxGraph, site: Site, x: str, dimension: int, size: int, step: int) -> str:
    if site.rank == 0:
        return g.reshape(x, site.output_shape)
    axis = dimension % site.rank
    positions = _windows(size, 1, step, site.output_shape[axis]).T
    out = g.node("Gather", x, g.constant(positions.contiguous(), torch.int64, "window"), axis=axis)
    order = [a for a in range(site.rank + 1) if a != axis + 1] + [axis + 1]
    return g.node("Transpose", out, perm=order)
