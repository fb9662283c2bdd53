"""A model's graph by symbolic trace, with what is to be told of it; or an error that names the line."""

from __future__ import annotations

import collections
import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.asking.functions import definition_line
from horizon_plugin_pytorch.asking.stack import error_line
from horizon_plugin_pytorch.capture.absent import follow_absent, tell_absent
from horizon_plugin_pytorch.capture.given import GUARD, Arguments
from horizon_plugin_pytorch.capture.modes import tell_modes
from horizon_plugin_pytorch.capture.outside import OutsideState, holds_proxy
from horizon_plugin_pytorch.capture.plain_state import PlainState, classes_of_users
from horizon_plugin_pytorch.capture.proxies import UNKNOWN_TRUTH
from horizon_plugin_pytorch.capture.tracer import QuantizationTracer, stored_tensors
from horizon_plugin_pytorch.capture.type_tests import tell_type_tests
from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError, listed, warn
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.writing import writes_by_name


def trace(model: nn.Module, example: tuple[tuple, dict[str, Any]] | None = None) -> torch.fx.Graph:
    """The model's graph, or an error that names the line which cannot be traced.

    Args:
        example: the arguments and keyword arguments of a call like those to come. Without one, an argument that may be
            None counts as given, where the forward can be followed so.
    """
    if isinstance(model, torch.fx.GraphModule):
        return model.graph
    _refuse_names(model)
    _refuse_defaults(model)
    before, state = stored_tensors(model), PlainState(model)
    arguments = Arguments(model, example)
    try:
        tracer, graph = _traced(model, arguments)
    except Exception as error:
        absent = frozenset(() if arguments.has_example else arguments.optional)
        arguments = Arguments(model, None, absent)
        try:
            if not absent:
                raise error
            tracer, graph = _traced(model, arguments)
        except Exception:
            where = error_line(error)
            raise TraceError(
                f"symbolic trace cannot follow `{type(model).__name__}`{f' at {where}' if where else ''}: "
                f"{_remedy(error)} {'' if example else _EXAMPLE}Or prepare with `prepare(model, example_inputs, ...)`, "
                "which runs the forward: sizes and lengths are numbers there, and what lies outside of the stubs may "
                "be any Python."
            ) from error
        tell_absent(model, absent, error_line(error))
    else:
        follow_absent(model, arguments, graph, _traced)
    model.__dict__.pop(GUARD, None)
    if arguments.guard.facts:
        model.__dict__[GUARD] = arguments.guard
    _tell_lost(model, tracer.lost_hooks)
    _tell_unseen(model, tracer.unseen_hooks)
    _tell_backwards(model, tracer.lost_backwards)
    _tell_tested(model, tracer.tested_results)
    _tell_looked_up(model, tracer.looked_up)
    _tell_classes(model, tracer.unknown_classes)
    changing = _changing(model, state, arguments)
    _tell_written(model, before, [*tracer.written_globals, *changing])
    _tell_kept(model, tracer, arguments, lambda x: state.has(x, changing))
    _tell_drawn(model, tracer.made.drawn)
    tell_type_tests(model, has_own_forward=False)
    tell_modes(model, arguments, graph, _traced)
    state.restore(changing)  # that the model was looked at is no forward of the user's
    return graph


_EXAMPLE = (
    "If it is about a list, a dictionary, a flag or an optional argument of the forward, give example_inputs: symbolic "
    "trace then knows what these hold. "
)


def _traced(model: nn.Module, arguments: Arguments) -> tuple[QuantizationTracer, torch.fx.Graph]:
    tracer = QuantizationTracer()
    tracer.arguments = arguments
    with _own_attributes(model, tracer):
        graph = tracer.trace(model)
        if tracer.keeps_proxies:  # does the next forward read them?
            tracer.successor = QuantizationTracer()
            tracer.successor.arguments, tracer.successor.outside = arguments, tracer.outside
            with contextlib.suppress(Exception):
                tracer.successor.trace(model)
    return tracer, graph


def _changing(model: nn.Module, state: PlainState, arguments: Arguments) -> list[str]:
    """What each forward changes; not what the first one makes, and later ones find so."""
    if not state.is_old:
        return []
    again = PlainState(model)
    with contextlib.suppress(Exception):
        _traced(model, arguments)
    return again.changes()


