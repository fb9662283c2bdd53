"""`prepare`: from a float model to one that calibrates and trains on the integer grid."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.fx.call_site import ScopeHooks, scoped_modules
from horizon_plugin_pytorch.fx.dispatch import Dispatcher
from horizon_plugin_pytorch.fx.recording import record
from horizon_plugin_pytorch.fx.tracer import is_leaf
from horizon_plugin_pytorch.march import require_march
from horizon_plugin_pytorch.nn.placed import PlacedModule
from horizon_plugin_pytorch.nn.qat.recurrent import follow_batches
from horizon_plugin_pytorch.nn.transformer import plain_transformers
from horizon_plugin_pytorch.quantization.passes.configure import resolve_qconfigs
from horizon_plugin_pytorch.quantization.passes.fuse import fuse_graph
from horizon_plugin_pytorch.quantization.passes.half import quantize_half
from horizon_plugin_pytorch.quantization.passes.region import called_path, quantized_nodes
from horizon_plugin_pytorch.quantization.passes.replace import (
    check_modules,
    replace_functions,
    warn_shared,
    warn_unquantized,
)
from horizon_plugin_pytorch.quantization.passes.swap import to_qat, warn_int16
from horizon_plugin_pytorch.quantization.quantize_fx import called_lines, copy_model, require_float


class PrepareMethod(Enum):
    """How the model's graph is found."""

    JIT_STRIP = "jit-strip"
    JIT = "jit"
    SYMBOLIC = "symbolic"
    EAGER = "eager"


class FuseMode(Enum):
    """What is fused."""

    BNAddReLU = "BNAddReLU"
    NoFuse = "NoFuse"


class Captured:
    """A model with its recorded graph, as passes see it: modules are put into the model itself."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model, self.graph = model, graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def add_submodule(self, path: str, module: nn.Module) -> None:
        """Put a new module at a path."""
        *parents, name = path.split(".")
        owner = self.model
        for parent in parents:  # a dynamic block is a container of its own
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(name, module)

    def recompile(self) -> None:
        """The forward stays the user's."""


def prepare_jit(
    model: nn.Module, example_inputs: Any, qconfig_dict: dict[str, Any] | None, kwargs: dict[str, Any] | None = None
) -> nn.Module:
    """Prepare by running the model on example inputs; its own forward stays."""
    march = require_march("prepare")
    require_float(model, "prepare")
    copied = plain_transformers(copy_model(model, "prepare"))
    args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    captured: Any = Captured(copied, record(copied, args, kwargs))
    choices = resolve_qconfigs(copied, qconfig_dict)
    region = quantized_nodes(captured)
    replace_functions(captured, region, choices, march)
    fuse_graph(captured, choices, region)
    check_modules(captured, region, choices, march)
    warn_unquantized(captured, region, choices)
    warn_shared(captured, region, choices)
    quantize_half(captured, region, choices)
    scoped = list(scoped_modules(copied, is_leaf))
    to_qat(copied, choices, march, called_lines(captured, region))
    follow_batches(copied)
    warn_int16(copied, march)
    dispatcher = Dispatcher(captured.__dict__.get("sites", {}))
    for path, module in scoped:
        ScopeHooks(path, dispatcher).attach(module)
    _link_stubs(captured)
    copied.__dict__["march"], copied.__dict__["graph"] = march, captured.graph
    return copied


def _link_stubs(captured: Any) -> None:
    """Tell modules which of their arguments go through a generated QuantStub."""
    for node in captured.graph.nodes:
        path = called_path(captured, node)
        if path is None:
            continue
        arguments = node.args[1:] if node.op == "call_method" else node.args
        module = captured.model.get_submodule(path)
        if not isinstance(module, PlacedModule):
            continue
        for position, leaf in enumerate(pytree.tree_leaves((arguments, node.kwargs), is_leaf=lambda v: v is None)):
            if isinstance(leaf, fx.Node) and leaf.op == "call_module" and "_generated_quant_" in str(leaf.target):
                module.stub_paths = {**module.stub_paths, position: str(leaf.target)}
