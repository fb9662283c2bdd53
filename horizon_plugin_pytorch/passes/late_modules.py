"""Modules for functions in code that tracing does not enter: they are made when the model first meets the call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.asking.stack import user_frames
from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.region import given_kinds, mark_constants
from horizon_plugin_pytorch.config.setters import apply_setters
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import QuantizationWarning, at, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import keep_ranges, set_fake_quantize
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.notes import hidden, note_of
from horizon_plugin_pytorch.operators.table import Kind, row_of_module
from horizon_plugin_pytorch.passes.batches import join_late_calls
from horizon_plugin_pytorch.passes.checks import check_modules
from horizon_plugin_pytorch.passes.inputs import fit_inputs
from horizon_plugin_pytorch.passes.own_scales import OwnScales
from horizon_plugin_pytorch.passes.preparation import RecordedPreparation
from horizon_plugin_pytorch.passes.replace import replace_functions
from horizon_plugin_pytorch.passes.steps import Pass, on_model, run_steps
from horizon_plugin_pytorch.passes.stub_links import link_stubs
from horizon_plugin_pytorch.passes.swap import (
    follow_consistency,
    name_modules,
    qat_form,
    to_quantized,
    warn_wide_weights,
)
from horizon_plugin_pytorch.passes.unmet import take_unmet
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import CallSite, Variant
from horizon_plugin_pytorch.runtime.children import hide_added
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.runtime.real_tensor import RealTensor
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.runtime.wrapped import name_of_site

SETTER = "qconfig_setter"  # where a model with such code keeps its setters


def make_module(
    root: nn.Module,
    site: CallSite,
    op: str,
    target: Any,
    args: tuple,
    kwargs: dict[str, Any],
    sites: dict[CallSite, list[Variant]],
) -> bool:
    """Make the module for a call that is met for the first time; False where the model must know it already.

    A model that learns (CALIBRATION, QAT) makes it. One that does not (VALIDATION, converted) makes it only if it has
    loaded its scale.

    Args:
        sites: the call sites that are known; the new one is added.
    """
    like = _nearest_quantizer(root, site.scope)
    is_converted = any(isinstance(module, QuantizedModule) for module in root.modules())
    is_learning = not is_converted and (like is None or like.is_observing or not like.is_quantizing)
    own = {site: list(sites[site])} if site in sites else {}
    call = _OneCall(root, site, own)
    try:
        paths = call.prepare(op, target, args, kwargs)
        is_known = all(take_unmet(root, path, None) for path in paths if _has_state(root, path))
        if not is_learning and not is_known:
            call.undo()
            return False
        for path in paths:
            call.finish(path, like, is_converted)
    except BaseException:
        call.undo()
        raise
    sites[site] = own[site]  # only now: other threads run the model, too
    _warn_parameters(root, site, paths)
    return True


def _has_state(root: nn.Module, path: str) -> bool:
    return any(isinstance(m, FakeQuantize) for m in root.get_submodule(path).modules())


class _Growing(Captured):
    """A model to which passes add modules; it tells which."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph)
        self.added: list[str] = []

    def add_submodule(self, path: str, module: nn.Module) -> None:
        super().add_submodule(path, module)
        self.added.append(path)


@dataclass
class LatePreparation(RecordedPreparation):
    """Of one call that a model meets while it runs.

    Args:
        node: the call.
        owner: the path of the module that is called, or whose method; None for a function.
        skipped: how many arguments are before the operands: the FloatFunctional itself is none.
    """

    node: Any = None
    owner: str | None = None
    skipped: int = 0

    @property
    def site(self) -> CallSite:
        """Where the call is written."""
        site = notes(self.node).site
        assert site is not None
        return site


def mark_call(prep: LatePreparation) -> None:
    """The call is the quantized part."""
    prep.region.add(prep.node, *given_kinds(prep.model, prep.node, prep.region))


def note_stubs(prep: LatePreparation) -> None:
    """Let the call of a module know the stubs of its operands, by their places."""
    variants = prep.sites.setdefault(prep.site, [])
    if prep.owner is None:
        return
    known = {variant.path for variant in variants}
    operands = prep.node.args[prep.skipped :], prep.node.kwargs
    for place, leaf in enumerate(pytree.tree_leaves(operands, is_leaf=lambda v: v is None)):
        if isinstance(leaf, fx.Node) and leaf.op == "call_module" and leaf.target not in known:
            variants.append(Variant(str(leaf.target), "QuantStub", {"place": place}))


