"""Qconfigs: every predefined one has the documented formats and observers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.quantization import (
    FakeQuantize,
    QConfig,
    QuantStub,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    qconfig,
)
from horizon_plugin_pytorch.quantization.observer import (
    FixedScaleObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from horizon_plugin_pytorch.quantization.observer_v2 import MinMaxObserver, PercentileObserver

# api-facts.md 5.2: name -> activation dtype, observer, averaging constant; None for a high-precision output.
PREDEFINED = {
    "default_qat_8bit_fake_quant_qconfig": (qint8, MovingAverageMinMaxObserver, 0.01),
    "default_qat_8bit_fixed_act_fake_quant_qconfig": (qint8, MovingAverageMinMaxObserver, 0),
    "default_calib_8bit_fake_quant_qconfig": (qint8, PercentileObserver, 0.01),
    "default_qat_out_8bit_fake_quant_qconfig": None,
    "default_calib_out_8bit_fake_quant_qconfig": None,
    "default_qat_8bit_weight_32bit_out_fake_quant_qconfig": None,
    "default_calib_8bit_weight_32bit_out_fake_quant_qconfig": None,
    "default_qat_8bit_weight_16bit_act_fake_quant_qconfig": (qint16, MovingAverageMinMaxObserver, 0.01),
    "default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig": (qint16, MovingAverageMinMaxObserver, 0),
    "default_calib_8bit_weight_16bit_act_fake_quant_qconfig": (qint16, PercentileObserver, 0.01),
    "default_qat_8bit_lsq_quant_qconfig": (qint8, MovingAverageMinMaxObserver, 1.0),
}


@pytest.mark.parametrize("name", PREDEFINED)
def test_predefined_qconfigs_have_the_documented_formats(name: str) -> None:
    found = getattr(qconfig, name)
    weight = found.weight()
    assert type(weight.activation_post_process) is MovingAveragePerChannelMinMaxObserver
    assert (weight.dtype, weight.qscheme, weight.ch_axis) == (qint8, torch.per_channel_symmetric, 0)
    if PREDEFINED[name] is None:
        assert found.activation is None
        return
    dtype, observer, constant = PREDEFINED[name]
    activation = found.activation()
    assert activation.dtype == dtype
    assert type(activation.activation_post_process) is observer
    assert activation.activation_post_process.averaging_constant == constant
    assert (activation.qscheme, activation.ch_axis) == (torch.per_tensor_symmetric, -1)


def test_no_predefined_qconfig_is_left_out() -> None:
    assert {n for n in vars(qconfig) if n.startswith("default_") and n.endswith("_qconfig")} == set(PREDEFINED)


def test_documented_partial_constructors() -> None:
    assert qconfig.default_8bit_fake_quant().dtype == qint8
    assert qconfig.default_weight_8bit_fake_quant(channel_len=4).scale.shape == (4,)


@pytest.mark.parametrize(
    ("made", "activation", "weight"),
    [
        (get_default_qconfig(), (qint8, MovingAverageMinMaxObserver), qint8),
        (get_default_qconfig(activation_qkwargs={"dtype": "qint16"}), (qint16, MovingAverageMinMaxObserver), qint8),
        (get_default_qconfig(activation_observer="percentile"), (qint8, PercentileObserver), qint8),
        (get_default_qconfig(activation_qkwargs={"observer": MinMaxObserver}), (qint8, MinMaxObserver), qint8),
        (get_default_qconfig(weight_qkwargs={"dtype": qint16}), (qint8, MovingAverageMinMaxObserver), qint16),
        (get_default_qconfig(activation_fake_quant=None), None, qint8),
        (get_default_qconfig(weight_fake_quant=None), (qint8, MovingAverageMinMaxObserver), None),
        (
            get_default_qconfig(activation_observer="fixed_scale", activation_qkwargs={"scale": 0.25}),
            (qint8, FixedScaleObserver),
            qint8,
        ),
        (
            get_default_qconfig(activation_qkwargs={"observer": FixedScaleObserver, "scale": 0.25}),
            (qint8, FixedScaleObserver),
            qint8,
        ),
        (get_default_qat_qconfig(), (qint8, MovingAverageMinMaxObserver), qint8),
        (get_default_qat_qconfig(dtype="qint16"), (qint16, MovingAverageMinMaxObserver), qint8),
        (get_default_qat_qconfig("qint16", "qint16"), (qint16, MovingAverageMinMaxObserver), qint16),
        (get_default_qat_out_qconfig(), None, qint8),
        (get_default_calib_qconfig(), (qint8, PercentileObserver), qint8),
        (
            get_default_calib_qconfig(dtype=qint16, calib_qkwargs={"percentile": 99.9}),
            (qint16, PercentileObserver),
            qint8,
        ),
    ],
)
def test_getters_build_what_was_asked_for(made: QConfig, activation, weight) -> None:
    if activation is None:
        assert made.activation is None
    else:
        assert (made.activation().dtype, type(made.activation().activation_post_process)) == activation
    assert (None if made.weight is None else made.weight().dtype) == weight


def test_weights_can_have_one_scale_or_a_fixed_one() -> None:
    one = get_default_qconfig(weight_qkwargs={"qscheme": torch.per_tensor_symmetric}).weight(channel_len=4)
    assert one.scale.shape == (1,)
    assert type(one.activation_post_process) is MovingAverageMinMaxObserver
    fixed = get_default_qconfig(weight_observer="fixed_scale", weight_qkwargs={"scale": 0.5}).weight(channel_len=3)
    assert fixed.scale.tolist() == [0.5, 0.5, 0.5]


def test_keyword_arguments_reach_the_observer() -> None:
    made = get_default_qconfig(
        activation_qkwargs={"averaging_constant": 0.2, "is_sync_quantize": True, "quant_min": -127}
    )
    ob = made.activation().activation_post_process
    assert (ob.averaging_constant, ob.is_sync_quantize, ob.quant_min) == (0.2, True, -127)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: get_default_qconfig(activation_fake_quant="dorefa"), "='dorefa' is not available.*lsq, pact"),
        (lambda: get_default_qconfig(weight_fake_quant="typo"), "weight_fake_quant='typo'"),
        (
            lambda: get_default_qconfig(activation_observer="best"),
            "activation_observer='best'.*min_max, percentile.*fixed_scale, clip",
        ),
        (lambda: get_default_qconfig(weight_observer="kl"), "weight_observer='kl'.*min_max"),
        (lambda: get_default_qconfig(activation_observer="fixed_scale"), "activation_qkwargs={'scale'"),
        (lambda: get_default_qconfig(activation_qkwargs={"dtype": "qint99"}), "unknown quantized dtype 'qint99'"),
        (lambda: QConfig(activation=FakeQuantize.with_args(), output=FakeQuantize.with_args(dtype=qint16)), "`output`"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(make, text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        make()


def test_output_is_another_name_of_activation() -> None:
    partial = FakeQuantize.with_args(dtype=qint16)
    made = QConfig(output=partial)
    assert made.output is made.activation is partial
    assert (made.weight, made.input) == (None, None)
    assert QConfig(activation=partial) == made


def test_qconfigs_are_values() -> None:
    made = get_default_qconfig(activation_qkwargs={"dtype": qint16})
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made._replace()):
        assert type(other) is QConfig
        assert other == made
        assert hash(other) == hash(made)
    assert made != get_default_qconfig()
    assert made._replace(activation=None).activation is None
    activation, weight, *_ = made
    assert activation is made.activation
    assert weight is made.weight
    assert "qint16" in repr(made)


@pytest.mark.parametrize(
    "kwargs", [{"scale": 0}, {"scale": -1.0}, {"scale": float("nan")}, {"scale": float("inf")}, {"zero_point": 3}]
)
def test_a_quant_stub_refuses_what_is_no_scale(kwargs: dict) -> None:
    with pytest.raises(QuantizationConfigError, match="QuantStub"):
        QuantStub(**kwargs)


def test_stubs_pass_float_values_and_show_their_scale() -> None:
    x = torch.randn(3)
    stub = QuantStub(scale=1 / 128, zero_point=None)
    assert stub(x) is x
    assert repr(stub) == "QuantStub(scale=0.0078125)"
    assert repr(QuantStub()) == "QuantStub()"


@pytest.mark.parametrize("make", [get_default_qat_qconfig, get_default_calib_qconfig])
def test_the_oldest_scripts_give_a_number_of_bits(make: Any) -> None:
    for config in (make(bits=16), make(16), make(bits=16, backend="")):
        assert config.activation().dtype == qint16 and config.weight().dtype == qint8
    assert get_default_qat_out_qconfig(bits=8).weight().dtype == qint8


def test_fake_quantizers_as_users_write_them() -> None:
    from horizon_plugin_pytorch.quantization import FixedScaleObserver, default_weight_8bit_fake_quant

    fixed = FakeQuantize.with_args(
        observer=FixedScaleObserver, quant_min=-32768, quant_max=32767, dtype=qint16, saturate=True, scale=1 / 2**10
    )
    config = QConfig(activation=fixed, weight=default_weight_8bit_fake_quant)
    assert float(config.activation().scale) == 1 / 2**10 and config.activation().dtype == qint16
    assert float(FixedScaleObserver(1 / 128, 0, "qint16").calculate_qparams()[0]) == 1 / 128
    given = get_default_qat_qconfig(dtype=qint16, activation_qkwargs={"observer": FixedScaleObserver, "scale": 0.5})
    assert float(given.activation().scale) == 0.5
    out = get_default_qat_out_qconfig("qint8", weight_fake_quant="fake_quant", weight_qkwargs={"averaging_constant": 1})
    assert out.activation is None and out.weight().activation_post_process.averaging_constant == 1
