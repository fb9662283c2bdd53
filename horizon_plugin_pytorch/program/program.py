"""The program object: it runs, prints, and can be saved."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.program.memory import plain
from horizon_plugin_pytorch.program.note import Quantization, Value, value_of
from horizon_plugin_pytorch.program.structure import filled, in_order, slot_paths
from horizon_plugin_pytorch.program.text import program_text
from horizon_plugin_pytorch.qtensor import QTensor

_WATCHES: ContextVar[tuple[tuple[Any, Callable[[fx.Node, Any], None]], ...]] = ContextVar("watches", default=())


@contextmanager
def watching(program: Program, tell: Callable[[fx.Node, Any], None]) -> Iterator[None]:
    """Tell of each node that runs of a program compute in here, and of its value, as `Program.run` gives them.

    >>> from horizon_plugin_pytorch.program import record_program
    >>> program, seen = record_program(nn.ReLU(), torch.zeros(2)), []
    >>> with watching(program, lambda node, value: seen.append(node.op)):
    ...     _ = program(torch.ones(2))
    >>> seen
    ['placeholder', 'call_function', 'output']
    """
    token = _WATCHES.set((*_WATCHES.get(), (program, tell)))
    try:
        yield
    finally:
        _WATCHES.reset(token)


@dataclass(eq=False)
class Program:
    """What a converted model computes: a graph of `horizon::` and aten operators on ordinary tensors.

    `record_program` makes it. A call takes and gives what the model takes and gives, and the numbers are the same. The
    graph has no writes in place and no control flow; its shapes are those of the inputs that it was recorded with.

    Every node has a `Note` (`program.note.note_of`): the module and line that it comes from, the shape and type of what
    it gives, and for integers their scale and number format.

    Args:
        name: the class of the model.
        graph: placeholders for the tensors of the inputs, ``get_attr`` for constants, operators, and one output: a
            tuple of tensors.
        constants: what the ``get_attr`` nodes name.
        input_paths: where each input tensor is found among the arguments: positions, keys and names of fields;
            keys that are numbers are spelled.
        outputs: the structure that the model gives, with a `Slot` for each tensor.
        results: what is known of each tensor that is given.
        classes: the class of each module that a node names, and of those around it.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, Tensor]
    input_paths: tuple[tuple[Any, ...], ...]
    outputs: Any
    results: tuple[Value, ...]
    classes: dict[str, str] = field(default_factory=dict)

    @property
    def output_paths(self) -> list[tuple[Any, ...]]:
        """Where each tensor that is given is found in the outputs."""
        return slot_paths(self.outputs)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> list[fx.Node]:
        """The nodes of the tensors that are given."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes that compute something, in the order of the run."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph as a module, for tools that take one: tensors in, a tuple of tensors out.

        Integers are plain tensors here, in float32.
        """
        root = nn.Module()
        for name, tensor in self.constants.items():
            root.register_buffer(name, tensor)
        return fx.GraphModule(root, self.graph, class_name=self.name)

    def __call__(self, *args: Any) -> Any:
        """Run it on inputs of the recorded shapes; it gives what the model gives."""
        results: tuple[Tensor, ...] = ()
        for node, value in self.run(*args):
            if node.op == "output":
                results = value
        return filled(self.outputs, [known.wrap(x) for known, x in zip(self.results, results, strict=True)])

    def run(self, *args: Any) -> Iterator[tuple[fx.Node, Any]]:
        """Run it node by node: each node with what it gives, as it is computed; the output comes last.

        A value is let go of after its last use, unless the caller keeps it. ``value_of(node).wrap(value)`` gives
        integers their scale.

        >>> from horizon_plugin_pytorch.program import record_program
        >>> program = record_program(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.zeros(2))
        >>> [(node.name, value.shape) for node, value in program.run(torch.ones(2)) if node.op == "call_function"]
        [('_0_relu', torch.Size([2])), ('_1_tanh', torch.Size([2]))]
        """
        given = iter(self._given(args))
        values: dict[fx.Node, Any] = {}
        told = [tell for program, tell in _WATCHES.get() if program is self]
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self.constants[str(node.target)]
                continue
            else:
                inputs, options = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with torch.no_grad():
                    values[node] = inputs[0] if node.op == "output" else node.target(*inputs, **options)
                del inputs, options
            for tell in told:
                tell(node, values[node])
            yield node, values[node]
            for used in self._last_uses[node]:
                del values[used]

    @cached_property
    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes whose values are not needed after each node."""
        found: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.graph.nodes}
        seen: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            for used in (node, *node.all_input_nodes):
                if used not in seen:
                    seen.add(used)
                    found[node].append(used)
        return found

    def _given(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of the inputs, if they are such as the program was recorded with."""
        tensors = in_order(args, self.input_paths, f"the program of `{self.name}`")
        wanted = [value_of(node) for node in self.placeholders]
        for index, (x, value) in enumerate(zip(tensors, wanted, strict=True)):
            found = Value.of(plain(x))
            if (found.shape, found.dtype) != (value.shape, value.dtype) or not _has_format(x, value):
                raise ExportError(
                    f"input {index} of the program of `{self.name}` is {found}: expected {value}, as it was recorded. "
                    "Record the model again with inputs of this shape."
                )
        return [plain(x) for x in tensors]

    def __str__(self) -> str:
        return program_text(self)

    def __reduce__(self) -> Any:
        from horizon_plugin_pytorch.program.state import program_of, state_of

        return program_of, (state_of(self),)

    def save(self, f: Any) -> None:
        """Write the program to a file; it is read without the model and its classes.

        Args:
            f: a path, or a binary file object.
        """
        from horizon_plugin_pytorch.program.state import save

        save(self, f)

    @staticmethod
    def load(f: str | os.PathLike[str] | Any) -> Program:
        """Read a program that `save` wrote; nothing in the file is executed while it is read."""
        from horizon_plugin_pytorch.program.state import load

        return load(f)


def _has_format(x: Tensor, value: Value) -> bool:
    """Does an input have the scale and format of the recorded one, or none if that had none?"""
    if value.quantization is None or not isinstance(x, QTensor):
        return value.quantization is None and not isinstance(x, QTensor)
    return value.quantization.is_same(Quantization.of(x))
