"""How operators begin and end in a file: what ONNX Runtime can merge is the end of one with the beginning of the next.

All pairs of operators are some thirty thousand in each format; their beginnings and endings are a few dozen, and one
pair of operators for each pair of those meets every neighbourhood of nodes that any pair does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from torch import Tensor, nn
from tqdm import tqdm

from tests.sequences.comparison import written
from tests.sequences.parts import Pair, Part, found, order_of, parts


@dataclass(frozen=True)
class Alone:
    """One operator as a sequence."""

    part: Part

    @property
    def name(self) -> str:
        """For reports."""
        return self.part.case.name

    def module(self) -> nn.Module:
        """The operator on quantized tensors."""
        return _Body(self.part)

    def inputs(self, seed: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs that are to be quantized, and plain ones."""
        given, count = self.part.case.inputs(seed=seed), len(self.part.case.shapes)
        return list(given[:count]), list(given[count:])


class _Body(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.body = part.case.make()
        self.part = part

    def forward(self, quantized: list[Tensor], plain: list[Tensor]) -> Any:
        return self.body(*quantized, *plain)


@dataclass(frozen=True)
class Form:
    """The kinds of the nodes that read each input of an operator, and of those that give its result."""

    beginnings: tuple[str, ...]
    ending: str


def _kind(node: onnx.NodeProto) -> str:
    """The operator, with what chooses between quite different ones."""
    return node.op_type + "".join(f"-{a.s.decode()}" for a in node.attribute if a.name in ("mode", "reduction"))


def form_of(file: onnx.ModelProto, inputs: int) -> Form:
    """The form of the operator that a file of `Alone` holds."""
    nodes = list(file.graph.node)
    makers = {name: node for node in nodes for name in node.output}
    own = [node for node in nodes if node.name.startswith("bodies/")]
    beginnings = []
    for position in range(inputs):
        stub = f"quants/0/{position}/"
        readers = [n for n in own if any(x in makers and makers[x].name.startswith(stub) for x in n.input)]
        beginnings.append("+".join(sorted({_kind(node) for node in readers})))
    last = makers[file.graph.output[0].name]
    while not last.name.startswith("bodies/") and last.input and last.input[0] in makers:
        last = makers[last.input[0]]
    before = sorted({_kind(makers[x]) for x in last.input if x in makers and makers[x].name.startswith("bodies/")})
    return Form(tuple(beginnings), f"{'+'.join(before)}>{_kind(last)}")


@functools.cache
def forms(dtype: str) -> dict[Part, Form]:
    """The form of every operator; those that have no file of their own in this format have none."""
    known = {}
    for part in tqdm(parts(), desc=f"forms of operators, {dtype}", disable=None):
        try:
            known[part] = form_of(written([Alone(part)], dtype)[1], len(part.case.shapes))
        except Exception:  # what is wrong with it is said where operators are tested one by one
            continue
    return known


def covering(dtype: str) -> Iterator[Pair]:
    """A pair of operators for each ending of one and beginning of another, the same ones in every run."""
    known = forms(dtype)
    firsts: dict[str, list[Part]] = {}
    seconds: dict[str, list[tuple[Part, int]]] = {}
    for part, form in known.items():
        firsts.setdefault(form.ending, []).append(part)
        for position, beginning in enumerate(form.beginnings):
            seconds.setdefault(beginning, []).append((part, position))
    for key in sorted(((a, b) for a in firsts for b in seconds), key=lambda key: order_of(dtype, key)):
        before = sorted(firsts[key[0]], key=lambda part: order_of(key, part.case.name))
        behind = sorted(seconds[key[1]], key=lambda item: order_of(key, item[0].case.name, item[1]))
        tries = (found(first, second, position) for first in before for second, position in behind)
        pair = next((pair for pair in tries if pair is not None and pair.has_one_answer), None)
        if pair is not None:
            yield pair
