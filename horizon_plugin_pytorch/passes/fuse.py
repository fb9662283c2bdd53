"""Fuse what the BPU fuses, in a graph."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx, nn

from horizon_plugin_pytorch.capture.region import Region, called_path, has_stub, module_at
from horizon_plugin_pytorch.capture.wrapped import note_module
from horizon_plugin_pytorch.config.choice import Choice
from horizon_plugin_pytorch.config.graph_view import PLACEHOLDER
from horizon_plugin_pytorch.errors import source_line
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.passes.fusion_rules import FUSION_RULES, FusionRule, Role, can_fold, fuse, role_of
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.read_tensors import is_read
from horizon_plugin_pytorch.passes.scores import SAME_LAST_AXIS
from horizon_plugin_pytorch.passes.successors import keep_attributes, replace_references
from horizon_plugin_pytorch.runtime.children import list_parameters
from horizon_plugin_pytorch.runtime.hooks import STATE, computes, copy_hooks
from horizon_plugin_pytorch.runtime.located import (
    FUSED_INTO,
    SETTINGS,
    TENSORS,
    FormerSettings,
    FormerTensor,
    FusedAway,
)
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes


def call_counts(model: fx.GraphModule) -> Counter[int]:
    """How often each module object is called in the graph."""
    counts: Counter[int] = Counter()
    for node in model.graph.nodes:
        path = called_path(model, node)
        if path is not None:
            counts[id(module_at(model, path))] += 1
    return counts


def shared_with_norm(model: fx.GraphModule) -> list[str]:
    """Paths of layers that are called more than once, each time before the same batch norm, and of these norms."""
    counts = call_counts(model)
    found: dict[str, set[str]] = {}
    alone: set[str] = set()
    for node in model.graph.nodes:
        path = called_path(model, node)
        if path is None or _role(model, node) is not Role.LAYER or counts[id(module_at(model, path))] < 2:
            continue
        norms = [user for user in node.users if _role(model, user) is Role.BN]
        if len(norms) == len(node.users) == 1:
            found.setdefault(path, set()).add(str(called_path(model, norms[0])))
        else:
            alone.add(path)
    pairs = [(path, *norms) for path, norms in found.items() if path not in alone and len(norms) == 1]
    return [name for pair in pairs for name in pair]


def _role(model: fx.GraphModule, node: fx.Node) -> Role | None:
    path = called_path(model, node)
    if path is None:
        return None
    role = role_of(module_at(model, path))
    if role is Role.ADD:
        is_sum = node.op == "call_method" and node.target == "add" and len(node.args) == 3 and not node.kwargs
        return role if is_sum else None
    return role if node.op == "call_module" else None


_TENSORS = ("weight", "bias", "running_mean", "running_var")


class _Matcher:
    def __init__(self, prep: Preparation, only: Region | None) -> None:
        model = prep.model
        self.model, self.choices, self.only, self.own = model, prep.choices, only, prep.own
        self.counts = call_counts(model)
        self.elsewhere = prep.called_unseen(is_certain=True)
        self.perhaps = prep.called_unseen(is_certain=False)
        self.has_stub = has_stub(model)
        self.partners = self._partners()
        # A tensor without a reader was a setting of a function that is a module now.
        self.read = {
            str(node.target)
            for node in model.graph.nodes
            if node.op == "get_attr" and (not node.users or is_read(node))
        }

    def _partners(self) -> dict[str, set[str]]:
        """For layers and batch norms, by the names of their weights, what follows and what precedes them."""
        found: dict[str, set[str]] = {}
        for node in self.model.graph.nodes:
            role = _role(self.model, node)
            if role is Role.LAYER:
                users = list(node.users)
                is_alone = len(users) == 1 and _role(self.model, users[0]) is Role.BN
                found.setdefault(self._weights(node), set()).add(self._weights(users[0]) if is_alone else "")
            elif role is Role.BN:
                source = node.args[0]
                is_layer = isinstance(source, fx.Node) and _role(self.model, source) is Role.LAYER
                found.setdefault(self._weights(node), set()).add(self._weights(source) if is_layer else "")
        return found

    def _weights(self, node: fx.Node) -> str:
        return self.own.weights(called_path(self.model, node) or "")

    def _is_usable(self, node: fx.Node, role: Role) -> bool:
        if _role(self.model, node) is not role:
            return False
        path = called_path(self.model, node)
        assert path is not None
        choice = self.choices.get(path)
        if choice is not None and choice.qconfig is None and choice.is_explicit:
            return False
        if computes(module_at(self.model, path)):
            return False  # hooks, which would see another tensor, or none
        if role is Role.ADD and self.own.has_calls(path):
            return False  # other calls may be other methods, which a layer does not have
        # A shared ReLU has no state; a shared layer, batch norm or FloatFunctional serves several places.
        module = module_at(self.model, path)
        return role is Role.RELU or (self.counts[id(module)] == 1 and id(module) not in self.elsewhere)

    def match(self, rule: FusionRule, start: fx.Node, operand: int) -> list[fx.Node] | None:
        """Nodes that follow the rule from `start`, with the chain entering the add as that operand."""
        if not self._is_usable(start, rule.roles[0]):
            return None
        chain = [start]
        for role in rule.roles[1:]:
            last = chain[-1]
            if len(last.users) != 1:
                return None
            (node,) = last.users
            if not self._is_usable(node, role) or notes(node).block != notes(start).block:
                return None  # a dynamic block may run more or less often than what is around it
            if role is Role.ADD:
                other = node.args[2 if operand == 1 else 1]
                if node.args[operand] is not last or other is last or not isinstance(other, fx.Node):
                    return None
                if not self._is_tensor(other):
                    return None
                if self._may_be_mask(other) and self._feeds_softmax(node):
                    return None  # the sum needs a range of its own: see `scores`
                if self._is_read(start) or self._is_overwritten(start, node):  # the layer moves to the place of the add
                    return None
                if any(notes(member).is_measured for member in chain) and _changes_shape(chain):
                    return None  # the layer runs where the add is, so its result's shape is not known before
            elif node.args[:1] != (last,):
                return None
            if role is Role.BN and (self._is_read(node) or not self._can_fold(chain[0], node)):
                return None
            if role is Role.BN and any(len(self.partners[self._weights(member)]) > 1 for member in (chain[0], node)):
                return None  # the calls of a layer have one weight: all have the same batch norm folded in, or none
            chain.append(node)
        return chain

    def _is_tensor(self, node: fx.Node) -> bool:
        """Can a node be what a layer adds? It may also be a number that the graph computes."""
        if self.only is None or node in self.only:
            return True
        # A model without a QuantStub is quantized from its inputs on.
        return node.op == "placeholder" and not self.has_stub and notes(node).dtype in (None, torch.float32)

    def _may_be_mask(self, node: fx.Node) -> bool:
        """Does a tensor come from a stub, perhaps in another shape?"""
        while node.op in ("call_method", "call_function") and _role(self.model, node) is None:
            if len(node.all_input_nodes) != 1:
                return False
            (node,) = node.all_input_nodes
        row = row_of_module(type(self._module(node))) if node.op == "call_module" else None
        return row is not None and row.is_quant

    def _feeds_softmax(self, node: fx.Node) -> bool:
        """Do only softmaxes take a sum, perhaps after further sums or in another shape?"""
        return bool(node.users) and all(self._leads_to_softmax(user) for user in node.users)

    def _leads_to_softmax(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._module(node)
            return isinstance(module, nn.Softmax) or (isinstance(module, nn.Dropout) and self._feeds_softmax(node))
        is_moved = str(getattr(node.target, "__name__", node.target)) in SAME_LAST_AXIS
        return (is_moved or _role(self.model, node) is Role.ADD) and self._feeds_softmax(node)

    def _can_fold(self, layer: fx.Node, bn: fx.Node) -> bool:
        """Folding changes the layer's weight, so nothing else may read it."""
        return not self._is_read(layer) and can_fold(self._module(layer), self._module(bn))

    def _is_read(self, layer: fx.Node) -> bool:
        """Does the model read a parameter or buffer of a layer or batch norm elsewhere?"""
        return any(f"{called_path(self.model, layer)}.{name}" in self.read for name in _TENSORS)

    def _is_overwritten(self, layer: fx.Node, add: fx.Node) -> bool:
        """Is the input of a layer changed in place, by something other than the add that the layer is fused into?"""
        source = layer.args[0]
        others = [user for user in source.users if notes(user).writes and user is not add]  # type: ignore[union-attr]
        return any(self._operands(user)[0] is source for user in others)

    def _operands(self, node: fx.Node) -> tuple:
        """The arguments of a call; a method of a FloatFunctional has its owner before them, one of a tensor has not."""
        is_functional = node.op == "call_method" and called_path(self.model, node) is not None
        return node.args[1:] if is_functional else node.args

    def _module(self, node: fx.Node) -> nn.Module:
        path = called_path(self.model, node)
        assert path is not None
        return module_at(self.model, path)


