"""Layer normalisation on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.normalization import Normalization


class LayerNorm(Normalization):
    """LayerNorm on integers, over the last axes or over one."""
