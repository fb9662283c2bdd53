"""Notes on the nodes of a graph: typed, copied with the node, and written in one file."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path

import torch
from torch import fx

import horizon_plugin_pytorch
from horizon_plugin_pytorch.capture.packing import PackedGraph
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes, place_like

PACKAGE = Path(horizon_plugin_pytorch.__file__).parent
OWNERS = {"runtime/node_notes.py", "program/note.py"}


def _graph() -> tuple[fx.Graph, fx.Node]:
    graph = PackedGraph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    graph.output(node)
    return graph, node


def _uses_of_meta(source: str) -> list[int]:
    """Lines that read or write the attribute `meta`; ``x.meta()`` is a method of something else."""
    tree = ast.parse(source)
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "meta" and id(n) not in called]
    return sorted(n.lineno for n in found)


def test_only_the_files_of_notes_touch_meta() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert all(_uses_of_meta(files[name]) for name in OWNERS)
    assert not [f"{name}:{line}" for name in files.keys() - OWNERS for line in _uses_of_meta(files[name])]


def test_the_search_sees_what_it_looks_for() -> None:
    source = "node.meta['key'] = 1\nnode.meta.update(key=1)\ny = {**node.meta}\nz = tensor.meta()\n"
    assert _uses_of_meta(source) == [1, 2, 3]


def test_a_note_that_says_nothing_new_is_taken_away() -> None:
    _, node = _graph()
    notes(node).writes, notes(node).members, notes(node).is_constant = True, ("a", "b"), False
    assert (notes(node).writes, notes(node).members, notes(node).is_constant) == (True, ("a", "b"), False)
    notes(node).writes, notes(node).members, notes(node).is_constant = False, (), None
    assert (notes(node).writes, notes(node).members, notes(node).is_constant) == (False, (), None)
    assert not node.meta


def test_copies_of_a_graph_have_notes_of_their_own() -> None:
    graph, node = _graph()
    notes(node).shape = (1, 2)
    copied = next(n for n in copy.deepcopy(graph).nodes if n.op == "call_function")
    assert notes(copied).shape == (1, 2)
    notes(copied).shape = (3,)
    assert notes(node).shape == (1, 2)


def test_pickled_graphs_keep_what_is_asked_of_loaded_models() -> None:
    graph, node = _graph()
    node.stack_trace = "line"
    known = notes(node)
    known.scope, known.made_by, known.members, known.shape = "a.b", "fuse", ("a", "b"), (1,)
    loaded = next(n for n in pickle.loads(pickle.dumps(graph)).nodes if n.op == "call_function")
    assert (loaded.stack_trace, notes(loaded).scope) == ("line", "a.b")
    assert (notes(loaded).made_by, notes(loaded).members, notes(loaded).shape) == ("fuse", ("a", "b"), None)


def test_made_nodes_have_the_line_and_scope_of_what_they_stand_for() -> None:
    graph, node = _graph()
    node.stack_trace = "line"
    notes(node).scope, notes(node).shape = "a", (1,)
    with graph.inserting_after(node):
        made = inherit(graph.call_function(torch.relu, (node,)), node, "a pass")
        beside = graph.call_function(torch.relu, (node,))
    assert (made.scope, made.shape, made.made_by, notes(node).made_by) == ("a", (1,), "a pass", "")
    assert (place_like(beside, node).scope, notes(beside).shape, beside.stack_trace) == ("a", None, "line")
