"""Resizing on integers: the scale of the input is kept."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule, is_real
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.untraced import is_recorded

NEAREST = ("nearest", "nearest-exact")
MODES = (*NEAREST, "linear", "bilinear")


class Interpolate(QuantizedModule):
    """Nearest copies integers; linear and bilinear weigh them with integer weights and rounds once."""

    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool | None
    recompute_scale_factor: bool | None

    def configure(self, mod: Any) -> None:
        self.size, self.scale_factor, self.mode = mod.size, mod.scale_factor, mod.mode
        self.align_corners = mod.align_corners
        self.recompute_scale_factor = getattr(mod, "recompute_scale_factor", None)

    def _resize(self, x: Tensor, size: Any) -> Tensor:
        corners = None if self.mode in NEAREST else bool(self.align_corners)
        recompute = self.recompute_scale_factor or None
        return F.interpolate(x, self.size if size is None else size, self.scale_factor, self.mode, corners, recompute)

    def _positions(self, x: QTensor, size: Any) -> tuple[Tensor, Tensor]:
        """Where the rows and columns of the result lie, in ``1 / 2**bits``; a line has one row, which is kept."""
        sides, bits = x.shape[2:], fp.weight_bits(x.dtype.bits)
        sizes = self._resize(torch.empty(1, 1, *sides, device="meta"), size).shape[2:]
        factor = self.scale_factor
        factors = factor if isinstance(factor, (tuple, list)) else (factor,) * len(sides)
        found = [] if len(sides) == 2 else [fp.bilinear_positions(1, 1, None, False, bits)]
        for source, target, scale in zip(sides, sizes, factors, strict=True):
            ratio = None if scale is None or self.recompute_scale_factor else 1.0 / float(scale)
            found.append(fp.bilinear_positions(source, target, ratio, bool(self.align_corners), bits).to(x.device))
        return found[0].to(x.device), found[1]

    @staticmethod
    def _facts(x: QTensor, size: Any) -> tuple[Hashable, ...]:
        """What positions depend on; the scale, which is new in every step of a training, is not among it."""
        return (*x.shape[2:], str(size), x.dtype, x.scale.device)

    def positions(self, x: QTensor, size: Any = None) -> tuple[Tensor, Tensor]:
        """The same, kept for inputs of this shape."""
        return self._plans.get((), ("positions", *self._facts(x, size)), lambda: self._positions(x, size))

    def real_matrices(self, x: QTensor, size: Any = None) -> tuple[Tensor, Tensor]:
        """The weights of rows and columns as float32 numbers, for training."""

        def build() -> tuple[Tensor, Tensor]:
            bits = fp.weight_bits(x.dtype.bits)
            y, columns = self.positions(x, size)
            height = 1 if x.dim() == 3 else x.shape[2]
            matrices = (fp.bilinear_matrix(n, p.cpu(), bits) for n, p in ((height, y), (x.shape[-1], columns)))
            down, across = (m.mul_(2.0**-bits).to(x.device, torch.float32) for m in matrices)
            return down, across.T.contiguous()

        return self._plans.get((), ("matrices", *self._facts(x, size)), build)

    def forward(self, x: Any, size: Any = None) -> Any:
        if is_real(x):
            return self._resize(x, size)
        x = self.quantized_input(x)
        if self.mode in NEAREST:
            if x.has_bytes and not is_recorded() and x.as_bytes().dtype == torch.int8:  # torch resizes unsigned ones
                return x.with_bytes(self._resize(x.as_bytes().view(torch.uint8), size).view(torch.int8))
            return x.like(self._resize(x.plain(), size))
        y, columns = self.positions(x, size)
        is_line = self.mode == "linear"
        image = x.plain().unsqueeze(-2) if is_line else x.plain()
        out = fp.resize2d(image, columns, y, fp.weight_bits(x.dtype.bits))
        return x.like(out.squeeze(-2) if is_line else out)

    def extra_repr(self) -> str:
        wanted = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{wanted}, mode={self.mode!r}, align_corners={bool(self.align_corners)}"
