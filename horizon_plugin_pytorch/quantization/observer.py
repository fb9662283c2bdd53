"""The first generation's observer names, over the same machinery as `observer_v2`."""

from horizon_plugin_pytorch.statistics.observer import (
    CalibObserver,
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    PerChannelMinMaxObserver,
)

__all__ = [
    "CalibObserver",
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "PerChannelMinMaxObserver",
]
