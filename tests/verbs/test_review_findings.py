"""Cases that users met first: each was once a silent wrong result or a message that did not help."""

from __future__ import annotations

import copy
import math
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    ConversionError,
    ExportError,
    OperatorInputError,
    QuantizationConfigError,
    QuantizationWarning,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    fuse_fx,
    fuse_modules,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases.base import Body
from tests.routes import assert_one_arithmetic, prepared

INT8, INT16 = default_qat_8bit_fake_quant_qconfig, default_qat_8bit_weight_16bit_act_fake_quant_qconfig
X = torch.randn(2, 4, 6, 6)


def _onnx(model: nn.Module, x: Tensor, path: Any) -> Tensor:
    export_quantized_onnx(model, x, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_autocast_does_not_change_integers(dtype: str) -> None:
    qat = prepared(QuantWrapper(nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))), (X,), dtype)
    quantized = convert_fx(qat)
    with torch.no_grad():
        expected = quantized(X)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(quantized(X), expected) and torch.equal(qat(X), expected)


def test_a_kept_result_does_not_change_when_training_goes_on() -> None:
    qat = prepared(nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1)), (X,))
    with torch.no_grad():
        kept = qat(X)
        values = convert_fx(qat)(X).dequantize()
        set_fake_quantize(qat, FakeQuantState.QAT)
        qat(100 * X)
    assert torch.equal(kept.dequantize(), values)


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_bias_that_does_not_fit_beside_its_products_is_exact_in_onnx(is_wide: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 16, 3)
    with torch.no_grad():
        conv.weight *= 1e-3
        conv.bias.normal_()
    x = torch.randn(4, 1, 20, 20)
    model = QuantWrapper(conv)
    model.module.qconfig = INT16 if is_wide else INT8
    quantized = convert_fx(prepared(model, (x,)))
    assert torch.equal(_onnx(quantized, x, tmp_path / "m.onnx"), quantized(x))


def _relu_in_place(x: Tensor) -> Tensor:
    F.relu(x, inplace=True)
    return x * 2


def _add_in_place(x: Tensor) -> Tensor:
    x.add_(1.0)
    return x * 2


def _both_read(x: Tensor) -> Tensor:
    y = x + 0.5
    z = F.relu(y, inplace=True)
    return y + z


@pytest.mark.parametrize("body", [_relu_in_place, _add_in_place, _both_read])
def test_readers_after_an_in_place_operator_see_what_it_wrote(body: Any) -> None:
    model = QuantWrapper(Body(body))
    qat = prepared(model, (X.clone(),), "qint16")
    assert (qat(X.clone()) - model(X.clone())).abs().max() < 1e-3


def test_writing_to_memory_that_a_view_shows_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        v = x.view(2, -1)
        x.mul_(2)
        return v * 1.0 + x.view(2, -1)

    with pytest.raises(UnsupportedOperatorError, match=r"in place .*without in-place operators"):
        prepare_qat_fx(QuantWrapper(Body(body)), {"": INT8})


