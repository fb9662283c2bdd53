"""Templates of `QconfigSetter`: each changes the formats that those before it gave."""

from horizon_plugin_pytorch.config.templates import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
    SetDynamicQuantTemplate,
    get_common_templates,
    get_compat_templates,
    set_dynamic,
    set_inputs,
    set_output,
    set_products,
)

__all__ = [
    "ConvDtypeTemplate",
    "MatmulDtypeTemplate",
    "ModuleNameTemplate",
    "SensitivityTemplate",
    "SetDynamicQuantTemplate",
    "get_common_templates",
    "get_compat_templates",
    "set_dynamic",
    "set_inputs",
    "set_output",
    "set_products",
]
