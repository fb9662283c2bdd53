"""Why modules stay float that are not in the quantized part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from horizon_plugin_pytorch.capture.leaves import is_leaf
from horizon_plugin_pytorch.capture.region import called_path
from horizon_plugin_pytorch.capture.wrapped import wrapped_modules
from horizon_plugin_pytorch.config.choice import Choice, Step
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.runtime.located import FUSED_INTO

BEFORE, AFTER, BESIDE = "before the QuantStub", "after the DeQuantStub", "not between QuantStub and DeQuantStub"
NEVER = "never called"


def note_skipped(prep: Preparation) -> None:
    """Give the modules that the quantized part does not call a choice that says so."""
    model, region, choices = prep.model, prep.region, prep.choices
    calls: dict[str, list[fx.Node]] = {}
    for node in model.graph.nodes:
        path = called_path(model, node)
        if path is not None:
            calls.setdefault(path, []).append(node)
    quantized = [node for node in model.graph.nodes if node in region]
    before = _closure(quantized, lambda node: node.all_input_nodes)
    after = _closure(quantized, lambda node: node.users)
    for path, module in model.named_modules():
        nodes = calls.get(path, [])
        is_part = any(around in calls for around in _around(path))
        is_exit = any(source in region for node in nodes for source in node.all_input_nodes)
        if path not in choices or is_part or not is_leaf(module) or FUSED_INTO in vars(module):
            continue
        if is_exit or path in wrapped_modules(model) or any(node in region for node in nodes):
            continue
        why = NEVER if not nodes else AFTER if nodes[0] in after else BEFORE if nodes[0] in before else BESIDE
        choices[path] = Choice(None, steps=(Step(why, output="float"),))


def _around(path: str) -> Iterator[str]:
    """Paths of the modules that one is in."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _closure(nodes: list[fx.Node], neighbours: Any) -> set[fx.Node]:
    """Nodes, and all that is reached from them."""
    found, pending = set(nodes), list(nodes)
    while pending:
        for other in neighbours(pending.pop()):
            if other not in found:
                found.add(other)
                pending.append(other)
    return found
