"""Code that tracing does not enter: where the graph calls it, and which modules it may call."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.asking.functions import is_library_function
from horizon_plugin_pytorch.capture.leaves import is_leaf, is_marked
from horizon_plugin_pytorch.capture.reach import modules_named_by
from horizon_plugin_pytorch.capture.region import Region, called_path, is_fact
from horizon_plugin_pytorch.errors import source_line
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.notes import hidden, keep_hidden
from horizon_plugin_pytorch.operators.table import row_of_function, row_of_method, row_of_module
from horizon_plugin_pytorch.runtime.children import hide_added
from horizon_plugin_pytorch.runtime.leaf import LeafCode, LeafMethod, TensorMethod, bind_methods, leaf_name
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes
from horizon_plugin_pytorch.runtime.wrapped import PassedScope, WrappedDispatcher

_MODULES = "wrapped_modules"
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FORWARDS = (LeafCode.forward, *(cls.forward for cls in _LISTS))  # which call no function themselves


def wrapped_modules(model: Any) -> dict[str, str]:
    """Modules that are called by code which tracing does not enter: paths, with the line that calls this code."""
    found = hidden(model, _MODULES, dict)
    return {} if found is None else found


def wrapped_nodes(model: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a traced graph that call such code."""
    return [node for node in model.graph.nodes if is_wrapped(model, node)]


def is_wrapped(model: fx.GraphModule, node: fx.Node) -> bool:
    """Does a node call such code?"""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return isinstance(module, LeafCode) or is_marked(module)
    if node.op != "call_function" or not getattr(node.target, "__horizon_leaf__", False):
        return False
    return not is_library_function(inspect.unwrap(node.target)) and row_of_function(node.target) is None  # type: ignore[arg-type]


def with_stubs(model: fx.GraphModule, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls of code that has QuantStubs inside, which no traced code calls."""
    return {node for node in nodes if any(_is_quant_stub(module) for module in _modules_of(model, node).values())}


def _is_quant_stub(module: nn.Module) -> bool:
    row = row_of_module(type(module))
    return row is not None and row.is_quant


def _modules_of(model: fx.GraphModule, node: fx.Node) -> dict[str, nn.Module]:
    """The modules that a call of such code may reach and that the graph does not call, by path."""
    wanted = {id(m) for m in _reached(model, node) if not isinstance(m, LeafCode)} - _called(model)
    return {path: m for path, m in model.named_modules() if id(m) in wanted}


def _called(model: fx.GraphModule) -> set[int]:
    """The modules that the graph calls."""
    return {id(model.get_submodule(path)) for n in model.graph.nodes if (path := called_path(model, n)) is not None}


def _reached(model: fx.GraphModule, node: fx.Node, is_certain: bool = False) -> list[nn.Module]:
    """The modules that a call of such code may reach, or names."""
    found: list[nn.Module] = []
    owner: nn.Module = model
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        is_code = isinstance(module, LeafCode)
        owner = model.get_submodule(str(node.target).rpartition(".")[0]) if is_code else module
        found = modules_named_by(module.function, owner, is_certain) if is_code else list(module.modules())
        if is_code and module.function is _run:
            found = list(owner.modules())
    for source in node.all_input_nodes:
        value = _module_read(model, source)
        found += [] if value is None else list(value.modules())
    return found


def called_by_code_too(model: fx.GraphModule, is_certain: bool = True) -> dict[int, str]:
    """Modules that the graph calls and that such code names, or may reach: ids, with the line that calls this code."""
    called, found = _called(model), dict[int, str]()
    for node in wrapped_nodes(model):
        shared = {id(m) for m in _reached(model, node, is_certain)} & called
        found.update(dict.fromkeys(shared, source_line(node.stack_trace)))
    return found


def note_module(model: fx.GraphModule, path: str, line: str) -> None:
    """Note a module that such code calls, and the graph no longer does."""
    wrapped_modules(model).setdefault(path, line)


def _module_read(model: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a node reads from the model, to give it to a function."""
    if node.op != "get_attr":
        return None
    try:
        return model.get_submodule(str(node.target))
    except AttributeError:
        return None


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a module whose class is marked."""
    return module(*args, **kwargs)


def place_code(model: fx.GraphModule, region: Region, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Give each call of such code in the quantized part a module of its own, in which its scales can be.

    What it gives is not known before it runs: integers with a scale, real numbers, sizes. Functions on that are decided
    when they run, too.
    """
    located: list[fx.Node] = []
    used: set[str] = set()
    for node in nodes:
        if node in region:
            located.append(_located(model, region, node, used))
    uncertain = set(located)
    for node in list(model.graph.nodes):
        if node in uncertain or node not in region or not _is_uncertain(model, region, node, uncertain):
            continue
        found = _row_of(node)
        if found is None or found.qat is not None:
            function = node.target if node.op == "call_function" else TensorMethod(str(node.target))
            node = _replaced(model, region, node, LeafCode(function), used)  # type: ignore[arg-type]
            located.append(node)
        uncertain.add(node)
    model.recompile()
    bind_methods(model)
    return located


def _is_uncertain(model: fx.GraphModule, region: Region, node: fx.Node, uncertain: set[fx.Node]) -> bool:
    """Does a function compute with nothing but what such code gave?"""
    if node.op not in ("call_function", "call_method") or called_path(model, node) is not None or is_fact(node):
        return False
    sources = [source for source in node.all_input_nodes if region.kinds(source)]
    return bool(sources) and all(source in uncertain for source in sources)


def _row_of(node: fx.Node) -> Any:
    if node.op == "call_function":
        found = row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    else:
        found = row_of_method(str(node.target), node.args, node.kwargs)
    return None if found is None else found[0]


def _located(model: fx.GraphModule, region: Region, node: fx.Node, used: set[str]) -> fx.Node:
    if node.op == "call_function":
        return _replaced(model, region, node, LeafCode(node.target), used)  # type: ignore[arg-type]
    path = str(node.target)
    module = model.get_submodule(path)
    if not isinstance(module, LeafCode):
        return _replaced(model, region, node, LeafMethod(_run), used, path)
    if path not in used:
        used.add(path)
        return node
    return _replaced(model, region, node, type(module)(module.function), used, path.rpartition(".")[0])


def _replaced(
    model: fx.GraphModule, region: Region, node: fx.Node, module: LeafCode, used: set[str], scope: str | None = None
) -> fx.Node:
    """Let the graph call a module instead."""
    scope = notes(node).scope if scope is None else scope
    while scope and isinstance(model.get_submodule(scope), _LISTS):
        scope = scope.rpartition(".")[0]
    path = _free_path(model, f"{scope}._leaf_{leaf_name(module.function).lstrip('_')}".lstrip("."))
    used.add(path)
    model.add_submodule(path, module.train(model.training))
    with model.graph.inserting_before(node):
        new = model.graph.call_module(path, node.args, node.kwargs)
    inherit(new, node, "wrapped code")
    region.replace(node, new)
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)
    return new


