"""Detection, BEV and colour: what is between integers and positions or real numbers."""

from __future__ import annotations

import torch

from horizon_plugin_pytorch.nn.functional import filter, rle
from tests.operators.cases.base import Case, cases

# Positions found, channels and real values are those of float on the same grid.
CASES: list[Case] = cases(
    ("filter", lambda x, y: filter(x, y, threshold=1.5)[1], dict(shapes=((2, 6, 7, 9), (2, 3, 7, 9)))),
    ("filter-of-some-channels", lambda x: filter(x, threshold=0.4, idx_range=(1, 3))[0]),
    ("rle-of-classes", lambda x: rle(torch.argmax(x, 1))[1]),
    picks=(),
)
