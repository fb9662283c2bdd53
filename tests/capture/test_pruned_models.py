"""Layers that are pruned before they are prepared: the zeros come along, and are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    PrepareMethod,
    QuantWrapper,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter

PRUNINGS: dict[str, Callable[[nn.Module], Any]] = {
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 3),
    "structured": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "custom": lambda layer: prune.custom_from_mask(layer, "weight", torch.rand_like(layer.weight) > 0.5),  # type: ignore[arg-type]
    "bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "global": lambda layer: prune.global_unstructured(
        [(layer, "weight"), (layer, "bias")], prune.L1Unstructured, amount=0.5
    ),
    "twice": lambda layer: prune.l1_unstructured(prune.l1_unstructured(layer, "weight", 0.3), "weight", 0.3),
}


def _model(pruning: str, run: bool = False) -> tuple[nn.Module, torch.Tensor]:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net, x = (
        QuantWrapper(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())),
        torch.randn(2, 3, 4, 4),
    )
    PRUNINGS[pruning](net.module[0])
    if run:
        net(x).sum().backward()  # the weight is now computed by autograd
    return net.eval(), x


@pytest.mark.parametrize("method", ["jit-strip", "symbolic", "eager"])
@pytest.mark.parametrize("pruning", PRUNINGS)
def test_a_pruned_layer_is_prepared_and_told(pruning: str, method: str) -> None:
    net, x = _model(pruning, run=True)
    net.qconfig = get_default_qconfig()
    given = {} if method == "eager" else {"qconfig_dict": {"": get_default_qconfig()}}
    with pytest.warns(QuantizationWarning, match=r"`module.0.(weight|bias)`.*pruned.*register_hook"):
        model = prepare(net, (x,), method=method, out_dir=None, **given)
    calibrate(model, [x], progress=False)
    with torch.no_grad():
        wanted, found = net(x), model(x)
        assert (found - wanted).norm() < 0.05 * wanted.norm() and torch.equal(found, convert(model)(x))
    assert prune.is_pruned(net), "the caller's model stays as it is"
    assert not [key for key in model.state_dict() if "_mask" in key or "_orig" in key]


def test_a_pruning_that_was_removed_is_not_told() -> None:
    net, x = _model("l1")
    prune.remove(net.module[0], "weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepare(net, (x,), qconfig_dict={"": get_default_qconfig()}, out_dir=None)


def test_masked_gradients_keep_the_zeros_through_training() -> None:
    net, x = _model("l1")
    with pytest.warns(QuantizationWarning, match="pruned"):
        model = prepare(net, (x,), qconfig_dict={"": get_default_qconfig()}, out_dir=None)
    calibrate(model, [x], progress=False)
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    weight = model.module[0].weight
    kept = weight.detach() != 0
    weight.register_hook(lambda grad, kept=kept: grad * kept)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(weight.detach() != 0, kept)


_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.3),
    "weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP])
@pytest.mark.parametrize("name", _HOOKS)
def test_a_prepared_layer_whose_weight_a_hook_computes_is_converted(name: str, method: PrepareMethod) -> None:
    set_march(March.NASH_M)
    x = torch.randn(2, 3, 4, 4)
    net = QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval()
    qat = prepare(net, (x,), default_calibration_qconfig_setter, method=method, out_dir=None)
    calibrate(qat, [x], progress=False)
    for layer in [m for m in qat.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]:
        _HOOKS[name](layer)
    set_fake_quantize(qat.train(), FakeQuantState.QAT)
    optimizer = torch.optim.SGD(qat.parameters(), 0.5)
    qat(x).square().mean().backward()
    optimizer.step()  # the layer's `weight` is that of the last forward now
    quantized = convert(qat).eval()
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert torch.equal(qat(x), quantized(x))
