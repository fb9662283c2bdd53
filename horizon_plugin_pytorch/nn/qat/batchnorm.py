"""A batch normalisation that follows no layer, while training."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, at
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import batchnorm as quantized
from horizon_plugin_pytorch.operators.layer_support import BATCH_NORM, BATCH_NORM1D
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


def _require_statistics(mod: Any, place: str) -> None:
    if not mod.track_running_stats or mod.running_mean is None:
        raise QuantizationConfigError(
            f"{type(mod).__name__} {place} has no running statistics, so it has no integer form. "
            "Train it with track_running_stats=True, or use InstanceNorm or GroupNorm, which need none."
        )


class QATBatchNorm(RoundedModule):
    """A batch normalisation whose output is rounded; in the VALIDATION state it uses its running statistics."""

    float_class: ClassVar[type]
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form; parameters and statistics are shared with `mod`."""
        _require_statistics(mod, at(getattr(mod, "path", "")))
        extra = {"process_group": mod.process_group} if isinstance(mod, nn.SyncBatchNorm) else {}
        with torch.device("meta"):
            self = cls(mod.num_features, mod.eps, mod.momentum, mod.affine, **extra)
        self.weight, self.bias = mod.weight, mod.bias
        self.running_mean, self.running_var = mod.running_mean, mod.running_var
        self.num_batches_tracked = mod.num_batches_tracked
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self

    def require_settings(self) -> None:
        _require_statistics(self, self.place)

    def real_value(self, x: Tensor) -> Tensor:
        if not self.is_exact:
            return super().real_value(x)
        # The gradient of what VALIDATION computes, without moving the statistics.
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class BatchNorm1d(QATBatchNorm, nn.BatchNorm1d):  # type: ignore[misc] # torch has the same names with other types
    """BatchNorm1d with a rounded output."""

    quantized_class = quantized.BatchNorm1d


class BatchNorm2d(QATBatchNorm, nn.BatchNorm2d):  # type: ignore[misc]
    """BatchNorm2d with a rounded output."""

    quantized_class = quantized.BatchNorm2d


class BatchNorm3d(QATBatchNorm, nn.BatchNorm3d):  # type: ignore[misc]
    """BatchNorm3d with a rounded output."""

    quantized_class = quantized.BatchNorm3d


class SyncBatchNorm(QATBatchNorm, nn.SyncBatchNorm):  # type: ignore[misc]
    """SyncBatchNorm with a rounded output."""

    quantized_class = quantized.SyncBatchNorm


register(
    Operator("batch_norm1d", ScaleRule.OWN, BatchNorm1d, quantized.BatchNorm1d, (nn.BatchNorm1d,), marches=BATCH_NORM1D)
)
for _name, _qat, _float in (
    ("batch_norm2d", BatchNorm2d, nn.BatchNorm2d),
    ("batch_norm3d", BatchNorm3d, nn.BatchNorm3d),
    ("sync_batch_norm", SyncBatchNorm, nn.SyncBatchNorm),
):
    register(Operator(_name, ScaleRule.OWN, _qat, _qat.quantized_class, (_float,), marches=BATCH_NORM))
