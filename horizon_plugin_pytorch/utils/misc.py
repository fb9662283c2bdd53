"""Nested inputs and outputs: what they look like, and changing what is in them."""

from horizon_plugin_pytorch.analysis.structures import pytree_convert, tensor_struct_repr

__all__ = ["pytree_convert", "tensor_struct_repr"]
