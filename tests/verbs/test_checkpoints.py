"""State dicts between stages, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    convert_fx,
    default_calib_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    load_calib_state_dict,
    load_observer_params,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.checkpoint import compare_state_dict
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.models import ZOO, make
from tests.routes import as_numbers, calibrate, mismatches, prepared, run_onnx

QAT = default_qat_8bit_fake_quant_qconfig


def _validate(model: nn.Module) -> nn.Module:
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


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
    expected = "missing quantization parameters (not quantized when the checkpoint was made):\n  fc: weight, output"
    with pytest.warns(QuantizationWarning, match=re.escape(expected)):
        mismatch = load_calib_state_dict(whole, part.state_dict())
    assert mismatch.missing_quantization == {"fc": ("weight", "output")} and str(mismatch) == expected
    mismatch = compare_state_dict(part, whole.state_dict())
    assert str(mismatch) == ("unexpected quantization parameters (not quantized in this model):\n  fc: weight, output")
    state = whole.state_dict()
    state["head.extra"] = state.pop("fc.bias")
    assert str(compare_state_dict(whole, state)) == (
        "missing parameters (the checkpoint is of another forward):\n  fc: bias\n"
        "unexpected parameters (the checkpoint is of another forward):\n  head: extra"
    )


def test_statistics_of_another_observer_are_no_difference() -> None:
    model, _ = make("resnet")
    qat = prepare_qat_fx(model, {"": QAT})
    state = qat.state_dict()
    state["quant.activation_post_process.activation_post_process.histogram"] = torch.zeros(8)
    del state["quant.activation_post_process.activation_post_process.min_val"]
    assert not compare_state_dict(qat, state)
