"""The values of a program computed by another engine: ONNX Runtime, on the integer graph as it is written to files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_export import write_program
from horizon_plugin_pytorch.export.onnx_session import run_file
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.memory import plain
from horizon_plugin_pytorch.program.note import Value, note_of, value_of
from horizon_plugin_pytorch.program.state import program_of, state_of
from horizon_plugin_pytorch.program.structure import Slot


def values_in_onnx_runtime(program: Program, args: Any) -> dict[str, Tensor]:
    """What each node of a program gives in ONNX Runtime, by the node's name; nodes are not merged or reordered.

    Args:
        args: the arguments, as the program takes them.

    Raises:
        ExportError: an operator has no ONNX form, or the packages are missing.
    """
    watched, names = giving_all(program)
    model = write_program(watched, None, [f"value_{i}" for i in range(len(names))], has_loops=False)
    try:
        results = run_file(model, [plain(x).detach().cpu().numpy() for x in tensors_of(args)])
    except ImportError as error:
        raise ExportError(
            "the comparison with ONNX Runtime needs the package `onnxruntime`: pip install "
            "'horizon-plugin-pytorch[onnx]', or give `compare_with_hbdk_parser=False`."
        ) from error
    return {name: torch.from_numpy(x) for name, x in zip(names, results, strict=True)}


def giving_all(program: Program) -> tuple[Program, list[str]]:
    """A copy of a program that gives what each of its nodes gives; and the names of these nodes."""
    copy = program_of(state_of(program))
    nodes: list[fx.Node] = [
        node for node in copy.graph.nodes if node.op == "call_function" and note_of(node).value is not None
    ]
    copy.graph.output_node().args = (tuple(nodes),)
    results = tuple(Value(value_of(node).shape, value_of(node).dtype) for node in nodes)
    outputs = tuple(Slot(i) for i in range(len(nodes)))
    every = Program(copy.name, copy.graph, copy.constants, copy.input_paths, outputs, results, copy.classes)
    return every, [node.name for node in nodes]
