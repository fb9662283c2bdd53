"""Which class a module becomes, as dictionaries; they are read from the operator table."""

from horizon_plugin_pytorch.workflow.mappings import get_qat_module_mappings, get_quantized_module_mappings

__all__ = ["get_qat_module_mappings", "get_quantized_module_mappings"]
