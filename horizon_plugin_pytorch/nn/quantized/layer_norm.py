"""Layer normalisation on integers."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.quantized.normalization import Normalization


class LayerNorm(Normalization):
    """LayerNorm on integers, over the last axes or over one."""

    def configure(self, mod: Any) -> None:
        super().configure(mod)
        self.normalized_shape: tuple[int, ...] = mod.normalized_shape
        self.dim: int | None = mod.dim
