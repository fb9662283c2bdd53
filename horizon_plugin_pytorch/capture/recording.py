"""A model's graph, recorded by running it: the original forward decides what happens, whatever Python it uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from horizon_plugin_pytorch.capture.leaves import is_functional, runs_as_one
from horizon_plugin_pytorch.capture.mode_blind import is_mode_blind
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.capture.plain_state import PlainState
from horizon_plugin_pytorch.capture.recorder import LoggedCall, Recorder, Unseen
from horizon_plugin_pytorch.errors import HorizonError, TraceError, at
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.plain_values import seen_ufunc
from horizon_plugin_pytorch.running import Run, running
from horizon_plugin_pytorch.runtime.call_site import (
    caller,
    current_scope,
    entered,
)
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.runtime.stochastic import mark_stochastic
from horizon_plugin_pytorch.runtime.stub_input import require_tensor


@contextlib.contextmanager
def _watched(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Leaf modules report to the recorder, and other modules are scopes, while this is active."""
    undo: list[Callable[[], None]] = []

    def patch(module: nn.Module, name: str, wrapper: Callable) -> None:
        module.__dict__[name] = wrapper
        undo.append(lambda: module.__dict__.pop(name))

    Tensor.__array_ufunc__ = seen_ufunc  # type: ignore[attr-defined] # numpy computes where nobody sees it
    undo.append(lambda: delattr(Tensor, "__array_ufunc__"))
    seen: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        if is_functional(type(module)):
            for method in FUNCTIONAL_METHODS:
                if hasattr(module, method):
                    patch(module, method, _method_of(recorder, path, module, method))
        elif path and runs_as_one(module):
            patch(module, "forward", _forward_of(recorder, path, module))
        else:
            undo += [handle.remove for handle in _watch_scope(recorder, path, module)]
    try:
        yield
    finally:
        for step in undo:
            step()


def _method_of(recorder: Recorder, path: str, module: nn.Module, name: str) -> Callable:
    method = getattr(module, name)
    return lambda *args, **kwargs: recorder.leaf(path, lambda: method(*args, **kwargs), args, kwargs, name)


def _forward_of(recorder: Recorder, path: str, module: nn.Module) -> Callable:
    forward = module.forward
    row = row_of_module(type(module))
    if row is not None and row.is_stub:
        # A float stub gives back its argument, and the model may go on with either: two tensors, not one.
        def run(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if row.is_quant:
                require_tensor(out, at(path, caller(current_scope()).line))
            return _views(out)

        return lambda *args, **kwargs: recorder.leaf(path, lambda: run(*args, **kwargs), args, kwargs)
    return lambda *args, **kwargs: recorder.leaf(path, lambda: forward(*args, **kwargs), args, kwargs)


def _views(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) else x, tree)


def _watch_scope(recorder: Recorder, path: str, module: nn.Module) -> list[RemovableHandle]:
    """Let a module be a scope while it runs: its forward and, as in the prepared model, the hooks of the user's."""
    running: list[contextlib.ExitStack] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(recorder.called(path, caller(current_scope())))
        stack.enter_context(entered(path))
        running.append(stack)

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if running:  # not if a hook failed before `enter`
            running.pop().close()

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ]


def record(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> fx.Graph:
    """The graph of a float model on example inputs; see `record_runs`."""
    return record_runs(model, args, kwargs)[0]


@torch.no_grad()
def record_runs(
    model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
) -> tuple[fx.Graph, list[list[LoggedCall]], list[Tensor]]:
    """The graph of a float model on example inputs; the model is not changed.

    It runs in eval mode, and in training mode too, unless it cannot do anything else there.

    Returns:
        The graph, the calls of modules in each of the runs, and the tensors that the model gave in eval mode.

    Raises:
        TraceError: when the model cannot run on these inputs.
    """
    runner = copy_model(model, "prepare")
    recorder, given = Recorder(runner), []
    state, plain = torch.get_rng_state(), PlainState(runner)
    try:
        given = _record_run(recorder, runner, args, kwargs or {}, is_training=False)
        if recorder.keeps_tensors:  # does the next forward read them?
            with contextlib.suppress(TraceError):
                _record_run(recorder, runner, args, kwargs or {}, is_training=False)
            if not recorder.has_read_earlier:
                recorder.runs.pop()
        if recorder.reads_values or recorder.keeps_tensors or plain.is_old or not is_mode_blind(runner):
            with contextlib.suppress(TraceError):  # its branch may need targets; the eval graph is enough then
                _record_run(recorder, runner, args, kwargs or {}, is_training=True)
    finally:
        torch.set_rng_state(state)
        plain.undo()  # objects that a copy shares with the model
    graph = recorder.finish()
    mark_stochastic(graph)
    graph.owning_module = model  # type: ignore[assignment]
    return graph, recorder.runs, given


def _record_run(
    recorder: Recorder, runner: nn.Module, args: tuple, kwargs: dict[str, Any], is_training: bool
) -> list[Tensor]:
    """Run a model under a recorder; gives the tensors that the model gives.

    They are other objects with the same memory: the model's own, and what these are views of, live on only if somebody
    keeps them.
    """
    runner.train(is_training)
    recorder.again()
    own_args, own_kwargs = own_tensors((args, kwargs))
    recorder.add_input((own_args, own_kwargs))
    try:
        with (
            torch.set_grad_enabled(is_training),  # in training a forward may ask whether a tensor needs a gradient
            _watched(runner, recorder),
            Unseen(recorder),
            recorder,
            running(Run(recorder=recorder)),
        ):
            out = runner(*own_args, **own_kwargs)
        recorder.hand_out(out)
    except HorizonError:
        raise
    except Exception as error:
        raise TraceError(
            f"`{type(runner).__name__}` cannot run on the example inputs: {str(error).rstrip('.')}. Give prepare the "
            "inputs that the model takes in deployment, as a tuple."
        ) from error
    return [x.detach() for x in tensors_of(out)]
