"""Generated stubs in a model that runs its own forward: modules send their operands through them."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.capture.region import called_path
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.node_notes import notes


def link_stubs(captured: Any) -> None:
    """Tell modules which of their arguments go through a generated QuantStub."""
    for node in captured.graph.nodes:
        path = called_path(captured, node)
        if path is None:
            continue
        arguments = node.args[1:] if node.op == "call_method" else node.args
        module = captured.get_submodule(path)
        if not isinstance(module, PlacedModule):
            continue
        for position, leaf in enumerate(pytree.tree_leaves((arguments, node.kwargs), is_leaf=lambda v: v is None)):
            if isinstance(leaf, fx.Node) and leaf.op == "call_module" and _is_made(leaf):
                module.stub_paths = {**module.stub_paths, position: str(leaf.target)}
                if notes(node).writes:  # to what the stub has read, which its gradient needs
                    captured.get_submodule(str(leaf.target)).takes_copy = True


def _is_made(stub: fx.Node) -> bool:
    """Is it a QuantStub that the model's own forward does not call?"""
    return notes(stub).is_made or notes(stub).made_by == "hybrid"
