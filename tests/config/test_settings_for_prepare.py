"""Settings that are made before a model is prepared: consistency levels, and copies of shared layers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy, tricks
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    default_qat_8bit_lsq_quant_qconfig,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
)

X = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.relu = QuantStub(), DeQuantStub(), nn.ReLU()
        self.conv, self.bn, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.head, self.fixed = nn.Conv2d(3, 4, 1), QuantStub(scale=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.bn(self.conv(x * 0.25))
        return self.dequant(self.head(x) + self.fixed(torch.ones(1, 4, 5, 5)))


class TwoNorms(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(self.quant(x)))
        return self.dequant(self.other(self.conv(x)))


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    set_march(March.NASH_E)
    yield
    ConsistencyStrategy.set_consistency_level(None)
    tricks.fx_force_duplicate_shared_convbn = False


def float_net(cls: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    net = cls()
    for _ in range(3):
        net(torch.randn(4, 3, 5, 5))  # so that batch norms differ from nothing
    return net.eval()


def is_power_of_two(scale: Tensor) -> bool:
    return all(math.log2(value).is_integer() for value in scale.tolist())


@pytest.mark.parametrize("method", [PrepareMethod.JIT_STRIP, PrepareMethod.SYMBOLIC], ids=str)
@pytest.mark.parametrize("level", [0, 1, 2])
@torch.no_grad()
def test_levels_make_scales_powers_of_two(level: int, method: PrepareMethod) -> None:
    net = float_net()
    plain = prepare(net, (X,), method=method, qconfig_dict={"": get_default_qconfig()}, out_dir=None)
    calibrate(plain, [X], progress=False)
    ConsistencyStrategy.set_consistency_level(level)
    model = prepare(net, (X,), method=method, qconfig_dict={"": get_default_qconfig()}, out_dir=None)
    calibrate(model, [X], progress=False)
    for (path, quantizer), (_, other) in zip(model.named_modules(), plain.named_modules(), strict=True):
        if not isinstance(quantizer, FakeQuantize):
            continue
        is_weight = path.endswith("weight_fake_quant")
        if not quantizer.is_fixed and level >= (2 if is_weight else 1):
            assert is_power_of_two(quantizer.scale), path
            ratio = quantizer.scale / other.scale  # nothing is clipped that was not before
            assert bool((ratio >= 1).all()) if is_weight or path.startswith("quant") else True
        else:
            assert not is_power_of_two(quantizer.scale), path
    assert torch.equal(convert(model)(X), model(X))
    assert float((model(X) - net(X)).norm() / net(X).norm()) < 0.05


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_check_shows_the_level(level: int, tmp_path: Path) -> None:
    ConsistencyStrategy.set_consistency_level(level)
    net = float_net()
    prepare(net, (X,), qconfig_dict={"": get_default_qconfig()}, out_dir=str(tmp_path))
    text = (tmp_path / "model_check_result.txt").read_text()
    found = [line for line in text.splitlines() if line.startswith("Consistency level")]
    if not level:
        assert not found
        return
    assert found[0].startswith(f"Consistency level {level}: the scales of ")
    assert f"and {2 * (level - 1)} of 2 weights" in found[0]
    assert "Fixed to other numbers: fixed (0.1)" in found[0]


def test_levels_and_what_they_refuse() -> None:
    for wrong in (3, 4, -1, "1", True):
        with pytest.raises(ValueError, match="0, 1 or 2"):
            ConsistencyStrategy.set_consistency_level(wrong)  # type: ignore[arg-type]
    assert ConsistencyStrategy.get_consistency_level() == 0
    ConsistencyStrategy.set_consistency_level(1)
    with pytest.raises(QuantizationConfigError, match="trains its scale"):
        prepare_qat_fx(float_net(), {"": default_qat_8bit_lsq_quant_qconfig})
    set_march(March.BAYES)
    with pytest.warns(UserWarning, match="nash-e and nash-m"):
        prepare_qat_fx(float_net(), {"": get_default_qconfig()})


def _shared(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if type(module).__name__.startswith("Conv")]


@torch.no_grad()
def test_shared_layers_with_their_norm_are_copied_where_it_is_asked_for() -> None:
    net = float_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = prepare_qat_fx(net, {"": get_default_qconfig()})
    tricks.fx_force_duplicate_shared_convbn = True
    model = prepare_qat_fx(net, {"": get_default_qconfig()})
    assert not isinstance(before.conv, qat.ConvReLU2d) and isinstance(before.bn, qat.BatchNorm2d)
    assert isinstance(model.conv, qat.ConvReLU2d) and isinstance(model.conv_call_1, qat.Conv2d)
    assert model.conv.weight is model.conv_call_1.weight
    calibrate(model, [X], progress=False)
    assert float(model.conv.activation_post_process.scale) != float(model.conv_call_1.activation_post_process.scale)
    assert float((model(X) - net(X)).norm() / net(X).norm()) < 0.05
    assert torch.equal(convert(model)(X), model(X))


def test_one_layer_with_two_norms_keeps_its_weights() -> None:
    tricks.fx_force_duplicate_shared_convbn = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare_qat_fx(float_net(TwoNorms), {"": get_default_qconfig()})
    assert not hasattr(model, "conv_call_1") and isinstance(model.other, qat.BatchNorm2d)


@pytest.mark.parametrize(("name", "value", "error"), [
    ("fx_force_duplicate_shared_convbn", 1, TypeError), ("fx_force_duplicate_shared_convb", True, AttributeError),
])  # fmt: skip
def test_switches_that_are_none(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tricks"):
        setattr(tricks, name, value)
