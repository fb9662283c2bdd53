"""Profiling tools for quantized models, under the import name that the guides use.

The checks of structure, formats and devices, statistics of features, weights and `set_preserve_qat_mode` are here; the
tools that compare models layer by layer (`featuremap_similarity`, `model_profiler` and others) will follow.

>>> __version__.count(".")
2
"""

from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.utils.quant_profiler import (
    check_deploy_device,
    check_qconfig,
    check_unfused_operations,
    compare_weights,
    get_module_called_count,
    get_raw_features,
    profile_featuremap,
    set_preserve_qat_mode,
)

__all__ = [
    "__version__",
    "check_deploy_device",
    "check_qconfig",
    "check_unfused_operations",
    "compare_weights",
    "get_module_called_count",
    "get_raw_features",
    "profile_featuremap",
    "set_preserve_qat_mode",
]
