"""Reductions and selection."""

from __future__ import annotations

import torch

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


CASES = [*REDUCTIONS]
