"""Why an operator has the number formats that it has."""

from horizon_plugin_pytorch.config.explain import explain

__all__ = ["explain"]
