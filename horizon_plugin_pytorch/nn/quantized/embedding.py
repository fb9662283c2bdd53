"""Rows of a table of integers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Embedding(QuantizedModule):
    """Rows of a table of integers, selected by plain indices."""

    weight: Tensor

    def configure(self, mod: Any) -> None:
        assert self.scale is not None and self.out_dtype is not None
        steps = fp.quantize(mod.weight.detach(), self.scale, -1, self.low, self.high)
        self.register_buffer("weight", steps.to(self.out_dtype.storage))

    def real_weight(self) -> Tensor:
        assert self.scale is not None
        return self.weight * self.scale

    def forward(self, input: Tensor) -> QTensor:
        return self.output(F.embedding(input, self.weight).float())

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {super().extra_repr()}"
