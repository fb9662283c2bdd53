"""A prepared model runs its original forward; functions on quantized tensors are sent to the modules made for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import UnknownCallError, UnsupportedOperatorError, at
from horizon_plugin_pytorch.fx.call_site import CallSite, Variant, here
from horizon_plugin_pytorch.fx.recording import as_call, row_of_call
from horizon_plugin_pytorch.nn.operator_table import AS_IT_IS, Binder, Call, NotBindable
from horizon_plugin_pytorch.qtensor import QTensor, set_interceptor


class _Run(threading.local):
    """What a thread is running of the model."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.prefix = ""
        self.before: list[Any] = []


class Dispatcher:
    """Knows the modules of every call site of a prepared model.

    Args:
        sites: the generated modules of each call site that was recorded; none where the call is left alone.
    """

    def __init__(self, sites: dict[CallSite, list[Variant]]) -> None:
        self.sites = sites
        self._run = _Run()

    def __deepcopy__(self, memo: dict) -> Dispatcher:
        return memo.setdefault(id(self), Dispatcher(dict(self.sites)))

    def __getstate__(self) -> dict[str, Any]:
        return {"sites": self.sites}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sites"])  # type: ignore[misc]

    def start(self, module: nn.Module, path: str) -> None:
        """A module of the model begins to run, and no other of its modules is running."""
        self._run.root, self._run.prefix = module, f"{path}." if path else ""
        self._run.before.append(set_interceptor(self))

    def stop(self) -> None:
        """It has run."""
        if self._run.before:
            set_interceptor(self._run.before.pop())

    def resolve(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        assert self._run.root is not None
        return self._run.root.get_submodule(path.removeprefix(self._run.prefix))

    def _read(self, path: str) -> Any:
        """The parameter or buffer at a path of the model."""
        owner, _, name = path.rpartition(".")
        return getattr(self.resolve(owner), name, None)

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        op, target, call_args, call_kwargs = as_call(func, args, kwargs)
        found = row_of_call(op, target, call_args, call_kwargs)
        if found is None or found[0].qat is None:
            return NotImplemented
        row, bind = found
        site = here(row.name)
        variants = self.sites.get(site)
        if variants is None:
            raise UnknownCallError(
                f"`{row.name}` {at(site.scope, site.line)} was not met when the model was prepared, so it has no "
                "scale. Prepare with example inputs that run through this line; if a branch is chosen at run time, "
                "run `prepare` on inputs of either kind, or put this code after the DeQuantStub."
            )
        call = _bound(bind, call_args, call_kwargs, site) if variants else None
        if call is None:
            return NotImplemented
        variant = self._variant(variants, call, site)
        module = self.resolve(variant.path)
        if isinstance(module, nn.Identity):  # fused into another module
            return call.args[0]
        run = module if call.method is None else getattr(module, call.method)
        out = run(*call.args, **call.kwargs, **variant.followed(call))
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and not name.endswith("__") and isinstance(args[0], QTensor)
        if not is_write:
            return out
        torch.utils.swap_tensors(args[0], out)  # `x.add_(y)`: every name of x sees the result
        return args[0]

    def _variant(self, variants: list[Variant], call: Call, site: CallSite) -> Variant:
        """The module for a call's settings."""
        found = [(variant, variant.differences(call, self._read)) for variant in variants]
        same = next((variant for variant, differences in found if not differences), None)
        if same is not None:
            return same
        differences = min((differences for _, differences in found), key=len)
        shown = ", ".join(f"{name} is {new!r} and was {old!r}" for name, (old, new) in differences.items())
        raise UnknownCallError(
            f"`{site.name}` {at(site.scope, site.line)} is called with other arguments than when the model was "
            f"prepared: {shown}. Its module was made for those, and cannot follow. Prepare with example inputs that "
            "call it both ways (each then has a module of its own), or write the number down in the model."
        )


def _bound(bind: Binder, args: tuple, kwargs: dict[str, Any], site: CallSite) -> Call | None:
    """The call as its module takes it; None if it needs no module."""
    try:
        call = bind(*args, **kwargs)
    except NotBindable as error:
        raise UnsupportedOperatorError(
            f"`{site.name}` {at(site.scope, site.line)} has no quantized form as it is called here: {error}."
        ) from error
    return None if call is AS_IT_IS else call
