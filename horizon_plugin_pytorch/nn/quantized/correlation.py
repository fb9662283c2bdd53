"""Correlation of two images, on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Correlation(QuantizedModule):
    """An exact sum of products for each place and displacement, requantized once."""

    def configure(self, mod: Any) -> None:
        self.kernel_size, self.max_displacement, self.stride1 = mod.kernel_size, mod.max_displacement, mod.stride1
        self.stride2, self.pad_size = mod.stride2, mod.pad_size

    def forward(self, data1: Any, data2: Any) -> QTensor:
        a, b = self.quantized_input(data1), self.quantized_input(data2)
        count = a.shape[1] * self.kernel_size**2
        bound = count * 2.0 ** (a.dtype.bits + b.dtype.bits - 2)

        def plan() -> Tensor:
            assert self.scale is not None
            ratio = a.scale.double() * b.scale.double() / (self.scale.double() * count)
            return fp.choose_factor(ratio, self.low, self.high, bound).to(a.device)

        factor = self._plans.get((a, b), count, plan)
        return self.output(fp.correlation(
            a.plain(), b.plain(), self.kernel_size, self.max_displacement, self.stride1, self.stride2, self.pad_size,
            factor, fp.is_beyond_float32(bound), self.low, self.high,
        ))  # fmt: skip
