"""Own activation scales for each call of a shared module.

A second call of a module gets a copy of it: the same parameters, statistics and weight quantizers, its own activation
quantizers. All other passes see two modules, each called once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.leaves import is_functional, is_leaf
from horizon_plugin_pytorch.capture.recorder import LoggedCall
from horizon_plugin_pytorch.capture.region import called_path, row_of_node
from horizon_plugin_pytorch.config.choice import Choice
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.notes import hidden, keep_hidden
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.runtime.call_site import CallSite, ModuleCall
from horizon_plugin_pytorch.runtime.dispatch import OwnForward
from horizon_plugin_pytorch.runtime.located import OwnCalls, Successor
from horizon_plugin_pytorch.runtime.node_notes import notes

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _moved(path: str, roots: Mapping[str, str]) -> str:
    """A path with the longest of `roots` that it begins with replaced, as often as there is one."""
    while True:
        root = path
        while root and root not in roots:
            root = root.rpartition(".")[0]
        if not root:
            return path
        path = roots[root] + path[len(root) :]


@dataclass
class OwnScales:
    """Which modules of a prepared model are copies for further calls of another.

    Args:
        names: paths of the modules whose calls have own scales, with all that is inside; True means all.
        copies: the path of each copy, with the module that it is a copy of.
        aliases: further names that the model gives to one module; each is a module of its own now.
        relocated: further modules whose state is that of another until they have their own: layers that were fused into
            an add, functions of a line that runs again.
        calls: for each module with several calls, the module for every call site.
    """

    names: bool | tuple[str, ...] = False
    copies: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    relocated: dict[str, str] = field(default_factory=dict)
    calls: dict[str, OwnCalls] = field(default_factory=dict)

    @staticmethod
    def of(own_scales: bool | Iterable[str], model: nn.Module, what: str) -> OwnScales:
        """What the user asks for.

        Raises:
            QuantizationConfigError: for a name that the model does not have.
        """
        if isinstance(own_scales, (bool, str)):
            names: Any = (own_scales,) if isinstance(own_scales, str) else own_scales
        else:
            names = tuple(own_scales)
        known = dict(model.named_modules(remove_duplicate=False))
        missing = [name for name in names if name not in known] if names and names is not True else []
        if missing:
            around = {name.rpartition(".")[0] for name in missing if name.rpartition(".")[2].startswith("_generated_")}
            if around:
                places = [repr(path) for path in sorted(around)]
                raise QuantizationConfigError(
                    f"{what}: own_scales names {', '.join(map(repr, missing))}, made for a line of the model: name the "
                    f"module whose forward has that line, {', '.join(places)}."
                )
            raise QuantizationConfigError(
                f"{what}: own_scales names {', '.join(map(repr, missing))}, which the model does not have. It takes "
                "True, or the paths of modules as `model.named_modules()` gives them."
            )
        return OwnScales(names)

    def covers(self, path: str) -> bool:
        """Do the calls of the module at this path have own scales?"""
        if isinstance(self.names, bool):
            return self.names
        return any(not name or path == name or path.startswith(f"{name}.") for name in self.names)

    def has_calls(self, path: str) -> bool:
        """Is the module at this path one call of several?"""
        return path in self.copies or path in self.copies.values()

    def original(self, path: str) -> str:
        """The path in the user's model of what a path names: that of a copy's module is its original's."""
        return _moved(path, self.copies)

    def owner(self, path: str) -> str:
        """The path under which a state dict has the weights of a module."""
        return _moved(path, {**self.copies, **self.relocated})

    def weights(self, path: str) -> str:
        """One path for all modules that have the same weights."""
        return _moved(path, {**self.copies, **self.aliases})

    def spread(self, choices: dict[str, Choice], named: Iterable[str]) -> None:
        """Give copies the choices of their originals, but for those that are named themselves."""
        named = set(named)
        for path in list(choices):
            original = self.original(path)
            if original != path and original in choices and not any(_is_inside(path, name) for name in named):
                choices[path] = choices[original]


def add_names(own: OwnScales, names: Iterable[str]) -> None:
    """Let the calls of further modules have own scales."""
    if own.names is not True:
        own.names = tuple(dict.fromkeys((*(own.names or ()), *names))) or own.names


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


# -- copies


