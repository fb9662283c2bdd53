"""Profiling tools for quantized models, under the import name that the guides use.

`model_profiler` and the tools that it calls: the checks of structure, formats and devices, similarity, statistics,
weights; memory and `set_preserve_qat_mode`. `QuantAnalysis` and `ModelProfiler` of `model_profilerv2` are here, too.
`tune` finds the operators that need more than int8.

>>> __version__.count(".")
2
"""

from horizon_plugin_profiler.model_profilerv2 import ModelProfiler, QuantAnalysis
from horizon_plugin_profiler.tuning import TuningResult, tune
from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.utils.quant_profiler import (
    check_deploy_device,
    check_qconfig,
    check_unfused_operations,
    compare_weights,
    featuremap_similarity,
    get_module_called_count,
    get_raw_features,
    model_profiler,
    profile_featuremap,
    set_preserve_qat_mode,
    show_cuda_memory_consumption,
)

__all__ = [
    "ModelProfiler",
    "QuantAnalysis",
    "TuningResult",
    "__version__",
    "check_deploy_device",
    "check_qconfig",
    "check_unfused_operations",
    "compare_weights",
    "featuremap_similarity",
    "get_module_called_count",
    "get_raw_features",
    "model_profiler",
    "profile_featuremap",
    "set_preserve_qat_mode",
    "show_cuda_memory_consumption",
    "tune",
]
