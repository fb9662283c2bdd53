"""From "accuracy is bad" to the smallest fix: mixed precision in one call."""

from horizon_plugin_profiler.tuning.answer import Trial, TuningResult
from horizon_plugin_profiler.tuning.tune import tune

__all__ = ["Trial", "TuningResult", "tune"]
