"""The calls of the guides that lead to the vendor's compiler, as far as the way goes without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, require_module, warn
from horizon_plugin_pytorch.export.integer_graph import IntegerGraph, integer_graph, program_of_model
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import get_fake_quantize
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.workflow.eager import convert

__all__ = ["export", "get_hbir_input_flattener", "get_hbir_output_unflattener", "pre_export"]


def export(
    model: nn.Module,
    example_inputs: Any,
    name: str = "forward",
    input_names: Any = None,
    output_names: Any = None,
    input_descs: Any = None,
    output_descs: Any = None,
    native_pytree: bool = True,
) -> IntegerGraph:
    """The integer graph of a model, with flat inputs and outputs, in the place of the vendor's HBIR.

    A prepared model must be in eval mode and in the VALIDATION state; it is converted, and stays as it is. A converted
    model is taken as it is.

    Args:
        model: a prepared or converted model.
        example_inputs: its arguments; the graph is for their shapes.
        name: of the graph.
        input_names, output_names: names of the tensors, flat or nested as the arguments are.
        input_descs, output_descs: notes on them, which are written into the file's metadata.
        native_pytree: has no effect: structures are always kept, and flattened by `get_hbir_input_flattener`.

    Returns:
        ``graph.functions[0](*flat)`` runs it; ``graph.save("model.onnx")`` writes it.

    Raises:
        ExportError: the model is float, in training mode, or in another state.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> from horizon_plugin_pytorch.quantization import set_fake_quantize
    >>> set_march(March.NASH_E)
    >>> data = torch.randn(1, 3, 4, 4)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)), {"": get_default_qconfig()})
    >>> _ = qat(data)
    >>> set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    >>> graph = export(qat, data, input_names=["image"])
    >>> graph.functions[0].inputs
    ['image']
    >>> flat = get_hbir_input_flattener(graph)(data)
    >>> out = get_hbir_output_unflattener(graph)(graph.functions[0](*flat))
    >>> torch.equal(out, qat(data))
    True
    """
    require_module(model, "export")
    if not native_pytree:
        warn("hbdk4.export: native_pytree=False changes nothing, structures are kept.", QuantizationWarning)
    if any(isinstance(module, QATModule) for module in model.modules()):
        _require_ready(model, "hbdk4.export")
        model = convert(model)
    program = program_of_model(model, example_inputs, "hbdk4.export")
    return integer_graph(program, name, input_names, output_names, input_descs=input_descs, output_descs=output_descs)


def pre_export(model: nn.Module, inplace: bool = False) -> nn.Module:
    """The model as it is exported: checked, and copied unless `inplace`.

    The vendor's function replaces operators by tables here. In the VALIDATION state the model computes with these
    already, so there is nothing left to replace.

    Raises:
        ExportError: the model is float, in training mode, or in another state.
    """
    require_module(model, "pre_export")
    _require_ready(model, "hbdk4.pre_export")
    return model if inplace else copy.deepcopy(model)


def get_hbir_input_flattener(model: IntegerGraph) -> Callable[..., list[Any]]:
    """What makes the flat list of tensors that ``graph.functions[0]`` takes of the model's arguments."""
    return _require_graph(model, "get_hbir_input_flattener").flatten


def get_hbir_output_unflattener(model: IntegerGraph) -> Callable[..., Any]:
    """What makes the model's outputs of the list of tensors that ``graph.functions[0]`` gives."""
    return _require_graph(model, "get_hbir_output_unflattener").unflatten


def _require_graph(model: Any, who: str) -> IntegerGraph:
    if not isinstance(model, IntegerGraph):
        raise TypeError(f"{who} takes what `hbdk4.export` gives, got {type(model).__name__}.")
    return model


def _require_ready(model: nn.Module, who: str) -> None:
    if not any(isinstance(module, FakeQuantize) for module in model.modules()):
        raise ExportError(f"{who}: `{type(model).__name__}` is a float model: prepare and calibrate it first.")
    if model.training:
        raise ExportError(f"{who}: the model is in training mode; call `model.eval()` first.")
    if get_fake_quantize(model) != FakeQuantState.VALIDATION:
        raise ExportError(
            f"{who}: the model is not in the VALIDATION state, in which it computes the integers that are exported. "
            "Call `set_fake_quantize(model, FakeQuantState.VALIDATION)` first."
        )


show_at("quantization.hbdk4", export, pre_export, get_hbir_input_flattener, get_hbir_output_unflattener)
