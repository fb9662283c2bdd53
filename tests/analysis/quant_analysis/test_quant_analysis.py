"""`QuantAnalysis` on a network by both ways of preparing; robust against what users give it."""

from __future__ import annotations

import copy
import csv
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import horizon_plugin_pytorch as horizon
from horizon_plugin_profiler import featuremap_similarity
from horizon_plugin_profiler.model_profilerv2 import ModelProfiler, QuantAnalysis
from horizon_plugin_pytorch.analysis.quant_analysis.layers import abnormal_layers
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject
from horizon_plugin_pytorch.errors import CalibrationWarning, CheckError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    get_default_qconfig,
    get_fake_quantize,
    get_qconfig,
    hbdk4,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter, SensitivityTemplate
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    default_calibration_qconfig_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
)
from tests.analysis.quant_analysis.models import Net, batches, calibrated, float_net

pytestmark = pytest.mark.filterwarnings("ignore:calibration. ranges differ")
NET = float_net()
_MODELS: dict[str, nn.Module] = {}


def model_of(way: str) -> nn.Module:
    if way not in _MODELS:
        _MODELS[way] = calibrated(NET, way)
    return _MODELS[way]


def analysis(folder: Path, way: str = "prepare", **kwargs: Any) -> QuantAnalysis:
    return QuantAnalysis(NET, model_of(way), "fake_quant", out_dir=folder, **kwargs)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}


