"""The written Python of an answer, and the curve of its page, without a run of `tune`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from horizon_plugin_profiler.tuning.answer import Trial, TuningResult
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.march import set_march


def result(**others) -> TuningResult:
    formats = others.pop("formats", {'a"b.0': {"output": qint16}})
    reasons = others.pop("reasons", {})
    return TuningResult(formats, reasons, "Cosine", 0.99, 1.0, 0.98, True, 10, "nash-m", "Net", **others)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"formats": {}},
        {"formats": {"a": {"weight": torch.float16, "output": torch.float16}}, "thresholds": {"quant": 2.0}},
        {"int8_gemms": True, "searched": 16, "rewrites": ["equalize", "center_norms"], "learned": ["training"]},
        {"notes": ["a long note " * 30], "reasons": {'a"b.0': "rank 1 of 100, as its result alone says; " * 6}},
        {"prepare_args": {"own_scales": ("a", "b"), "method": "symbolic"}},
    ],
)
def test_the_file_passes_a_linter_and_can_be_run(others, tmp_path):
    source = result(**others).source()
    names: dict = {}
    exec(source, names)
    assert names["FORMATS"] == result(**others).formats and names["PREPARE_ARGS"] == others.get("prepare_args", {})
    file = tmp_path / "tuned_formats.py"
    file.write_text(source)
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.is_file():
        pytest.skip("ruff is not installed")
    command = [ruff, "check", "--isolated", "--select", "E,F,I,W", "--line-length", "120", file]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)  # where the package is another's
    assert found.returncode == 0, found.stdout


def test_the_file_says_when_it_is_used_for_another_chip(recwarn):
    names: dict = {}
    exec(result().source(), names)
    set_march("nash-m")
    names["calibration_setter"]()
    assert not recwarn.list
    set_march("bayes")
    with pytest.warns(UserWarning, match="formats are for nash-m, not bayes: tune for it"):
        names["calibration_setter"]()


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_front_has_no_mixture_that_is_beaten_by_a_smaller_one(higher_is_better):
    sign = 1 if higher_is_better else -1
    values = [(0.0, 0.1), (1.0, 0.9), (0.5, 0.95), (0.5, 0.5), (0.2, 0.05)]
    steps = [Trial(str(i), 0, share, sign * value, None, None) for i, (share, value) in enumerate(values)]
    found = result(steps=steps, higher_is_better=higher_is_better)
    assert [step.what for step in found.front()] == ["0", "2"]
    page = found.page()
    assert "target 0.98" in page and "share of operators that are not int8" in page
    assert page.count("<polyline") == 1 and page.count("<path") == 5 + 2
