"""What a `ModuleNameTemplate` says of one module, in one form."""

from horizon_plugin_pytorch.config.rules import Rule, canonicalize_rules

__all__ = ["Rule", "canonicalize_rules"]
