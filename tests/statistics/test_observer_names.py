"""An observer is added in one place: the steps of "To add an observer" in docs/architecture.md, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.quantization import (
    QuantWrapper,
    auto_calibrate,
    calibrate,
    get_default_qconfig,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver, SketchObserver
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.statistics.observer_names import OBSERVERS, named, range_methods
from horizon_plugin_pytorch.statistics.sketch import Sketch

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def share() -> Iterator[type[SketchObserver]]:
    @named("share")
    class ShareObserver(SketchObserver):
        """A share of the largest magnitude."""

        _is_for_weights = True
        _settings = (*ObserverBase._settings, "share")
        _method_settings = ("share",)

        def __init__(self, share: float = 0.5, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.share = share

        def choose(self, sketch: Sketch) -> float:
            return sketch.largest * self.share

        def choose_by_channel(self, rows: Tensor) -> Tensor:
            return rows.abs().amax(1) * self.share

    yield ShareObserver
    del OBSERVERS["share"]


def net(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 1)).eval(), {"": get_default_qconfig(**kwargs)})


def test_a_new_observer_has_its_name_in_qconfigs(share) -> None:
    data = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    model = net(activation_observer="share", weight_observer="share", activation_qkwargs={"share": 0.25})
    scales = calibrate(model, data).scales
    wanted = sum(float(batch.abs().max()) for batch in data) / 2 * 0.25 / 127.5
    assert float(scales["quant"]) == pytest.approx(wanted, rel=2e-3)
    weight = model.module.weight.flatten(1).abs().amax(1) * 0.5 / 127.5
    torch.testing.assert_close(scales["module.weight_fake_quant"], weight.detach())


def test_a_new_observer_is_a_method_of_the_histogram(share) -> None:
    x = torch.randn(1000)
    ob = HistogramObserver(method="share", method_kwargs={"share": 0.125})
    ob(x)
    assert float(ob.max_val) == pytest.approx(float(x.abs().max()) / 8)
    rows = x.view(4, -1)
    by_channel = HistogramObserver(method="share", qscheme=torch.per_channel_symmetric, ch_axis=0)
    by_channel(rows)
    torch.testing.assert_close(by_channel.max_val, rows.abs().amax(1) / 2)
    with pytest.raises(QuantizationConfigError, match="method 'share' has no parameter 'bins'"):
        HistogramObserver(method="share", method_kwargs={"bins": 3})
    model = net(activation_observer="histogram")
    calibrate(model, [torch.tensor([0.5, 1.0, 0.0]).view(1, 3, 1, 1)])
    HistogramObserver.reset_scale(model, "share", {"share": 0.75}, prefix="quant")
    assert float(model.quant.activation_post_process.scale) == pytest.approx(0.75 / 127.5)
    assert not any("_finder" in path for path, _ in model.named_modules())


def test_a_new_observer_is_a_candidate_of_auto_calibrate(share) -> None:
    data = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    result = auto_calibrate(net(), data, observer_list=["share", "mse"])
    plain = net(activation_observer="share")
    calibrate(plain, data, patience=0)
    assert {"share", "mse", "share of all data"} < set(result.errors)
    assert result.kept != "share" and result.errors["share"] > 2 * result.errors["mse"]


def test_an_observer_without_choose_has_a_name_all_the_same() -> None:
    @named("twice")
    class TwiceObserver(ObserverBase):
        def _update(self, smallest: Tensor, largest: Tensor) -> None:
            super()._update(2 * smallest, 2 * largest)

    try:
        quantizer = get_default_qconfig(activation_observer="twice").activation()
        quantizer(torch.tensor([-1.0, 1.0]))
        assert float(quantizer.scale) == pytest.approx(2 / 127.5)
        assert "twice" not in range_methods()
        with pytest.raises(QuantizationConfigError, match="weight_observer='twice' is not available"):
            get_default_qconfig(weight_observer="twice")
        with pytest.raises(QuantizationConfigError, match="observer_list.*got twice"):
            auto_calibrate(net(), [torch.ones(1, 3, 2, 2)], observer_list=["twice"])
    finally:
        del OBSERVERS["twice"]


def test_a_name_is_given_once() -> None:
    before = OBSERVERS["mse"]
    with pytest.raises(QuantizationConfigError, match="MSEObserver has the name 'mse'"):

        @named("mse")
        class OtherObserver(ObserverBase):
            pass

    assert named("mse")(before) is before is OBSERVERS["mse"]  # a cell that runs again


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (get_default_qconfig.__doc__, OBSERVERS),
        (auto_calibrate.__doc__, range_methods()),
        (HistogramObserver.__doc__, range_methods()),
    ],
    ids=["get_default_qconfig", "auto_calibrate", "HistogramObserver"],
)
def test_docstrings_have_all_names(text: str, names: dict[str, type]) -> None:
    assert [name for name in names if f'"{name}"' not in text] == []


def test_the_guide_has_all_names() -> None:
    section = (DOCS / "calibration-and-qat.md").read_text().partition("\n## Observers\n")[2].partition("\n## ")[0]
    missing = [name for name, cls in OBSERVERS.items() if f"`{name}`" not in section or cls.__name__ not in section]
    assert missing == []


def test_an_observer_that_only_averages_otherwise_is_no_method() -> None:
    @named("twice")
    class Twice(OBSERVERS["mse"]):  # type: ignore[misc]
        def _update(self, smallest: Tensor, largest: Tensor) -> None:
            super()._update(2 * smallest, 2 * largest)

    try:
        assert "twice" not in range_methods() and "mse" in range_methods()
        calibrate(net(activation_observer="twice"), [torch.randn(1, 3, 4, 4)])
    finally:
        del OBSERVERS["twice"]