def _tell_written(model: nn.Module, before: dict[str, tuple[torch.Tensor, int]], changing: Iterable[str]) -> None:
    """Name what the forward wrote to while it was traced: the graph has the reads, and not the writes.

    Args:
        before: tensors of the model, with torch's count of writes before.
        changing: paths of other things that each forward changes.
    """
    buffers = dict(model.named_buffers())
    written = [
        path
        for path, (old, version) in before.items()
        if old._version != version or (path in buffers and buffers[path] is not old)
    ]
    written += [path for path in changing if path not in written]
    if written:
        shown = listed(f"`{path}`" for path in written)
        warn(
            f"`{type(model).__name__}`: its forward writes to {shown}, which symbolic trace does not see: the prepared "
            "model computes each forward as the first one, and writes nothing. Prepare with "
            "`PrepareMethod.JIT_STRIP`, whose model runs its own forward; or write it outside of the forward.",
            QuantizationWarning,
        )


def _tell_kept(
    model: nn.Module, tracer: QuantizationTracer, arguments: Arguments, is_told: Callable[[torch.Tensor], bool]
) -> None:
    """Name the lines that write to tensors which are no attributes and not made in the forward, as those of closures.

    A second trace tells them from tensors that the forward makes in ways which torch does not report.

    Args:
        is_told: has the user heard of a tensor by its name?
    """
    if not tracer.made.writes_outside:
        return
    again = QuantizationTracer()
    again.arguments = arguments
    with _own_attributes(model, again), contextlib.suppress(Exception):
        again.trace(model)
    lines: dict[str, None] = {}
    for x, line, node in tracer.made.kept(again.made):
        if not is_told(x):
            lines[line] = None
        for user in () if node is None else node.users:
            if user.args[:1] == (node,) and writes_by_name(getattr(user.target, "__name__", str(user.target))):
                notes(user).read_later = user.stack_trace  # if it is quantized, it is refused as by running
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward writes to a tensor that outlives it and is no attribute of a "
            f"module, such as a global ({listed(lines)}). The prepared model has the value that was there when it was "
            "traced, and does not write it. Prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward; "
            "or make the tensor an input and an output of the model.",
            QuantizationWarning,
        )


def _tell_drawn(model: nn.Module, lines: Iterable[str]) -> None:
    """Name the lines that draw random numbers of sizes that are known: the graph has these numbers."""
    shown = listed(lines)
    if shown:
        warn(
            f"`{type(model).__name__}`: its forward draws random numbers ({shown}), and the prepared model has those "
            "that were drawn when it was traced, for ever. Prepare with `PrepareMethod.JIT_STRIP`, whose model draws "
            "them in each run; or make them an input of the model.",
            QuantizationWarning,
        )


def _tell_lost(model: nn.Module, hooks: Iterable[str]) -> None:
    """Name the hooks that the prepared model does not call."""
    shown = ", ".join(hooks)
    if shown:
        warn(
            f"`{type(model).__name__}`: the prepared model does not call the hooks {shown}: symbolic trace goes "
            "through these modules, and the graph calls what is inside. Put such a hook on a layer inside or on the "
            "whole model, or prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward with all hooks.",
            QuantizationWarning,
        )


def _tell_unseen(model: nn.Module, hooks: Iterable[str]) -> None:
    """Name the hooks of layers that write what the forward reads, and that cannot be followed."""
    shown = listed(hooks)
    if shown:
        warn(
            f"`{type(model).__name__}`: symbolic trace cannot follow hooks whose code has names of the forward's: "
            f"{shown}. Where the forward reads what such a hook writes, the prepared model has what was there when it "
            "was traced. Prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward with all hooks; or "
            "compute it in the forward.",
            QuantizationWarning,
        )


def _tell_backwards(model: nn.Module, functions: Iterable[str]) -> None:
    """Name the functions whose own backward the prepared model does not have."""
    shown = listed(functions)
    if shown:
        warn(
            f"`{type(model).__name__}`: symbolic trace goes through {shown} and records what its forward computes: in "
            "QAT the prepared model has the gradient of that, not of its own `backward`, as a straight-through "
            "estimator or a reversed gradient has. Call it in a method marked with `fx_helper.wrap()`, or prepare with "
            "`PrepareMethod.JIT_STRIP`, whose model runs its own forward.",
            QuantizationWarning,
        )


