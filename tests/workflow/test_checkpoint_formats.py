"""A checkpoint loads with the scales it has; what is converted or left out is told."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationWarning, CheckpointError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    QuantStub,
    QuantWrapper,
    calibrate,
    convert,
    get_default_qconfig,
    load_calib_state_dict,
    load_observer_params,
    prepare,
    prepare_qat,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.learnable_fake_quantize import LearnableFakeQuantize

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
HALF = {"qint8": 127.5, "qint16": 32767.5}


@pytest.fixture(autouse=True)
def march() -> None:
    set_march(March.NASH_E)


def net() -> nn.Module:
    torch.manual_seed(0)
    return QuantWrapper(nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1))).eval()


def model(dtype: str = "qint8", method: str = "fx", **kwargs: Any) -> Any:
    qconfig = get_default_qconfig(activation_qkwargs={"dtype": dtype}, **kwargs)
    x = torch.rand(1, 2, 4, 4)
    if method == "fx":
        return prepare_qat_fx(net(), {"": qconfig})
    if method == "eager":
        float_model = net()
        float_model.qconfig = qconfig
        return prepare_qat(float_model)
    return prepare(net(), (x,), qconfig_dict={"": qconfig}, method=method, out_dir=None)


def calibrated(dtype: str = "qint8", method: str = "fx", **kwargs: Any) -> Any:
    found = model(dtype, method, **kwargs)
    calibrate(found, [torch.rand(2, 2, 4, 4) * 2 - 1], progress=False)
    return found


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def scales(of: nn.Module) -> dict[str, Tensor]:
    return {n: m.scale.detach().clone() for n, m in of.named_modules() if isinstance(m, FakeQuantize)}


def saved(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


LOADS = {
    "strict": lambda m, state: m.load_state_dict(state),
    "loose": lambda m, state: m.load_state_dict(state, strict=False),
    "calib": load_calib_state_dict,
    "copied": lambda m, state: m.load_state_dict({k: v.clone() for k, v in state.items()}),  # its metadata are gone
    "saved": lambda m, state: m.load_state_dict(saved(state)),
}


@pytest.mark.in_turns("scale", "dtype", "load", of=2)
@pytest.mark.parametrize("scale", [1 / 128, 1e-6, 1 / 127.5, 1 / 32767.5, 1 / 32768, 300.0, 1.0])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("load", LOADS)
def test_a_given_scale_is_loaded_as_it_is(load, dtype, scale) -> None:
    source, target = calibrated(dtype), model(dtype)
    source.quant.activation_post_process.set_qparams(scale)
    assert not said(lambda: LOADS[load](target, source.state_dict()))
    for name, value in scales(source).items():
        assert torch.equal(scales(target)[name], value), name


@pytest.mark.parametrize("method", ["fx", "eager", "jit-strip", "symbolic"])
def test_on_every_route(method) -> None:
    source, target = calibrated("qint16", method), model("qint16", method)
    source.quant.activation_post_process.set_qparams(1 / 128)
    assert not said(lambda: target.load_state_dict(source.state_dict()))
    assert float(target.quant.activation_post_process.scale) == 1 / 128


def test_weights_and_trained_scales_too() -> None:
    weights = calibrated()
    weights.module[0].weight_fake_quant.set_qparams(torch.tensor([1.0, 1e-5, 0.1]))
    target = model()
    assert not said(lambda: target.load_state_dict(weights.state_dict()))
    assert torch.equal(target.module[0].weight_fake_quant.scale, torch.tensor([1.0, 1e-5, 0.1]))
    trained, fresh = (LearnableFakeQuantize(dtype="qint16") for _ in range(2))
    trained(torch.tensor([-1.0, 1.0]))
    with torch.no_grad():
        trained.scale.fill_(1 / 128)
    fresh.load_state_dict(trained.state_dict())
    assert float(fresh.scale) == 1 / 128


@pytest.mark.parametrize(("theirs", "mine"), [("qint8", "qint16"), ("qint16", "qint8")])
@pytest.mark.parametrize("given", [None, 1 / 128, 3e-5])
@pytest.mark.parametrize("load", LOADS)
def test_a_scale_of_another_format_keeps_its_range(load, given, theirs, mine) -> None:
    source, target = calibrated(theirs), model(mine)
    if given is not None:
        source.quant.activation_post_process.set_qparams(given)
    (message,) = said(lambda: LOADS[load](target, source.state_dict()))
    assert "those of another format in 3 places" in message and "quant, " in message
    for name, value in scales(source).items():
        ratio = 1.0 if name.endswith("weight_fake_quant") else HALF[theirs] / HALF[mine]
        torch.testing.assert_close(scales(target)[name], value * ratio, rtol=1e-6, atol=0)


def test_a_narrower_range_of_integers_counts_as_a_format() -> None:
    narrow, wide = FakeQuantize(quant_min=-8, quant_max=7), FakeQuantize()
    narrow.set_qparams(0.5)
    wide.load_state_dict(narrow.state_dict())
    assert float(wide.scale) == pytest.approx(0.5 * 7.5 / 127.5)


# tests/golden/checkpoints was written by version 4.0.0 of commit 3f8551a, whose state dicts have no formats: the model
# of `calibrated` with the scale of `quant` set to 1/128, in both formats.


@pytest.mark.parametrize("dtype", HALF)
def test_a_checkpoint_without_formats_loads_with_its_scales(dtype) -> None:
    state = torch.load(GOLDEN / f"without_formats_{dtype[1:]}.pt", weights_only=True)
    assert not any("quant_range" in key for key in state)
    target = model(dtype)
    messages = said(lambda: target.load_state_dict(state))
    for name, value in scales(target).items():
        assert torch.equal(value, state[f"{name}.scale"]), name
    if dtype == "qint8":
        assert not messages
    else:  # 125 steps: a scale that was given, or one of int8
        (message,) = messages
        assert "does not say the formats" in message and "in 1 places" in message and "they are: quant." in message


@pytest.mark.parametrize(("theirs", "mine"), [("qint8", "qint16"), ("qint16", "qint8")])
def test_observed_scales_of_another_format_are_known_without_formats(theirs, mine) -> None:
    state = torch.load(GOLDEN / f"without_formats_{theirs[1:]}.pt", weights_only=True)
    target = model(mine)
    messages = said(lambda: target.load_state_dict(state))
    assert any("those of another format" in m for m in messages)
    name = "module.0.activation_post_process"
    want = state[f"{name}.scale"] * HALF[theirs] / HALF[mine]
    torch.testing.assert_close(target.get_submodule(name).scale, want, rtol=1e-6, atol=0)


def test_a_scale_that_is_given_in_the_model_stays_and_is_told() -> None:
    def fixed(scale: float | None) -> Any:
        float_model = net()
        float_model.quant = QuantStub(scale=scale)
        return prepare_qat_fx(float_model, {"": get_default_qconfig()})

    source, target = fixed(None), fixed(1 / 64)
    calibrate(source, [torch.rand(2, 2, 4, 4)], progress=False)
    (message,) = said(lambda: target.load_state_dict(source.state_dict()))
    assert "the given ones stay: quant." in message and float(target.quant.activation_post_process.scale) == 1 / 64
    assert not said(lambda: target.load_state_dict(target.state_dict()))
    with pytest.warns(QuantizationWarning, match="given in the target: quant"):
        load_observer_params(source, target)


def test_zero_points_that_are_not_zero_are_refused() -> None:
    state = calibrated().state_dict()
    target = model()
    before = scales(target)
    state["quant.activation_post_process.zero_point"] = torch.tensor([12])
    for load in LOADS.values():
        with pytest.raises(CheckpointError, match="asymmetric.*quant.activation_post_process.zero_point are not 0"):
            load(target, state)
    assert all(torch.equal(before[n], s) for n, s in scales(target).items())


def test_several_scales_for_a_tensor_that_has_one_are_refused() -> None:
    state = calibrated().state_dict()
    state["quant.activation_post_process.scale"] = torch.tensor([0.1, 0.2])
    with pytest.raises(RuntimeError, match="size mismatch for quant.activation_post_process.scale"):
        model().load_state_dict(state)


def test_what_is_not_copied_between_models_is_told() -> None:
    source, target = calibrated(), model()
    longer = QuantWrapper(nn.Sequential(*net().module, nn.Sigmoid())).eval()
    longer = prepare_qat_fx(longer, {"": get_default_qconfig()})
    assert not said(lambda: load_observer_params(source, target))
    (message,) = said(lambda: load_observer_params(longer, model()))
    assert "only in the source: module.3; without data in the source: quant, module.0" in message
    (message,) = said(lambda: load_observer_params(source, longer))
    assert "not in the source: module.3." in message


def test_a_report_is_of_one_load() -> None:
    source, target = calibrated(), model("qint16")
    with pytest.warns(CalibrationWarning, match="another format"):
        target.load_state_dict(source.state_dict())
    assert not said(lambda: target.load_state_dict(calibrated("qint16").state_dict()))


@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        (
            ("qint16", "qint8"),
            ("qint8", "qint8"),
            r"quant: its output is \[-32768, 32767\] in the checkpoint and \[-128",
        ),
        (("qint8", "qint8"), ("qint16", "qint8"), r"quant: its output is \[-128, 127\] in the checkpoint"),
        (("qint16", "qint16"), ("qint16", "qint8"), "module.0.weight is torch.int16 in the checkpoint and torch.int8"),
    ],
)
def test_integers_of_another_format_do_not_load(theirs, mine, words) -> None:
    set_march(March.NASH_P)

    def converted(activation: str, weight: str) -> Any:
        settings = {"dtype": weight, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        return convert(calibrated(activation, weight_qkwargs=settings))

    source, target = converted(*theirs), converted(*mine)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=words):
            target.load_state_dict(source.state_dict(), strict=strict)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())  # a refused file changes nothing
    again = converted(*theirs)
    again.load_state_dict(saved(source.state_dict()))
    old = {k: v for k, v in source.state_dict().items() if not k.endswith("quant_range")}
    again.load_state_dict(old)  # of earlier versions


def test_the_state_of_a_prepared_model_is_not_that_of_a_converted_one() -> None:
    source = calibrated("qint8")
    with pytest.raises(CheckpointError, match=r"real weights.*nothing was loaded.*module.0.weight.*Load it into the"):
        convert(source).load_state_dict(source.state_dict())


def test_a_range_that_is_none_does_not_load() -> None:
    target = convert(calibrated("qint8"))
    state = {**target.state_dict(), "quant.quant_range": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=r"quant\.quant_range has 3 numbers"):
        target.load_state_dict(state)
