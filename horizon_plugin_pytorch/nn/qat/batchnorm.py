"""A batch normalisation that follows no convolution, while training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, at
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import batchnorm as quantized


class BatchNorm2d(RoundedModule, nn.BatchNorm2d):
    """BatchNorm2d whose output is rounded; in the VALIDATION state it uses its running statistics."""

    quantized_class = quantized.BatchNorm2d

    @classmethod
    def from_float(cls, mod: Any) -> BatchNorm2d:
        """The QAT form; parameters and statistics are shared with `mod`."""
        path = getattr(mod, "path", "")
        if not mod.track_running_stats or mod.running_mean is None:
            raise QuantizationConfigError(
                f"BatchNorm2d {at(path)} has no running statistics, so it has no integer form."
            )
        with torch.device("meta"):
            self = cls(mod.num_features, mod.eps, mod.momentum, mod.affine)
        self.weight, self.bias = mod.weight, mod.bias
        self.running_mean, self.running_var = mod.running_mean, mod.running_var
        self.num_batches_tracked = mod.num_batches_tracked
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self

    def value(self, x: Tensor) -> Tensor:
        if not self.is_exact:
            return super().value(x)
        # The gradient of what VALIDATION computes, without moving the statistics.
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


register(Operator("batch_norm2d", ScaleRule.OWN, BatchNorm2d, quantized.BatchNorm2d, (nn.BatchNorm2d,)))
