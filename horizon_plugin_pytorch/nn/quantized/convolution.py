"""What integer convolutions have in common, over any number of axes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.torch_functions import pad_circular


class Convolution(QuantizedGemm):
    """A convolution on integers. Its settings read as those of the float layer do; `geometry` is what it computes."""

    is_transposed: ClassVar[bool] = False

    def copy_geometry(self, mod: Any) -> None:
        self.in_channels, self.out_channels = mod.in_channels, mod.out_channels
        self.stride, self.padding, self.dilation = mod.stride, mod.padding, mod.dilation
        self.output_padding, self.groups, self.padding_mode = mod.output_padding, mod.groups, mod.padding_mode
        self.explicit_padding, padding = mod.split_padding()
        self.geometry = self._geometry(padding)

    def _geometry(self, padding: list[int]) -> fp.Geometry:
        sizes = list(self.stride), padding, list(self.dilation), list(self.output_padding)
        return fp.Geometry(*sizes, self.groups, self.is_transposed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "geometry" not in state:  # of a version that kept it in the settings
            self.geometry = self._geometry(self.padding)

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        if x.dim() == len(self.geometry.stride) + 1:  # one image without a batch axis
            return self.compute(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0), plan).squeeze(0)
        return fp.conv(self.padded(x), residual, *fp.flatten(plan, self.geometry))

    @property
    def is_padding(self) -> bool:
        return bool(self.explicit_padding)

    def padded(self, x: Tensor) -> Tensor:
        if not self.explicit_padding:
            return x
        if self.padding_mode == "circular":
            return pad_circular(x, self.explicit_padding)
        if self.padding_mode == "zeros":
            return F.pad(x, self.explicit_padding)
        return F.pad(x if x.is_floating_point() else x.float(), self.explicit_padding, self.padding_mode)

    def _walk(self) -> fp.Geometry | None:
        return self.geometry


class TransposedConvolution(Convolution):
    """A transposed convolution on integers."""

    is_transposed = True
    output_axis = 1
