"""Sums, products, matrix products, numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.operators.cases.base import cases, functional

PAIR = ((2, 6, 5, 7), (2, 6, 5, 7))
MATRICES = ((2, 3, 5, 8), (2, 3, 8, 4))
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
    ("number-sub", lambda x: 1 - x, dict(steps8=1.03, steps16=1.03)),
    ("torch-rsub", lambda x: torch.rsub(x, 2.0), dict(steps8=1.03, steps16=1.03)),
    ("mul-number", lambda x: x * 0.37),
    ("number-mul", lambda x: -2 * x),
    ("imul-number", lambda x: _in_place(x, 0.5, "*")),
    ("div-number", lambda x: x / 3),
    ("idiv-number", lambda x: _in_place(x, 8, "/")),
    ("torch-div", lambda x: torch.div(x, 6.0)),
    ("method-div", lambda x: x.div(1.7)),
    ("operator-neg", lambda x: -x),
    ("torch-neg", lambda x: torch.neg(x)),
    ("method-neg", lambda x: x.neg()),
    ("torch-add-number", lambda x: torch.add(x, 0.1)),
    ("torch-mul-number", lambda x: torch.mul(x, 0.1)),
    **SCALAR,
)


CASES = [*ARITHMETIC, *MATMULS, *SCALARS]
