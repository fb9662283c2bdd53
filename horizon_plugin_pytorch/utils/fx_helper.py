"""Marking code that symbolic trace must not look into: the guides' path of `fx.fx_helper`."""

from horizon_plugin_pytorch.capture.wrap import wrap

__all__ = ["wrap"]
