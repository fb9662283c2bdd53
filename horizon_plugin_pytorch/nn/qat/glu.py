"""GLU while training: halves, the sigmoid of one in int16, the product in the qconfig's format."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.composite import Composite, inner_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.segment_lut import FROM_BAYES, SegmentLUT
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, as_module, register
from horizon_plugin_pytorch.qtensor import QTensor

_SIGMOID_SCALE = 2 / 65535  # as for the exp of softmax: values lie in [0, 1]


class GLU(Composite):
    """``a * sigmoid(b)`` for the two halves of a tensor; conversion replaces its parts."""

    follows = frozenset({"dim"})

    def __init__(self, dim: int = -1, qconfig: Any = None) -> None:
        super().__init__()
        self.dim, self.qconfig = dim, qconfig
        self.sigmoid = SegmentLUT(torch.sigmoid, "sigmoid", inner_qconfig(qconfig, _SIGMOID_SCALE))
        self.mul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: nn.GLU) -> GLU:
        """The QAT form of a GLU module."""
        return cls(mod.dim, mod.qconfig)

    def forward(self, x: Any) -> Any:
        if x.shape[self.dim] % 2:
            raise RuntimeError(f"axis {self.dim} must have an even size to be halved, it has {x.shape[self.dim]}.")
        if not isinstance(x, QTensor):
            return F.glu(x, self.dim)
        values, gates = x.chunk(2, self.dim)
        return self.mul.mul(values, self.sigmoid(gates))


register(Operator(
    "glu", ScaleRule.OWN, GLU, GLU, (nn.GLU,), {F.glu: as_module(nn.GLU, "input, dim=-1")}, marches=FROM_BAYES,
))  # fmt: skip