class _EagerAdd(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.quant, self.conv, self.add, self.dequant = (
            QuantStub(),
            nn.Conv2d(4, 4, 1),
            FloatFunctional(),
            DeQuantStub(),
        )
        self.scale, self.is_first = FloatFunctional(), is_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.conv(self.scale.mul_scalar(x, 2.0))
        return self.dequant(self.add.add(y, x) if self.is_first else self.add.add(x, y))


@pytest.mark.parametrize("is_first", [True, False])
def test_eager_fusion_finds_the_layers_operand(is_first: bool) -> None:
    set_march(March.BAYES)
    model = _EagerAdd(is_first)
    fused = fuse_modules(model, ["conv", "add"])
    torch.testing.assert_close(fused(X), model(X))
    fused.qconfig = INT16
    qat = prepare_qat(copy.deepcopy(fused))
    qat(X)
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    quantized = convert(qat)
    assert torch.equal(quantized(X), qat(X))
    assert (qat(X) - model(X)).abs().max() < 0.05


def test_folding_a_batch_norm_of_features_insists_on_two_axes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(fuse_fx(model)(x), model(x))
    with pytest.raises(RuntimeError, match=r"BatchNorm1d is folded.*not for 3-d ones"):
        fuse_fx(model)(torch.randn(2, 4, 4))
    qat = prepared(QuantWrapper(model), (x,))
    for stage in (qat, convert_fx(qat)):
        with pytest.raises(OperatorInputError, match=r"`Linear` at `module.0`.*not for 3-d ones"):
            stage(torch.randn(2, 4, 4))


@pytest.mark.parametrize("function", [torch.reciprocal, torch.sqrt, torch.rsqrt])
def test_gradients_are_finite_where_the_function_is_steep(function: Any) -> None:
    model = prepare_qat_fx(QuantWrapper(Body(function)), {"": INT8})
    x = torch.tensor([[0.0, 1e-4, 0.5, 1.0, 2.0]], requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all() and bool((x.grad != 0).any())


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(4, 4, 1), "block"

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.seq, self.blocks = nn.Sequential(_Block(), nn.ReLU()), nn.ModuleList([_Block()])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.blocks[0](self.seq(self.quant(x))))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def test_containers_unused_modules_attributes_and_methods_survive() -> None:
    qat = prepared(_Container(), (X,))
    for stage in (qat, copy.deepcopy(qat), convert_fx(qat)):
        assert isinstance(stage.seq, nn.Sequential) and isinstance(stage.blocks, nn.ModuleList)
        assert stage.seq[0].name == "block" and type(stage.unused) is nn.Linear
        assert "unused.weight" in stage.state_dict()
        torch.testing.assert_close(stage.loss(X), stage(X).square().mean())


def test_without_stubs_modules_are_prepared_by_their_qconfig() -> None:
    set_march(March.BAYES)
    with pytest.warns(QuantizationWarning, match="has no QuantStub"):
        qat = prepare_qat_fx(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), {"": INT8})
    assert type(qat.get_submodule("0")).__name__ == "ConvReLU2d"
    qat(X).dequantize().sum().backward()
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    with pytest.raises(RuntimeError, match="QuantStub"):
        qat(X)


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


def test_a_checkpoint_of_another_format_gives_scales_that_fit() -> None:
    model = QuantWrapper(nn.Conv2d(4, 4, 1))
    calibrated = prepared(model, (X,))
    wide = prepare_qat_fx(model, {"": INT16})
    with pytest.warns(CalibrationWarning, match="another format"):
        wide.load_state_dict(calibrated.state_dict())
    narrow_scale = calibrated.module.activation_post_process.scale
    torch.testing.assert_close(wide.module.activation_post_process.scale, narrow_scale * 127.5 / 32767.5)


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


def test_the_switch_buffers_switch() -> None:
    quantizer = FakeQuantize()
    quantizer(torch.tensor([1.0]))
    quantizer.observer_enabled[0] = 0
    scale = quantizer.scale.clone()
    quantizer(torch.tensor([100.0]))
    assert torch.equal(quantizer.scale, scale)
    quantizer.fake_quant_enabled[0] = 0
    assert float(quantizer(torch.tensor([0.333])).dequantize()) == pytest.approx(0.333)


def test_a_frozen_range_keeps_a_scale_that_was_given() -> None:
    quantizer = FakeQuantize(averaging_constant=0)
    quantizer.set_qparams(0.5)
    quantizer(torch.tensor([1.0]))
    assert float(quantizer.scale) == 0.5


def test_dequantizing_several_tensors_at_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> Any:
            return self.dequant(self.quant(x).chunk(2, 1))

    qat = prepared(Two(), (X,))
    for stage in (qat, convert_fx(qat)):
        assert [type(t) for t in stage(X)] == [Tensor, Tensor]


