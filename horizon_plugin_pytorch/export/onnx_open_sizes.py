"""How many positions `nonzero` finds, and how many runs `rle`, is known when a file runs: it must hold for any count.

The model is written a second time, with one value more than these operators found. If that is another file, the count
of the example inputs is part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, warn
from horizon_plugin_pytorch.export.onnx_dynamic import place_of
from horizon_plugin_pytorch.program.recorder import watching_open_sizes


def with_any_count(write: Callable[[], Any]) -> Any:
    """The file that is written; insist that it does not hold how many values there are of the example inputs.

    Args:
        write: records a model and writes its file.

    Raises:
        ExportError: it does.
    """
    with watching_open_sizes() as sizes:
        file = write()
    if not sizes.were_met:
        return file
    try:
        with watching_open_sizes(adds_one=True):
            other = write()
    except Exception as error:  # of the model's own code, which may know more about the count
        warn(
            "how many values the model computes with depends on the numbers of its inputs (`nonzero`, `rle`), and it "
            f"does not run with another count ({type(error).__name__}: {error}). The file may hold for the count of "
            "the example inputs only: try it with others.",
            QuantizationWarning,
        )
        return file
    node = _first_difference(file.graph, other.graph)
    if node is not None:
        raise ExportError(
            f"{place_of(node)}: how many values there are depends on the numbers of the inputs (`nonzero`, `rle`), and "
            "the file would have the count of the example inputs here (a size, a length or a number of elements). Let "
            "the model give these values, and compute this outside of it; or keep all places, and use a mask "
            "(`x * mask`, `torch.where(mask, x, 0)`)."
        )
    return file


def _first_difference(graph: Any, other: Any) -> Any:
    """The first node that is another one, or reads another constant; None if there is none."""
    constants, others = ({x.name: x.SerializeToString() for x in g.initializer} for g in (graph, other))
    changed = {name for name, stored in constants.items() if others.get(name) != stored}
    for position, node in enumerate(graph.node):
        known = other.node[position : position + 1]
        if not known or known[0].SerializeToString() != node.SerializeToString() or not changed.isdisjoint(node.input):
            return node
    return other.node[len(graph.node)] if len(other.node) > len(graph.node) else None
