"""Each fault, planted in a healthy model, is named, and the line that is advised mends it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate
from tests.analysis.profile.advice.healthy import (
    ConvNet,
    advice_for,
    batches_for,
    calibrated,
    error_of,
    in_state,
    make,
    prepared,
    tried,
)


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def only(found: list[Any], rule: str, place: str) -> Any:
    """The one advice that there is."""
    assert [(advice.rule, advice.place) for advice in found] == [(rule, place)]
    return found[0]


# -- states


def test_left_in_calibration() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = in_state(calibrated(net, batches), FakeQuantState.CALIBRATION)
    found = only(advice_for(net, qat, batches), "left-in-calibration", "model")
    assert "10 of 10" in found.evidence and found.severity == "error"
    tried(found.configuration, model=qat)
    assert advice_for(net, qat, batches) == []
    in_state(qat.left, FakeQuantState.CALIBRATION)
    assert "`left.0`" in only(advice_for(net, qat, batches), "left-in-calibration", "left.0").evidence


def test_left_in_train_mode() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches)
    found = only(advice_for(net.train(), qat, batches), "left-in-train-mode", "stem.1")
    assert "BatchNorm2d" in found.evidence and "float model" in found.evidence
    assert advice_for(net.eval(), qat.train(), batches) == []  # its batch norms are folded: both modes are one


def test_never_calibrated() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = in_state(prepared(net, batches).eval(), FakeQuantState.VALIDATION)
    found = only(advice_for(net, qat, batches), "never-calibrated", "model")
    assert found.configuration == "calibrate(model, batches)"
    part = calibrated(net, batches)
    part.right[0].activation_post_process = prepared(net, batches).right[0].activation_post_process
    in_state(part, FakeQuantState.VALIDATION)
    assert advice_for(net, part, batches)[0].place == "right.0"


# -- ranges


@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_input_exceeds_calibration(dtype: Any) -> None:
    """All that clips behind the input is the same trouble; calibration with such data mends it."""
    net = make(ConvNet)
    batches = batches_for(net, scale=0.4)
    larger = [5 * x for x in batches]
    qat = calibrated(net, batches, dtype=dtype)
    for model in (qat, convert(copy.deepcopy(qat))):
        found = only(advice_for(net, model, larger), "input-exceeds-calibration", "quant")
        assert found.operators[0] == 0 and len(found.operators) > 3 and "8.368" in found.evidence
        assert 0.3 < found.explains < 0.7
    tried(found.configuration, model=qat, batches=larger)
    assert advice_for(net, qat, larger) == []


@pytest.mark.parametrize(("dtype", "factor"), [(qint8, 1e-2), (qint16, 1e-4)], ids=["qint8", "qint16"])
def test_input_below_calibration(dtype: Any, factor: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches, dtype=dtype)
    only(advice_for(net, qat, [factor * x for x in batches]), "input-below-calibration", "quant")


@pytest.mark.parametrize(("factor", "rule"), [(1 / 8, "range-exceeds-calibration"), (64, "range-below-calibration")])
def test_range_inside(factor: float, rule: str) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches)
    quantizer = qat.left[0].activation_post_process
    quantizer.set_qparams(quantizer.scale * factor)
    found = only(advice_for(net, qat, batches), rule, "left.0")
    tried(found.configuration, model=qat, batches=batches)
    assert advice_for(net, qat, batches) == []


@pytest.mark.parametrize("scale", [1 / 128, 1.0])
def test_fixed_scale_of_an_input(scale: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    net.quant = QuantStub(scale=scale)
    rule = "fixed-scale-too-small" if scale < 1 else "fixed-scale-too-large"
    found = only(advice_for(net, calibrated(net, batches), batches), rule, "quant")
    net.quant = tried(found.configuration)
    assert advice_for(net, calibrated(net, batches), batches) == []


@pytest.mark.parametrize("threshold", [0.3, 100.0])
def test_fixed_scale_inside(threshold: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    given = ModuleNameTemplate({"right": {"dtype": qint8, "threshold": threshold}})
    rule = "fixed-scale-too-small" if threshold < 1 else "fixed-scale-too-large"
    found = only(advice_for(net, calibrated(net, batches, [given]), batches), rule, "right.0")
    assert advice_for(net, calibrated(net, batches, [given, tried(found.configuration)]), batches) == []


@pytest.mark.parametrize(("dtype", "by_hand"), [(qint8, True), (qint16, False)], ids=["qint8", "qint16"])
def test_uneven_batches(dtype: Any, by_hand: bool) -> None:
    """One batch that is far wider than the others is clipped by the mean, whatever the format."""
    net = make(ConvNet)
    batches = batches_for(net, 8)
    batches[-1] *= 30
    if by_hand:
        qat = in_state(prepared(net, batches, dtype=dtype).eval(), FakeQuantState.CALIBRATION)
        with torch.no_grad(), pytest.warns(UserWarning, match="ranges differ between batches"):
            for batch in batches:
                qat(batch)
            in_state(qat, FakeQuantState.VALIDATION)
    else:
        qat = calibrated(net, batches, dtype=dtype)
    for data in (batches[-2:], batches[:1]):  # whether the wide batch is among the data or not
        found = only(advice_for(net, qat, data), "uneven-batches", "quant")
        assert ("24." if by_hand else "6.") in found.evidence
    setter = tried(found.configuration)
    setter.save_dir = None
    mended = calibrated(net, batches, qconfig_setter=setter)
    assert error_of(net, mended, batches[-1:]) > error_of(net, qat, batches[-1:]) + 10
    assert "uneven-batches" not in [advice.rule for advice in advice_for(net, mended, batches[-1:])]
