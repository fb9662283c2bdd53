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
    few = Data(dataclasses.replace(whole.images, **tests), whole.vary, 1)
    monkeypatch.setitem(journey.DATA, "digits", lambda: few)
    monkeypatch.setattr(journey, "CALIBRATION_BATCHES", 2)
    monkeypatch.setitem(journey.QAT, "RepVGG", journey.Recipe(10, 1e-4))
    journey.Journey(journey.Task("digits", "RepVGG", 0), tmp_path).run()
    rows = json.loads((tmp_path / "digits-RepVGG-0.json").read_text())
    for fmt in journey.FORMATS:
        assert list(rows[fmt]) == journey.titles(fmt)
        for title in journey.TRAININGS:
            forms = [rows[fmt][f"{form}, {title}"] for form in journey.FORMS]
            assert [form.get("differing") for form in forms] == [None, 0, 0]
            assert len({form["accuracy"] for form in forms}) == 1
    text = report(tmp_path, ["digits"], ["RepVGG", "ResNet"])
    assert "RepVGG (1)" in text and "ResNet" not in text and "ONNX Runtime, STE" in text
