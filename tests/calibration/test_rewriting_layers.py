"""`weight_reconstruction` and `correct_bias` again, in any order, on odd models and odd data."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from horizon_plugin_pytorch.calibration.layers import LayerWalk
from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    OperatorInputError,
    QuantizationConfigError,
    QuantizationWarning,
)
from horizon_plugin_pytorch.nn.qat.original import original
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    calibrate,
    convert,
    correct_bias,
    get_default_qconfig,
    load_calib_state_dict,
    prepare,
    set_fake_quantize,
    weight_reconstruction,
)

METHODS = [weight_reconstruction, correct_bias]
both = pytest.mark.parametrize("method", METHODS)


def images(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(8, 3, 10, 10, generator=generator) for _ in range(count)]


def rows(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(32, 16, generator=generator) for _ in range(count)]


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 16, 3, bias=bias), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=bias), nn.ReLU())
    return QuantWrapper(nn.Sequential(*layers, nn.Conv2d(16, 4, 3, bias=bias))).eval()


def prepared(net: nn.Module, batch: Any, **settings: Any) -> nn.Module:
    """Few levels, so that rounding matters."""
    qconfig = get_default_qconfig(activation_observer="mse", weight_qkwargs={"quant_min": -8, "quant_max": 7})
    inputs = batch if isinstance(batch, tuple) else (batch,)
    return prepare(copy.deepcopy(net), inputs, qconfig_dict={"": qconfig}, out_dir=None, **settings)


def calibrated(net: nn.Module, data: list, **settings: Any) -> nn.Module:
    model = prepared(net, data[0], **settings)
    calibrate(model, data)
    return model


@torch.no_grad()
def error(model: nn.Module, net: nn.Module, data: list[Tensor]) -> float:
    """Against the float network that nobody has touched."""
    found, wanted = torch.cat([model(x) for x in data]), torch.cat([net(x) for x in data])
    return float((found - wanted).norm() / wanted.norm())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -- again, and in any order


@pytest.mark.in_turns("mode", "bias")
@pytest.mark.parametrize("mode", [QATMode.FuseBN, QATMode.WithBN])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.slow
def test_methods_in_either_order_add_up_against_the_untouched_network(bias, mode) -> None:
    net, data = network(bias), images()
    set_qat_mode(mode)
    try:
        net.module[0] = nn.Sequential(net.module[0], nn.BatchNorm2d(16, affine=bias)).eval()
        plain = calibrated(net, data)
    finally:
        set_qat_mode(QATMode.FuseBN)
    alone = {}
    for method in METHODS:
        method(model := copy.deepcopy(plain), data)
        alone[method] = error(model, net, data)
        assert alone[method] < 0.8 * error(plain, net, data)
    for first, second in (METHODS, METHODS[::-1]):
        first(model := copy.deepcopy(plain), data)
        second(model := copy.deepcopy(model), data)  # a copy remembers too
        assert error(model, net, data) < 1.001 * alone[first]
        if second is correct_bias:
            assert error(model, net, data) < 0.95 * min(alone.values())


@pytest.mark.slow
@both
def test_a_second_call_changes_nothing(method) -> None:
    net, data = network(), images()
    model = calibrated(net, data)
    first = method(model, data)
    after = state(model)
    second = method(model, data)
    torch.testing.assert_close(state(model), after)
    assert [row.after for row in second.layers] == pytest.approx([row.after for row in first.layers], rel=1e-5)


def test_the_original_is_forgotten_when_somebody_else_writes() -> None:
    net, data = network(), images()
    model = calibrated(net, data)
    correct_bias(model, data)
    layer, other = model.module[0], model.module[2]
    assert original(layer).keys() == {"bias"} and original(copy.deepcopy(layer)).keys() == {"bias"}
    model.load_state_dict(model.state_dict())  # the same
    assert torch.equal(original(layer)["bias"], net.module[0].bias)
    with torch.no_grad():
        layer.weight[0, 0] += 0.1  # as training does
    assert not original(layer) and original(other)
    model.load_state_dict(calibrated(net, data).state_dict())
    assert not original(other)


# -- biases that were added


@pytest.mark.parametrize("own_scales", [False, True])
def test_an_added_bias_is_loaded_where_there_is_none(own_scales) -> None:
    net, data = Twice(bias=False).eval(), rows()
    model = calibrated(net, data, own_scales=own_scales)
    correct_bias(model, data)
    assert any(key.endswith("bias") for key in model.state_dict())
    for load in (nn.Module.load_state_dict, load_calib_state_dict):
        qat = prepared(net, data[0], own_scales=own_scales)
        load(qat, model.state_dict())
        set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
        assert same(state(qat), state(model))
        assert torch.equal(torch.cat(qat(data[0])), torch.cat(model(data[0])))
        assert len(list(qat.parameters())) == len(list(model.parameters()))
    assert not load_calib_state_dict(prepared(net, data[0], own_scales=own_scales), model.state_dict())


def test_a_bias_of_another_network_is_still_an_error() -> None:
    model = prepared(network(bias=False), images()[0])
    warned = pytest.warns(QuantizationWarning, match="does not fit")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.0\.bias"), warned:
        model.load_state_dict(network(bias=True).state_dict())


def test_an_added_bias_is_frozen_with_its_layer() -> None:
    net = network(bias=False).requires_grad_(False)
    model = calibrated(net, images())
    correct_bias(model, images())
    assert model.module[0].bias is not None and not model.module[0].bias.requires_grad


# -- layers that share


class Twice(nn.Module):
    """One layer called twice, on inputs of other sizes."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.head = QuantStub(), DeQuantStub(), nn.Linear(16, 16, bias)
        self.other = nn.Linear(16, 16, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.quant(x)
        return self.dequant(self.head(x)), self.dequant(self.head(self.other(x)))


class Tied(nn.Module):
    """Two layers with one weight, and perhaps one bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.small = QuantStub(), DeQuantStub(), QuantStub()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight
        if bias:
            self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.dequant(self.a(self.quant(x)).relu()), self.dequant(self.b(self.small(x * 0.1 - 3)))])


@pytest.mark.slow
@both
@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_share_a_tensor_are_one(method, bias) -> None:
    net, data = Tied(bias).eval(), rows()
    model = calibrated(net, data)
    before = error(model, net, data)
    result = method(model, data)
    is_one = bias or method is weight_reconstruction
    assert [row.layer for row in result.layers] == (["a, b"] if is_one else ["a", "b"])
    assert model.a.weight is model.b.weight
    assert error(model, net, data) <= before
    after = state(model)
    method(model, data)
    torch.testing.assert_close(state(model), after)


@pytest.mark.slow
@both
@pytest.mark.parametrize("bias", [True, False])
def test_calls_with_own_scales_are_one_layer(method, bias) -> None:
    net, data = Twice(bias).eval(), rows()
    model = calibrated(net, data, own_scales=True)
    result = method(model, data)
    assert "head, head_call_1" in [row.layer for row in result.layers]
    assert model.head.bias is model.head_call_1.bias
    with torch.no_grad():
        assert all(map(torch.equal, model(data[0]), convert(model)(data[0])))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False)
        self.head.weight = self.table.weight
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.body(self.table(x))))


@pytest.mark.slow
def test_a_weight_that_is_a_table_too_stays() -> None:
    data = [torch.arange(10)]
    model = calibrated(Embedded().eval(), data)
    before = model.table.weight.clone()
    result = weight_reconstruction(model, data)
    assert result.left_out == {"head": "its weight is also that of `table`"}
    assert torch.equal(model.table.weight, before)
    excluded = weight_reconstruction(
        calibrated(Tied(False).eval(), rows()), rows(), custom_config_dict={"exclude_prefix": ["a"]}
    )
    assert not excluded.layers and excluded.left_out == {"b": "its weight is also that of `a`"}


# -- layers that are left out


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.c = QuantStub(), DeQuantStub(), nn.Conv2d(8, 4, 1)
        self.w, self.g = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.rand(8, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.c(F.conv2d(self.quant(x), self.w * self.g)))


@pytest.mark.slow
@both
def test_a_layer_whose_weight_the_model_computes_is_left_out(method) -> None:
    net, data = Standardised().eval(), images()
    model = calibrated(net, data)
    before = error(model, net, data)
    result = method(model, data)
    assert [row.layer for row in result.layers] == ["c"]
    assert "left out: _generated_conv2d_0: the model computes its weight" in str(result)
    assert error(model, net, data) < before


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.a(self.quant(x)).relu()
        for _ in range(times):
            x = self.b(x).relu()
        return self.dequant(self.c(x))


@pytest.mark.slow
@both
def test_a_layer_that_only_some_batches_reach(method) -> None:
    data = [(x, times) for x, times in zip(rows(), (0, 2, 1, 2), strict=True)]
    model = calibrated(Flow().eval(), data[::-1])
    result = method(model, data)
    assert [row.layer for row in result.layers] == ["a", "b", "c"]
    assert result.layers[1].after < result.layers[1].before
    result = method(model, data[:1])
    assert [row.layer for row in result.layers] == ["a", "c"]
    assert result.left_out == {"b": "no batch reaches it"}


class Orders(nn.Module):
    """Batches call two layers in either order, and a third one twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, is_turned: bool) -> Tensor:
        first, second = (self.b, self.a) if is_turned else (self.a, self.b)
        x = torch.tanh(second(first(self.quant(x))))
        return self.dequant(self.d(self.c(self.c(x))))


