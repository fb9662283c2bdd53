"""Writes to positions, and sums over them, as standard ONNX operators: float code around the quantized part."""

from __future__ import annotations

import math

import torch

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_aten import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site

_REDUCTIONS = {  # as ONNX calls them, the opset that has them, and what changes nothing
    "sum": ("add", 16, 0.0), "prod": ("mul", 16, 1.0), "amax": ("max", 18, -math.inf), "amin": ("min", 18, math.inf),
    "mean": ("add", 16, 0.0),
}  # fmt: skip


def _require(g: OnnxGraph, opset: int, what: str) -> None:
    if g.opset < opset:
        raise ExportError(f"{what} has an ONNX form from opset {opset} on; export with opset_version={opset}.")


def _to_front(g: OnnxGraph, x: str, dim: int, rank: int) -> str:
    """A tensor with an axis exchanged with the first; twice, it is as it was."""
    order = list(range(rank))
    order[0], order[dim] = dim, 0
    return x if dim == 0 else g.node("Transpose", x, perm=order)


@lowers("index_copy")
def index_copy(g: OnnxGraph, site: Site, x: str, dim: int, index: str, source: str) -> str:
    dim = dim % site.rank
    front, values = _to_front(g, x, dim, site.rank), _to_front(g, source, dim, site.rank)
    return _to_front(g, g.node("ScatterND", front, g.reshape(index, [-1, 1]), values), dim, site.rank)


@lowers("index_add")
def index_add(g: OnnxGraph, site: Site, x: str, dim: int, index: str, source: str, *, alpha: float = 1) -> str:
    """Slices are added; a position may come several times."""
    dim = dim % max(site.rank, 1)
    if alpha != 1:
        source = g.node("Mul", source, g.constant(alpha, site.outputs[0].dtype))
    shape = list(site.inputs[-1].shape)
    lead = [1] * dim + [-1] + [1] * (site.rank - dim - 1)
    everywhere = g.node("Expand", g.reshape(index, lead), g.constant(shape, torch.int64, "shape"))
    return _reduced(g, site, x, dim, everywhere, source, "sum", True)


@lowers("scatter_add", "scatter_reduce")
def scatter_reduce(
    g: OnnxGraph, site: Site, x: str, dim: int, index: str, source: str, reduce: str = "sum", *,
    include_self: bool = True,
) -> str:  # fmt: skip
    """Values are added, multiplied or compared where they are written to."""
    shape = list(site.inputs[1].shape)
    if list(site.inputs[-1].shape) != shape:  # the index says how many of them are taken
        axes = list(range(len(shape)))
        bounds = ([0] * len(shape), shape, axes)
        source = g.node("Slice", source, *(g.constant(bound, torch.int64, "slice") for bound in bounds))
    return _reduced(g, site, x, dim % max(site.rank, 1), index, source, reduce, include_self)


def _reduced(
    g: OnnxGraph, site: Site, x: str, dim: int, index: str, source: str, reduce: str, include_self: bool
) -> str:
    name, opset, neutral = _REDUCTIONS[reduce]
    _require(g, opset, f"a write that takes the {reduce} of several values")
    dtype, shape = site.outputs[0].dtype, site.inputs[1].shape if site.name != "aten::index_add" else None
    if not include_self and shape is not None:
        blank = g.node("Expand", g.constant(neutral, dtype), g.constant(list(shape), torch.int64, "shape"))
        x = g.node("ScatterElements", x, index, blank, axis=dim)
    out = g.node("ScatterElements", x, index, source, axis=dim, reduction=name)
    if reduce != "mean" or shape is None:
        return out
    ones = g.node("Expand", g.constant(1, dtype), g.constant(list(shape), torch.int64, "shape"))
    start = g.constant(torch.full(tuple(site.output_shape), int(include_self), dtype=dtype), hint="count")
    count = g.node("ScatterElements", start, index, ones, axis=dim, reduction="add")
    return g.node("Div", out, g.node("Max", count, g.constant(1, dtype)))


