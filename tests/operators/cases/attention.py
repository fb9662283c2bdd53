"""Products of tensors, attention, recurrent cells, embedding."""

from __future__ import annotations

from typing import Any

import torch

from tests.operators.cases.base import cases


def _einsum(name: str, equation: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return name, lambda x, y: torch.einsum(equation, x, y), dict(shapes=shapes)


PRODUCTS = cases(
    ("torch-mm", lambda x, y: torch.mm(x, y), dict(shapes=((5, 8), (8, 4)))),
    ("torch-mm-mat2", lambda x, y: torch.mm(x, mat2=y), dict(shapes=((5, 8), (8, 4)))),
    ("method-mm", lambda x, y: x.mm(y), dict(shapes=((5, 8), (8, 4)))),
    ("method-bmm", lambda x, y: x.bmm(y), dict(shapes=((3, 5, 8), (3, 8, 4)))),
    ("torch-mv", lambda x, y: torch.mv(x, y), dict(shapes=((5, 8), (8,)))),
    ("method-mv", lambda x, y: x.mv(y), dict(shapes=((5, 8), (8,)))),
    ("torch-dot", lambda x, y: torch.dot(x, y), dict(shapes=((8,), (8,)), low=0.5)),
    ("matmul-vector-left", lambda x, y: x @ y, dict(shapes=((8,), (3, 8, 4)))),
    _einsum("einsum-matmul", "ij,jk->ik", (5, 8), (8, 4)),
    _einsum("einsum-batch", "bij,bjk->bik", (3, 5, 8), (3, 8, 4)),
    _einsum("einsum-scores", "bhqd,bhkd->bhqk", (2, 3, 5, 8), (2, 3, 6, 8)),
    _einsum("einsum-scores-heads-last", "bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 6, 3, 8)),
    _einsum("einsum-weighted", "bhqk,bkhd->bqhd", (2, 3, 5, 6), (2, 6, 3, 8)),
    _einsum("einsum-graph", "nctv,vw->nctw", (2, 3, 4, 6), (6, 7)),
    _einsum("einsum-graph-2-summed", "nkctv,kvw->nctw", (2, 3, 4, 5, 6), (3, 6, 7)),
    _einsum("einsum-ellipsis", "...ij,...jk->...ik", (2, 3, 5, 8), (3, 8, 4)),
    _einsum("einsum-implicit", "ij,jk", (5, 8), (8, 4)),
    _einsum("einsum-inner", "i,i->", (8,), (8,)),
    _einsum("einsum-elementwise", "bij,bij->bij", (3, 5, 8), (3, 5, 8)),
    _einsum("einsum-outer", "i,j->ij", (5,), (8,)),
    _einsum("einsum-broadcast", "bchw,bc->bhwc", (2, 3, 4, 5), (2, 3)),
    ("einsum-list", lambda x, y: torch.einsum("ij,jk->ik", [x, y]), dict(shapes=((5, 8), (8, 4)))),
    low=0.2,  # sums of products stay away from 0, where they cancel
    steps16=0.54,  # a multiplier has 20 bits: 3 % of a step at 32,767
)

# The product is rounded to int16 before the sum is rounded to the output's format: in int16 both count.
SUMS = cases(
    ("torch-addmm", lambda x, a, b: torch.addmm(x, a, b), dict(shapes=((5, 4), (5, 8), (8, 4)))),
    ("torch-addmm-broadcast", lambda x, a, b: torch.addmm(x, a, b), dict(shapes=((4,), (5, 8), (8, 4)))),
    ("torch-addmm-numbers", lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2),
     dict(shapes=((5, 4), (5, 8), (8, 4)))),
    ("torch-baddbmm", lambda x, a, b: torch.baddbmm(x, a, b, beta=1, alpha=0.125),
     dict(shapes=((3, 5, 4), (3, 5, 8), (3, 8, 4)))),
    ("method-baddbmm", lambda x, a, b: x.baddbmm(batch1=a, batch2=b),
     dict(shapes=((3, 5, 4), (3, 5, 8), (3, 8, 4)))),
    ("torch-addmv", lambda x, a, b: torch.addmv(x, a, b), dict(shapes=((5,), (5, 8), (8,)))),
    steps8=0.53,
    steps16=1.1,
)  # fmt: skip

CASES = [*PRODUCTS, *SUMS]
