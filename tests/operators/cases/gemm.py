"""Convolutions and linear layers."""

from __future__ import annotations

from torch import nn

from tests.operators.cases.base import cases, module

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


CASES = [*GEMMS]
