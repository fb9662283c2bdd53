"""Equalisation keeps the function; batch norms take new statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    convert,
    equalize,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    reestimate_bn,
    set_fake_quantize,
)
from tests.models import shake_norms

QCONFIG = {"": get_default_qconfig()}


def spread_channels(model: nn.Module) -> nn.Module:
    """Channels whose sizes differ by a factor of hundreds, as those of trained depthwise networks do."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                factors = torch.logspace(-1.2, 1.2, module.num_features)
                module.weight.mul_(factors)
                module.bias.mul_(factors)
    return model


class Chain(nn.Module):
    """Depthwise, grouped and transposed layers, poolings, functions, a flatten and two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=3)
        self.last = nn.Conv2d(6, 16, 1)
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.depthwise(self.stem(x))))
        x = nn.functional.leaky_relu(self.grouped(x), 0.1)
        x = nn.functional.max_pool2d(self.up(x).relu(), 2)
        return self.fc2(self.fc1(self.pool(self.last(x).relu()).flatten(1)).relu())


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(4, 3, 8, 8, generator=generator) for _ in range(count)]


def chain() -> nn.Module:
    torch.manual_seed(0)
    return spread_channels(shake_norms(Chain())).eval()


def test_the_function_stays_and_channels_become_alike() -> None:
    net = chain()
    with torch.no_grad():
        before = net(data()[0])
        result = equalize(net, data())
        torch.testing.assert_close(net(data()[0]), before, rtol=1e-4, atol=1e-4)
    assert [(p.first, p.second) for p in result.pairs] == [
        ("stem.0", "depthwise"), ("depthwise", "grouped"), ("grouped", "up"), ("up", "last"), ("last", "fc1"),
        ("fc1", "fc2"),
    ]  # fmt: skip
    assert result.pairs[0].before > 5 and result.pairs[0].after == pytest.approx(1, rel=1e-3)  # before a depthwise
    assert "largest / median" in str(result)


def test_quantization_hurts_less_afterwards() -> None:
    def error(net: nn.Module) -> float:
        model = prepare(QuantWrapper(net), (data()[0],), qconfig_dict=QCONFIG, out_dir=None)
        calibrate(model, data())
        with torch.no_grad():
            return float((model(data()[0]) - net(data()[0])).norm() / net(data()[0]).norm())

    net = chain()
    before = error(net)
    equalize(net, data())
    assert error(net) < 0.75 * before


class Branches(nn.Module):
    """Nothing here may be equalised: two readers, a sum, ReLU6, a shared layer, tied weights, a wrong axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv1d(4, 4, 1) for _ in range(4))
        self.tied = nn.Conv1d(4, 4, 1)
        self.tied.weight = self.d.weight
        self.along = nn.Linear(4, 4)  # the positions, of which there are as many as channels
        self.relu6 = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        x = self.b(y) + y
        x = self.c(self.relu6(self.c(x)))
        x = self.tied(self.d(x).relu())
        return self.along(self.b(x).relu())


def test_what_others_read_too_is_left_alone() -> None:
    net = Branches().eval()
    x = torch.randn(2, 4, 4)
    state = {name: t.clone() for name, t in net.state_dict().items()}
    assert equalize(net, [x]).pairs == []
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


def test_a_channel_without_values_and_a_prepared_model() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 0, -1
        net[2].weight[:, 2] = 0
        before = net(data()[0])
        equalize(net, data())
        assert all(bool(p.isfinite().all()) for p in net.parameters())
        torch.testing.assert_close(net(data()[0]), before)
    with pytest.raises(QuantizationConfigError, match="prepared already"):
        equalize(prepare_qat_fx(QuantWrapper(net), QCONFIG), data())


def test_statistics_of_a_float_model_become_those_of_the_data() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    net[1].running_mean += 5
    assert reestimate_bn(net, [(x, "label") for x in data()], lambda batch: batch[0]) == ["1"]
    assert net.training and net[2].training and net[1].momentum == 0.1
    with torch.no_grad():
        raw = net[0](torch.cat(data())).transpose(0, 1).flatten(1)
    torch.testing.assert_close(net[1].running_mean, raw.mean(1))
    torch.testing.assert_close(net[1].running_var, raw.var(1), rtol=0.05, atol=1e-3)


def test_statistics_of_a_prepared_model_undo_the_shift_of_rounding() -> None:
    """Few levels for the weights: the mean of every channel moves, and the new statistics follow."""
    torch.manual_seed(0)
    net = QuantWrapper(chain().stem).eval()
    reestimate_bn(net, data())
    few = get_default_qconfig(weight_qkwargs={"quant_min": -4, "quant_max": 3})
    set_qat_mode(QATMode.WithBN)
    try:
        model = prepare_qat_fx(net, {"": few})
        calibrate(model, data())
        with torch.no_grad():
            wanted = net(torch.cat(data()))
            before = float((model(torch.cat(data())) - wanted).norm())
            scales = {n: b.clone() for n, b in model.named_buffers() if n.endswith(("scale", "enabled", "_val"))}
            assert reestimate_bn(model, data()) == ["module.0.bn"]
            after = float((model(torch.cat(data())) - wanted).norm())
            assert torch.equal(model(data()[0]), convert(model)(data()[0]))
    finally:
        set_qat_mode(QATMode.FuseBN)
    assert after < 0.8 * before
    assert all(torch.equal(b, scales[n]) for n, b in model.named_buffers() if n in scales)
    assert not model.training and model.quant.activation_post_process.is_exact


def test_folded_batch_norms_have_no_statistics_left() -> None:
    model = prepare_qat_fx(QuantWrapper(chain().stem), QCONFIG)
    calibrate(model, data())
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    with pytest.raises(QuantizationConfigError, match="folds them away unless `set_qat_mode"):
        reestimate_bn(model, data())
