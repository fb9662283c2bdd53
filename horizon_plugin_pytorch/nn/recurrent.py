"""Recurrent modules: torch's, under the names of this package."""

from __future__ import annotations

from torch import nn


class LSTM(nn.LSTM):
    """`torch.nn.LSTM`; `proj_size` has no quantized form."""


class LSTMCell(nn.LSTMCell):
    """`torch.nn.LSTMCell`."""


class GRU(nn.GRU):
    """`torch.nn.GRU`."""


class GRUCell(nn.GRUCell):
    """`torch.nn.GRUCell`."""