def _copy(model: nn.Module, path: str) -> nn.Module:
    """A copy of a module with the same tensors; what it refers to outside of itself is the same too."""
    source = model.get_submodule(path)
    inside = {id(module) for module in source.modules()}
    kept: list[Any] = [*source.parameters(), *source.buffers()]
    kept += [module for module in model.modules() if id(module) not in inside]
    return copy.deepcopy(source, {id(value): value for value in kept})


def split_aliases(model: nn.Module, own: OwnScales) -> None:
    """Make a module of every further name that the model has for one: `ModuleList([head] * 3)` is three heads."""
    if not own.names or isinstance(model, fx.GraphModule):
        return
    first: dict[int, str] = {id(model): ""}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent._modules.items()):
            path = prefix + name
            if child is None:
                continue
            known = first.setdefault(id(child), path)
            is_shared = known != path and not _is_inside(path, known)
            if is_shared and (own.covers(path) or own.covers(known)) and _can_have_scales(child):
                child = parent._modules[name] = _copy(model, known)
                own.aliases[path] = known
                first[id(child)] = path
            elif known != path:
                continue
            visit(child, f"{path}.")

    visit(model, "")


def _can_have_scales(module: nn.Module) -> bool:
    row = row_of_module(type(module))
    return row.needs_qconfig if row is not None else not is_leaf(module)


class _Plan:
    """Where each call goes."""

    def __init__(self, model: Any, own: OwnScales, split: set[str]) -> None:
        self.model, self.own, self.split = model, own, split
        self.calls: dict[str, dict[ModuleCall, str]] = {}  # by the place of the first call
        self.sources: dict[str, str] = {}

    def place(self, stack: tuple[ModuleCall, ...]) -> tuple[str, dict[str, str]]:
        """The place of the first call of the innermost module; and the places of all, by their paths."""
        places: dict[str, str] = {}
        base = ""
        for call in stack:
            base = _inside(call.path, places)
            places[call.path] = base
            if call.path in self.split:
                known = self.calls.setdefault(base, {})
                if call not in known:
                    known[call] = self._name(base, call.path, len(known))
                    if known[call] != base:
                        self.sources[known[call]] = base
                places[call.path] = known[call]
        return base, places

    def _name(self, base: str, original: str, index: int) -> str:
        """A free name for the copy of a module, beside it; a container would run or list it."""
        if not index:
            return base
        parent, _, name = base.rpartition(".")
        outer = original.rpartition(".")[0]
        while parent and isinstance(self.model.get_submodule(outer), _CONTAINERS):
            parent, _, last = parent.rpartition(".")
            outer, name = outer.rpartition(".")[0], f"{last}_{name}"
        if not parent and isinstance(self.model.get_submodule(""), nn.Sequential):
            raise QuantizationConfigError(
                f"own_scales: `{original}` is called several times, and the model itself is a Sequential, which would "
                "run the copies. Put it into a module: QuantWrapper, or a class with a forward of its own."
            )
        name = f"{name}_call_{index}"
        while hasattr(self.model.get_submodule(outer), name):
            name += "_"
        return f"{parent}.{name}" if parent else name


def _inside(path: str, places: Mapping[str, str]) -> str:
    """A path in the copy of the innermost module around it; `places` are in order of the calls."""
    for original in reversed(list(places)):
        if path.startswith(f"{original}."):
            return places[original] + path[len(original) :]
    return path


def _moved_scope(scope: str, places: Mapping[str, str]) -> str:
    return places[scope] if scope in places else _inside(scope, places)


def unshare(prep: Preparation) -> None:
    """Give every call of a shared module a module of its own; the graph calls these."""
    model, region, own = prep.model, prep.region, prep.own
    if not own.names:
        return
    met: dict[str, set[ModuleCall]] = {}
    for node in model.graph.nodes:
        row = row_of_node(model, node) if node in region else None
        if row is not None and row.needs_qconfig:
            for call in notes(node).calls:
                met.setdefault(call.path, set()).add(call)
    plan = _Plan(model, own, {path for path, calls in met.items() if len(calls) > 1 and own.covers(path)})
    nodes = [(node, plan.place(notes(node).calls)[1]) for node in list(model.graph.nodes)]
    for path, base in sorted(plan.sources.items(), key=lambda item: item[1].count(".")):  # outer ones first
        model.add_submodule(path, _copy(model.get_submodule(""), base))
        own.copies[path] = base
    occurrences: Counter[CallSite] = Counter()
    for node, places in nodes:
        _retarget(model, node, places)
        site = notes(node).site
        if site is None:
            continue
        covered = own.covers(site.scope) and node in region
        site = notes(node).site = replace(site, scope=_moved_scope(site.scope, places))
        if covered:
            notes(node).site = replace(site, occurrence=occurrences[site])
            occurrences[site] += 1
    own.calls = _call_sites(model, plan, prep.runs)
    _warn_idle(own, [site.scope for site, times in occurrences.items() if times > 1])


