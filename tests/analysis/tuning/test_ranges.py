"""Ranges by what they do to the outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.tuning import ranges
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, run
from horizon_plugin_pytorch.analysis.tuning.ranges import _alone, _estimated, _searched
from horizon_plugin_pytorch.analysis.tuning.sites import RoundingModel
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy
from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, convert, get_qconfig, prepare, search_scales
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter


def planted(**rules: object) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A large channel that nobody reads, before a ReLU; calibrated by the largest values."""
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net = QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid())).eval()
    with torch.no_grad():
        net.module[0].bias[0], net.module[2].weight[:, 0] = 300.0, 0.0
    data = [torch.randn(16, 8), torch.randn(16, 8)]
    model = prepare(
        net, (data[0],), QconfigSetter(get_qconfig(), [ModuleNameTemplate(rules)], save_dir=None), out_dir=None
    )
    calibrate(model, data, progress=False)
    return net, model, data


def test_a_range_without_what_nobody_reads():
    _, model, data = planted()
    scales = {path: q.scale.clone() for path, q in _searched(model, ()).items()}
    result = search_scales(model, data)
    [found] = [r for r in result.ranges if r.path == "module.0"]
    assert found.before > 290 and found.after < 10 and found.error_after < 0.01 * found.error_before
    assert result.after < 0.2 * result.before and "module.0" in str(result)
    changed = {r.path for r in result.ranges}
    assert all(torch.equal(q.scale, scales[p]) for p, q in _searched(model, ()).items() if p not in changed)
    assert torch.equal(convert(copy.deepcopy(model))(data[0]), model(data[0]))
    quantizer = model.module[0].activation_post_process
    assert float(quantizer.calculate_qparams()[0]) == pytest.approx(float(quantizer.scale))  # training goes on from it


def test_ranges_that_are_worse_together_are_put_back_to_the_bit(monkeypatch: pytest.MonkeyPatch):
    _, model, data = planted()
    search_scales(model, data)
    kept = copy.deepcopy(model.state_dict())

    def worse(model: nn.Module, *_: object) -> ranges.ScaleSearchResult:
        for quantizer in _searched(model, ()).values():
            ranges._scale_by(quantizer, 0.37)
        return ranges.ScaleSearchResult([ranges.SearchedRange("module.0", 1.0, 0.37, 1.0, 0.5)])

    monkeypatch.setattr(ranges, "find_scales", worse)
    with pytest.warns(CalibrationWarning, match="not together"):
        result = search_scales(model, data)
    assert result.ranges == [] and result.after == result.before
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_the_estimate_is_the_measured_error_where_the_rest_is_linear():
    _, model, data = planted()
    quantizers = _searched(model, ())
    with RoundingModel(model, {}).in_float():
        wanted = Wanted.of(run(model, data))
        estimated = _estimated(model, quantizers, data, wanted)["module.2"]  # the sigmoid is all that follows
        for number, factor in ((2, 1.0), (10, 0.25)):
            exact = _alone(model, quantizers["module.2"], factor, data, wanted)
            assert float(estimated[number]) == pytest.approx(exact, rel=0.6)


@pytest.mark.parametrize("level", [1, 2])
def test_powers_of_two_stay_powers_of_two(level, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ConsistencyStrategy, "_level", level)
    _, model, data = planted()
    # Factors between powers of two would be better by far.
    estimated = ranges._estimated

    def promising(*args: object) -> dict[str, torch.Tensor]:
        found = estimated(*args)
        for errors in found.values():
            errors[ranges._PRESENT + 1 :: 4] = 0.0
        return found

    monkeypatch.setattr(ranges, "_estimated", promising)
    result = search_scales(model, data)
    assert "module.0" in {r.path for r in result.ranges} and result.after < result.before
    for quantizer in _searched(model, ()).values():
        assert quantizer.activation_post_process.pow_quantization
        assert float(quantizer.scale.log2().frac()) == 0


def test_where_a_promise_does_not_hold_nearer_factors_are_tried():
    for step, expected in ((1, [2, 25, 13]), (4, [2, 26, 14])):  # half the way back, in steps that may be taken
        promised, asked = torch.ones(27), list[int]()
        promised[expected[1]] = 1e-9

        def measured(number: int, asked: list[int] = asked) -> float:
            asked.append(number)
            return float(number)

        ranges._tried(promised, measured, step)
        assert asked == expected


def test_int16_and_given_ranges_stay():
    _, model, data = planted(**{"module.0": {"output": qint16}, "quant": {"threshold": 100.0}})
    found = search_scales(model, data, samples=16)
    assert not {"module.0", "quant"} & {r.path for r in found.ranges}
    assert float(model.quant.activation_post_process.scale) == pytest.approx(100 / 128)


def test_what_is_not_a_prepared_model_is_refused():
    with pytest.raises(QuantizationConfigError, match="search_scales"):
        search_scales(nn.Linear(2, 2), [torch.zeros(1, 2)])
    _, model, data = planted()
    with pytest.raises(QuantizationConfigError, match="samples"):
        search_scales(model, data, samples=0)


def test_under_inference_mode_the_same_ranges_are_found():
    _, model, data = planted()
    other = copy.deepcopy(model)
    found = search_scales(model, data)
    with torch.inference_mode():
        assert search_scales(other, [x.clone() for x in data]).ranges == found.ranges and found.ranges
        made_inside = copy.deepcopy(model)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    with pytest.raises(QuantizationConfigError, match="made under torch.inference_mode"):
        search_scales(made_inside, data)


def test_outputs_without_a_gradient_are_told():
    class Detached(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).detach()

    net, _, data = planted()
    model = prepare(Detached(net).eval(), (data[0],), QconfigSetter(get_qconfig(), [], save_dir=None), out_dir=None)
    calibrate(model, data, progress=False)
    with pytest.warns(CalibrationWarning, match="no range can be judged"):
        assert search_scales(model, data).ranges == []
