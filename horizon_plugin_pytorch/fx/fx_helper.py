"""Marking code that symbolic trace must not look into."""

from horizon_plugin_pytorch.capture.wrap import wrap

__all__ = ["wrap"]
