"""From "accuracy is bad" to the smallest fix: mixed precision in one call."""

from horizon_plugin_profiler.tuning.answer import Step, TuningResult
from horizon_plugin_profiler.tuning.tune import tune

__all__ = ["Step", "TuningResult", "tune"]
