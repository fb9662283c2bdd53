"""Operators that move values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.functional import window_partition, window_reverse
from tests.operators.cases.base import cases, module

CONSTANT = dict(steps8=1.03, steps16=1.03)  # the constant is rounded as well

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
    ("roll", lambda x: torch.roll(x, (1, -2), (2, 3))),
    ("index-list", lambda x: x[:, [0, 3, -1]]),
    ("index-two-lists", lambda x: x[:, [0, 3], [2, 2]]),
    ("index-two-lists-apart", lambda x: x[:, [0, 3, 1], :, [2, 2, 0]]),
    ("index-list-of-lists", lambda x: x[..., [[0, 3], [1, 2]]]),
    ("index-mask", lambda x: x[:, torch.tensor([True, False, True, True, False, False])]),
    ("index-buffer", lambda x: x[:, torch.tensor([2, 0])]),
    ("index-step", lambda x: x[..., ::3]),
    ("property-t", lambda x: x.T, dict(shapes=((4, 6),))),
    ("property-mt", lambda x: x.mT),
    ("index-select", lambda x: torch.index_select(x, 1, torch.tensor([4, 0, 0]))),
    ("diagonal", lambda x: x.diagonal(1, 2, 3)),
    ("torch-diagonal", lambda x: torch.diagonal(x, -1, 1, 3)),
    ("tril", lambda x: x.tril(1)),
    ("triu", lambda x: torch.triu(x)),
    ("unfold-module", module(nn.Unfold, (2, 3), (2, 1), 1, (1, 2))),
    ("functional-unfold", lambda x: F.unfold(x, 3)),
    ("unfold", lambda x: x.unfold(2, 3, 2)),
    ("rot90", lambda x: torch.rot90(x, 1, (2, 3))),
    ("rot90-3", lambda x: x.rot90(3, [1, 3])),
    ("rot180", lambda x: torch.rot90(x, 2, (2, 3))),
    ("fliplr", lambda x: torch.fliplr(x)),
    ("flip-dims", lambda x: torch.flip(x, (1, 2))),
    ("tile", lambda x: x.tile(1, 2)),
    ("torch-tile", lambda x: torch.tile(x, (2, 1, 1))),
    ("repeat-interleave", lambda x: x.repeat_interleave(3, dim=1)),
    ("torch-repeat-interleave", lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1, 1, 3]), 1)),
    ("roll-flat", lambda x: x.roll(5)),
    ("roll-one", lambda x: x.roll(-2, 1)),
    ("movedim", lambda x: torch.movedim(x, (0, 1), (2, 0))),
    ("swapaxes", lambda x: x.swapaxes(0, 2)),
    ("squeeze-dims", lambda x: x.squeeze((1, 3)), dict(shapes=((2, 1, 5, 1),))),
    ("expand-as", lambda x: x[:, :1].expand_as(x)),
    ("broadcast-to", lambda x: torch.broadcast_to(x, (3, 2, 6, 7, 9))),
    ("tensor-split", lambda x: torch.tensor_split(x, 3, dim=3)[1]),
    ("unbind-unpacked", lambda x: _second(x.unbind(0))),
    ("ravel", lambda x: torch.ravel(x)),
    ("pad-1d", lambda x: F.pad(x, (2, 1), mode="replicate"), dict(shapes=((2, 3, 7),))),
    ("pad-3d", lambda x: F.pad(x, (2, 1, 0, 1, 1, 1), mode="replicate"), dict(shapes=((1, 2, 3, 4, 5),))),
    ("pad-reflect-3d", lambda x: F.pad(x, (2, 1, 0, 1, 1, 1), mode="reflect"), dict(shapes=((1, 2, 3, 4, 5),))),
    ("pad-replicate-negative", lambda x: F.pad(x, (-2, 1, 3, -1), mode="replicate")),
    ("pad-reflect-negative", lambda x: F.pad(x, (-2, 3, 1, 1), mode="reflect")),
    ("pad-circular-1d", lambda x: F.pad(x, (2, 1), mode="circular"), dict(shapes=((2, 3, 7),))),
    ("zero-pad-1d", module(nn.ZeroPad1d, (1, 2)), dict(shapes=((2, 3, 7),))),
    ("zero-pad-3d", module(nn.ZeroPad3d, 1), dict(shapes=((1, 2, 3, 4, 5),))),
    ("constant-pad-1d", module(nn.ConstantPad1d, 2, -0.7), dict(shapes=((2, 3, 7),))),
    ("constant-pad-3d", module(nn.ConstantPad3d, (0, 1, 2, 0, 1, 1), 1.1), dict(shapes=((1, 2, 3, 4, 5),))),
    ("replication-pad-1d", module(nn.ReplicationPad1d, (3, 1)), dict(shapes=((2, 3, 7),))),
    ("replication-pad-3d", module(nn.ReplicationPad3d, 1), dict(shapes=((1, 2, 3, 4, 5),))),
    ("reflection-pad-1d", module(nn.ReflectionPad1d, 2), dict(shapes=((2, 3, 7),))),
    ("reflection-pad-3d", module(nn.ReflectionPad3d, 1), dict(shapes=((1, 2, 3, 4, 5),))),
    ("circular-pad-1d", module(nn.CircularPad1d, 2), dict(shapes=((2, 3, 7),))),
    ("circular-pad-3d", module(nn.CircularPad3d, 1), dict(shapes=((1, 2, 3, 4, 5),))),
    ("functional-pixel-unshuffle", lambda x: F.pixel_unshuffle(x, 2), dict(shapes=((2, 2, 6, 4),))),
    ("functional-channel-shuffle", lambda x: F.channel_shuffle(x, 2)),
    ("squeeze-in-place", lambda x: x.unsqueeze_(1).squeeze_(1)),
    ("transpose-in-place", lambda x: x.transpose_(1, 2)),
    ("zeros-like", lambda x: torch.cat([x, torch.zeros_like(x)], 1)),
    ("new-zeros", lambda x: torch.cat([x, x.new_zeros(2, 1, 7, 9)], 1)),
    ("take", lambda x: x.take(torch.tensor([[3, 100], [0, 7]]))),
    ("add-positions", lambda x: x + torch.arange(9.0), CONSTANT),
    ("add-positions-of-its-size", lambda x: x + torch.arange(x.shape[-1]).float() / 8, CONSTANT),
    ("mul-ramp", lambda x: x * torch.linspace(0, 1, x.shape[-1], device=x.device), CONSTANT),
    ("add-mesh", lambda x: x + torch.meshgrid(torch.arange(7.0), torch.arange(9.0), indexing="ij")[0], CONSTANT),
    ("window-partition", lambda x: window_partition(x, 3), dict(shapes=((2, 6, 9, 4),))),
    ("window-reverse", lambda x: window_reverse(x, 3, 6, 9), dict(shapes=((12, 3, 3, 4),))),
    ("windows", lambda x: _shifted_windows(x), dict(shapes=((2, 6, 9, 4),))),
    ("alpha-dropout", module(nn.AlphaDropout, 0.2)),
    ("feature-alpha-dropout", module(nn.FeatureAlphaDropout, 0.2)),
    ("dropout", module(nn.Dropout, 0.5)),
    ("functional-dropout", lambda x: F.dropout(x, 0.5, training=False)),
    ("to-device", lambda x: x.to("cpu").cpu()),
    ("identity", module(nn.Identity)),
)


def _shifted_windows(x: Any) -> Any:
    shifted = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
    return torch.roll(window_reverse(window_partition(shifted, 3), 3, x.shape[1], x.shape[2]), (1, 1), (1, 2))


def _second(parts: Any) -> Any:
    _, second = parts
    return second


CASES = [*SHAPES]
