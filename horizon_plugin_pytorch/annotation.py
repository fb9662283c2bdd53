"""Texts that tell what a model's outputs are."""

from horizon_plugin_pytorch.runtime.annotation import get_output_annotation, set_annotation

__all__ = ["get_output_annotation", "set_annotation"]
