"""Programs through `torch.export`: saved, loaded elsewhere, the same integers; what is missing is named."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.program.exported import exported_program, load_exported, save_exported
from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx
from tests.routes import prepared

X, OTHER = torch.randn(2, 1, 3, 8, 8)
RUN = """
import sys, torch
from horizon_plugin_pytorch.program.exported import load_exported
x, wanted = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(load_exported(sys.argv[1]).module()(x)[0], wanted)
print("equal")
"""


@pytest.fixture(scope="module")
def qat() -> nn.Module:
    set_march(March.BAYES)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Softmax(1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    return prepared(QuantWrapper(net).eval(), (X,))


@pytest.mark.processes
def test_a_file_runs_in_a_new_process(qat: nn.Module, tmp_path: Path) -> None:
    quantized = convert_fx(qat)
    exported = exported_program(record_program(quantized, X))
    assert "horizon.conv.default" in str(exported.graph)
    assert torch.equal(exported.module()(OTHER)[0], quantized(OTHER))
    save_exported(exported, tmp_path / "model.pt2")
    torch.save((OTHER, quantized(OTHER)), tmp_path / "data.pt")
    files = [str(tmp_path / name) for name in ("model.pt2", "data.pt")]
    done = subprocess.run([sys.executable, "-c", RUN, *files], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_a_missing_registration_is_named() -> None:
    library = torch.library.Library("test_absent", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.test_absent.twice(x)

    file = io.BytesIO()
    save_exported(exported_program(record_program(Twice(), X)), file)
    library._destroy()
    with pytest.raises(ExportError, match="calls `test_absent::twice`, which is not registered"):
        load_exported(io.BytesIO(file.getvalue()))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing")
    torch.save({}, tmp_path / "state")
    for name in ("text", "state"):
        with pytest.raises(ExportError, match=rf"{name}` is no file of `torch\.export\.save`"):
            load_exported(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qat", "converted"])
def test_torch_export_of_a_model_says_what_to_export(qat: nn.Module, kind: str) -> None:
    model = qat if kind == "qat" else convert_fx(qat)
    with pytest.raises(ExportError, match="exported_program"):
        torch.export.export(model, (X,))
