"""Marking code that symbolic trace must not look into: the guides' path of `fx.fx_helper`."""

from horizon_plugin_pytorch.fx.fx_helper import wrap

__all__ = ["wrap"]