def test_indices_that_onnx_cannot_give_are_refused(tmp_path: Any) -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> Any:
            return F.max_pool2d(self.dequant(self.quant(x)), 2, return_indices=True)

    quantized = convert_fx(prepared(Pool(), (X,)))
    with pytest.raises(ExportError, match="indices of max pooling"):
        export_quantized_onnx(quantized, X, tmp_path / "m.onnx")


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_one_image_without_a_batch_axis(dtype: str, tmp_path: Any) -> None:
    body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 2), nn.AvgPool2d(2))
    x = torch.randn(4, 12, 12)
    qat = prepared(QuantWrapper(body), (x,), dtype)
    quantized = convert_fx(qat)
    assert torch.equal(qat(x), quantized(x))
    assert torch.equal(_onnx(quantized, x, tmp_path / "m.onnx"), quantized(x))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_an_empty_batch_gives_an_empty_result(dtype: str) -> None:
    qat = prepared(QuantWrapper(nn.Conv2d(4, 8, 3)), (X,), dtype)
    assert convert_fx(qat)(X[:0]).shape == qat(X[:0]).shape == (0, 8, 4, 4)


def test_statistics_do_not_move_in_validation() -> None:
    qat = prepared(QuantWrapper(nn.BatchNorm2d(4)), (X,))
    qat.train()
    x = X.clone().requires_grad_()
    assert torch.equal(qat(x), qat(x))


def test_constants_and_private_attributes_of_the_model_are_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub()
            self._k, self._n = torch.full((1,), 3.0), 7

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(self.quant(x))) * torch.tensor(2.0) + self._k

        @staticmethod
        def halved(x: Tensor) -> Tensor:
            return x / 2

        @property
        def number(self) -> int:
            return self._n

    model = Net()
    qat = prepared(model, (X,), "qint16")
    for stage in (qat, copy.deepcopy(qat), convert_fx(qat)):
        assert (stage(X) - model(X)).abs().max() < 0.05
        assert stage.number == 7 and float(stage.halved(torch.tensor(4.0))) == 2


