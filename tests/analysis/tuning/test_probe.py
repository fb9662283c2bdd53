"""Sensitivities of all sites at once, and mixtures of formats without preparing anew."""

from __future__ import annotations

import math

import pytest
import torch

from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, run
from horizon_plugin_pytorch.analysis.tuning.probe import _limited, measure, probe
from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, WEIGHT, MixedModel
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import calibrate, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from tests.models import ResNet, shake_norms


def setter(rules):
    return QconfigSetter(get_qconfig(), [ModuleNameTemplate(rules)], save_dir=None)


def calibrated(net, data, rules):
    set_march(March.NASH_M)
    model = prepare(net, (data[0],), setter(rules), out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    return model


@pytest.fixture(scope="module")
def bench():
    torch.manual_seed(0)
    net = shake_norms(ResNet()).eval()
    data = [torch.randn(4, 3, 32, 32) for _ in range(3)]
    narrow = calibrated(net, data, {"": {"weight": qint8, "output": qint8}})
    wide = calibrated(net, data, {"": {"weight": qint16, "output": qint16}})
    mixed = MixedModel(narrow, wide)
    with mixed.in_float() as model:
        wanted = Wanted.of(run(model, data))
    return net, data, mixed, wanted


def test_a_mixture_gives_the_integers_of_the_model_that_is_prepared_with_it(bench):
    net, data, mixed, _ = bench
    raised = [site for site in mixed.sites if site.operator in ("layer1.conv1", "quant", "fc")][:3]
    assert {site.kind for site in raised} == {ACTIVATION, WEIGHT}
    rules = {}
    for site in raised:
        rules.setdefault(site.operator, {})["output" if site.kind == ACTIVATION else "weight"] = qint16
    alone = calibrated(net, data, rules)
    for found, wanted in zip(run(mixed.raise_to(raised), data), run(alone, data), strict=True):
        assert torch.equal(found[0], wanted[0])
    narrow = run(mixed.raise_to(()), data)
    assert not torch.equal(narrow[0][0], run(alone, data)[0][0])


def test_the_probe_finds_what_rounding_each_site_alone_does(bench):
    _, data, mixed, wanted = bench
    mixed.raise_to(())
    exact = {site: float(measure(mixed, site, data, wanted).square().sum()) for site in mixed.sites}
    found = probe(mixed, data, wanted, draws=8)
    assert set(found) == set(exact)
    assert sum(estimate.error for estimate in found.values()) == pytest.approx(sum(exact.values()), rel=0.5)
    top = sorted(exact, key=exact.__getitem__, reverse=True)[:5]
    mine = sorted(found, key=lambda site: found[site].error, reverse=True)[:5]
    assert sum(exact[site] for site in mine) > 0.9 * sum(exact[site] for site in top)
    assert found == probe(mixed, data, wanted, draws=8)  # chance is seeded
    assert all(parameter.requires_grad for parameter in mixed.model.parameters())


def test_the_probe_knows_what_int16_leaves(bench):
    _, data, mixed, wanted = bench
    mixed.raise_to(())
    before = probe(mixed, data, wanted, draws=1)
    mixed.raise_to(mixed.sites)
    after = probe(mixed, data, wanted, draws=1)
    for site, estimate in before.items():
        if site.kind == ACTIVATION:
            assert after[site].error == pytest.approx(estimate.wide, rel=1e-3)
    assert min(estimate.wide / estimate.error for estimate in before.values()) < 1e-4  # where nothing is clipped


def test_outputs_that_cannot_be_compared_are_refused():
    wanted = Wanted.of([[torch.ones(2, 3)]])
    with pytest.raises(QuantizationConfigError, match="other shapes"):
        wanted.difference([[torch.ones(2, 4)]])
    with pytest.raises(QuantizationConfigError, match="no real tensor"):
        Wanted.of([[]])
    with pytest.raises(QuantizationConfigError, match="NaN"):
        Wanted.of([[torch.tensor([float("nan")])]])


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.0, 6.0), (-1.0, 1.0), (-math.inf, 2.0), (-1.0, math.inf)])
def test_limits_as_clamp_gives_them(limits):
    x = torch.tensor([-math.inf, -7.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 6.0, 9.0, math.inf])
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = _limited(found, limits), wanted.clamp(*limits)
    assert torch.equal(one, other)
    one.sum().backward()
    other.sum().backward()
    inside = (x != limits[0]) & (x != limits[1])  # at an end either is a gradient
    assert torch.equal(found.grad[inside], wanted.grad[inside])
