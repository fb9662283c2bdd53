"""Operators that move values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.operators.cases.base import cases, module

SHAPES = cases(
    ("reshape", lambda x: x.reshape(2, -1)),
    ("torch-reshape", lambda x: torch.reshape(x, (2, 3, -1))),
    ("view", lambda x: x.view(x.size(0), -1)),
    ("view-shape", lambda x: x.view(x.shape[0], x.shape[1], -1)),
    ("flatten-module", module(nn.Flatten, 2)),
    ("flatten", lambda x: x.flatten(1)),
    ("torch-flatten", lambda x: torch.flatten(x, 1)),
    ("unflatten", lambda x: x.unflatten(1, (2, 3))),
    ("unflatten-module", module(nn.Unflatten, 1, (2, 3))),
    ("permute", lambda x: x.permute(0, 2, 3, 1)),
    ("permute-negative", lambda x: torch.permute(x, (0, -1, 1, -2))),
    ("transpose", lambda x: x.transpose(1, -1)),
    ("torch-transpose", lambda x: torch.transpose(x, -2, -1)),
    ("split", lambda x: torch.split(x, 2, 1)[1]),
    ("split-sizes", lambda x: x.split([1, 3, 2], dim=1)[2]),
    ("split-all", lambda x: torch.cat(x.split(3, -1), 1)),
    ("chunk", lambda x: x.chunk(2, 1)[0]),
    ("torch-chunk", lambda x: torch.chunk(x, 4, dim=-2)[3]),
    ("slice", lambda x: x[:, 1:4, ::2, -5:]),
    ("index", lambda x: x[:, 2]),
    ("index-new-axis", lambda x: x[:, None, ..., 1]),
    ("select", lambda x: x.select(1, 3)),
    ("narrow", lambda x: x.narrow(2, 1, 3)),
    ("unbind", lambda x: x.unbind(1)[4]),
    ("pad", lambda x: F.pad(x, (1, 2, 0, 3))),
    ("pad-negative", lambda x: F.pad(x, (-1, 2))),
    ("pad-value", lambda x: F.pad(x, (1, 1), value=0.6)),
    ("pad-value-constant", lambda x: F.pad(x, [1, 1, 2, 0], "constant", -1.1)),
    ("pad-reflect", lambda x: F.pad(x, (2, 1, 1, 1), mode="reflect")),
    ("pad-replicate", lambda x: F.pad(x, (2, 1, 1, 1), mode="replicate")),
    ("pad-circular", lambda x: F.pad(x, (2, 1, 0, 3), mode="circular")),
    ("circular-pad-module", module(nn.CircularPad2d, (1, 2, 1, 0))),
    ("zero-pad-module", module(nn.ZeroPad2d, (1, 2, 3, 0))),
    ("constant-pad-module", module(nn.ConstantPad2d, 1, 0.5)),
    ("replication-pad-module", module(nn.ReplicationPad2d, 2)),
    ("reflection-pad-module", module(nn.ReflectionPad2d, (1, 2, 1, 0))),
    ("squeeze", lambda x: x.squeeze(1), dict(shapes=((2, 1, 5, 1),))),
    ("squeeze-all", lambda x: torch.squeeze(x), dict(shapes=((2, 1, 5, 1),))),
    ("unsqueeze", lambda x: x.unsqueeze(-1)),
    ("torch-unsqueeze", lambda x: torch.unsqueeze(x, 0)),
    ("expand", lambda x: x.expand(2, 6, 5, 4), dict(shapes=((2, 6, 5, 1),))),
    ("expand-new-axis", lambda x: x.expand(3, -1, -1), dict(shapes=((6, 5),))),
    ("repeat", lambda x: x.repeat(1, 2, 1, 1)),
    ("repeat-new-axis", lambda x: x.repeat(2, 1, 1, 1, 1)),
    ("pixel-shuffle", module(nn.PixelShuffle, 2), dict(shapes=((2, 8, 3, 5),))),
    ("functional-pixel-shuffle", lambda x: F.pixel_shuffle(x, 2), dict(shapes=((2, 8, 3, 5),))),
    ("pixel-unshuffle", module(nn.PixelUnshuffle, 2), dict(shapes=((2, 2, 6, 4),))),
    ("channel-shuffle", module(nn.ChannelShuffle, 3)),
    ("contiguous", lambda x: x.permute(0, 2, 3, 1).contiguous().view(2, -1)),
    ("flip", lambda x: x.flip(-1)),
    ("amax", lambda x: x.amax(1, keepdim=True)),
    ("torch-amax", lambda x: torch.amax(x, 1)),
    ("roll", lambda x: torch.roll(x, (1, -2), (2, 3))),
    ("dropout", module(nn.Dropout, 0.5)),
    ("functional-dropout", lambda x: F.dropout(x, 0.5, training=False)),
    ("identity", module(nn.Identity)),
)


CASES = [*SHAPES]
