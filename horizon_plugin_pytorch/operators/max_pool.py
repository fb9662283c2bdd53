"""Max pooling of images: without gradient one axis after the other, with gradient many channels at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.compiled.passes import is_plain

_LARGEST_WINDOW = 5  # beyond, as many passes over the image take longer than torch's
_FEWEST_CHANNELS = 16  # of which torch takes several at once where they lie side by side


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`torch.nn.functional.max_pool2d`, whose values it has, several times faster on a CPU.

    >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> max_pool2d(x, 3, 2, 1)
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
    is_image = input.is_floating_point() and input.is_contiguous()
    windows = _windows(input, kernel_size, stride or kernel_size, padding) if is_image else None
    if windows is None or ceil_mode or return_indices or _pair(dilation) != (1, 1):
        torchs: Any = F.max_pool2d
        return torchs(input, kernel_size, stride or None, padding, dilation, ceil_mode, return_indices)
    out = input
    for axis, window in zip((-2, -1), windows, strict=True):
        out = _largest(out, axis, *window, torch.contiguous_format)
    return out


class _Pooled(torch.autograd.Function):
    """Torch's pooling with channels last, as if it had been done without: values, places and gradients are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        ctx.window = window
        beside = x.contiguous(memory_format=torch.channels_last)
        out, places = (t.contiguous() for t in torch.ops.aten.max_pool2d_with_indices(beside, *window))
        ctx.save_for_backward(x, places)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, places = ctx.saved_tensors
        to_x = torch.ops.aten.max_pool2d_with_indices_backward(grad.contiguous(), x, *ctx.window, places)
        return to_x, *[None] * len(ctx.window)


def trained_max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`torch.nn.functional.max_pool2d` with its gradient, which on a CPU pools the channels one by one.

    >>> x = torch.arange(256.0).reshape(1, 16, 4, 4).requires_grad_()
    >>> trained_max_pool2d(x, 2).sum().backward()
    >>> x.grad[0, 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
    """
    is_image = input.dim() == 4 and input.numel() and input.shape[1] >= _FEWEST_CHANNELS and is_plain(input)
    if not is_image or return_indices:
        torchs: Any = F.max_pool2d
        return torchs(input, kernel_size, stride or None, padding, dilation, ceil_mode, return_indices)
    settings = (kernel_size, stride or kernel_size, padding, dilation)
    return _Pooled.apply(input, *(list(_pair(value)) for value in settings), ceil_mode)


def max_pool_bytes(
    values: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The same of integers with channels last, which torch does not pool; None for what is not done here.

    >>> x = torch.arange(16, dtype=torch.int8).reshape(1, 1, 4, 4)
    >>> max_pool_bytes(x, 3, 2, 1).tolist()
    [[[[5, 7], [13, 15]]]]
    """
    windows = _windows(values, kernel_size, stride or kernel_size, padding)
    if windows is None or ceil_mode or return_indices or _pair(dilation) != (1, 1):
        return None
    for axis, window in zip((-2, -1), windows, strict=True):
        values = _largest(values, axis, *window, torch.channels_last)
    return values


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else tuple(value)


def _windows(x: Tensor, kernel_size: Any, stride: Any, padding: Any) -> list[tuple[int, int, int]] | None:
    """Size, step and padding along each axis; None for what torch does better, or refuses."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.numel():
        return None
    windows = list(zip(*(_pair(value) for value in (kernel_size, stride, padding)), strict=True))
    for (size, step, around), length in zip(windows, x.shape[2:], strict=True):
        is_sound = 1 <= size <= _LARGEST_WINDOW and step >= 1 and 0 <= around <= size // 2
        if not is_sound or not 0 < _count(length, size, step, around) <= (length - 1) // step + 1:
            return None
    return windows


def _largest(x: Tensor, axis: int, size: int, step: int, around: int, layout: torch.memory_format) -> Tensor:
    """The largest value of each window along an axis; what is around the image is never the largest."""
    count = _count(x.shape[axis], size, step, around)

    def part(values: Tensor, places: slice) -> Tensor:
        return values[..., places] if axis == -1 else values[..., places, :]

    def at(offset: int, first: int, last: int) -> Tensor:
        """The values at an offset from the places of windows `first` to `last`."""
        return part(x, slice(first * step + offset, last * step + offset + 1, step))

    # Every window has a value at offset 0; the others of the first and last may lie outside.
    offsets = [offset for offset in range(-around, size - around) if offset]
    out = at(0, 0, count - 1).clone(memory_format=layout)
    for offset in offsets:
        first = -(offset // step) if offset < 0 else 0
        last = min(count - 1, (x.shape[axis] - 1 - offset) // step)
        if first <= last:
            inside = part(out, slice(first, last + 1))
            torch.maximum(inside, at(offset, first, last), out=inside)
    return out


def _count(length: int, size: int, step: int, around: int) -> int:
    """The number of windows."""
    return (length + 2 * around - size) // step + 1
