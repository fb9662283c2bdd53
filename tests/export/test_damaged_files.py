"""Files that are cut off, damaged, or of another kind: every reader says so, by name, and executes nothing."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch import jit
from horizon_plugin_pytorch.analysis.profile.document import read_document
from horizon_plugin_pytorch.capture.graph_text import compare_graphs
from horizon_plugin_pytorch.errors import ExportError, HorizonError
from horizon_plugin_pytorch.export.node_data import _read_nodes
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.program import Program, record_program
from horizon_plugin_pytorch.program.exported import load_exported, save_exported
from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx
from horizon_plugin_pytorch.quantization.qconfig_setter import SensitivityTemplate
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from horizon_plugin_pytorch.utils.quant_profiler import script_profile
from tests.routes import prepared

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
READERS: dict[str, Callable[[Path], Any]] = {
    "model.pt": jit.load,
    "model.pt2": load_exported,
    "model.program": Program.load,
    "model.onnx": _read_nodes,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    set_march(March.BAYES)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("files")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid())
    quantized = convert_fx(prepared(QuantWrapper(net).eval(), (X,)))
    jit.save(torch.jit.trace(quantized, X), folder / "model.pt")
    save_exported(torch.export.export(quantized, (X,)), folder / "model.pt2")
    record_program(quantized, X).save(folder / "model.program")
    export_quantized_onnx(quantized, (X,), folder / "model.onnx")
    torch.save(quantized.state_dict(), folder / "state")
    torch.save([("conv", 0.5)], folder / "table")
    (folder / "text").write_text("nothing\n" * 40)
    (folder / "empty").write_bytes(b"")
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("a/b", "c")
    return folder


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_another_kind_is_refused_by_name(name: str, folder: Path) -> None:
    READERS[name](folder / name)
    for other in set(os.listdir(folder)) - {name} - ({"empty"} if name == "model.onnx" else set()):
        with pytest.raises(HorizonError, match=other.replace(".", r"\.")):
            READERS[name](folder / other)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_by_name_or_read(name: str, folder: Path, tmp_path: Path) -> None:
    """A byte more or less is not always noticed; what is noticed is told."""
    numbers, data = random.Random(0), (folder / name).read_bytes()
    damaged = [data[: numbers.randrange(len(data))] for _ in range(20)]
    for _ in range(60):
        flipped = bytearray(data)
        for _ in range(numbers.choice([1, 3, 10])):
            flipped[numbers.randrange(len(data))] = numbers.randrange(256)
        damaged.append(bytes(flipped))
    refusals = []
    for content in damaged:
        (tmp_path / "damaged").write_bytes(content)
        try:
            READERS[name](tmp_path / "damaged")
        except HorizonError as error:
            refusals.append(str(error))
    assert len(refusals) >= 20 and all("damaged" in text for text in refusals)


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def _with_record(folder: Path, name: str, content: bytes) -> bytes:
    """The exported file with a part replaced."""
    out = io.BytesIO()
    with zipfile.ZipFile(folder / "model.pt2") as archive, zipfile.ZipFile(out, "w") as changed:
        for entry in archive.namelist():
            changed.writestr(entry, content if entry.endswith(name) else archive.read(entry))
    return out.getvalue()


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    """`torch.export.load` would, where its first way fails."""
    pickled = io.BytesIO()
    torch.save(((_Touch(tmp_path / "executed"),), {}), pickled)
    with pytest.raises(ExportError, match="may execute code: its part `data/sample_inputs/model.pt`"):
        load_exported(io.BytesIO(_with_record(folder, "sample_inputs/model.pt", pickled.getvalue())))
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        (config,) = [archive.read(entry) for entry in archive.namelist() if entry.endswith("weights_config.json")]
    for asked in (b'"use_pickle": true', b'"use_pickle":true'):
        changed = _with_record(folder, "weights_config.json", config.replace(b'"use_pickle": false', asked, 1))
        with pytest.raises(ExportError, match=r"may execute code: its part .* has pickled objects"):
            load_exported(io.BytesIO(changed))
    (tmp_path / "model.pt").write_bytes(pickle.dumps(_Touch(tmp_path / "executed")))
    (tmp_path / "model.program").write_bytes(pickled.getvalue())
    for read, name in ((jit.load, "model.pt"), (Program.load, "model.program")):
        with pytest.raises(ExportError):
            read(tmp_path / name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("target", ["load_library::__call__.__call__", "aten::relu.__call__", "aten::relu.nothing"])
def test_a_program_calls_operators_only(target: str, folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "model.program", weights_only=True)
    next(node for node in state["nodes"] if node["op"] == "call_function")["target"] = target
    torch.save(state, tmp_path / "changed")
    with pytest.raises(ExportError, match=rf"changed`: the program calls `{target}`, which this version"):
        Program.load(tmp_path / "changed")


def test_a_table_that_is_none_is_refused(folder: Path) -> None:
    for other in ("text", "empty", "other.zip", "model.onnx"):
        with pytest.raises(HorizonError, match=f"{other}' cannot be read"):
            SensitivityTemplate(folder / other, 1)


def test_a_graph_or_a_report_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.pt' is no text, and no fx_graph\.txt"):
        compare_graphs(folder / "model.pt", folder / "text")
    for text in ("", "{}", "[" * 100_000):
        with pytest.raises(ValueError, match="This is not a profile that this version wrote"):
            read_document(text)


class SingularValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


def test_a_profile_that_fails_leaves_nothing(tmp_path: Path) -> None:
    script = torch.jit.trace(SingularValues(), X)
    with pytest.raises(ExportError, match="has no ONNX form"):
        script_profile(script, X, out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
