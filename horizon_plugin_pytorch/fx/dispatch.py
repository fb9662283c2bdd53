"""A prepared model runs its original forward; functions on quantized tensors are sent to the modules made for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import UnknownCallError, at
from horizon_plugin_pytorch.fx.call_site import CallSite, here
from horizon_plugin_pytorch.fx.recording import as_call, row_of_call
from horizon_plugin_pytorch.qtensor import QTensor, set_interceptor


class Dispatcher:
    """Knows the module of every call site of a prepared model.

    Args:
        sites: path of the generated module for each call site that was recorded.
    """

    def __init__(self, sites: dict[CallSite, str]) -> None:
        self.sites = sites
        self._root: nn.Module | None = None
        self._prefix = ""
        self._before: list[Any] = []

    def __deepcopy__(self, memo: dict) -> Dispatcher:
        return memo.setdefault(id(self), Dispatcher(dict(self.sites)))

    def __getstate__(self) -> dict[str, Any]:
        return {"sites": self.sites}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sites"])  # type: ignore[misc]

    def start(self, module: nn.Module, path: str) -> None:
        """A module of the model begins to run, and no other of its modules is running."""
        self._root, self._prefix = module, f"{path}." if path else ""
        self._before.append(set_interceptor(self))

    def stop(self) -> None:
        """It has run."""
        if self._before:
            set_interceptor(self._before.pop())

    def resolve(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        assert self._root is not None
        return self._root.get_submodule(path.removeprefix(self._prefix))

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        op, target, call_args, call_kwargs = as_call(func, args, kwargs)
        found = row_of_call(op, target, call_args, call_kwargs)
        if found is None or found[0].qat is None:
            return NotImplemented
        row, bind = found
        site = here(row.name)
        path = self.sites.get(site)
        if path is None:
            raise UnknownCallError(
                f"`{row.name}` {at(site.scope, site.line)} was not met when the model was prepared, so it has no "
                "scale. Prepare with example inputs that run through this line; if a branch is chosen at run time, "
                "run `prepare` on inputs of either kind, or put this code after the DeQuantStub."
            )
        module = self.resolve(path)
        call = bind(*call_args, **call_kwargs)
        assert call is not None
        if isinstance(module, nn.Identity):  # fused into another module
            return call.args[0]
        run = module if call.method is None else getattr(module, call.method)
        out = run(*call.args, **call.kwargs)
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and not name.endswith("__") and isinstance(args[0], QTensor)
        if not is_write:
            return out
        torch.utils.swap_tensors(args[0], out)  # `x.add_(y)`: every name of x sees the result
        return args[0]