@torch.no_grad()
def test_a_layer_sees_all_that_was_changed_before_it() -> None:
    data = [(x, bool(number % 2)) for number, x in enumerate(rows(3))]
    model = calibrated(Orders().eval(), data)
    met, before = [], threading.active_count()
    for group, calls in LayerWalk(model, data, "test", "weight"):
        wanted: list[Tensor] = []
        [layer] = group.layers
        hook = layer.register_forward_pre_hook(lambda _, args, kept=wanted: kept.append(args[0].as_real().clone()))
        for batch in data:
            model(*batch)
        hook.remove()
        assert [call.batch for call in calls] == ([0, 0, 1, 1, 2, 2] if group.path == "c" else [0, 1, 2])
        assert all(torch.equal(call.x, x) for call, x in zip(calls, wanted, strict=True))
        group.rewrite(lambda layer: layer.set_weight(-layer.deployed()[0]))
        met.append(group.path)
    assert met == ["a", "b", "c", "d"]
    assert threading.active_count() == before


def test_a_deep_network_runs_no_more_often_than_a_flat_one() -> None:
    def runs(depth: int) -> int:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU())]
        model = calibrated(QuantWrapper(nn.Sequential(*layers)).eval(), data)
        calls: list[int] = []
        model.module[0].register_forward_pre_hook(lambda *_: calls.append(1))  # the float copy has it, too
        correct_bias(model, data)
        return len(calls)

    data = rows(2)
    assert runs(9) == runs(3)


