"""The integer graph of a model as a thing to hand over: named inputs and outputs, a function that runs, a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError, require_module
from horizon_plugin_pytorch.export.names import port_names
from horizon_plugin_pytorch.export.onnx_export import write_program
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.program import Program, record_program
from horizon_plugin_pytorch.program.script import ScriptSteps
from horizon_plugin_pytorch.program.structure import filled, in_order
from horizon_plugin_pytorch.runtime.arguments import script_arguments

_METADATA = "horizon_plugin_pytorch."


def program_of_model(
    module: Any, example_inputs: Any, who: str, record: Callable[..., Program] = record_program
) -> Program:
    """The program of a converted model or of a script; anything else is refused.

    Args:
        record: `record_run` where it is only looked at.
    """
    if isinstance(module, torch.jit.ScriptModule):
        program = record(ScriptSteps(module), script_arguments(example_inputs))
        return replace(program, name=module.original_name)
    require_module(module, who, "a converted model or a TorchScript module")
    kinds = [m for m in module.modules() if isinstance(m, (QATModule, QuantizedModule))]
    if not kinds or any(isinstance(m, QATModule) for m in kinds):
        raise ExportError(f"{who}: `{type(module).__name__}` is not converted; call `convert_fx` or `convert` first.")
    return record(module, example_inputs)


@dataclass(frozen=True)
class IntegerFunction:
    """The graph as a function of flat inputs: a tensor for each input, a list with a tensor for each output.

    Args:
        name: what the graph is called.
        program: what it computes.
        inputs, outputs: names.
    """

    name: str
    program: Program = field(repr=False)  # with all weights
    inputs: list[str]
    outputs: list[str]

    def __call__(self, *args: Any) -> list[Tensor]:
        """Run on flat inputs; outputs that are still integers have their storage type."""
        results: Sequence[Tensor] = ()
        for node, value in self.program.run(*(args[0] if len(args) == 1 and isinstance(args[0], list) else args)):
            if node.op == "output":
                results = value
        return [_stored(x, known) for x, known in zip(results, self.program.results, strict=True)]


@dataclass(frozen=True)
class IntegerGraph:
    """What `hbdk4.export` gives: the integer graph of a model, with flat inputs and outputs.

    It is in the place of the vendor's HBIR, whose format is not public. ``graph.functions[0](*flat)`` runs it, and
    `save` writes it as standard ONNX, which ONNX Runtime runs to the same integers.

    Args:
        functions: one, the graph.
        descriptions: of inputs and outputs, as they were given; they are written into the file.
    """

    functions: list[IntegerFunction]
    descriptions: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        """What it computes."""
        return self.functions[0].program

    def flatten(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """The tensors of the model's arguments, in the order of the inputs; all by position, or all by name."""
        paths = self.program.input_paths
        if kwargs:
            names = list(dict.fromkeys(path[0] for path in paths))
            if args or kwargs.keys() - set(names):
                raise ExportError(
                    f"the model was exported with the arguments {', '.join(f'`{name}`' for name in names)}, got "
                    f"{len(args)} by position and {', '.join(f'`{name}`' for name in kwargs)}: give them by position, "
                    "as the model takes them."
                )
            args = tuple(kwargs[name] for name in names if name in kwargs)
        return in_order(args, paths, "the model")

    def unflatten(self, outputs: Sequence[Tensor]) -> Any:
        """What the model gives, of flat outputs."""
        if len(outputs) != len(self.functions[0].outputs):
            raise ExportError(f"the model gives {len(self.functions[0].outputs)} tensors, got {len(outputs)}.")
        return filled(self.program.outputs, list(outputs))

    def save(self, f: Any) -> None:
        """Write the graph as ONNX, to a path or a binary file object."""
        function = self.functions[0]
        proto = write_program(function.program, function.inputs, function.outputs)
        for name, value in self.descriptions.items():
            entry = proto.metadata_props.add()
            entry.key, entry.value = _METADATA + name, json.dumps(value, default=str)
        data = proto.SerializeToString()
        if isinstance(f, (str, os.PathLike)):
            write_atomically(data, os.fspath(f))
        else:
            f.write(data)


def integer_graph(
    program: Program, name: str, input_names: Any = None, output_names: Any = None, **descriptions: Any
) -> IntegerGraph:
    """A program with names for its inputs and outputs."""
    inputs = port_names(program.input_paths, "input", _flat_names(input_names))
    outputs = port_names(program.output_paths, "output", _flat_names(output_names), inputs)
    given = {key: value for key, value in descriptions.items() if value is not None}
    return IntegerGraph([IntegerFunction(name, program, inputs, outputs)], {"name": name, **given})


def _flat_names(names: Any) -> list[str] | None:
    """Names may be nested as the arguments are."""
    if names is None or isinstance(names, str):
        return None if names is None else [names]
    parts = names.values() if isinstance(names, dict) else names
    return [name for part in parts for name in _flat_names(part) or []]


def _stored(x: Tensor, known: Any) -> Tensor:
    return x if known.quantization is None else x.to(known.quantization.dtype.storage)
