"""Resizing on integers: the scale of the input is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Interpolate(QuantizedModule):
    """Nearest copies integers; bilinear weighs them with 8-bit weights and rounds once."""

    @classmethod
    def from_qat(cls, mod: Any) -> Any:
        """The integer form of a QAT module."""
        self = cls()
        self.path = mod.path
        self.set_output(None)
        self.size, self.scale_factor, self.mode = mod.size, mod.scale_factor, mod.mode
        self.align_corners = bool(mod.align_corners)
        self.recompute_scale_factor = bool(getattr(mod, "recompute_scale_factor", False))
        if self.mode not in ("nearest", "bilinear"):
            raise UnsupportedOperatorError(
                f"interpolate {at(self.path)} with mode={self.mode!r} has no integer form; use 'nearest' or 'bilinear'."
            )
        return self

    def _resize(self, x: Tensor) -> Tensor:
        recompute = self.recompute_scale_factor or None
        return F.interpolate(x, self.size, self.scale_factor, self.mode, None, recompute)

    def _plan(self, x: QTensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self._resize(torch.empty(1, 1, *x.shape[-2:], device="meta")).shape[-2:]
        factors = self.scale_factor if isinstance(self.scale_factor, (tuple, list)) else (self.scale_factor,) * 2
        matrices = []
        for source, target, factor in zip(x.shape[-2:], sizes, factors, strict=True):
            ratio = None if factor is None or self.recompute_scale_factor else 1.0 / float(factor)
            matrices.append(fp.bilinear_matrix(source, target, ratio, self.align_corners))
        bound = float(1 << (x.dtype.bits - 1)) * 4.0**fp.WEIGHT_BITS
        ratio = torch.tensor([4.0**-fp.WEIGHT_BITS], dtype=torch.float64)
        factor = fp.choose_factor(ratio, x.dtype.min, x.dtype.max, bound)
        dtype = torch.float64 if fp.is_beyond_float32(bound) else torch.float32
        rows, columns = (m.to(x.device, dtype) for m in matrices)
        return rows, columns.T.contiguous(), factor.to(x.device)

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        if self.mode == "nearest":
            return x.like(self._resize(x.plain()))
        rows, columns, factor = self._plans.get((), (*x.shape[-2:], str(x.dtype)), lambda: self._plan(x))
        return x.like(fp.resample2d(x.plain(), rows, columns, factor, x.dtype.min, x.dtype.max))

    def extra_repr(self) -> str:
        wanted = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{wanted}, mode={self.mode!r}, align_corners={self.align_corners}"
