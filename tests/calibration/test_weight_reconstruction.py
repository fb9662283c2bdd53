"""AdaRound and bias correction: the layers of a calibrated model, one after another."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    convert,
    correct_bias,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
    weight_reconstruction,
)
from horizon_plugin_pytorch.quantization.qconfig import default_qat_out_8bit_fake_quant_qconfig
from tests.models import shake_norms


class Net(nn.Module):
    """Every kind of layer, one of them twice, and a sum that is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        x = (self.body(x) + x).relu()
        return self.head(self.up(x).permute(0, 2, 3, 1))


def data(count: int = 4) -> list[Tensor]:
    """Smooth images: neighbours are alike, so that errors of weights add up."""
    generator = torch.Generator().manual_seed(1)
    small = [torch.rand(4, 3, 4, 4, generator=generator) for _ in range(count)]
    return [nn.functional.interpolate(x, size=(8, 8), mode="bilinear") for x in small]


def calibrated(by_running: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = QuantWrapper(shake_norms(Net())).eval()
    # Few levels, so that it matters how weights are rounded; the output is not rounded.
    few = get_default_qconfig(weight_qkwargs={"quant_min": -8, "quant_max": 7})
    out = default_qat_out_8bit_fake_quant_qconfig._replace(weight=few.weight)
    qconfig = {"": few, "module_name": [("module.head", out)]}
    model = (
        prepare(net, (data()[0],), qconfig_dict=qconfig, out_dir=None) if by_running else prepare_qat_fx(net, qconfig)
    )
    calibrate(model, data())
    return model


@pytest.fixture
def with_bn():
    set_qat_mode(QATMode.WithBN)
    yield
    set_qat_mode(QATMode.FuseBN)


def reference(model: nn.Module) -> list[Tensor]:
    float_model = copy.deepcopy(model)
    set_fake_quantize(float_model, FakeQuantState._FLOAT)
    with torch.no_grad():
        return [float_model(x) for x in data()]


def distance(model: nn.Module, wanted: list[Tensor]) -> float:
    with torch.no_grad():
        found = torch.cat([model(x) for x in data()])
    return float((found - torch.cat(wanted)).norm() / torch.cat(wanted).norm())


@pytest.mark.slow
@pytest.mark.parametrize("by_running", [True, False])
def test_rounding_is_learned_layer_by_layer_and_the_model_gets_better(by_running) -> None:
    model = calibrated(by_running)
    wanted = reference(model)
    before = distance(model, wanted)
    result = weight_reconstruction(model, data(), custom_config_dict={"num_steps": 300})
    assert [row.layer.rpartition(".")[2] for row in result.layers if "add" not in row.layer] == ["stem", "up", "head"]
    assert len(result.layers) == 4  # and body, which is where the sum is
    assert all(row.after <= row.before for row in result.layers)
    assert distance(model, wanted) < 0.85 * before
    assert "module.stem" in str(result) and "changed" in str(result)
    with torch.no_grad():
        assert torch.equal(model(data()[0]), convert(model)(data()[0]))


@pytest.mark.slow
def test_weights_are_on_the_grid_next_to_where_they_were_and_scales_stay() -> None:
    model = calibrated()
    layer = model.module.stem
    weight, scale = layer.weight.clone(), layer.weight_fake_quant.scale.clone()
    weight_reconstruction(model, data())
    assert torch.equal(layer.weight_fake_quant.scale, scale)
    steps = scale.reshape(-1, 1, 1, 1)
    integers = layer.weight.detach() / steps
    torch.testing.assert_close(integers, integers.round(), rtol=0, atol=1e-4)
    inside = (weight.detach() / steps).clamp(-8, 7)
    assert float((integers - inside).abs().max()) < 1.001
    assert float((integers - inside).abs().max()) > 0.5  # some are not rounded to the nearest


@pytest.mark.slow
def test_a_layer_that_keeps_its_batch_norm(with_bn) -> None:
    model = calibrated()
    wanted = reference(model)
    before = distance(model, wanted)
    result = weight_reconstruction(model, data())
    assert distance(model, wanted) < before
    assert result.layers[0].after < result.layers[0].before
    correct_bias(model, data())
    with torch.no_grad():
        assert torch.equal(model(data()[0]), convert(model)(data()[0]))


def test_the_documented_settings() -> None:
    model = calibrated()
    before = {name: p.clone() for name, p in model.named_parameters()}
    images = torch.cat(data(8))
    loader = DataLoader(TensorDataset(images, torch.arange(len(images))), batch_size=4)
    seen = []

    def process(batch):
        seen.append(len(batch[0]))
        return batch[0]

    settings = {
        "num_batches": 2, "num_steps": 20, "exclude_prefix": ["module.stem", "module.head"], "warm_up": 0.5,
        "weight": 0.1, "b_range": [10, 2],
    }  # fmt: skip
    result = weight_reconstruction(model, loader, process, settings)
    assert seen == [4, 4]
    assert len(result.layers) == 2
    assert torch.equal(model.module.head.weight, before["module.head.weight"])
    assert not torch.equal(model.module.up.weight, before["module.up.weight"])


@pytest.mark.slow
def test_every_setting_of_learning_has_an_effect() -> None:
    model = calibrated()

    def learned(**settings) -> Tensor:
        changed = copy.deepcopy(model)
        weight_reconstruction(changed, data(1), custom_config_dict={"num_steps": 20, **settings})
        return torch.cat([p.detach().flatten() for p in changed.parameters()])

    usual = learned()
    for settings in ({"warm_up": 0.8}, {"weight": 0.1}, {"b_range": [2, 2]}, {"b_range": [20, 20]}):
        assert not torch.equal(learned(**settings), usual), settings
    # Unclear choices that count nothing, and ones that are never looked at, are the same.
    assert torch.equal(learned(weight=0.0), learned(warm_up=1.0))
    # The exponent begins with the first number: one step does not come to the second.
    first_step = {"num_steps": 1, "warm_up": 0.0, "weight": 1.0}
    assert torch.equal(learned(**first_step, b_range=[20, 2]), learned(**first_step, b_range=[20, 20]))


def test_bad_arguments_of_reconstruction() -> None:
    model = calibrated()
    with pytest.raises(QuantizationConfigError, match="no 'steps'; it has num_batches, num_steps"):
        weight_reconstruction(model, data(), custom_config_dict={"steps": 3})
    with pytest.raises(QuantizationConfigError, match="no layer with integer weights"):
        weight_reconstruction(model, data(), custom_config_dict={"exclude_prefix": ["module"]})
    fresh = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)).eval(), {"": get_default_qconfig()})
    with pytest.raises(CalibrationError, match="`module` has no scale; calibrate"):
        weight_reconstruction(fresh, data())


