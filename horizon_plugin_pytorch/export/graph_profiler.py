"""Recording the operators of an integer graph while it runs; the graph as a module."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.analysis.quant_analysis.op_infos import OpInfoManager
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.integer_graph import IntegerGraph
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, operator_name, value_of
from horizon_plugin_pytorch.program.program import watching
from horizon_plugin_pytorch.watch.operator_call import OperatorCall


class HbirModuleWrapper(nn.Module):
    """An integer graph as a module: it takes and gives what the model takes and gives, however that is nested.

    Args:
        hbir: what `hbdk4.export` gives.

    >>> import torch
    >>> from horizon_plugin_pytorch.export.integer_graph import integer_graph
    >>> from horizon_plugin_pytorch.program import record_program
    >>> graph = integer_graph(record_program(nn.ReLU(), torch.zeros(2)), "forward")
    >>> HbirModuleWrapper(graph)(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """

    def __init__(self, hbir: IntegerGraph) -> None:
        super().__init__()
        self._graph = _require_graph(hbir, "HbirModuleWrapper")

    @property
    def program(self) -> Program:
        """What it computes."""
        return self._graph.program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on the model's arguments."""
        flat = self._graph.flatten(args, kwargs) if kwargs else self._graph.flatten(*args)
        return self._graph.unflatten(self._graph.functions[0](*flat))


class HbirModelProfiler:
    """Writes down what each operator of an integer graph gives, in every run inside of ``with``.

    `ModelProfiler` for what `hbdk4.export` gives, or its `HbirModuleWrapper`: the last run is kept, in
    ``op_infos/<module>_<index>.opinfo``, ``statistic.txt`` and ``statistic.csv``.

    Args:
        model: the graph.
        work_dir: the folder of the files.

    >>> import tempfile, torch
    >>> from horizon_plugin_pytorch.export.integer_graph import integer_graph
    >>> from horizon_plugin_pytorch.program import record_program
    >>> net = nn.Sequential(nn.ReLU(), nn.Tanh())
    >>> graph = integer_graph(record_program(net, torch.zeros(2)), "forward")
    >>> with HbirModelProfiler(graph, tempfile.mkdtemp()) as profiler:
    ...     _ = graph.functions[0](torch.ones(2))
    >>> [(info.path, info.op_type) for info in profiler.get_info_manager()]
    [('0', 'aten::relu'), ('1', 'aten::tanh')]
    """

    def __init__(self, model: IntegerGraph | HbirModuleWrapper, work_dir: str | os.PathLike = "./hbir_profile") -> None:
        graph = model._graph if isinstance(model, HbirModuleWrapper) else model
        self._program = _require_graph(graph, "HbirModelProfiler").program
        self._manager = OpInfoManager(work_dir, "HbirModelProfiler")
        self._stack = ExitStack()
        self._index = 0
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> HbirModelProfiler:
        self._stack.enter_context(watching(self._program, self._tell))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._manager.write_statistics()

    def get_info_manager(self) -> OpInfoManager:
        """What was written: `table` prints it."""
        return self._manager

    def _tell(self, node: fx.Node, value: Any) -> None:
        if node.op == "output":
            self._index = 0
            self._counts.clear()
        note = note_of(node) if node.op == "call_function" else None
        if note is None or note.value is None:  # what gives several tensors is told by the nodes that take them apart
            return
        given = value_of(node).wrap(value)
        call = OperatorCall(self._index, note.path, self._counts[note.path], line=note.line, output=given)
        self._counts[note.path] += 1
        self._index += 1
        self._manager.add(call, operator_name(node) or "getitem", dict)


def _require_graph(graph: Any, who: str) -> IntegerGraph:
    if not isinstance(graph, IntegerGraph):
        raise ExportError(f"{who} takes what `hbdk4.export` gives, got a {type(graph).__name__}.")
    return graph