class Attending(nn.Module):
    """Query, key and value are parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.attention = nn.MultiheadAttention(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)[:, None]
        return self.dequant(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.slow
def test_parts_of_one_parameter_are_layers_of_their_own() -> None:
    net, data = Attending().eval(), rows()
    model = calibrated(net, data)
    before = error(model, net, data)
    paths = [f"attention.{part}_proj" for part in ("q", "k", "v", "out")]
    assert [row.layer for row in weight_reconstruction(model, data).layers] == paths
    assert [row.layer for row in correct_bias(model, data).layers] == paths
    assert error(model, net, data) < before
    after = state(model)
    assert "attention.in_proj_bias" in after
    weight_reconstruction(model, data)
    correct_bias(model, data)
    torch.testing.assert_close(state(model), after, atol=1e-3, rtol=0)
    load_calib_state_dict(other := prepared(net, data[0]).eval(), after)
    set_fake_quantize(other, FakeQuantState.VALIDATION)
    assert torch.equal(other(data[0]), model(data[0]))


# -- data


@pytest.mark.slow
@both
@pytest.mark.parametrize("make", [lambda x: x[:0], lambda x: torch.full_like(x, math.nan)], ids=["empty", "NaN"])
def test_a_batch_that_says_nothing_does_no_harm(method, make: Callable[[Tensor], Tensor], recwarn) -> None:
    net, data = network(), images()
    model, clean = calibrated(net, data), calibrated(net, data)
    result = method(model, [make(data[0]), *data])
    is_warned = any(issubclass(w.category, CalibrationWarning) and "batches 0" in str(w.message) for w in recwarn)
    assert is_warned == (len(make(data[0])) > 0)
    assert all(math.isfinite(row.before) and row.after <= row.before for row in result.layers)
    method(clean, data)
    assert same(state(model), state(clean))
    nothing = method(model, [make(data[0])])
    assert not nothing.layers and len(nothing.left_out) == 3
    assert same(state(model), state(clean))


@both
def test_a_batch_that_cannot_run_leaves_the_model_as_it_was(method) -> None:
    model = calibrated(network(), images())
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    before = state(model)

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    count = hooks()
    with pytest.raises(OperatorInputError, match="cannot run on inputs"):
        method(model, [images()[0], torch.rand(2, 5, 4, 4)])
    assert hooks() == count and all(m.training for m in model.modules())
    assert same(state(model), before)


@pytest.mark.slow
@both
def test_inference_mode(method) -> None:
    data = images()
    model, other = (calibrated(network(bias=False), data) for _ in range(2))
    with torch.inference_mode():
        method(model, [x.clone() for x in data])
    method(other, data)
    assert same(state(model), state(other))
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    model(data[0]).sum().backward()
    with torch.inference_mode():
        made_inside = calibrated(network(), data)
        with pytest.raises(QuantizationConfigError, match="made under torch.inference_mode"):
            method(made_inside, data)


# -- settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_batches", 0), ("num_batches", 2.5), ("num_batches", None), ("num_steps", 0), ("num_steps", 1.5),
        ("num_steps", "100"), ("num_steps", True), ("num_steps", None), ("warm_up", None), ("warm_up", 1.5),
        ("warm_up", math.nan), ("weight", "x"), ("weight", math.nan), ("weight", math.inf), ("weight", -1),
        ("b_range", None), ("b_range", "ab"), ("b_range", [-5, -5]), ("b_range", [20]), ("b_range", [20, math.nan]),
        ("exclude_prefix", None), ("exclude_prefix", "module"), ("exclude_prefix", [1]),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_named(key, value) -> None:
    with pytest.raises(QuantizationConfigError) as caught:
        weight_reconstruction(nn.ReLU(), [], custom_config_dict={key: value})
    assert f"custom_config_dict['{key}'] must be " in str(caught.value) and f"got {value!r}" in str(caught.value)


def test_a_prefix_of_nothing_is_an_error() -> None:
    model = calibrated(network(), images())
    with pytest.raises(QuantizationConfigError, match="exclude_prefix has 'modul.0', and no module's path begins so"):
        weight_reconstruction(model, images(), custom_config_dict={"exclude_prefix": ["module.0", "modul.0"]})
