"""Which qconfig a module gets, and what a qconfig without activation means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat import conv2d as qat_conv2d
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
    fake_quantize,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.models import ZOO, make
from tests.routes import assert_one_arithmetic, calibrate

INT8, INT16 = default_qat_8bit_fake_quant_qconfig, default_qat_8bit_weight_16bit_act_fake_quant_qconfig
OUT = default_qat_out_8bit_fake_quant_qconfig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 2, 1), nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.pool(x * x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second, self.last = Block(), Block(), nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.second(self.first(self.quant(x)))))


X = torch.linspace(-1, 1, 2 * 2 * 8 * 8).reshape(2, 2, 8, 8)


def _formats(qat: nn.Module, *paths: str) -> list[Any]:
    found = []
    for path in paths:
        quantizer = getattr(qat.get_submodule(path), "activation_post_process", None)
        found.append(None if quantizer is None else quantizer.dtype)
    return found


PATHS = ("quant", "first.conv", "first.pool", "second.conv", "second.pool", "last")


@pytest.mark.parametrize(
    ("qconfig_dict", "wanted"),
    [
        ({"": INT8}, [qint8] * 6),
        ({"": INT16}, [qint16] * 6),
        ({"": INT8, "module_type": [(nn.Conv2d, INT16)]}, [qint8, qint16, qint8, qint16, qint8, qint16]),
        ({"": INT8, "module_type": {nn.Conv2d: INT16}}, [qint8, qint16, qint8, qint16, qint8, qint16]),
        ({"": INT8, "module_type": [(Block, INT16)]}, [qint8, qint16, qint16, qint16, qint16, qint8]),
        ({"": INT8, "module_name": [("second", INT16)]}, [qint8, qint8, qint8, qint16, qint16, qint8]),
        ({"": INT8, "module_name": {"second": INT16, "last": OUT}}, [qint8, qint8, qint8, qint16, qint16, None]),
        ({"": INT8, "module_name": {"second": INT16, "second.conv": INT8}}, [qint8] * 4 + [qint16, qint8]),
        (
            {"": INT8, "module_type": {nn.Conv2d: INT16}, "module_name": {"first.conv": INT8}},
            [qint8, qint8, qint8, qint16, qint8, qint16],
        ),
    ],
)  # fmt: skip
def test_names_beat_types_beat_the_global_choice(qconfig_dict: dict, wanted: list) -> None:
    assert _formats(prepare_qat_fx(Net(), qconfig_dict), *PATHS) == wanted


def test_the_attribute_beats_all_and_reaches_below() -> None:
    model = Net()
    model.second.qconfig = INT16
    model.last.qconfig = OUT
    qat = prepare_qat_fx(model, {"": INT8, "module_name": {"second": INT8, "last": INT16}})
    assert _formats(qat, *PATHS) == [qint8, qint8, qint8, qint16, qint16, None]
    model.qconfig = INT8
    assert _formats(prepare_qat(model), *PATHS) == [qint8, qint8, qint8, qint16, qint16, None]


def test_functions_take_their_parents_qconfig() -> None:
    qat = prepare_qat_fx(Net(), {"": INT8, "module_name": {"second": INT16}})
    assert _formats(qat, "first._generated_mul_0", "second._generated_mul_0") == [qint8, qint16]


def test_a_generated_module_can_be_named() -> None:
    qat = prepare_qat_fx(Net(), {"": INT8, "module_name": {"first._generated_mul_0": INT16}})
    assert _formats(qat, "first._generated_mul_0", "second._generated_mul_0") == [qint16, qint8]


@pytest.mark.slow
def test_mixed_formats_have_one_arithmetic(tmp_path: Any) -> None:
    names = {"first.pool": INT16, "second.conv": INT16, "second._generated_mul_0": INT8, "last": OUT}
    qat = calibrate(prepare_qat_fx(Net(), {"": INT8, "module_name": names}), (X,))
    assert_one_arithmetic(qat, (X,), tmp_path)


def test_none_keeps_a_module_float() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv, self.head = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.dequant(self.conv(self.quant(x))))

    qat = prepare_qat_fx(Tail(), {"": INT8, "module_name": [("head", None)]})
    assert type(qat.head) is nn.Conv2d and type(qat.conv) is qat_conv2d.Conv2d


def test_a_float_module_that_gets_integers_says_what_to_do() -> None:
    with pytest.warns(QuantizationWarning, match=r"`second.conv` \(test_configuration.py:\d+\) has qconfig None"):
        qat = prepare_qat_fx(Net(), {"": INT8, "module_name": [("second.conv", None)]})
    with pytest.raises(NotImplementedError, match="DeQuantStub"):
        qat(X)


@pytest.mark.parametrize(
    ("qconfig_dict", "words"),
    [
        ({"": INT8, "module_name": [("third", INT16)]}, ("'third'", "first, second, last")),
        ({"": INT8, "modul_name": []}, ("modul_name", "'module_name'")),
        ({"": INT8, "module_name": "last"}, ("module_name", "pairs")),
        ({"": OUT}, ("quant", "activation")),
        (
            {"": INT8, "module_type": [(nn.AvgPool2d, OUT)]},
            ("avg_pool2d", "first.pool", "conv1d, conv2d", "linear", "matmul and einsum only"),
        ),
        ({"": INT8, "module_name": [("first._generated_mul_0", OUT)]}, ("first._generated_mul_0", "mul")),
    ],
)
def test_a_configuration_that_makes_no_sense_says_why(qconfig_dict: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(QuantizationConfigError) as error:
        prepare_qat_fx(Net(), qconfig_dict)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_high_precision_output_is_the_accumulator(tmp_path: Any) -> None:
    torch.manual_seed(0)
    qat = calibrate(prepare_qat_fx(Net(), {"": INT8, "module_name": {"last": OUT}}), (X,))
    quantized = assert_one_arithmetic(qat, (X,), tmp_path)
    last, out = quantized.last, quantized(X)
    steps = (out - last.bias.reshape(1, -1, 1, 1)).double() / (
        last.weight_scale.reshape(1, -1, 1, 1).double() * float(quantized.second.pool.scale)
    )
    assert float((steps - steps.round()).abs().max()) < 0.51  # the bias itself is rounded to the accumulator's grid
    assert out.unique().numel() > 256 or out.numel() < 256  # finer than any int8 output


def test_high_precision_matmul(tmp_path: Any) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.product = QuantStub(), DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.product.matmul(x, x, y_trans=True))

    for qconfig in (INT8, INT16):
        qat = calibrate(prepare_qat_fx(Scores(), {"": qconfig, "module_name": {"product": OUT}}), (X,))
        assert_one_arithmetic(qat, (X,), tmp_path)
        assert torch.allclose(qat(X), X @ X.transpose(-1, -2), atol=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_two_prepares_give_the_same_graph_and_keys(name: str) -> None:
    model, _ = make(name)
    first, second = (prepare_qat_fx(model, {"": INT8}) for _ in range(2))
    assert first.graph.python_code("self").src == second.graph.python_code("self").src
    assert list(first.state_dict()) == list(second.state_dict())
    assert str(first) == str(second)


def test_generated_names_count_by_scope_and_operator() -> None:
    qat = prepare_qat_fx(make("vit")[0], {"": INT8})
    found = {path for path, _ in qat.named_modules() if "_generated_" in path.rpartition(".")[2]}
    wanted = {"_generated_cat_0", "_generated_quant_0", "_generated_add_0", "_generated_quant_1"}
    in_attention = ("matmul_0", "mul_0", "softmax_0", "matmul_1")
    for block in ("blocks.0", "blocks.1"):
        wanted |= {f"{block}.attn._generated_{name}" for name in in_attention}
        wanted |= {f"{block}._generated_add_0", f"{block}._generated_add_1"}
    assert found == wanted


def test_preserved_attributes() -> None:
    model = Net()
    model.labels = ["a", "b"]
    model._hidden = 3
    qat = prepare_qat_fx(model, {"": INT8}, {"preserved_attributes": ["_hidden"]})
    assert qat.labels == ["a", "b"] and qat._hidden == 3
    quantized = convert_fx(calibrate(qat, (X,)), convert_custom_config_dict={"preserved_attributes": ["_hidden"]})
    assert quantized.labels == ["a", "b"] and quantized._hidden == 3


def test_default_quantizers_are_those_of_the_default_qconfig() -> None:
    assert fake_quantize.default_8bit_fake_quant is INT8.activation
    assert fake_quantize.default_weight_8bit_fake_quant is INT8.weight
    assert get_default_qconfig() == INT8


@pytest.mark.parametrize("kwargs", [{}, {"activation_fake_quant": "lsq"}, {"activation_observer": "kl"}], ids=str)
def test_everything_that_is_added_is_on_the_device_of_the_model(kwargs) -> None:
    set_march(March.NASH_E)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.Softmax(1))).to("meta")
    prepared = prepare_qat_fx(model, {"": get_default_qconfig(**kwargs)})
    assert {t.device.type for t in prepared.state_dict().values()} == {"meta"}


def test_without_stubs_modules_are_prepared_by_their_qconfig() -> None:
    x = torch.randn(2, 4, 6, 6)
    set_march(March.BAYES)
    with pytest.warns(QuantizationWarning, match="has no QuantStub"):
        qat = prepare_qat_fx(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), {"": INT8})
    assert type(qat.get_submodule("0")).__name__ == "ConvReLU2d"
    qat(x).dequantize().sum().backward()
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    with pytest.raises(RuntimeError, match="QuantStub"):
        qat(x)


def test_no_qconfig_at_all_is_worth_a_warning() -> None:
    set_march(March.BAYES)
    with pytest.warns(QuantizationWarning, match="no module has a qconfig"):
        prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)))
    with pytest.warns(QuantizationWarning, match="no module has a qconfig"):
        prepare_qat(QuantWrapper(nn.Conv2d(4, 4, 1)))


def test_int16_on_bernoulli2_is_worth_a_warning() -> None:
    set_march(March.BERNOULLI2)
    with pytest.warns(QuantizationWarning, match="int16 on bernoulli2"):
        prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)), {"": INT16})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ao.quantization.get_default_qat_qconfig(), "fake quantizers of this package"),
        (lambda: get_default_qconfig(activation_qkwargs={"avg_const": 0.1}), "avg_const"),
        (
            lambda: get_default_qconfig(weight_qkwargs={"qscheme": torch.per_channel_symmetric, "ch_axis": 1}),
            "output channel, ch_axis=0",
        ),
        (
            lambda: get_default_qconfig(activation_qkwargs={"qscheme": torch.per_channel_symmetric, "ch_axis": 1}),
            "activations have one scale",
        ),
        (lambda: get_default_qat_qconfig(dtype="qint32"), "choose qint8 or qint16"),
    ],
)
def test_a_qconfig_that_makes_no_sense_says_why(make: Any, words: str) -> None:
    set_march(March.BAYES)
    with pytest.raises(QuantizationConfigError, match=words):
        prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)), {"": make()})
