"""Instance normalisation on integers."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.quantized.batchnorm import BatchNorm
from horizon_plugin_pytorch.nn.quantized.normalization import Normalization


class InstanceNorm(Normalization):
    """InstanceNorm on integers."""


class TrackedInstanceNorm(BatchNorm):
    """InstanceNorm with running statistics, on integers: one affine function for each channel."""

    def configure(self, mod: Any) -> None:
        super().configure(mod)
        self.rank: int | None = mod.rank

    def forward(self, x: Any) -> Any:
        is_single = self.rank is not None and x.dim() == self.rank - 1  # one image without a batch axis
        return super().forward(x.unsqueeze(0)).squeeze(0) if is_single else super().forward(x)
