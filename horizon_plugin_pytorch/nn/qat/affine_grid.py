"""Affine grids while training: a matrix product with the places of the pixels, which are constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.affine_grid import AffineGrid as _Float
from horizon_plugin_pytorch.nn.qat.composite import Composite
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.operators.support import INTS, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, as_module, register
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor, real_qtensor

_BITS = 14  # 1.0 is a whole number of steps, and so is every place in an image whose sides are powers of two


class AffineGrid(Composite):
    """``places @ theta.T`` with the places of the pixels in int16; conversion replaces the product."""

    follows = frozenset({"size", "align_corners"})

    def __init__(self, size: Any, align_corners: bool, qconfig: Any) -> None:
        super().__init__()
        self.size, self.align_corners, self.qconfig = size, align_corners, qconfig
        self.matmul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: Any) -> AffineGrid:
        """The QAT form of an affine grid."""
        return cls(mod.size, mod.align_corners, mod.qconfig)

    def forward(self, theta: Any, size: Any = None) -> Any:
        batch, *rest = [int(n) for n in (self.size if size is None else size)]
        if len(rest) != 3 or theta.shape[1:] != (2, 3):
            raise OperatorInputError(
                f"AffineGrid takes maps [N, 2, 3] and an image's size [N, C, H, W], got {tuple(theta.shape)} and "
                f"{[batch, *rest]}; volumes have no quantized form."
            )
        _, height, width = rest
        if not isinstance(theta, QTensor):
            return F.affine_grid(theta, [batch, *rest], self.align_corners)
        grid = self.matmul.matmul(self._places(height, width, theta), theta, y_trans=True)
        return grid.reshape(batch, height, width, 2)

    def _places(self, height: int, width: int, theta: QTensor) -> QTensor:
        """x, y and 1 of every pixel: [H * W, 3]."""
        identity = torch.eye(2, 3, dtype=torch.float64, device=theta.device).unsqueeze(0)
        places = F.affine_grid(identity, [1, 1, height, width], self.align_corners).reshape(-1, 2)
        steps = F.pad(places, (0, 1), value=1.0).mul_(1 << _BITS).round_().float()
        scale = torch.tensor([2.0**-_BITS], dtype=torch.float32, device=theta.device)
        if theta.is_integer:
            out = integer_qtensor(steps, scale, qint16)
        else:
            out = real_qtensor(steps * scale, scale, qint16, grid=None if theta.grid is None else steps)
        out.set_range(-(1 << _BITS), 1 << _BITS)
        return out

    def extra_repr(self) -> str:
        return f"size={self.size}, align_corners={self.align_corners}"


register(Operator(
    "affine_grid", ScaleRule.OWN, AffineGrid, AffineGrid, (_Float,),
    {F.affine_grid: as_module(_Float, "theta, size, align_corners=None", at_run_time=("size",))},
    marches=on(bayes=Support(INTS, INTS, note="a matrix product with constants; not in the published tables")),
))  # fmt: skip
