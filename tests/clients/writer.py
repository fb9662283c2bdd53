"""Writes models the way clients do: as source, with the idioms of real networks in random order.

A `Writer` has the lines of one class and the tensors that are alive in its forward, with their shapes. An idiom takes
some of them and adds lines; `idioms/` has them all, most as tables. The source is a module of its own, so that lines,
call sites and pickles are those of a user's file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HEADER = """\
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import nn

import horizon_plugin_pytorch as horizon
import horizon_plugin_pytorch.nn.functional as HF
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub

Heads = namedtuple("Heads", ["scores", "boxes"])


@dataclass
class Features:
    first: torch.Tensor
    rest: list
"""


@dataclass(frozen=True)
class Value:
    """A tensor [batch, channels, height, width] that is alive in the forward."""

    name: str
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width


@dataclass
class Source:
    """What all classes of a model share.

    Args:
        classes: the text of those that are complete.
        used: names of the idioms so far.
        is_traceable: symbolic trace is to succeed.
        has_repeats: a line with functions runs several times in a forward: by running its calls share their scales.
    """

    random: random.Random
    classes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    is_traceable: bool = True
    has_repeats: bool = False


def _reads(line: str, name: str) -> bool:
    """Does a line read a value, other than to change it?"""
    is_own = re.match(rf"\s*{name}(\s*\+?=|\.\w+_\()", line) is not None
    return not is_own and re.search(rf"\b{name}\b", line) is not None


class Writer:
    """The lines of one class."""

    def __init__(self, source: Source, values: list[Value], depth: int = 0) -> None:
        self.source, self.random, self.depth = source, source.random, depth
        self.values = values
        self.made: list[str] = []
        self.body: list[str] = []
        self.methods: list[list[str]] = []
        self.prepared: list[str] = []
        self.is_wrapped = False
        self._count = 0

    def choose(self, *options: str) -> str:
        return self.random.choice(options)

    def maybe(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def pick(self) -> Value:
        """One of the last few values."""
        return self.random.choice(self.values[-3:])

    def module(self, made: str, stem: str = "layer", is_alone: bool = False) -> str:
        """Register a module under one of the ways that people use; gives the expression that reads it.

        Args:
            is_alone: it takes several arguments, which an `nn.Sequential` around it would not.
        """
        name = self.name(stem)
        way = self.random.random()
        if way < 0.7:
            self.made.append(f"self.{name} = {made}")
            return f"self.{name}"
        if way < 0.8:
            self.made.append(f"self.{name} = nn.ModuleList([{made}])")
            return f"self.{name}[0]"
        if way < 0.9:
            key = self.choose("class", "for", "a-b", "0", "lambda", "head")
            self.made.append(f"self.{name} = nn.ModuleDict({{{key!r}: {made}}})")
            return f"self.{name}[{key!r}]"
        if way < 0.95:
            odd = self.choose("graph", "code", "_generated_add_0", "scale", "module", "input", "weight")
            if all(f"self.{odd} =" not in line for line in self.made):
                self.made.append(f"self.{odd} = {made}")
                return f"self.{odd}"
        self.made.append(f"self.{name} = {made if is_alone else f'nn.Sequential({made})'}")
        return f"self.{name}"

    def attribute(self, place: str, made: str) -> None:
        """Give the class an attribute; a tensor may be a buffer, or one that torch does not know of."""
        is_tensor = made.startswith("torch.")
        is_buffer = is_tensor and self.maybe(0.6)
        name = place.removeprefix("self.")
        self.made.append(f'self.register_buffer("{name}", {made})' if is_buffer else f"{place} = {made}")

    def line(self, text: str) -> None:
        self.body.append(text)

    def let(self, expression: str, channels: int, height: int, width: int, stem: str = "x") -> Value:
        """A new value."""
        value = Value(self.name(stem), channels, height, width)
        self.line(f"{value.name} = {expression}")
        self.values.append(value)
        return value

    def alike(self, value: Value) -> Value | None:
        """Another value of the same shape."""
        others = [v for v in self.values if v.shape == value.shape and v.name != value.name]
        return self.random.choice(others) if others else None

    def unread(self) -> list[Value]:
        """Values that no later line reads: symbolic trace drops them, where a run of the model does not."""
        return [v for v in self.values[:-1] if not any(_reads(line, v.name) for line in self.body)]

    def last(self) -> Value:
        """The result of a method or block, with all that nothing else has read."""
        for value in self.unread():
            last = self.values[-1]
            self.let(f"{last.name} + {value.name}.mean((1, 2, 3), keepdim=True)", *last.shape)
        return self.values[-1]

    def grow(self, idioms: list[Callable[[Writer], None]], count: int) -> None:
        for _ in range(count):
            idiom = self.random.choice(idioms)
            if idiom.is_traceable or self.is_wrapped or not self.source.is_traceable:  # type: ignore[attr-defined]
                idiom(self)
                self.source.used.add(getattr(idiom, "name", "") or idiom.__name__)

    @contextmanager
    def apart(self, values: list[Value]) -> Iterator[list[str]]:
        """Write a method's body: its lines are collected apart, with other values alive."""
        kept = self.values, self.body
        self.values, self.body = list(values), []
        try:
            yield self.body
        finally:
            self.values, self.body = kept

    def text(self, name: str, arguments: str, ending: list[str]) -> str:
        lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.made + self.prepared]
        for method in self.methods:
            lines += ["", *[f"    {line}" for line in method]]
        lines += ["", f"    def forward(self{arguments}):", *[f"        {line}" for line in self.body + ending]]
        return "\n".join(lines)
