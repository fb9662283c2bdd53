"""What a model is called with: the same for all that run it on example inputs or on batches."""

from __future__ import annotations

import io
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    QuantWrapper,
    calibrate,
    check_model,
    convert,
    equalize,
    get_default_qconfig,
    prepare,
    prepare_qat,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

A, B = torch.rand(2, 4), torch.rand(2, 4)
LABELS = torch.zeros(2, dtype=torch.long)
Pair = namedtuple("Pair", ["image", "label"])


@pytest.fixture(autouse=True)
def march() -> None:
    set_march(March.NASH_M)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.linear, self.dequant = QuantStub(), nn.Linear(4, 4), DeQuantStub()

    def run(self, x: Tensor) -> Tensor:
        return self.dequant(self.linear(self.quant(x)))


class One(Base):
    def forward(self, image: Any) -> Any:
        return self.run(image)


class Two(Base):
    def forward(self, image: Any, other: Any) -> Any:
        return self.run(image + 2 * other)


class Optional(Base):
    def forward(self, image: Any, other: Any = 0.0) -> Any:
        return self.run(image + 2 * other)


class OfList(Base):
    def forward(self, features: Any) -> Any:
        return self.run(features[0] + 2 * features[1])


class OfDict(Base):
    def forward(self, data: Any) -> Any:
        return self.run(data["left"] + 2 * data["right"])


CASES = {
    "a tensor": (One, A, A),
    "a tuple": (One, (A,), A),
    "a list": (One, [A], A),
    "labels behind it": (One, [A, LABELS], A),
    "a named tuple": (One, Pair(A, LABELS), A),
    "two of a tuple": (Two, (A, B), A + 2 * B),
    "two of a list": (Two, [A, B], A + 2 * B),
    "two and labels": (Two, [A, B, LABELS], A + 2 * B),
    "by name": (Two, {"other": B, "image": A}, A + 2 * B),
    "one by name": (One, {"image": A}, A),
    "one of two by name": (Optional, {"image": A}, A),
    "a list that is an argument": (OfList, ([A, B],), A + 2 * B),
    "a dictionary that is an argument": (OfDict, {"left": A, "right": B}, A + 2 * B),
    "in a tuple": (OfDict, ({"left": A, "right": B},), A + 2 * B),
}
every_case = pytest.mark.parametrize(("make", "given", "meant"), CASES.values(), ids=CASES)


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def seen_by(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """What reached the QuantStub."""
    found: list[Tensor] = []
    hook = model.quant.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    quiet(run)
    hook.remove()
    return found


@every_case
@pytest.mark.parametrize("method", ["jit-strip", "jit", "symbolic"])
def test_prepare_and_calibrate_take_the_same(make: type, given: Any, meant: Tensor, method: str, tmp_path: Any) -> None:
    setter = default_calibration_qconfig_setter
    model = quiet(lambda: prepare(make().eval(), given, setter, method, out_dir=tmp_path))
    assert (tmp_path / "model_check_result.txt").exists()  # the check ran on it, too
    found = seen_by(model, lambda: calibrate(model, [given], progress=False))
    assert found and all(torch.equal(x, meant) for x in found)
    assert float(model.quant.activation_post_process.activation_post_process.max_val) > 0.5 * float(meant.max())


@every_case
def test_all_others_take_it_too(make: type, given: Any, meant: Tensor, tmp_path: Any) -> None:
    net = make().eval()
    net.qconfig = get_default_qconfig()
    quiet(lambda: prepare_qat(net, example_inputs=given, qconfig_setter=default_calibration_qconfig_setter))
    assert all(torch.equal(x, meant) for x in seen_by(net, lambda: equalize(make().eval(), [given])))
    model = quiet(lambda: prepare(make().eval(), given, default_calibration_qconfig_setter, out_dir=None))
    assert torch.equal(seen_by(model, lambda: check_qat_model(model, given, out_dir=str(tmp_path)))[0], meant)
    calibrate(model, [given], progress=False)
    converted = convert(model)
    assert torch.equal(seen_by(converted, lambda: check_model(converted, given))[0], meant)
    assert torch.equal(seen_by(converted, lambda: export_quantized_onnx(converted, given, io.BytesIO()))[0], meant)


def test_prepare_says_what_it_leaves_out() -> None:
    text = r"has 2 items, and the forward of `OfList` takes 1.*\(example_inputs,\)"
    with pytest.warns(QuantizationWarning, match=text):
        prepare(OfList().eval(), [A, B], default_calibration_qconfig_setter, out_dir=None)


def test_keywords_come_on_top() -> None:
    assert arguments_of(Two(), A, {"other": B}) == ((A,), {"other": B})
    assert arguments_of(Two(), {"image": A}, {"other": B}) == ((), {"image": A, "other": B})
    assert arguments_of(Two(), None, {"image": A, "other": B}) == ((), {"image": A, "other": B})


def test_any_number_of_arguments() -> None:
    class Many(nn.Module):
        def forward(self, *parts: Any, **named: Any) -> None: ...

    assert arguments_of(Many(), [A, B, LABELS]) == ((A, B, LABELS), {})
    assert arguments_of(Many(), {"x": A}) == ((), {"x": A})
    assert arguments_of(Many(), {1: A}) == (({1: A},), {})  # no names
    assert arguments_of(nn.DataParallel(One()), [A, LABELS]) == ((A,), {})


def test_keys_that_do_not_fit_are_named() -> None:
    model = prepare(QuantWrapper(nn.Linear(4, 4)).eval(), A, default_calibration_qconfig_setter, out_dir=None)
    with pytest.raises(CalibrationError, match="its keys, picture, are no parameters of it.*forward="):
        calibrate(model, [{"picture": A}], progress=False)


def test_an_argument_by_keyword_only_has_no_place_in_a_file() -> None:
    class Named(Base):
        def forward(self, *, image: Tensor) -> Tensor:
            return self.run(image)

    model = prepare(Named().eval(), {"image": A}, default_calibration_qconfig_setter, out_dir=None)
    calibrate(model, [{"image": A}], progress=False)
    with pytest.raises(TypeError, match="image: the forward of `Named` takes it by keyword only"):
        export_quantized_onnx(convert(model), {"image": A}, io.BytesIO())
