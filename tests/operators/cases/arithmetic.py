"""Sums, products, matrix products, numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch import nn as horizon_nn
from tests.operators.cases.base import cases, functional, module

PAIR = ((2, 6, 5, 7), (2, 6, 5, 7))
MATRICES = ((2, 3, 5, 8), (2, 3, 8, 4))
POSITIVE = dict(low=1.0, high=4.0)  # so far from 0 that the reciprocals of rounded divisors stay in the observed range
TWO = dict(steps8=1.03, steps16=1.03)  # two operators, each of which rounds
SCALAR = dict(steps8=0.51, steps16=0.51)

ARITHMETIC = cases(
    ("functional-add", functional(lambda f, x, y: f.add(x, y))),
    ("functional-sub", functional(lambda f, x, y: f.sub(x, y))),
    ("functional-mul", functional(lambda f, x, y: f.mul(x, y))),
    ("functional-cat", functional(lambda f, x, y: f.cat((x, y), dim=1))),
    ("functional-cat-default-dim", functional(lambda f, x, y: f.cat([x, y]))),
    ("functional-add-relu", functional(lambda f, x, y: f.add_relu(x, y)), dict(is_smooth=False)),
    ("torch-add", lambda x, y: torch.add(x, y)),
    ("torch-add-other", lambda x, y: torch.add(x, other=y)),
    ("method-add", lambda x, y: x.add(y)),
    ("method-add-in-place", lambda x, y: x.add_(y)),
    ("operator-add", lambda x, y: x + y),
    ("operator-iadd", lambda x, y: _in_place(x, y, "+")),
    ("torch-sub", lambda x, y: torch.sub(x, y)),
    ("method-sub", lambda x, y: x.sub(y)),
    ("operator-sub", lambda x, y: x - y),
    ("operator-isub", lambda x, y: _in_place(x, y, "-")),
    ("torch-mul", lambda x, y: torch.mul(x, y)),
    ("method-mul-in-place", lambda x, y: x.mul_(y)),
    ("operator-mul", lambda x, y: x * y),
    ("operator-imul", lambda x, y: _in_place(x, y, "*")),
    ("torch-cat", lambda x, y: torch.cat((x, y), 1)),
    ("torch-cat-dim", lambda x, y: torch.cat([x, y], dim=-1)),
    ("torch-concat", lambda x, y: torch.concat((x, y), dim=2)),
    ("cat-of-three", lambda x, y: torch.cat((x, y, x), 1)),
    ("add-broadcast", lambda x, y: x + y, dict(shapes=((2, 6, 5, 7), (1, 6, 1, 1)))),
    ("add-broadcast-left", lambda x, y: x + y, dict(shapes=((6, 1, 1), (2, 6, 5, 7)))),
    ("sub-broadcast-both", lambda x, y: x - y, dict(shapes=((2, 1, 5, 7), (1, 6, 1, 7)))),
    ("mul-broadcast", lambda x, y: x * y, dict(shapes=((2, 6, 5, 7), (2, 6, 1, 1)))),
    ("mul-broadcast-left", lambda x, y: x * y, dict(shapes=((2, 1, 5, 7), (2, 6, 5, 7)))),
    ("add-to-itself", lambda x, y: x + x),
    ("square", lambda x, y: x * x),
    ("add-alpha", lambda x, y: torch.add(x, y, alpha=0.3)),
    ("sub-alpha", lambda x, y: x.sub(y, alpha=2)),
    ("rsub-tensors", lambda x, y: torch.rsub(x, y)),
    ("rsub-alpha", lambda x, y: torch.rsub(x, y, alpha=0.5)),
    ("functional-stack", functional(lambda f, x, y: f.stack([x, y], 1))),
    ("stack", lambda x, y: torch.stack((x, y))),
    ("stack-dim", lambda x, y: torch.stack([x, y, x], dim=-1)),
    ("cat-of-one", lambda x, y: torch.cat([x]) + y, TWO),
    ("functional-maximum", functional(lambda f, x, y: f.maximum(x, y)), dict(is_smooth=False)),
    ("functional-minimum", functional(lambda f, x, y: f.minimum(x, y)), dict(is_smooth=False)),
    ("torch-maximum", lambda x, y: torch.maximum(x, y), dict(is_smooth=False)),
    ("torch-minimum", lambda x, y: torch.minimum(x, y), dict(is_smooth=False)),
    ("method-maximum", lambda x, y: x.maximum(y), dict(is_smooth=False)),
    ("method-minimum", lambda x, y: x.minimum(other=y), dict(is_smooth=False)),
    ("torch-max-of-two", lambda x, y: torch.max(x, y), dict(is_smooth=False)),
    ("method-min-of-two", lambda x, y: x.min(y), dict(is_smooth=False)),
    ("torch-fmax", lambda x, y: torch.fmax(x, y), dict(is_smooth=False)),
    ("torch-fmin", lambda x, y: torch.fmin(x, y), dict(is_smooth=False)),
    ("maximum-broadcast", lambda x, y: torch.maximum(x, y), dict(is_smooth=False, shapes=((2, 1, 5, 7), (6, 1, 7)))),
    ("maximum-same-scale", lambda x, y: torch.maximum(x, x.flip(1)) + y, dict(**TWO, is_smooth=False)),
    ("add-0d", lambda x, y: x + y, dict(shapes=((), ()))),
    ("mul-0d", lambda x, y: x * y, dict(shapes=((), ()))),
    ("maximum-0d", lambda x, y: torch.maximum(x, y), dict(shapes=((), ()), is_smooth=False)),
    shapes=PAIR,
    steps8=0.53,  # 15-bit factors of a common shift add up to 2 % of a step
    steps16=0.53,
)


def _in_place(x: Any, y: Any, operator: str) -> Any:
    if operator == "+":
        x += y
    elif operator == "-":
        x -= y
    elif operator == "*":
        x *= y
    elif operator == "/":
        x /= y
    return x


MATMULS = cases(
    ("functional-matmul", functional(lambda f, x, y: f.matmul(x, y))),
    ("functional-matmul-y-trans", functional(lambda f, x, y: f.matmul(x, y, y_trans=True)),
     dict(shapes=((2, 3, 5, 8), (2, 3, 4, 8)))),
    ("functional-matmul-x-trans", functional(lambda f, x, y: f.matmul(x, y, True, False)),
     dict(shapes=((2, 3, 8, 5), (2, 3, 8, 4)))),
    ("torch-matmul", lambda x, y: torch.matmul(x, y)),
    ("torch-bmm", lambda x, y: torch.bmm(x, y), dict(shapes=((3, 5, 8), (3, 8, 4)))),
    ("operator-matmul", lambda x, y: x @ y),
    ("method-matmul-transposed", lambda x, y: x.matmul(y.transpose(-2, -1)), dict(shapes=((2, 3, 5, 8), (2, 3, 4, 8)))),
    ("matmul-broadcast", lambda x, y: x @ y, dict(shapes=((2, 3, 5, 8), (8, 4)))),
    ("matmul-2d", lambda x, y: x @ y, dict(shapes=((5, 8), (8, 4)))),
    shapes=MATRICES,
)  # fmt: skip

SCALARS = cases(
    ("functional-add-scalar", functional(lambda f, x: f.add_scalar(x, 0.7))),
    ("functional-mul-scalar", functional(lambda f, x: f.mul_scalar(x, -1.3))),
    ("add-number", lambda x: x + 3),
    ("number-add", lambda x: 0.25 + x),
    ("iadd-number", lambda x: _in_place(x, 1.5, "+")),
    ("sub-number", lambda x: x - 0.3),
    ("number-sub", lambda x: 1 - x),
    ("torch-rsub", lambda x: torch.rsub(x, 2.0)),
    ("mul-number", lambda x: x * 0.37),
    ("number-mul", lambda x: -2 * x),
    ("imul-number", lambda x: _in_place(x, 0.5, "*")),
    ("div-number", lambda x: x / 3),
    ("idiv-number", lambda x: _in_place(x, 8, "/")),
    ("torch-div-number", lambda x: torch.div(x, 6.0)),
    ("method-div-number", lambda x: x.div(1.7)),
    ("functional-div-number", functional(lambda f, x: f.div(x, 3))),
    ("functional-sub-number", functional(lambda f, x: f.sub(x, 0.4))),
    ("mul-number-as-tensor", lambda x: x * torch.tensor(0.7)),
    ("add-number-alpha", lambda x: torch.add(x, 2, alpha=0.3)),
    ("operator-neg", lambda x: -x),
    ("torch-neg", lambda x: torch.neg(x)),
    ("method-neg", lambda x: x.neg()),
    ("torch-add-number", lambda x: torch.add(x, 0.1)),
    ("torch-mul-number", lambda x: torch.mul(x, 0.1)),
    **SCALAR,
)


DIVISIONS = cases(
    ("div", module(horizon_nn.Div), POSITIVE),
    ("operator-div", lambda x, y: x / y, POSITIVE),
    ("operator-idiv", lambda x, y: _in_place(x, y, "/"), POSITIVE),
    ("torch-div", lambda x, y: torch.div(x, y), POSITIVE),
    ("torch-true-divide", lambda x, y: torch.true_divide(x, y), POSITIVE),
    ("method-div", lambda x, y: x.div(y), POSITIVE),
    ("div-broadcast", lambda x, y: x / y, dict(**POSITIVE, shapes=((2, 6, 5, 7), (2, 1, 5, 7)))),
    ("number-div", lambda x, y: 3.5 / x * y, dict(**POSITIVE, steps8=1.03, steps16=2.6)),
    ("one-div", lambda x, y: 1 / x * y, dict(**POSITIVE, steps8=1.03, steps16=2.6)),
    shapes=PAIR,
    steps8=0.53,
    steps16=2.1,  # the reciprocal is within 1.5 steps of int16, the product rounds once more
    train_steps16=3,
)

QUOTIENTS = cases(
    ("functional-div", functional(lambda f, x, y: f.div(x, y))),
    ("functional-div-0d", functional(lambda f, x, y: f.div(x, y)), dict(shapes=((), ()))),
    ("functional-number-div", functional(lambda f, x, y: f.div(2.5, y))),
    shapes=PAIR,
    **POSITIVE,
    steps16=0.54,  # a multiplier has 20 bits: 3 % of a step at 32,767
)


def _mask(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.rand((2, 6, 5, 7), generator=generator) < 0.4,)


def _integer_mask(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 2, (2, 1, 5, 7), generator=generator),)


class _WhereModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = horizon_nn.Where()

    def forward(self, x: Any, y: Any, mask: Any) -> Any:
        return self.where(mask, x, y)


def _assigned(x, y):
    x = x * 1
    x[:, 1:3] = y[:, :2]
    return x


def _filled(x, y):
    x = x * 1
    x[..., 0] = 0.5
    x[x < 0] = 0.0
    return x


# The parts are in int16: in int16 their roundings count.
COMBINATIONS = cases(
    ("torch-addcmul", lambda x, a, b: torch.addcmul(x, a, b)),
    ("torch-addcmul-names", lambda x, a, b: torch.addcmul(input=x, tensor1=a, tensor2=b, value=-0.5)),
    ("method-addcmul-in-place", lambda x, a, b: x.addcmul_(a, b, value=2)),
    ("torch-lerp", lambda x, y: torch.lerp(x, y, 0.3), dict(shapes=PAIR)),
    ("method-lerp-negative", lambda x, y: x.lerp(y, -0.3), dict(shapes=PAIR)),
    ("torch-lerp-tensor", lambda x, a, b: torch.lerp(x, a, weight=b)),
    ("method-lerp-in-place", lambda x, a, b: x.lerp_(a, b)),
    shapes=(*PAIR, PAIR[0]),
    steps8=0.53,
    steps16=1.6,
)
QUOTIENT_SUMS = cases(
    ("torch-addcdiv", lambda x, a, b: torch.addcdiv(x, a, b)),
    ("method-addcdiv-value", lambda x, a, b: x.addcdiv(a, b, value=-0.5)),
    shapes=(*PAIR, PAIR[0]),
    steps8=1.1,
    steps16=4.0,
    train_steps=2.0,
    train_steps16=4.0,
    **POSITIVE,
)
LOGARITHMS_OF_SUMS = cases(
    ("torch-logsumexp", lambda x: torch.logsumexp(x, 1)),
    ("method-logsumexp", lambda x: x.logsumexp(dim=-1, keepdim=True)),
    ("special-logsumexp", lambda x: torch.special.logsumexp(x, (2, 3))),
    steps8=0.6,
    steps16=3.0,
    train_steps16=3.0,
)

CHOICES = cases(
    ("assign", _assigned),
    ("assign-number", _filled),
    ("where-compared", lambda x, y: torch.where(x > y, x, y)),
    ("where-plain-mask", lambda x, y, m: torch.where(m, x, y), dict(others=_mask)),
    ("where-module", _WhereModule, dict(others=_mask)),
    ("where-method", lambda x, y, m: x.where(m, y), dict(others=_mask)),
    ("where-number", lambda x, y: torch.where(x > 0.3, x, -0.7) + y, TWO),
    ("where-number-first", lambda x, y: torch.where(x > 0.3, 1.5, y)),
    ("where-number-as-tensor", lambda x, y: torch.where(x > y, torch.tensor(-0.5), x)),
    ("where-zero", lambda x, y: torch.where(x > y, x, 0.0)),
    ("where-numbers", lambda x, y: torch.where(x > y, 1.0, 0.25) + x, TWO),
    ("where-broadcast", lambda x, y: torch.where(y > 0, x, y), dict(shapes=((6, 5, 1), (2, 1, 1, 7)))),
    ("masked-fill", lambda x, y: x.masked_fill(x > y, 0.5)),
    ("masked-fill-zero", lambda x, y: x.masked_fill(x < y, 0.0) + y, TWO),
    ("masked-fill-in-place", lambda x, y: x.masked_fill_(y > 0, -1)),
    ("torch-masked-fill", lambda x, y: torch.masked_fill(x, x > y, 2.5)),
    ("masked-fill-integer-mask", lambda x, y, m: x.masked_fill(m == 0, 1.1) + y, dict(**TWO, others=_integer_mask)),
    ("mul-by-comparison", lambda x, y: x * (x > y)),
    ("mul-by-mask-as-float", lambda x, y: x * (y > 0).float()),
    ("mul-by-mask-to-float", lambda x, y: (y > 0).to(torch.float32) * x),
    ("add-mask", lambda x, y: x + (x > y)),
    ("mean-of-mask", lambda x, y: (x > y).float().mean(1) + x[:, 0], TWO),
    ("moved-mask", lambda x, y: torch.where((x > y).permute(1, 0, 2, 3).reshape(6, 2, 5, 7)[:, 0].unsqueeze(0), x, y)),
    is_smooth=False,  # a mask depends on which side of a step a value falls
    shapes=PAIR,
    steps8=0.53,
    steps16=0.53,
)


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(7) % 3 == 0)
        self.register_buffer("counts", torch.arange(7) % 2)
        self.register_buffer("limit", torch.tensor(0.4))
        self.register_buffer("limits", torch.linspace(-1, 1, 7))


class _BufferMask(_Buffers):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.where(self.mask, x, y)


class _BufferFill(_Buffers):
    def forward(self, x: Any, y: Any) -> Any:
        return x.masked_fill(self.counts == 0, 1.0) + y


class _BufferLimit(_Buffers):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.where((x > self.limit) & (y < self.limits), x, y)


BUFFERS = cases(
    ("where-buffer", _BufferMask),
    ("masked-fill-buffer", _BufferFill, TWO),
    ("compare-with-buffer", _BufferLimit),
    is_smooth=False,
    shapes=PAIR,
    steps8=0.53,
    steps16=0.53,
)


def _spelled(owner: Any, names: str, number: float | None = None) -> list[tuple[str, Any]]:
    """Comparisons by function, of two tensors or with a number."""
    found = []
    for name in names.split():

        def compare(x: Any, y: Any, name: str = name) -> Any:
            function = getattr(x if owner is torch.Tensor else owner, name)
            operands = (y if number is None else number,)
            return function(*operands) if owner is torch.Tensor else function(x, *operands)

        label = owner.__name__.rpartition(".")[2] if number is None else f"number-{number}"
        found.append((f"{label.strip('_')}-{name}", compare))
    return found


COMPARISONS = cases(
    *_spelled(torch, "eq ne lt le gt ge greater greater_equal less less_equal not_equal"),
    *_spelled(torch.Tensor, "eq ne lt le gt ge greater less_equal"),
    *_spelled(operator, "eq ne lt le gt ge"),
    *_spelled(operator, "eq ne lt le gt ge", 0.3),
    *_spelled(operator, "eq ne lt le gt ge", 0),
    ("number-beyond", lambda x, y: x < 1e6),
    ("number-left", lambda x, y: operator.le(0.5, x)),
    ("eq-of-one-scale", lambda x, y: x == x.amax(1, keepdim=True)),
    ("ge-of-one-scale", lambda x, y: x >= x.flip(1)),
    ("lt-broadcast", lambda x, y: x < y, dict(shapes=((2, 6, 1, 7), (5, 1)))),
    ("logical-and", lambda x, y: torch.logical_and(x > 0, y < x)),
    ("logical-or", lambda x, y: (x > 0).logical_or(y < x)),
    ("logical-xor", lambda x, y: torch.logical_xor(x > 0, y < x)),
    ("logical-not", lambda x, y: torch.logical_not(x > y)),
    ("logical-in-place", lambda x, y: (x > 0).logical_and_(y < x).logical_or_(y > 1).logical_xor_(x < y)),
    ("logical-of-values", lambda x, y: torch.logical_and(x, y).logical_not()),
    ("operator-and", lambda x, y: (x > 0) & (y > 0)),
    ("operator-or", lambda x, y: (x > 0) | (y > 0)),
    ("operator-xor", lambda x, y: (x > 0) ^ (y > 0)),
    ("operator-invert", lambda x, y: ~(x > y)),
    ("bitwise-and", lambda x, y: torch.bitwise_and(x > 0, y > 0)),
    ("and-plain", lambda x, y, m: m & (x > y), dict(others=_mask)),
    ("any", lambda x, y: (x > 1.5).any()),
    ("any-dim", lambda x, y: torch.any(x > y, 1, keepdim=True)),
    ("all", lambda x, y: (x > -1.5).all(dim=2)),
    ("compare-masks", lambda x, y: (x > 0) == (y > 0)),
    ("mask-is-zero", lambda x, y: (x > y) == 0),
    ("mask-reshaped", lambda x, y: (x > y).flatten(1).unsqueeze(0).transpose(1, 2)[..., :1]),
    ("where-integers", lambda x, y: torch.where(x > y, x.argmax(1, keepdim=True), -1)),
    ("mask-to-bool", lambda x, y: (x > y).bool() & y.bool()),
    ("is-finite", lambda x, y: (x > y) & torch.isfinite(x)),
    ("is-not-finite", lambda x, y: (x > y) | y.isnan() | torch.isinf(x)),
    ("mask-to-integers", lambda x, y: (x > y).long() * 2 + 1),
    shapes=PAIR,
    picks=(),
)  # fmt: skip


CASES = [
    *ARITHMETIC, *MATMULS, *SCALARS, *DIVISIONS, *QUOTIENTS, *COMBINATIONS, *QUOTIENT_SUMS, *LOGARITHMS_OF_SUMS,
    *CHOICES, *BUFFERS, *COMPARISONS,
]  # fmt: skip
