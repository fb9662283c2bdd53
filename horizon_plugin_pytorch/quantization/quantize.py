"""Eager mode: the user writes stubs and FloatFunctional, and fuses; these verbs swap modules."""

from horizon_plugin_pytorch.config.graph_view import PLACEHOLDER
from horizon_plugin_pytorch.workflow.eager import convert, load_observer_params, prepare_qat

__all__ = ["PLACEHOLDER", "convert", "load_observer_params", "prepare_qat"]
