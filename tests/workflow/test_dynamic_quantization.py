"""Linear layers that quantize their inputs while the model runs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import Linear as IntegerLinear
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QConfig,
    QuantStub,
    explain,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast
from horizon_plugin_pytorch.quantization.fake_quantize import DynamicFakeQuantize, FakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import MinMaxObserver
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    ModuleNameTemplate,
    QconfigSetter,
    SetDynamicQuantTemplate,
)
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from tests.routes import assert_one_arithmetic, calibrate

METHODS = ("jit-strip", "jit", "symbolic")


@pytest.fixture(autouse=True)
def nash_p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_P)
    monkeypatch.chdir(tmp_path)  # `prepare` writes files


class Net(nn.Module):
    """Linear layers plain, with a ReLU, with a sum, before an integer operator, and before the output."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.gate, self.head = nn.Linear(size, size, bias=False), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = x + self.down(torch.relu(self.up(x)))
        return self.dequant(self.head(torch.sigmoid(self.gate(y))))


def tokens(seed: int = 0, size: int = 16) -> Tensor:
    """Rows of which a few are much larger than the others, and one is zero."""
    x = torch.randn(2, 6, size, generator=torch.Generator().manual_seed(seed))
    x[0, 0] *= 100
    x[1, 3] *= 30
    x[1, 1] = 0
    return x


def dynamic(*templates: Any, block_size: Any = "full", save_dir: Any = None) -> QconfigSetter:
    last = SetDynamicQuantTemplate(op_kwargs={nn.Linear: {"block_size": block_size, "dim": -1}})
    before = templates or (ModuleNameTemplate({"quant": qint16}),)
    return QconfigSetter(get_qconfig(), [*before, last], save_dir=save_dir)


def prepared(method: str = "jit-strip", setter: Any = None, net: Any = None, x: Tensor | None = None) -> Any:
    torch.manual_seed(1)
    x = tokens() if x is None else x
    return prepare((net or Net()).eval(), (x,), dynamic() if setter is None else setter, method)


def in_integers(x: Tensor, layer: Any, block: int) -> Tensor:
    """A layer by the definition: integers from float32, then exact sums, and products in float64."""
    weight = torch.div(layer.weight, layer.weight_fake_quant.scale[:, None]).round().clamp(-128, 127).long()
    out = 0.0
    for part, columns in zip(x.split(block, -1), weight.split(block, 1), strict=True):
        scale = part.abs().amax(-1, keepdim=True) / 127.5
        steps = torch.where(scale > 0, part / scale, 0.0).round().clamp(-128, 127).long()
        out = out + (steps @ columns.T).double() * scale
    return out * layer.weight_fake_quant.scale + layer.bias


@pytest.mark.parametrize("block_size", ["full", 8, 5])
@pytest.mark.parametrize("method", METHODS)
def test_all_routes_give_the_same_numbers(method: str, block_size: Any, tmp_path: Path) -> None:
    qat = calibrate(prepared(method, dynamic(block_size=block_size)), [tokens()])
    assert_one_arithmetic(qat, [tokens()], tmp_path, [[tokens(2)], [tokens(3) * 1e-3]])


def test_the_methods_agree() -> None:
    first, *others = (calibrate(prepared(method), [tokens()])(tokens(4)) for method in METHODS)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("block_size", ["full", 8, 5])
def test_a_layer_is_what_its_definition_says(block_size: Any) -> None:
    x = tokens()
    net = nn.Sequential(QuantStub(), nn.Linear(16, 7), DeQuantStub())
    as_it_is = ModuleNameTemplate({"0": torch.float32})
    qat = calibrate(prepared(setter=dynamic(as_it_is, block_size=block_size), net=net, x=x), [x])
    wanted = in_integers(x, qat[1], 16 if block_size == "full" else block_size)
    torch.testing.assert_close(qat(x).double(), wanted, rtol=1e-6, atol=1e-7)


def test_sums_beyond_float32_are_exact(tmp_path: Path) -> None:
    net = nn.Sequential(QuantStub(), nn.Linear(2048, 3), DeQuantStub())
    with torch.no_grad():
        net[1].weight.copy_(torch.rand(3, 2048) * 0.1 + 0.9)
    x = torch.rand(4, 2048) * 0.1 + 0.9
    qat = calibrate(prepared(net=net, setter=dynamic(ModuleNameTemplate({"0": qint16})), x=x), [x])
    quantized = assert_one_arithmetic(qat, [x], tmp_path)
    assert quantized[1]._carrier().dtype == torch.float64
    real = qat[0](x).dequantize()
    torch.testing.assert_close(qat(x).double(), in_integers(real, qat[1], 2048), rtol=3e-7, atol=0)


