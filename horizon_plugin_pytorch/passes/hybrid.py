"""Operators that run on the CPU, in float: what reaches them is dequantized, and what leaves them quantized."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.capture.numbers import with_numbers
from horizon_plugin_pytorch.capture.region import (
    Region,
    called_path,
    has_stub,
    is_fact,
    module_at,
    quantized_nodes,
    row_of_node,
    value_inputs,
)
from horizon_plugin_pytorch.config.choice import Choice, inherited_choice
from horizon_plugin_pytorch.config.setters import ModuleNameQconfigSetter, given_setters
from horizon_plugin_pytorch.errors import (
    QuantizationConfigError,
    QuantizationWarning,
    UnsupportedOperatorError,
    at,
    source_line,
    warn,
)
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.nn.stubs import DeQuantStub, QuantStub
from horizon_plugin_pytorch.operators.table import AS_IT_IS, Call, NotBindable, Operator, Trait, row_named
from horizon_plugin_pytorch.passes.fusion_rules import Role, can_fold, role_of
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.replace import binder_of
from horizon_plugin_pytorch.runtime.node_notes import notes, place_like


class HybridConfig:
    """Which operators run on the CPU.

    Args:
        hybrid_dict: ``{"module_type": [classes], "module_name": [paths]}``; operators inside such modules count too.
        setters: those that are given; what a `ModuleNameQconfigSetter` gives None runs on the CPU as well.
    """

    def __init__(self, hybrid_dict: dict[str, list] | None = None, setters: Any = None) -> None:
        given = hybrid_dict or {}
        unknown = [key for key in given if key not in ("module_type", "module_name")]
        if unknown:
            raise QuantizationConfigError(f"hybrid_dict has unknown keys {unknown}; it takes module_type, module_name.")
        for key, listed in given.items():
            if not isinstance(listed, (list, tuple)):
                raise QuantizationConfigError(f"hybrid_dict[{key!r}] must be a list, got {listed!r}.")
        self.types, self.names = tuple(given.get("module_type", ())), tuple(given.get("module_name", ()))
        wrong = [repr(cls) for cls in self.types if not isinstance(cls, type)]
        if wrong:
            raise QuantizationConfigError(
                f"hybrid_dict['module_type'] lists classes, such as nn.SiLU, got {', '.join(wrong)}; paths of modules "
                "belong to 'module_name'."
            )
        self._by_setters: list[dict[str, bool]] = []  # from high to low priority: is what has this path left float?
        for setter in () if setters is None else given_setters(setters):
            if not isinstance(setter, ModuleNameQconfigSetter):
                break  # it gives a qconfig to whatever nobody named before
            self._by_setters.append({name: q is None for name, q in setter.module_name_to_qconfig.items() if name})

    def check(self, model: nn.Module) -> None:
        """Insist that the model has the modules that are named, and warn of types that it has none of."""
        found = dict(model.named_modules())
        missing = [name for name in self.names if name not in found]
        if missing:
            raise QuantizationConfigError(
                f"hybrid_dict['module_name'] names {', '.join(map(repr, missing))}, which the model does not have."
            )
        types = {type(module) for module in found.values()}
        unused = [cls.__name__ for cls in self.types if cls not in types]
        if unused:
            warn(
                f"hybrid_dict['module_type'] lists {', '.join(unused)}, and the model has no module of it.",
                QuantizationWarning,
            )

    def lists(self, model: nn.Module, node: fx.Node) -> bool:
        """Did the user say that a node runs on the CPU?"""
        path = called_path(model, node) or notes(node).scope
        if self._is_set_float(path):
            return True
        while True:
            if path in self.names or (path and type(module_at(model, path)) in self.types):
                return True
            if not path:
                return False
            path = path.rpartition(".")[0]

    def _is_set_float(self, path: str) -> bool:
        """Does a setter leave the operator at a path float? The first that names it, or what is around it, decides."""
        around = [path[:end] for end in range(len(path), 0, -1) if end == len(path) or path[end] == "."]
        found = (names[near] for names in self._by_setters for near in around if near in names)
        return next(found, False)


def split_devices(prep: Preparation) -> None:
    """Take the operators that run on the CPU out of the quantized part, with stubs where they meet it.

    A stub before is called ``<node>_input_dequant``, one after it ``<node>_activation_post_process``. The stub after is
    for the quantized operators that read the result: whoever else reads it, reads real numbers. The quantized part may
    begin at an operator of the CPU.
    """
    if prep.hybrid is None:
        return
    model, region, choices, march, config = prep.model, prep.region, prep.choices, prep.march, prep.hybrid
    config.check(model)
    nodes = [n for n in model.graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    is_quantized = any(choice.qconfig is not None for choice in choices.values())
    left = {n for n in nodes if is_quantized and n in region and _is_left_float(model, n, choices)}
    cpu = {n for n in nodes if n in left or _runs_on_cpu(model, n, region, march, config)}
    # Without a QuantStub the quantized part begins at the first operator of the CPU.
    region = quantized_nodes(model, cpu - {n for n in cpu if n in region} if has_stub(model) else cpu)
    for node in nodes:
        if node in region and _runs_on_cpu(model, node, region, march, config):
            cpu.add(node)
    cpu = {n for n in cpu if n in region}
    _refuse_mixed_functionals(model, region, cpu)
    real, sources = _follow(prep, nodes, region, cpu)
    readers = {n: [user for user in n.users if user in region and user not in real] for n in nodes if n in real}
    for node in real:
        region.remove(node)
    prep.region = region
    stubs = _Stubs(prep, sources)
    for node in nodes:  # the guide prints the stubs in this order
        if readers.get(node):
            stubs.quantize(node, readers[node])
        if node in cpu:
            stubs.dequantize(node)
    model.recompile()


def _refuse_mixed_functionals(model: Any, region: Region, cpu: set[fx.Node]) -> None:
    """Insist that all methods of a FloatFunctional are quantized, or none: it is one module."""
    methods = [n for n in model.graph.nodes if n.op == "call_method" and n in region]
    quantized = {called_path(model, n) for n in methods if n not in cpu}
    for node in cpu:
        path = called_path(model, node) if node.op == "call_method" else None
        if path is not None and path in quantized:
            raise UnsupportedOperatorError(
                f"`{node.target}` {at(path, source_line(node.stack_trace))} is to run on the CPU, and other methods of "
                "the same FloatFunctional are quantized: give it one of its own, or write it as a function, as in "
                "`x + y`."
            )


def _follow(
    prep: Preparation, nodes: list[fx.Node], region: Region, cpu: set[fx.Node]
) -> tuple[set[fx.Node], dict[fx.Node, fx.Node]]:
    """The nodes that give real numbers: operators of the CPU, and what only moves what these give.

    One that reads quantized tensors besides joins the operators of the CPU.

    Returns:
        The nodes; and for modules that move what only quantized operators read, whose result it is. The guide has the
        stub before these. A model's own forward can have it only where a quantized operator reads.
    """
    model, real = prep.model, set(cpu)
    moved: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        sources = [source for source in value_inputs(node) if source in region]
        is_read = any(source in real for source in sources)
        if node in real or node not in region or not is_read or not _moves(model, node):
            continue
        if _is_for_quantized(model, node, region, cpu):
            if prep.has_stubs_first:
                continue
            moved[node] = moved.get(sources[0], sources[0])
        real.add(node)
        if any(source not in real for source in sources):
            cpu.add(node)
    return real, moved


def _is_for_quantized(model: Any, node: fx.Node, region: Region, cpu: set[fx.Node]) -> bool:
    """Is it a module that moves what only quantized operators read?"""
    return node.op == "call_module" and all(
        user in region and user not in cpu and (not _moves(model, user) or _is_for_quantized(model, user, region, cpu))
        for user in node.users
    )


def _moves(model: Any, node: fx.Node) -> bool:
    """Does it run as it is, whatever numbers it gets?"""
    row = row_of_node(model, node)
    if called_path(model, node) is not None:
        return node.op == "call_module" and row is not None and row.qat is None
    found = binder_of(node)
    if found is None:
        return node.target is getattr
    if found[0].qat is None:
        return True
    try:
        return found[1](*with_numbers(model, node.args), **with_numbers(model, node.kwargs)) is AS_IT_IS
    except (NotBindable, TypeError):
        return False


def _is_left_float(model: Any, node: fx.Node, choices: dict[str, Choice]) -> bool:
    """Is it an operator without a qconfig, among others that have one?"""
    row, path = row_of_node(model, node), called_path(model, node)
    if is_fact(node) or row is None or row.qat is None or row.is_stub:
        return False
    choice = inherited_choice(choices, notes(node).scope if path is None else path)
    return choice is not None and choice.qconfig is None


def _runs_on_cpu(model: Any, node: fx.Node, region: Region, march: March, config: HybridConfig) -> bool:
    row = row_of_node(model, node)
    if is_fact(node) or (row is not None and row.is_stub):
        return False
    if config.lists(model, node):
        return True
    if node not in region or _is_folded(model, node):
        return False
    if row is not None and (Trait.CPU in row.traits or row.support(march) is None):
        return True
    path = called_path(model, node)
    if node.op == "call_module" and row is not None:
        return not _has_form(row, module_at(model, str(path)))
    if path is not None:
        is_ours = row is not None or not type(module_at(model, str(path))).__module__.startswith("torch.")
        method = row_named(row_name_of(str(node.target), node.args[1:])) if node.op == "call_method" else None
        return not is_ours or (method is not None and method.support(march) is None)
    found = binder_of(node)
    if found is None:
        return not (node.target is getattr or getattr(node.target, "__horizon_leaf__", False))
    if found[0].qat is None:
        return False
    try:
        call = found[1](*with_numbers(model, node.args), **with_numbers(model, node.kwargs))
        return call is None or (isinstance(call, Call) and not _has_form(found[0], call.make()))
    except (NotBindable, TypeError):
        return True


def _has_form(row: Operator, module: nn.Module) -> bool:
    """True if a module can be quantized with the settings that it has."""
    try:
        require_form = getattr(row.qat, "require_form", None)
        if require_form is not None:
            require_form(module)
    except UnsupportedOperatorError:
        return False
    return True


def _is_folded(model: Any, node: fx.Node) -> bool:
    """Is it a batch norm that fusion folds into the layer before it?"""
    source = node.args[0] if node.args else None
    if node.op != "call_module" or not isinstance(source, fx.Node) or source.op != "call_module":
        return False
    module, layer = module_at(model, str(node.target)), module_at(model, str(source.target))
    return role_of(module) is Role.BN and can_fold(layer, module)


class _Stubs:
    """Puts stubs between operators of the CPU and the quantized part."""

    def __init__(self, prep: Preparation, sources: dict[fx.Node, fx.Node]) -> None:
        self.model, self.region, self.choices = prep.model, prep.region, prep.choices
        self._call_of = prep.call_of  # a call that is written once and runs again has one stub
        self._sources = sources
        self._paths: dict[Any, str] = {}

    def quantize(self, node: fx.Node, readers: list[fx.Node]) -> None:
        """A QuantStub between a real result and the quantized operators that read it.

        It has the qconfig of the operator that gives the result, or of the first that reads it.
        """
        made: dict[str, fx.Node] = {}
        for reader in readers:
            leaves, spec = pytree.tree_flatten((reader.args, reader.kwargs))
            for place in [i for i, leaf in enumerate(leaves) if leaf is node]:
                # A model's own forward has one stub for each argument of a call.
                entry = ("read", called_path(self.model, reader) or notes(reader).site or reader, place)
                path = self._paths.get(entry) or self._after(node, reader)
                self._paths[entry] = path
                if path not in made:
                    with self.model.graph.inserting_after(node):
                        made[path] = self.model.graph.create_node("call_module", path, (node,), name=path)
                    _mark(made[path], node)
                    self.region.add(made[path])
                leaves[place] = made[path]
            reader.args, reader.kwargs = pytree.tree_unflatten(leaves, spec)

    def _after(self, node: fx.Node, reader: fx.Node) -> str:
        """The path of the stub after a node."""
        key = ("after", self._call_of(node))
        if key not in self._paths:
            path = f"{self._sources.get(node, node).name}_activation_post_process"
            if path in self._paths.values():  # its result is moved in two ways
                path = f"{node.name}_activation_post_process"
            self._paths[key] = path
            found = (
                inherited_choice(self.choices, called_path(self.model, n) or notes(n).scope) for n in (node, reader)
            )
            own = next((choice for choice in found if choice is not None and choice.qconfig is not None), Choice(None))
            stub = QuantStub().train(self.model.training)
            stub.is_after_cpu = True
            self.model.add_submodule(path, stub)
            self.choices[path] = own.below()
        return self._paths[key]

    def dequantize(self, node: fx.Node) -> None:
        """A DeQuantStub before an operator of the CPU."""
        sources = [source for source in node.all_input_nodes if source in self.region]
        notes(node).runs_on_cpu = True
        if not sources:
            return
        key = ("before", self._call_of(node))
        path = self._paths.setdefault(key, f"{node.name}_input_dequant")
        stub = DeQuantStub().train(self.model.training)
        stub.is_before_cpu = True
        self.model.add_submodule(path, stub)
        notes(node).dequantized_by = path
        for index, source in enumerate(sources):
            with self.model.graph.inserting_before(node):
                call = self.model.graph.create_node(
                    "call_module", path, (source,), name=f"{node.name}_input_dequant_{index}"
                )
            _mark(call, node)
            node.replace_input_with(source, call)


def _mark(stub: fx.Node, node: fx.Node) -> None:
    made = place_like(stub, node)
    made.block, made.made_by = notes(node).block, "hybrid"
