"""Sampling and scattering as standard ONNX operators, mirroring `fixed_point.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_fixed_point import lowers, rescale
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.correlation import correlation_windows
from horizon_plugin_pytorch.fixed_point.reduction import bilinear_matrix
from horizon_plugin_pytorch.fixed_point.sampling import FAR, base_positions, deformed_factor, reflection_of

_WIDE = torch.float64


def _number(g: OnnxGraph, value: float) -> str:
    return g.scalar(value, _WIDE)


def _within_image(g: OnnxGraph, position: str, size: int, bits: int, padding_mode: str, align_corners: bool) -> str:
    """As `fixed_point.sampling.within_image`."""
    unit = 1 << bits
    if padding_mode == "zeros":
        return g.clip(position, -unit, size * unit, _WIDE)
    if padding_mode == "reflection":
        low, span = reflection_of(size, bits, align_corners)
        distance = g.node("Abs", g.node("Sub", position, _number(g, low)))
        turned = g.node("Mod", distance, _number(g, 2 * span), fmod=1)
        position = g.node("Add", g.node("Min", turned, g.node("Sub", _number(g, 2 * span), turned)), _number(g, low))
    return g.clip(position, 0, (size - 1) * unit, _WIDE)


def round_positions(g: OnnxGraph, position: str, bits: int) -> str:
    """As `fixed_point.sampling.round_positions`."""
    return g.node("Round", position) if bits == 0 else g.node("Floor", g.node("Add", position, _number(g, 0.5)))


class Pixels:
    """Images as rows of channels, with zeros around them: one pixel before and two after each line."""

    def __init__(self, g: OnnxGraph, images: list[str], shapes: list[list[int]], heads: int = 1) -> None:
        """Images [N, C, H, W]; with several heads [N, H, W, C], a row for the channels of each head."""
        self.graph, self.pitch = g, float(heads)
        rows, first, self.lines, self.firsts, self.sizes = [], 0, [], [], []
        for image, (batch, channels, height, width) in zip(images, shapes, strict=True):
            if heads == 1:
                image = g.node("Transpose", image, perm=[0, 2, 3, 1])
            padded = g.node("Pad", image, g.constant([0, 1, 1, 0, 0, 2, 2, 0], torch.int64, "pads"))
            rows.append(g.reshape(padded, [-1, channels // heads]))
            self.lines.append(float((width + 3) * heads))
            self.firsts.append(float(first))
            self.sizes.append(float((height + 3) * (width + 3) * heads))
            first += batch * (height + 3) * (width + 3) * heads
        self.rows = rows[0] if len(rows) == 1 else g.node("Concat", *rows, axis=0)

    def at(self, x: str, y: str, first: str, line: str) -> str:
        """Rows at whole positions (float64) of images, given the first row and the rows in a line of each."""
        g = self.graph
        down = g.node("Mul", g.node("Add", y, _number(g, 1)), line)
        across = g.node("Mul", g.node("Add", x, _number(g, 1)), _number(g, self.pitch))
        row = g.node("Add", g.node("Add", down, across), first)
        return g.node("Gather", self.rows, g.cast(row, torch.int64), axis=0)

    def between(self, x: str, y: str, first: str, line: str, bits: int) -> tuple[str, torch.dtype]:
        """The exact sum of four pixels times their weights, in ``1 / 4**bits`` steps, and its type."""
        g, unit = self.graph, float(1 << bits)
        dtype = torch.float32 if bits <= 8 else _WIDE
        whole, weights = [], []
        for position in (x, y):
            floor = g.node("Floor", g.node("Mul", position, _number(g, 1 / unit)))
            right = g.node("Sub", position, g.node("Mul", floor, _number(g, unit)))
            whole.append([floor, g.node("Add", floor, _number(g, 1))])
            weights.append([g.node("Sub", _number(g, unit), right), right])
        total = None
        for i in range(2):
            for j in range(2):
                pixel = self.at(whole[0][i], whole[1][j], first, line)
                weight = g.node("Mul", weights[0][i], weights[1][j])
                weight = g.node("Unsqueeze", weight, g.constant([-1], torch.int64, "axes"))
                if dtype == _WIDE:
                    pixel = g.cast(pixel, _WIDE)
                else:
                    weight = g.cast(weight, dtype)
                term = g.node("Mul", pixel, weight)
                total = term if total is None else g.node("Add", total, term)
        assert total is not None
        return total, dtype


@lowers("grid_sample", data="q grid")
def grid_sample(
    g: OnnxGraph,
    site: Site,
    q: str,
    grid: str,
    factor: Tensor,
    offset: Tensor,
    is_real: bool,
    is_flow: bool,
    bits: int,
    padding_mode: str,
    align_corners: bool,
) -> str:
    batch, _, height, width = site.input_shape
    wide = g.cast(grid, _WIDE)
    if is_real:
        wide = g.node("Where", g.node("IsNaN", wide), _number(g, -1.0), wide)
    position = g.node("Add", g.node("Mul", wide, g.constant(factor)), g.constant(offset))
    position = round_positions(g, g.clip(position, -FAR, FAR, _WIDE), bits)
    if is_flow:
        base = base_positions(site.output_shape[2], site.output_shape[3], bits, torch.device("cpu"))
        position = g.node("Add", position, g.constant(base))
    x, y = (
        _within_image(
            g, g.node("Gather", position, g.constant(i, torch.int64), axis=-1), size, bits, padding_mode, align_corners
        )
        for i, size in enumerate((width, height))
    )
    pixels = Pixels(g, [q], [site.input_shape])
    first = g.constant(torch.arange(batch, dtype=_WIDE).mul_(pixels.sizes[0]).reshape(-1, 1, 1))
    line = _number(g, pixels.lines[0])
    if bits == 0:
        out = pixels.at(x, y, first, line)
    else:
        total, dtype = pixels.between(x, y, first, line, bits)
        mean = g.node("Mul", total, g.scalar(0.25**bits, dtype))
        out = g.node("Floor", g.node("Add", mean, g.scalar(0.5, dtype)))
        out = out if dtype == torch.float32 else g.cast(out, torch.float32)
    return g.node("Transpose", out, perm=[0, 3, 1, 2])


@lowers("resize2d")
def resize2d(g: OnnxGraph, site: Site, q: str, x: Tensor, y: Tensor, bits: int) -> str:
    """Rows and columns by integer matrices: few large products are faster than gathering single pixels."""
    dtype = torch.float32 if bits <= 8 else _WIDE
    down, across = (bilinear_matrix(n, p, bits) for n, p in zip(site.input_shape[2:], (y, x), strict=True))
    wide = q if bits <= 8 else g.cast(q, _WIDE)
    lines = g.node("MatMul", wide, g.compact(across.T.contiguous().to(dtype), "columns"))
    acc = g.node("Round", g.node("MatMul", g.compact(down.to(dtype), "rows"), lines))
    mean = g.node("Mul", acc, g.scalar(0.25**bits, dtype))
    out = g.node("Floor", g.node("Add", mean, g.scalar(0.5, dtype)))
    return out if dtype == torch.float32 else g.cast(out, torch.float32)


@lowers("roi_align", data="maps boxes images")
def roi_align(
    g: OnnxGraph,
    site: Site,
    maps: list[str],
    boxes: str,
    images: str,
    scales: list[float],
    thresholds: list[float],
    factors: list[float],
    output_size: list[int],
    ratio: int,
    aligned: bool,
    bits: int,
    low: int,
    high: int,
) -> str:
    rows, columns = output_size
    pixels = Pixels(g, maps, [list(t.shape) for t in site.inputs[: len(maps)]])
    unit = float(1 << bits)
    corners = [g.node("Gather", g.cast(boxes, _WIDE), g.constant(i, torch.int64), axis=1) for i in range(4)]  # each [K]
    extents = [g.node("Sub", corners[i + 2], corners[i]) for i in range(2)]
    area = g.node("Mul", extents[0], extents[1])
    level = None
    for threshold in thresholds:
        step = g.cast(g.node("GreaterOrEqual", area, _number(g, threshold)), torch.int64)
        level = step if level is None else g.node("Add", level, step)
    is_single = len(maps) == 1

    def per_box(values: list[float], rank: int) -> str:
        """A number of each map, for each box."""
        if is_single:
            return _number(g, values[0])
        assert level is not None
        return g.reshape(g.node("Gather", g.constant(values, _WIDE), level, axis=0), [-1] + [1] * (rank - 1))

    def positions(axis: int, count: int) -> str:
        scale = per_box(scales, 1)
        extent = g.node("Mul", extents[axis], scale)
        extent = extent if aligned else g.node("Max", extent, _number(g, 1.0))
        inside = torch.arange(count, dtype=_WIDE).add_(0.5).div_(count).mul_(unit)
        start = g.node("Sub", g.node("Mul", corners[axis], scale), _number(g, 0.5 if aligned else 0.0))
        first = g.reshape(g.node("Mul", start, _number(g, unit)), [-1, 1])
        along = g.node("Mul", g.reshape(extent, [-1, 1]), g.constant(inside))
        position = round_positions(g, g.clip(g.node("Add", along, first), -FAR, FAR, _WIDE), bits)
        size = per_box([float(t.shape[3 - axis]) for t in site.inputs[: len(maps)]], 2)
        last = g.node("Mul", g.node("Sub", size, _number(g, 1.0)), _number(g, unit))
        inner = g.node("Max", g.node("Min", position, last), _number(g, 0.0))
        begun = g.node("GreaterOrEqual", position, _number(g, -unit))
        is_near = g.node("And", begun, g.node("LessOrEqual", position, g.node("Mul", size, _number(g, unit))))
        return g.node("Where", is_near, inner, _number(g, -unit))

    x = g.reshape(positions(0, columns * ratio), [-1, 1, columns * ratio])
    y = g.reshape(positions(1, rows * ratio), [-1, rows * ratio, 1])
    image = g.reshape(g.cast(images, _WIDE), [-1, 1, 1])
    first = g.node("Add", g.node("Mul", image, per_box(pixels.sizes, 3)), per_box(pixels.firsts, 3))
    total, _ = pixels.between(x, y, first, per_box(pixels.lines, 3), bits)
    total = g.cast(total, _WIDE)
    if ratio > 1:
        count, channels = site.output_shape[:2]
        total = g.reshape(total, [count, rows, ratio, columns, ratio, channels])
        total = g.axes("ReduceSum", total, [2, 4], False)
    mean = g.node("Mul", g.node("Mul", total, _number(g, 0.25**bits)), per_box(factors, 4))
    out = g.node("Floor", g.node("Add", mean, _number(g, 0.5)))
    return g.node("Transpose", g.cast(g.clip(out, low, high, _WIDE), torch.float32), perm=[0, 3, 1, 2])


@lowers("correlation", data="a b")
def correlation(
    g: OnnxGraph,
    site: Site,
    a: str,
    b: str,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    pad_size: int,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    height, width = site.input_shape[2:]
    at = correlation_windows((height, width), kernel_size, max_displacement, stride1, stride2, pad_size)
    dtype = _WIDE if is_double else torch.float32
    pads = g.constant([0, 0, pad_size, pad_size] * 2, torch.int64, "pads")
    left, right = (g.node("Pad", x, pads) for x in (a, b))
    if is_double:
        left, right = g.cast(left, dtype), g.cast(right, dtype)

    def window(x: str, starts: tuple[int, int], sides: tuple[int, int], steps: int = 1) -> str:
        ends = [start + side for start, side in zip(starts, sides, strict=True)]
        values = [list(starts), ends, [2, 3], [steps, steps]]
        return g.node("Slice", x, *(g.constant(v, torch.int64, "slice") for v in values))

    sides = (at.height, at.width)
    patch = window(left, (at.start, at.start), sides)
    sums = []
    for down, across in at.displacements:
        product = g.node("Mul", patch, window(right, (at.start + down, at.start + across), sides))
        sums.append(g.axes("ReduceSum", product, [1], True))
    total = g.node("Concat", *sums, axis=1) if len(sums) > 1 else sums[0]
    places = (at.height - kernel_size + 1, at.width - kernel_size + 1)
    corners = [(i, j) for i in range(kernel_size) for j in range(kernel_size)]
    parts = [window(total, corner, places, stride1) for corner in corners]
    acc = parts[0]
    for part in parts[1:]:
        acc = g.node("Add", acc, part)
    return rescale(g, acc, dtype, factor, low, high)


def _column(g: OnnxGraph, x: str, index: int) -> str:
    return g.node("Gather", x, g.constant(index, torch.int64), axis=1)


def _whole(g: OnnxGraph, value: int) -> str:
    return g.constant(value, torch.int64)


def _zeros(g: OnnxGraph, rows: int, columns: int) -> str:
    """Zeros that take no room in the file."""
    return g.node("Expand", g.scalar(0.0, torch.float32), g.constant([rows, columns], torch.int64, "shape"))


@lowers("scatter_rows", data="q coords")
def scatter_rows(g: OnnxGraph, site: Site, q: str, coords: str, batch: int, height: int, width: int) -> str:
    """ONNX promises no order for rows with the same target, so all but the last of a cell go to one that is cut off.

    Keys of cell and order are sorted; the first of each cell is its last row.
    """
    count, channels = site.input_shape
    if count == 0:
        raise ExportError("point_pillars_scatter has no pillars in the example inputs; export with at least one.")
    nowhere = batch * height * width
    wide = g.cast(coords, torch.int64)
    n, y, x = (_column(g, wide, index) for index in (0, -2, -1))
    within = []
    for value, size in ((n, batch), (y, height), (x, width)):
        begun = g.node("GreaterOrEqual", value, _whole(g, 0))
        within.append(g.node("And", begun, g.node("Less", value, _whole(g, size))))
    is_inside = g.node("And", within[0], g.node("And", within[1], within[2]))
    line = g.node("Add", g.node("Mul", n, _whole(g, height)), y)
    cell = g.node("Add", g.node("Mul", line, _whole(g, width)), x)
    cell = g.node("Where", is_inside, cell, _whole(g, nowhere))
    key = g.node("Add", g.node("Mul", cell, _whole(g, count)), g.constant(torch.arange(count)))
    ordered, _ = g.node("TopK", key, g.constant([count], torch.int64), outputs=2, axis=0, largest=1, sorted=1)
    cell = g.node("Div", ordered, _whole(g, count))
    order = g.node("Sub", ordered, g.node("Mul", cell, _whole(g, count)))
    before = g.node("Slice", cell, *(g.constant([v], torch.int64) for v in (0, count - 1, 0)))
    before = g.node("Concat", g.constant([-1], torch.int64), before, axis=0)
    target = g.node("Where", g.node("Equal", cell, before), _whole(g, nowhere), cell)
    canvas = g.node(
        "ScatterND", _zeros(g, nowhere + 1, channels), g.reshape(target, [count, 1]),
        g.node("Gather", q, order, axis=0),
    )  # fmt: skip
    kept = g.node("Slice", canvas, *(g.constant([v], torch.int64) for v in (0, nowhere, 0)))
    return g.node("Transpose", g.reshape(kept, [batch, height, width, channels]), perm=[0, 3, 1, 2])


@lowers("bev_pool", data="depth feat ranks_depth ranks_feat ranks_bev interval_starts interval_lengths")
def bev_pool(
    g: OnnxGraph,
    site: Site,
    depth: str,
    feat: str,
    ranks_depth: str,
    ranks_feat: str,
    ranks_bev: str,
    interval_starts: str,
    interval_lengths: str,
    cells: int,
    bits: int,
    factor: Tensor,
    low: int,
    high: int,
) -> str:
    """Sums of intervals as differences of running sums, which are exact in float64."""
    channels = site.inputs[1].shape[1]
    weight = g.reshape(g.cast(g.node("Gather", depth, ranks_depth, axis=0), _WIDE), [-1, 1])
    product = g.node("Mul", g.cast(g.node("Gather", feat, ranks_feat, axis=0), _WIDE), weight)
    running = g.node("CumSum", product, g.constant(0, torch.int64))
    running = g.node("Concat", g.constant(torch.zeros(1, channels, dtype=_WIDE)), running, axis=0)
    ends = g.node("Add", interval_starts, interval_lengths)
    total = g.node("Sub", g.node("Gather", running, ends, axis=0), g.node("Gather", running, interval_starts, axis=0))
    place = g.reshape(g.cast(g.node("Gather", ranks_bev, interval_starts, axis=0), torch.int64), [-1, 1])
    return g.node("ScatterND", _zeros(g, cells, channels), place, rescale(g, total, _WIDE, factor, low, high))


@lowers("deformable_attention", data="value offsets weights reference")
def deformable_attention(
    g: OnnxGraph,
    site: Site,
    value: str,
    offsets: str,
    weights: str,
    reference: str,
    heights: list[int],
    widths: list[int],
    scale: float,
    bits: int,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    batch, _, heads, depth = site.input_shape
    points, numbers = site.inputs[1].shape[4], site.inputs[3].shape[-1] // 2
    unit = float(1 << bits)
    dtype = _WIDE if is_double else torch.float32
    wide_offsets, wide_reference = g.cast(offsets, _WIDE), g.cast(reference, _WIDE)

    total, start = None, 0
    for level, (height, width) in enumerate(zip(heights, widths, strict=True)):
        places = []
        for axis, size in enumerate((width, height)):
            step = g.node(
                "Mul", _pick(g, wide_offsets, axis, level, 3), _number(g, deformed_factor(numbers, scale, points, bits))
            )
            if numbers == 2:
                extent = g.node("Mul", _pick(g, wide_reference, axis + 2, level, 2), _number(g, size))
                step = g.node("Mul", step, _unsqueeze(g, extent, 2, 3))
            base = g.node("Mul", _pick(g, wide_reference, axis, level, 2), _number(g, size * unit))
            base = g.node("Sub", base, _number(g, unit / 2))
            position = g.node("Add", step, _unsqueeze(g, base, 2, 3))
            position = g.node("Where", g.node("IsNaN", position), _number(g, -FAR), position)
            position = round_positions(g, g.clip(position, -FAR, FAR, _WIDE), bits)
            position = g.clip(position, -unit, size * unit, _WIDE)
            places.append(g.node("Transpose", position, perm=[0, 2, 3, 1]))  # batch, head, point, query
        ends = [start + height * width]
        image = g.node("Slice", value, *(g.constant(v, torch.int64) for v in ([start], ends, [1])))
        image = g.reshape(image, [batch, height, width, heads * depth])
        pixels = Pixels(g, [image], [[batch, heads * depth, height, width]], heads)
        first = torch.arange(batch, dtype=_WIDE).mul_(pixels.sizes[0]).reshape(-1, 1, 1, 1)
        first = first + torch.arange(heads, dtype=_WIDE).reshape(-1, 1, 1)
        acc, acc_dtype = pixels.between(places[0], places[1], g.constant(first), _number(g, pixels.lines[0]), bits)
        samples = g.node("Mul", acc, g.scalar(0.25**bits, acc_dtype))
        samples = g.node("Floor", g.node("Add", samples, g.scalar(0.5, acc_dtype)))
        weight = g.node("Gather", weights, _whole(g, level), axis=3)
        weight = _unsqueeze(g, g.node("Transpose", weight, perm=[0, 2, 3, 1]), 4)
        product = g.node("Mul", g.cast(samples, dtype), g.cast(weight, dtype))
        summed = g.axes("ReduceSum", product, [2], False)
        total = summed if total is None else g.node("Add", total, summed)
        start += height * width
    assert total is not None
    out = g.node("Transpose", rescale(g, total, dtype, factor, low, high), perm=[0, 2, 1, 3])
    return g.reshape(out, site.output_shape)


def _pick(g: OnnxGraph, x: str, number: int, level: int, axis: int) -> str:
    """One of the last axis's numbers, of one level."""
    return g.node("Gather", g.node("Gather", x, _whole(g, number), axis=-1), _whole(g, level), axis=axis)


def _unsqueeze(g: OnnxGraph, x: str, *axes: int) -> str:
    return g.node("Unsqueeze", x, g.constant(list(axes), torch.int64, "axes"))
