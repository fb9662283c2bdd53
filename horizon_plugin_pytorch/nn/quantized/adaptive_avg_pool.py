"""Adaptive average pooling on integers, over one to three axes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.avg_pool import as_batch, factor_map
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class AdaptiveAvgPool(QuantizedModule):
    """Each window's sum, requantized with its count."""

    axes: ClassVar[int]

    def configure(self, mod: Any) -> None:
        self.output_size = mod.output_size

    def _plan(self, x: QTensor, space: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        assert self.scale is not None
        size = self.output_size if isinstance(self.output_size, (tuple, list)) else (self.output_size,) * self.axes
        size = (1, *size) if self.axes == 1 else size
        matrices = [
            fp.adaptive_matrix(source, source if target is None else target)
            for source, target in zip(space, size, strict=True)
        ]
        counts = torch.ones((), dtype=torch.float64)
        for matrix in matrices:
            counts = counts.unsqueeze(-1) * matrix.sum(1)
        bound = float(counts.max()) * float(1 << (x.dtype.bits - 1))
        ratio = x.scale.double().cpu() / self.scale.double().cpu()
        factor = factor_map(ratio, counts, self.low, self.high, bound)
        dtype = torch.float64 if fp.is_beyond_float32(bound) else torch.float32
        *others, columns = matrices
        return [m.to(x.device, dtype) for m in (*others, columns.T.contiguous())], factor.to(x.device)

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        batch = as_batch(x.plain(), self.axes)
        space = tuple(batch.shape[2:])
        matrices, factor = self._plans.get((x,), space, lambda: self._plan(x, space))
        if all(m.numel() == size for m, size in zip(matrices, space, strict=True)):  # one window, of everything
            dims, is_double = list(range(2, batch.dim())), matrices[0].dtype == torch.float64
            out = fp.sum(batch, dims, True, factor.reshape(()), is_double, self.low, self.high)
        else:
            resample = fp.resample3d if self.axes == 3 else fp.resample2d
            out = resample(batch, *matrices, factor, self.low, self.high)
        return self.output(out.reshape(*x.shape[: -self.axes], *out.shape[-self.axes :]))


class AdaptiveAvgPool1d(AdaptiveAvgPool):
    """AdaptiveAvgPool1d on integers."""

    axes = 1


class AdaptiveAvgPool3d(AdaptiveAvgPool):
    """AdaptiveAvgPool3d on integers."""

    axes = 3
