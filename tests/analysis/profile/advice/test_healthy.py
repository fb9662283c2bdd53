"""Silence: where nothing is wrong, nothing is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
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
from tests.models import MobileNet, ResNet, UNet, shake_norms

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


@pytest.mark.in_turns("dtype", "kind")
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
@pytest.mark.parametrize("kind", [ConvNet, Detector, Transformer, Recurrent])
def test_healthy(kind: type[nn.Module], dtype: Any) -> None:
    net = make(kind)
    batches = batches_for(net)
    qat = calibrated(net, batches, dtype=dtype)
    assert advice_for(net, qat, batches) == []
    assert advice_for(net, convert(copy.deepcopy(qat)), batches) == []


@pytest.mark.parametrize("kind", [ResNet, MobileNet, UNet])
def test_healthy_networks(kind: type[nn.Module]) -> None:
    """Float and QAT, QAT and quantized; random weights leave channels dead, and rightly that is told."""
    torch.manual_seed(0)
    net = shake_norms(kind()).eval()
    batches = [torch.randn(2, 3, 32, 32).clamp(-1.9, 1.9) for _ in range(2)]
    qat = calibrated(net, batches)
    for pair in ((net, qat), (qat, convert(copy.deepcopy(qat)))):
        assert {advice.rule for advice in advice_for(*pair, batches)} <= {"dead-channels"}
