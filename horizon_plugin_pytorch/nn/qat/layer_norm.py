"""Layer normalisation while training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.layer_norm import LayerNorm as _Float
from horizon_plugin_pytorch.nn.layer_norm import normalize_axis
from horizon_plugin_pytorch.nn.qat.normalization import Normalization, norm_function, with_parameters
from horizon_plugin_pytorch.nn.quantized import layer_norm as quantized
from horizon_plugin_pytorch.nn.quantized.normalization import Groups, last_axes, one_axis
from horizon_plugin_pytorch.operators.support import INT8, INTS, Limit, Support, Use, at_most, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class LayerNorm(Normalization):
    """LayerNorm, ours or torch's, whose output is rounded."""

    quantized_class = quantized.LayerNorm

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.normalized_shape: tuple[int, ...] = tuple(source.normalized_shape)
        self.dim: int | None = getattr(source, "dim", None)

    @classmethod
    def from_float(cls, mod: nn.LayerNorm) -> LayerNorm:
        """The QAT form of a layer norm; weight and bias are shared with it."""
        return cls(mod)

    @property
    def groups(self) -> Callable[[tuple[int, ...]], Groups]:
        if self.dim is None:
            return partial(last_axes, normalized_shape=tuple(self.normalized_shape))
        return partial(one_axis, dim=self.dim)

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        if self.dim is None:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return normalize_axis(x, self.dim, self.weight, self.bias, self.eps)


def _plane(use: Use) -> int:
    return math.prod(int(v) for v in use.numbers("normalized_shape")[-2:])


_PLANE = Limit(
    "normalized_shape H * W < 16384", lambda use: _plane(use) < 16384, lambda use: f"normalized_shape {_plane(use)}"
)


def _make(normalized_shape: Any, weight: Any, bias: Any, eps: float) -> nn.LayerNorm:
    return with_parameters(nn.LayerNorm(normalized_shape, eps, elementwise_affine=False), weight, bias)


register(Operator(
    "layer_norm", ScaleRule.OWN, LayerNorm, quantized.LayerNorm, (nn.LayerNorm, _Float),
    {F.layer_norm: norm_function(_make, "input, normalized_shape, weight=None, bias=None, eps=1e-05"),
     torch.layer_norm: norm_function(
         lambda cudnn_enable, **facts: _make(**facts),
         "input, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True",
     )},
    marches=on(bayes=Support(INT8, INTS, limits=(at_most("HW", 16384), _PLANE), note="made of several look-up tables")),
))  # fmt: skip
