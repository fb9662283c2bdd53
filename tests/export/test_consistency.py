"""`ConsistencyAnalyzer`, `HbirModelProfiler` and `HbirModuleWrapper` on stages of one model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_profiler.consistency_profiler import ConsistencyAnalyzer
from horizon_plugin_profiler.hbir_model_profiler import HbirModelProfiler
from horizon_plugin_profiler.model_profilerv2 import QuantAnalysis
from horizon_plugin_profiler.utils.model_helper import HbirModuleWrapper
from horizon_plugin_pytorch.errors import CheckError, ExportError, QuantizationConfigError
from horizon_plugin_pytorch.quantization import convert, hbdk4
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.analysis.quant_analysis.models import batches, calibrated, float_net

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return calibrated(float_net(), "prepare")


def errors(analyzer: ConsistencyAnalyzer) -> list[float]:
    return [of["L1"][0][1] for of in analyzer.auto_find_bad_case(batches()).worst.values()]


def test_an_integer_graph(model: nn.Module, tmp_path: Path) -> None:
    graph = hbdk4.export(model, batches()[0])
    for later in (graph, HbirModuleWrapper(graph)):
        analyzer = ConsistencyAnalyzer((model, later), batches()[0], mode="export", out_dir=tmp_path)
        assert errors(analyzer) == [0, 0, 0]
        rows = analyzer.compare_per_layer(prefixes=("conv", "fc", "add"))
        assert [row.name.split("[")[0] for row in rows] == ["conv1", "add", "fc"]
        assert all(row.atol == 0 for row in rows)
    lines = (tmp_path / "compare_with_onnx_runtime.csv").read_text().splitlines()
    differing = [line for line in lines[1:] if line.split(",")[-1] != "0.0"]
    assert len(lines) > 5 and all("aten::sigmoid" in line for line in differing)  # the one float operator
    with pytest.raises(CheckError, match="give the converted model"):
        analyzer.sensitivity()


def test_another_checkpoint_is_found(model: nn.Module, tmp_path: Path) -> None:
    """One weight of the later stage is another: the layer is named, by itself and by what is behind it."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.bias += 0.1
    analyzer = ConsistencyAnalyzer({"qat": model, "int": convert(other)}, batches()[0], out_dir=tmp_path)
    rows = analyzer.sensitivity()
    assert rows[0][0] == "fc" and rows[0][2] > 0 and not any(row[2] for row in rows[1:] if row[0] != "fc")
    assert torch.load(tmp_path / "consistency_sensitive_ops.pt") == rows
    assert errors(analyzer)[0] > 0
    rows = {row.name: row.atol for row in analyzer.compare_per_layer()}
    assert rows["norm"] == 0 and rows["fc"]


def test_a_file_in_onnx_runtime(model: nn.Module, tmp_path: Path) -> None:
    export_quantized_onnx(convert(copy.deepcopy(model)), batches()[0], tmp_path / "model.onnx")
    analyzer = ConsistencyAnalyzer((model, tmp_path / "model.onnx"), batches()[0], out_dir=tmp_path)
    assert max(errors(analyzer)) < 1e-6 and errors(analyzer)[1:] == [0, 0]  # the first is behind a sigmoid in float
    with pytest.raises(CheckError, match="gives outputs only"):
        analyzer.compare_per_layer()
    calls = []

    def infer(stage: Any, batch: Any) -> Any:
        calls.append(stage)
        return stage(*batch)

    own = ConsistencyAnalyzer((model, tmp_path / "model.onnx"), batches()[0], infer, out_dir=tmp_path)
    assert max(errors(own)) < 1e-6 and len(calls) == 6
    with pytest.raises(ExportError, match="cannot be opened"):
        ConsistencyAnalyzer((model, tmp_path / "none.onnx"), batches()[0], out_dir=tmp_path)


def test_arguments(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(QuantizationConfigError, match="pre_export, export, convert"):
        ConsistencyAnalyzer((model, model), batches()[0], mode="fake_quant", out_dir=tmp_path)
    with pytest.raises(TypeError, match="two stages"):
        ConsistencyAnalyzer([model], batches()[0], out_dir=tmp_path)
    with pytest.raises(ExportError, match="takes what `hbdk4.export` gives"):
        HbirModelProfiler(model, tmp_path)  # type: ignore[arg-type]


def test_a_graph_is_recorded_and_called_as_the_model(model: nn.Module, tmp_path: Path) -> None:
    graph = hbdk4.export(model, batches()[0])
    wrapped = HbirModuleWrapper(graph)
    with HbirModelProfiler(wrapped, tmp_path) as profiler:
        out = wrapped(*batches()[1])
        out = wrapped(*batches()[0])
    with torch.no_grad():
        assert torch.equal(out["features"][0], model(*batches()[0])["features"][0])
    infos = profiler.get_info_manager()
    assert len(infos) == len({info.index for info in infos}) and (tmp_path / "statistic.txt").exists()
    convolution = next(info for info in infos if info.op_type == "horizon::conv")
    assert convolution.path == "conv1" and convolution.statistics[0].scale is not None
    names = {name.partition("(")[0] for name in (info.name for info in infos)}
    assert {"quant", "conv1", "fc"} <= names
    with HbirModelProfiler(graph, tmp_path / "other") as other:
        pass
    assert not len(other.get_info_manager())


def test_infer_func_runs_both_models(model: nn.Module, tmp_path: Path) -> None:
    net = float_net()

    def infer(stage: Any, batch: Any) -> Any:
        return stage(batch["x"], y=batch["y"])["score"]

    qa = QuantAnalysis(net, model, "fake_quant", out_dir=tmp_path, infer_func=infer)
    found = qa.auto_find_bad_case([{"x": x, "y": y, "name": "one"} for x, y in batches()])
    assert list(found.worst) == ["0"]
    assert qa.compare_per_layer()[0].name == "quant" and qa.sensitivity()["0"]
