"""How alike two images are, at every place and displacement."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.fixed_point.correlation import correlation_windows


class Correlation(nn.Module):
    """The cost volume of FlowNet: mean products of patches of `data1` with displaced patches of `data2`.

    Output channel ``(i + r) * (2 * r + 1) + j + r`` belongs to the displacement of ``i * stride2`` rows and
    ``j * stride2`` columns, with ``r = max_displacement // stride2``.

    Args:
        kernel_size: side of a patch, odd.
        max_displacement: largest displacement, in pixels.
        stride1: between the places of the output.
        stride2: between displacements.
        pad_size: zeros around both images.
        is_multiply: compare by products; there is no other way yet.

    >>> Correlation()(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).shape
    torch.Size([1, 9, 1, 1])
    """

    def __init__(
        self,
        kernel_size: int = 1,
        max_displacement: int = 1,
        stride1: int = 1,
        stride2: int = 1,
        pad_size: int = 0,
        is_multiply: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size, self.max_displacement = kernel_size, max_displacement
        self.stride1, self.stride2, self.pad_size, self.is_multiply = stride1, stride2, pad_size, is_multiply
        self.check_settings()

    def check_settings(self) -> None:
        """Refuse settings that it does not have."""
        if self.kernel_size % 2 == 0:
            raise ValueError(f"Correlation: kernel_size must be odd, got {self.kernel_size}.")
        if not self.is_multiply:
            raise ValueError("Correlation compares by products only: leave is_multiply=True.")

    def forward(self, data1: Tensor, data2: Tensor) -> Tensor:
        """The cost volume [N, D, H', W'] of two images [N, C, H, W]."""
        total = correlate(
            data1, data2, self.kernel_size, self.max_displacement, self.stride1, self.stride2, self.pad_size
        )
        return total / (data1.shape[1] * self.kernel_size**2)

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, max_displacement={self.max_displacement}, stride1={self.stride1}, "
            f"stride2={self.stride2}, pad_size={self.pad_size}"
        )


def correlate(
    data1: Tensor, data2: Tensor, kernel_size: int, max_displacement: int, stride1: int, stride2: int, pad_size: int
) -> Tensor:
    """Sums of products over channels and patches, one channel for each displacement."""
    size = (data1.shape[2], data1.shape[3])
    at = correlation_windows(size, kernel_size, max_displacement, stride1, stride2, pad_size)
    left, right = (F.pad(x, [pad_size] * 4) for x in (data1, data2))

    def window(x: Tensor, down: int = 0, across: int = 0) -> Tensor:
        return x[:, :, at.start + down :, at.start + across :][:, :, : at.height, : at.width]

    patch = window(left)
    total = torch.stack([(patch * window(right, *moved)).sum(1) for moved in at.displacements], 1)
    if kernel_size > 1:
        return F.avg_pool2d(total, kernel_size, stride1, divisor_override=1)
    return total[:, :, ::stride1, ::stride1]
