"""`QconfigSetter`: formats by templates, with a log of every change."""

from horizon_plugin_pytorch.config.qconfig_setter import QconfigSetter, rule_of

__all__ = ["QconfigSetter", "rule_of"]
