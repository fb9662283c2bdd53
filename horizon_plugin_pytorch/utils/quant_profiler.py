"""Debug tools, under the path that the guides give."""

from horizon_plugin_pytorch.analysis.call_counts import get_module_called_count
from horizon_plugin_pytorch.analysis.check_qconfig import check_qconfig
from horizon_plugin_pytorch.analysis.deploy_device import check_deploy_device
from horizon_plugin_pytorch.analysis.features import get_raw_features, profile_featuremap
from horizon_plugin_pytorch.analysis.memory import show_cuda_memory_consumption
from horizon_plugin_pytorch.analysis.profile.profiler import model_profiler
from horizon_plugin_pytorch.analysis.similarity import featuremap_similarity
from horizon_plugin_pytorch.analysis.unfused import check_unfused_operations
from horizon_plugin_pytorch.analysis.weights import compare_weights
from horizon_plugin_pytorch.export.node_data import write_node_data
from horizon_plugin_pytorch.export.script_profile import compare_script_models, script_profile
from horizon_plugin_pytorch.passes.preserved import set_preserve_qat_mode

__all__ = [
    "check_deploy_device",
    "check_qconfig",
    "check_unfused_operations",
    "compare_script_models",
    "compare_weights",
    "featuremap_similarity",
    "get_module_called_count",
    "get_raw_features",
    "model_profiler",
    "profile_featuremap",
    "script_profile",
    "set_preserve_qat_mode",
    "show_cuda_memory_consumption",
    "write_node_data",
]
