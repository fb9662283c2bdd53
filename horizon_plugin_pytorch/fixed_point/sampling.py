"""Sampling of images at positions between their pixels.

A position is an integer in ``1 / 2**bits`` pixels, so its four weights are integers of ``2 * bits`` bits. The sums run
in torch's own `grid_sample`: with image sides padded to powers of two it meets only numbers that its type holds exactly
(float32 for ``bits = 8`` and 8-bit pixels, float64 for ``bits = 16`` and 16-bit pixels), whatever its order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import rescale_

FAR = 2.0**40  # positions beyond are as good as here, and all that follows stays exact in float64
_CHUNK = 1 << 19  # pixels copied at a time: they stay in the cache while they are sampled


def grid_factors(
    height: int, width: int, scale: float, bits: int, align_corners: bool, is_flow: bool
) -> tuple[list[float], list[float]]:
    """Factors and offsets, for x and y, that turn a grid's numbers into positions.

    Args:
        scale: the real value of one unit of the grid.
        is_flow: the grid holds distances in pixels instead of coordinates in [-1, 1].

    >>> grid_factors(4, 8, 0.5, 8, False, False)
    ([512.0, 256.0], [896.0, 384.0])
    """
    unit = float(1 << bits)
    if is_flow:
        return [scale * unit] * 2, [0.0, 0.0]
    spans = [size - 1 if align_corners else size for size in (width, height)]
    return [scale * unit * span / 2 for span in spans], [unit * (size - 1) / 2 for size in (width, height)]


def within_image(position: Tensor, size: int, bits: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Positions along an axis, moved to where they find the same value in an image with zeros around it."""
    unit = 1 << bits
    if padding_mode == "zeros":
        return position.clamp(-unit, size * unit)
    if padding_mode == "reflection":
        low, span = reflection_of(size, bits, align_corners)
        turned = torch.fmod((position - low).abs_(), 2 * span)
        position = torch.minimum(turned, 2 * span - turned).add_(low)
    return position.clamp(0, (size - 1) * unit)


def reflection_of(size: int, bits: int, align_corners: bool) -> tuple[float, float]:
    """Where reflection begins along an axis, and the distance to where it begins at the other end."""
    unit = 1 << bits
    return (0.0, float(max(size - 1, 1) * unit)) if align_corners else (-unit / 2, float(size * unit))


def base_positions(height: int, width: int, bits: int, device: torch.device) -> Tensor:
    """The position of every pixel: ``[height, width, 2]``, x first."""
    unit = float(1 << bits)
    y = torch.arange(height, dtype=torch.float64, device=device).mul_(unit)
    x = torch.arange(width, dtype=torch.float64, device=device).mul_(unit)
    return torch.stack((x.expand(height, width), y.unsqueeze(1).expand(height, width)), -1)


def round_positions(position: Tensor, bits: int) -> Tensor:
    """To whole positions: half up between pixels; nearest (no bits) to even, as torch's sampling does."""
    return position.round_() if bits == 0 else position.add_(0.5).floor_()


@operator(
    "grid_sample(Tensor q, Tensor grid, Tensor factor, Tensor offset, bool is_real, bool is_flow, int bits, "
    "str padding_mode, bool align_corners) -> Tensor"
)
def grid_sample(
    q: Tensor,
    grid: Tensor,
    factor: Tensor,
    offset: Tensor,
    is_real: bool,
    is_flow: bool,
    bits: int,
    padding_mode: str,
    align_corners: bool,
) -> Tensor:
    """``(sum of four pixels * weights + 2**(2*bits-1)) >> 2*bits``; the nearest pixel if there are no bits.

    Args:
        grid: integers or, if `is_real`, real numbers; ``position = round(grid * factor + offset)``.
        is_flow: the position of the output's own pixel is added.
        padding_mode: what lies around the image: ``zeros``, ``border`` or ``reflection``.
    """
    if q.dim() != 4 or grid.dim() != 4 or grid.shape[-1] != 2:
        raise RuntimeError("grid_sample takes an image [N, C, H, W] and a grid [N, H, W, 2]")
    wide = grid.double()
    if is_real:
        wide = wide.nan_to_num(nan=-1.0)  # as torch documents it
    position = round_positions((wide * factor).add_(offset).clamp_(-FAR, FAR), bits)
    if is_flow:
        position.add_(base_positions(grid.shape[1], grid.shape[2], bits, q.device))
    height, width = q.shape[2:]
    x = within_image(position[..., 0], width, bits, padding_mode, align_corners)
    y = within_image(position[..., 1], height, bits, padding_mode, align_corners)
    return sample(q, x, y, bits)


