"""State dicts between stages, copies and pickles."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import CalibrationWarning, CheckpointError, QuantizationWarning
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    compare_graphs,
    convert,
    convert_fx,
    default_calib_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    load_calib_state_dict,
    load_observer_params,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import (
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
)
from horizon_plugin_pytorch.workflow.checkpoint import compare_state_dict
from tests.models import ZOO, make
from tests.routes import as_numbers, calibrate, mismatches, prepared, run_onnx

QAT = default_qat_8bit_fake_quant_qconfig


def _validate(model: nn.Module) -> nn.Module:
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


@pytest.mark.in_turns("calibration", "name")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("calibration", [QAT, default_calib_8bit_fake_quant_qconfig], ids=["min_max", "percentile"])
def test_the_calibration_models_state_fits_the_qat_model(name: str, calibration: Any) -> None:
    model, inputs = make(name)
    calib = calibrate(prepare_qat_fx(model, {"": calibration}), inputs)
    qat = prepare_qat_fx(model, {"": QAT})
    result = qat.load_state_dict(calib.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    with torch.no_grad():
        assert mismatches(as_numbers(_validate(qat)(*inputs)), as_numbers(calib(*inputs))) == 0
        assert mismatches(as_numbers(convert_fx(qat)(*inputs)), as_numbers(calib(*inputs))) == 0


def test_a_loaded_state_switches_what_the_checkpoint_was_in() -> None:
    model, inputs = make("mobilenet")
    calib = prepare_qat_fx(model, {"": QAT})
    set_fake_quantize(calib, FakeQuantState.CALIBRATION)
    calib(*inputs)
    qat = prepare_qat_fx(model, {"": QAT})
    qat.load_state_dict(calib.state_dict())
    states = {(m.is_observing, m.is_quantizing) for m in qat.modules() if isinstance(m, FakeQuantize)}
    assert states == {(True, False)}


@pytest.mark.parametrize("name", ["mobilenet", "vit"])
def test_observer_parameters_move_between_models(name: str) -> None:
    model, inputs = make(name)
    source = calibrate(prepare_qat_fx(model, {"": QAT}), inputs)
    target = prepare_qat_fx(model, {"": QAT})
    assert load_observer_params(source, target) == []
    with torch.no_grad():
        assert mismatches(as_numbers(_validate(target)(*inputs)), as_numbers(source(*inputs))) == 0


def test_observer_parameters_fit_another_format() -> None:
    model, inputs = make("resnet")
    source = calibrate(prepare_qat_fx(model, {"": QAT}), inputs)
    target = prepare_qat_fx(model, {"": default_qat_8bit_weight_16bit_act_fake_quant_qconfig})
    load_observer_params(source, target)
    wide = calibrate(prepare_qat_fx(model, {"": default_qat_8bit_weight_16bit_act_fake_quant_qconfig}), inputs)
    for (path, a), (_, b) in zip(target.named_modules(), wide.named_modules(), strict=True):
        if isinstance(a, FakeQuantize):
            assert torch.allclose(a.scale, b.scale, rtol=1e-6), path


@pytest.mark.in_turns("stage", "name")
@pytest.mark.parametrize("stage", ["prepared", "converted"])
@pytest.mark.parametrize("name", ZOO)
def test_models_survive_copy_pickle_and_save(name: str, stage: str, tmp_path: Any) -> None:
    model, inputs = make(name)
    source = prepared(model, inputs)
    if stage == "converted":
        source = convert_fx(source)
    with torch.no_grad():
        wanted = as_numbers(source(*inputs))
        assert mismatches(as_numbers(copy.deepcopy(source)(*inputs)), wanted) == 0
        assert mismatches(as_numbers(pickle.loads(pickle.dumps(source))(*inputs)), wanted) == 0
        torch.save(source, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert mismatches(as_numbers(loaded(*inputs)), wanted) == 0
        assert not loaded.training and type(loaded).__name__ == type(source).__name__


@pytest.mark.in_turns("stage", "name")
@pytest.mark.parametrize("stage", ["prepared", "converted"])
@pytest.mark.parametrize("name", ZOO)
def test_state_dicts_are_plain_tensors(name: str, stage: str) -> None:
    model, inputs = make(name)
    source = prepared(model, inputs)
    fresh = prepare_qat_fx(model, {"": QAT})
    if stage == "converted":
        source, fresh = convert_fx(source), convert_fx(prepared(model, tuple(0.5 * x for x in inputs)))
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert all(type(v) is torch.Tensor for v in state.values())
    result = fresh.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    if stage == "prepared":
        _validate(fresh)
    with torch.no_grad():
        assert mismatches(as_numbers(fresh(*inputs)), as_numbers(source(*inputs))) == 0


def test_a_converted_model_exports_the_same_after_a_round_trip(tmp_path: Any) -> None:
    from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

    model, inputs = make("detector")
    source = convert_fx(prepared(model, inputs))
    loaded = pickle.loads(pickle.dumps(source))
    a, b = (export_quantized_onnx(m, inputs, tmp_path / "m.onnx") for m in (source, loaded))
    assert mismatches(run_onnx(a, inputs), run_onnx(b, inputs)) == 0


def test_training_goes_on_from_a_checkpoint() -> None:
    model, inputs = make("mobilenet")
    qat = prepare_qat_fx(model, {"": QAT})
    for batch in range(3):
        qat(inputs[0] * (batch + 1))
    fresh = prepare_qat_fx(model, {"": QAT})
    fresh.load_state_dict(qat.state_dict())
    a, b = qat(*inputs), fresh(*inputs)  # the moving averages go on from the same values
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_float_types_are_refused_by_name(dtype: torch.dtype) -> None:
    model, inputs = make("mobilenet")
    qat = prepared(model, inputs)
    quantized = convert_fx(qat)
    for changed in (qat, quantized, qat.features, quantized.features):
        before = {key: value.dtype for key, value in changed.state_dict().items()}
        with pytest.raises(TypeError, match="float32"):
            changed.to(dtype)
        assert {key: value.dtype for key, value in changed.state_dict().items()} == before
    assert torch.equal(qat.to("cpu")(*inputs), quantized.cpu()(*inputs))


def test_a_copy_keeps_what_is_frozen() -> None:
    model, _ = make("resnet")
    qat = prepare_qat_fx(model, {"": QAT}).train()
    qat.layer1.conv1.eval()
    for other in (copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        assert [m.training for m in other.modules()] == [m.training for m in qat.modules()]


# -- load_calib_state_dict


PREPARES = {
    "fx": lambda model, inputs, qconfig: prepare_qat_fx(model, {"": qconfig}),
    "jit": lambda model, inputs, qconfig: prepare(model, inputs, qconfig_dict={"": qconfig}, out_dir=None),
}


@pytest.mark.parametrize("source", PREPARES)
@pytest.mark.parametrize("target", PREPARES)
def test_a_calibrated_state_fits_across_methods(source: str, target: str) -> None:
    model, inputs = make("resnet")
    calib = PREPARES[source](model, inputs, default_calib_8bit_fake_quant_qconfig)
    set_fake_quantize(calib, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        calib(*inputs)
    qat = PREPARES[target](model, inputs, QAT)
    assert not load_calib_state_dict(qat, calib.state_dict())
    states = {(m.is_observing, m.is_quantizing) for m in qat.modules() if isinstance(m, FakeQuantize)}
    assert states == {(True, True)}  # its own, whatever the calibrated model was in
    with torch.no_grad():
        assert torch.equal(_validate(qat)(*inputs), _validate(calib)(*inputs))


@pytest.mark.parametrize("method", PREPARES)
def test_a_state_file_has_plain_tensors(method: str) -> None:
    model, inputs = make("resnet")
    qat = PREPARES[method](model, inputs, QAT)
    qat(*inputs)
    file = io.BytesIO()
    torch.save(qat.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert not compare_state_dict(qat, state)


@pytest.mark.filterwarnings("ignore:.*has qconfig None")
def test_differences_are_told_by_module() -> None:
    model, _ = make("resnet")
    whole = prepare_qat_fx(model, {"": QAT})
    part = prepare_qat_fx(model, {"": QAT, "module_name": [("fc", None)]})
    expected = (
        "missing quantization parameters (this was not quantized when the checkpoint was made: deployment logic that "
        "was left float then, or logic that is not deployed and is quantized now):\n  fc: weight, output"
    )
    with pytest.warns(QuantizationWarning, match=re.escape(expected)):
        mismatch = load_calib_state_dict(whole, part.state_dict())
    assert mismatch.missing_quantization == {"fc": ("weight", "output")} and str(mismatch) == expected
    mismatch = compare_state_dict(part, whole.state_dict())
    assert str(mismatch) == (
        "unexpected quantization parameters (this model does not quantize it: deployment logic that is left float now, "
        "or logic that is not deployed and was quantized then):\n  fc: weight, output"
    )
    state = whole.state_dict()
    state["head.extra"] = state.pop("fc.bias")
    assert str(compare_state_dict(whole, state)) == (
        "missing parameters (the forward that was prepared is not the one of the checkpoint):\n  fc: bias\n"
        "unexpected parameters (the forward that was prepared is not the one of the checkpoint):\n  head: extra"
    )


def test_a_long_list_is_cut() -> None:
    state = {f"blocks.{i}.weight": torch.zeros(1) for i in range(50)}
    mismatch = compare_state_dict(nn.Linear(1, 1), {**nn.Linear(1, 1).state_dict(), **state})
    assert len(mismatch.unexpected_parameters) == 50
    assert str(mismatch).endswith("  blocks.39: weight\n  and 10 more modules; `compare_state_dict` gives all")


def test_statistics_of_another_observer_are_no_difference() -> None:
    model, _ = make("resnet")
    qat = prepare_qat_fx(model, {"": QAT})
    state = qat.state_dict()
    state["quant.activation_post_process.activation_post_process.histogram"] = torch.zeros(8)
    del state["quant.activation_post_process.activation_post_process.min_val"]
    assert not compare_state_dict(qat, state)


# -- load_state_dict of a prepared model: torch's own semantics, and a warning that names modules


METHODS = {
    **PREPARES,
    "jit-strip": lambda model, inputs, qconfig: prepare(
        model, inputs, method="jit-strip", qconfig_dict={"": qconfig}, out_dir=None
    ),
    "eager": lambda model, inputs, qconfig: _eager(model, qconfig),
}


def _eager(model: nn.Module, qconfig: Any) -> nn.Module:
    model = copy.deepcopy(model)
    model.qconfig = qconfig
    return prepare_qat(model)


class Written(nn.Module):
    """A model that every method can take: no function in it needs a module."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.act, self.add = nn.Conv2d(3, 3, 1), nn.Sigmoid(), FloatFunctional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.quant(x)
        return self.dequant(self.add.add(self.act(self.conv(x)), x))


