"""Equalisation keeps the function; batch norms take new statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError
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
from tests.operators.cases.base import Body

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


@pytest.mark.slow
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
    prepared = prepare_qat_fx(QuantWrapper(net), QCONFIG)
    calibrate(prepared, data())
    for model in (prepared, convert(prepared)):
        with pytest.raises(QuantizationConfigError, match="prepared already or converted.*give the float model"):
            equalize(model, data())


class Reads(nn.Module):
    """Two layers, and another way to read the weights of the first or what is between."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.c = how, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if how == "one memory":
            self.c.weight.data = self.a.weight.data

    def forward(self, x: Tensor) -> Tensor:
        between = self.a(x).relu()
        y = self.c(self.b(between).tanh())
        if self.how == "function":
            y = nn.functional.linear(y, self.a.weight.t())
        if self.how == "branch" and x.mean() > 0:
            y = y + between
        return y + max(between.tolist()[0]) if self.how == "numbers" else y


@pytest.mark.parametrize("how", ["function", "one memory", "branch", "numbers"])
@pytest.mark.filterwarnings("ignore:equalize")
def test_weights_and_tensors_that_are_read_in_other_ways_too(how) -> None:
    torch.manual_seed(0)
    net = spread_rows(Reads(how)).eval()
    x = torch.rand(4, 8)
    with torch.no_grad():
        before = net(x)
        assert equalize(net, [-x, x]).pairs == []
        assert torch.equal(net(x), before)


def spread_rows(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
            with torch.no_grad():
                module.weight.mul_(
                    torch.logspace(-1, 1, len(module.weight)).reshape(-1, *[1] * (module.weight.dim() - 1))
                )
    return model


def test_a_pair_that_is_not_what_it_seems_is_named_and_left_while_others_are_equalised() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Reads("numbers"), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 2))
    net, x = spread_rows(net).eval(), torch.randn(4, 8)
    with torch.no_grad():
        before = net(x)
        with pytest.warns(CalibrationWarning, match=r"`0\.a` and `0\.b` stay as they are"):
            result = equalize(net, [x])
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)
    assert [(p.first, p.second) for p in result.pairs] == [("1", "3"), ("3", "5")]
    assert 0 < result.change < 1e-5 and "The outputs changed by" in str(result)


