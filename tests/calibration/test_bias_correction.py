"""Bias correction keeps what helps on data that it has not seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.calibration.bias_correction import _shift, _split
from horizon_plugin_pytorch.calibration.layers import LayerCall, LayerWalk
from horizon_plugin_pytorch.errors import CalibrationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.original import original
from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, correct_bias, get_default_qconfig, prepare


@pytest.fixture(autouse=True)
def march() -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)


def calibrated(net: nn.Module, data: list[Tensor], levels: int = 16) -> Any:
    ends = {"quant_min": -levels // 2, "quant_max": levels // 2 - 1}
    qconfig = get_default_qconfig(activation_observer="mse", weight_qkwargs=ends)
    model = prepare(copy.deepcopy(net), (data[0],), qconfig_dict={"": qconfig}, out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    return model


@torch.no_grad()
def error(model: nn.Module, net: nn.Module, data: list[Tensor]) -> float:
    found, wanted = torch.cat([model(x) for x in data]), torch.cat([net(x) for x in data])
    return float((found - wanted).norm() / wanted.norm())


def call_of(x: Tensor, layer: Any, wanted: Tensor, batch: int = 0) -> LayerCall:
    return LayerCall(layer, x, layer.bias, None, wanted, batch)


@pytest.mark.parametrize(
    ("activation", "limits"), [(None, (-torch.inf, torch.inf)), (nn.ReLU(), (0, torch.inf)), (nn.ReLU6(), (0, 6))]
)
def test_the_mean_after_the_activation_is_that_of_float(activation: nn.Module | None, limits: tuple) -> None:
    """Most values lie below zero, and what is wrong there nobody reads."""
    layers = [nn.Conv2d(2, 8, 3)] + ([] if activation is None else [activation])
    data = [torch.rand(4, 2, 8, 8) for _ in range(4)]
    model = calibrated(QuantWrapper(nn.Sequential(*layers)).eval(), data)
    [(group, calls)] = LayerWalk(model, data, "test", "bias")
    layer = group.layers[0]
    wrong = [call_of(c.x, layer, torch.where(c.wanted < 0, 3 * c.wanted, c.wanted)) for c in calls]
    rounded = layer.weight_fake_quant.round_weight(*layer.deployed()[::2])
    shift = _shift([(c, c.output(rounded)) for c in wrong])
    found = torch.stack([c.output(rounded, shift).clamp(*limits).mean((0, 2, 3)) for c in wrong]).mean(0)
    wanted = torch.stack([c.wanted.clamp(*limits).mean((0, 2, 3)) for c in wrong]).mean(0)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.05, 0.01, 0.001])
@pytest.mark.parametrize("error", [-0.5, -1e-3, 1e-3, 0.5])
def test_a_shift_is_found_where_hardly_anything_passes(share: float, error: float) -> None:
    x = torch.linspace(-1, 0, 2000)[:, None] + share
    model = calibrated(QuantWrapper(nn.Sequential(nn.Linear(1, 1), nn.ReLU())).eval(), [x])
    call = call_of(x, model.module[0], x)
    shift = _shift([(call, x - error)])
    torch.testing.assert_close(shift, torch.tensor([error]), atol=1e-5, rtol=1e-4)


def test_batches_are_held_back() -> None:
    layer = nn.Linear(2, 2)
    calls = [call_of(torch.rand(3, 2), layer, torch.rand(3, 2), batch) for batch in range(9)]
    for count, held in ((2, [1]), (3, [2]), (4, [3]), (8, [3, 7]), (9, [3, 7])):
        seen, judged = _split(calls[:count])
        assert [c.batch for c in judged] == held
        assert sorted(c.batch for c in (*seen, *judged)) == list(range(count))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv2d(4, 3, 1)])
def test_of_a_single_batch_samples_are_held_back(make: Callable[[], nn.Module]) -> None:
    layer = make()  # of the seed that every test starts with
    x = torch.rand(8, 4) if isinstance(layer, nn.Linear) else torch.rand(8, 4, 5, 5)
    net = QuantWrapper(layer).eval()
    model = calibrated(net, [x])
    [(_, calls)] = LayerWalk(copy.deepcopy(model), [x], "test", "bias")
    seen, held = _split(calls)
    assert [len(c.x) for c in seen] == [6] and [len(c.x) for c in held] == [2]
    before = error(model, net, [x])
    result = correct_bias(model, [x])
    assert result.layers[0].after < result.layers[0].before
    assert error(model, net, [x]) < before


@pytest.mark.parametrize("x", [torch.rand(4, 6, 6), torch.rand(1, 4, 6, 6)])
def test_one_sample_cannot_be_judged(x: Tensor) -> None:
    model = calibrated(QuantWrapper(nn.Conv2d(4, 4, 1)).eval(), [x])
    before = model.module.bias.clone()
    result = correct_bias(model, [x])
    assert torch.equal(model.module.bias, before) and not result.layers
    assert "one sample reaches it" in result.left_out["module"] and "one sample" in str(result)


def test_a_linear_layer_of_one_row_has_a_shift_for_each_channel() -> None:
    data = [torch.rand(16) for _ in range(8)]
    net = QuantWrapper(nn.Linear(16, 4)).eval()
    model = calibrated(net, data)
    before = model.module.bias.clone()
    correct_bias(model, data)
    assert len(set((model.module.bias - before).tolist())) == 4


def test_a_shift_that_only_fits_the_data_it_was_found_on_is_not_kept() -> None:
    """The held-back batches are wrong the other way round."""

    class Sign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    x = torch.rand(64, 4)
    data = [x, x, x, -x]
    model = calibrated(QuantWrapper(Sign()).eval(), data)
    result = correct_bias(model, data)
    assert model.module.linear.bias is None
    assert result.layers[0].after == result.layers[0].before


def test_all_stay_where_the_outputs_come_no_closer() -> None:
    """A layer comes closer to float, and what is computed of it beyond the layers goes further away."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = QuantWrapper(nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            wanted = nn.functional.linear(x, self.net.module.weight, self.start)
            distance = (out - wanted).norm()
            return 1 + torch.where(distance < 1e-4, 0, 1 / distance)  # the closer, the larger; in float 1

    torch.manual_seed(0)
    net = Apart().eval()
    net.register_buffer("start", net.net.module.bias.detach().clone())
    data = [torch.rand(64, 8) for _ in range(4)]
    model = calibrated(net, data)
    before = model.net.module.bias.clone()
    with pytest.warns(CalibrationWarning, match="the outputs did not"):
        result = correct_bias(model, data)
    assert torch.equal(model.net.module.bias, before) and not original(model.net.module)
    assert result.before == result.after and all(row.before == row.after for row in result.layers)


@pytest.mark.slow
def test_deep_networks_with_relu6_come_closer_to_float() -> None:
    blocks = []
    for _ in range(6):
        blocks += [nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6(), nn.Conv2d(16, 16, 1)]
    net = QuantWrapper(nn.Sequential(nn.Conv2d(3, 16, 3), *blocks)).eval()
    with torch.no_grad():
        for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d) and m.groups > 1):
            conv.bias.sub_(0.3)  # most values are below zero
    data = [torch.rand(4, 3, 12, 12) for _ in range(8)]
    unseen = [torch.rand(4, 3, 12, 12) for _ in range(4)]
    model = calibrated(net, data)
    before = error(model, net, unseen)
    result = correct_bias(model, data)
    assert error(model, net, unseen) < 0.8 * before
    assert result.after < result.before and "the model's outputs" in str(result)
