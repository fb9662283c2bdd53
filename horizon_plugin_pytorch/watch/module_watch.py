"""Watching calls of chosen modules, wherever they are called: in the user's code, or inside an operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking import as_tool
from horizon_plugin_pytorch.watch.operator_call import OperatorCall

Consumer = Callable[[OperatorCall], Any]
Around = Callable[[OperatorCall, Callable[[], Any]], Any]


class ModuleWatch:
    """Tells of each call of some modules while it is active, inside other operators too.

    Args:
        modules: by their paths.
        before: is told of a call before it runs, with the arguments that reach the forward. It may raise an error to
            end the run there.
        after: is told of a call when it has given its result.
        around: ``around(call, run)`` gives the result of a call: ``run()``, or one that it has kept.
        in_all_threads: tell of calls in every thread, and not only in the one that entered.

    >>> net, seen = nn.Sequential(nn.ReLU(), nn.Sigmoid()), []
    >>> with ModuleWatch({"1": net[1]}, before=lambda call: seen.append((call.path, len(call.inputs)))):
    ...     _ = net(__import__("torch").ones(2))
    >>> seen
    [('1', 1)]
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        before: Consumer | None = None,
        after: Consumer | None = None,
        around: Around | None = None,
        in_all_threads: bool = False,
    ) -> None:
        self._modules, self._before, self._after, self._around = dict(modules), before, after, around
        self._undo = ExitStack()
        self._thread, self._in_all_threads = 0, in_all_threads

    def __enter__(self) -> ModuleWatch:
        self._thread = threading.get_ident()
        for path, module in self._modules.items():
            if self._before is not None:
                hook = module.register_forward_pre_hook(self._entered(path), with_kwargs=True)
                self._undo.callback(hook.remove)
            if self._after is not None:
                hook = module.register_forward_hook(self._left(path), with_kwargs=True)
                self._undo.callback(hook.remove)
            if self._around is not None:
                module.__dict__["forward"] = self._surrounded(path, module)
                self._undo.callback(module.__dict__.pop, "forward")
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _is_told(self) -> bool:
        return self._in_all_threads or threading.get_ident() == self._thread

    def _call(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any = None) -> OperatorCall:
        return OperatorCall(-1, path, args=args, kwargs=kwargs, output=out, module=module)

    def _entered(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self._is_told() and self._before is not None:
                with as_tool():
                    self._before(self._call(path, module, args, kwargs))

        return hook

    def _left(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
            if self._is_told() and self._after is not None:
                with as_tool():
                    self._after(self._call(path, module, args, kwargs, out))

        return hook

    def _surrounded(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._is_told() or self._around is None:
                return forward(*args, **kwargs)
            return self._around(self._call(path, module, args, kwargs), lambda: forward(*args, **kwargs))

        return run