def _warn_idle(own: OwnScales, scopes: list[str]) -> None:
    """Name modules that the user names, and of which all calls are the only ones."""
    used = [*own.copies.values(), *own.aliases, *own.aliases.values(), *scopes]
    names = () if isinstance(own.names, bool) else own.names
    idle = [name for name in names if name and not any(_is_inside(path, name) for path in used)]
    if idle:
        warn(
            f"own_scales names {', '.join(map(repr, idle))}: nothing in it that has a scale is called more than once, "
            "so nothing changes there.",
            QuantizationWarning,
        )


def _retarget(model: Any, node: fx.Node, places: dict[str, str]) -> None:
    """Let a node call the module of its call."""
    path = called_path(model, node)
    target = "" if path is None else places.get(path) or _inside(path, places)
    if path is not None and target != path:
        if node.op == "call_module":
            node.target = target
        else:
            owner: Any = node.args[0]
            with model.graph.inserting_before(node):
                node.update_arg(0, model.graph.create_node("get_attr", target))
            model.graph.erase_node(owner)  # each call has one of its own
    scope = notes(node).scope
    moved = _moved_scope(scope, places)
    if moved != scope:
        notes(node).scope = moved


def _call_sites(model: Any, plan: _Plan, runs: Iterable[list[LoggedCall]]) -> dict[str, OwnCalls]:
    found: dict[str, OwnCalls] = {}
    for run in runs:
        ranks: Counter[Any] = Counter()
        for stack, site in run:
            base, places = plan.place(stack)
            if len(plan.calls.get(base, ())) < 2:
                continue
            scope = _moved_scope(site.scope, {call.path: places[call.path] for call in stack[:-1]})
            key = replace(site, scope=scope, occurrence=0)
            occurrence = ranks[base, key]
            ranks[base, key] += 1
            module = model.get_submodule(base)
            calls = found.setdefault(base, OwnCalls(base, {}, is_functional(type(module))))
            path = places[stack[-1].path]
            if calls.sites.setdefault(replace(key, occurrence=occurrence), path) != path:
                raise QuantizationConfigError(
                    f"own_scales: the calls of `{base}` come in another order in training mode than in eval mode; the "
                    f"one at {site.line} would have two scales. Call it in one order, or leave it out of own_scales."
                )
    return found


# -- after the other passes


def share_weights(prep: Preparation) -> None:
    """Let the modules of all calls have the same weights, and find each other."""
    model, root, own = prep.model, prep.root, prep.own
    if not own.names:
        return
    for path, source in {**own.aliases, **own.copies}.items():
        _tie(root.get_submodule(source), root.get_submodule(path))
    _tie_relocated(model, root, own)
    for site, variants in prep.sites.items():
        for variant, first in zip(variants, prep.sites.get(replace(site, occurrence=0), []), strict=False):
            if variant.path != first.path:
                own.relocated.setdefault(variant.path, first.path)
    for path, calls in own.calls.items():
        _redirect(root, path, calls)
    keep_hidden(root, "own_scales", own)
    keep_one_entry(root)


def _tie(owner: nn.Module, module: nn.Module) -> None:
    """One set of tensors for two modules: what is loaded, moved or trained in one is so in the other."""
    if owner is module or isinstance(module, (FakeQuantize, FakeCast)):
        return
    if isinstance(owner, (QATGemm, Float16)) != isinstance(module, (QATGemm, Float16)):
        return  # one of them is fused into an add, or never called
    theirs = _holders(owner)[0]
    for holder in _holders(module):
        for name in ("_parameters", "_buffers"):
            if getattr(holder, name).keys() == getattr(theirs, name).keys():
                holder.__dict__[name] = getattr(theirs, name)
    for name, child in module._modules.items():
        other = owner._modules.get(name)
        if child is None or other is None:
            continue
        if name == "weight_fake_quant" and _has_format(other, child):
            module._modules[name] = other
        else:
            _tie(other, child)