def _tell_classes(model: nn.Module, lines: dict[str, None]) -> None:
    """Say where the class of a value is asked for that tracing does not know."""
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward asks for the class of a value ({listed(lines)}) of which nothing "
            "is known while tracing, such as the result of code that is not entered. It is taken to be none of those "
            "that are asked for. If it is one, leave the question out, or prepare with `PrepareMethod.JIT_STRIP`, "
            "whose model runs its own forward.",
            QuantizationWarning,
        )


def _tell_looked_up(model: nn.Module, lines: dict[str, None]) -> None:
    """Say where sizes are looked for among values that are known."""
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward looks for a size, or for a device, among the keys of a dictionary "
            f"or set, or spells it as a string ({listed(lines)}). Sizes are not known while tracing, so that it is "
            "never found, and the graph has the code for that. This is right for a cache; for a table of values, read "
            "the size from the model's configuration, or prepare with `PrepareMethod.JIT_STRIP`, whose model runs its "
            "own forward.",
            QuantizationWarning,
        )


def _tell_tested(model: nn.Module, results: Iterable[str]) -> None:
    """Name the wrapped code whose result counts as given, where the forward asks whether it is None."""
    shown = ", ".join(results)
    if shown:
        warn(
            f"`{type(model).__name__}` asks whether {shown} gives None, which tracing does not know: it is traced as "
            "if it did not. If it can, put the question into the wrapped code too, or prepare with "
            "`PrepareMethod.JIT_STRIP`, which runs the forward.",
            QuantizationWarning,
        )


@contextlib.contextmanager
def _own_attributes(model: nn.Module, tracer: QuantizationTracer) -> Iterator[None]:
    """Attributes and globals that hold values of the traced forward afterwards get back what they were."""
    before = [(vars(m), {k: (v, _items(v)) for k, v in vars(m).items()}) for m in model.modules()]
    classes = {cls: dict(vars(cls)) for cls in classes_of_users(model.modules())}
    tracer.outside = OutsideState(model)
    try:
        yield
    finally:
        has_proxies = tracer.successor is not None or tracer.keeps_proxies
        if has_proxies:
            tracer.written_globals = tracer.outside.restore()
        for attributes, values in before if has_proxies else ():
            for name in _with_proxies(attributes):
                if name not in values:
                    del attributes[name]
                    continue
                attributes[name], items = values[name]
                if items is not None:
                    attributes[name].clear()
                    getattr(attributes[name], "extend" if isinstance(items, list) else "update")(items)
        for cls, values in classes.items() if has_proxies else ():
            for name in _with_proxies(vars(cls)):
                setattr(cls, name, values[name]) if name in values else delattr(cls, name)


def _with_proxies(attributes: Mapping[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if holds_proxy(value)]


def _items(value: Any) -> Any:
    """What a container of its own kind holds, as a plain list or dict."""
    if type(value) in (list, collections.deque):
        return list(value)
    return dict(value) if type(value) in (dict, collections.OrderedDict, collections.defaultdict) else None


_TAKEN = frozenset(dir(torch.fx.GraphModule)) - frozenset(dir(nn.Module)) | {
    "_graph", "_code", "meta", "_tracer_cls", "_tracer_extras",
}  # fmt: skip


def _refuse_names(model: nn.Module) -> None:
    """Insist that the model has nothing of the names that torch.fx gives to the attributes of a traced model."""
    if "forward" in vars(model):
        raise TraceError(
            f"`{type(model).__name__}` has a `forward` that is an attribute of the object, as after `self.forward = "
            "self.forward_fuse`, and torch.fx traces the one of the class. Call it from the `forward` of the class; or "
            "let `prepare` run the model (`method=PrepareMethod.JIT_STRIP`), which runs what is called."
        )
    parts = {**model._modules, **model._parameters, **model._buffers}
    methods = [name for name in vars(model) if name in _TAKEN and callable(getattr(torch.fx.GraphModule, name, None))]
    taken = [name for name in (*parts, *methods) if name in _TAKEN]
    if taken:
        raise TraceError(
            f"`{taken[0]}` of `{type(model).__name__}` has the name of something that every model of torch.fx has, so "
            "that the traced model could not have both. Give it another name; or let `prepare` run the model "
            "(`method=PrepareMethod.JIT_STRIP`), which takes any name."
        )


def _refuse_defaults(model: nn.Module) -> None:
    """Insist that no argument has a tensor as its default, which the code of a graph has no words for."""
    for name, parameter in inspect.signature(type(model).forward).parameters.items():
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves(parameter.default)):
            raise TraceError(
                f"`{name}` of `{type(model).__name__}.forward` ({definition_line(type(model).forward)}) has a tensor "
                "as its default, which torch.fx cannot write. Make it a buffer of the model and None the default; or "
                "let `prepare` run the model (`method=PrepareMethod.JIT_STRIP`), which takes any default."
            )


