"""What a QuantStub is given: one tensor of real numbers, and a scale if it is known."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import HorizonError, OperatorInputError, QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    QuantStub,
    QuantWrapper,
    calibrate,
    convert,
    get_default_qconfig,
    get_qconfig,
    prepare,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import (
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_qconfig_setter,
)
from horizon_plugin_pytorch.statistics.observer_names import OBSERVERS


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


NO_TENSORS = {
    "dict": {"a": torch.ones(1, 3)},
    "list": [torch.ones(1, 3)],
    "array": np.zeros((1, 3), np.float32),
    "None": None,
    "int": 1,
    "text": "image",
    "complex": torch.ones(1, 3, dtype=torch.complex64),
    "sparse": torch.eye(3).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
}


@pytest.mark.parametrize("method", ["jit-strip", "symbolic", "eager"])
@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_refused_with_the_stubs_name(name: str, method: str) -> None:
    net, good, bad = QuantWrapper(nn.Identity()).eval(), torch.randn(1, 3), NO_TENSORS[name]
    net.qconfig = get_default_qconfig()
    given = {} if method == "eager" else {"qconfig_dict": {"": get_default_qconfig()}}
    if method == "jit-strip":
        with pytest.raises(HorizonError, match="`QuantStub` at `quant`"):
            prepare(net, (bad,), out_dir=None, **given)
    model = prepare(net, (good,), method=method, out_dir=None, **given)
    calibrate(model, [good], progress=False)
    for one in (model, convert(model)):
        with pytest.raises(HorizonError, match="`QuantStub` at `quant`.*instead of a tensor of real numbers"):
            one(bad)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float64, torch.float16, torch.bfloat16])
def test_integers_and_other_floats_count_as_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1, 0]]).to(dtype)
    model = prepare(QuantWrapper(nn.Identity()).eval(), (x,), default_calibration_qconfig_setter, out_dir=None)
    calibrate(model, [x], progress=False)
    assert (convert(model)(x) - x.float()).abs().max() < 0.02


@pytest.mark.in_turns("fake_quant", "observer")
@pytest.mark.parametrize("fake_quant", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_fixed_scale_holds_under_every_observer(observer: str, fake_quant: str) -> None:
    settings: dict[str, dict] = {
        "percentile": {"percentile": 99.9, "bins": 1024},
        "mse": {"stride": 2},
        "kl": {"bins": 512},
        "fixed_scale": {"scale": 0.5, "zero_point": 0},
    }
    for dtype in ("qint8", "qint16"):
        kwargs = {**settings.get(observer, {}), "dtype": dtype}
        qconfig = get_default_qconfig(fake_quant, activation_observer=observer, activation_qkwargs=kwargs)
        _assert_fixed({"qconfig_dict": {"": qconfig}})


@pytest.mark.parametrize(
    "setter",
    [
        default_calibration_qconfig_setter,
        default_qat_qconfig_setter,
        calibration_8bit_weight_16bit_act_qconfig_setter,
        QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": "qint16"})], save_dir=None),
        QconfigSetter(get_qconfig(fix_scale=True), [ModuleNameTemplate({"": "qint8"})], save_dir=None),
    ],
)
def test_a_fixed_scale_holds_under_every_setter(setter: Any) -> None:
    _assert_fixed({"qconfig_setter": setter})


def _assert_fixed(given: dict[str, Any]) -> None:
    x = torch.randn(2, 8)
    for method in ("jit-strip", "symbolic"):
        net = QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))).eval()
        net.quant = QuantStub(scale=1 / 128)
        model = prepare(net, (x,), method=method, out_dir=None, **given)
        calibrate(model, [x], progress=False)
        assert float(model.quant.activation_post_process.scale) == 1 / 128
        assert float(convert(model).quant.scale) == 1 / 128


@pytest.mark.parametrize(
    "scale", [0.25, np.float32(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor([0.25]), Fraction(1, 4)]
)
def test_a_scale_is_a_number_however_it_is_given(scale: Any) -> None:
    stub = QuantStub(scale=scale, zero_point=np.int64(0))
    assert stub.scale == 0.25 and type(stub.scale) is float


@pytest.mark.parametrize(
    "scale", [0, -1.0, float("inf"), float("nan"), "0.1", [0.1, 0.2], torch.ones(3), np.ones(3), {}]
)
def test_a_scale_that_is_none_is_refused(scale: Any) -> None:
    with pytest.raises(QuantizationConfigError, match="one positive and finite number"):
        QuantStub(scale=scale)


@pytest.mark.parametrize("zero_point", [1, torch.tensor(3), np.array([1, 2]), "0"])
def test_a_zero_point_is_zero(zero_point: Any) -> None:
    with pytest.raises(QuantizationConfigError, match="zero_point must be 0"):
        QuantStub(zero_point=zero_point)


def test_a_fixed_scale_of_the_operator_says_nothing_about_its_parts() -> None:
    """A quotient has an inner reciprocal, whose observer must not be given what only a fixed scale has."""

    class Quotient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = QuantStub(), QuantStub(), QuantWrapper(nn.Identity()).dequant

        def forward(self, x: Any, y: Any) -> Any:
            return self.out(self.a(x) / self.b(y))

    qconfig = get_default_qconfig(
        activation_observer="fixed_scale", activation_qkwargs={"scale": 1 / 64, "zero_point": 0, "dtype": "qint8"}
    )
    x, y = torch.rand(2, 8), torch.rand(2, 8) + 0.5
    model = prepare_qat_fx(Quotient().eval(), {"": qconfig})
    calibrate(model, [(x, y)], progress=False)
    assert (model(x, y) - (x / y).clamp(max=127 / 64)).abs().max() < 0.1


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_model_that_is_mapped_says_what_to_write(is_converted: bool) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    model: Any = prepare_qat_fx(QuantWrapper(nn.Linear(4, 2)).eval(), {"": get_default_qconfig()})
    calibrate(model, [x], progress=False)
    model = convert(model) if is_converted else model
    with pytest.raises(OperatorInputError, match=r"`QuantStub` at `quant`.*`torch.vmap`.*flatten\(0, 1\)"):
        torch.vmap(model)(x)
    state = {name: value.detach().expand(2, *value.shape) for name, value in model.named_parameters()}
    if state:
        with pytest.raises(OperatorInputError, match=r"`Linear` at `module`.*`torch.vmap`"):
            torch.vmap(lambda s: torch.func.functional_call(model, s, (x[0],)))(state)
