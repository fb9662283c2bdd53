"""Resizing on integers: the scale of the input is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Interpolate(QuantizedModule):
    """Nearest copies integers; bilinear weighs them with integer weights and rounds once."""

    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool
    recompute_scale_factor: bool

    def configure(self, mod: Any) -> None:
        self.size, self.scale_factor, self.mode = mod.size, mod.scale_factor, mod.mode
        self.align_corners = bool(mod.align_corners)
        self.recompute_scale_factor = bool(getattr(mod, "recompute_scale_factor", False))

    def _resize(self, x: Tensor, size: Any) -> Tensor:
        recompute = self.recompute_scale_factor or None
        return F.interpolate(x, self.size if size is None else size, self.scale_factor, self.mode, None, recompute)

    def matrices(self, height: int, width: int, size: Any, bits: int) -> tuple[Tensor, Tensor]:
        """Integer weights of the rows and columns, in ``1 / 2**bits``, for an input of this height and width."""
        sizes = self._resize(torch.empty(1, 1, height, width, device="meta"), size).shape[-2:]
        factors = self.scale_factor if isinstance(self.scale_factor, (tuple, list)) else (self.scale_factor,) * 2
        found = []
        for source, target, factor in zip((height, width), sizes, factors, strict=True):
            ratio = None if factor is None or self.recompute_scale_factor else 1.0 / float(factor)
            found.append(fp.bilinear_matrix(source, target, ratio, self.align_corners, bits))
        return found[0], found[1].T.contiguous()

    def real_matrices(self, x: QTensor, size: Any = None) -> tuple[Tensor, Tensor]:
        """The same weights as float32 numbers, for training."""

        def build() -> tuple[Tensor, Tensor]:
            bits = fp.weight_bits(x.dtype.bits)
            rows, columns = self.matrices(x.shape[-2], x.shape[-1], size, bits)
            return rows.mul_(2.0**-bits).to(x.device, torch.float32), columns.mul_(2.0**-bits).to(
                x.device, torch.float32
            )

        return self._plans.get((), ("real", *x.shape[-2:], str(size), str(x.dtype)), build)

    def _plan(self, x: QTensor, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        bits = fp.weight_bits(x.dtype.bits)
        bound = float(1 << (x.dtype.bits - 1)) * 4.0**bits
        ratio = torch.tensor([4.0**-bits], dtype=torch.float64)
        factor = fp.choose_factor(ratio, x.dtype.min, x.dtype.max, bound)
        dtype = torch.float64 if fp.is_beyond_float32(bound) else torch.float32
        rows, columns = (m.to(x.device, dtype) for m in self.matrices(x.shape[-2], x.shape[-1], size, bits))
        return rows, columns, factor.to(x.device)

    def forward(self, x: QTensor, size: Any = None) -> QTensor:
        x = self.quantized_input(x)
        if self.mode == "nearest":
            return x.like(self._resize(x.plain(), size))
        rows, columns, factor = self._plans.get(
            (), (*x.shape[-2:], str(size), str(x.dtype)), lambda: self._plan(x, size)
        )
        return x.like(fp.resample2d(x.plain(), rows, columns, factor, x.dtype.min, x.dtype.max))

    def extra_repr(self) -> str:
        wanted = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{wanted}, mode={self.mode!r}, align_corners={self.align_corners}"