def _holders(module: nn.Module) -> list[nn.Module]:
    """The modules that have the tensors: float16 wraps a float module, or a fused one with the layer inside."""
    if not isinstance(module, Float16):
        return [module]
    layer = module._modules.get("conv")
    return [module, module._float] if layer is None else [layer]


def _has_format(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one.dtype, one.ch_axis) == (other.dtype, other.ch_axis)


def _tie_relocated(model: Any, root: nn.Module, own: OwnScales) -> None:
    """Tie layers that are fused into adds, whose places they took."""
    places: dict[str, str] = {}
    for node in model.graph.nodes:
        members = notes(node).members
        if members:
            places[members[0]] = called_path(model, node) or ""
    layers = {path: path for path, _ in root.named_modules() if own.weights(path) in places} | places
    for layer, place in layers.items():
        first = own.weights(layer)
        owner = places.get(first, first)
        if first == layer or owner == place:
            continue
        _tie(root.get_submodule(owner), root.get_submodule(place))
        if own.original(layer) != layer:
            own.relocated[place] = owner


def _redirect(root: nn.Module, path: str, calls: OwnCalls) -> None:
    module: Any = root.get_submodule(path)
    if isinstance(module, Successor):
        module.own_calls = calls
    elif not is_leaf(module):
        module.__dict__["forward"] = OwnForward(calls)


def own_scales_of(model: nn.Module) -> OwnScales | None:
    """Which calls of a prepared or converted model have scales of their own; None if it was not asked for."""
    return hidden(model, "own_scales", OwnScales)


# -- conversion


def share_integers(model: nn.Module) -> None:
    """Let the converted modules of all calls keep equal integers once: their weights, not what scales decide."""
    own = own_scales_of(model)
    if own is None:
        return
    for path, source in {**own.aliases, **own.copies, **own.relocated}.items():
        ours = dict(model.get_submodule(path).named_modules())
        for name, owner in model.get_submodule(source).named_modules():
            if name in ours:
                _share_equal(owner, ours[name])


def _share_equal(owner: nn.Module, module: nn.Module) -> None:
    for name, value in module._buffers.items():
        other = owner._buffers.get(name)
        if value is None or other is None or value.dim() < 2:
            continue
        if value.dtype == other.dtype and torch.equal(value, other):
            module._buffers[name] = other


# -- state dicts

_SCALE = ".scale"


def keep_one_entry(model: nn.Module) -> None:
    """Let the state dict of a model have shared weights once, under the name of the first call."""
    if own_scales_of(model) is not None:
        model.register_state_dict_post_hook(_drop_shared)
        model.register_load_state_dict_pre_hook(_add_shared)


def _drop_shared(model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    own = own_scales_of(model)
    if own is None:
        return
    for key in [key for key in state_dict if key.startswith(prefix) and not key.endswith(".quant_range")]:
        value, owner = state_dict[key], prefix + own.owner(key[len(prefix) :])
        if owner != key and owner in state_dict and _is_same(value, state_dict[owner]):
            del state_dict[key]
            if key.endswith(_SCALE):
                state_dict.pop(_format_key(key), None)


def _format_key(scale: str) -> str:
    """The entry that says what a scale is for."""
    return f"{scale.removesuffix(_SCALE)}.quant_range"


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def _add_shared(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    found = completed(model, {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)})
    for key, value in found.items():
        state_dict.setdefault(prefix + key, value)


def completed(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the entries of all calls.

    Weights are the first call's. So are the scales of calls of which it has none: it was made without own scales.
    """
    out = dict(state_dict)
    own = own_scales_of(model)
    if own is None:
        return out
    tensors = dict(_tensors(model))
    roots = {**own.copies, **own.relocated}
    scales = [key for key in state_dict if key.endswith(_SCALE)]
    unknown = [path for path in roots if not any(_is_inside(key, path) for key in scales)]
    for key, value in tensors.items():
        owner = own.owner(key)
        is_unknown = any(_is_inside(key, path) for path in unknown)
        if key not in out and owner in state_dict and (is_unknown or tensors.get(owner) is value):
            out[key] = state_dict[owner]
            if key.endswith(_SCALE) and _format_key(owner) in state_dict:
                out.setdefault(_format_key(key), state_dict[_format_key(owner)])
    return out


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield prefix + name, value
