"""Root-mean-square normalisation while training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.normalization import NORM, Normalization, norm_function, with_parameters
from horizon_plugin_pytorch.nn.quantized import rms_norm as quantized
from horizon_plugin_pytorch.nn.quantized.normalization import Groups, last_axes
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class RMSNorm(Normalization):
    """RMSNorm whose output is rounded."""

    quantized_class = quantized.RMSNorm

    def __init__(self, source: Any) -> None:
        super().__init__(source, is_centred=False)
        self.normalized_shape: tuple[int, ...] = tuple(source.normalized_shape)

    @classmethod
    def from_float(cls, mod: nn.RMSNorm) -> RMSNorm:
        """The QAT form of an RMS norm; the weight is shared with it."""
        return cls(mod)

    @property
    def groups(self) -> Callable[[tuple[int, ...]], Groups]:
        return partial(last_axes, normalized_shape=tuple(self.normalized_shape))

    @property
    def epsilon(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps  # torch's choice for None

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.epsilon)


def _make(normalized_shape: Any, weight: Any, eps: float | None) -> nn.RMSNorm:
    return with_parameters(nn.RMSNorm(list(normalized_shape), eps, elementwise_affine=False), weight)


_rms_norm = norm_function(_make, "input, normalized_shape, weight=None, eps=None")
register(Operator(
    "rms_norm", ScaleRule.OWN, RMSNorm, quantized.RMSNorm, (nn.RMSNorm,),
    {F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm},
    marches=NORM,
))  # fmt: skip
