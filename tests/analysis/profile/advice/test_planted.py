"""Each fault, planted in a healthy model, is named, and the line that is advised mends it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.calls import record_calls
from horizon_plugin_pytorch.analysis.profile.advice.rules import advise
from horizon_plugin_pytorch.analysis.profile.advice.texts import TEXTS
from horizon_plugin_pytorch.analysis.profile.document import Document, Operator, Values
from horizon_plugin_pytorch.analysis.rows import mistakes
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, convert, get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from tests.analysis.profile.advice.healthy import (
    ConvNet,
    Detector,
    Transformer,
    advice_for,
    batches_for,
    calibrated,
    error_of,
    in_state,
    make,
    prepared,
    tried,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def only(found: list[Any], rule: str, place: str) -> Any:
    """The one advice that there is."""
    assert [(advice.rule, advice.place) for advice in found] == [(rule, place)]
    return found[0]


# -- states


def test_left_in_calibration() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = in_state(calibrated(net, batches), FakeQuantState.CALIBRATION)
    found = only(advice_for(net, qat, batches), "left-in-calibration", "model")
    assert "10 of 10" in found.evidence and found.severity == "error"
    tried(found.configuration, model=qat)
    assert advice_for(net, qat, batches) == []
    in_state(qat.left, FakeQuantState.CALIBRATION)
    assert "`left.0`" in only(advice_for(net, qat, batches), "left-in-calibration", "left.0").evidence


def test_left_in_train_mode() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches)
    found = only(advice_for(net.train(), qat, batches), "left-in-train-mode", "stem.1")
    assert "BatchNorm2d" in found.evidence and "float model" in found.evidence
    assert advice_for(net.eval(), qat.train(), batches) == []  # its batch norms are folded: both modes are one


def test_never_calibrated() -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = in_state(prepared(net, batches).eval(), FakeQuantState.VALIDATION)
    found = only(advice_for(net, qat, batches), "never-calibrated", "model")
    assert found.configuration == "calibrate(model, batches)"
    part = calibrated(net, batches)
    part.right[0].activation_post_process = prepared(net, batches).right[0].activation_post_process
    in_state(part, FakeQuantState.VALIDATION)
    assert advice_for(net, part, batches)[0].place == "right.0"


# -- ranges


@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_input_exceeds_calibration(dtype: Any) -> None:
    """All that clips behind the input is the same trouble; calibration with such data mends it."""
    net = make(ConvNet)
    batches = batches_for(net, scale=0.4)
    larger = [5 * x for x in batches]
    qat = calibrated(net, batches, dtype=dtype)
    for model in (qat, convert(copy.deepcopy(qat))):
        found = only(advice_for(net, model, larger), "input-exceeds-calibration", "quant")
        assert found.operators[0] == 0 and len(found.operators) > 3 and "8.368" in found.evidence
        assert 0.3 < found.explains < 0.7
    tried(found.configuration, model=qat, batches=larger)
    assert advice_for(net, qat, larger) == []


@pytest.mark.parametrize(("dtype", "factor"), [(qint8, 1e-2), (qint16, 1e-4)], ids=["qint8", "qint16"])
def test_input_below_calibration(dtype: Any, factor: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches, dtype=dtype)
    only(advice_for(net, qat, [factor * x for x in batches]), "input-below-calibration", "quant")


@pytest.mark.parametrize(("factor", "rule"), [(1 / 8, "range-exceeds-calibration"), (64, "range-below-calibration")])
def test_range_inside(factor: float, rule: str) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    qat = calibrated(net, batches)
    quantizer = qat.left[0].activation_post_process
    quantizer.set_qparams(quantizer.scale * factor)
    found = only(advice_for(net, qat, batches), rule, "left.0")
    tried(found.configuration, model=qat, batches=batches)
    assert advice_for(net, qat, batches) == []


@pytest.mark.parametrize("scale", [1 / 128, 1.0])
def test_fixed_scale_of_an_input(scale: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    net.quant = QuantStub(scale=scale)
    rule = "fixed-scale-too-small" if scale < 1 else "fixed-scale-too-large"
    found = only(advice_for(net, calibrated(net, batches), batches), rule, "quant")
    net.quant = tried(found.configuration)
    assert advice_for(net, calibrated(net, batches), batches) == []


@pytest.mark.parametrize("threshold", [0.3, 100.0])
def test_fixed_scale_inside(threshold: float) -> None:
    net = make(ConvNet)
    batches = batches_for(net)
    given = ModuleNameTemplate({"right": {"dtype": qint8, "threshold": threshold}})
    rule = "fixed-scale-too-small" if threshold < 1 else "fixed-scale-too-large"
    found = only(advice_for(net, calibrated(net, batches, [given]), batches), rule, "right.0")
    assert advice_for(net, calibrated(net, batches, [given, tried(found.configuration)]), batches) == []


@pytest.mark.parametrize(("dtype", "by_hand"), [(qint8, True), (qint16, False)], ids=["qint8", "qint16"])
def test_uneven_batches(dtype: Any, by_hand: bool) -> None:
    """One batch that is far wider than the others is clipped by the mean, whatever the format."""
    net = make(ConvNet)
    batches = batches_for(net, 8)
    batches[-1] *= 30
    if by_hand:
        qat = in_state(prepared(net, batches, dtype=dtype).eval(), FakeQuantState.CALIBRATION)
        with torch.no_grad(), pytest.warns(UserWarning, match="ranges differ between batches"):
            for batch in batches:
                qat(batch)
            in_state(qat, FakeQuantState.VALIDATION)
    else:
        qat = calibrated(net, batches, dtype=dtype)
    for data in (batches[-2:], batches[:1]):  # whether the wide batch is among the data or not
        found = only(advice_for(net, qat, data), "uneven-batches", "quant")
        assert ("24." if by_hand else "6.") in found.evidence
    setter = tried(found.configuration)
    setter.save_dir = None
    mended = calibrated(net, batches, qconfig_setter=setter)
    assert error_of(net, mended, batches[-1:]) > error_of(net, qat, batches[-1:]) + 10
    assert "uneven-batches" not in [advice.rule for advice in advice_for(net, mended, batches[-1:])]


# -- inputs and formats


@pytest.mark.parametrize(("largest", "rule"), [(255, "input-not-normalised"), (1, "asymmetric-input")])
def test_images_that_are_not_centred(largest: int, rule: str) -> None:
    torch.manual_seed(0)
    raw = [largest * torch.rand(2, 3, 24, 24) for _ in range(2)]
    net = make(ConvNet)
    with torch.no_grad():
        net.stem[0].weight /= largest
    found = only(advice_for(net, calibrated(net, raw), raw), rule, "quant")
    net = make(ConvNet)
    net.quant = tried(found.configuration)
    centred = [2 * x / largest - 1 for x in raw]
    assert advice_for(net, calibrated(net, centred), centred) == []


def test_off_centre() -> None:
    """An offset costs the grid; the residual has it too, and is in the same line."""
    net = make(Transformer)
    batches = [0.3 * x + 100 for x in batches_for(net, 2)]
    found = only(advice_for(net, calibrated(net, batches), batches), "off-centre", "quant")
    assert "mean is 100" in found.evidence and "_generated_add_0" in found.configuration
    assert advice_for(net, calibrated(net, batches, [tried(found.configuration)]), batches) == []


def test_outliers() -> None:
    net = make(ConvNet)
    batches = batches_for(net, 2)
    for batch in batches:
        batch[0, 0, 0, 0] = 400
    qat = calibrated(net, batches)
    found = only(advice_for(net, qat, batches), "outliers", "quant")
    assert "the largest is 400" in found.evidence
    mended = calibrated(net, batches, [tried(found.configuration)])
    assert error_of(net, mended, batches) > error_of(net, qat, batches) + 6
    assert "outliers" not in [advice.rule for advice in advice_for(net, mended, batches)]


def test_int8_for_a_wide_range() -> None:
    """Numbers with a unit; whole numbers on a grid of whole numbers lose nothing."""
    net = make(Transformer)
    batches = [1000 * (2 * torch.rand(4, 12, 16) - 1) for _ in range(2)]
    qat = calibrated(net, batches)
    found = only(advice_for(net, qat, batches), "int8-wide-range", "quant")
    assert found.severity == "hint"
    mended = calibrated(net, batches, [tried(found.configuration)])
    assert error_of(net, mended, batches, "quant") > error_of(net, qat, batches, "quant") + 20
    assert advice_for(net, mended, batches) == []
    net.quant = QuantStub(scale=1.0)
    whole = [torch.randint(-128, 128, (4, 12, 16)).float() for _ in range(2)]
    assert advice_for(net, calibrated(net, whole), whole) == []


def test_a_strict_task() -> None:
    """What is fine for a classifier is not for super-resolution, and int16 is the answer."""
    net = make(ConvNet)
    batches = batches_for(net, 2)
    (found,) = advice_for(net, calibrated(net, batches), batches, "super-resolution")
    assert found.rule == "too-coarse" and len(found.operators) == 6
    assert found.configuration == "ModuleNameTemplate({'': qint16})" and "0.1 %" in found.evidence
    with pytest.raises(ValueError, match="There is no task 'cooking'"):
        advise(Document("", "FvsQ", "float", "qat", task="cooking"), net, net)


# -- structure


def test_cat_of_unequal_ranges() -> None:
    net = make(ConvNet)
    net.head = nn.Conv2d(16, 4, 1, groups=2)
    with torch.no_grad():
        net.right[1].weight *= 1e-3
        net.right[1].bias *= 1e-3
        net.head.weight[2:] *= 3e3
    batches = batches_for(net, 2)
    found = only(advice_for(net, calibrated(net, batches), batches), "unequal-operands", "join")
    assert "`right" in found.evidence and "0 steps are left" in found.evidence and found.severity == "warning"
    assert advice_for(net, calibrated(net, batches, [tried(found.configuration)]), batches) == []


class Sum(nn.Module):
    """Of two branches, the second of which may be small."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.one, self.other, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        with torch.no_grad():
            self.other.weight *= factor
            self.other.bias *= factor  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.head(torch.relu(self.one(x)) * 1.0 + torch.relu(self.other(x))))