def test_calibration_rounds_nothing_and_needs_nothing() -> None:
    net = Net().eval()
    qat = prepared(net=net)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    assert torch.equal(qat(tokens()), net(tokens()))
    assert not [name for name in qat.state_dict() if "input_fake_quant" in name]
    static = prepared(net=net, setter=QconfigSetter(get_qconfig(), save_dir=None))
    set_fake_quantize(static, FakeQuantState.CALIBRATION)
    static(tokens())
    missing = qat.load_state_dict(static.state_dict(), strict=False).missing_keys
    assert all(name.startswith("_generated_quant_") for name in missing)  # before the sigmoid, which is int8


def test_training_rounds_with_a_gradient_that_passes_straight_through() -> None:
    qat = prepared()
    calibrate(qat, [tokens()])
    exact = qat(tokens())
    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    x = tokens().requires_grad_()
    out = qat(x)
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=1e-2)
    out.sum().backward()
    assert float(x.grad.abs().sum()) > 0 and float(qat.up.weight.grad.abs().sum()) > 0

    quantizer, y = DynamicFakeQuantize(block_size=3), torch.randn(2, 7, requires_grad=True)
    quantizer(y).backward(torch.arange(14.0).reshape(2, 7))
    assert torch.equal(y.grad, torch.arange(14.0).reshape(2, 7))
    quantizer.disable_fake_quant()
    assert quantizer(y) is y


def test_gradients_in_validation() -> None:
    qat = calibrate(prepared(), [tokens()])
    qat(tokens()).sum().backward()
    assert float(qat.gate.weight.grad.abs().sum()) > 0


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.up, self.down, self.head = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.head(x + self.down(torch.relu(self.up(x)))))


@pytest.mark.slow
def test_outlier_rows_leave_the_others_their_precision() -> None:
    torch.manual_seed(0)
    net, x = Block(64).eval(), tokens(size=64)
    ordinary = torch.ones(2, 6, dtype=torch.bool)
    ordinary[0, 0] = ordinary[1, 3] = False

    def error(*templates: Any) -> float:
        setter = QconfigSetter(get_qconfig(MinMaxObserver), templates, save_dir=None)
        qat = calibrate(prepare(copy.deepcopy(net), (x,), setter), [x])
        return float((qat(x) - net(x))[ordinary].square().mean().sqrt())

    formats = ModuleNameTemplate({"": qint8, "quant": qint16})
    assert error(formats, SetDynamicQuantTemplate({nn.Linear: {}})) < error(formats) / 20


def test_float16_around_it_stays_float16() -> None:
    qat = prepared(setter=dynamic(ModuleNameTemplate({"": torch.float16})))
    assert qat.gate.activation_post_process.dtype == torch.float16
    assert isinstance(qat.gate.input_fake_quant, DynamicFakeQuantize)
    assert not any("_generated_quant" in name for name, _ in qat.named_modules())


def test_a_later_template_takes_it_back() -> None:
    setter = QconfigSetter(
        get_qconfig(),
        [SetDynamicQuantTemplate({nn.Linear: {}}), ConvDtypeTemplate(input_dtype=qint8)],
        save_dir=None,
    )
    assert not any(isinstance(m, DynamicFakeQuantize) for m in prepared(setter=setter).modules())


def test_the_files_and_explanations_tell_it(tmp_path: Path, capsys: Any) -> None:
    qat = prepared(setter=dynamic(save_dir=tmp_path, block_size=8))
    chain = explain(qat, "gate")["gate"]
    assert chain[-1] == "output float32, input qint8 dynamic (block_size 8, dim -1): SetDynamicQuantTemplate"
    rules = torch.load(tmp_path / "qconfig_dtypes.pt", weights_only=True)
    assert rules["gate"] == {"weight": "qint8", "output": "float32", "dynamic": {"block_size": 8, "dim": -1}}
    again = prepared(setter=QconfigSetter(templates=[ModuleNameTemplate(rules)], save_dir=None))
    assert str(again) == str(qat)
    check_qat_model(qat, (tokens(),), save_results=True, out_dir=str(tmp_path))
    text = (tmp_path / "model_check_result.txt").read_text()
    assert "input int8 dynamic (block_size 8, dim -1): SetDynamicQuantTemplate" in text
    assert "Abnormal compute types" not in text and "Common mistakes" not in text