@pytest.mark.slow
@pytest.mark.parametrize("source", METHODS)
@pytest.mark.parametrize("target", METHODS)
@pytest.mark.filterwarnings("error:load_state_dict")
def test_a_state_goes_from_any_method_to_any(source: str, target: str) -> None:
    model, inputs = Written().eval(), (torch.randn(2, 3, 4, 4),)
    calib = calibrate(METHODS[source](model, inputs, default_calib_8bit_fake_quant_qconfig), inputs)
    qat = METHODS[target](model, inputs, QAT)
    qat.load_state_dict(calib.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(_validate(qat)(*inputs), _validate(calib)(*inputs))


@pytest.mark.parametrize("method", METHODS)
def test_loading_tells_what_differs(method: str) -> None:
    model, inputs = Written(), (torch.randn(2, 3, 4, 4),)
    qat = METHODS[method](model, inputs, QAT)
    state = {key: value for key, value in qat.state_dict().items() if not key.startswith("act.")}
    for copied in (qat, copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        with pytest.warns(QuantizationWarning, match=r"load_state_dict: .*\n.*not quantized when.*\n  act: output$"):
            result = copied.load_state_dict(state, strict=False)
        assert all(key.startswith("act.") for key in result.missing_keys) and not result.unexpected_keys
        with pytest.warns(QuantizationWarning, match="act: output"), pytest.raises(RuntimeError, match="Missing key"):
            copied.load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
def test_a_float_checkpoint_is_known_as_one(method: str) -> None:
    model, inputs = Written(), (torch.randn(2, 3, 4, 4),)
    qat = METHODS[method](model, inputs, QAT)
    other = Written()
    with pytest.warns(QuantizationWarning, match="the checkpoint is of a float model: 4 modules of this model"):
        qat.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(qat.conv.weight, other.conv.weight)
    with pytest.warns(QuantizationWarning, match="float model"):
        assert load_calib_state_dict(qat, other.state_dict()).is_float


@pytest.mark.parametrize("method", PREPARES)
def test_a_fused_batch_norm_is_lost_in_a_float_checkpoint(method: str) -> None:
    model, inputs = make("resnet")
    qat = PREPARES[method](model, inputs, QAT)
    mismatch = compare_state_dict(qat, model.state_dict())
    assert mismatch.is_float and "running_mean" in mismatch.fused_parameters["stem.1"]
    assert not mismatch.unexpected_parameters
    assert "stem.1: weight, bias, running_mean" in str(mismatch) and "load a float checkpoint into the" in str(mismatch)


@pytest.mark.parametrize("method", METHODS)
def test_a_wrapper_in_the_keys_is_named(method: str) -> None:
    model, inputs = Written(), (torch.randn(2, 3, 4, 4),)
    calib = calibrate(METHODS[method](model, inputs, QAT), inputs)
    qat = METHODS[method](model, inputs, QAT)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped, target = nn.parallel.DistributedDataParallel(calib), nn.parallel.DistributedDataParallel(qat)
        for into, state in ((qat, wrapped.state_dict()), (target, calib.state_dict())):
            with pytest.warns(QuantizationWarning, match="begin with `module.`"):
                into.load_state_dict(state, strict=False)
        for into, state in ((qat, wrapped.state_dict()), (target, calib.state_dict())):
            qat.quant.activation_post_process.set_qparams(7.0)
            assert not load_calib_state_dict(into, state)
            assert torch.equal(qat.quant.activation_post_process.scale, calib.quant.activation_post_process.scale)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("error:load_state_dict")
def test_a_converted_model_is_left_to_torch() -> None:
    model, inputs = Written(), (torch.randn(2, 3, 4, 4),)
    source, fresh = (convert(calibrate(METHODS["jit"](model, (k * inputs[0],), QAT), inputs)) for k in (1, 2))
    fresh.load_state_dict(source.state_dict())
    assert torch.equal(fresh(*inputs), source(*inputs))
    assert fresh.load_state_dict({}, strict=False).missing_keys


# -- fx_graph.txt


_GRAPH_SCRIPT = """
import sys, torch
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from tests.models import make

set_march(March.NASH_M)
for name in ("vit", "detector"):
    for method in ("jit-strip", "symbolic"):
        model, inputs = make(name)
        prepare(model, inputs, default_calibration_qconfig_setter, method, out_dir=f"{sys.argv[1]}/{name}-{method}")
"""


@pytest.mark.processes
def test_graphs_and_checks_are_the_same_in_every_process(tmp_path: Any) -> None:
    for seed in "12":
        command = [sys.executable, "-W", "ignore", "-c", _GRAPH_SCRIPT, str(tmp_path / seed)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()})
    files = sorted(p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*.txt"))
    assert {p.name for p in files} >= {"fx_graph.txt", "model_check_result.txt"}
    assert [p for p in files if (tmp_path / "1" / p).read_text() != (tmp_path / "2" / p).read_text()] == []
    assert compare_graphs(*(tmp_path / seed / "vit-symbolic" / "fx_graph.txt" for seed in "12")) == ""


class Branching(nn.Module):
    """A forward that takes another way on small images."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.quant(x))
        return self.dequant(y.sigmoid() if x.shape[-1] > 4 else y)


def test_graphs_that_differ_are_told_by_their_nodes(tmp_path: Any) -> None:
    sizes = (8, 8, 4)
    models = [
        prepare(Branching(), (torch.randn(1, 3, n, n),), qconfig_dict={"": QAT}, out_dir=tmp_path / str(i))
        for i, n in enumerate(sizes)
    ]
    assert compare_graphs(models[0], models[1]) == compare_graphs(models[0], tmp_path / "1" / "fx_graph.txt") == ""
    told = compare_graphs(tmp_path / "0" / "fx_graph.txt", models[2])
    assert "\n-call_module  _generated_sigmoid_0  _generated_sigmoid_0  (conv,)  {}" in told
    assert "\n+call_module  dequant  dequant  (conv,)  {}" in told
    with pytest.raises(TypeError, match="`Linear` has no graph"):
        compare_graphs(nn.Linear(1, 1), models[0])


class CalledTwice(nn.Module):
    """A layer whose two results differ in size, and a function in a loop before another one."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.out = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1)
        self.parts = nn.ModuleList([nn.Conv2d(3, 3, 1)])
        self.parts[0].weight.data.mul_(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.quant(x)
        for _ in range(2):
            x = torch.sigmoid(x) * x
        return self.dequant(self.out(torch.sigmoid(self.parts[0](self.parts[0](x)))))


@pytest.mark.parametrize("load", ["state", "observers"])
def test_calls_with_own_scales_are_joined_where_there_is_one(load: str) -> None:
    torch.manual_seed(0)
    model, x = CalledTwice().eval(), torch.randn(1, 3, 4, 4)
    own = calibrate(prepare(model, (x,), default_calibration_qconfig_setter, own_scales=True, out_dir=None), (x,))
    plain = prepare(model, (x,), default_calibration_qconfig_setter, out_dir=None)
    if load == "state":
        with pytest.warns(QuantizationWarning, match=r"one scale here.*\n  parts.0: parts_0_call_1"):
            difference = load_calib_state_dict(plain, own.state_dict())
        assert not difference.unexpected_quantization and not difference.missing_quantization
    else:
        with pytest.warns(QuantizationWarning, match="calls of parts.0, _generated_sigmoid_0"):
            assert load_observer_params(own, plain) == []
    reached = _scale(own, "parts_0_call_1")
    assert reached > 2 * _scale(own, "parts.0") and _scale(plain, "parts.0") == reached
    assert _scale(plain, "_generated_sigmoid_1") == _scale(own, "_generated_sigmoid_1")  # the one behind the loop


def _scale(model: nn.Module, path: str) -> float:
    return float(model.get_submodule(f"{path}.activation_post_process").scale)


def _small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(QuantStub(), nn.Conv2d(3, 3, 1), nn.Sigmoid(), DeQuantStub()).eval(), torch.randn(1, 3, 4, 4)


def _prepare_small(model: nn.Module, x: torch.Tensor, setter: Any = default_calibration_qconfig_setter) -> nn.Module:
    return prepare(model, (x,), setter, out_dir=None)


def test_the_state_of_a_converted_model_is_refused() -> None:
    model, x = _small()
    state = convert(calibrate(_prepare_small(model, x), (x,))).state_dict()
    target = _prepare_small(model, x)
    for load in (lambda: load_calib_state_dict(target, state), lambda: target.load_state_dict(state, strict=False)):
        with pytest.raises(CheckpointError, match="of a converted model: the weights of `1`"):
            load()
    assert torch.equal(target[1].weight, model[1].weight)


def test_what_is_no_state_of_a_prepared_model_is_told() -> None:
    model, x = _small()
    state = calibrate(_prepare_small(model, x), (x,)).state_dict()
    target = _prepare_small(model, x)
    broken = {k: v * float("nan") if k == "0.activation_post_process.scale" else v for k, v in state.items()}
    for given, error, words in (
        (None, TypeError, "got NoneType"),
        ("calib.pt", TypeError, r"torch.load\('calib.pt', weights_only=True\)"),
        (target, TypeError, r"`state_dict\(\)`"),
        ({"state_dict": state, "epoch": 3}, CheckpointError, r"checkpoint\['state_dict'\]"),
        (broken, CheckpointError, "not positive numbers: 0.activation_post_process.scale"),
    ):
        with pytest.raises(error, match=words):
            load_calib_state_dict(target, given)  # type: ignore[arg-type]
    with pytest.warns(QuantizationWarning, match="no entry of this model"):
        load_calib_state_dict(target, {})
    assert not load_calib_state_dict(target, {f"module._orig_mod.{k}": v for k, v in state.items()})


def test_scales_of_another_format_are_told_once() -> None:
    model, x = _small()
    state = calibrate(_prepare_small(model, x), (x,)).state_dict()
    wide = _prepare_small(model, x, calibration_8bit_weight_16bit_act_qconfig_setter)
    with pytest.warns(CalibrationWarning) as caught:
        load_calib_state_dict(wide, state)
    assert len(caught) == 1 and "in 3 places" in str(caught[0].message) and caught[0].filename == __file__


def test_a_checkpoint_of_another_format_gives_scales_that_fit() -> None:
    x = torch.randn(2, 4, 6, 6)
    model = QuantWrapper(nn.Conv2d(4, 4, 1))
    calibrated = prepared(model, (x,))
    wide = prepare_qat_fx(model, {"": default_qat_8bit_weight_16bit_act_fake_quant_qconfig})
    with pytest.warns(CalibrationWarning, match="another format"):
        wide.load_state_dict(calibrated.state_dict())
    narrow_scale = calibrated.module.activation_post_process.scale
    torch.testing.assert_close(wide.module.activation_post_process.scale, narrow_scale * 127.5 / 32767.5)


def test_a_converted_model_takes_the_tensors_of_a_checkpoint_themselves() -> None:
    x, other = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6) * 3
    quantized, wanted = (convert_fx(prepared(QuantWrapper(nn.Conv2d(4, 4, 1)), (data,))) for data in (x, other))
    quantized(x)
    state = wanted.state_dict()
    quantized.load_state_dict(state, assign=True)
    assert quantized.quant.scale is state["quant.scale"]
    assert torch.equal(quantized(other), wanted(other))