def test_a_sum_of_unequal_ranges() -> None:
    """It is told although the output does not suffer, as a hint."""
    torch.manual_seed(0)
    net, batches = Sum(1e-3).eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    found = only(advice_for(net, calibrated(net, batches), batches), "unequal-operands", "_generated_add_0")
    assert found.severity == "hint" and "`other`" in found.evidence
    assert advice_for(net, calibrated(net, batches, [tried(found.configuration)]), batches) == []
    alike = Sum(0.5).eval()
    assert advice_for(alike, calibrated(alike, batches), batches) == []


def test_shared_module() -> None:
    net = make(Detector)
    with torch.no_grad():
        net.down[1].weight *= 0.01
        net.down[1].bias *= 0.01
        net.tower.bias.zero_()
    batches = batches_for(net, 2)
    found = only(advice_for(net, calibrated(net, batches), batches), "shared-module", "tower")
    assert found.configuration == "own_scales=['tower']" and "called 2 times" in found.evidence
    assert advice_for(net, calibrated(net, batches, **tried(found.configuration)), batches) == []


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        with torch.no_grad():
            self.conv.weight *= 8

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.conv(self.quant(x))) * 4 + 0.03
        return self.dequant(self.head(torch.reciprocal(x)))


def test_a_steep_function() -> None:
    torch.manual_seed(0)
    net, batches = Steep().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    qat = calibrated(net, batches)
    found = only(advice_for(net, qat, batches), "steep-table", "_generated_reciprocal_0")
    mended = calibrated(net, batches, [tried(found.configuration)])
    assert error_of(net, mended, batches) > error_of(net, qat, batches) + 10
    assert advice_for(net, mended, batches) == []


