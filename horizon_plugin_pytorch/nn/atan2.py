"""The angle of a point."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Atan2(nn.Module):
    """``torch.atan2``."""

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.atan2(y, x)