@pytest.mark.parametrize(
    ("between", "shape"),
    [
        ([nn.Linear(4, 8), nn.MaxPool1d(3, 1, 1), nn.Linear(8, 4)], (2, 5, 4)),
        ([nn.Linear(4, 8), nn.AvgPool1d(2), nn.Upsample(scale_factor=2), nn.Linear(8, 4)], (2, 5, 4)),
        ([nn.Linear(4, 8), nn.ZeroPad1d((1, -1)), nn.Linear(8, 4)], (2, 5, 4)),
        ([nn.Linear(4, 8), nn.Upsample(scale_factor=2), nn.Linear(16, 4)], (2, 5, 4)),
        ([nn.Linear(4, 8), nn.Conv1d(8, 4, 1)], (2, 8, 4)),
        ([nn.Conv2d(3, 8, 1), nn.Flatten(1, 2), nn.Linear(8, 4)], (2, 3, 5, 8)),
        ([nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(32, 4)], (2, 3, 2, 2)),
        ([nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)], (4, 8)),  # without a batch: along the positions
        ([nn.Conv1d(4, 8, 1), nn.MaxPool2d(3, 1, 1), nn.Conv1d(8, 4, 1)], (2, 4, 6)),  # takes the batch for channels
    ],
)
@pytest.mark.filterwarnings("error")
def test_calls_along_the_channels_end_a_chain(between, shape) -> None:
    assert equalize(spread_rows(nn.Sequential(*between)).eval(), [torch.randn(shape)]).pairs == []


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_batch_norm_without_weights_of_its_own_ends_a_chain(is_shared) -> None:
    norm = nn.BatchNorm2d(4, affine=is_shared)
    net = spread_rows(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1))).eval()
    if is_shared:
        net.append(norm)
    before = {name: p.clone() for name, p in net.named_parameters()}
    assert equalize(net, [torch.randn(2, 4, 3, 3)]).pairs == []
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize(
    ("between", "shape"),
    [
        ([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)], (6, 4)),
        ([nn.Linear(4, 8), nn.Flatten(0, 1), nn.Linear(8, 4)], (2, 5, 4)),
        ([nn.Linear(4, 8), Body(lambda x: x.flatten(end_dim=1)), nn.Linear(8, 4)], (2, 5, 4)),
        ([nn.Conv2d(3, 8, 1), Body(lambda x: x.flatten(start_dim=2)), nn.Conv1d(8, 4, 1)], (2, 3, 4, 4)),
        ([nn.Conv2d(3, 8, 1), Body(lambda x: x.flatten(-2, end_dim=-1)), nn.Conv1d(8, 4, 1)], (2, 3, 4, 4)),
        ([nn.Conv2d(3, 8, 1), nn.Flatten(2), nn.MaxPool1d(2), nn.Conv1d(8, 4, 1)], (2, 3, 4, 4)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_calls_along_other_axes_do_not(between, shape) -> None:
    net, x = spread_rows(nn.Sequential(*between)).eval(), torch.randn(shape)
    with torch.no_grad():
        before = net(x)
        assert len(equalize(net, [x]).pairs) == 1
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


class Keeps(nn.Module):
    """Calls a layer by keyword, keeps what is computed with a gradient, and counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept, self.runs = torch.zeros(1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.kept = self.b(input=self.a(x).relu())
        return self.kept + self.runs


def test_a_model_that_keeps_tensors_and_counts_is_not_run_itself() -> None:
    net = Keeps().eval()
    net(torch.rand(2, 8))
    kept = net.kept
    assert len(equalize(net, [torch.rand(2, 8)] * 2).pairs) == 1
    assert net.kept is kept and net.runs == 1


def test_data_that_are_not_finite_and_chance_change_nothing() -> None:
    net = spread_rows(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))).eval()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    for value in (float("inf"), float("nan")):
        with pytest.raises(CalibrationError, match="NaN or infinity reaches `2`"):
            equalize(net, [torch.rand(2, 4), torch.full((2, 4), value)])
    numbers = iter(range(100))
    net.register_forward_hook(lambda _m, _a, out: out + next(numbers))
    with pytest.raises(CalibrationError, match="other outputs when it runs on the same data again"):
        equalize(net, [torch.rand(2, 4)])
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


def test_outputs_that_hang_on_rounding_are_refused() -> None:
    class Chaotic(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 1e9).sin()

    torch.manual_seed(0)
    net = spread_rows(Chaotic(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))).eval()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(CalibrationError, match="rounding alone changes the model's outputs by"):
        equalize(net, [torch.rand(2, 4)])
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


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


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        return self.b(self.a(x)) if deep else self.a(x)


def test_a_batch_norm_that_no_batch_reaches_keeps_its_statistics() -> None:
    net = shake_norms(TwoNorms()).eval()
    before = {name: t.clone() for name, t in net.b.state_dict().items()}
    with pytest.warns(CalibrationWarning, match="no batch reached `b`"):
        assert reestimate_bn(net, [torch.randn(8, 4)]) == ["a"]
    assert all(torch.equal(t, before[name]) for name, t in net.b.state_dict().items())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.randn(1, 4), "batch 1: Expected more than 1 value"),
        (torch.randn(8, 3), "batch 1: running_mean should"),
        (torch.full((8, 4), float("nan")), "batch 1 .* `a` no finite statistics"),
    ],
)
def test_a_batch_that_fails_leaves_the_statistics_as_they_were(bad, message) -> None:
    net = shake_norms(TwoNorms()).train()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(CalibrationError, match=message):
        reestimate_bn(net, [torch.randn(8, 4), bad])
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert net.training and net.a.momentum == 0.1


def test_folded_batch_norms_have_no_statistics_left() -> None:
    model = prepare_qat_fx(QuantWrapper(chain().stem), QCONFIG)
    calibrate(model, data())
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    with pytest.raises(QuantizationConfigError, match="folds them away unless `set_qat_mode"):
        reestimate_bn(model, data())
