"""A prepared model runs its original forward; functions on quantized tensors are sent to the modules made for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.asking.stack import running_module, user_line
from horizon_plugin_pytorch.asking.who import model_asks
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import UnknownCallError, UnsupportedOperatorError, at
from horizon_plugin_pytorch.function_handlers import calling_line, keeps_scale
from horizon_plugin_pytorch.in_place import settled, show
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.operators.calls import as_call, operator_name, row_of_call
from horizon_plugin_pytorch.operators.table import AS_IT_IS, Binder, Call, NotBindable
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import EmptyIsZero, Run, current, innermost, interceptor
from horizon_plugin_pytorch.runtime.call_site import (
    Attribute,
    CallSite,
    Variant,
    caller,
    calling_scope,
    check_source,
    counted,
    here,
)
from horizon_plugin_pytorch.runtime.float_parts import has_quantized, refused, running_functional
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.located import FusedAway, OwnCalls, PlacedModule, Successor
from horizon_plugin_pytorch.runtime.real_tensor import unmarked
from horizon_plugin_pytorch.runtime.stochastic import BY_CHANCE, by_chance
from horizon_plugin_pytorch.runtime.unfinished import Unfinished
from horizon_plugin_pytorch.untraced import is_traced
from horizon_plugin_pytorch.writing import writes


class _Met(threading.local):
    """The call sites that a thread meets, if anybody wants to know."""

    sites: set[CallSite] | None = None


_MET = _Met()


@contextmanager
def meeting() -> Iterator[set[CallSite]]:
    """The call sites with modules that prepared models meet in here."""
    before, _MET.sites = _MET.sites, set()
    try:
        yield _MET.sites
    finally:
        _MET.sites = before


class Dispatcher:
    """Knows the modules of every call site of a prepared model.

    Args:
        sites: the generated modules of each call site that was recorded; none where the call is left alone.
        cpu: calls that run on the CPU in float, with the path of the stub that dequantizes what they take, or "".
        is_mixed: do calls on ordinary tensors matter as well, of float16 operators, of the CPU or of ``torch.empty``?
        casts: call sites that cast to the type which a tensor had in float, whatever type it is asked for now.
        met: every call site that was recorded.
        called: paths of the modules that were called.
        functionals: FloatFunctionals that run on the CPU, with the path of the stub before each, or "".
    """

    was_seen: bool = True  # was all the code that it runs seen when the model was prepared?

    def __init__(
        self,
        sites: dict[CallSite, list[Variant]],
        cpu: dict[CallSite, str] | None = None,
        is_mixed: bool = False,
        casts: frozenset[CallSite] = frozenset(),
        met: frozenset[CallSite] = frozenset(),
        called: frozenset[str] = frozenset(),
        functionals: dict[str, str] | None = None,
    ) -> None:
        self.sites, self.cpu, self.is_mixed, self.casts = sites, cpu or {}, is_mixed, casts
        self.met, self.called, self.functionals = met, called, functionals or {}
        self._counted = {replace(site, occurrence=0) for site in sites if site.occurrence}

    def __deepcopy__(self, memo: dict) -> Dispatcher:
        return memo.setdefault(id(self), Dispatcher(*self.__getstate__()))

    def __getstate__(self) -> tuple:
        return dict(self.sites), dict(self.cpu), self.is_mixed, self.casts, self.met, self.called, self.functionals

    def __setstate__(self, state: tuple) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def start(self, run: Run) -> None:
        """The model begins to run, or one of its modules by itself."""
        run.mode = _PlainCalls(run) if self.is_mixed else None
        run.begin()

    def stop(self, run: Run, out: Any) -> None:
        """It has run, and gave this."""
        run.end()
        if run.prefix or sys.exc_info()[0] is not None:
            return
        pending = [step for step, _ in run.fused.values() if not step.is_last]
        if pending:
            raise pending[0].broken("the others did not run after it")
        between = next((x for x in tensors_in(out) if isinstance(x, Unfinished)), None)
        if between is not None:
            raise between.refuse()

    def next_step(self, steps: list[FusedStep], inputs: tuple) -> FusedStep | None:
        """The step that a member of fused modules takes: it follows another of the same fused module, on its result.

        Raises:
            UnknownCallError: where it follows none.
        """
        run = current()
        if run is None or run.handler is not self:
            return None
        for step in steps:
            last, out = run.fused.get(step.group[0], (None, None))
            if step.index == 0 and (last is None or last.is_last):
                return step
            if last is not None and last.index == step.index - 1 and any(x is out for x in inputs):
                return step
        raise steps[0].broken("they do not run one after the other now")

    def given(self, step: FusedStep) -> Any:
        """What the last step of the same fused module gave."""
        return innermost().fused[step.group[0]][1]

    def did(self, step: FusedStep, out: Any) -> None:
        """A step gave this."""
        innermost().fused[step.group[0]] = step, out

    def resolve(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        return innermost().resolve(path)

    def module_of_call(self, calls: OwnCalls) -> nn.Module:
        """The module for the call of a shared module that is beginning now."""
        scope = calling_scope(calls.path)
        if scope is None:  # called by itself, not by the model
            return self.resolve(calls.path)
        site = counted(caller(scope), calls.path)
        path = calls.sites.get(site)
        if path is None:
            check_source(site, calls.sites)
        if path is None and site.occurrence:
            raise _called_too_often(f"`{calls.path}` (called at {site.line or scope})", site.occurrence)
        if path is None:
            raise UnknownCallError(
                f"`{calls.path}` has own scales for each of its calls, and the call at {site.line or scope} was not "
                "met when the model was prepared. Prepare with example inputs that run through this line, or leave the "
                "module out of own_scales."
            )
        return self.resolve(path)

    def _read(self, path: str) -> Any:
        """The parameter or buffer at a path of the model, as its forward reads it."""
        owner, _, name = path.rpartition(".")
        module = self.resolve(owner)
        if isinstance(module, PlacedModule) and name in module._buffers:
            return module.as_parameter(name)
        return getattr(module, name, None)

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], has_scale: bool = True) -> Any:
        """What the module for a call gives; NotImplemented where there is none.

        Args:
            has_scale: is one of the tensors quantized? Then a call that was not recorded is an error.
        """
        if has_scale and self.functionals:
            stub = self._stub_of(running_functional())
            if stub is not None:
                args, kwargs = OnCpu(stub).real((args, kwargs))
                return func(*args, **kwargs)
        op, target, call_args, call_kwargs = as_call(func, args, kwargs)
        found = row_of_call(op, target, call_args, call_kwargs)
        is_cast = has_scale and found is not None and found[0].is_cast
        if not (self.cpu or is_cast) and (found is None or found[0].qat is None):
            return NotImplemented
        name = operator_name(op, target, call_args, call_kwargs) if found is None else found[0].name
        site = here(name, has_line=False)
        if self.cpu and site in self.cpu:
            args, kwargs = OnCpu(self.cpu[site]).real((args, kwargs))
            return func(*args, **kwargs)
        if is_cast and self.is_same_type(site, func, args, kwargs):
            return _moved(func, args, kwargs)
        if found is None or found[0].qat is None:
            return NotImplemented
        if self._counted and site in self._counted:
            site = counted(site)
        variants = self.sites.get(site)
        if _MET.sites is not None:
            _MET.sites.add(site)
        if variants is None:
            if not has_scale or not model_asks():  # a tool computes with a tensor as it could outside of the run
                return NotImplemented
            variants = self.learn(here(name), op, target, call_args, call_kwargs)
        if variants is None:
            if site.occurrence:
                raise _called_too_often(f"`{name}` {at(site.scope, here(name).line)}", site.occurrence)
            raise self._unknown(here(name))
        if BY_CHANCE in variants:
            return self._settled(func, args, kwargs, by_chance(func, args, kwargs))
        call_args, call_kwargs = _with_numbers(variants, call_args, call_kwargs)
        call = _bound(found[1], call_args, call_kwargs, name) if variants else None
        if call is None:
            return NotImplemented
        variant = self.variant_of(variants, call)
        if variant is None:
            variants = self.learn(here(name), op, target, call_args, call_kwargs, len(variants)) or variants
            variant = self.variant_of(variants, call)
        if variant is None:
            raise self._other_settings(variants, call, name)
        module = self.resolve(variant.path)
        if not isinstance(module, Successor):  # it has no qconfig: the function itself runs in float
            if has_quantized((args, kwargs)):
                raise refused(name, at(site.scope, here(name).line))
            return NotImplemented
        if isinstance(module, FusedAway):
            return self._settled(func, args, kwargs, module(call.args[0]))
        run = module if call.method is None else getattr(module, call.method)
        given = variant.computed(call) if getattr(module, "takes_weight", False) else {}
        out = run(*call.args, **call.kwargs, **variant.followed(call), **given)
        return self._settled(func, args, kwargs, out)

    def _stub_of(self, functional: nn.Module | None) -> str | None:
        """The stub before a FloatFunctional that runs on the CPU; None for one that does not."""
        paths = () if functional is None else self.functionals
        return next((self.functionals[path] for path in paths if self.resolve(path) is functional), None)

    def _settled(self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        """The result of a call; of one that writes, the tensor that is written."""
        if not writes(func, args, kwargs):
            return out
        target = next(iter(args), None)
        if is_traced() and isinstance(target, Unfinished):  # which has no values to write to, and stays refused
            return out
        fused = innermost().fused
        last = {group: step for group, (step, given) in fused.items() if given is out}
        target = settled(func, args, kwargs, out)
        fused.update({group: (step, target) for group, step in last.items()})
        return target

    def require_met(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Insist that a function which has no module ran when the model was prepared, or keeps the numbers it gets.

        Raises:
            UnknownCallError: where it did not.
        """
        op, target, call_args, call_kwargs = as_call(func, args, kwargs)
        found = row_of_call(op, target, call_args, call_kwargs)
        site = here(operator_name(op, target, call_args, call_kwargs))
        is_operator = found is None or found[0].qat is not None
        if site not in self.met and not keeps_scale(func) and is_operator and model_asks():
            raise self._unknown(site)

    def _path_of(self, module: nn.Module | None) -> str:
        """The path of a module of the running model; empty if it has none."""
        run = innermost()
        assert run.root is not None
        named = () if module is None else run.root.named_modules()
        return next((run.prefix + path for path, found in named if found is module), "")

    def _unknown(self, site: CallSite) -> Exception:
        """The error of a call that was not recorded: of a function, or of a module that calls it."""
        functional = self._path_of(running_functional())
        if functional in self.called:
            return refused(site.name, at(functional, site.line))
        check_source(site, self.sites)
        what, where = f"`{site.name}`", at(site.scope, site.line)
        module, line = (None, "") if site.line else running_module()
        if module is not None:
            what, where = f"`{type(module).__name__}`", at(self._path_of(module) or site.scope, line)
        return UnknownCallError(
            f"{what} {where} was not met when the model was prepared, so it has no scale. Prepare with example inputs "
            "that run through this line; if a branch is chosen at run time, let both branches run on the example "
            "inputs (`Tracer.is_tracing()` says when), or put this code after the DeQuantStub."
        )

    def is_same_type(self, site: CallSite, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Does a call cast a tensor to the type that it has in float?"""
        return site in self.casts

    def learn(
        self, site: CallSite, op: str, target: Any, args: tuple, kwargs: dict[str, Any], known: int = -1
    ) -> list[Variant] | None:
        """The modules of a call site after one was made for a call that is new there; None where none is made.

        Args:
            known: how many modules of the call site the caller has seen; -1 where the site itself is new.
        """
        return None

    def with_scales(
        self, module: PlacedModule, method: str, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The operands of a call, those without a scale through stubs, if the call has some.

        Args:
            method: of a FloatFunctional; empty for other modules.
        """
        return args, kwargs

    def variant_of(self, variants: list[Variant], call: Call) -> Variant | None:
        """The module for a call's settings."""
        return next((variant for variant in variants if not variant.differences(call, self._read)), None)

    def _other_settings(self, variants: list[Variant], call: Call, name: str) -> UnknownCallError:
        """The error of a call that wants settings for which there is no module."""
        site, differences = here(name), min((v.differences(call, self._read) for v in variants), key=len)
        shown = ", ".join(f"{key} is {_spelt(new)} and was {_spelt(old)}" for key, (old, new) in differences.items())
        return UnknownCallError(
            f"`{site.name}` {at(site.scope, site.line)} is called with other arguments than when the model was "
            f"prepared: {shown}. Its module was made for those, and cannot follow. Prepare with example inputs that "
            "call it both ways (each then has a module of its own), or write the number down in the model."
        )


@dataclass(frozen=True)
class FusedStep:
    """The part of one member in a fused module.

    Args:
        group: paths of the members, in their order.
        index: this member's position.
        line: the line that calls the fused module.
        has_shape: does this member's result have the shape that it has in float?
    """

    group: tuple[str, ...]
    index: int
    line: str
    has_shape: bool = True

    @property
    def is_last(self) -> bool:
        """Is the fused module complete with this member?"""
        return self.index == len(self.group) - 1

    def broken(self, how: str) -> UnknownCallError:
        """The error of members that run otherwise."""
        names = ", ".join(f"`{path}`" for path in self.group)
        return UnknownCallError(
            f"{names} {f'({self.line}) ' if self.line else ''}ran one after the other when the model was prepared and "
            f"are fused into one operator; {how} (at `{self.group[self.index]}`). Put the code that runs a varying "
            "number of times into `Tracer.dynamic_block(self, name)`, or prepare with example inputs that run it "
            "several times."
        )

    def refused(self) -> UnknownCallError:
        """The error of a reader of this member's result other than the next member."""
        names = ", ".join(f"`{path}`" for path in self.group)
        reader = user_line()
        return UnknownCallError(
            f"{names} {f'({self.line}) ' if self.line else ''}are fused into one operator, as nothing else read the "
            f"result of `{self.group[self.index]}` when the model was prepared; now something does"
            f"{f' ({reader})' if reader else ''}. Prepare with example inputs that run through this line too "
            "(`Tracer.is_tracing()` says when), or with `fuse_mode=FuseMode.NoFuse`; put code that runs a varying "
            "number of times into `Tracer.dynamic_block(self, name)`."
        )


class _PlainCalls(EmptyIsZero):
    """Sends calls on ordinary tensors to the modules made for them, while a model runs that mixes both."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = NotImplemented
        is_plain = not any(issubclass(t, QTensor) for t in types)  # a QTensor asks the dispatcher itself
        if is_plain and current() is self.run:  # and not a model that this one calls
            out = self.run.handler(func, args, kwargs, has_scale=False)
        return super().__torch_function__(func, types, args, kwargs) if out is NotImplemented else out


class OnCpu:
    """A hook of a float module among quantized ones.

    Args:
        stub: path of the stub that dequantizes what it takes, or "".
    """

    def __init__(self, stub: str = "") -> None:
        self.stub = stub

    def real(self, tree: Any) -> Any:
        """Tensors as ordinary ones, of real numbers."""
        model = interceptor() if self.stub else None

        def one(x: Any) -> Any:
            if not isinstance(x, QTensor):
                return unmarked(x)
            return x.shared(f"a float operator{calling_line()}") if model is None else model.resolve(self.stub)(x)

        return pytree.tree_map(one, tree)

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before the forward."""
        return self.real((args, kwargs))

    def attach(self, module: nn.Module) -> None:
        """Register the hook."""
        keep(module.register_forward_pre_hook, self.before, with_kwargs=True)


class FusedMember:
    """A module that is fused; it sees that its fellows run as they did when the model was prepared.

    Args:
        steps: its parts; a ReLU can be shared by several fused modules.
        handler: the model's dispatcher.
    """

    def __init__(self, steps: list[FusedStep], handler: Dispatcher) -> None:
        self.steps, self.handler = steps, handler

    def take(self, args: tuple) -> tuple[FusedStep | None, tuple]:
        """Before the member runs: its step, and what it runs on."""
        step = self.handler.next_step(self.steps, args)
        if step is None or step.index == 0:
            return step, args
        before = self.handler.given(step)
        return step, tuple(x.held if x is before and isinstance(x, Unfinished) else x for x in args)

    def give(self, step: FusedStep, out: Any) -> Any:
        """After it: the result, which only the next member may read."""
        if not step.is_last and isinstance(out, Tensor):
            out = Unfinished(out, step.refused, step.has_shape)
        self.handler.did(step, out)
        return out

    def pass_on(self, x: Any, is_written: bool) -> Any:
        """The call of a member in whose place another one runs.

        Args:
            is_written: does it write its result to `x`?
        """
        step, (held,) = self.take((x,))
        if step is None:
            return held
        if is_written and isinstance(x, Unfinished) and not is_traced():  # a trace holds its tensors: `x` stays refused
            show(x, held)
            held = x
        return self.give(step, held)

    def attach(self, module: PlacedModule) -> None:
        """Let a module of the model be this member."""
        module.member = self


class NeverMet:
    """A hook of a QuantStub or DeQuantStub that did not run when the model was prepared."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: tuple) -> None:
        line = running_module()[1]
        raise UnknownCallError(
            f"`{type(module).__name__}` {at(self.path, line)} did not run when the model was prepared, so it does "
            "nothing, and what follows would run in float. Prepare with example inputs that run through this line."
        )


def _called_too_often(what: str, times: int) -> UnknownCallError:
    return UnknownCallError(
        f"{what} has own scales for each of its calls: it ran {times} times there when the model was prepared, and now "
        "runs once more. Prepare with example inputs that run it as often as any input does, or leave it out of "
        "own_scales: one scale then serves any number of calls."
    )


class OwnForward:
    """The forward of a shared module of the user's: each call runs in the copy that has its scales.

    Args:
        calls: the module's calls.
    """

    def __init__(self, calls: OwnCalls) -> None:
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = interceptor()
        module = model.module_of_call(self.calls)
        if module is model.resolve(self.calls.path):
            return type(module).forward(module, *args, **kwargs)
        return module(*args, **kwargs)


def _spelt(setting: Any) -> str:
    if isinstance(setting, Tensor):
        return f"a tensor of shape {tuple(setting.shape)}"
    return f"`{setting.path}`" if isinstance(setting, Attribute) else repr(setting)


def _moved(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A cast to the type that a tensor has already: what it says of a device is left, of a type nothing.

    A converted layer keeps its weight as integers, so ``x.to(self.conv.weight.dtype)`` asks for another type there.
    """
    kinds = (torch.dtype, QuantDType, Tensor)
    left = tuple(v for v in args[1:] if not isinstance(v, kinds))
    named = {k: v for k, v in kwargs.items() if not isinstance(v, kinds)}
    has_type = len(left) < len(args) - 1 or len(named) < len(kwargs)
    if not has_type and (left or named):
        return NotImplemented
    return args[0].to(*left, **named) if left or named else args[0]


def _with_numbers(variants: list[Variant], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call with those as numbers that were read so when the model was prepared."""
    places = {place for variant in variants for place in variant.numbers}
    if not places:
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for place in places:
        value = leaves[place] if place < len(leaves) else None
        if isinstance(value, Tensor) and not isinstance(value, QTensor) and value.numel() == 1:
            leaves[place] = value.item()
    return pytree.tree_unflatten(leaves, spec)


def _bound(bind: Binder, args: tuple, kwargs: dict[str, Any], name: str) -> Call | None:
    """The call as its module takes it; None if it needs no module."""
    try:
        call = bind(*args, **kwargs)
    except NotBindable as error:
        site = here(name)
        raise UnsupportedOperatorError(
            f"`{name}` {at(site.scope, site.line)} has no quantized form as it is called here: {error}."
        ) from error
    return None if call is AS_IT_IS else call
