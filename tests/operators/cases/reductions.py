"""Reductions and selection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import functional as functional_forms
from tests.operators.cases.base import cases, functional

MULTIPLIER = dict(steps16=0.54)  # it has 20 bits: 3 % of a step at 32,767

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
    ("sum-keepdims", lambda x: x.sum(1, keepdims=True)),
    ("sum-axis", lambda x: torch.sum(x, axis=-1)),
    ("sum-dtype-none", lambda x: torch.sum(x, 1, dtype=None)),
    ("sum-no-axes", lambda x: x.sum(())),
    ("mean-dtype", lambda x: x.mean(dim=1, dtype=torch.float32)),
    ("norm", lambda x: torch.norm(x, dim=1)),
    ("norm-all", lambda x: x.norm()),
    ("norm-1", lambda x: x.norm(p=1, dim=-1, keepdim=True)),
    ("norm-inf", lambda x: torch.norm(x, float("inf"), (2, 3)), dict(is_smooth=False)),
    ("norm-fro", lambda x: torch.norm(x, p="fro", dim=(1, 2))),
    ("linalg-norm", lambda x: torch.linalg.norm(x, dim=-1)),
    ("linalg-norm-1", lambda x: torch.linalg.norm(x, 1, 2, True)),
    ("vector-norm", lambda x: torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)),
    ("vector-norm-ord", lambda x: torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True)),
    ("vector-norm-smallest", lambda x: torch.linalg.vector_norm(x, float("-inf"), 3), dict(is_smooth=False)),
    ("vector-norm-long", lambda x: torch.linalg.vector_norm(x, 2, -1), dict(shapes=((2, 3000),))),
    ("normalize", lambda x: F.normalize(x)),
    ("normalize-last", lambda x: F.normalize(x, p=2, dim=-1, eps=1e-6)),
    ("normalize-1", lambda x: F.normalize(x, 1.0, 2)),
    ("normalize-inf", lambda x: F.normalize(x, float("inf"), 1), dict(is_smooth=False)),
    ("normalize-eps", lambda x: F.normalize(x, dim=1, eps=3.0)),
    ("var", lambda x: torch.var(x, 1)),
    ("var-biased", lambda x: x.var((2, 3), unbiased=False, keepdim=True)),
    ("var-positional", lambda x: x.var(1, False, True)),
    ("var-correction", lambda x: torch.var(x, dim=-1, correction=2)),
    ("var-all", lambda x: x.var(False)),
    ("std", lambda x: torch.std(x, dim=1, keepdim=True)),
    ("std-biased", lambda x: x.std(-1, correction=0)),
    ("var-mean", lambda x: torch.var_mean(x, 1, unbiased=False), dict(picks=(0, 1))),
    ("std-mean", lambda x: torch.std_mean(x, dim=(2, 3), correction=1), dict(picks=(0, 1))),
    ("var-mean-unpacked", lambda x: _unpacked(torch.var_mean(x, [2, 3], keepdim=True)), dict(picks=(0, 1))),
    ("cumsum", lambda x: torch.cumsum(x, 1), MULTIPLIER),
    ("method-cumsum", lambda x: x.cumsum(dim=-1), MULTIPLIER),
    ("cumsum-long", lambda x: x.cumsum(0), dict(shapes=((700, 3),), **MULTIPLIER)),
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
    ("max-pair", lambda x, y: torch.max(x, y), dict(shapes=((2, 6, 5), (2, 6, 5)), is_smooth=False)),
    ("min-pair", lambda x, y: x.min(other=y), dict(shapes=((2, 6, 5), (2, 6, 5)), is_smooth=False)),
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
    ("horizon-argmax", lambda x: functional_forms.argmax(x, dim=1, keepdim=True), POSITIONS),
    ("horizon-sort", lambda x: functional_forms.sort(x, 1, descending=True, stable=True), BOTH),
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