@pytest.mark.slow
@pytest.mark.parametrize("by_running", [True, False])
def test_bias_correction_gives_every_layer_its_mean_back(by_running) -> None:
    model = calibrated(by_running)
    wanted = reference(model)
    before = distance(model, wanted)
    shift = abs(float((torch.cat([model(x) for x in data()]) - torch.cat(wanted)).mean()))
    result = correct_bias(model, data())
    assert all(row.after <= row.before for row in result.layers)
    assert any(row.after < 0.9 * row.before for row in result.layers)
    assert distance(model, wanted) < 0.9 * before
    assert abs(float((torch.cat([model(x) for x in data()]) - torch.cat(wanted)).mean())) < 0.3 * shift
    with torch.no_grad():
        assert torch.equal(model(data()[0]), convert(model)(data()[0]))


def test_a_layer_without_bias_gets_one() -> None:
    net = QuantWrapper(nn.Conv2d(3, 4, 3, bias=False)).eval()
    model = prepare_qat_fx(net, {"": get_default_qconfig(weight_qkwargs={"quant_min": -8, "quant_max": 7})})
    calibrate(model, data())
    before = reference(model)
    correct_bias(model, data())
    assert model.module.bias is not None and float(model.module.bias.abs().max()) > 0
    assert len(list(model.parameters())) == 2
    assert distance(model, before) < 0.2


def test_a_layer_keeps_its_bias_where_that_is_better() -> None:
    """The last sample is held back, and the error of the others is none of its own."""
    net = QuantWrapper(nn.Sequential(nn.Linear(2, 1), nn.ReLU())).eval()
    with torch.no_grad():
        net.module[0].weight.copy_(torch.tensor([[1.0, 0.55]]))
        net.module[0].bias.zero_()
    model = prepare_qat_fx(net, {"": get_default_qconfig(weight_qkwargs={"quant_min": -2, "quant_max": 1})})
    batches = [torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])]
    calibrate(model, batches)
    row = correct_bias(model, batches).layers[0]
    assert row.after == row.before > 0.05
    assert not model.module[0].bias.any()


def test_a_layer_without_error_gets_no_bias() -> None:
    net = QuantWrapper(nn.Linear(3, 4, bias=False)).eval()
    nn.init.zeros_(net.module.weight)
    model = prepare_qat_fx(net, {"": get_default_qconfig()})
    calibrate(model, [torch.randn(8, 3)])
    assert correct_bias(model, [torch.randn(8, 3)]).layers[0].after == 0
    assert model.module.bias is None
