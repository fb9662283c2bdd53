"""Operators that give as many values as their numbers say: what is recorded of them must hold for any count.

A model that calls one is recorded a second time, with one value more. If that gives something else, the count of the
example inputs is part of it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, warn
from horizon_plugin_pytorch.nested import leaves
from horizon_plugin_pytorch.program.note import note_of
from horizon_plugin_pytorch.program.program import Program

_T = TypeVar("_T")


def _one_more(x: Tensor, axis: int = 0) -> Tensor:
    """A tensor with its last slice twice; with zeros where there is none."""
    size = x.shape[axis]
    last = x.narrow(axis, size - 1, 1) if size else x.new_zeros([*x.shape[:axis], 1, *x.shape[axis + 1 :]])
    return torch.cat([x, last], axis)


def _more_runs(out: Tensor, *args: Any) -> Tensor:
    """One run more in what `rle` gives: their count, and a value and a length of each."""
    return torch.cat([out[:1] + 1, out[1:], out[-2:] if len(out) > 2 else out.new_ones(2)])


def _more_distinct(out: tuple[Tensor, Tensor, Tensor], axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """One value more in what a `unique` gives: values, which of them each element is, and counts if asked for."""
    values, inverse, counts = out
    return _one_more(values, axis), inverse, _one_more(counts) if counts.numel() else counts


_MORE: dict[str, Callable[..., Any]] = {  # of the result, and of the arguments
    "aten::nonzero": lambda out, *args: _one_more(out),
    "aten::masked_select": lambda out, *args: _one_more(out),
    "aten::repeat_interleave": lambda out, *args: _one_more(out),
    "aten::bincount": lambda out, *args: _one_more(out),
    "aten::_unique2": lambda out, *args: _more_distinct(out, 0),
    "aten::unique_consecutive": lambda out, *args: _more_distinct(out, 0),
    "aten::unique_dim": lambda out, x, axis, *args: _more_distinct(out, axis),
    "aten::index": lambda out, x, indices: _one_more(out, _mask_axis(indices)),
    "horizon::rle": _more_runs,
}


def _mask_axis(indices: list[Tensor | None]) -> int:
    """The axis that a mask counts along, if it is the only index; -1 without one."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    return given[0][0] if len(given) == 1 and given[0][1].dtype in (torch.bool, torch.uint8) else -1


@dataclass
class OpenSizes:
    """Operators that give as many values as their numbers say.

    Args:
        adds_one: let them give one value more: what is recorded depends on no number, so it must not depend on this.
        were_met: did the model run one of them?
    """

    adds_one: bool = False
    were_met: bool = False

    def see(self, func: Any, args: tuple, out: Any, is_data: Callable[[Tensor], bool]) -> Any:
        """What an operator gives.

        Args:
            is_data: does a tensor depend on the inputs? A constant mask has one count.
        """
        name = func._schema.name
        if name not in _MORE:
            return out
        if name == "aten::index" and (_mask_axis(args[1]) < 0 or not is_data(args[1][_mask_axis(args[1])])):
            return out
        self.were_met = True
        return _MORE[name](out, *args) if self.adds_one else out


class _Thread(threading.local):
    open_sizes: OpenSizes | None = None


_THREAD = _Thread()


def open_sizes() -> OpenSizes | None:
    """Who looks for such operators now."""
    return _THREAD.open_sizes


@contextmanager
def _watching(adds_one: bool = False) -> Iterator[OpenSizes]:
    before, _THREAD.open_sizes = _THREAD.open_sizes, OpenSizes(adds_one)
    try:
        yield _THREAD.open_sizes
    finally:
        _THREAD.open_sizes = before


def with_any_count(make: Callable[[], _T], difference: Callable[[_T, _T], str | None]) -> _T:
    """What is made of a recorded model; insist that it does not hold how many values there are of the example inputs.

    Args:
        make: records the model.
        difference: where, ``at `path` (file:line)``, two of what it makes are not the same; None if they are.

    Raises:
        ExportError: it does.
    """
    with _watching() as sizes:
        made = make()
    if not sizes.were_met:
        return made
    try:
        with _watching(adds_one=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were told
            other = make()
    except Exception as error:  # of the model's own code, which may know more about the count
        warn(
            "how many values the model computes with depends on the numbers of its inputs (`nonzero`, `rle`), and it "
            f"does not run with another count ({type(error).__name__}: {error}). What is recorded, and a file of it, "
            "may hold for the count of the example inputs only: try it with others.",
            QuantizationWarning,
        )
        return made
    place = difference(made, other)
    if place is not None:
        raise ExportError(
            f"{place}: how many values there are depends on the numbers of the inputs (`nonzero`, `rle`, a mask), and "
            "what is recorded, or a file of it, would have the count of the example inputs here (a size, a length or a "
            "number of elements). Let the model give these values, and compute this outside of it; or keep all places, "
            "and use a mask (`x * mask`, `torch.where(mask, x, 0)`)."
        )
    return made


def first_difference(program: Program, other: Program) -> str | None:
    """The place of the first node that is another one in another recording of the model; None if there is none."""
    numbers: dict[fx.Node, int] = {}
    for count, pair in enumerate(zip(program.graph.nodes, other.graph.nodes, strict=False)):
        mine, theirs = (_spelled(node, of, numbers) for node, of in zip(pair, (program, other), strict=True))
        if not _are_same(mine, theirs):
            return _reader(pair[0])
        numbers.update((node, count) for node in pair)
    if len(program.graph.nodes) != len(other.graph.nodes):
        return note_of(program.graph.output_node()).place
    mine, theirs = ([x for x in leaves(of.outputs) if isinstance(x, (int, float))] for of in (program, other))
    return None if mine == theirs else note_of(program.graph.output_node()).place


def _reader(node: fx.Node) -> str:
    """The place of a node; of a constant, of who reads it."""
    readers = list(node.users) if node.op == "get_attr" else []
    return note_of(readers[0] if readers else node).place


def _spelled(node: fx.Node, program: Program, numbers: dict[fx.Node, int]) -> list[Any]:
    """All that a node computes with, with numbers for other nodes."""
    if node.op == "get_attr":
        return [node.op, program.constants[str(node.target)]]
    args = fx.map_arg((node.args, node.kwargs), lambda used: f"%{numbers[used]}")
    return [node.op, node.target if node.op == "call_function" else "", *pytree.tree_flatten(args)[0]]


def _are_same(mine: list[Any], theirs: list[Any]) -> bool:
    if len(mine) != len(theirs):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and (a == b or a != a)
        for a, b in zip(mine, theirs, strict=True)
    )
