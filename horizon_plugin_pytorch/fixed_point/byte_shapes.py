"""What layers on integer kernels have in common: which tensors they take, how they walk, what they give."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan, Geometry

SEVEN_BITS, BYTE, TWO_BYTES = (0, 127), (-128, 127), (-(1 << 15), (1 << 15) - 1)


def is_plain(x: Tensor) -> bool:
    """Is this an ordinary tensor with numbers, of which nobody wants a gradient?"""
    return type(x) is Tensor and x.is_cpu and not x.requires_grad and x.numel() > 0


def is_within(limits: tuple[int, int], others: tuple[int, int]) -> bool:
    """Do the second limits hold the first?"""
    return limits[0] >= others[0] and limits[1] <= others[1]


def walk_of(geometry: Geometry | None) -> kernels.Walk:
    """The walk over images; one axis is an image of one row, and rows of a linear layer are its positions."""
    if geometry is None:
        return kernels.Walk()
    (sh, sw), (dh, dw) = (1, *geometry.stride)[-2:], (1, *geometry.dilation)[-2:]
    ph, pw = (0, *geometry.padding)[-2:]
    return kernels.Walk((sh, sw), (ph, pw), (dh, dw), geometry.groups)


@functools.lru_cache(maxsize=1024)
def output_sizes(shape: torch.Size, weight: torch.Size, walk: kernels.Walk) -> torch.Size | None:
    """The output's shape, for images and weights of these shapes; None if there is none, or kernels have others.

    What reads nothing but padding is, by oneDNN 3.12, the numbers that were in memory before, or ends the process; an
    output of one column, with a stride across, has those of other rows.
    """
    kernel = (1, *weight[2:])[-2:]
    axes = list(zip(shape[2:], kernel, walk.stride, walk.padding, walk.dilation, strict=True))
    height, width = sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if min(*sizes, shape[0], weight[0]) <= 0 or (width == 1 and height > 1 and walk.stride[1] > 1):
        return None
    is_read = all(_reads_pixels(places, *axis) for places, axis in zip(sizes, axes, strict=True))
    return torch.Size([shape[0], weight[0], *sizes]) if is_read else None


def _reads_pixels(places: int, pixels: int, taps: int, stride: int, padding: int, dilation: int) -> bool:
    """Does every place of the output read a pixel on this axis?"""
    last = dilation * (taps - 1)
    if padding <= last and dilation <= pixels:  # every place reaches the image, and cannot step over it
        return True
    starts = range(-padding, places * stride - padding, stride)
    return all(any(0 <= x < pixels for x in range(start, start + last + 1, dilation)) for start in starts)


def new_output(plan: AccumulatorPlan, shape: torch.Size | tuple[int, ...], layout: torch.memory_format) -> Tensor:
    """Memory for a layer's output, in its `output_type`."""
    return torch.empty(shape, dtype=output_type(plan), memory_format=layout)


def output_type(plan: AccumulatorPlan) -> torch.dtype:
    """The smallest type that holds a layer's integers; float32 for real numbers."""
    return type_of((plan.low, plan.high), plan.is_real)


def type_of(limits: tuple[int, int], is_real: bool) -> torch.dtype:
    """The smallest type that holds integers between two limits; float32 for real numbers."""
    if is_real or not is_within(limits, TWO_BYTES):
        return torch.float32
    return torch.int8 if is_within(limits, BYTE) else torch.int16


def slices(count: int, step: int) -> Iterator[slice]:
    """The numbers up to a count, so many at a time."""
    for start in range(0, count, step):
        yield slice(start, start + step)


def pixel_strides(sizes: torch.Size) -> tuple[int, int, int, int]:
    """Of images with channels last."""
    _, channels, height, width = sizes
    return height * width * channels, 1, width * channels, channels