def _free_path(model: fx.GraphModule, path: str) -> str:
    parent, _, name = path.rpartition(".")
    taken = model.get_submodule(parent)
    names = itertools.chain((name,), (f"{name}_{index}" for index in itertools.count(1)))
    return f"{parent}.{next(n for n in names if not hasattr(taken, n))}".lstrip(".")


def find_modules(model: fx.GraphModule, nodes: Iterable[fx.Node], march: March) -> None:
    """Note the modules that such code may call; they are quantized like those that the graph calls.

    One that the chip does not have stays float: if it gets a quantized tensor, its function says that there is no form.
    """
    found: dict[str, str] = {}
    for node in nodes:
        for path, module in _modules_of(model, node).items():
            row = row_of_module(type(module))
            if row is not None and row.qat is not None and row.support(march) is not None:
                found.setdefault(path, source_line(node.stack_trace))
    keep_hidden(model, _MODULES, found)


def attach(model: fx.GraphModule, nodes: Iterable[fx.Node], make: Callable[..., bool]) -> None:
    """Let a prepared model send functions in such code to modules, which `make` makes."""
    handler = WrappedDispatcher({}, make)
    owners: set[str] = set()
    for node in nodes:
        leaf: Any = model.get_submodule(str(node.target))
        leaf.handler, leaf.path = handler, str(node.target)
        owners.add(leaf.path)
    for path, module in model.named_modules():
        is_container = isinstance(module, (LeafCode, *_LISTS)) and type(module).forward in _FORWARDS
        if path and not is_leaf(module) and not is_container and not _is_inside(path, owners):
            PassedScope(path, handler).attach(module)
            hide_added(module, [name for name, child in module.named_children() if not isinstance(child, LeafCode)])


def _is_inside(path: str, owners: set[str]) -> bool:
    return any(path.startswith(f"{owner}.") for owner in owners)
