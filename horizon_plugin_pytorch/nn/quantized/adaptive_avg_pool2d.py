"""Adaptive average pooling of images on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.adaptive_avg_pool import AdaptiveAvgPool


class AdaptiveAvgPool2d(AdaptiveAvgPool):
    """AdaptiveAvgPool2d on integers."""

    axes = 2