def test_copies_and_pickles() -> None:
    qat = calibrate(prepared(), [tokens()])
    for other in (copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        assert torch.equal(other(tokens(5)), qat(tokens(5)))


def test_an_output_in_integers(tmp_path: Path) -> None:
    setter = QconfigSetter(
        get_qconfig(),
        [SetDynamicQuantTemplate({nn.Linear: {}}), ModuleNameTemplate({"up": qint8, "gate": qint16})],
        save_dir=None,
    )
    qat = calibrate(prepared(setter=setter), [tokens()])
    assert qat.up.activation_post_process.dtype == qint8 and qat.gate.activation_post_process.dtype == qint16
    assert_one_arithmetic(qat, [tokens()], tmp_path, [[tokens(6)]])


def test_a_qconfig_by_hand_in_eager_mode() -> None:
    base = get_default_qconfig()
    net = nn.Sequential(QuantStub(), nn.Linear(16, 4), DeQuantStub())
    net.qconfig = base
    net[1].qconfig = QConfig(None, base.weight, DynamicFakeQuantize.with_args(block_size=4))
    qat = calibrate(prepare_qat(net), [tokens()])
    quantized = IntegerLinear.from_qat(qat[1])
    assert quantized.dynamic.size == 4
    assert qat(tokens()).shape == (2, 6, 4)


@pytest.mark.parametrize("march", [m for m in March if m.family != "bernoulli" and m is not March.NASH_P])
def test_other_chips_are_refused(march: March) -> None:
    set_march(march)
    qconfig = QConfig(None, get_default_qconfig().weight, DynamicFakeQuantize.with_args())
    net = nn.Sequential(QuantStub(), nn.Linear(16, 4), DeQuantStub())
    with pytest.raises(QuantizationConfigError, match=rf"`linear` at `1`.* nash-p only, not to {march}"):
        prepare_qat_fx(net, {"": get_default_qconfig(), "module_name": [("1", qconfig)]})


@pytest.mark.parametrize(
    ("op_kwargs", "message"),
    [
        ({nn.Conv2d: {}}, "torch.nn.Linear, not for Conv2d"),
        ({nn.Linear: {"dim": 1}}, "dim, which is -1"),
        ({nn.Linear: {"bits": 4}}, "bits"),
        ({nn.Linear: {"block_size": 0}}, "positive int"),
        ({nn.Linear: {"block_size": "half"}}, "'half'"),
    ],
)
def test_templates_that_make_no_sense_are_refused(op_kwargs: Any, message: str) -> None:
    with pytest.raises(QuantizationConfigError, match=message):
        SetDynamicQuantTemplate(op_kwargs=op_kwargs)


def test_qconfigs_that_make_no_sense_are_refused() -> None:
    base, part = get_default_qconfig(), DynamicFakeQuantize.with_args()
    for qconfig in (QConfig(part, base.weight), QConfig(base.activation, part)):
        with pytest.raises(QuantizationConfigError, match="it is for the `input`"):
            prepare_qat_fx(Net(), {"": qconfig})
    with pytest.raises(QuantizationConfigError, match="only linear layers with integer weights"):
        prepare_qat_fx(Net(), {"": QConfig(base.activation, base.weight, part)})
    wrong = QConfig(FakeCast.with_args(dtype=torch.float32), base.weight, part.with_args(dim=1))
    with pytest.raises(QuantizationConfigError, match="`Linear` at `gate`.*dim 1"):
        prepare_qat_fx(Net(), {"": base, "module_name": [("gate", wrong)]})
    with pytest.raises(QuantizationConfigError, match="qint8"):
        DynamicFakeQuantize(dtype=qint16)
    with pytest.raises(QuantizationConfigError, match="dim must be an int"):
        DynamicFakeQuantize(dim="last")


def test_a_model_without_such_layers_is_told() -> None:
    net = nn.Sequential(QuantStub(), nn.Conv2d(1, 1, 1), DeQuantStub())
    with pytest.warns(QuantizationWarning, match="has no Linear"):
        prepare_qat_fx(net, qconfig_setter=dynamic(ModuleNameTemplate({"0": qint16})))


def test_states_reach_it() -> None:
    quantizer = DynamicFakeQuantize()
    model = nn.Sequential(quantizer, FakeQuantize())
    for state in FakeQuantState:
        set_fake_quantize(model, state)
        assert quantizer.is_quantizing == model[1].is_quantizing
