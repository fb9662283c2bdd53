"""The tools of the tuning guide: bad cases, layers, sensitivity."""

from horizon_plugin_pytorch.analysis.quant_analysis.model_profiler import ModelProfiler
from horizon_plugin_pytorch.analysis.quant_analysis.quant_analysis import QuantAnalysis

__all__ = ["ModelProfiler", "QuantAnalysis"]
