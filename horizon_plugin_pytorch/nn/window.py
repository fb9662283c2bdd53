"""Cutting feature maps into windows, as Swin transformers do."""

from __future__ import annotations

from torch import Tensor, fx

from horizon_plugin_pytorch.nn.input_checks import refused_input


def _is_known(x: Tensor) -> bool:
    """Has it a shape of plain numbers? Not while its functions are traced."""
    return not issubclass(type(x), fx.Proxy) and all(type(n) is int for n in x.shape)


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """Cut a map ``[N, H, W, C]`` into square windows ``[N * windows, window_size, window_size, C]``.

    Height and width must be multiples of `window_size`; pad first where they are not.

    >>> import torch
    >>> window_partition(torch.zeros(2, 14, 21, 3), 7).shape
    torch.Size([12, 7, 7, 3])
    """
    size = window_size
    if _is_known(x) and (x.dim() != 4 or size < 1 or x.shape[1] % size or x.shape[2] % size):
        raise refused_input(
            "window_partition", "a map [N, H, W, C] whose height and width are multiples of window_size",
            "Pad it first, or permute [N, C, H, W] by `x.permute(0, 2, 3, 1)`.", x=x, window_size=size,
        )  # fmt: skip
    n, height, width, channels = (x.shape[i] for i in range(4))
    cut = x.reshape(n, height // size, size, width // size, size, channels)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, channels)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:  # noqa: N803 - as users write it
    """Put windows together again: the inverse of `window_partition`, for maps of height `H` and width `W`.

    >>> import torch
    >>> x = torch.rand(2, 14, 21, 3)
    >>> torch.equal(window_reverse(window_partition(x, 7), 7, 14, 21), x)
    True
    """
    size = window_size
    if _is_known(windows) and all(type(v) is int for v in (size, H, W)):
        is_cut = windows.dim() == 4 and tuple(windows.shape[1:3]) == (size, size)
        if not is_cut or H % size or W % size or windows.shape[0] % max((H // size) * (W // size), 1):
            raise refused_input(
                "window_reverse", "windows [N * windows, window_size, window_size, C] of maps of height H and width W",
                "H and W are those of the map that `window_partition` cut.", windows=windows, window_size=size, H=H,
                W=W,
            )  # fmt: skip
    rows, columns, channels = H // window_size, W // window_size, windows.shape[-1]
    cut = windows.reshape(-1, rows, columns, window_size, window_size, channels)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, channels)