@pytest.mark.parametrize("way", ["fx", "prepare"])
def test_the_whole_pipeline(way: str, tmp_path: Path) -> None:
    model = model_of(way)
    before = state(model)
    qa = analysis(tmp_path, way)
    cases = qa.auto_find_bad_case(batches())
    assert list(cases.worst) == ["0-score", "0-position", "0-features-0"]
    # by hand: the worst batch of an output
    errors = []
    for batch in batches():
        with torch.no_grad():
            errors.append(float((NET(*batch)["features"][0] - model(*batch)["features"][0]).abs().mean()))
    index, value = cases.worst["0-features-0"]["L1"][0]
    assert index == errors.index(max(errors)) and math.isclose(value, max(errors), rel_tol=1e-5)
    text = (tmp_path / "badcase.txt").read_text()
    for title in (
        "The bad case input index of each output:",
        "The metric results of each badcase:",
        "The bad case input index of the worst output:",
    ):
        assert title in text
    assert "Name/Index      Cosine    MSE    L1    KL    SQNR" in text and "metric      dataloader index" in text

    qa.run()
    rows = {row.name: row for row in qa.compare_per_layer()}
    assert rows["bn1"].types[1] == rows["relu1"].types[1] == "torch.nn.modules.linear.Identity"
    assert not rows["conv1"].metrics and not rows["bn1"].metrics and rows["relu1"].metrics["Cosine"] > 0.99
    assert rows["conv1"].types == (
        "torch.nn.modules.conv.Conv2d", "horizon_plugin_pytorch.nn.qat.conv2d.ConvReLU2d",
    )  # fmt: skip
    assert rows["add"].types[0] == "horizon_plugin_pytorch.nn.quantized.functional_modules.FloatFunctional.add"
    with (tmp_path / "compare_per_layer_out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[1:] == [
        "mod_name", "base_op_type", "analy_op_type", "shape", "quant_dtype", "qscale", "Cosine", "MSE", "L1", "KL",
        "SQNR", "Atol", "Rtol", "base_model_min", "analy_model_min", "base_model_max", "analy_model_max",
        "base_model_mean", "analy_model_mean", "base_model_var", "analy_model_var", "max_atol_diff", "max_qscale_diff",
    ]  # fmt: skip
    quant = next(row for row in table if row["mod_name"] == "quant")
    assert math.isclose(
        float(quant["max_qscale_diff"]), float(quant["max_atol_diff"]) / float(quant["qscale"]), rel_tol=1e-3
    )
    layers = (tmp_path / "compare_per_layer_out.html").read_text()
    assert "<td>relu1</td>" in layers and f"relu1: {rows['relu1'].metrics['Cosine']:.7f}" in layers
    for name in ("profiler.html", "abnormal_layer_advisor.csv", "abnormal_layer_advisor.html", "badcase_report.html"):
        assert (tmp_path / name).stat().st_size
    for folder in ("baseline_model", "analysis_model"):
        info = torch.load(next((tmp_path / folder / "op_infos").glob("fc_*.opinfo")), weights_only=True)
        assert info["output"][0].shape == (2, 5) and info["op_states"]["weight"].shape == (5, 8) and info["loc"]
        assert (tmp_path / folder / "statistic.csv").exists()

    tables = qa.sensitivity()
    assert list(tables) == ["0-score", "0-position", "0-features-0"]
    values = [row[3] for row in tables["0-score"]]
    assert values == sorted(values, reverse=True) and values[0] > 0
    kinds = {(row[0], row[1]) for row in tables["0-score"]}
    assert {("conv1", "weight"), ("conv1", "activation"), ("fc", "weight"), ("side", "activation")} <= kinds
    dead = {row[0]: row[3] for row in tables["0-features-0"]}
    assert max(dead["fc"], dead["side"]) < 1e-6  # they are behind the output
    text = (tmp_path / "output_0-score_L1_sensitive_ops.txt").read_text()
    assert text.split()[:6] == ["op_name", "sensitive_type", "op_type", "L1", "quant_dtype", "flops"]
    first = tables["0-score"][0]
    page = (tmp_path / "output_0-score_L1_sensitive_ops.html").read_text()
    assert f"<tr><td>{first[0]}</td><td>{first[1]}</td>" in page and page.count("<path") == len(values)
    assert not list(tmp_path.glob("sensitivity_progress*"))
    after = state(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert get_fake_quantize(model) is FakeQuantState.VALIDATION


def test_one_quantizer_alone_by_hand(tmp_path: Path) -> None:
    """The reference measure: everything in float but the weight of one layer."""
    model, batch = copy.deepcopy(model_of("fx")), batches()[0]
    qa = QuantAnalysis(NET, model, "fake_quant", out_dir=tmp_path)
    qa.set_bad_case(batch)
    table = {(row[0], row[1]): row[3] for row in qa.sensitivity("MSE")["0-features-0"]}
    weight = model.conv1.weight_fake_quant.round_weight(model.conv1.weight.detach())
    bare = copy.deepcopy(NET)
    bare.bn1 = nn.Identity()
    bare.conv1.weight.data, bare.conv1.bias.data = weight, model.conv1.bias.detach()
    with torch.no_grad():
        expected = float((bare(*batch)["features"][0] - NET(*batch)["features"][0]).square().mean())
    assert math.isclose(table["conv1", "weight"], expected, rel_tol=1e-4)


def test_results_before_a_quantizer_are_kept() -> None:
    """Runs with kept results give what whole runs give, and run less."""
    model, batch = model_of("prepare"), batches()[0]
    calls = 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1

    with PartlyRounded(ModelSubject(model, None, "test"), batch, "test") as runs:
        last = next(one for one in runs.roundings if one.site.operator == "fc")
        runs.run([])
        hook = model.conv1.activation_post_process.register_forward_hook(count)
        found = runs.run([last.quantizer])["score"]
        assert runs._kept is not None and calls == 0
        runs._kept = None
        assert torch.equal(found, runs.run([last.quantizer])["score"]) and calls == 1
        hook.remove()


def test_a_model_that_remembers_begins_each_run_anew(tmp_path: Path) -> None:
    """What a forward keeps for the next one does not leak from one measurement into another."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.fc, self.relu, self.dequant = QuantStub(), nn.Linear(4, 4), nn.ReLU(), DeQuantStub()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            out = self.dequant(self.relu(self.fc(self.quant(x)))) + self.seen
            self.seen += 1
            return out

    torch.manual_seed(0)
    net, x = Remembering().eval(), torch.randn(3, 4)
    set_march(March.NASH_E)
    model = prepare(copy.deepcopy(net), x, default_calibration_qconfig_setter, out_dir=None)
    set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
    model(x)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    for one in (net, model):
        one.seen.zero_()
    qa = QuantAnalysis(net, model, "fake_quant", out_dir=tmp_path)
    assert max(of["L1"][0][1] for of in qa.auto_find_bad_case([x, x]).worst.values()) < 0.1
    assert max(row[3] for row in qa.sensitivity()["0"]) < 0.1
    assert float(net.seen) == float(model.seen) == 0


def test_tables_feed_the_setters_and_templates(tmp_path: Path) -> None:
    qa = analysis(tmp_path)
    qa.auto_find_bad_case(batches())
    qa.sensitivity()
    table = torch.load(tmp_path / "output_0-score_L1_sensitive_ops.pt")
    first = [row[0] for row in table if row[1] == "activation"][:2]
    setters = [
        (
            sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, topk=2),
            default_calibration_qconfig_setter,
        ),
        QconfigSetter(
            reference_qconfig=get_qconfig(), templates=[SensitivityTemplate(table, 2, sensitive_type="activation")]
        ),
    ]
    for setter in setters:
        model = calibrated(NET, "prepare", setter)
        int16 = {
            name.removesuffix(".activation_post_process")
            for name, module in model.named_modules()
            if isinstance(module, FakeQuantize) and str(module.dtype) == "qint16"
        }
        assert set(first) <= int16 | {name.rpartition(".")[0] for name in int16}


def test_a_planted_operator_is_found_and_raised(tmp_path: Path) -> None:
    net = float_net()
    model = calibrated(net, "fx")
    model.side.activation_post_process.set_qparams(0.5)
    qa = QuantAnalysis(net, model, "fake_quant", out_dir=tmp_path)
    qa.auto_find_bad_case(batches(), metric="Cosine")
    assert qa.sensitivity()["0-score"][0][:2] == ["side", "activation"]
    rows = qa.tune_bad_case({"0-score": ("Cosine", 0.99999)})["0-score"]
    assert rows and rows[0][0] == "side" and len(rows) < 5
    assert "yes" in (tmp_path / "tune_bad_case.txt").read_text()
    assert torch.load(tmp_path / "tune_bad_case_0-score.pt") == rows
    skipped = qa.tune_bad_case({"0-score": {"Cosine": 0.9}}, skip_prefix="side")["0-score"]
    assert all(row[0] != "side" for row in skipped)


def test_the_estimate_finds_what_the_measure_finds(tmp_path: Path) -> None:
    def named(out: Any) -> Any:
        return [out["score"] * 2, out["features"][0].mean(1), out["position"]]

    qa = analysis(tmp_path, post_process=named)
    qa.auto_find_bad_case(batches(), metric="MSE")
    measured, estimated = qa.sensitivity(), qa.sensitivity(use_sensitivity_v2=True)
    assert set(measured) == {"0-0", "0-1", "0-2"} and set(estimated) == {"0-0", "0-1"}  # the last are positions
    for output in estimated:
        exact = {(row[0], row[1]): row[3] for row in measured[output]}
        found = [(row[0], row[1]) for row in estimated[output]]
        assert set(found) == set(exact)
        top = len(exact) // 3
        assert sum(exact[key] for key in found[:top]) > 0.9 * sum(sorted(exact.values())[-top:])
        assert math.isclose(estimated[output][0][3], exact[found[0]], rel_tol=2)
    with pytest.raises(CheckError, match="cannot be estimated: 0-2 .it has no gradient"):
        qa.sensitivity(use_sensitivity_v2=True, outputs=["0-0", "0-2"])
    with pytest.raises(QuantizationConfigError, match="estimates MSE"):
        qa.sensitivity("Cosine", use_sensitivity_v2=True)
    drawn = qa.sensitivity(use_sensitivity_v2=True, draws=2)
    with torch.inference_mode():
        assert qa.sensitivity(use_sensitivity_v2=True, draws=2) == drawn
    with pytest.raises(QuantizationConfigError, match="draws are those of an estimate"):
        qa.sensitivity(draws=3)
    again = [qa.sensitivity(use_sensitivity_v2=True, outputs=["0-1"], draws=3) for _ in range(2)]
    assert again[0] == again[1] != qa.sensitivity(use_sensitivity_v2=True, outputs=["0-1"], draws=1)
    assert qa.sensitivity(use_sensitivity_v2=True) == estimated  # whatever the clock says
    apart = analysis(tmp_path, post_process=lambda out: torch.tensor(out["score"].detach().numpy()))
    apart.set_bad_case(batches()[0])
    with pytest.raises(CheckError, match="no gradient"):
        apart.sensitivity(use_sensitivity_v2=True)
    with pytest.raises(CheckError, match="the baseline gives no output 'boxes'"):
        apart.sensitivity(outputs=["boxes"])


def test_float16_between_integers(tmp_path: Path) -> None:
    """Results of such operators are of a class of their own while the model runs."""
    float16 = get_qconfig(in_dtype=torch.float16, weight_dtype=torch.float16, out_dtype=torch.float16)
    half = ModuleNameQconfigSetter({"add": float16})
    model = calibrated(NET, "prepare", (half, default_calibration_qconfig_setter))
    qa = QuantAnalysis(NET, model, "fake_quant", out_dir=tmp_path)
    qa.set_bad_case(batches()[0])
    rows = {row.name: row for row in qa.compare_per_layer()}
    assert rows["relu2"].quant_dtype == "torch.float16" and qa.sensitivity()["0-score"]


def test_selections_are_those_of_the_baseline(tmp_path: Path) -> None:
    """Two scores that are nearly equal: without, positions would be swapped."""

    class Best(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y)["position"].float()

    torch.manual_seed(0)
    net = Best().eval()
    net.fc.weight.data[1] = net.fc.weight.data[0]
    net.fc.bias.data[1] = net.fc.bias.data[0] + 1e-6
    for way in ("fx", "prepare"):
        qa = QuantAnalysis(net, calibrated(net, way), "fake_quant", out_dir=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", QuantizationWarning)
            assert qa.auto_find_bad_case(batches(), metric="L1").worst["0"]["L1"][0][1] == 0
        rows = {row.name: row for row in qa.compare_per_layer()}  # and in the run of each layer
        assert rows["[topk]"].atol < 0.1, way


def test_operators_that_select_for_themselves_are_left_alone() -> None:
    """Plans of the integer arithmetic take an argmax when they are made: no selection of the model."""
    model, chosen = copy.deepcopy(model_of("fx")), Selections()
    with torch.no_grad():
        with chosen.noting():
            NET(*batches()[0])
        assert len(chosen) == 1
        with chosen.taking():
            model(*batches()[0])
    assert not chosen.unlike
    with chosen.noting(), torch.no_grad():
        copy.deepcopy(model_of("fx"))(*batches()[0])
        horizon.argmax(torch.ones(2, 3), 1)  # the package's own function is the model's
    assert len(chosen) == 2


def test_state_files(tmp_path: Path) -> None:
    found = analysis(tmp_path).auto_find_bad_case(batches(), num_steps=2, metric=["L1", "SQNR"], topk=2)
    assert [len(of["L1"]) for of in found.worst.values()] == [2, 2, 2]
    qa = analysis(tmp_path)
    with pytest.raises(CheckError, match="no bad case yet"):
        qa.run()
    loaded = qa.load_bad_case()
    assert loaded.overall == found.overall and loaded.inputs.keys() == found.inputs.keys()
    qa.run()
    (tmp_path / "all_badcase_info.pt").write_bytes(b"nothing")
    with pytest.raises(CheckError, match="not what `auto_find_bad_case` writes"):
        qa.load_bad_case()


@pytest.mark.parametrize("kind", ["pre_export", "export", "convert"])
def test_later_stages_give_the_same_integers(kind: str, tmp_path: Path) -> None:
    model, batch = model_of("prepare"), batches(1)[0]
    made = {
        "pre_export": lambda: hbdk4.pre_export(model),
        "export": lambda: hbdk4.export(model, batch),
        "convert": lambda: convert(copy.deepcopy(model)),
    }[kind]()
    qa = QuantAnalysis(model, made, kind, out_dir=tmp_path)
    found = qa.auto_find_bad_case([batch], metric="L1")
    assert all(of["L1"][0][1] == 0 for of in found.worst.values())
    qa.run()
    rows = {row.name: row for row in qa.compare_per_layer()}
    assert {"quant", "conv1", "add", "norm", "fc"} <= {name.split("[")[0] for name in rows}
    assert all(row.atol == 0 for row in rows.values())
    if kind != "pre_export":
        with pytest.raises(CheckError, match="one fake quantizer round at a time"):
            qa.sensitivity()


def test_results_that_only_another_method_takes_have_scales_in_the_graph(tmp_path: Path) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.one, self.other = FloatFunctional(), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.other.mul(self.one.add(x, x), x))

    set_march(March.NASH_E)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    model = prepare_qat_fx(Chain().eval(), {"": get_default_qconfig()})
    model(x)
    set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
    qa = QuantAnalysis(model, hbdk4.export(model, x), "export", out_dir=tmp_path)
    qa.set_bad_case(x)
    rows = {row.name: row for row in qa.compare_per_layer()}
    assert rows["one"].quant_dtype == "qint8" and all(row.atol == 0 for row in rows.values())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = model_of("prepare")
    with pytest.raises(CheckError, match="both models are one"):
        QuantAnalysis(model, model, "fake_quant", out_dir=tmp_path)
    with pytest.raises(QuantizationConfigError, match="this is a float model: prepare"):
        QuantAnalysis(NET, copy.deepcopy(NET), "fake_quant", out_dir=tmp_path)
    with pytest.raises(QuantizationConfigError, match="one of fake_quant, pre_export, export, convert"):
        QuantAnalysis(NET, model, "onnx", out_dir=tmp_path)
    with pytest.raises(CheckError, match="GPUs"):
        QuantAnalysis(NET, model, "fake_quant", device_ids=[63], out_dir=tmp_path)
    with pytest.warns(QuantizationWarning, match="old name"):
        QuantAnalysis(model, hbdk4.pre_export(model), "pt_lut", out_dir=tmp_path)
    other = copy.deepcopy(model)  # as where a model was prepared in place, and its copy is taken for the float one
    with pytest.warns(QuantizationWarning, match="the baseline is a qat model, whose own rounding does not show"):
        QuantAnalysis(other, model, "fake_quant", out_dir=tmp_path)
    calibrating = copy.deepcopy(model)
    set_fake_quantize(calibrating, FakeQuantState.CALIBRATION)
    with pytest.warns(QuantizationWarning, match="CALIBRATION state"):
        QuantAnalysis(NET, calibrating, "fake_quant", out_dir=tmp_path)
    assert get_fake_quantize(calibrating) is FakeQuantState.CALIBRATION


def test_several_bad_cases_are_all_in_the_table(tmp_path: Path) -> None:
    qa = analysis(tmp_path, "fx")
    cases = qa.auto_find_bad_case(batches(), metric="L1", topk=2)
    (worst, most), (second, less) = cases.worst["0-score"]["L1"]
    lines = (tmp_path / "badcase.txt").read_text().splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("0-score ")] == [
        f"{worst}, {second}", f"{most:g}, {less:g}",
    ]  # fmt: skip
    qa.run(index=second)


def test_loaders_that_end_early_or_shuffle(tmp_path: Path) -> None:
    qa = analysis(tmp_path)
    with pytest.warns(QuantizationWarning, match="ended after 3 of 5 batches"):
        qa.auto_find_bad_case(batches(), num_steps=5)
    with pytest.raises(CheckError, match="gave no batch"):
        qa.auto_find_bad_case(iter([]))
    with pytest.raises(QuantizationConfigError, match="must be a list, tuple, generator or DataLoader of batches"):
        qa.auto_find_bad_case(batches()[0][0])
    data = [(x[0], y[0]) for x, y in batches()]
    shuffled = BatchSampler(RandomSampler(data), 1, drop_last=False)
    for loader in (DataLoader(data, shuffle=True), DataLoader(data, batch_sampler=shuffled)):
        with pytest.warns(QuantizationWarning, match="shuffles"):
            qa.auto_find_bad_case(loader, metric="L1")

    def broken() -> Iterator[Any]:
        yield from batches(2)
        raise OSError("no such image")

    with pytest.raises(CheckError, match="the data loader failed at batch 2: OSError: no such image"):
        analysis(tmp_path / "broken").auto_find_bad_case(broken(), metric="L1")
    kept = analysis(tmp_path / "broken").load_bad_case()
    assert not kept.is_complete and set(kept.history["0-score"]["L1"]) == {0, 1}


def test_metrics_of_the_user(tmp_path: Path) -> None:
    calls = 0

    def gap(one: Tensor, other: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tensor(torch.nan) if calls == 1 else (one.float() - other.float()).abs().max()

    qa = analysis(tmp_path)
    with pytest.warns(QuantizationWarning, match="gap of output 0-score is not a number .batch 0., which does not"):
        found = qa.auto_find_bad_case(batches(), metric=gap)
    assert found.worst["0-score"]["gap"][0][0] != 0
    assert "gap" in (tmp_path / "badcase.txt").read_text()
    tables = qa.sensitivity()
    assert tables["0-score"] and (tmp_path / "output_0-score_gap_sensitive_ops.pt").exists()
    later = analysis(tmp_path)
    later.load_bad_case()
    with pytest.raises(CheckError, match="found with the function `gap`"):
        later.sensitivity()
    later.run()
    assert later.sensitivity(gap, outputs=["0-score"])["0-score"] == tables["0-score"]


def test_metrics_without_a_number_in_sensitivity(tmp_path: Path) -> None:
    qa = analysis(tmp_path)
    qa.set_bad_case(batches()[0])

    def rarely(one: Tensor, other: Tensor) -> float:
        error = float((one - other).abs().max())
        return error if error > 1e-3 else math.nan

    with pytest.warns(QuantizationWarning, match="rarely was not a number"):
        values = [row[3] for row in qa.sensitivity(rarely, outputs=["0-features-0"])["0-features-0"]]
    numbers = [value for value in values if not math.isnan(value)]
    assert 0 < len(numbers) < len(values) and values[: len(numbers)] == sorted(numbers, reverse=True)  # NaN is last
    with pytest.raises(CheckError, match="gives one number"):
        qa.sensitivity(lambda one, other: (one - other).abs(), outputs=["0-features-0"])


def test_what_fails_keeps_what_was_found(tmp_path: Path) -> None:
    steps = 0

    def broken(out: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 4:
            raise KeyError("boxes")
        return out

    qa = analysis(tmp_path, post_process=broken)
    with pytest.raises(CheckError, match=r"post_process, on what `Net` gives, failed at batch 2: KeyError"):
        qa.auto_find_bad_case(batches())
    assert "did not come to its end" in (tmp_path / "badcase.txt").read_text()
    assert not analysis(tmp_path).load_bad_case().is_complete


def test_outputs_that_cannot_be_compared(tmp_path: Path) -> None:
    def kept(out: Any) -> Any:  # as after NMS
        return out["features"][0].flatten()[: int(out["features"][0].sum() * 1000) % 97], out["score"]

    with pytest.warns(QuantizationWarning, match=r"outputs are left out: 0-0 \(its shape is"):
        found = analysis(tmp_path, post_process=kept).auto_find_bad_case(batches())
    assert "0-1" in found.worst
    with pytest.raises(CheckError, match="no output of the two models can be compared.*NMS"):
        analysis(tmp_path, post_process=lambda out: "nothing").auto_find_bad_case(batches())


def test_an_interrupted_sensitivity_goes_on(tmp_path: Path) -> None:
    calls = stop = 0

    def stopping(one: Tensor, other: Tensor) -> float:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        return float((one - other).abs().max())

    def run(folder: Path, metric: Any = stopping) -> dict[str, list[list[Any]]]:
        qa = analysis(folder)
        qa.set_bad_case(batches()[0])
        return qa.sensitivity(metric, outputs=["0-score"])

    whole = run(tmp_path / "whole")
    every, calls, stop = calls, 0, 6
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    progress = tmp_path / "sensitivity_progress.pt"
    assert progress.is_file()
    assert run(tmp_path) == whole  # the same table, to the bit
    assert calls == every + 1 and not progress.exists()  # what was measured was not measured again

    calls = 0
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    other: dict[str, Any] = {}
    exec("def stopping(one, other): return float((one - other).abs().mean())", other)  # the same name, another metric
    assert run(tmp_path, other["stopping"])["0-score"] == run(tmp_path / "new", "L1")["0-score"]
    progress.write_bytes(b"torn")
    with pytest.warns(CalibrationWarning, match="cannot be read"):
        run(tmp_path, "L1")


def test_model_profiler(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with ModelProfiler(NET, tmp_path) as profiler:
        NET(*batches(1)[0])
    profiler.get_info_manager().table()
    assert "torch.nn.modules.conv.Conv2d" in capsys.readouterr().out
    assert (tmp_path / "statistic.txt").exists()
    assert profiler.get_info_manager().named("conv1")[0].load()["output"][0].shape == (2, 8, 8, 8)


def test_plots(tmp_path: Path) -> None:
    qa = analysis(tmp_path)
    qa.set_bad_case(batches()[0])
    pages = qa.plot_opinfo(prefixes=("conv",)) + qa.plot_opinfo_bar3d(types=(nn.Linear,))
    assert [Path(page).parent.name for page in pages] == ["plot_opinfo", "plot_opinfo", "plot_opinfo_bar3d"]
    assert all("<svg" in Path(page).read_text() for page in pages)
    # conv1 is a part of ConvReLU2d, whose result is that of relu1
    drawn = {Path(page).stem: Path(page).read_text() for page in qa.plot_opinfo()}
    of = {name.rpartition("_")[0]: text.count("<polyline") for name, text in drawn.items()}
    assert (of["conv1"], of["relu1"], of["side"], of["norm"]) == (1, 2, 2, 2)
    graph = QuantAnalysis(model_of("fx"), hbdk4.export(model_of("fx"), batches()[0]), "export", out_dir=tmp_path)
    graph.set_bad_case(batches()[0])
    drawn = {Path(page).stem.rpartition("_")[0]: Path(page).read_text() for page in graph.plot_opinfo()}
    assert drawn["add"].count("<polyline") == 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layer(self.quant(x)))


def test_layers_of_torch_s_transformers_are_compared_one_by_one(tmp_path: Path) -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    net, x = Encoder().eval(), torch.randn(2, 5, 8)
    model = prepare(copy.deepcopy(net), x, default_calibration_qconfig_setter, out_dir=None)
    model(x)
    set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
    qa = QuantAnalysis(net, model, "fake_quant", out_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qa.auto_find_bad_case([x])
        rows = {row.name: row for row in qa.compare_per_layer()}
    assert {"layer.self_attn", "layer.attention_add", "layer.norm1", "layer.linear2", "layer.norm2"} <= rows.keys()
    assert all(row.metrics for name, row in rows.items() if name != "layer.linear1")  # which is fused with its ReLU
    scaled = {name for name, row in rows.items() if row.has_scale}  # dropout keeps the scale that it is given
    assert {"quant", "layer.self_attn", "layer.attention_add", "layer.norm1", "layer.activation"} <= scaled
    assert scaled.isdisjoint({"layer.dropout1", "layer.dropout", "layer.dropout2", "dequant"})
    far = [replace(rows[name], qscale=1e-6) for name in ("layer.linear2", "layer.dropout2")]  # no grid reaches so far
    assert [row[0] for row in abnormal_layers(far).rows] == ["layer.linear2"]
    assert type(net.layer) is nn.TransformerEncoderLayer  # the user's own is as it was
    similar = {row[1] for row in featuremap_similarity(net, model, x, out_dir=tmp_path)}
    assert {"layer.self_attn", "layer.attention_add", "layer.norm1", "layer.linear2", "layer.norm2"} <= similar
    # by hand: what a projection, a product and a norm of two times five vectors of eight compute
    flops = {row[0]: int(row[5].split("(")[0]) for row in qa.sensitivity()["0"]}
    assert flops["layer.self_attn.q_proj"] == flops["layer.self_attn.out_proj"] == 2 * 10 * 8 * 8
    assert flops["layer.self_attn.attention.matmul"] == flops["layer.self_attn.attention.weighted_sum"]
    assert flops["layer.self_attn.attention.matmul"] == 2 * (2 * 2 * 5 * 5) * 4
    assert flops["layer.linear1"] == 2 * 10 * 8 * 16 and flops["layer.norm1.bias_add"] == 10 * 8
    shares = {row[0]: row[5].split("(")[1] for row in qa.sensitivity()["0"]}
    assert sum(float(share.rstrip("%)")) for share in shares.values()) == pytest.approx(100, abs=0.5)
    only = qa.sensitivity(prefixes=("layer.linear1",))["0"]
    assert {row[5].split("(")[1] for row in only} == {shares["layer.linear1"]}  # of the model, not of what is asked for
