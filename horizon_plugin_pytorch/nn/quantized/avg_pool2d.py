"""Average pooling on integers."""

from __future__ import annotations

from typing import Any

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


class AvgPool2d(QuantizedModule):
    """AvgPool2d on integers: the window's sum, requantized with the window's count."""

    kernel_size: list[int]
    stride: list[int]
    padding: list[int]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None

    def configure(self, mod: Any) -> None:
        self.kernel_size, self.stride, self.padding = _pair(mod.kernel_size), _pair(mod.stride), _pair(mod.padding)
        self.ceil_mode, self.count_include_pad = mod.ceil_mode, mod.count_include_pad
        self.divisor_override = mod.divisor_override

    def _counts(self, height: int, width: int) -> Tensor:
        """The divisor at each output position, as torch computes it."""
        if self.divisor_override:
            return torch.tensor(float(self.divisor_override), dtype=torch.float64)
        # torch averages over the window; an average of ones over its own count is 1, so sum / average is the count.
        ones = torch.ones(1, 1, height, width, dtype=torch.float64)
        window = (self.kernel_size, self.stride, self.padding, self.ceil_mode)
        total = F.avg_pool2d(ones, *window, count_include_pad=True, divisor_override=1)
        average = F.avg_pool2d(ones, *window, count_include_pad=self.count_include_pad)
        return torch.round(total / average)[0, 0]

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        scale = self.scale
        height, width = x.shape[-2:]
        bound = self.kernel_size[0] * self.kernel_size[1] * float(1 << (x.dtype.bits - 1))
        factor = self._plans.get(
            (x.scale,),
            (height, width, str(x.dtype)),
            lambda: factor_map(
                x.scale.double().cpu() / scale.double().cpu(), self._counts(height, width), self.low, self.high, bound
            ).to(x.device),
        )
        is_double = fp.is_beyond_float32(bound)
        values = x.plain()
        batch = values.unsqueeze(0) if values.dim() == 3 else values  # one image may come without a batch axis
        window = (self.kernel_size, self.stride, self.padding, self.ceil_mode)
        out = fp.avg_pool2d(batch, *window, factor, is_double, self.low, self.high)
        return self.output(out.squeeze(0) if values.dim() == 3 else out)


def _pair(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * 2
