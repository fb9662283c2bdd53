"""Adaptive average pooling on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.avg_pool2d import factor_map
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class AdaptiveAvgPool2d(QuantizedModule):
    """AdaptiveAvgPool2d on integers: each window's sum, requantized with its count."""

    def configure(self, mod: Any) -> None:
        self.output_size = mod.output_size

    def _plan(self, x: QTensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.scale is not None
        size = self.output_size if isinstance(self.output_size, (tuple, list)) else (self.output_size,) * 2
        rows, columns = (
            fp.adaptive_matrix(source, source if target is None else target)
            for source, target in zip(x.shape[-2:], size, strict=True)
        )
        counts = rows.sum(1).unsqueeze(1) * columns.sum(1).unsqueeze(0)
        bound = float(counts.max()) * float(1 << (x.dtype.bits - 1))
        ratio = x.scale.double().cpu() / self.scale.double().cpu()
        factor = factor_map(ratio, counts, self.low, self.high, bound)
        dtype = torch.float64 if fp.is_beyond_float32(bound) else torch.float32
        return rows.to(x.device, dtype), columns.T.contiguous().to(x.device, dtype), factor.to(x.device)

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        rows, columns, factor = self._plans.get((x.scale,), (*x.shape[-2:], str(x.dtype)), lambda: self._plan(x))
        return self.output(fp.resample2d(x.plain(), rows, columns, factor, self.low, self.high))
