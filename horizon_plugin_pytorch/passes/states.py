"""Tensors that a model keeps from one forward to the next."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, UnsupportedOperatorError, listed, source_line, warn
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import begin_forward, end_forward
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.located import STATE_REASON, STATE_REMEDY, Successor
from horizon_plugin_pytorch.runtime.node_notes import notes

# What they give depends on the shape of their tensor, and not on its values.
_SHAPES = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_tensor", "size", "dim", "shape", "numel",
})  # fmt: skip


def refuse_states(prep: Preparation) -> None:
    """Insist that no quantized tensor is kept for the next forward: it belongs to one run of the model.

    Nor may another tensor take its memory, which has integers, or nothing yet.

    What is kept and never read, and constants that are computed once, do no harm.

    Raises:
        UnsupportedOperatorError: one is; it names the lines.
    """
    for node in prep.graph.nodes:
        if not prep.region.has_scale(node):
            continue
        line, path = source_line(node.stack_trace), notes(node).kept_as
        if path is not None:
            raise UnsupportedOperatorError(
                f"`{path}` is a tensor of the model that the forward replaces by a quantized one (line {line}): the "
                "next forward would read other numbers than this one, and a checkpoint or an exported file cannot keep "
                f"it. {STATE_REMEDY}"
            )
        if notes(node).given_as_data is not None:
            raise UnsupportedOperatorError(
                f"`x.data = y` (line {source_line(notes(node).given_as_data)}) gives a tensor the memory of a "
                f"quantized one, and not its scale. Go on with the new tensor, as in `x = y`. {STATE_REMEDY}"
            )
        if notes(node).read_later is not None and _is_data(node):
            raise UnsupportedOperatorError(
                f"a quantized tensor that one forward makes (line {line}) is kept and read by the next one (line "
                f"{source_line(notes(node).read_later)}): {STATE_REASON} {STATE_REMEDY}"
            )


def warn_states(prep: Preparation) -> None:
    """Name the float tensors that one forward keeps and the next one reads: a traced model does neither."""
    lines = [
        f"{_origin(node)}, read at {source_line(notes(node).read_later)}"
        for node in prep.graph.nodes
        if notes(node).read_later not in (None, node.stack_trace)  # of which tracing has told
        and not prep.region.has_scale(node)
        and _is_data(node)
    ]
    if lines:
        warn(
            f"`{prep.model._get_name()}`: a tensor of one forward is kept and read by the next one "
            f"({listed(dict.fromkeys(lines))}), which symbolic trace does not see: the prepared model computes each "
            "forward as the first one. Prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward; or "
            "make the state an input and an output of the model.",
            QuantizationWarning,
        )


def _origin(node: fx.Node) -> str:
    return f"the input `{node.target}`" if node.op == "placeholder" else f"line {source_line(node.stack_trace)}"


def _is_data(node: fx.Node) -> bool:
    """Does its value depend on those of the model's inputs, rather than on shapes and parameters alone?"""
    pending, seen = [node], {node}
    while pending:
        here = pending.pop()
        if here.op == "placeholder":
            return True
        name = here.args[1] if here.target is getattr else getattr(here.target, "__name__", here.target)
        if name not in _SHAPES:
            pending.extend(source for source in here.all_input_nodes if source not in seen)
            seen.update(here.all_input_nodes)
    return False


def refuse_states_when_running(model: nn.Module) -> None:
    """Let modules refuse quantized tensors of earlier forwards: nobody saw the model's code when it was prepared."""
    if not isinstance(model, Successor):
        keep(model.register_forward_pre_hook, _begin, with_kwargs=True)
        keep(model.register_forward_hook, _end, always_call=True)


def _begin(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    number = begin_forward(model)
    for x in tensors_of((args, kwargs)):
        if isinstance(x, QTensor):
            x._belong(number)


def _end(model: nn.Module, args: tuple, out: Any) -> None:
    end_forward()
