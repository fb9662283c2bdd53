"""Cutting feature maps into windows, as Swin transformers do."""

from __future__ import annotations

from torch import Tensor


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """Cut a map ``[N, H, W, C]`` into square windows ``[N * windows, window_size, window_size, C]``.

    Height and width must be multiples of `window_size`; pad first where they are not.

    >>> import torch
    >>> window_partition(torch.zeros(2, 14, 21, 3), 7).shape
    torch.Size([12, 7, 7, 3])
    """
    n, height, width, channels = (x.shape[i] for i in range(4))
    size = window_size
    cut = x.reshape(n, height // size, size, width // size, size, channels)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, channels)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:  # noqa: N803 - as users write it
    """Put windows together again: the inverse of `window_partition`, for maps of height `H` and width `W`.

    >>> import torch
    >>> x = torch.rand(2, 14, 21, 3)
    >>> torch.equal(window_reverse(window_partition(x, 7), 7, 14, 21), x)
    True
    """
    rows, columns, channels = H // window_size, W // window_size, windows.shape[-1]
    cut = windows.reshape(-1, rows, columns, window_size, window_size, channels)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, channels)