@lowers("index_put")
def index_put(
    g: OnnxGraph, site: Site, x: str, positions: list[str | None], values: str, accumulate: bool = False
) -> str:
    """``x[mask] = number``; with positions, along leading axes."""
    given = [(axis, name) for axis, name in enumerate(positions) if name is not None]
    described = site.inputs[1 : 1 + len(given)]
    if any(value.dtype == torch.bool for value in described):
        return _put_by_mask(g, site, x, given, values, accumulate)
    if len(given) != len(positions):
        raise ExportError(
            "a write to positions of an axis behind one that is taken whole has no ONNX form; exchange the axes, or "
            "write it with `torch.where`."
        )
    sizes, rest = site.input_shape[: len(given)], site.input_shape[len(given) :]
    lead = list(torch.broadcast_shapes(*(value.shape for value in described)))
    whole, last = g.constant(lead, torch.int64, "shape"), g.constant([-1], torch.int64, "axes")
    spread = g.node("Expand", values, g.constant([*lead, *rest], torch.int64, "shape"))
    if not accumulate:
        stacked = g.node("Concat", *(g.node("Unsqueeze", g.node("Expand", n, whole), last) for _, n in given), axis=-1)
        return g.node("ScatterND", x, stacked, spread)
    _require(g, 16, "a write that adds")
    # Not by ScatterND: of a position that comes twice, its threads could lose a value.
    row = None
    for (_, name), size in zip(given, sizes, strict=True):
        place = g.node("Mod", g.cast(name, torch.int64), g.constant(size, torch.int64))
        row = place if row is None else g.node("Add", g.node("Mul", row, g.constant(size, torch.int64)), place)
    assert row is not None
    count, width = math.prod(lead), math.prod(rest)
    shape = g.constant([count, width], torch.int64, "shape")
    rows = g.node("Expand", g.reshape(g.node("Expand", row, whole), [count, 1]), shape)
    table = g.reshape(x, [math.prod(sizes), width])
    out = g.node("ScatterElements", table, rows, g.reshape(spread, [count, width]), axis=0, reduction="add")
    return g.reshape(out, site.input_shape)


def _put_by_mask(g: OnnxGraph, site: Site, x: str, given: list[tuple[int, str]], values: str, accumulate: bool) -> str:
    """The same values wherever a mask is true; as many values as it has ones would have no fixed shape."""
    (axis, mask), described, shape = given[0], site.inputs[1], list(site.inputs[-1].shape)
    behind = site.rank - axis - len(described.shape)
    is_same = len(shape) <= behind or (len(shape) == behind + 1 and shape[0] == 1)
    if len(given) > 1 or not is_same:
        raise ExportError(
            "a write of as many values as a mask has ones has no ONNX form; write it with `torch.where(mask, a, b)`."
        )
    after = g.reshape(mask, [*described.shape, *[1] * behind])
    if len(shape) > behind:
        values = g.reshape(values, shape[1:])
    return g.node("Where", after, g.node("Add", x, values) if accumulate else values, x)


@lowers("_embedding_bag_forward_only", "_embedding_bag")
def embedding_bag(
    g: OnnxGraph, site: Site, weight: str, indices: str, offsets: str, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: str | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> list[str | None]:  # fmt: skip
    """Sums or means of runs of rows, as differences of running sums, which float64 holds to many digits."""
    if mode == 2 or padding_idx >= 0:
        raise ExportError(
            "embedding_bag has an ONNX form with mode='sum' and 'mean' and without a padding index: use one of these, "
            "or leave pre- and post-processing out of the exported model."
        )
    rows = g.cast(g.node("Gather", weight, indices, axis=0), torch.float64)
    if per_sample_weights is not None:
        rows = g.node("Mul", rows, g.cast(g.reshape(per_sample_weights, [-1, 1]), torch.float64))
    running = g.node("CumSum", rows, g.constant(0, torch.int64))
    nothing = g.constant(torch.zeros(1, site.input_shape[1], dtype=torch.float64))
    running = g.node("Concat", nothing, running, axis=0)
    starts = g.cast(offsets, torch.int64)
    ends = g.node("Slice", starts, *(g.constant([n], torch.int64, "slice") for n in (1, (1 << 63) - 1)))
    if include_last_offset:
        starts = g.node("Slice", starts, *(g.constant([n], torch.int64, "slice") for n in (0, -1)))
    else:
        ends = g.node("Concat", ends, g.node("Shape", indices), axis=0)
    total = g.node("Sub", g.node("Gather", running, ends, axis=0), g.node("Gather", running, starts, axis=0))
    if mode == 1:  # an empty bag is zero
        counts = g.cast(g.reshape(g.node("Sub", ends, starts), [-1, 1]), torch.float64)
        total = g.node("Div", total, g.node("Max", counts, g.constant(torch.ones(1, dtype=torch.float64))))
    return [g.cast(total, torch.float32), None, None, None]
