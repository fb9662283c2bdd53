"""Every operator of the table in every form that a model can write it: module, function, method, Python operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


@dataclass(frozen=True)
class Case:
    """One way to write one operator.

    Args:
        name: the test's name.
        make: makes the float module; its forward is written as a user writes it.
        shapes: shapes of the quantized inputs.
        low, high: range of the inputs.
        others: makes further inputs that stay as they are, such as positions or masks; it gets a generator.
        picks: the positions of the quantized values where the operator gives a tuple; None: it gives one tensor. An
            empty tuple: it gives no values, only positions, booleans or real numbers.
        formats: formats to try.
        out_format: the format of the result where it is not that of the qconfig.
        steps8, steps16: largest distance from the float operator on the same inputs, in output steps.
        train_steps, train_steps16: largest distance between the training route and the exact integers, in output steps,
            for int8 and int16.
        is_smooth: the gradient exists everywhere, so its direction is compared with float's.
        has_weight: compare with float on rounded weights: what is left is the error of the arithmetic.
        differing: largest share of positions or booleans that may differ from float's (ties on the grid).
        march: the chip on which all routes are compared.
    """

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((2, 6, 7, 9),)
    low: float = -2.0
    high: float = 2.0
    others: Callable[[torch.Generator], tuple[Tensor, ...]] | None = None
    picks: tuple[int, ...] | None = None
    formats: tuple[str, ...] = ("qint8", "qint16")
    out_format: str = ""
    steps8: float = 0.51
    steps16: float = 0.51
    train_steps: float = 1.0
    train_steps16: float = 1.0
    is_smooth: bool = True
    has_weight: bool = False
    differing: float = 0.0
    march: March = March.BAYES

    def inputs(self, seed: int = 1) -> tuple[Tensor, ...]:
        """Inputs of the model, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        floats = tuple(torch.rand(s, generator=generator) * (self.high - self.low) + self.low for s in self.shapes)
        return floats if self.others is None else (*floats, *self.others(generator))

    def model(self) -> nn.Module:
        """The float model: stubs around the operator."""
        torch.default_generator.manual_seed(0)  # a hundred times as fast as torch.manual_seed
        return bench(self.make(), len(self.shapes), len(self.inputs()), self.picks).eval()


class Body(nn.Module):
    """A function in a module of its own, so that what it calls has a scope."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Functional(nn.Module):
    """A FloatFunctional and what is called on it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.op = FloatFunctional()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.op, *inputs)


class Bench(nn.Module):
    """QuantStubs, the operator, DeQuantStubs; gives what the operator gives, and the real values of that."""

    def __init__(self, body: nn.Module, count: int, picks: tuple[int, ...] | None) -> None:
        super().__init__()
        for index in range(count):
            self.add_module(f"quant_{index}", QuantStub())
        self.body, self.dequant, self.count, self.picks = body, DeQuantStub(), count, picks

    def run(self, *inputs: Tensor) -> Any:
        quantized = [getattr(self, f"quant_{i}")(x) for i, x in enumerate(inputs[: self.count])]
        y = self.body(*quantized, *inputs[self.count :])
        if self.picks is None:
            return y, self.dequant(y)
        return (y, *[self.dequant(y[i]) for i in self.picks])


# Symbolic trace wants the arguments by name.
_FORWARDS: list[Callable[..., Any]] = [
    lambda self, a: self.run(a),
    lambda self, a, b: self.run(a, b),
    lambda self, a, b, c: self.run(a, b, c),
    lambda self, a, b, c, d: self.run(a, b, c, d),
    lambda self, a, b, c, d, e: self.run(a, b, c, d, e),
    lambda self, a, b, c, d, e, f: self.run(a, b, c, d, e, f),
]
_BENCHES = [type(f"Bench{n + 1}", (Bench,), {"forward": forward}) for n, forward in enumerate(_FORWARDS)]


def bench(body: nn.Module, count: int = 1, total: int | None = None, picks: tuple[int, ...] | None = None) -> nn.Module:
    """A model of `count` quantized inputs, and plain ones up to `total`."""
    return _BENCHES[(total or count) - 1](body, count, picks)


def cases(*cases: tuple, **common: Any) -> list[Case]:
    """Cases with common facts; a function becomes a `Body`."""
    out = []
    for name, what, *more in cases:
        facts = {**common, **(more[0] if more else {})}
        is_plain = isinstance(what, type) or getattr(what, "__name__", "") == "make"
        out.append(Case(name, what if is_plain else (lambda w=what: Body(w)), **facts))
    return out


def module(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return cls(*args, **kwargs)

    return make


def functional(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Functional(function)

    return make
