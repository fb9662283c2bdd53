"""The end of the demo: a page of its own run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.common import calibrate, write_profile
from demo.digits.__main__ import CALIBRATION
from demo.digits.model import DigitNet
from horizon_plugin_pytorch.analysis.profile.document import Metric, read_document


@pytest.mark.slow
def test_the_demo_ends_with_the_page_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    net, batches = DigitNet().eval(), torch.rand(2, 4, 1, 28, 28) * 2 - 1
    calibrated = calibrate(net, CALIBRATION, batches)
    capsys.readouterr()
    write_profile(net, calibrated, batches, Metric("accuracy, %", 98.0, 97.5), tmp_path)
    step, where, said = capsys.readouterr().out.splitlines()[:3]
    assert step == "profile"
    page = Path(where.rpartition(" ")[2])
    assert "<html" in page.read_text() and page.parent.parent == tmp_path
    assert said.startswith("The largest error is that of ")
    document = read_document(page.with_suffix(".json").read_text())
    assert document.metric is not None and document.metric.second == 97.5
    assert document.batches == 2 and document.is_complete