def test_channels_of_unequal_sizes() -> None:
    """The tensor has a small error, and the layer behind it reads its small channels."""
    net = make(Detector)
    with torch.no_grad():
        net.backbone[1].bias[3] = 300
        net.tower.weight[:, 3] = 0
        net.down[0].weight[:, 3] = 0
    batches = batches_for(net, 2)
    qat = calibrated(net, batches)
    found = only(advice_for(net, qat, batches), "uneven-channels", "backbone.0")
    mended = calibrated(net, batches, [tried(found.configuration)])
    assert error_of(net, mended, batches) > error_of(net, qat, batches) + 10
    assert advice_for(net, mended, batches) == []


def test_outputs() -> None:
    """No contradiction where the layer is shared with calls that are no outputs."""
    plain = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})], enable_optimize=False, save_dir=None)
    net = make(ConvNet)
    batches = batches_for(net, 2)
    found = only(
        advice_for(net, calibrated(net, batches, qconfig_setter=plain), batches), "low-precision-output", "head"
    )
    line = tried(found.configuration)
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8}), line], enable_optimize=False, save_dir=None)
    assert advice_for(net, calibrated(net, batches, qconfig_setter=setter), batches) == []

    class Twice(ConvNet):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(self.quant(x))
            y = self.left[0](torch.relu(self.right[0](x)))
            return self.dequant(self.right[0](x.flip(-1))), self.dequant(y.reshape(2, -1))

    torch.manual_seed(0)
    shared = Twice().eval()
    few = [x[:2] for x in batches]
    places = {(a.rule, a.place) for a in advice_for(shared, calibrated(shared, few, qconfig_setter=plain), few)}
    assert places == {("shared-output", "right.0"), ("output-before-functions", "left.0")}


def test_an_output_layer_of_several_levels_is_told_once() -> None:
    plain = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})], enable_optimize=False, save_dir=None)
    net = make(Detector)
    batches = batches_for(net, 2)
    found = advice_for(net, calibrated(net, batches, qconfig_setter=plain), batches)
    assert {(advice.rule, advice.place, len(advice.operators)) for advice in found} == {
        ("low-precision-output", "boxes", 2), ("low-precision-output", "scores", 2),
    }  # fmt: skip
    assert len(found) == 2


