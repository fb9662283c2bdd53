"""The commands: what they print, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_plugin_profiler.command_line.run import main
from horizon_plugin_profiler.command_line.targets import models_of
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, Operator, read_document
from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx
from tests.command_line.conftest import CODE

ROOT = Path(__file__).parents[2]


def as_json(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_check_of_a_float_model(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "nets.py:make", "--input", "2x6"]) == 0
    said = capsys.readouterr()
    assert "not fused: module.0 + module.1" in said.out
    assert "a word of the user's code" in said.err and "a word" not in said.out
    (folder / "limits.toml").write_text("[check]\nunfused = 0\n")
    code, found = as_json(capsys, "check", "nets.py:make", "--input", "2x6", "--thresholds", "limits.toml")
    assert code == found["exit_code"] == 1
    assert found["unfused"] == [["module.0", "module.1"]] and found["stage"] == "float"
    assert [limit["text"] for limit in found["broken"]] == ["check: unfused is 1, must be at most 0 (check)"]


def test_check_of_a_prepared_model(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, found = as_json(capsys, "check", "nets.py:pair", "--input", "2x6", "--out", "checked")
    assert code == 0 and found["stage"] == "qat" and not found["unfused"]
    assert "high precision is possible" in found["mistakes"][0]["text"]
    assert "module.2" in Path(found["file"]).read_text()


def test_memory(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "limits.json").write_text('{"memory": {"peak": "100"}}')
    code, found = as_json(capsys, "memory", "nets.py:make", "--input", "64x6", "--thresholds", "limits.json")
    assert code == 1 and found["broken"][0]["limit"] == 100
    (relu,) = [row for row in found["rows"] if row["type"] == "ReLU" and row["phase"] == "forward"]
    assert relu["after"] - relu["before"] == 64 * 8 * 4
    assert Path(found["page"]).is_file()
    code, found = as_json(capsys, "memory", "nets.py:Two", "--input", "64x6")
    assert code == 0 and found["rows"][-1]["phase"] == "backward"
    code, found = as_json(capsys, "memory", "nets.py:Two", "--input", "64x6", "--loss", "nets.py:only_first")
    assert code == 0 and not [row for row in found["rows"] if row["name"] == "second" and row["phase"] == "backward"]
    assert main(["memory", "nets.py:make", "--input", "64x6", "--device", "meta"]) == 2
    assert "cannot be measured" in capsys.readouterr().err


def test_show(folder: Path, capsys: pytest.CaptureFixture) -> None:
    advice = Advice("outliers", "warning", "conv", (0,), "One value is 100.", "Use int16.")
    operators = (Operator(0, "conv", "conv", "Conv2d", similarity=0.9, sqnr=9.0),)
    document = Document("Net", "FvsQ", "float", "qat", operators=operators, advice=(advice,))
    (folder / "profiler.json").write_text(document.to_json())
    assert main(["show", "."]) == 0
    said = capsys.readouterr().out
    assert "conv" in said and "0.9" in said and "warning: conv: One value is 100. Use int16." in said
    (folder / "limits.toml").write_text("[outputs]\nsimilarity = 0.99\n")
    code, found = as_json(capsys, "show", "profiler.json", "--thresholds", "limits.toml")
    assert code == 1 and found["outputs"][0]["name"] == "conv"
    (folder / "profiler.json").write_text(replace(document, is_complete=False).to_json())
    assert main(["show", "."]) == 0
    assert "did not finish" in capsys.readouterr().out
    assert main(["show", ".", "--thresholds", "limits.toml"]) == 2
    assert "cannot be judged" in capsys.readouterr().err
    assert main(["check", "nets.py:make", "--input", "2x6", "--thresholds", "limits.toml"]) == 2
    assert "limits nothing that this command measures: it reads check" in capsys.readouterr().err
    assert main(["open", "profiler.json"]) == 2
    assert "There is no page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "missing.json"], "missing.json cannot be read: No such file"),
        (["show", "nets.py"], "nets.py: This is not a profile"),
        (["check", "nets.py:make"], "required: --input"),
        (["check", "nets.py:make", "--input", "1x7"], r"shapes cannot be multiplied"),
        (["check", "nets.py:make", "--input", "1x6", "--march", "x3"], "invalid choice: 'x3'"),
        (["check", "nets.py:make", "--input", "1x6", "--thresholds", "none.toml"], "none.toml cannot be read"),
        (["chek"], "invalid choice"),
    ],
)
def test_wrong_usage_is_said_without_a_traceback(
    folder: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out


def test_errors_of_the_users_code_are_shown_with_their_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "nets.py:Wrong", "--input", "2x3"]) == 2
    said = capsys.readouterr().err
    assert "return x @ x" in said and "torch/nn/modules" not in said
    code, found = as_json(capsys, "check", "nets.py:broken", "--input", "2x3")
    assert code == 2 and "no weights here" in found["error"]


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"} | variables
    command = [sys.executable, "-m", "horizon_plugin_profiler", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.processes
@pytest.mark.slow
def test_without_arguments_there_is_help_with_examples(folder: Path) -> None:
    done = run(folder=folder)
    assert done.returncode == 2 and not done.stderr
    assert "examples:" in done.stdout and "exit codes: 0 fine; 1" in done.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_ends_with_the_code_and_prints_json_only(folder: Path) -> None:
    (folder / "limits.toml").write_text("[check]\nunfused = 0\n")
    done = run("check", "nets:make", "--input", "2x6", "--thresholds", "limits.toml", "--json", folder=folder)
    assert done.returncode == 1
    assert json.loads(done.stdout)["broken"][0]["name"] == "check"


@pytest.mark.processes
@pytest.mark.slow
def test_open_starts_the_users_browser(folder: Path) -> None:
    (folder / "profiler.json").write_text(Document("Net", "FvsQ", "float", "qat").to_json())
    (folder / "profiler.html").write_text("<html></html>")
    browser = folder / "browser.sh"
    browser.write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    browser.chmod(0o755)
    assert run("open", ".", folder=folder, BROWSER=f"{browser} %s").returncode == 0
    assert (folder / "opened").read_text().strip() == (folder / "profiler.html").resolve().as_uri()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, and reports of two checkpoints of them, the second one worse."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "nets.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _, qat = models_of("nets.py:pair")
        torch.save(qat.state_dict(), "good.pt")
        with torch.no_grad():
            qat.module[2].weight.mul_(torch.linspace(0.2, 2, 8))
        torch.save({"state_dict": qat.state_dict()}, "bad.pt")
        for name in ("good", "bad"):
            arguments = [
                "nets.py:pair",
                "--input",
                "32x6",
                "--batch",
                "20",
                "--checkpoint",
                f"{name}.pt",
                "--out",
                name,
            ]
            assert main(["profile", *arguments, "--metric", "nets.py:share_of_positive"]) == 0
    return folder


@pytest.fixture
def runs(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(two_runs)
    return two_runs


def test_profile_writes_page_and_report_and_keeps_limits(runs: Path, capsys: pytest.CaptureFixture) -> None:
    document = read_document(Path("good/profiler.json").read_text())
    assert document.batches == 2
    assert (document.mode, document.first, document.second) == ("FvsQ", "float", "qat")
    assert document.metric is not None and document.metric.name == "share_of_positive"
    assert "<html" in Path("good/profiler.html").read_text()
    Path("limits.toml").write_text('[operators."module.2"]\nsimilarity = 0.97\n[metric]\nloss = 0.2\n')
    code, found = as_json(capsys, "show", "good", "--thresholds", "limits.toml")
    assert code == 0 and found["page"] == "good/profiler.html"
    code, found = as_json(capsys, "show", "bad", "--thresholds", "limits.toml")
    similarity = next(row["similarity"] for row in found["operators"] if row["name"] == "module.2")
    assert code == 1 and found["broken"][0]["value"] == similarity < 0.97
    assert f"module.2: similarity is {similarity:.7g}, must be at least 0.97" in found["broken"][0]["text"]


def test_nodes_colours_an_exported_file(runs: Path, capsys: pytest.CaptureFixture) -> None:
    export_to_onnx(models_of("nets.py:pair")[0], torch.zeros(2, 6), "float.onnx")
    code, found = as_json(capsys, "nodes", "good", "float.onnx", "--out", "coloured")
    assert code == 0 and 0 < found["known"] < found["nodes"]
    results = json.loads(Path("coloured/model_explorer_float_similarity.json").read_text())["QuantWrapper"]["results"]
    similarity = {o.name: o.similarity for o in read_document(Path("good/profiler.json").read_text()).operators}
    assert results["module/2/Gemm"]["value"] == similarity["module.2"]
    assert main(["nodes", "good", "nets.py"]) == 2 and "cannot be read as an ONNX file" in capsys.readouterr().err


def test_compare_puts_reports_side_by_side(runs: Path, capsys: pytest.CaptureFixture) -> None:
    Path("drop.toml").write_text('[drop.operators."*"]\nsqnr = 3\n')
    assert main(["compare", "good", "bad/profiler.json", "--thresholds", "drop.toml", "--top", "1"]) == 1
    said = capsys.readouterr().out
    assert "bad: module.2: loss of sqnr" in said and "module.0(I)" not in said.split("broken:")[0]
    page, table = Path("compare/compare.html").read_text(), Path("compare/compare.csv").read_text()
    assert "QuantWrapper (bad)" in page and table.startswith('operator,"similarity, good"')
    code, found = as_json(capsys, "compare", "bad", "good", "--thresholds", "drop.toml")
    assert code == 0 and not found["notes"] and set(found["runs"]) == {"good", "bad"}
    lost = {row["name"]: row["sqnr_lost"] for row in found["operators"]}
    assert lost["quant"] == 0 and lost["module.2"] < -3


def test_compare_runs_checkpoints_and_says_what_makes_runs_differ(runs: Path, capsys: pytest.CaptureFixture) -> None:
    inputs = ["--input", "32x6", "--out", "checkpoints"]
    code, found = as_json(
        capsys, "compare", "nets.py:pair", "--checkpoint", "good.pt", "--checkpoint", "bad.pt", *inputs
    )
    assert code == 0 and Path("checkpoints/2_bad/profiler.json").is_file()
    assert {row["name"]: row["sqnr_lost"] for row in found["operators"]}["module.2"] > 3
    profile = ["profile", "nets.py:pair", "--seed", "1", "--similarity", "MSE", "--input", "2x6", "--out", "other"]
    assert main(profile) == 0
    _, found = as_json(capsys, "compare", "good", "other")
    assert [note.partition(":")[0] for note in found["notes"]] == [
        "The runs saw different inputs", "The runs measured similarity by different functions"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "nets.py:make", "--input", "2x6"], "gives one model, and two are compared"),
        (["profile", "nets.py:make", "nets.py:make", "--input", "2x6"], "a float model and a float one"),
        (["profile", "nets.py:pair", "--input", "2x6", "--metric", "nets.py:number"], "give a function of a model"),
        (
            ["profile", "nets.py:pair", "--input", "2x6", "--metric", "builtins:str"],
            "gives a str: a metric is a number",
        ),
        (["compare", "good"], "Give two reports"),
        (["compare", "good", "--checkpoint", "good.pt"], "--checkpoint at least twice"),
        (["compare", "x:y", "--checkpoint", "good.pt", "--checkpoint", "bad.pt"], "give their inputs"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    runs: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out
