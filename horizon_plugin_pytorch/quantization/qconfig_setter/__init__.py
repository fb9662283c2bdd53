"""`QconfigSetter` and its templates: number formats by rules that are applied in order."""

from horizon_plugin_pytorch.config.qconfig_setter import QconfigSetter, get_int8_gemm_setter
from horizon_plugin_pytorch.config.rules import Rule, canonicalize_rules
from horizon_plugin_pytorch.config.templates import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
    SetDynamicQuantTemplate,
    get_common_templates,
    get_compat_templates,
)

__all__ = [
    "ConvDtypeTemplate",
    "MatmulDtypeTemplate",
    "ModuleNameTemplate",
    "QconfigSetter",
    "Rule",
    "SensitivityTemplate",
    "SetDynamicQuantTemplate",
    "canonicalize_rules",
    "get_common_templates",
    "get_compat_templates",
    "get_int8_gemm_setter",
]
