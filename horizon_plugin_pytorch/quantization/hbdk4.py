"""The way to the vendor's compiler, as far as it goes without it: the integer graph, flat inputs and outputs."""

from horizon_plugin_pytorch.workflow.hbir import (
    export,
    get_hbir_input_flattener,
    get_hbir_output_unflattener,
    pre_export,
)

__all__ = ["export", "get_hbir_input_flattener", "get_hbir_output_unflattener", "pre_export"]
