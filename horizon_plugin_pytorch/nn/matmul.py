"""Module forms of torch's products of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class AddMatmul(nn.Module):
    """``beta * x + alpha * (a @ b)``: `torch.addmm`, `torch.addmv` and `torch.baddbmm`.

    >>> AddMatmul(alpha=0.5)(torch.ones(2, 2), torch.ones(2, 4), torch.ones(4, 2))
    tensor([[3., 3.],
            [3., 3.]])
    """

    def __init__(self, beta: float = 1.0, alpha: float = 1.0) -> None:
        super().__init__()
        self.beta, self.alpha = beta, alpha

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        product = self.alpha * torch.matmul(a, b)
        return product if self.beta == 0 else self.beta * x + product


class Einsum(nn.Module):
    """`torch.einsum` of two tensors or more.

    Args:
        equation: such as ``"bhqd,bhkd->bhqk"``.

    >>> Einsum("ij,jk->ik")(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *operands: Tensor) -> Tensor:
        return torch.einsum(self.equation, *operands)

    def extra_repr(self) -> str:
        return self.equation


@dataclass(frozen=True)
class Product:
    """An equation of two operands as axes: those of a batch, of one operand only, and those summed over.

    >>> Product.of("...ij,...jk->...ik", 3, 3)
    Product(left='Aij', right='Ajk', out='Aik', batch='A', rows='i', columns='k', summed='j')
    """

    left: str
    right: str
    out: str
    batch: str
    rows: str
    columns: str
    summed: str

    @staticmethod
    def of(equation: str, left_rank: int, right_rank: int) -> Product:
        """The axes of an equation for operands of these ranks."""
        left, right, out = split_equation(equation)
        ranks = [rank - len(axes.replace("...", "")) for rank, axes in ((left_rank, left), (right_rank, right))]
        extra = [n if "..." in axes else 0 for n, axes in zip(ranks, (left, right), strict=True)]
        if any(n < 0 or (n and n != e) for n, e in zip(ranks, extra, strict=True)):
            raise ValueError(f"einsum {equation!r} does not fit operands with {left_rank} and {right_rank} axes.")
        used = set(left + right + out)
        free = [c for c in map(chr, (*range(65, 91), *range(97, 123))) if c not in used]
        dots = "".join(free[: max(extra)])  # aligned at the right, as in broadcasting
        left, right, out = (
            axes.replace("...", dots[len(dots) - n :])
            for axes, n in ((left, extra[0]), (right, extra[1]), (out, len(dots)))
        )
        both = [c for c in left if c in right]
        return Product(
            left, right, out,
            batch="".join(c for c in out if c in both),
            rows="".join(c for c in left if c not in right),
            columns="".join(c for c in right if c not in left),
            summed="".join(c for c in both if c not in out),
        )  # fmt: skip


def pairwise(equation: str) -> list[str]:
    """The equations of two operands each that an equation of several is, from the left to the right.

    >>> pairwise("bij,bjk,kl->bil")
    ['bij,bjk->bik', 'bik,kl->bil']
    >>> pairwise("i,j,ij->")
    ['i,j->ij', 'ij,ij->']
    """
    operands, arrow, out = equation.replace(" ", "").partition("->")
    first, *others = operands.split(",")
    if len(others) < 2:
        return [equation]
    if not arrow:
        once = sorted(c for c in set(operands) - set(".,") if operands.count(c) == 1)
        out = ("..." if "..." in operands else "") + "".join(once)
    steps = []
    for index, other in enumerate(others):
        later = "".join(others[index + 1 :]) + out
        both = dict.fromkeys((first + other).replace(".", ""))
        kept = out if index == len(others) - 1 else "".join(c for c in both if c in later)
        if "..." in first + other and "..." not in kept:
            kept = f"...{kept}"
        steps.append(f"{first},{other}->{kept}")
        first = kept
    return steps


def split_equation(equation: str) -> tuple[str, str, str]:
    """Left, right and result of an equation; raises `ValueError` with what to write instead.

    >>> split_equation("ij, jk")
    ('ij', 'jk', 'ik')
    """
    operands, arrow, out = equation.replace(" ", "").partition("->")
    sides = operands.split(",")
    if len(sides) != 2:
        raise ValueError("einsum of one operand is permute, sum or torch.diagonal: write it so")
    left, right = sides
    for axes in sides:
        letters = axes.replace("...", "")
        if len(set(letters)) < len(letters):
            raise ValueError(f"einsum operand {axes!r} takes a diagonal; use torch.diagonal before it")
    if not arrow:
        once = sorted(c for c in set((left + right).replace(".", "")) if (left + right).count(c) == 1)
        out = ("..." if "..." in operands else "") + "".join(once)
    alone = [c for c in (left + right).replace(".", "") if (left + right).count(c) == 1 and c not in out]
    if alone:
        raise ValueError(f"einsum {equation!r} sums {', '.join(alone)} of one operand; sum that operand first")
    if "..." in operands and "..." not in out:
        raise ValueError(f"einsum {equation!r} sums over the axes of '...'; name them")
    return left, right, out


def multiply(equation: str, a: Any, b: Any, matmul: Any, mul: Any) -> Any:
    """An einsum by reshaping around ``matmul(x, y)``, or around ``mul(x, y)`` where nothing is summed.

    Args:
        mul: None where only `matmul` has the output that is wanted; nothing is then summed over an axis of one element.
    """
    p = Product.of(equation, a.dim(), b.dim())
    if not p.summed and mul is not None:
        return mul(_spread(a, p.left, p.out), _spread(b, p.right, p.out))
    sizes = {**_sizes(p.right, b), **{c: n for c, n in _sizes(p.left, a).items() if n != 1 or c not in p.right}}
    left = _grouped(a, p.left, p.batch, p.rows, p.summed)
    right = _grouped(b, p.right, p.batch, p.summed, p.columns)
    out = matmul(left, right)
    axes = p.batch + p.rows + p.columns
    out = out.reshape([sizes[c] for c in axes])
    return out if axes == p.out else out.permute([axes.index(c) for c in p.out])


def _sizes(axes: str, x: Any) -> dict[str, int]:
    return dict(zip(axes, x.shape, strict=True))


def _spread(x: Any, axes: str, out: str) -> Any:
    """The operand in the result's order, with axes of one element where it has none."""
    order = [axes.index(c) for c in out if c in axes]
    sizes = _sizes(axes, x)
    x = x if order == sorted(order) else x.permute(order)
    return x.reshape([sizes.get(c, 1) for c in out])


def _grouped(x: Any, axes: str, batch: str, first: str, second: str) -> Any:
    """``[*batch, first, second]``, each group as one axis; a batch axis that the operand lacks has one element."""
    sizes = _sizes(axes, x)
    order = [axes.index(c) for c in batch + first + second if c in axes]
    x = x if order == sorted(order) else x.permute(order)
    count = 1
    for c in first:
        count *= sizes[c]
    rest = 1
    for c in second:
        rest *= sizes[c]
    return x.reshape([*(sizes.get(c, 1) for c in batch), count, rest])