@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.AccumulatorWarning")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64), (64, 64)),
        (nn.Conv2d(32, 8, 3, padding=1), (2, 32, 8, 8)),
        (nn.Conv2d(8, 8, 7, groups=8), (1, 8, 9, 9)),
        (nn.ConvTranspose2d(32, 4, 3, stride=2), (1, 32, 5, 5)),
    ],
)
@pytest.mark.parametrize("last", ["qint16", None])
def test_int16_weights_with_int16_inputs_lose_nothing(layer: nn.Module, shape: Any, last: Any, tmp_path: Any) -> None:
    """Their sums pass int32 on ordinary data."""
    torch.manual_seed(0)
    set_march(March.NASH_E)  # BAYES has int8 weights only
    both = get_default_qconfig(activation_qkwargs={"dtype": "qint16"}, weight_qkwargs={"dtype": "qint16"})
    nn.init.normal_(layer.weight, 0.5, 0.1)
    layer.bias = None
    config = {"": both} if last else {"": both, "module_name": [("module", both._replace(activation=None))]}
    model = prepare_qat_fx(QuantWrapper(layer), config)
    x = torch.rand(shape)
    set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
    model(x)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    wanted = layer(x)
    assert float((model(x) - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    quantized = convert_fx(model)
    assert torch.equal(quantized(x), model(x))
    assert torch.equal(_onnx(quantized, x, tmp_path / "m.onnx"), quantized(x))


@pytest.mark.parametrize(
    "alias", [nn.Identity(), nn.Flatten(), lambda y: y.contiguous(), lambda y: y.view(2, -1).view(2, 4, 6, 6)]
)
def test_writing_through_another_name_is_refused(alias: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.alias = QuantStub(), alias

        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x) * 2.0
            v = self.alias(y)
            v.relu_()
            return y * 1.0

    with pytest.raises(UnsupportedOperatorError, match="in place"):
        prepare_qat_fx(Net(), {"": INT8})


def test_a_residual_with_more_axes_than_the_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.other, self.linear = QuantStub(), QuantStub(), nn.Linear(6, 7)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linear(self.quant(x)) + self.other(y)

    inputs = (torch.randn(5, 6), torch.randn(3, 5, 7))
    for dtype in ("qint8", "qint16"):
        qat = prepared(Net(), inputs, dtype)
        assert torch.equal(qat(*inputs).int_repr(), convert_fx(qat)(*inputs).int_repr())


def test_preparing_in_inference_mode() -> None:
    with torch.inference_mode():
        qat = prepared(QuantWrapper(nn.Conv2d(4, 4, 1)), (X,))
        assert torch.equal(qat(X), convert_fx(qat)(X))


@pytest.mark.parametrize(
    "take",
    [
        lambda x, i: x.select(1, i),
        lambda x, i: x.narrow(1, i, 1),
        lambda x, i: x.roll(i, 1),
        lambda x, i: x[:, i.item()],
    ],
)
def test_a_computed_position_is_not_exported_as_a_constant(take: Any, tmp_path: Any) -> None:
    model = QuantWrapper(Body(lambda x: take(x, x.flatten().argmax() % 4)))
    quantized = convert_fx(prepared(model, (X,)))
    with pytest.raises(ExportError, match="reads a number out of a computed tensor .*index_select"):
        export_quantized_onnx(quantized, X, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "take",
    [
        lambda x, i: x[i % 2],
        lambda x, i: x[:, i],
        lambda x, i: x[..., i],
        lambda x, i: x[:, None, i, 1:],
        lambda x, i: x[..., i, None, :],
        lambda x, i: x[:, i, i],
    ],
)
def test_a_computed_position_without_axes_selects_on_every_route(take: Any, tmp_path: Any) -> None:
    model = QuantWrapper(Body(lambda x: take(x, x.flatten().argmax() % 4))).eval()
    others = [(torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)),) for seed in range(5)]
    assert_one_arithmetic(prepared(model, (X,)), (X,), tmp_path, others)


class _Drops(nn.Module):
    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.drop = QuantStub(), DeQuantStub(), drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.quant(self.drop(x, self.training)), self.training)
        return self.drop(self.dequant(x), self.training)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x, training: F.dropout(x, 0.5, training),
        lambda x, training: F.dropout2d(x, training=training),
        lambda x, training: F.alpha_dropout(x, 0.5, training),
        lambda x, training: torch.dropout(x, 0.5, train=training),
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_dropout_follows_train_and_eval_of_a_model_prepared_in_train_mode(drop: Any, is_fused: bool) -> None:
    model = _Drops(drop).train()
    qat = prepare_qat_fx(fuse_fx(model) if is_fused else model, {"": INT8})
    set_fake_quantize(qat, FakeQuantState.QAT)
    assert not torch.equal(qat(X), qat(X))
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        out = qat(X)
        assert torch.equal(out, qat(X)) and torch.equal(out, convert_fx(qat)(X))
    assert (out - X).abs().mean() < 0.2


@pytest.mark.parametrize("padding", [(-1, 2), (2, -1), (-2, -1), (1, 2)])
def test_circular_padding_crops_where_it_is_negative(padding: tuple[int, int]) -> None:
    quantized = convert_fx(prepared(QuantWrapper(Body(lambda x: F.pad(x, padding, "circular"))), (X[0],)))
    assert (quantized(X[0]) - F.pad(X[0], padding, "circular")).abs().max() < 0.03


