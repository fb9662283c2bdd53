"""Convolutions on integers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.qtensor import pad_circular


class Conv2d(QuantizedGemm):
    """Conv2d on integers."""

    is_transposed: ClassVar[bool] = False

    def copy_geometry(self, mod: Any) -> None:
        self.stride, self.dilation, self.groups = list(mod.stride), list(mod.dilation), mod.groups
        self.output_padding = list(mod.output_padding)
        self.explicit_padding, self.padding = mod.split_padding()
        self.padding_mode = mod.padding_mode if mod.padding_mode != "zeros" else "constant"

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        if x.dim() == 3:  # one image without a batch axis
            return self.compute(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0), plan).squeeze(0)
        if self.explicit_padding:
            if self.padding_mode == "circular":
                x = pad_circular(x, self.explicit_padding)
            else:
                x = F.pad(x, self.explicit_padding, self.padding_mode)
        return fp.conv2d(
            x, plan.weights, plan.bias, residual, plan.residual_factor, plan.factor, self.stride, self.padding,
            self.dilation, self.groups, self.is_transposed, self.output_padding, plan.input_digits, plan.parts,
            plan.is_double, plan.limit, plan.low, plan.high, plan.is_real,
        )  # fmt: skip


class ConvReLU2d(Conv2d):
    """Conv2d and ReLU on integers."""


class ConvReLU62d(Conv2d):
    """Conv2d and ReLU6 on integers."""


class ConvAdd2d(Conv2d):
    """Conv2d plus another tensor, on integers."""

    has_add = True


class ConvAddReLU2d(ConvAdd2d):
    """Conv2d plus another tensor, and ReLU, on integers."""


class ConvAddReLU62d(ConvAdd2d):
    """Conv2d plus another tensor, and ReLU6, on integers."""