def choose_quietly(prep: LatePreparation) -> None:
    """Setters choose formats; what they say of a whole model was said when it was prepared."""
    if prep.qconfig_setter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_setters(prep.view(), prep.qconfig_setter)


def swap_added(prep: LatePreparation) -> None:
    """Put QAT modules in place of those that were added."""
    devices = (device for node in prep.graph.nodes if (device := notes(node).device) is not None)
    home, line = next(devices, None), prep.site.line
    for path in prep.model.added:
        owner, name, module = _place(prep.root, path)
        row = row_of_module(type(module))
        assert row is not None
        qat = qat_form(path, module, row, prep.choices, prep.march, home, line)
        if qat is not None:
            owner._modules[name] = qat
            warn_wide_weights(qat, prep.march, path)
            follow_consistency(qat, prep.march)
            name_modules(qat, dict.fromkeys(prep.model.added, line), path)


def link_stubs_of_functions(prep: LatePreparation) -> None:
    """Let the stubs of a function's operands know each other; of a module each call has its own."""
    if prep.owner is None:
        link_stubs(prep.model)


LATE: tuple[Pass, ...] = (
    Pass(on_model(mark_constants)),
    Pass(mark_call),
    Pass(replace_functions),
    Pass(note_stubs),
    Pass(choose_quietly),
    Pass(check_modules),
    Pass(fit_inputs),
    Pass(swap_added),
    Pass(link_stubs_of_functions),
)


def _place(root: nn.Module, path: str) -> tuple[nn.Module, str, nn.Module]:
    """Where a module is, its name there, and the module."""
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    module = owner._modules[name]
    assert module is not None
    return owner, name, module