@pytest.mark.parametrize("move", [lambda m, i: m.gather(-1, i), lambda m, i: m[..., i[0, 0, 0]]])
def test_booleans_moved_by_computed_positions_stay_booleans(move: Any) -> None:
    model = QuantWrapper(Body(lambda x: move(x > 0, x.argsort(-1)).float()))
    out = convert_fx(prepared(model, (X,)))(X)
    assert type(out) is Tensor and set(out.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("choose", [lambda x: torch.where(x > 0, x, 2000.0), lambda x: x.masked_fill(x <= 0, 2000.0)])
def test_a_large_number_beside_large_values_is_itself(choose: Any) -> None:
    x = torch.linspace(-1500, 1500, 201)
    qat = prepared(QuantWrapper(Body(choose)), (x,))
    with torch.no_grad():
        exact, converted = qat(x), convert_fx(qat)(x)
        set_fake_quantize(qat, FakeQuantState.QAT)
        trained = qat(x)
    for out in (exact, converted, trained):
        assert (out - choose(x)).abs().max() < 16  # one step of the result


def test_a_number_far_beyond_the_values_is_infinity_and_said_to_be() -> None:
    with pytest.warns(QuantizationWarning, match=r"Where.*: 2000 is 100 times or more beyond .* \(up to 1\)"):
        out = prepared(QuantWrapper(Body(lambda x: torch.where(x > 0, x, 2000.0))), (X.clamp(-1, 1),))(X)
    assert 16 < out.max() < 18  # the end of the range


@pytest.mark.parametrize(
    "function", [torch.sigmoid, lambda x: x.softmax(-1), lambda x: x.topk(2).values, lambda x: x.max(-1).values + 1.0]
)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_nan_enters_the_quantized_part_as_zero_on_every_route(function: Any, dtype: str, tmp_path: Any) -> None:
    qat = prepared(QuantWrapper(Body(function)), (X,), dtype)
    broken, zero = X.clone(), X.clone()
    broken[0, 1, 2, 3], zero[0, 1, 2, 3] = torch.nan, 0.0
    with torch.no_grad():
        quantized = convert_fx(qat)
        expected = quantized(zero)
        assert torch.equal(quantized(broken), expected) and torch.equal(qat(broken), expected)
    assert torch.equal(_onnx(quantized, broken, tmp_path / "model.onnx"), expected)


class _Loop(nn.Module):
    """A cell in a loop over time, from zeros or from a state that the model gets."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.quant, self.state, self.cell, self.dequant = QuantStub(), QuantStub(), cell, DeQuantStub()
        self.is_given = False

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        x, given = self.quant(x), self.state(start)
        state = (given, given) if isinstance(self.cell, nn.LSTMCell) else given
        state = state if self.is_given else None
        for time in range(8):
            state = self.cell(x[:, time], state)
        return self.dequant(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("prepare", [prepare_qat_fx, prepare_qat])
def test_the_calls_of_a_cell_in_one_forward_are_one_batch(is_given: bool, prepare: Any) -> None:
    torch.manual_seed(1)
    cell = nn.RNNCell(4, 5, nonlinearity="relu")  # its state grows from call to call
    with torch.no_grad():
        cell.weight_hh.copy_(1.2 * torch.eye(5))
        cell.bias_ih.fill_(1.0)
    model = _Loop(cell).eval()
    model.is_given = is_given
    batches = [(torch.randn(4, 8, 4), torch.rand(4, 5)) for _ in range(20)]
    model.qconfig = get_default_qconfig()
    qat = prepare(model).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        largest = []
        for batch in batches:
            qat(*batch)
            largest.append(model(*batch).abs().max())
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        out, expected = qat(*batches[0]), model(*batches[0])
    average = largest[0]
    for value in largest[1:]:  # of whole batches, not of calls, and not the largest of all
        average = average + 0.01 * (value - average)
    scale = qat.get_submodule("cell.step.activation").activation_post_process.scale  # type: ignore[union-attr]
    assert scale.item() == pytest.approx(average.item() / 127.5, rel=0.01)
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    "function",
    [lambda x: F.pad(x, (1, 1), value=100.0), lambda x: x.clamp(min=50.0), lambda x: F.hardtanh(x, -60.0, -50.0)],
)
def test_a_constant_beyond_an_inherited_range_is_said_once(function: Any) -> None:
    quantized = convert_fx(prepared(QuantWrapper(Body(function)), (X,)))
    with pytest.warns(QuantizationWarning, match="lies beyond the range of its input, whose scale is") as found:
        for _ in range(3):
            quantized(X)
    assert len(found) == 1


@pytest.mark.parametrize(
    "function", [lambda x: x.clamp(-50.0, 60.0), lambda x: F.pad(x, (1, 1), value=-math.inf), lambda x: F.relu6(x)]
)
@pytest.mark.filterwarnings("error::horizon_plugin_pytorch.errors.QuantizationWarning")
def test_limits_that_change_nothing_are_not_warned_of(function: Any) -> None:
    convert_fx(prepared(QuantWrapper(Body(function)), (X,)))(X)


@pytest.mark.parametrize("divisor", [0, 0.0, False])
def test_division_by_zero_is_refused_with_its_place(divisor: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"truediv.*test_review_findings.py.*divided by 0"):
        prepare_qat_fx(QuantWrapper(Body(lambda x: x / divisor)), {"": INT8})


def test_padding_with_nan_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="NaN: no integer stands for it"):
        prepared(QuantWrapper(Body(lambda x: F.pad(x, (1, 1), value=math.nan))), (X,))(X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / True,
        lambda x: x + True,
        lambda x: (x > 0).type_as(x),
        lambda x: (x > 0).to(x),
        lambda x: x.max(),
        lambda x: x.max().max(0).values,
        lambda x: x.max().max(0).indices,
        lambda x: x.max().argmin(0),
        lambda x: x.max().amax(-1),
        lambda x: x.max().mean(-1),
        lambda x: x.max().sum(0),
        lambda x: x.argmax(1) / 3,
        lambda x: x.argmax(1) / (x.argmin(1) + 1),
        lambda x: torch.div(-x.argmax(1), 2, rounding_mode="trunc"),
        lambda x: torch.div(-x.argmax(1), 2, rounding_mode="floor"),
    ],
)
def test_numbers_and_tensors_without_axes_on_every_route(function: Any, tmp_path: Any) -> None:
    qat = prepared(QuantWrapper(Body(function)), (X,))
    quantized = assert_one_arithmetic(qat, (X,), tmp_path, [(-2 * X,)])
    on_grid = quantized.get_submodule("quant")(X).dequantize()
    assert (quantized(X) - function(on_grid)).abs().max() < 0.03


@pytest.mark.parametrize("function", [lambda x: x.amax(1) * x.argmax(1), lambda x: x + torch.arange(6)])
def test_integers_without_a_scale_are_called_integers(function: Any) -> None:
    with pytest.raises(ConversionError, match=r"got an integer tensor of shape .*quant\(x\.float\(\)\)"):
        prepared(QuantWrapper(Body(function)), (X,))(X)


def test_a_window_of_the_whole_image_has_a_remedy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = QuantStub()

        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x)
            return F.avg_pool2d(y, y.shape[2:])

    with pytest.raises(Exception, match=r"adaptive_avg_pool2d\(x, 1\)"):
        prepare_qat_fx(Net(), {"": get_default_qconfig()})


def test_batch_norm_without_statistics_has_a_remedy() -> None:
    with pytest.raises(Exception, match="track_running_stats=True, or use InstanceNorm"):
        prepare_qat_fx(QuantWrapper(nn.BatchNorm2d(4, track_running_stats=False)), {"": get_default_qconfig()})


def test_a_scatter_of_no_pillars_is_not_exported(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.scatter = QuantStub(), hnn.PointPillarsScatter((1, 3, 4, 4))

        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            return self.scatter(self.quant(x), coords)

    set_march(March.BAYES)
    quantized = convert_fx(prepared(Net(), (torch.randn(2, 3), torch.tensor([[0, 0, 1, 1], [0, 0, 2, 3]]))))
    with pytest.raises(ExportError, match="no pillars"):
        export_quantized_onnx(quantized, (torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int64)), tmp_path / "m.onnx")
