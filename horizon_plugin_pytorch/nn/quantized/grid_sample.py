"""Sampling of an image at given places, on integers: the scale of the image is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import QuantizationWarning, warn_once
from horizon_plugin_pytorch.nn.grid_sample import channels_last, warp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.module import is_real as has_no_scale
from horizon_plugin_pytorch.qtensor import QTensor

# Pixels between the positions of a grid, from which on it is told: for nearest, 1.5 % of the pixels are others.
_COARSE = {"nearest": 1 / 16, "bilinear": 1 / 4}


class GridSample(QuantizedModule):
    """Positions in ``1 / 2**bits`` pixels, four integer weights, one rounding."""

    mode: str
    padding_mode: str
    align_corners: bool
    is_flow = False

    def configure(self, mod: Any) -> None:
        self.mode, self.padding_mode = mod.mode, mod.padding_mode
        self.align_corners = getattr(mod, "align_corners", False)

    def bits(self, x: QTensor) -> int:
        """Fraction bits of a position."""
        return 0 if self.mode == "nearest" else fp.weight_bits(x.dtype.bits)

    def _factors(self, x: QTensor, grid: Any) -> tuple[Tensor, Tensor]:
        """What turns the grid's numbers into positions, for images of this size."""
        is_real = not isinstance(grid, QTensor)
        scale = 1.0 if is_real else float(grid.scale)
        lists = fp.grid_factors(x.shape[-2], x.shape[-1], scale, self.bits(x), self.align_corners, self.is_flow)
        factor, offset = (torch.tensor(values, dtype=torch.float64) for values in lists)
        if not is_real:
            self._warn_coarse(grid, float(factor.amax()) / (1 << self.bits(x)))
            factor, offset = fp.choose_affine(factor, offset)
        return factor.to(x.device), offset.to(x.device)

    def _warn_coarse(self, grid: QTensor, step: float) -> None:
        """Say that the positions which a grid has are far apart.

        Args:
            step: between two of them, in pixels.
        """
        if grid.dtype.bits > 8 or step <= _COARSE[self.mode]:
            return
        lost = (
            "many pixels are their neighbours" if self.mode == "nearest" else "values are read up to half of that aside"
        )
        warn_once(
            f"`{type(self).__name__}` {self.place}: its {grid.dtype} grid has a position every {step:.2g} pixels only: "
            f"{lost}. Give what makes the grid, or its QuantStub, a qint16 qconfig; the default setters do it.",
            QuantizationWarning,
        )

    def on_real(self, x: Tensor, grid: Tensor) -> Tensor:
        """The float function."""
        return F.grid_sample(x, grid, self.mode, self.padding_mode, self.align_corners)

    def forward(self, input: Any, grid: Any) -> Any:
        if has_no_scale(input):
            return self.on_real(input, grid.as_real() if isinstance(grid, QTensor) else grid)
        x = self.quantized_input(input)
        is_real = not isinstance(grid, QTensor)
        factor, offset = self._plans.get(
            () if is_real else (grid,), (*x.shape[-2:], x.dtype, x.scale.device), lambda: self._factors(x, grid)
        )
        out = fp.grid_sample(
            x.plain(), grid if is_real else grid.plain(), factor, offset, is_real, self.is_flow, self.bits(x),
            self.padding_mode, self.align_corners,
        )  # fmt: skip
        result = x.like(out)
        if self.padding_mode == "zeros":
            result.set_range(min(x.range[0], 0), max(x.range[1], 0))
        return result

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}, align_corners={self.align_corners}"


class Warp(GridSample):
    """As `GridSample`, at distances in pixels from each place of the output."""

    is_flow = True

    def forward(self, input: Any, grid: Any) -> Any:
        return super().forward(input, channels_last(grid))

    def on_real(self, x: Tensor, grid: Tensor) -> Tensor:
        return warp(x, grid, self.mode, self.padding_mode)
