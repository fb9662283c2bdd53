"""Silence: where nothing is wrong, nothing is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import convert
from tests.analysis.profile.advice.healthy import (
    ConvNet,
    Detector,
    Recurrent,
    Transformer,
    advice_for,
    batches_for,
    calibrated,
    make,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
@pytest.mark.parametrize("kind", [ConvNet, Detector, Transformer, Recurrent])
def test_healthy(kind: type[nn.Module], dtype: Any) -> None:
    net = make(kind)
    batches = batches_for(net)
    qat = calibrated(net, batches, dtype=dtype)
    assert advice_for(net, qat, batches) == []
    assert advice_for(net, convert(copy.deepcopy(qat)), batches) == []
