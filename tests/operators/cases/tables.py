"""Activations and functions of one variable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch import nn as horizon_nn
from tests.operators.cases.base import cases, module

POSITIVE = dict(low=0.3, high=4.0)

ACTIVATIONS = cases(
    ("relu", module(nn.ReLU)),
    ("relu-in-place", module(nn.ReLU, inplace=True)),
    ("functional-relu", lambda x: F.relu(x)),
    ("functional-relu-in-place", lambda x: F.relu(x, inplace=True)),
    ("torch-relu", lambda x: torch.relu(x)),
    ("method-relu", lambda x: x.relu()),
    ("method-relu-in-place", lambda x: x.relu_()),
    ("relu6", module(nn.ReLU6)),
    ("functional-relu6", lambda x: F.relu6(x)),
    is_smooth=False,
    low=-8.0,
    high=8.0,
    steps8=0.51,  # 6 is put on the grid
)

TABLES = cases(
    ("sigmoid", module(nn.Sigmoid), dict(low=-8.0, high=8.0)),
    ("torch-sigmoid", lambda x: torch.sigmoid(x)),
    ("method-sigmoid", lambda x: x.sigmoid()),
    ("functional-sigmoid", lambda x: F.sigmoid(x)),
    ("tanh", module(nn.Tanh), dict(low=-4.0, high=4.0)),
    ("torch-tanh", lambda x: torch.tanh(x)),
    ("method-tanh", lambda x: x.tanh()),
    ("silu", module(nn.SiLU), dict(low=-8.0, high=8.0)),
    ("functional-silu", lambda x: F.silu(x)),
    ("gelu", module(nn.GELU), dict(low=-6.0, high=6.0)),
    ("gelu-tanh", module(nn.GELU, approximate="tanh")),
    ("functional-gelu", lambda x: F.gelu(x)),
    ("functional-gelu-tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("exp", module(horizon_nn.Exp)),
    ("torch-exp", lambda x: torch.exp(x)),
    ("method-exp", lambda x: x.exp()),
    ("reciprocal", module(horizon_nn.Reciprocal), POSITIVE),
    ("torch-reciprocal", lambda x: torch.reciprocal(x), POSITIVE),
    ("sqrt", module(horizon_nn.Sqrt), POSITIVE),
    ("torch-sqrt", lambda x: torch.sqrt(x), POSITIVE),
    ("method-sqrt", lambda x: x.sqrt(), POSITIVE),
    ("rsqrt", module(horizon_nn.Rsqrt), POSITIVE),
    ("torch-rsqrt", lambda x: torch.rsqrt(x), POSITIVE),
    steps16=1.51,  # a segment table is within one step of the function, then rounds
    train_steps16=2,
)


CASES = [*ACTIVATIONS, *TABLES]
