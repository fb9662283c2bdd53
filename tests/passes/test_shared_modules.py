"""A module that is called several times, or is registered under several names, has one scale for all its results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import errors
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QConfig,
    QuantStub,
    calibrate,
    convert_fx,
    load_calib_state_dict,
    prepare,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.fake_cast import default_fp16_fake_cast
from horizon_plugin_pytorch.quantization.qconfig_template import (
    default_calibration_qconfig_setter,
    default_qat_qconfig_setter,
)
from tests.routes import qconfig
from tests.workflow.test_one_answer import Net, assert_one_answer


class _Twice(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.quant, self.dequant, self.functional = QuantStub(), DeQuantStub(), FloatFunctional()
        self.silu, self.relu, self.pool, self.sigmoid = nn.SiLU(), nn.ReLU(), nn.MaxPool2d(1), nn.Sigmoid()
        self.alias = self.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (lambda m, x: m.silu(m.silu(x) * 8.0), "silu"),
        (lambda m, x: m.alias(m.silu(x) * 8.0), "silu"),
        (lambda m, x: m.functional.mul(m.functional.add(x, x), x), "functional"),
        (lambda m, x: m.quant(m.dequant(x)) + x, "quant"),
    ],
)
def test_a_shared_scale_is_worth_a_warning(function: Any, path: str) -> None:
    with pytest.warns(QuantizationWarning, match=rf"`{path}` \(2 calls, test_shared_modules.py:\d+.*of its own"):
        prepare_qat_fx(_Twice(function), {"": qconfig()})


@pytest.mark.parametrize(
    "function", [lambda m, x: m.relu(m.relu(x) * 8.0), lambda m, x: m.pool(m.pool(x)), lambda m, x: m.silu(x)]
)
def test_modules_without_a_scale_of_their_own_can_be_shared(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat_fx(_Twice(function), {"": qconfig()})


def test_float16_has_no_scale_to_share() -> None:
    set_march(March.NASH_P)
    model = _Twice(lambda m, x: m.silu(m.silu(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat_fx(
            model, {"": qconfig(), "module_name": [("silu", QConfig(activation=default_fp16_fake_cast, weight=None))]}
        )


def _layer() -> nn.Module:
    return nn.Linear(8, 8)


def _bn() -> nn.Module:
    bn = nn.BatchNorm1d(8)
    bn.running_mean.uniform_(-0.5, 0.5)
    bn.running_var.uniform_(0.5, 2)
    return bn


def _activation(act: nn.Module, *after: nn.Module) -> dict[str, nn.Module]:
    return {"act": act, "layers": nn.Sequential(_layer(), act, *after, _layer())}


def _one_relu() -> dict[str, nn.Module]:
    act = nn.ReLU(inplace=True)
    deep = nn.Sequential(_layer(), act, _layer(), _bn(), act, _layer())
    return {"act": act, "deep": deep, "flat": nn.Sequential(_layer(), _bn(), act)}


def _two_names() -> dict[str, nn.Module]:
    layer, bn = _layer(), _bn()
    return {"layer": layer, "bn": bn, "layers": nn.Sequential(layer, bn, nn.ReLU())}


def _in_lists() -> dict[str, nn.Module]:
    act, layer = nn.ReLU(inplace=True), _layer()
    layers = nn.ModuleList([_layer(), act, nn.Dropout(0.1), layer, act, layer])
    return {"layers": layers, "named": nn.ModuleDict({"act": act, "layer": layer})}


class _Block(nn.Module):
    def __init__(self, act: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.act, self.layer, self.bn = act, layer, _bn()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.layer(x))) + x


def _blocks() -> dict[str, nn.Module]:
    act, layer = nn.ReLU(), _layer()
    return {"blocks": nn.ModuleList([_Block(act, layer), _Block(act, _layer()), _Block(act, layer)])}


def _whole_block() -> dict[str, nn.Module]:
    block = nn.Sequential(_layer(), _bn(), nn.ReLU())
    return {"block": block, "named": nn.ModuleDict({"block": block}), "layers": nn.ModuleList([block, _layer()])}


def _loop(act: nn.Module) -> dict[str, nn.Module]:
    return {"act": act, "layers": nn.ModuleList(nn.Sequential(_layer(), act, nn.Dropout(0.2)) for _ in range(3))}


def _tied() -> dict[str, nn.Module]:
    first, second = _layer(), _layer()
    second.weight = first.weight
    return {"first": first, "second": second, "bn": _bn()}


def _stubs() -> dict[str, nn.Module]:
    stub = QuantStub()
    return {"stub": stub, "alias": stub, "layer": _layer()}


def _sum(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    return m.relu(m.bn(y)) + y


def _all(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


def _between_stubs(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    return m.alias(m.dequant(y) * 2.0) + m.stub(m.dequant(y))


_PAIR = lambda: {"layer": _layer(), "other": _layer(), "bn": _bn(), "bn2": _bn(), "relu": nn.ReLU()}  # noqa: E731
_SHARED: dict[str, tuple[Any, Any]] = {
    "activation": (lambda m, x: m.layers(x), lambda: _activation(nn.ReLU(inplace=True))),
    "activation before no dropout": (lambda m, x: m.layers(x), lambda: _activation(nn.ReLU(True), nn.Dropout(0.0))),
    "activation before dropout": (lambda m, x: m.layers(x), lambda: _activation(nn.ReLU(), nn.Dropout(0.1))),
    "activation of several layers": (lambda m, x: m.act(m.flat(m.deep(x)) + x), _one_relu),
    "activation, fused and not": (lambda m, x: m.act(m.deep(x) * 2.0) + m.flat(x), _one_relu),
    "activation with a scale": (lambda m, x: m.act(_all(m, x)), lambda: _loop(nn.SiLU(inplace=True))),
    "limited activation": (lambda m, x: m.act(_all(m, x) * 3.0), lambda: _loop(nn.ReLU6())),
    "result read twice": (_sum, _PAIR),
    "result returned too": (lambda m, x: [m.relu(m.layer(x)), m.layer(x)], _PAIR),
    "batch norm of two layers": (lambda m, x: m.bn(m.layer(x)) + m.bn(m.other(x)), _PAIR),
    "layer before two batch norms": (lambda m, x: m.bn(m.layer(x)) + m.bn2(m.layer(x)), _PAIR),
    "fused, called twice": (lambda m, x: m.relu(m.bn(m.layer(m.relu(m.bn(m.layer(x)))))), _PAIR),
    "two names, called by one": (lambda m, x: m.layers(x), _two_names),
    "two names, called by the other": (lambda m, x: m.bn(m.layer(x)), _two_names),
    "two names, called by both": (lambda m, x: m.layers(x) + m.bn(m.layer(x)), _two_names),
    "a member elsewhere": (lambda m, x: m.layers(x) + m.layer(x), _two_names),
    "in lists and dicts": (lambda m, x: m.named["act"](m.named["layer"](_all(m, x))), _in_lists),
    "between blocks": (lambda m, x: m.blocks[2](m.blocks[1](m.blocks[0](x))), _blocks),
    "whole block": (lambda m, x: _all(m, x) + m.block(x), _whole_block),
    "whole block, called once": (lambda m, x: m.named["block"](x), _whole_block),
    "weight": (lambda m, x: m.bn(m.first(x)) + m.second(x), _tied),
    "stub": (_between_stubs, _stubs),
    "functional": (
        lambda m, x: m.f.add(m.other(m.f.add(m.layer(x), x)), x),
        lambda: {"f": FloatFunctional(), "layer": _layer(), "other": _layer()},
    ),
    "functional of two operators": (
        lambda m, x: m.relu(m.f.mul(m.relu(m.f.add(m.layer(x), x)), x)),
        lambda: {"f": FloatFunctional(), "layer": _layer(), "relu": nn.ReLU(inplace=True)},
    ),
}


@pytest.mark.in_turns("own_scales", "name")
@pytest.mark.parametrize("own_scales", [False, True])
@pytest.mark.parametrize("name", _SHARED)
def test_what_is_shared_is_exact_and_near_float_by_every_method(name: str, own_scales: bool) -> None:
    body, parts = _SHARED[name]
    torch.manual_seed(0)
    assert_one_answer(Net(body, **parts()).eval(), own_scales=own_scales)


class _CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.layer, self.dequant = QuantStub(), nn.Linear(4, 4), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layer(self.layer(self.quant(x))))


@pytest.mark.parametrize(("action", "count"), [("default", 1), ("always", 2)])
def test_a_model_that_is_prepared_for_calibration_and_for_training_is_told_once(
    action: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_march(March.NASH_M)
    monkeypatch.setattr(errors, "_TOLD", set())
    x = torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        calib = prepare(
            _CalledTwice(), (x,), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC, out_dir=None
        )
        calibrate(calib, [x])
        qat = prepare(_CalledTwice(), (x,), default_qat_qconfig_setter, method=PrepareMethod.SYMBOLIC, out_dir=None)
        load_calib_state_dict(qat, calib.state_dict())
        convert_fx(qat)
    for text in ("one scale must fit", "not in high precision"):
        assert sum(text in str(w.message) for w in caught) == count