class _OneCall:
    """A graph of one call, which goes through passes that graphs go through."""

    def __init__(self, root: nn.Module, site: CallSite, sites: dict[CallSite, list[Variant]]) -> None:
        self.root, self.site, self.sites = root, site, sites
        self.graph = fx.Graph()
        self.graph.owning_module = root  # type: ignore[assignment]
        self.model: Any = _Growing(root, self.graph)
        self.prep = LatePreparation(
            self.model,
            note_of(root, "march"),
            OwnScales(),
            choices=note_of(root, "choices"),
            qconfig_setter=hidden(root, SETTER),
            sites=sites,
        )
        self._nodes: dict[int, fx.Node] = {}
        self._attributes: dict[int, str] | None = None
        self._functional: fx.Node | None = None

    def prepare(self, op: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Put the module of the call and the stubs of its operands into the model, in their QAT forms; their paths."""
        args, kwargs = self._arguments((args, kwargs))
        node = self.graph.create_node(op, target, args, kwargs)
        node.stack_trace = user_frames()
        here = notes(node)
        here.site, here.scope, here.is_wrapped = self.site, self.site.scope, True
        prep = self.prep
        prep.node, prep.skipped = node, 0 if op == "call_module" else 1
        prep.owner = (
            target if op == "call_module" else None if self._functional is None else str(self._functional.target)
        )
        if prep.owner is not None:
            here.generated_name = name_of_site(self.site)
            known = self.sites.get(self.site, ())
            prep.stubs = {(prep.owner, variant.settings["place"] + prep.skipped): variant.path for variant in known}
        run_steps(prep, LATE)
        return self.model.added

    def undo(self) -> None:
        """The model as it was before."""
        for path in self.model.added:
            owner, name, _ = _place(self.root, path)
            del owner._modules[name]

    def finish(self, path: str, like: FakeQuantize | None, is_converted: bool) -> None:
        """Let a module have the scale that was loaded for it and the state of its neighbours."""
        owner, name, module = _place(self.root, path)
        take_unmet(self.root, path, module)
        module.train(owner.training)
        for quantizer in module.modules():
            if isinstance(quantizer, FakeQuantize) and like is not None:
                _follow(quantizer, like)
        join_late_calls(self.root, module)
        if is_converted:
            holder = nn.Module()
            holder.add_module(name, module)
            owner._modules[name] = to_quantized(holder)._modules[name]
        if not isinstance(owner, LeafCode):
            hide_added(owner, _own_children(owner, name))

    # -- operands

    def _arguments(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._node(tree)
        if isinstance(tree, PlacedModule):  # a FloatFunctional, whose method is called
            self._functional = self.graph.create_node("get_attr", tree.path)
            return self._functional
        if isinstance(tree, (list, tuple)):
            parts = [self._arguments(part) for part in tree]
            return parts if isinstance(tree, list) else tuple(parts)
        if isinstance(tree, dict):
            return {name: self._arguments(part) for name, part in tree.items()}
        if isinstance(tree, slice):
            return slice(*(self._arguments(part) for part in (tree.start, tree.stop, tree.step)))
        return tree

    def _node(self, x: Tensor) -> fx.Node:
        if id(x) in self._nodes:
            return self._nodes[id(x)]
        if isinstance(x, (QTensor, RealTensor)):
            node = self.graph.placeholder(f"x{len(self._nodes)}")
            is_bool = isinstance(x, QTensor) and x.dtype == qbool
            notes(node).dtype = torch.bool if is_bool else torch.float32
            self.prep.region.add(node, Kind.BOOL if is_bool else Kind.QUANTIZED)
        else:
            node = self.graph.create_node("get_attr", self._attribute(x))
            notes(node).value, notes(node).dtype = x, x.dtype
        notes(node).shape, notes(node).device = tuple(x.shape), x.device
        self._nodes[id(x)] = node
        return node

    def _attribute(self, x: Tensor) -> str:
        if self._attributes is None:
            named = (*self.root.named_parameters(), *self.root.named_buffers())
            self._attributes = {id(value): path for path, value in named}
        return self._attributes.get(id(x), f"_constant_{len(self._nodes)}")


def _own_children(owner: nn.Module, added: str) -> list[str]:
    before: frozenset[str] = getattr(owner._modules, "added", frozenset())
    return [name for name in dict(owner._modules) if name not in before and name != added]


def _nearest_quantizer(root: nn.Module, scope: str) -> FakeQuantize | None:
    """A quantizer of activations in the module whose code runs, or else in those around it: it has its state."""
    while True:
        for module in root.get_submodule(scope).modules():
            quantizer = getattr(module, "activation_post_process", None) if isinstance(module, QATModule) else None
            if isinstance(quantizer, FakeQuantize):
                return quantizer
        if not scope:
            return None
        scope = scope.rpartition(".")[0]


def _state_of(quantizer: FakeQuantize) -> FakeQuantState:
    observes, rounds = quantizer._flag("observer_enabled"), quantizer._flag("fake_quant_enabled")
    if observes:
        return FakeQuantState.QAT if rounds else FakeQuantState.CALIBRATION
    return FakeQuantState.VALIDATION if rounds else FakeQuantState._FLOAT


def _follow(quantizer: FakeQuantize, like: FakeQuantize) -> None:
    """A new quantizer observes and rounds as its neighbour does, also where the model is being calibrated."""
    quantizer.set_state(_state_of(like))
    quantizer._keeps_range = like._keeps_range
    mine, theirs = quantizer.activation_post_process, like.activation_post_process
    if theirs.batches is not None and not quantizer.is_fixed:
        mine.begin_calibration()
        mine.hold(theirs._holds)


def _warn_parameters(root: nn.Module, site: CallSite, paths: list[str]) -> None:
    """Say that an optimizer which was made before lacks scales that are trained."""
    modules = [root.get_submodule(path) for path in paths]
    scales = [m for module in modules for m in module.modules() if isinstance(m, FakeQuantize) and m._parameters]
    if scales and torch.is_grad_enabled() and any(m.training and m.is_quantizing for m in scales):
        warn(
            f"`{site.name}` {at(site.scope, site.line)} is in code that tracing does not enter, and its trained scale "
            "was made just now, in the first forward: an optimizer, or a DistributedDataParallel, that was made before "
            "does not have it. Prepare with example_inputs, or run the model once before you make them.",
            QuantizationWarning,
        )


def has_unmet_code(model: nn.Module) -> bool:
    """Has a prepared model code that tracing did not enter, and that has never run?"""
    return any(isinstance(m, LeafCode) and m.handler is not None and not m.handler.has_run for m in model.modules())


def meet_calls(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
    """Run a prepared model once on example inputs, if it has code that tracing did not enter."""
    if has_unmet_code(model):
        own_args, own_kwargs = own_tensors((args, kwargs or {}))
        with meeting_calls(model):
            model(*own_args, **own_kwargs)


@contextmanager
def meeting_calls(model: nn.Module) -> Iterator[None]:
    """In here a model runs to meet the calls of wrapped code and to make their modules: nothing is observed."""
    modes = {module: module.training for module in model.modules()}
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    flags = {q: _state_of(q) for q in quantizers}
    state = torch.get_rng_state()
    set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
    try:
        with torch.no_grad(), keep_ranges(quantizers):
            yield
    finally:
        torch.set_rng_state(state)
        for module in model.modules():
            module.training = modes.get(module, modes[model])
            if isinstance(module, FakeQuantize):
                module.set_state(flags.get(module, flags[quantizers[0]]))
                module._keeps_range = False
