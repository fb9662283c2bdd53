"""Normalisation and pooling."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch import nn as horizon_nn
from tests.operators.cases.base import cases, module


def _batch_norm() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bn = nn.BatchNorm2d(6)
        nn.init.uniform_(bn.weight, -1.5, 1.5)
        nn.init.uniform_(bn.bias, -1.0, 1.0)
        bn.running_mean.uniform_(-1, 1)
        bn.running_var.uniform_(0.2, 2)
        return bn.eval()

    return make


def _layer_norm(make_norm: Callable[[], nn.LayerNorm]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        norm = make_norm()
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if norm.bias is not None:
            nn.init.uniform_(norm.bias, -0.5, 0.5)
        return norm

    return make


NORMS = cases(
    ("batch-norm", _batch_norm()),
    ("softmax", module(nn.Softmax, dim=1), dict(steps8=0.6, steps16=8)),
    ("softmax-last", module(nn.Softmax, -1), dict(shapes=((2, 3, 5, 16),), low=-6.0, high=6.0, steps8=0.6, steps16=8)),
    ("torch-softmax", lambda x: torch.softmax(x, -1), dict(steps8=0.6, steps16=8)),
    ("functional-softmax", lambda x: F.softmax(x, dim=2), dict(steps8=0.6, steps16=8)),
    ("method-softmax", lambda x: x.softmax(dim=1), dict(steps8=0.6, steps16=8)),
    ("layer-norm", _layer_norm(lambda: nn.LayerNorm(24)), dict(shapes=((2, 5, 24),), steps8=0.7, steps16=16)),
    ("layer-norm-2-axes", _layer_norm(lambda: nn.LayerNorm((7, 9))), dict(steps8=0.7, steps16=16)),
    ("layer-norm-plain", _layer_norm(lambda: nn.LayerNorm(9, elementwise_affine=False)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-no-bias", _layer_norm(lambda: nn.LayerNorm(9, bias=False)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-dim", _layer_norm(lambda: horizon_nn.LayerNorm([6, 1, 1], dim=1)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-ours", _layer_norm(lambda: horizon_nn.LayerNorm(9)), dict(steps8=0.7, steps16=16)),
    train_steps16=128,  # a step of an inner int16 value can be many steps of the result
)

POOLS = cases(
    ("max-pool", module(nn.MaxPool2d, 2), dict(is_smooth=False)),
    ("max-pool-padding", module(nn.MaxPool2d, 3, 2, 1), dict(is_smooth=False)),
    ("max-pool-ceil", module(nn.MaxPool2d, 2, 2, ceil_mode=True), dict(is_smooth=False)),
    (
        "max-pool-ceil-padding",
        module(nn.MaxPool2d, 3, 2, 1, ceil_mode=True),
        dict(is_smooth=False, shapes=((1, 3, 8, 6),)),
    ),
    ("max-pool-dilation", module(nn.MaxPool2d, (2, 3), 1, (1, 1), 2), dict(is_smooth=False)),
    ("functional-max-pool", lambda x: F.max_pool2d(x, 3, 2), dict(is_smooth=False)),
    ("functional-max-pool-named", lambda x: F.max_pool2d(x, kernel_size=2, ceil_mode=True), dict(is_smooth=False)),
    ("avg-pool", module(nn.AvgPool2d, 2)),
    ("avg-pool-overlap", module(nn.AvgPool2d, 3, 1)),
    ("avg-pool-padding", module(nn.AvgPool2d, 3, 2, 1)),
    ("avg-pool-exclude-padding", module(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
    ("avg-pool-ceil", module(nn.AvgPool2d, (2, 4), (2, 3), ceil_mode=True)),
    ("avg-pool-ceil-padding", module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    ("avg-pool-ceil-include-padding", module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True), dict(shapes=((1, 3, 8, 6),))),
    ("avg-pool-divisor", module(nn.AvgPool2d, 2, divisor_override=3)),
    ("functional-avg-pool", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    ("adaptive-one", module(nn.AdaptiveAvgPool2d, 1)),
    ("adaptive-uneven", module(nn.AdaptiveAvgPool2d, (3, 4))),
    ("adaptive-larger", module(nn.AdaptiveAvgPool2d, (9, 4))),
    ("adaptive-none", module(nn.AdaptiveAvgPool2d, (None, 3))),
    ("functional-adaptive", lambda x: F.adaptive_avg_pool2d(x, (2, 2))),
    ("functional-adaptive-one", lambda x: F.adaptive_avg_pool2d(x, 1)),
)


CASES = [*NORMS, *POOLS]
