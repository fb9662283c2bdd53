"""What each chip takes: number formats and limits of an operator, as data.

`Operator` rows carry one `Support` for each group of chips. `prepare` refuses what a chip does not have,
`check_model` compares a converted model with formats and limits, and `docs/operators.md` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from horizon_plugin_pytorch.march import March

# Chips that share one column of the published tables.
GROUPS: dict[str, tuple[March, ...]] = {
    "bernoulli2": (March.BERNOULLI, March.BERNOULLI2),
    "bayes": (March.BAYES, March.BAYES_E),
    "nash-e": (March.NASH_E, March.NASH_M, March.NASH_B, March.NASH_B_LITE, March.NASH_B_PLUS),
    "nash-h": (March.NASH_H, March.NASH_P),
}
INT8, INTS, WIDE = ("qint8",), ("qint8", "qint16"), ("qint8", "qint16", "qint32")


def group_of(march: March) -> str:
    """The column of the tables that a chip belongs to.

    >>> group_of(March.BAYES_E)
    'bayes'
    """
    return next(name for name, members in GROUPS.items() if march in members)


@dataclass(frozen=True)
class TensorFact:
    """Shape and number format of a tensor that an operator met.

    Args:
        is_constant: of an input: is it made of parameters and buffers alone?
        is_read: of an output: does another operator of the quantized part read it, other than a DeQuantStub?
    """

    shape: tuple[int, ...]
    format: str
    is_constant: bool = False
    is_read: bool = False


@dataclass(frozen=True)
class Use:
    """One call of an operator in a converted model: what limits are checked against.

    Args:
        operator: the row's name.
        place: where it is called, for messages.
        inputs, outputs: the tensors it met.
        attributes: its geometry by name: ``kernel_size``, ``stride``, ``padding``, ...
    """

    operator: str
    place: str
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, name: str) -> tuple[float, ...]:
        """All numbers of that name: of the geometry, or of an input's shape; empty if this use has none.

        ``rank`` and ``inputs`` (a count) are known of every use. ``W``, ``H`` and ``C`` are the sizes of the last, last
        but one and last but two axes, ``HW`` the product of the last two, ``N`` the size of the first of four.

        >>> use = Use("conv2d", "", (TensorFact((1, 8, 4, 5), "qint8"),), attributes={"kernel_size": (3, 1)})
        >>> use.numbers("kernel_size"), use.numbers("C"), use.numbers("HW"), use.numbers("groups")
        ((3, 1), (8,), (20,), ())
        """
        if name in self.attributes:
            value = self.attributes[name]
            values = value if isinstance(value, (tuple, list)) else (value,)
            return tuple(v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool))
        if name == "inputs":
            return (len(self.inputs),)
        if name == "rank":
            return tuple(len(x.shape) for x in self.inputs)
        return tuple(size for x in self.inputs if (size := _size(x.shape, name)) is not None)


def _size(shape: tuple[int, ...], name: str) -> int | None:
    """The size of an axis by its letter, where the tensor has it."""
    if name == "HW":
        return shape[-2] * shape[-1] if len(shape) > 1 else None
    axis = {"N": 4, "C": 3, "H": 2, "W": 1}.get(name, len(shape) + 1)
    is_there = len(shape) == 4 if name == "N" else axis <= len(shape)
    return shape[-axis] if is_there else None


@dataclass(frozen=True)
class Limit:
    """One published limit.

    Args:
        text: as the documents show it, such as ``1 <= kernel_size <= 7``.
        holds: does a use keep it?
        found: what the use has instead, for the message.
        advice: what to do.
        bounds: for a limit of one number, its name, lowest and highest value.
    """

    text: str
    holds: Callable[[Use], bool]
    found: Callable[[Use], str] = lambda use: ", ".join(str(x.shape) for x in use.inputs)
    advice: str = ""
    bounds: tuple[str, float, float] | None = None


def between(name: str, low: float, high: float, advice: str = "") -> Limit:
    """``low <= name <= high`` for every number of that name that `Use.numbers` finds."""
    text = f"{name} <= {high}" if low == float("-inf") else f"{low} <= {name} <= {high}"
    return Limit(
        text,
        lambda use: all(low <= v <= high for v in use.numbers(name)),
        lambda use: f"{name} {', '.join(map(str, use.numbers(name)))}",
        advice,
        (name, low, high),
    )


def at_most(name: str, high: float, advice: str = "") -> Limit:
    """``name <= high``."""
    return between(name, float("-inf"), high, advice)


@dataclass(frozen=True)
class Support:
    """What one group of chips takes.

    Args:
        inputs, outputs, weights: formats of the published tables.
        limits: published limits.
        note: anything else that the tables say, for the page.
    """

    inputs: tuple[str, ...] = INTS
    outputs: tuple[str, ...] = INTS
    weights: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    note: str = ""


Marches = Mapping[str, Support]
_SAME: Any = object()


def on(
    *,
    bernoulli2: Support | None = None,
    bayes: Support | None = None,
    nash: Support | None = _SAME,
    nash_h: Support | None = _SAME,
) -> Marches:
    """Support by group; None means that the chips do not have it.

    The published list of the NASH chips breaks off early. Where it is silent they take what BAYES takes, in int16 as
    well, which their guides try first, and without BAYES's limits; `nash_h` (NASH_H and NASH_P) also takes float16.

    >>> on(bayes=Support(INT8, INT8))["nash-h"].inputs
    ('qint8', 'qint16', 'float16')
    """
    if nash is _SAME:
        nash = None if bayes is None else Support(_with_int16(bayes.inputs), _with_int16(bayes.outputs), bayes.weights)
    if nash_h is _SAME:
        nash_h = None if nash is None else Support(*_with_float16(nash), nash.weights, nash.limits, nash.note)
    found = {"bernoulli2": bernoulli2, "bayes": bayes, "nash-e": nash, "nash-h": nash_h}
    return {group: support for group, support in found.items() if support is not None}


def _with_int16(formats: tuple[str, ...]) -> tuple[str, ...]:
    numbers = [name for name in WIDE if name in (*INTS, *formats)]
    return (*(name for name in formats if name not in WIDE), *numbers) if _has_numbers(formats) else formats


def _with_float16(support: Support) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple((*f, "float16") if _has_numbers(f) else f for f in (support.inputs, support.outputs))  # type: ignore[return-value]


def _has_numbers(formats: tuple[str, ...]) -> bool:
    return any(name in WIDE for name in formats)


EVERYWHERE = on(bernoulli2=Support(), bayes=Support())
FROM_BAYES = on(bayes=Support())

# What the documents say of a chip's operators in general.
GENERAL: dict[str, tuple[Limit, ...]] = {
    "bernoulli2": (
        Limit("4 axes", lambda use: all(len(x.shape) == 4 for x in use.inputs if x.format in WIDE),
              advice="keep tensors in NCHW until the DeQuantStub"),
        at_most("N", 128, "use a smaller batch"),
    ),
    "bayes": (
        at_most("N", 4096, "use a smaller batch"),
        at_most("C", 65536), at_most("H", 65536), at_most("W", 65536),
        Limit("a tensor below 1 GB", lambda use: all(_bytes(x) < 1 << 30 for x in use.inputs),
              advice="use a smaller batch or image"),
    ),
    "nash-e": (),
    "nash-h": (),
}  # fmt: skip


def _bytes(x: TensorFact) -> int:
    width = {"qint8": 1, "qint16": 2}.get(x.format, 4)
    return width * math.prod(x.shape)
