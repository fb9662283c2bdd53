"""Results of each operator of a script, compared with ONNX Runtime and with another script: faults are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import jit
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_fixed_point import FIXED_POINT
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.program.note import operator_name
from horizon_plugin_pytorch.program.script import ScriptSteps
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    check_model,
    convert,
    convert_fx,
    prepare,
)
from horizon_plugin_pytorch.utils.quant_profiler import compare_script_models, script_profile
from tests.routes import calibrate, prepared, qconfig

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NAMES = ["arg0", "_body_0_hz_conv", "_body_1_hz_lut", "_hz_add", "_aten_max_val", "_aten_max_arg"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.quant(x))
        values, positions = (x + x).max(1)
        return self.dequant(values), positions


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def quantized() -> nn.Module:
    set_march(March.BAYES)
    torch.manual_seed(0)
    return convert_fx(prepared(Net().eval(), (X,)))


def trace(model: nn.Module) -> Any:
    return torch.jit.trace(model, X)


def rows(out: str) -> dict[str, str]:
    return dict(line.split() for line in out.splitlines() if line.endswith(("True", "False")))


def test_a_model_its_trace_and_its_file_have_the_same_rows(quantized: nn.Module, capsys: Any, tmp_path: Path) -> None:
    jit.save(trace(quantized), tmp_path / "model.pt")
    tables = []
    for model in (quantized, trace(quantized), jit.load(tmp_path / "model.pt")):
        results = script_profile(model, X, tmp_path / "out")
        assert list(results) == NAMES
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] == tables[2] and list(rows(tables[0])) == NAMES
    saved = torch.load(tmp_path / "out" / "horizon_script_result.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in results.items())


def test_steps_give_what_the_script_gives(quantized: nn.Module) -> None:
    script = trace(quantized)
    for found, wanted in zip(ScriptSteps(script)(X), script(X), strict=True):
        assert torch.equal(found, wanted)


def test_a_fault_of_one_engine_is_named(quantized: nn.Module, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FIXED_POINT["horizon::lookup"]

    def faulty(g: Any, site: Any, q: str, table: Tensor, offset: int) -> Any:
        return known.lower(g, site, q, table + (torch.arange(table.numel()) == 130), offset)

    monkeypatch.setitem(FIXED_POINT, "horizon::lookup", dataclasses.replace(known, lower=faulty))
    script_profile(quantized, X)
    out = capsys.readouterr().out
    assert rows(out)["_body_0_hz_conv"] == "True" and rows(out)["_body_1_hz_lut"] == "False"
    assert "differ from ONNX Runtime; _body_1_hz_lut is the first" in out
    (line,) = [line for line in out.splitlines() if line.startswith("_body_1_hz_lut") and "horizon::lookup" in line]
    integers = script_profile(quantized, X, compare_with_hbdk_parser=False)["_body_0_hz_conv"]
    count = int((integers == 130 - 128).sum())
    assert count and line.split()[2:5] == [str(integers.numel()), str(count), "1"]
    assert "same with" not in out


def test_a_fault_of_a_hidden_step_is_shown(quantized: nn.Module, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FIXED_POINT["horizon::dequantize"]

    def faulty(g: Any, site: Any, q: str, *args: Any) -> Any:
        return g.node("Add", known.lower(g, site, q, *args), g.scalar(1.0, torch.float32))

    monkeypatch.setitem(FIXED_POINT, "horizon::dequantize", dataclasses.replace(known, lower=faulty))
    script_profile(quantized, X)
    assert "_dequant_hz_dequantize" in rows(capsys.readouterr().out)


def test_two_scripts_that_differ(quantized: nn.Module, capsys: Any) -> None:
    first, second = trace(quantized), jit.to_device(trace(quantized), "cpu")
    inner = getattr(second.body, "1")._c._get_method("forward").graph
    (table,) = [n for n in inner.findAllNodes("prim::Constant") if n.output().type().kind() == "TensorType"]
    table.t_("value", table.t("value") + 3)
    compare_script_models(first, second, X)
    out = capsys.readouterr().out
    assert rows(out)["_body_0_hz_conv"] == "True" and rows(out)["_body_1_hz_lut"] == "False"
    assert "differ from the second script; _body_1_hz_lut is the first" in out and "All ops" not in out


def test_nodes_can_be_chosen(quantized: nn.Module) -> None:
    results = script_profile(quantized, X, mark_node_func=lambda node: operator_name(node) == "horizon::conv")
    assert list(results) == ["arg0", "_body_0_hz_conv"]


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            x = x + 1
        return x


def test_what_cannot_be_compared_is_said(quantized: nn.Module) -> None:
    with pytest.raises(ExportError, match="float model"):
        script_profile(nn.ReLU(), X)
    with pytest.raises(ExportError, match="call `convert_fx`"):
        script_profile(prepared(Net().eval(), (X,)), X)
    with pytest.raises(ExportError, match=r"`prim::If`.*torch\.jit\.trace"):
        script_profile(torch.jit.script(Branch()), X)
    with pytest.raises(TypeError, match="compare_script_models takes a TorchScript module"):
        compare_script_models(quantized, quantized, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nowhere"):
        script_profile(quantized, X, march="nowhere")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(1), torch.zeros(1)), "the script takes 1 arguments, got 2"),
        ((), "the script takes 1 arguments, got 0"),
        (
            (torch.zeros(2, 7),),
            r"does not run on these inputs: `\S+` at `module`.* got float32\[2, 7\].*cannot be",
        ),
        (("text",), r"does not run on these inputs: .* got 'text'"),
    ],
)
def test_inputs_that_do_not_fit_a_script_are_told(inputs: Any, message: str) -> None:
    x = torch.randn(2, 4)
    script = torch.jit.trace(convert_fx(prepared(QuantWrapper(nn.Linear(4, 3)).eval(), (x,))), x)
    for tool in (script_profile, check_model, lambda m, given: compare_script_models(m, m, given)):
        with pytest.raises(ExportError, match=message):
            tool(script, inputs)
    with pytest.raises(ExportError, match="on `meta` and have no numbers"):
        script_profile(jit.to_device(script, "meta"), x)


class Structured(nn.Module):
    """Takes and gives what no tracer takes: None, numbers and dictionaries of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 3)

    def forward(self, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        y = self.conv(self.quant(inputs["images"][0]))
        return {"parts": [self.dequant(y) * times, None, 3], "none": None, "second": inputs["images"][1][0] / 0 * 0}


@pytest.mark.parametrize("method", [PrepareMethod.JIT, PrepareMethod.JIT_STRIP])
def test_structures_that_no_tracer_takes(method: PrepareMethod, capsys: Any) -> None:
    set_march(March.BAYES)
    args = ({"images": [X, (X + 0.5, None)]}, 2)
    qat = prepare(Structured().eval(), args, qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    model = convert(calibrate(qat, args))
    capsys.readouterr()
    results = script_profile(model, args)
    out = capsys.readouterr().out
    assert list(results)[:3] == ["arg0", "arg1", "_conv_hz_conv"]
    assert torch.equal(results["arg1"], X + 0.5)
    assert set(rows(out).values()) == {"True"}  # NaN equals NaN
    assert out.rstrip().endswith("(here: ONNX Runtime on the integer graph).")
