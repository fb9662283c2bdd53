"""Average pooling on integers, over one to three axes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


def factor_map(ratio: Tensor, counts: Tensor, low: int, high: int, bound: float) -> Tensor:
    """One factor, or one for each output position where windows have different counts."""
    distinct, index = torch.unique(counts, return_inverse=True)
    factors = fp.choose_factor(ratio / distinct, low, high, bound)
    return factors if factors.numel() == 1 else factors[index]


def as_batch(x: Tensor, axes: int) -> Tensor:
    """A batch of images with two or three axes: a row becomes an image of height 1, an image a batch of one.

    >>> as_batch(torch.zeros(4, 9), 1).shape, as_batch(torch.zeros(2, 4, 3, 9), 2).shape
    (torch.Size([1, 4, 1, 9]), torch.Size([2, 4, 3, 9]))
    """
    x = x.unsqueeze(0) if x.dim() == axes + 1 else x
    return x.unsqueeze(-2) if axes == 1 else x


class AvgPool(QuantizedModule):
    """The window's sum, requantized with the window's count."""

    axes: ClassVar[int]
    kernel_size: Any
    stride: Any
    padding: Any
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None

    def configure(self, mod: Any) -> None:
        self.kernel_size, self.stride, self.padding = mod.kernel_size, mod.stride, mod.padding
        self.ceil_mode, self.count_include_pad = mod.ceil_mode, mod.count_include_pad
        self.divisor_override = getattr(mod, "divisor_override", None)

    def _sizes(self, value: Any) -> list[int]:
        values = [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)]
        return values * self.axes if len(values) == 1 else values

    def _window(self) -> tuple[list[int], list[int], list[int]]:
        """Kernel, stride and padding of a window with two or three axes."""
        kernel, stride, padding = map(self._sizes, (self.kernel_size, self.stride, self.padding))
        return (kernel, stride, padding) if self.axes > 1 else ([1, *kernel], [1, *stride], [0, *padding])

    def _counts(self, space: tuple[int, ...]) -> Tensor:
        """The divisor at each output position, as torch computes it."""
        if self.divisor_override:
            return torch.tensor(float(self.divisor_override), dtype=torch.float64)
        # torch averages over the window; an average of ones over its own count is 1, so sum / average is the count.
        pool: Any = F.avg_pool3d if len(space) == 3 else F.avg_pool2d
        ones = torch.ones(1, 1, *space, dtype=torch.float64)
        total = pool(ones, *self._window(), self.ceil_mode, count_include_pad=True, divisor_override=1)
        average = pool(ones, *self._window(), self.ceil_mode, count_include_pad=self.count_include_pad)
        return torch.round(total / average)[0, 0]

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        ratio = x.scale.double().cpu() / self.scale.double().cpu()
        batch = as_batch(x.plain(), self.axes)
        space = tuple(batch.shape[2:])
        bound = float(1 << (x.dtype.bits - 1))
        for size in self._sizes(self.kernel_size):
            bound *= size
        factor = self._plans.get(
            (x,),
            space,
            lambda: factor_map(ratio, self._counts(space), self.low, self.high, bound).to(x.device),
        )
        pool = fp.avg_pool3d if self.axes == 3 else fp.avg_pool2d
        out = pool(batch, *self._window(), self.ceil_mode, factor, fp.is_beyond_float32(bound), self.low, self.high)
        return self.output(out.reshape(*x.shape[: -self.axes], *out.shape[-self.axes :]))


class AvgPool1d(AvgPool):
    """AvgPool1d on integers."""

    axes = 1


class AvgPool3d(AvgPool):
    """AvgPool3d on integers."""

    axes = 3