def _changes_shape(chain: list[fx.Node]) -> bool:
    source = chain[0].args[0]
    return not isinstance(source, fx.Node) or notes(source).shape != notes(chain[-1]).shape


def _merged_choice(choices: dict[str, Choice], paths: list[str], rule: FusionRule) -> Choice:
    """The anchor's own qconfig; else the last member that has one of its own; else what the anchor inherits."""
    own, anchor = [choices.get(path, Choice(None)) for path in paths], rule.anchor
    if own[anchor].is_explicit:
        return own[anchor]
    explicit = [(path, choice) for path, choice in zip(paths, own, strict=True) if choice.is_explicit]
    if not explicit:  # where setters will decide, what they give to one member is for all; a ReLU gets nothing
        decided = [choice for choice, role in zip(own, rule.roles, strict=True) if role is not Role.RELU]
        return next((choice for choice in decided if choice.qconfig is PLACEHOLDER), own[anchor])
    path, choice = explicit[-1]
    return choice.changed(choice.qconfig, f"taken from {path}, which is fused into it")


def _merged(model: fx.GraphModule, choices: dict[str, Choice], rule: FusionRule, chain: list[fx.Node]) -> Choice:
    return _merged_choice(choices, [called_path(model, node) or "" for node in chain], rule)


def fuse_graph(prep: Preparation, is_everywhere: bool = False) -> None:
    """Fuse every pattern of `FUSION_RULES`; the longest wins, and the add's first operand before its second.

    Args:
        is_everywhere: also outside of the quantized part. Inside of it, what has no qconfig is left alone: it runs as
            it is written.
    """
    model, choices, only = prep.model, prep.choices, None if is_everywhere else prep.region
    matcher = _Matcher(prep, only)
    before = dict(model.named_modules())
    names: dict[nn.Module, list[str]] = {}  # all paths of each module
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)
    replaced: dict[str, list[str]] = {}
    lines: dict[str | None, str] = {}
    with_add = [rule for rule in FUSION_RULES if rule.has_add]
    without = [rule for rule in FUSION_RULES if not rule.has_add]
    first = {rule.roles[0] for rule in FUSION_RULES}
    starts = [n for n in model.graph.nodes if (only is None or n in only) and _role(model, n) in first]
    for rules, operand in ((with_add, 1), (with_add, 2), (without, 0)):
        for node in starts:
            if node._erased:
                continue
            for rule in rules:
                chain = matcher.match(rule, node, operand)
                if chain is not None and (only is None or _merged(model, choices, rule, chain).qconfig is not None):
                    lines.update({called_path(model, member): source_line(member.stack_trace) for member in chain})
                    place, members = _apply(model, choices, rule, chain, operand, only, names)
                    for path in members:
                        replaced.setdefault(path, []).append(place)
                    break
    still_called = {called_path(model, node) for node in model.graph.nodes}
    for path, places in replaced.items():
        member = model.get_submodule(path)
        if id(member) in matcher.elsewhere:  # a ReLU, which others have not lost
            note_module(model, path, matcher.elsewhere[id(member)])
        elif path not in still_called and not (id(member) in matcher.perhaps and role_of(member) is Role.RELU):
            left = prep.left_of_fused()
            left.__dict__[FUSED_INTO] = [model.get_submodule(place) for place in places]
            left.__dict__[SETTINGS] = FormerSettings.of(member, path)
            left.__dict__["line"] = lines[path]
            if isinstance(left, FusedAway):
                _remember_tensors(left, member)
            _set_module(model, path, left.train(model.training), names)
    after = dict(model.named_modules())
    replace_references(model, ((old, after[path]) for path, old in before.items() if path in after))
    prep.drop_unread()
    model.recompile()


