"""Average pooling of images on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.avg_pool import AvgPool


class AvgPool2d(AvgPool):
    """AvgPool2d on integers."""

    axes = 2
