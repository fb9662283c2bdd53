"""ONNX files of earlier versions and those that are written today give the same numbers.

The files were written by the exporter of commit 4f01e26, which lowered a recorded run without a program between, from
the converted models in `pickles`.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import OPTIMIZATION, mismatches, run_onnx

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["symbolic_converted", "running_converted"])
def test_a_file_of_before_gives_the_numbers_of_today(name: str, tmp_path: Path) -> None:
    set_march(March.NASH_E)
    model, wanted, x = torch.load(HERE / "pickles" / f"{name}.pt", weights_only=False)
    before, today = onnx.load(HERE / "onnx" / f"{name}.onnx"), export_quantized_onnx(model, x, tmp_path / "m.onnx")
    assert [i.name for i in before.graph.input] == [i.name for i in today.graph.input] == ["input"]
    assert [o.name for o in before.graph.output] == [o.name for o in today.graph.output] == ["output"]
    for optimization in OPTIMIZATION:
        for batch in (x, x * 2, x.flip(0) - 1):
            found = [run_onnx(file, (batch,), optimization) for file in (before, today)]
            assert mismatches(*found) == 0
        assert mismatches(run_onnx(today, (x,), optimization), [wanted]) == 0