def _apply(
    model: fx.GraphModule,
    choices: dict[str, Choice],
    rule: FusionRule,
    chain: list[fx.Node],
    operand: int,
    only: Region | None,
    names: dict[nn.Module, list[str]],
) -> tuple[str, list[str]]:
    """Put the fused module in place; gives its path, and those of the members that it replaces."""
    paths = [called_path(model, node) or "" for node in chain]
    fused = fuse([module_at(model, path) for path in paths])
    fused.__dict__["_operand"] = operand  # where the model itself calls add, the layer's input is this operand
    place = paths[rule.anchor]
    choices[place] = _merged_choice(choices, paths, rule)
    _set_module(model, place, fused, names)
    anchor, last = chain[rule.anchor], chain[-1]
    args: tuple = (chain[0].args[0],)
    if rule.has_add:
        args += (anchor.args[2 if operand == 1 else 1],)
    with model.graph.inserting_before(anchor):
        new = model.graph.call_module(place, args)
    made = inherit(new, anchor, f"fuse {rule.name}")
    shape = notes(args[0]).shape if isinstance(args[0], fx.Node) else None
    made.members = tuple(paths)
    made.has_shape = tuple(index >= rule.anchor or notes(node).shape == shape for index, node in enumerate(chain))
    if anchor.op == "call_method":
        made.called_as = anchor.name
    if only is not None:
        only.add(new)
    last.replace_all_uses_with(new)
    for node in reversed(chain):
        owner = node.args[0] if node.op == "call_method" else None
        model.graph.erase_node(node)
        if isinstance(owner, fx.Node) and not owner.users:
            model.graph.erase_node(owner)
    return place, [path for path in paths if path != place]


def _remember_tensors(left: FusedAway, old: nn.Module) -> None:
    """Let what is left of a module answer for the parameters and buffers that it had."""
    is_layer = role_of(old) is Role.LAYER
    left.__dict__[TENSORS] = {
        name: None if x is None else FormerTensor(x.dtype, x.shape, x.requires_grad, is_layer)
        for name, x in (*old._parameters.items(), *old._buffers.items())
    }
    list_parameters(left, [name for name, x in old._parameters.items() if x is not None])


def _set_module(model: nn.Module, path: str, module: nn.Module, names: dict[nn.Module, list[str]]) -> None:
    """Put a module at a path, and wherever else the model has the one that it replaces."""
    old = model.get_submodule(path)
    copy_hooks(module, old, STATE)
    keep_attributes(module, old)
    for place in (path, *names.get(old, ())):
        parent, _, name = place.rpartition(".")
        if model.get_submodule(parent)._modules.get(name) is old:
            setattr(model.get_submodule(parent), name, module)
