"""Every architecture goes all the way to ONNX Runtime, or is listed with the reason why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from docs.generate_models import disagreement
from horizon_plugin_pytorch.march import March, set_march
from tests.tiers import in_soak
from tests.zoo.stages import STAGES, walk

architectures = pytest.importorskip("tests.zoo.architectures", exc_type=ImportError)

pytestmark = pytest.mark.slow


# Architectures that stop early: the stages that they pass, and a part of the error's text.
STOPS: dict[str, tuple[int, str]] = {}


# Far from float in int16, for a reason.
COARSE = {
    "rt_detr": "boxes of random weights lie at 0 and 1, where log(x / (1 - x)) loses all; prepare warns of it",
}


FORMATS = ("qint8", "qint16")
RUNS: list[Any] = []
for number, name in enumerate(architectures.ARCHITECTURES):  # one in int8, the next in int16
    RUNS += [(name, FORMATS[number % 2]), *in_soak((name, FORMATS[1 - number % 2]))]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_architecture(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_march(March.NASH_E)
    model, inputs = architectures.build(name)
    result = walk(model, inputs, tmp_path, dtype)
    stages, reason = STOPS.get(name, (len(STAGES), ""))
    assert len(result.passed) == stages, result.trace
    assert reason in result.error
    if dtype == "qint16" and stages == len(STAGES) and name not in COARSE:
        assert result.distance < 0.03  # far from float would mean a wrong number somewhere, not a coarse one
    assert disagreement(name, model, dtype, result) == ""
