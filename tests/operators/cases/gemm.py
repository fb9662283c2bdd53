"""Convolutions and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.operators.cases.base import cases, module


class Weighted(nn.Module):
    """A functional layer on a weight and a bias of the module's own."""

    def __init__(self, function: Callable[..., Tensor], shape: tuple[int, ...], bias: int, is_buffer: bool) -> None:
        super().__init__()
        self.function = function
        weight = nn.init.uniform_(torch.empty(shape), -0.5, 0.5)
        if is_buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(nn.init.uniform_(torch.empty(bias))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def weighted(
    function: Callable[..., Any], *shape: int, bias: int = 0, is_buffer: bool = False
) -> Callable[[], nn.Module]:
    return module(Weighted, function, shape, bias, is_buffer)


def batch_norm(cls: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bn = cls(6)
        nn.init.uniform_(bn.weight, -1.5, 1.5)
        nn.init.uniform_(bn.bias, -1.0, 1.0)
        bn.running_mean.uniform_(-1, 1)
        bn.running_var.uniform_(0.2, 2)
        return bn.eval()

    return make


GEMM = dict(has_weight=True, steps16=0.54)  # a multiplier has 20 bits: 3 % of a step at 32,767

GEMMS = cases(
    ("conv", module(nn.Conv2d, 6, 8, 3)),
    ("conv-1x1-no-bias", module(nn.Conv2d, 6, 4, 1, bias=False)),
    ("conv-stride-padding", module(nn.Conv2d, 6, 8, 3, 2, 1)),
    ("conv-uneven-kernel", module(nn.Conv2d, 6, 8, (1, 5), (2, 1), (0, 2))),
    ("conv-groups", module(nn.Conv2d, 6, 4, 3, padding=1, groups=2)),
    ("conv-depthwise", module(nn.Conv2d, 6, 12, 3, padding=1, groups=6)),
    ("conv-dilation", module(nn.Conv2d, 6, 8, 3, padding=2, dilation=2)),
    ("conv-same", module(nn.Conv2d, 6, 8, 3, padding="same")),
    ("conv-same-uneven", module(nn.Conv2d, 6, 8, (2, 4), padding="same")),
    ("conv-same-dilation", module(nn.Conv2d, 6, 8, (2, 3), padding="same", dilation=(3, 2))),
    ("conv-valid", module(nn.Conv2d, 6, 8, 3, padding="valid")),
    ("conv-reflect", module(nn.Conv2d, 6, 8, 3, padding=1, padding_mode="reflect")),
    ("conv-replicate", module(nn.Conv2d, 6, 8, 3, padding=(2, 1), padding_mode="replicate")),
    ("conv-circular", module(nn.Conv2d, 6, 8, 3, padding=(1, 2), padding_mode="circular")),
    ("conv-transpose", module(nn.ConvTranspose2d, 6, 4, 2, 2)),
    ("conv-transpose-padding", module(nn.ConvTranspose2d, 6, 4, 4, 2, 1)),
    ("conv-transpose-output-padding", module(nn.ConvTranspose2d, 6, 4, 3, (2, 3), 1, output_padding=(1, 2))),
    ("conv-transpose-groups", module(nn.ConvTranspose2d, 6, 4, 3, 2, 1, groups=2)),
    ("conv-transpose-depthwise", module(nn.ConvTranspose2d, 6, 6, 3, 2, 1, 1, groups=6, bias=False)),
    ("conv-transpose-dilation", module(nn.ConvTranspose2d, 6, 4, 3, dilation=2)),
    ("linear-2d", module(nn.Linear, 12, 5), dict(shapes=((4, 12),))),
    ("linear-3d", module(nn.Linear, 12, 5, bias=False), dict(shapes=((2, 3, 12),))),
    ("linear-4d", module(nn.Linear, 9, 5)),
    ("linear-1d", module(nn.Linear, 12, 5), dict(shapes=((12,),))),
    **GEMM,
)

LINE = dict(shapes=((2, 6, 11),))
VOLUME = dict(shapes=((2, 6, 4, 5, 6),))
MORE_AXES = cases(
    ("conv1d", module(nn.Conv1d, 6, 8, 3), LINE),
    ("conv1d-stride-padding", module(nn.Conv1d, 6, 8, 4, 2, 1, bias=False), LINE),
    ("conv1d-depthwise-dilation", module(nn.Conv1d, 6, 6, 3, padding=2, dilation=2, groups=6), LINE),
    ("conv1d-same-uneven", module(nn.Conv1d, 6, 8, 4, padding="same"), LINE),
    ("conv1d-reflect", module(nn.Conv1d, 6, 8, 3, padding=2, padding_mode="reflect"), LINE),
    ("conv1d-replicate", module(nn.Conv1d, 6, 8, 3, padding=1, padding_mode="replicate"), LINE),
    ("conv1d-circular", module(nn.Conv1d, 6, 8, 3, padding=1, padding_mode="circular"), LINE),
    ("conv1d-no-batch", module(nn.Conv1d, 6, 8, 3), dict(shapes=((6, 11),))),
    ("conv3d", module(nn.Conv3d, 6, 4, 3), VOLUME),
    ("conv3d-1x1-no-bias", module(nn.Conv3d, 6, 4, 1, bias=False), VOLUME),
    ("conv3d-uneven", module(nn.Conv3d, 6, 4, (1, 3, 2), (1, 2, 1), (0, 1, 1)), VOLUME),
    ("conv3d-groups", module(nn.Conv3d, 6, 4, 3, padding=1, groups=2), VOLUME),
    ("conv3d-depthwise-dilation", module(nn.Conv3d, 6, 6, 2, dilation=2, groups=6), VOLUME),
    ("conv3d-same", module(nn.Conv3d, 6, 4, (2, 3, 4), padding="same"), VOLUME),
    ("conv3d-reflect", module(nn.Conv3d, 6, 4, 3, padding=1, padding_mode="reflect"), VOLUME),
    ("conv3d-replicate", module(nn.Conv3d, 6, 4, 3, padding=(1, 2, 1), padding_mode="replicate"), VOLUME),
    ("conv3d-circular", module(nn.Conv3d, 6, 4, 3, padding=1, padding_mode="circular"), VOLUME),
    ("conv3d-no-batch", module(nn.Conv3d, 6, 4, 2), dict(shapes=((6, 4, 5, 6),))),
    ("conv-transpose1d", module(nn.ConvTranspose1d, 6, 4, 4, 2, 1), LINE),
    ("conv-transpose1d-output-padding", module(nn.ConvTranspose1d, 6, 4, 3, 3, 0, 2, groups=2), LINE),
    ("conv-transpose3d", module(nn.ConvTranspose3d, 6, 4, 2, 2), VOLUME),
    ("conv-transpose3d-output-padding", module(nn.ConvTranspose3d, 6, 4, 3, 2, 1, (1, 0, 1), groups=2), VOLUME),
    **GEMM,
)
FUNCTIONS = cases(
    ("functional-conv1d", weighted(lambda x, w, b: F.conv1d(x, w, b, 2, 1), 4, 6, 3, bias=4), LINE),
    ("functional-conv2d", weighted(lambda x, w, b: F.conv2d(x, w, b, padding=(1, 0)), 4, 6, 3, 3, bias=4)),
    ("functional-conv2d-groups", weighted(lambda x, w, b: torch.conv2d(x, w, stride=2, groups=3), 6, 2, 3, 3)),
    ("functional-conv2d-same", weighted(lambda x, w, b: F.conv2d(x, w, padding="same"), 4, 6, 3, 3)),
    ("functional-conv2d-buffer", weighted(lambda x, w, b: F.conv2d(x, w, groups=6), 6, 1, 3, 3, is_buffer=True)),
    ("functional-conv3d", weighted(lambda x, w, b: F.conv3d(x, weight=w, bias=b), 4, 6, 2, 2, 2, bias=4), VOLUME),
    ("functional-conv-transpose1d", weighted(lambda x, w, b: F.conv_transpose1d(x, w, b, 2), 6, 4, 3, bias=4), LINE),
    (
        "functional-conv-transpose2d",
        weighted(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, groups=2), 6, 2, 3, 3, bias=4),
    ),
    ("functional-conv-transpose3d", weighted(lambda x, w, b: F.conv_transpose3d(x, w, b), 6, 4, 2, 2, 2), VOLUME),
    ("functional-linear", weighted(F.linear, 5, 9, bias=5)),
    ("functional-linear-no-bias", weighted(lambda x, w, b: F.linear(x, w), 5, 9)),
    **GEMM,
)
NORMS = cases(
    ("batch-norm1d", batch_norm(nn.BatchNorm1d), LINE),
    ("batch-norm1d-features", batch_norm(nn.BatchNorm1d), dict(shapes=((5, 6),))),
    ("batch-norm3d", batch_norm(nn.BatchNorm3d), VOLUME),
    ("sync-batch-norm", batch_norm(nn.SyncBatchNorm)),
)

CASES = [*GEMMS, *MORE_AXES, *FUNCTIONS, *NORMS]
