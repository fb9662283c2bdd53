"""Resizing on integers: the scale of the input is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor

NEAREST = ("nearest", "nearest-exact")
MODES = (*NEAREST, "linear", "bilinear")


class Interpolate(QuantizedModule):
    """Nearest copies integers; linear and bilinear weigh them with integer weights and rounds once."""

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

    def matrices(self, sides: tuple[int, ...], size: Any, bits: int) -> tuple[Tensor, Tensor]:
        """Integer weights of the rows and columns, in ``1 / 2**bits``, for an input of this height and width.

        A line (mode ``linear``) has one row, which is kept.
        """
        sizes = self._resize(torch.empty(1, 1, *sides, device="meta"), size).shape[2:]
        factor = self.scale_factor
        factors = factor if isinstance(factor, (tuple, list)) else (factor,) * len(sides)
        found = [] if len(sides) == 2 else [fp.bilinear_matrix(1, 1, None, False, bits)]
        for source, target, scale in zip(sides, sizes, factors, strict=True):
            ratio = None if scale is None or self.recompute_scale_factor else 1.0 / float(scale)
            found.append(fp.bilinear_matrix(source, target, ratio, self.align_corners, bits))
        return found[0], found[1].T.contiguous()

    def real_matrices(self, x: QTensor, size: Any = None) -> tuple[Tensor, Tensor]:
        """The same weights as float32 numbers, for training."""

        def build() -> tuple[Tensor, Tensor]:
            bits = fp.weight_bits(x.dtype.bits)
            rows, columns = self.matrices(x.shape[2:], size, bits)
            return rows.mul_(2.0**-bits).to(x.device, torch.float32), columns.mul_(2.0**-bits).to(
                x.device, torch.float32
            )

        return self._plans.get((), ("real", *x.shape[2:], str(size), str(x.dtype)), build)

    def _plan(self, x: QTensor, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        bits = fp.weight_bits(x.dtype.bits)
        bound = float(1 << (x.dtype.bits - 1)) * 4.0**bits
        ratio = torch.tensor([4.0**-bits], dtype=torch.float64)
        factor = fp.choose_factor(ratio, x.dtype.min, x.dtype.max, bound)
        dtype = torch.float64 if fp.is_beyond_float32(bound) else torch.float32
        rows, columns = (m.to(x.device, dtype) for m in self.matrices(x.shape[2:], size, bits))
        return rows, columns, factor.to(x.device)

    def forward(self, x: QTensor, size: Any = None) -> QTensor:
        x = self.quantized_input(x)
        if self.mode in NEAREST:
            return x.like(self._resize(x.plain(), size))
        rows, columns, factor = self._plans.get(
            (), (*x.shape[2:], str(size), str(x.dtype)), lambda: self._plan(x, size)
        )
        is_line = self.mode == "linear"
        image = x.plain().unsqueeze(-2) if is_line else x.plain()
        out = fp.resample2d(image, rows, columns, factor, x.dtype.min, x.dtype.max)
        return x.like(out.squeeze(-2) if is_line else out)

    def extra_repr(self) -> str:
        wanted = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{wanted}, mode={self.mode!r}, align_corners={self.align_corners}"
