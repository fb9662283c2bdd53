"""What integer convolutions have in common, over any number of axes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.torch_functions import pad_circular


class Convolution(QuantizedGemm):
    """A convolution on integers."""

    is_transposed: ClassVar[bool] = False

    def copy_geometry(self, mod: Any) -> None:
        self.in_channels, self.out_channels = mod.in_channels, mod.out_channels
        self.stride, self.dilation, self.groups = list(mod.stride), list(mod.dilation), mod.groups
        self.output_padding = list(mod.output_padding)
        self.explicit_padding, self.padding = mod.split_padding()
        self.padding_mode = mod.padding_mode if mod.padding_mode != "zeros" else "constant"

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        if x.dim() == len(self.stride) + 1:  # one image without a batch axis
            return self.compute(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0), plan).squeeze(0)
        if self.explicit_padding:
            if self.padding_mode == "circular":
                x = pad_circular(x, self.explicit_padding)
            else:
                x = F.pad(x, self.explicit_padding, self.padding_mode)
        geometry = fp.Geometry(
            self.stride, self.padding, self.dilation, self.output_padding, self.groups, self.is_transposed
        )
        return fp.conv(x, residual, *fp.flatten(plan, geometry))


class TransposedConvolution(Convolution):
    """A transposed convolution on integers."""

    is_transposed = True
    output_axis = 1