def _remedy(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    names = "(TracedProxy|Parts|Written|ReadAttribute|Known(Number|List|Dict))"
    text = re.sub(rf"'{names}'|(?<=not ){names}\b|(?<=got ){names}\b", "a tensor that is traced", str(error))
    if "__delitem__" in text:
        return "`del x[...]` has no form in a graph."
    if "has the attribute" in text:
        where = "a part of an argument, or the result of code that is not traced"
        return f"{text}: it is {where}. Ask what the model's configuration says instead."
    if UNKNOWN_TRUTH in text:
        return f"{text}. Ask what the model's configuration says instead."
    if "of which nothing is known" in text:
        return f"{text}."
    if "was traced before" in text:
        return (
            f"{text}: code keeps it in a global variable or another object, where the next forward finds it. Set that "
            "back to what it was before any forward; and make such a state an input and an output of the model."
        )
    if "cannot be iterated" in text:
        return (
            "a tensor's length is not known while tracing, so it cannot be looped over, passed to zip() or unpacked "
            "with *; nor is the length of what wrapped code gives. Take a known number of parts: `a, b = x.unbind(1)`, "
            "`for part in x.chunk(2, 1)`, or `x[:, i]` for i in range(2); of wrapped code, `parts[i]` for i in "
            "range(2)."
        )
    if isinstance(error, KeyError) and "Proxy(" in text:
        return (
            "a size or a number in a tensor is not known while tracing, so it cannot be looked up in a dictionary. "
            "Take the key from the model's configuration."
        )
    if "'len' is not supported" in text:
        return "a tensor's length is not known while tracing, and len() must give a number. Write `x.shape[0]`."
    if "cannot be interpreted as an integer" in text:
        return (
            "a size is not known as a number while tracing, so `range(x.shape[0])` cannot be run. Write the number, or "
            "take it from the model's configuration: `range(self.levels)`."
        )
    if re.match(r"(int|float)\(\) argument", text):
        return (
            "a size or a number in a tensor is not known while tracing, so int() and float() cannot read it. Sizes are "
            "integers as they are: write `x.shape[0] // 2` and `math.prod(x.shape)` without int(); take other numbers "
            "from the model's configuration."
        )
    if "__cuda_array_interface__" in text:
        return (
            "torch.tensor() and torch.as_tensor() cannot take a size or a tensor that is not known as a number while "
            "tracing. A size takes part as it is, `x * x.shape[0]`, and so does a tensor, `x * x.mean()`."
        )
    if "__array_" in text or "to a NumPy" in text:
        return (
            "numpy cannot take tensors or sizes that are not known as numbers while tracing. Compute with them in "
            "torch and Python, or take the numbers from the model's configuration."
        )
    if re.search(r"assignment to `x.data`|Variable data has to be a tensor|not a storage", text):
        return (
            "a graph has no form for `x.data = y` or `x.set_(y)`. Go on with the new tensor, as in `x = y`; make a "
            "state that the next forward reads an input and an output of the model."
        )
    if "item assignment" in text:
        return (
            "writing into a part of a tensor has no form in a graph. Build the tensor from its parts with `torch.cat` "
            "or `torch.stack`, or choose between two tensors with `torch.where`."
        )
    return (
        f"{text.rstrip('.')}. The graph must not depend on the values of tensors: move that code out of the model's "
        "forward. Before the QuantStub or after the DeQuantStub it can also be hidden in a function or module marked "
        "with `horizon_plugin_pytorch.utils.fx_helper.wrap()`, which is then called as it is."
    )
