"""The benchmark of accuracy makes its whole journey; what it finds is its own matter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.accuracy import journey
from benchmarks.accuracy.__main__ import report
from benchmarks.accuracy.data import DATA, Data
from horizon_plugin_pytorch.march import March, set_march


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_row_is_there_and_integers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    whole = DATA["digits"]()
    tests = {"test_images": whole.images.test_images[:500], "test_labels": whole.images.test_labels[:500]}
    few = Data(dataclasses.replace(whole.images, **tests), whole.vary, 0.6, 0.4)
    monkeypatch.setitem(journey.DATA, "digits", lambda: few)
    monkeypatch.setattr(journey, "CALIBRATION_BATCHES", 2)
    journey.Journey(journey.Task("digits", "RepVGG", 0), tmp_path).run()
    found = json.loads((tmp_path / "digits-RepVGG-0.json").read_text())
    assert set(found["mismatches"].values()) == {0} and len(found["mismatches"]) == 12
    for fmt in journey.FORMATS:
        rows = found["accuracy"][fmt]
        untrained = [row for row in rows if "STE" not in row and "LSQ" not in row]
        assert untrained == [*journey.OBSERVERS, "auto_calibrate", "mse + AdaRound"]
        assert rows["QAT, LSQ"] == rows["quantized, LSQ"] == rows["ONNX Runtime, LSQ"]
    text = report(tmp_path, ["digits"], ["RepVGG", "ResNet"])
    assert "RepVGG (1)" in text and "ResNet" not in text and "ONNX Runtime, STE" in text
