"""Code that symbolic trace does not enter, in a prepared model: its functions get modules when they are first met."""

from __future__ import annotations

import inspect
import re
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import UnknownCallError, at
from horizon_plugin_pytorch.operators.table import Call, row_named
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import Run, innermost
from horizon_plugin_pytorch.runtime.call_site import CallSite, Scope, Variant, check_source, here
from horizon_plugin_pytorch.runtime.dispatch import Dispatcher
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.real_tensor import RealTensor

_LOCK = threading.RLock()  # several threads may meet a call site at once
# Makes the module of a call: ``make(root, site, op, target, args, kwargs, sites)``; False where it must not.
Make = Callable[[nn.Module, CallSite, str, Any, tuple, dict[str, Any], dict[CallSite, list[Variant]]], bool]


class WrappedDispatcher(Dispatcher):
    """Knows the modules of the call sites in wrapped code, as far as the model has met them.

    Args:
        sites: the call sites that were met, with their modules.
        make: makes a module for a call that is new.
        has_run: has any of this code run?
    """

    was_seen = False

    def __init__(self, sites: dict[CallSite, list[Variant]], make: Make, has_run: bool = False) -> None:
        super().__init__(sites)
        self.make, self.has_run = make, has_run

    def __deepcopy__(self, memo: dict) -> WrappedDispatcher:
        return memo.setdefault(id(self), WrappedDispatcher(*self.__getstate__()))

    def __getstate__(self) -> tuple:
        return {site: list(variants) for site, variants in self.sites.items()}, self.make, self.has_run

    def start(self, run: Run) -> None:
        self.has_run = True
        super().start(run)

    def learn(
        self, site: CallSite, op: str, target: Any, args: tuple, kwargs: dict[str, Any], known: int = -1
    ) -> list[Variant] | None:
        root = innermost().root
        assert root is not None
        with _LOCK:
            found = self.sites.get(site)
            if found is not None and len(found) > known:  # another thread was faster
                return found
            is_made = self.make(root, site, op, target, args, kwargs, self.sites)
        return self.sites.get(site) if is_made else None

    def with_scales(
        self, module: PlacedModule, method: str, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: v is None)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not isinstance(x, (QTensor, RealTensor))]
        places = [i for i in places if i not in module.stub_paths]  # of `x * y`, whose stubs were made with it
        if not places or method.endswith("_scalar"):
            return args, kwargs
        if not method:
            places = _places_of_numbers(module, args, kwargs, places)
            if not places:
                return args, kwargs
        name = f"{module.path}.{method}" if method else module.path  # a line may call several, one after the other
        site = here(name, has_line=False)
        known = self.sites.get(site)
        if known is None or not {variant.settings["place"] for variant in known}.issuperset(places):
            site = here(name)
            count = -1 if known is None else len(known)
            if method:
                known = self.learn(site, "call_method", method, (module, *args), kwargs, count)
            else:  # masks and the like stay real: nothing is made for them
                is_met = [i in places or isinstance(x, (QTensor, RealTensor)) for i, x in enumerate(leaves)]
                given = [x if is_kept else None for x, is_kept in zip(leaves, is_met, strict=True)]
                own_args, own_kwargs = pytree.tree_unflatten(given, spec)
                known = self.learn(site, "call_module", module.path, own_args, own_kwargs, count)
        if known is None:
            raise self._unknown(site)
        for variant in known:
            if variant.settings["place"] in places:
                leaves[variant.settings["place"]] = self.resolve(variant.path)(leaves[variant.settings["place"]])
        return pytree.tree_unflatten(leaves, spec)

    def is_same_type(self, site: CallSite, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Real numbers are float32 to the user's code; booleans are cast as everywhere."""
        x = args[0] if args else None
        types = [v.dtype if isinstance(v, Tensor) else v for v in (*args[1:], *kwargs.values())]
        types = [v for v in types if isinstance(v, torch.dtype)]
        is_float = all(v is torch.float32 for v in types) if types else func is Tensor.float
        return isinstance(x, QTensor) and x._format != qbool and is_float

    def require_met(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """What has no module computes in real numbers here."""

    def _unknown(self, site: CallSite) -> UnknownCallError:
        check_source(site, self.sites)
        return UnknownCallError(
            f"`{site.name}` {at(site.scope, site.line)} is in code that tracing does not enter (`wrap`), and did not "
            "run while the model learnt its scales, so it has none. Run data through this line in the CALIBRATION or "
            "QAT state, load a checkpoint of a model that has, or give example_inputs when you prepare the model; if "
            "a branch is chosen by values, both must have run."
        )


def _places_of_numbers(module: PlacedModule, args: tuple, kwargs: dict[str, Any], places: list[int]) -> list[int]:
    """Which of the real tensors that a module of the user's got beside quantized ones want a scale, by their places."""
    row = row_named(module.operator)
    if row is None or not row.modules or row.is_quant or row.is_source or row.is_real or "_generated_" in module.path:
        return []
    written: Any = row.modules[0]  # the same before and after conversion
    names = [*inspect.signature(written.forward).parameters][1:]
    names = [*names[: len(args)], *[""] * (len(args) - len(names)), *kwargs]
    found, place, is_quantized = [], 0, False
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        for x in pytree.tree_leaves(value, is_leaf=lambda v: v is None):
            is_quantized |= isinstance(x, (QTensor, RealTensor))
            if place in places and name not in row.real_inputs and x.is_floating_point():
                found.append(place)
            place += 1
    return found if is_quantized else []


def name_of(site: CallSite, call: Call) -> str:
    """The name of the module for a call, without ``_generated_``: it follows from the place and the settings alone.

    So a checkpoint fits a model that has met its call sites in another order, or has not met them yet.
    """
    settings = Variant.of("", call).settings
    if not settings:
        return name_of_site(site)
    text = repr([call.factory.__qualname__, sorted((k, _spelt(v)) for k, v in settings.items())])
    return f"{name_of_site(site)}_{zlib.crc32(text.encode()):08x}"[:-4]


def name_of_site(site: CallSite) -> str:
    """What the names of modules for a call begin with: what is called there, and the functions down to the call."""
    parts = [re.sub(r"\W+", "_", site.name).strip("_")]
    for function, instruction, _ in reversed(site.calls):
        name = re.sub(r"\W+", "_", function.rpartition(".")[2]).strip("_")
        parts.append(f"{name}_{instruction}")
    return "_".join(parts)


def _spelt(setting: Any) -> str:
    return f"tensor {tuple(setting.shape)}" if isinstance(setting, Tensor) else repr(setting)


_PASSED = "is_passed_scope"


def is_passed(module: nn.Module) -> bool:
    """Has a module the hooks of a `PassedScope`?"""
    return _PASSED in module.__dict__


class PassedScope(Scope):
    """The hooks of a module of the user's that wrapped code may call."""

    def attach(self, module: nn.Module) -> None:
        module.__dict__[_PASSED] = True
        super().attach(module)
