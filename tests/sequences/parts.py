"""The operators that sequences are made of: the cases of the operator table, and layers in the forms that fuse."""

from __future__ import annotations

import functools
import hashlib
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March
from tests.operators.cases import CASES, Case
from tests.operators.cases.base import cases, functional, module
from tests.operators.cases.calls import rows_of


class Joined(nn.Module):
    """A layer, the sum with a second input, and what follows."""

    def __init__(self, layer: nn.Module, *rest: nn.Module) -> None:
        super().__init__()
        self.layer, self.rest = layer, nn.Sequential(*rest)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.rest(self.layer(x) + y)


def _norm(channels: int = 6) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm.eval()


def _conv(**settings: Any) -> nn.Module:
    return nn.Conv2d(6, 6, 3, padding=1, **settings)


# What the cases lack: layers that give what they take, so that anything may follow, and the fused forms.
_TWICE = dict(shapes=((2, 6, 7, 9), (2, 6, 7, 9)))
_DEEP: dict[str, Any] = dict(shapes=((1, 128, 4, 3),))
LAYERS = cases(
    ("same-conv", module(_conv)),
    ("same-conv-no-bias", module(_conv, bias=False)),
    ("same-conv-depthwise", module(_conv, groups=6)),
    ("same-conv-stride", module(nn.Conv2d, 6, 6, 3, 2, 1)),
    ("same-conv-1x1", module(nn.Conv2d, 6, 6, 1)),
    ("same-conv-transpose", module(nn.ConvTranspose2d, 6, 6, 3, 1, 1)),
    ("same-linear", module(nn.Linear, 9, 9)),
    ("same-linear-no-bias", module(nn.Linear, 9, 9, bias=False)),
    ("conv-relu", module(lambda: nn.Sequential(_conv(), nn.ReLU()))),
    ("conv-relu6", module(lambda: nn.Sequential(_conv(), nn.ReLU6()))),
    ("conv-bn-relu", module(lambda: nn.Sequential(_conv(bias=False), _norm(), nn.ReLU()))),
    ("conv-add", module(lambda: Joined(_conv())), _TWICE),
    ("conv-add-relu", module(lambda: Joined(_conv(), nn.ReLU())), _TWICE),
    ("conv-bn-add-relu6", module(lambda: Joined(nn.Sequential(_conv(bias=False), _norm()), nn.ReLU6())), _TWICE),
    ("conv-transpose-relu", module(lambda: nn.Sequential(nn.ConvTranspose2d(6, 6, 3, 1, 1), nn.ReLU()))),
    ("linear-relu", module(lambda: nn.Sequential(nn.Linear(9, 9), nn.ReLU()))),
    ("linear-add", module(lambda: Joined(nn.Linear(9, 9))), _TWICE),
    ("functional-add-relu-twice", functional(lambda f, x, y: f.add_relu(x, y)), _TWICE),
    ("deep-conv", module(nn.Conv2d, 128, 128, 3, padding=1), _DEEP),
    ("deep-conv-1x1-relu", module(lambda: nn.Sequential(nn.Conv2d(128, 128, 1), nn.ReLU())), _DEEP),
    ("deep-conv-add", module(lambda: Joined(nn.Conv2d(128, 128, 1))), dict(shapes=_DEEP["shapes"] * 2)),
    ("deep-linear", module(nn.Linear, 128, 128), dict(shapes=((2, 3, 128),))),
    ("matmul-of-rows", lambda x, y: x @ y.transpose(-1, -2), _TWICE),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """An operator of a sequence: a case that takes quantized tensors."""

    case: Case

    def __deepcopy__(self, memo: Any) -> Part:
        """Models hold it and are copied, and nothing in it is changed."""
        return self

    @functools.cached_property
    def rows(self) -> list[str]:
        """The rows of the operator table that the case calls: the first takes its input, the last gives its result."""
        return [row.name for row in rows_of(self.case) if not row.is_stub and not row.is_functional]

    @functools.cached_property
    def body(self) -> nn.Module:
        """The float operator."""
        torch.manual_seed(0)
        return self.case.make().eval()

    def plain(self) -> tuple[Tensor, ...]:
        """Inputs that are not quantized."""
        return self.case.inputs()[len(self.case.shapes) :]

    def shapes(self, position: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the quantized inputs if one of them has this shape: operands of equal shape stay equal."""
        if len(set(self.case.shapes)) == 1:
            return (shape,) * len(self.case.shapes)
        return tuple(shape if i == position else own for i, own in enumerate(self.case.shapes))


@functools.cache
def parts() -> list[Part]:
    """Every case that takes quantized tensors."""
    return [Part(case) for case in [*CASES, *LAYERS] if case.shapes and case.march is March.BAYES]


def _value(part: Part, result: Any) -> Tensor | None:
    """What the next operator gets: the result, or the first of several that is quantized."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, (tuple, list)) and part.case.picks:
        value = result[part.case.picks[0]]
        return value if isinstance(value, Tensor) else None
    return None


Form = tuple[tuple[int, ...], torch.dtype]
Key = tuple[int, int, int]


@functools.cache
def _given(part: Part, position: int, form: Form) -> Form | None:
    """Shape and type of the float operator's result; None if it does not take a tensor of this form there."""
    shape, dtype = form
    torch.manual_seed(3)
    inputs = [torch.rand(own) for own in part.shapes(position, shape)]
    inputs[position] = inputs[position] > 0.5 if dtype == torch.bool else inputs[position].to(dtype)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = _value(part, part.body(*inputs, *part.plain()))
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return None if value is None or value.numel() == 0 else (tuple(value.shape), value.dtype)


@dataclass(frozen=True)
class Pair:
    """Two operators, the second of which takes the result of the first at a position.

    Args:
        shape: of the first input of the first operator.
        between: shape and type of what the second takes.
    """

    first: Part
    second: Part
    position: int
    shape: tuple[int, ...]
    between: Form

    @property
    def gives_numbers(self) -> bool:
        """False for positions and booleans between the operators."""
        return self.between[1].is_floating_point

    @property
    def is_float_code(self) -> bool:
        """Does the second operator run in float? Positions and booleans have no scale: real numbers of them are its."""
        return not self.gives_numbers

    @property
    def has_one_answer(self) -> bool:
        """False where torch may choose between equal positions."""
        return self.gives_numbers or not _CHOOSING.intersection(self.second.rows[:1])

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.first.case.name} > {self.second.case.name}.{self.position}"

    @property
    def key(self) -> Key:
        """What `pair_at` finds it by, in another process too."""
        return (parts().index(self.first), parts().index(self.second), self.position)

    def module(self) -> nn.Module:
        """The two operators on quantized tensors."""
        return PairModule(self)

    def inputs(self, seed: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs that are to be quantized, and plain ones: of the first operator, then of the second."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.first.case, s) for s in self.first.shapes(0, self.shape)]
        others = enumerate(self.second.shapes(self.position, self.between[0]))
        shapes += [(self.second.case, s) for i, s in others if i != self.position]
        floats = [torch.rand(s, generator=generator) * (c.high - c.low) + c.low for c, s in shapes]
        return floats, [*self.first.plain(), *self.second.plain()]


class PairModule(nn.Module):
    """The two operators on quantized tensors."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = pair.first.case.make(), pair.second.case.make()
        self.pair = pair

    def forward(self, quantized: list[Tensor], plain: list[Tensor]) -> Any:
        pair = self.pair
        count, own = len(pair.first.case.shapes), len(pair.first.plain())
        value = self.first(*quantized[:count], *plain[:own])
        if pair.first.case.picks:
            value = value[pair.first.case.picks[0]]
        operands = list(quantized[count:])
        operands.insert(pair.position, value)
        return self.second(*operands, *plain[own:])


def order_of(*names: Any) -> int:
    """A number that looks random and is the same in every run."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:6], "big")


# Of equal positions, which are plain integers, torch chooses any; of equal integers with a scale, the first.
_CHOOSING = {"topk", "sort", "argsort", "msort", "kthvalue", "median", "median_dim"}


def found(first: Part, second: Part, position: int) -> Pair | None:
    """The two as a pair, on inputs of the first operator's shape or on those that the second has."""
    for shape in (first.case.shapes[0], second.case.shapes[position]):
        form = _given(first, 0, (shape, torch.float32))
        if form is not None and _given(second, position, form) is not None:
            pair = Pair(first, second, position, shape, form)
            if _runs(pair):
                return pair
    return None


def pair_at(key: Key) -> Pair | None:
    """The pair with this key."""
    return found(parts()[key[0]], parts()[key[1]], key[2])


def _runs(pair: Pair) -> bool:
    """Does the second operator take the very result of the first? A `view` does not take every layout."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.module().eval()(*pair.inputs())
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


@functools.cache
def _by_row() -> tuple[dict[str, list[Part]], dict[str, list[tuple[Part, int]]]]:
    firsts: dict[str, list[Part]] = {}
    seconds: dict[str, list[tuple[Part, int]]] = {}
    for part in parts():
        if part.rows:
            firsts.setdefault(part.rows[-1], []).append(part)
            seconds.setdefault(part.rows[0], []).extend((part, i) for i in range(len(part.case.shapes)))
    return firsts, seconds


def row_pairs() -> list[tuple[str, str]]:
    """All ordered pairs of rows, in an order that looks random and is the same in every run."""
    firsts, seconds = _by_row()
    return sorted(itertools.product(firsts, seconds), key=lambda rows: order_of(*rows))


def pair_of(rows: tuple[str, str], salt: str = "") -> Pair | None:
    """Cases of two rows that can follow one another; another salt gives other cases."""
    firsts, seconds = _by_row()
    ordered = sorted(firsts[rows[0]], key=lambda part: order_of(salt, rows, part.case.name))
    behind = sorted(seconds[rows[1]], key=lambda item: order_of(salt, rows, item[0].case.name, item[1]))
    tries = (found(first, second, position) for first in ordered for second, position in behind)
    return next((pair for pair in tries if pair is not None and pair.has_one_answer), None)


@functools.cache
def sample(count: int) -> list[Pair]:
    """Pairs of any cases, numbers between them; the same in every run."""
    chosen: list[Pair] = []
    for attempt in itertools.count():
        first, second = (parts()[order_of(attempt, place) % len(parts())] for place in (1, 2))
        pair = found(first, second, order_of(attempt, 3) % len(second.case.shapes))
        if pair is not None and pair.gives_numbers:
            chosen.append(pair)
        if len(chosen) == count:
            break
    return chosen
