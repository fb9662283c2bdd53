"""Observers: what range a tensor takes, and the scale that follows from it."""

from horizon_plugin_pytorch.statistics.observer_v2 import (
    CountingObserver,
    FixedScaleObserver,
    HistogramObserver,
    KLObserver,
    MinMaxObserver,
    MixObserver,
    MSEObserver,
    PercentileObserver,
    SketchObserver,
    _ShareObserver,  # noqa: F401 - named in pickles
    percentiles_by_channel,
    qint8,
    synchronize,
)

__all__ = [
    "CountingObserver",
    "FixedScaleObserver",
    "HistogramObserver",
    "KLObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "PercentileObserver",
    "SketchObserver",
    "percentiles_by_channel",
    "qint8",
    "synchronize",
]