@operator("resize2d(Tensor q, Tensor x, Tensor y, int bits) -> Tensor")
def resize2d(q: Tensor, x: Tensor, y: Tensor, bits: int) -> Tensor:
    """The image at all pairs of positions x of columns and y of rows, which lie inside of it."""
    shape = (q.shape[0], y.numel(), x.numel())
    return sample(q, x.expand(shape), y.unsqueeze(1).expand(shape), bits)


def sample(q: Tensor, x: Tensor, y: Tensor, bits: int) -> Tensor:
    """The image at positions x and y; zero outside of it."""
    return sample_exactly(q, x, y, bits, lambda out, images: _rounded(out, bits).to(q.dtype))


def _rounded(samples: Tensor, bits: int) -> Tensor:
    return samples.add_(0.5).floor_() if bits else samples


def sample_exactly(q: Tensor, x: Tensor, y: Tensor, bits: int, finish: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """What `finish` makes of the exact interpolation, which is in steps with ``2 * bits`` fraction bits.

    It is called with parts of the result, [images, channels, ...], and says which images they are of.
    """
    batch, channels, height, width = q.shape
    rows, columns = _power_of_two(height), _power_of_two(width)
    unit = float(1 << bits)
    grid = torch.stack([(2 * p + unit) / (unit * side) - 1 for p, side in ((x, columns), (y, rows))], -1)
    dtype = torch.float32 if bits <= 8 and max(rows, columns) <= 1 << 15 else torch.float64
    grid, mode = grid.to(dtype), "bilinear" if bits else "nearest"
    if q.numel() == 0 or (dtype == q.dtype and (rows, columns) == (height, width)):
        return finish(F.grid_sample(q.to(dtype), grid, mode, "zeros", False), slice(0, batch))
    step = max(1, min(channels, _CHUNK // max(rows * columns, x[0].numel())))
    padded = q.new_zeros((1, step, rows, columns), dtype=dtype)
    out = None
    for index in range(batch):
        image = slice(index, index + 1)
        for start in range(0, channels, step):
            part = slice(start, min(start + step, channels))
            window = padded[:, : part.stop - start]
            window[:, :, :height, :width] = q[image, part]
            found = finish(F.grid_sample(window, grid[image], mode, "zeros", False), image)
            if out is None:
                out = found.new_empty((batch, channels, *found.shape[2:]))
            out[image, part] = found
    assert out is not None
    return out


@operator(
    "roi_align(Tensor[] maps, Tensor boxes, Tensor images, float[] scales, float[] thresholds, float[] factors, "
    "int[] output_size, int ratio, bool aligned, int bits, int low, int high) -> Tensor",
    shape=lambda maps, boxes, *rest: maps[0].new_empty((len(boxes), maps[0].shape[1], *rest[4])),
)
def roi_align(
    maps: list[Tensor],
    boxes: Tensor,
    images: Tensor,
    scales: list[float],
    thresholds: list[float],
    factors: list[float],
    output_size: list[int],
    ratio: int,
    aligned: bool,
    bits: int,
    low: int,
    high: int,
) -> Tensor:
    """``clamp((sum of samples in a bin * M + 2**(n-1)) >> n)``, each box in the map that fits its area.

    Args:
        boxes: left, top, right, bottom [K, 4], real numbers; `images` says which image of the batch each is in.
        scales: from coordinates of boxes to those of each map.
        thresholds: areas from which on a box belongs to the next map.
        factors: for each map; they hold the number of samples.
        ratio: samples along each axis of a bin.
    """
    rows, columns = output_size
    wide = boxes.double()
    area = (wide[:, 2] - wide[:, 0]) * (wide[:, 3] - wide[:, 1])
    level = torch.zeros_like(images)
    for threshold in thresholds:
        level += area >= threshold
    out = maps[0].new_zeros((len(boxes), maps[0].shape[1], rows, columns))
    for index, (q, scale, factor) in enumerate(zip(maps, scales, factors, strict=True)):
        for image in range(q.shape[0]):
            chosen = ((level == index) & (images == image)).nonzero().flatten()
            if chosen.numel() == 0:
                continue
            x = bin_positions(wide[chosen, 0], wide[chosen, 2], scale, columns * ratio, aligned, bits)
            y = bin_positions(wide[chosen, 1], wide[chosen, 3], scale, rows * ratio, aligned, bits)
            x = _inside_or_zero(x, q.shape[3], bits).unsqueeze(1).expand(-1, rows * ratio, -1)
            y = _inside_or_zero(y, q.shape[2], bits).unsqueeze(2).expand(-1, -1, columns * ratio)
            out[chosen] = sample_exactly(
                q[image : image + 1], x.reshape(1, -1, columns * ratio), y.reshape(1, -1, columns * ratio), bits,
                partial(_sum_bins, ratio=ratio, factor=factor, low=low, high=high),
            )[0].reshape(-1, len(chosen), rows, columns).transpose(0, 1)  # fmt: skip
    return out


def bin_positions(start: Tensor, end: Tensor, scale: float, count: int, aligned: bool, bits: int) -> Tensor:
    """Positions of `count` samples between two coordinates: [K, count]."""
    extent = (end - start) * scale
    extent = extent if aligned else extent.clamp(min=1.0)
    inside = torch.arange(count, dtype=torch.float64, device=start.device).add_(0.5).div_(count).mul_(1 << bits)
    first = (start * scale - (0.5 if aligned else 0.0)) * (1 << bits)
    return round_positions((extent.unsqueeze(1) * inside).add_(first.unsqueeze(1)).clamp_(-FAR, FAR), bits)


def _inside_or_zero(position: Tensor, size: int, bits: int) -> Tensor:
    """Up to one pixel outside counts as the border, anything further as zero."""
    unit = 1 << bits
    is_near = (position >= -unit) & (position <= size * unit)  # not so for NaN
    return position.clamp(0, (size - 1) * unit).masked_fill_(~is_near, -unit)


def _sum_bins(samples: Tensor, images: slice, ratio: int, factor: float, low: int, high: int) -> Tensor:
    total = samples.double()
    if ratio > 1:
        total = total.unflatten(2, (-1, ratio)).unflatten(4, (-1, ratio)).sum((3, 5))
    return total.mul_(factor).add_(0.5).floor_().clamp_(low, high).float()


@operator(
    "deformable_attention(Tensor value, Tensor offsets, Tensor weights, Tensor reference, int[] heights, int[] widths, "
    "float scale, int bits, Tensor factor, bool is_double, int low, int high) -> Tensor"
)
def deformable_attention(
    value: Tensor,
    offsets: Tensor,
    weights: Tensor,
    reference: Tensor,
    heights: list[int],
    widths: list[int],
    scale: float,
    bits: int,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp((sum over levels and points of sample * weight * M + 2**(n-1)) >> n)``; samples as in `grid_sample`.

    Args:
        value: features of all levels, [N, positions, heads, D].
        offsets: distances in pixels, or in parts of the reference's size, [N, queries, heads, levels, points, 2].
        weights: [N, queries, heads, levels, points].
        reference: real numbers x, y, or x, y, width, height, in [0, 1]: [N, queries, levels, 2 or 4].
        scale: the real value of one unit of the offsets.
    """
    batch, _, heads, depth = value.shape
    planes = value.permute(0, 2, 3, 1).flatten(0, 1)
    total, start = None, 0
    for level, (height, width) in enumerate(zip(heights, widths, strict=True)):
        x, y = (
            deformed_positions(
                offsets[..., level, :, axis], reference[:, :, level, axis::2], scale, size, bits
            ).permute(0, 2, 3, 1).flatten(0, 1)
            for axis, size in enumerate((width, height))
        )  # fmt: skip
        image = planes[..., start : start + height * width].unflatten(-1, (height, width))
        weight = weights[..., level, :].permute(0, 2, 3, 1).flatten(0, 1).unsqueeze(1)
        part = sample_exactly(image, x, y, bits, partial(_weighted_sum, weight=weight, bits=bits, is_double=is_double))
        total = part if total is None else total.add_(part)
        start += height * width
    assert total is not None
    out = rescale_(total, factor, low, high)
    return out.reshape(batch, heads * depth, -1).transpose(1, 2).contiguous()


def _weighted_sum(samples: Tensor, images: slice, weight: Tensor, bits: int, is_double: bool) -> Tensor:
    """Rounded samples times their weights, summed over points."""
    rounded = _rounded(samples, bits).to(torch.float64 if is_double else torch.float32)
    return rounded.mul_(weight[images]).sum(2)


def deformed_positions(offset: Tensor, reference: Tensor, scale: float, size: int, bits: int) -> Tensor:
    """Positions along an axis of [N, queries, heads, points]; zeros lie outside.

    Args:
        reference: place, or place and size, in [0, 1]: [N, queries, 1 or 2].
    """
    unit = float(1 << bits)
    wide = reference.double()[:, :, None, None]
    step = offset.double() * deformed_factor(wide.shape[-1], scale, offset.shape[-1], bits)
    if wide.shape[-1] == 2:
        step.mul_(wide[..., 1] * size)
    position = step.add_((wide[..., 0] * (size * unit)).sub_(unit / 2))
    position = round_positions(position.nan_to_num_(nan=-FAR).clamp_(-FAR, FAR), bits)
    return position.clamp_(-unit, size * unit)


def deformed_factor(numbers: int, scale: float, points: int, bits: int) -> float:
    """From units of the offsets to positions; with a reference's size, to twice its parts."""
    return scale * (1 << bits) * (0.5 / points if numbers == 2 else 1.0)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