def test_a_mask_is_no_image() -> None:
    """It is on one side of 0, as an image may be, and has nothing to be centred."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.mask, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
            self.product, self.conv = FloatFunctional(), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            product = self.product.mul(self.quant(x), self.mask(x.mean(1, True).sigmoid()))
            return self.dequant(self.conv(product))

    torch.manual_seed(0)
    net, batches = Product().eval(), [torch.randn(2, 3, 24, 24) for _ in range(2)]
    qat = calibrated(net, batches)
    assert advice_for(net, qat, batches) == []
    assert "mask" not in [message.name for message in mistakes(record_calls(qat, batches[0]))]


# -- training


def test_dead_channels() -> None:
    net = make(ConvNet)
    with torch.no_grad():
        net.left[1].bias[:5] = -100
    batches = batches_for(net, 2)
    found = only(advice_for(net, calibrated(net, batches), batches), "dead-channels", "left.0")
    assert "5 of 8 channels" in found.evidence and found.severity == "hint"


def test_weights_far_from_float() -> None:
    net = make(ConvNet)
    batches = batches_for(net, 2)
    qat = calibrated(net, batches)
    with torch.no_grad():
        qat.left[0].weight.copy_(torch.randn_like(qat.left[0].weight) * qat.left[0].weight.std())
    found = [a for a in advice_for(net, qat, batches) if a.rule == "weights-far"]
    assert [a.place for a in found] == ["left.0"] and "1 of 4 weights" in found[0].evidence


def test_not_finite() -> None:
    net = make(ConvNet)
    batches = batches_for(net, 1)
    qat = calibrated(net, batches)
    with torch.no_grad():
        net.left[1].weight[0] = torch.nan
    found = only([a for a in advice_for(net, qat, batches) if a.rule == "not-finite"], "not-finite", "left.0")
    assert "float model" in found.evidence and len(found.operators) > 3


def test_infinities_of_both_models_are_masks() -> None:
    """Those that only the second model has are named."""
    net = nn.Sequential(nn.ReLU())
    finite, infinite = Values(0.0, 1.0, 0.5, 1.0), Values(0.0, 1.0, 0.5, 1.0, inf=2)
    for first, count in ((infinite, 0), (finite, 1)):
        masked = Operator(0, "0", "0", "ReLU", first=first, second=infinite)
        found = advise(Document("", "FvsQ", "float", "qat", operators=(masked,)), net, net)
        assert [advice.rule for advice in found] == ["not-finite"] * count


class Fragile(nn.Module):
    """Each layer doubles what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, 4.0)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for layer in self.layers:
            x = torch.sin(layer(x))
        return self.dequant(x)


def test_a_model_that_is_sensitive() -> None:
    """No operator is to blame: the float model itself turns a little noise into another output."""
    torch.manual_seed(0)
    net, batches = Fragile().eval(), [torch.randn(32, 8) for _ in range(2)]
    qat = calibrated(net, batches)
    found = advice_for(net, qat, batches)
    assert [advice.rule for advice in found] == ["sensitive-model"]
    mended = calibrated(net, batches, [tried(found[0].configuration)])
    assert error_of(net, mended, batches) > error_of(net, qat, batches) + 3


class Deep(nn.Module):
    """Layers that hand on every error, and add a little."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, 1.2)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.dequant(x)


def test_errors_that_add_up() -> None:
    """No operator is to blame, and there are many; half as many are fine."""
    torch.manual_seed(0)
    net, batches = Deep(60).eval(), [torch.randn(64, 16) for _ in range(2)]
    qat = calibrated(net, batches)
    found = only(advice_for(net, qat, batches), "accumulated-error", "dequant")
    assert found.severity == "hint" and "the task allows 10 %" in found.evidence
    mended = calibrated(net, batches, [tried(found.configuration)])
    assert advice_for(net, mended, batches) == []
    del net.layers[30:]
    assert advice_for(net, calibrated(net, batches), batches) == []


def test_every_rule_has_a_fault() -> None:
    text = Path(__file__).read_text()
    assert [rule for rule in TEXTS if f'"{rule}"' not in text] == []


def test_the_worst_comes_first() -> None:
    net = make(ConvNet)
    batches = batches_for(net, 2)
    with torch.no_grad():
        net.left[1].bias[:5] = -100
    qat = calibrated(net, batches)
    for path, factor in (("right.0", 1 / 8), ("stem.0", 1 / 3)):
        quantizer = qat.get_submodule(path).activation_post_process
        quantizer.set_qparams(quantizer.scale * factor)
    found = advice_for(net, qat, batches)
    assert [advice.place for advice in found] == ["right.0", "stem.0", "left.0"]
    assert found[0].explains > found[1].explains
