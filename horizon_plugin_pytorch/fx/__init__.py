"""How a model's graph is seen."""

from horizon_plugin_pytorch.fx import fx_helper, jit_scheme

__all__ = ["fx_helper", "jit_scheme"]
