"""`model_profiler`: all tools in one go."""

from __future__ import annotations

import copy
import csv
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.profile.document import Metric, read_document
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.utils.quant_profiler import featuremap_similarity, model_profiler
from tests.watch.models import data, stages

EXPLORER_FILES = [f"model_explorer_{what}.json" for what in ("graph", "similarity", "sqnr", "error")]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    set_march(March.NASH_E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(stages("jit-strip"))


def node_data_of(folder: Path) -> dict[str, Any]:
    """Similarities by node; there are the graph of the nodes, and the other measures."""
    graph, similarity, *_ = [json.loads((folder / name).read_text()) for name in EXPLORER_FILES]
    results = similarity[graph["label"]]["results"]
    assert set(results) == {node["id"] for node in graph["graphs"][0]["nodes"]}
    return results


def test_files(models: dict[str, nn.Module], tmp_path: Path) -> None:
    """Every tool's file, and the document in all its forms, with the same numbers."""
    qat = models["validation"]
    found = model_profiler(models["float"], qat, data(), "FvsQ", batches=[data(2)], metric=("top-1", 0.8, 0.7))
    folder = tmp_path / "horizon_quant_debug"
    written = {path.name for path in folder.iterdir()}
    assert written >= {
        "profiler.html", "profiler.json", "profiler.csv", *EXPLORER_FILES,
        "similarity.txt", "ordered_op_error_similarity.txt", "similarity.html",
        "statistic_float.txt", "statistic_float.html", "statistic_qat.txt", "statistic_qat.html",
        "weight_comparison.txt", "qconfig_info.txt", "module_called_count.txt", "unfused_operations.txt",
    }  # fmt: skip
    assert read_document((folder / "profiler.json").read_text()) == found
    assert found.is_complete and found.batches == 2 and found.metric == Metric("top-1", 0.8, 0.7)
    lines = list(csv.DictReader(io.StringIO((folder / "profiler.csv").read_text())))
    assert [line["name"] for line in lines] == [o.name for o in found.operators]
    assert [float(line["similarity"]) for line in lines] == [o.similarity for o in found.operators]
    nodes = node_data_of(folder)
    assert list(nodes) == found.keys and nodes["stem"]["value"] == next(
        o.similarity for o in found.operators if o.name == "stem"
    )
    assert found.threshold == 0.99
    for operator in found.operators:
        assert f"{operator.similarity:.7f}" in (folder / "similarity.txt").read_text()


def test_advice(models: dict[str, nn.Module]) -> None:
    """What is wrong with a model is in the document, and on the page."""
    found = model_profiler(models["float"], models["calibration"], data(), "FvsQ", "here")
    assert "left-in-calibration" in {advice.rule for advice in found.advice}
    assert read_document(Path("here/profiler.json").read_text()).advice == found.advice


def test_settings_of_tools(models: dict[str, nn.Module], tmp_path: Path) -> None:
    """Each tool gets what kwargs_dict has for it; its out_dir is the profiler's."""
    asked: list[nn.Module] = []
    settings: dict[str, dict[str, Any]] = {
        "featuremap_similarity": {"similarity_func": "MSE", "threshold": 0.5, "out_dir": "elsewhere"},
        "get_raw_features": {"prefixes": ("stem",)},
        "profile_featuremap": {"file_name": "numbers"},
        "check_qconfig": {"custom_check_func": lambda module, x, y: asked.append(module), "out_dir": "elsewhere"},
        "get_module_called_count": {"check_leaf_module": lambda module: isinstance(module, nn.Sigmoid)},
        "compare_weights": {"similarity_func": "L1"},
        "check_unfused_operations": {"print_tabulate": False},
    }
    pair = models["qat"], models["converted"]
    found = model_profiler(*pair, data(), mode="QvsQ", out_dir="here", kwargs_dict=settings)
    rows = featuremap_similarity(*pair, data(), "MSE", out_dir=tmp_path)
    assert [o.similarity for o in found.operators] == [row[3] for row in rows]
    assert found.similarity_function == "MSE" and found.threshold == 0.5
    assert not Path("elsewhere").exists() and not Path("horizon_quant_debug").exists() and asked
    statistics = Path("here/numbers_quantized.txt").read_text()
    assert "stem" in statistics and "block" not in statistics


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"check_model": {}}, "no tool that it calls"),
        ({"check_qconfig": {"model": None}}, "model_profiler gives itself"),
        ({"get_raw_features": {"example_inputs": None}}, "model_profiler gives itself"),
        ({"check_qconfig": {"prefix": ()}}, "has no argument 'prefix'; it has prefixes, types"),
    ],
)
def test_wrong_settings(models: dict[str, nn.Module], settings: dict, text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        model_profiler(models["qat"], models["converted"], data(), "QvsQ", kwargs_dict=settings)


@pytest.mark.parametrize(
    ("first", "second", "mode", "text"),
    [
        ("float", "qat", "QvsQ", "Give mode='FvsQ'"),
        ("converted", "qat", "QvsQ", "the other order, with mode='QvsQ'"),
        ("float", "qat", "FvsF", "mode is one of FvsQ, QvsQ, CvsQ"),
    ],
)
def test_wrong_mode(models: dict[str, nn.Module], first: str, second: str, mode: str, text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        model_profiler(models[first], models[second], data(), mode)


def test_models_converted_in_place(models: dict[str, nn.Module]) -> None:
    """Two names for one model, or two quantized models where one should be QAT."""
    with pytest.raises(CheckError, match=r"both models are one.*copy\.deepcopy"):
        model_profiler(models["converted"], models["converted"], data(), "QvsQ")
    with pytest.raises(QuantizationConfigError, match=r"made of the other in place.*copy\.deepcopy"):
        model_profiler(models["converted"], copy.deepcopy(models["converted"]), data(), "QvsQ")


def test_other_models(models: dict[str, nn.Module]) -> None:
    with pytest.raises(CheckError, match="have no operator in common"):
        model_profiler(nn.Sequential(nn.Tanh(), nn.Conv2d(3, 3, 1)), models["qat"], data(), "FvsQ")


def test_metric_by_a_function(models: dict[str, nn.Module]) -> None:
    def top1(model: nn.Module) -> Tensor:
        assert not model.training and not torch.is_grad_enabled()
        return model(data())["left"].mean()

    found = model_profiler(models["qat"], models["converted"], data(), "QvsQ", metric=top1)
    assert found.metric is not None and found.metric.name == "top1"
    assert found.metric.first == pytest.approx(found.metric.second, abs=0.1)
    with pytest.raises(TypeError, match="metric is"):
        model_profiler(models["qat"], models["converted"], data(), "QvsQ", metric=0.5)  # type: ignore[arg-type]


def test_an_interrupt(models: dict[str, nn.Module]) -> None:
    """The files have what was found until then."""

    def interrupted() -> Iterator[Tensor]:
        yield data(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_profiler(models["qat"], models["converted"], data(), "QvsQ", "here", batches=interrupted())
    found = read_document(Path("here/profiler.json").read_text())
    assert not found.is_complete and found.batches == 2 and found.operators and found.weights
    assert list(node_data_of(Path("here"))) == found.keys


def test_runs_are_shared(models: dict[str, nn.Module]) -> None:
    """Each runs to pair its calls and for statistics, and in step with the other; one for all checks, in both modes."""
    qat, quantized = copy.deepcopy(models["qat"]), copy.deepcopy(models["converted"])
    ran: list[str] = []
    for name, model in (("qat", qat), ("quantized", quantized)):
        model.register_forward_pre_hook(lambda module, x, name=name: ran.append(name))
    model_profiler(qat, quantized, data(), "QvsQ")
    assert (ran.count("qat"), ran.count("quantized")) == (4, 2)


def test_an_unknown_task(models: dict[str, nn.Module]) -> None:
    with pytest.raises(QuantizationConfigError, match="no task 'cooking'"):
        model_profiler(models["qat"], models["converted"], data(), "QvsQ", task="cooking")
