"""Instance normalisation while training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.norms import InstanceNorm as _Float
from horizon_plugin_pytorch.nn.qat.gemm import share_tensor
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.qat.normalization import NORM, Normalization, norm_function
from horizon_plugin_pytorch.nn.quantized import instance_norm as quantized
from horizon_plugin_pytorch.nn.quantized.normalization import Groups, each_channel
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register

_RANKS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def _rank_of(mod: nn.Module) -> int | None:
    """The number of axes of a batch; None if any."""
    return next((rank for cls, rank in _RANKS.items() if isinstance(mod, cls)), None)


class InstanceNorm(Normalization):
    """InstanceNorm whose output is rounded."""

    quantized_class = quantized.InstanceNorm

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.rank = _rank_of(source)

    @classmethod
    def from_float(cls, mod: Any) -> InstanceNorm | TrackedInstanceNorm:
        """The QAT form of an instance norm; parameters and statistics are shared with it."""
        return cls(mod) if mod.running_mean is None else TrackedInstanceNorm(mod)

    @property
    def groups(self) -> Callable[[tuple[int, ...]], Groups]:
        return partial(each_channel, rank=self.rank)

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        batch = x.reshape(self.groups(tuple(x.shape)).view)
        return F.instance_norm(batch, weight=self.weight, bias=self.bias, eps=self.eps).reshape(x.shape)


class TrackedInstanceNorm(RoundedModule):
    """InstanceNorm with running statistics; in the VALIDATION state it uses these, as it does in `eval`."""

    quantized_class = quantized.TrackedInstanceNorm
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.rank, self.eps = _rank_of(source), source.eps
        self.momentum: float | None = getattr(source, "momentum", None)
        self.weight = self.bias = self.running_mean = self.running_var = None  # type: ignore[assignment]
        for name in ("weight", "bias", "running_mean", "running_var"):
            share_tensor(self, name, getattr(source, name))
        self.num_features = self.running_mean.numel()
        self.qconfig = source.qconfig
        self.activation_post_process = source.qconfig.activation(channel_len=1)

    def real_value(self, x: Tensor) -> Tensor:
        has_own = self.training and self.momentum is not None and not self.is_exact
        shape = each_channel(tuple(x.shape), self.rank).view
        return F.instance_norm(
            x.reshape(shape), self.running_mean, self.running_var, self.weight, self.bias, has_own,
            self.momentum or 0.0, self.eps,
        ).reshape(x.shape)  # fmt: skip


def _make(
    running_mean: Any, running_var: Any, weight: Any, bias: Any, use_input_stats: bool, momentum: float, eps: float
) -> _Float:
    if use_input_stats:  # the statistics would only be written
        running_mean = running_var = None
    return _Float(weight, bias, running_mean, running_var, eps)


register(Operator(
    "instance_norm", ScaleRule.OWN, InstanceNorm, quantized.InstanceNorm, (*_RANKS, _Float),
    {F.instance_norm: norm_function(
        _make,
        "input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, "
        "eps=1e-05",
    )},
    marches=NORM,
))  # fmt: skip
