"""Reductions and selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.operators.cases.base import cases, functional

REDUCTIONS = cases(
    ("functional-sum", functional(lambda f, x: f.sum(x, dim=1))),
    ("functional-sum-all", functional(lambda f, x: f.sum(x))),
    ("functional-mean", functional(lambda f, x: f.mean(x, dim=(2, 3), keepdim=True))),
    ("torch-sum", lambda x: torch.sum(x, 1)),
    ("torch-sum-dims", lambda x: torch.sum(x, dim=(1, -1), keepdim=True)),
    ("method-sum", lambda x: x.sum(-1, True)),
    ("method-sum-all", lambda x: x.sum()),
    ("torch-mean", lambda x: torch.mean(x, dim=[2, 3])),
    ("method-mean", lambda x: x.mean((-2, -1), keepdim=True)),
    ("method-mean-one", lambda x: x.mean(1)),
    ("method-mean-all", lambda x: x.mean()),
)


POSITIONS, BOTH = dict(picks=()), dict(picks=(0,))
UNORDERED = dict(picks=(0,), differing=0.05)  # of equal values torch takes any, we the first
TIED = dict(is_smooth=False)  # equal values on the grid share or take over a gradient


def _positions(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 6, (2, 4, 7, 9), generator=generator),)


SELECTION = cases(
    ("max", lambda x: torch.max(x), TIED),
    ("method-max", lambda x: x.max(), TIED),
    ("max-dim", lambda x: torch.max(x, 1), BOTH),
    ("max-dim-keepdim", lambda x: x.max(dim=-1, keepdim=True), BOTH),
    ("max-dim-unpacked", lambda x: _unpacked(x.max(2)), {**BOTH, **TIED}),
    ("max-values", lambda x: x.max(1).values),
    ("max-first", lambda x: x.max(1)[0]),
    ("max-indices", lambda x: x.max(1).indices, POSITIONS),
    ("min", lambda x: torch.min(x), TIED),
    ("min-dim", lambda x: torch.min(x, 1, True), BOTH),
    ("amax", lambda x: x.amax(1, keepdim=True)),
    ("amax-all", lambda x: x.amax(), TIED),
    ("torch-amax", lambda x: torch.amax(x, 1)),
    ("amax-dims", lambda x: torch.amax(x, (1, -1)), TIED),
    ("amin", lambda x: x.amin((2, 3)), TIED),
    ("aminmax", lambda x: torch.aminmax(x, dim=1), dict(picks=(0, 1))),
    ("aminmax-all", lambda x: torch.aminmax(x).max, TIED),
    ("argmax", lambda x: torch.argmax(x, 1), POSITIONS),
    ("argmax-keepdim", lambda x: x.argmax(dim=-1, keepdim=True), POSITIONS),
    ("argmax-all", lambda x: x.argmax(), POSITIONS),
    ("argmin", lambda x: torch.argmin(x, dim=2), POSITIONS),
    ("topk", lambda x: torch.topk(x, 3, dim=1), UNORDERED),
    ("topk-last", lambda x: x.topk(4), UNORDERED),
    ("topk-smallest", lambda x: torch.topk(x, k=2, dim=2, largest=False, sorted=False), UNORDERED),
    ("topk-values", lambda x: x.topk(1, 1).values),
    ("topk-gather", lambda x: x.gather(1, x.topk(2, 1).indices)),
    ("sort", lambda x: torch.sort(x, dim=1), UNORDERED),
    ("sort-descending", lambda x: x.sort(-1, descending=True), UNORDERED),
    ("sort-stable", lambda x: torch.sort(x, stable=True, dim=2, descending=True), UNORDERED),
    ("argsort", lambda x: torch.argsort(x, 1, descending=True), POSITIONS),
    ("msort", lambda x: torch.msort(x)),
    ("kthvalue", lambda x: torch.kthvalue(x, 2, 1), UNORDERED),
    ("kthvalue-keepdim", lambda x: x.kthvalue(3, keepdim=True), UNORDERED),
    ("median", lambda x: torch.median(x), TIED),
    ("median-dim", lambda x: x.median(1), UNORDERED),
    ("gather", lambda x, i: torch.gather(x, 1, i), dict(others=_positions)),
    ("take-along-dim", lambda x, i: torch.take_along_dim(x, i, 1), dict(others=_positions)),
    ("index-by-argmax", lambda x: x[:, x[0, :, 0, 0].argmax()]),
    ("index-by-topk", lambda x: x[:, x[0, :, 0, 0].topk(3)[1]]),
)


def _unpacked(result: Any) -> Any:
    values, indices = result
    return values, indices


CASES = [*REDUCTIONS, *SELECTION]
