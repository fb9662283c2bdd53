"""float16 beside integers, through FakeCast."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QConfig,
    QuantStub,
    check_model,
    convert,
    convert_fx,
    get_default_qat_out_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast, default_fp16_fake_cast
from horizon_plugin_pytorch.quantization.observer_v2 import FixedScaleObserver
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    QconfigSetter,
    SensitivityTemplate,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    TemplateQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, qconfig, run_onnx

HALF = QConfig(activation=default_fp16_fake_cast, weight=default_fp16_fake_cast)
X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nash() -> Any:
    set_march(March.NASH_P)
    yield
    FakeCast.enable()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second, self.act = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1), nn.SiLU()
        self.softmax, self.norm, self.op = nn.Softmax(1), nn.LayerNorm(4), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(self.quant(x)))
        y = self.second(y.flatten(2).reshape(2, 8, 4, 4))
        y = self.op.add(y, y * 0.5)
        return self.dequant(self.norm(self.softmax(y)))


def _prepared(**by_name: Any) -> nn.Module:
    torch.manual_seed(0)
    return calibrate(prepare_qat_fx(Net(), {"": qconfig(), "module_name": list(by_name.items())}), (X,))


def _is_half(x: Tensor) -> bool:
    return torch.equal(x, x.half().float())


def test_cast_clips_and_passes_gradients_inside() -> None:
    x = torch.tensor([1.0001, -7e4, 7e4, 1e-9], requires_grad=True)
    out = FakeCast()(x)
    out.sum().backward()
    assert torch.equal(out.detach(), torch.tensor([1.0, -65504.0, 65504.0, 0.0]))
    assert torch.equal(x.grad, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert repr(FakeCast()) == "FakeCast(dtype=torch.float16, min_val=-65504.0, max_val=65504.0)"


def test_cast_can_be_switched_off_everywhere() -> None:
    x = torch.tensor([0.1])
    FakeCast.disable()
    assert torch.equal(FakeCast()(x), x)
    FakeCast.enable()
    assert not torch.equal(FakeCast()(x), x)


@pytest.mark.parametrize("name", ["act", "first", "second", "softmax", "norm", "op", "quant"])
def test_one_operator_in_float16(name: str) -> None:
    qat = _prepared(**{name: HALF})
    module = qat.get_submodule(name)
    assert isinstance(module, Float16)
    assert module.state_dict().keys() >= Net().get_submodule(name).state_dict().keys() - {"activation_post_process"}
    quantized = convert_fx(qat)
    with torch.no_grad():
        out, exact = qat(X), quantized(X)
    assert torch.equal(out, exact)
    with torch.no_grad():
        assert float((out - Net_float()(X)).abs().max()) < 0.2


def Net_float() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def test_everything_in_float16_is_float_rounded() -> None:
    torch.manual_seed(0)
    qat = calibrate(prepare_qat_fx(Net(), {"": HALF}), (X,))
    with torch.no_grad():
        out, wanted = qat(X), Net_float()(X)
    assert _is_half(out) and torch.allclose(out, wanted, atol=2e-2)
    assert not any(isinstance(m, FakeQuantize) for m in qat.modules())


def test_integer_layer_with_a_float16_result() -> None:
    """The usual choice on NASH_P: products in int8, all else in float16."""
    mixed = QConfig(activation=default_fp16_fake_cast, weight=qconfig().weight, input=qconfig().activation)
    torch.manual_seed(0)
    names = [("first", mixed), ("second", mixed)]
    qat = calibrate(prepare_qat_fx(Net(), {"": HALF, "module_name": names}), (X,))
    assert isinstance(qat.first.weight_fake_quant, FakeQuantize)
    stubs = [name for name, m in qat.named_modules() if "_generated_quant" in name and name.count(".") == 0]
    assert len(stubs) == 2  # what the two layers take is put on a grid
    seen: list[Any] = []
    qat.first.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        out = qat(X)
    assert isinstance(seen[0][0], QTensor) and not isinstance(seen[0][1], QTensor) and _is_half(seen[0][1])
    quantized = convert_fx(qat)
    with torch.no_grad():
        assert torch.equal(quantized(X), out)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.gain = QuantStub(), DeQuantStub(), nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.quant(x) * self.gain + self.gain)


def test_a_parameter_meets_float16_by_running_as_by_tracing() -> None:
    torch.manual_seed(0)
    model = Gain().eval()
    traced = calibrate(prepare_qat_fx(model, {"": HALF}), (X,))
    run = calibrate(prepare(model, (X,), qconfig_dict={"": HALF}, out_dir=None), (X,))
    with torch.no_grad():
        assert torch.equal(run(X), traced(X)) and torch.equal(convert(run)(X), run(X))


def test_gradients_reach_the_weights() -> None:
    qat = _prepared(act=HALF, second=HALF)
    set_fake_quantize(qat, FakeQuantState.QAT)
    qat.train()(X).square().sum().backward()
    for name, parameter in qat.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_exported_float16_is_within_its_precision(tmp_path: Any) -> None:
    quantized = convert_fx(_prepared(act=HALF, second=HALF))
    model = export_quantized_onnx(quantized, (X,), tmp_path / "half.onnx")
    with torch.no_grad():
        wanted = as_numbers(quantized(X))
    found = run_onnx(model, (X,))
    assert torch.allclose(wanted[0], found[0], atol=2e-2)


class _Sequence(nn.Module):
    def __init__(self, function: Any, operator: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.operator, self.function = QuantStub(), DeQuantStub(), operator, function

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self.operator, self.quant(x)))


class _Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda m, x: m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        (lambda m, x: m(x), _Attends()),
        (lambda m, x: m(x), nn.GroupNorm(2, 4)),
        (lambda m, x: m(x), nn.GroupNorm(2, 4, affine=False)),
        (lambda m, x: m(x)[0], nn.GRU(8, 8)),
    ],
)
def test_fused_kernels_and_writes_in_place_are_exported_in_float16(
    function: Any, operator: nn.Module, tmp_path: Any
) -> None:
    x = torch.randn(2, 4, 8)
    model = _Sequence(function, operator).eval()
    qat = calibrate(prepare_qat_fx(model, {"": qconfig(), "module_name": [("operator", HALF)]}), (x,))
    quantized = convert_fx(qat)
    found = run_onnx(export_quantized_onnx(quantized, (x,), tmp_path / "half.onnx"), (x,))
    with torch.no_grad():
        assert torch.allclose(quantized(x), found[0], atol=1e-2)


def test_recurrent_layers_in_float16_are_exported(tmp_path: Any) -> None:
    x = torch.randn(2, 4, 8)
    model = _Sequence(lambda m, x: m(x)[0], nn.LSTM(8, 8)).eval()
    qat = calibrate(prepare_qat_fx(model, {"": qconfig(), "module_name": [("operator", HALF)]}), (x,))
    quantized = convert_fx(qat)
    (found,) = run_onnx(export_quantized_onnx(quantized, (x,), tmp_path / "half.onnx"), (x,))
    with torch.no_grad():
        assert torch.allclose(quantized(x), found, rtol=0, atol=1e-3)  # a step of float16 below 1


def test_checkpoints_fit_with_and_without_float16() -> None:
    plain, half = _prepared(), _prepared(norm=HALF, second=HALF)
    weights = {k: v for k, v in plain.state_dict().items() if "fake_quant" not in k and "post_process" not in k}
    report = half.load_state_dict(weights, strict=False)
    assert [k for k in report.unexpected_keys if k.endswith((".weight", ".bias"))] == []


def test_copies_and_pickles() -> None:
    qat = _prepared(act=HALF, norm=HALF)
    with torch.no_grad():
        wanted = qat(X)
        assert torch.equal(copy.deepcopy(qat)(X), wanted)
    moved = copy.deepcopy(qat.norm)
    moved.load_state_dict({k: v * 2 for k, v in qat.norm.state_dict().items()})
    assert not torch.equal(moved(torch.randn(2, 4)), qat.norm(torch.randn(2, 4)))
    assert isinstance(pickle.loads(pickle.dumps(qat.act)), Float16)


@pytest.mark.parametrize("march", [March.BAYES, March.BERNOULLI2])
def test_chips_without_float16_say_so(march: March) -> None:
    set_march(march)
    net = nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub())
    with pytest.raises(QuantizationConfigError, match="float16.*NASH"):
        prepare_qat_fx(net, {"": qconfig(), "module_name": [("1", HALF)]})


def test_weights_and_results_have_casts_of_their_own() -> None:
    """The weights are not limited to where the results are."""
    limited = QConfig(activation=FakeCast.with_args(min_val=-1.0, max_val=1.0), weight=default_fp16_fake_cast)
    net = nn.Sequential(QuantStub(), nn.Linear(2, 2, bias=False), DeQuantStub())
    nn.init.constant_(net[1].weight, 4.0)
    qat = calibrate(prepare_qat_fx(net, {"": qconfig("qint16"), "module_name": [("1", limited)]}), (torch.ones(1, 2),))
    with torch.no_grad():
        assert torch.allclose(qat(torch.full((1, 2), 0.05)), torch.tensor([[0.4, 0.4]]), atol=1e-3)
        assert torch.equal(qat(torch.ones(1, 2)), torch.ones(1, 2))


_GRID = torch.rand(2, 5, 5, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
_BOXES = [torch.tensor([[0.0, 0.0, 4.0, 3.0]]), torch.tensor([[1.0, 1.0, 5.0, 5.0]])]
_COORDS = torch.tensor([[0, 0, 1, 2], [1, 0, 3, 0]])


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True),
        lambda y: F.interpolate(y, size=(3, 9)),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.UpsamplingNearest2d(scale_factor=2),
        lambda y: F.grid_sample(y, _GRID, align_corners=True),
        lambda y: F.grid_sample(y, y.permute(0, 2, 3, 1)[..., :2], padding_mode="border", align_corners=False),
        lambda y: hnn.functional.warp(y, _GRID),
        lambda y: hnn.functional.roi_align(y, _BOXES, 2, 1.0, 2),
        lambda y: hnn.functional.point_pillars_scatter(y.flatten(1)[:, :5], _COORDS, (2, 5, 4, 4)),
    ],
)
def test_what_keeps_its_input_format_keeps_float16(function: Any) -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.act = QuantStub(), DeQuantStub(), nn.SiLU()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.function(self.act(self.quant(x))))

    model = Resized()
    qat = calibrate(prepare_qat_fx(model, {"": qconfig(), "module_name": [("act", HALF)]}), (X,))
    quantized = convert_fx(qat)
    with torch.no_grad():
        wanted = model.eval()(X)
        assert torch.equal(quantized(X), qat(X))
        assert float((quantized(X) - wanted).abs().max()) < 0.1


@pytest.mark.parametrize("march", [March.BAYES, March.BERNOULLI2])
def test_eager_mode_on_chips_without_float16_says_so(march: March) -> None:
    set_march(march)
    net = nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub())
    net.qconfig, net[1].qconfig = qconfig(), HALF
    with pytest.raises(QuantizationConfigError, match="`1` asks for float16.*NASH"):
        prepare_qat(net)


def test_check_model_reports_float16_where_there_is_none(capsys: pytest.CaptureFixture) -> None:
    mixed = QConfig(activation=default_fp16_fake_cast, weight=qconfig().weight, input=qconfig().activation)
    quantized = convert_fx(_prepared(act=HALF, op=HALF, second=mixed))
    for march in ("nash-p", "nash-e", "nash-m"):
        assert not [f for f in find_limits(quantized, (X,), March(march)) if f.found == "float16"]
    found = [f for f in find_limits(quantized, (X,), March.BAYES) if f.found == "float16"]
    assert [f.operator for f in found] == ["silu", "conv2d", "add"]
    assert all("qint16" in f.advice for f in found) and found[0].place.startswith("`act`")
    assert check_model(convert_fx(calibrate(prepare_qat_fx(Net(), {"": HALF}), (X,))), X, "bayes") == 1
    assert "float16" in capsys.readouterr().out


class Called(nn.Module):
    """One function of a quantized image."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self.quant(x)))


def _has_statistics(norm: Any) -> Any:
    norm.running_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 1.0, 3.0]))
    return norm


@pytest.mark.in_turns("opset", "function")
@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize(
    "function",
    [
        _has_statistics(nn.BatchNorm2d(4)), _has_statistics(nn.BatchNorm2d(4, affine=False)),
        _has_statistics(nn.InstanceNorm2d(4, track_running_stats=True)), nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4), nn.RMSNorm(6), nn.PReLU(4), nn.PReLU(), nn.ELU(0.7, inplace=True), nn.SELU(), nn.CELU(0.5),
        nn.Hardswish(inplace=True), nn.Hardsigmoid(), nn.Mish(), nn.Softplus(2.0), nn.LogSigmoid(), nn.GLU(1),
        torch.sin, torch.cos, torch.atan, torch.erf, torch.exp2, lambda y: torch.log1p(y.abs()),
        lambda y: torch.rsqrt(y.abs() + 1), lambda y: y.var(1), lambda y: y.var((2, 3), keepdim=True, correction=0),
        lambda y: y.std(-1), lambda y: y.norm(dim=1), lambda y: y.norm(p=1, dim=(2, 3)), F.normalize,
        lambda y: y.cumsum(2),
    ],
)  # fmt: skip
def test_float16_operators_have_an_onnx_form(function: Any, opset: int, tmp_path: Any) -> None:
    from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

    model = Called(copy.deepcopy(function))
    quantized = convert_fx(calibrate(prepare_qat_fx(model, {"": HALF}), (X,)))
    with torch.no_grad():
        wanted = quantized(X)
    file = export_quantized_onnx(quantized, (X,), tmp_path / "half.onnx", opset_version=opset)
    for optimization in ("off", "on"):
        (found,) = run_onnx(file, (X,), optimization)
        assert torch.allclose(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", ["zeros", "border", "reflection"])
def test_sampling_and_resizing_in_float16_are_exported(mode: str, tmp_path: Any) -> None:
    from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

    def function(y: Tensor) -> Tensor:
        y = F.interpolate(F.silu(y), scale_factor=2.0, mode="bilinear")
        return F.grid_sample(y, _GRID, padding_mode=mode, align_corners=False)

    quantized = convert_fx(calibrate(prepare_qat_fx(Called(function), {"": HALF}), (X,)))
    with torch.no_grad():
        wanted = quantized(X)
    for opset in (13, 17, 20):
        file = export_quantized_onnx(quantized, (X,), tmp_path / "half.onnx", opset_version=opset)
        assert torch.allclose(run_onnx(file, (X,))[0], wanted, atol=2e-3)


def test_atan2_in_float16_is_exported(tmp_path: Any) -> None:
    from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

    model = Called(lambda y: torch.atan2(y, y + 1))
    quantized = convert_fx(calibrate(prepare_qat_fx(model, {"": HALF}), (X,)))
    (found,) = run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "half.onnx"), (X,))
    with torch.no_grad():
        assert torch.allclose(quantized(X), found, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["first", "act", "second", "_generated_mul_0", "op", "second op _generated_mul_0"])
def test_functions_after_float16_results_run_as_their_modules_in_a_models_own_forward(names: str) -> None:
    by_name = dict.fromkeys(names.split(), HALF)
    traced = _prepared(**by_name)
    torch.manual_seed(0)
    config = {"": qconfig(), "module_name": list(by_name.items())}
    by_running = calibrate(prepare(Net(), (X,), qconfig_dict=config, out_dir=None), (X,))
    with torch.no_grad():
        wanted = traced(X)
        for model in (by_running, copy.deepcopy(by_running), convert(by_running)):
            assert torch.equal(model(X), wanted)


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_layers_of_integers_with_float16_results_are_fused(method: str) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.first, self.second, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.last(x + self.second(torch.relu(self.first(x)))))

    mixed = QConfig(default_fp16_fake_cast, qconfig().weight, qconfig().activation)
    model = prepare(Fused().eval(), (X,), method=method, qconfig_dict={"": qconfig(), "module_name": {
        "first": mixed, "second": mixed, "last": qconfig(),
    }})  # fmt: skip
    calibrate(model, [X])
    quantized = convert_fx(model) if method == "symbolic" else convert(model)
    assert torch.equal(quantized(X), model(X))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for layer in self.layers:
            x = layer(x)
        return self.dequant(x)


@pytest.mark.parametrize(
    "model", [Listed(), nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), DeQuantStub())]
)
def test_generated_stubs_are_no_elements_of_lists(model: nn.Module) -> None:
    mixed = QConfig(default_fp16_fake_cast, qconfig().weight, qconfig().activation)
    results = []
    for method in ("jit-strip", "symbolic"):
        qat = calibrate(prepare(copy.deepcopy(model).eval(), (X,), method=method, qconfig_dict={"": mixed}), [X])
        assert any("_generated_quant_" in name for name, _ in qat.named_modules())
        quantized = convert_fx(qat) if method == "symbolic" else convert(qat)
        results += [qat(X), quantized(X)]
    assert all(type(result) is Tensor and torch.equal(result, results[0]) for result in results)


class Fused(nn.Module):
    """Layers with what is fused into them."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts = parts.split()
        self.quant, self.dequant, self.out = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        start = self.quant(x)
        x = self.conv(start)
        if "bn" in self.parts:
            x = self.bn(x)
        if "add" in self.parts:
            x = start + x
        if "iadd" in self.parts:
            x += start
        if "relu" in self.parts:
            x = self.relu(x)
        return self.dequant(self.out(torch.matmul(x, x)))


def _templates(*templates: Any) -> QconfigSetter:
    return QconfigSetter(get_qconfig(), list(templates), save_dir=None)


_HALF = get_qconfig(in_dtype=torch.float16, weight_dtype=torch.float16, out_dtype=torch.float16)
# As the tuning guide writes them, and the recipe for chips that compute in float16.
HALF_SETTERS: dict[str, Any] = {
    "by name": lambda: (ModuleNameQconfigSetter({"conv": _HALF}), calibration_8bit_weight_16bit_act_qconfig_setter),
    "everything": lambda: TemplateQconfigSetter(_HALF),
    "template": lambda: _templates(ModuleNameTemplate({"": torch.float16})),
    "integer layers": lambda: _templates(
        ModuleNameTemplate({"": torch.float16}), ConvDtypeTemplate("qint8", "qint8"), MatmulDtypeTemplate("qint8")
    ),
}


@pytest.mark.in_turns("march", "setter", "parts")
@pytest.mark.slow
@pytest.mark.parametrize("march", [March.NASH_M, March.NASH_P])
@pytest.mark.parametrize("setter", HALF_SETTERS)
@pytest.mark.parametrize("parts", ["", "bn", "relu", "bn relu", "add", "bn add relu", "bn iadd relu"])
def test_fused_layers_in_float16_run_in_a_models_own_forward(parts: str, setter: str, march: March) -> None:
    set_march(march)
    found = []
    for method in ("jit-strip", "symbolic"):
        torch.manual_seed(0)
        model = prepare(Fused(parts).eval(), (X,), HALF_SETTERS[setter](), method, out_dir=None)
        model = calibrate(model, (X,))
        out = model(X)
        out.square().mean().backward()
        weights = [p for name, p in model.named_parameters() if name.startswith(("conv", "out"))]
        assert all(p.grad is not None for p in weights)  # marks let gradients pass
        with torch.no_grad():
            found += [out, model(X), (convert if method == "jit-strip" else convert_fx)(model)(X)]
    assert all(torch.equal(out, found[0]) for out in found)


def test_float16_weights_with_an_integer_output_are_refused() -> None:
    for setter in (
        TemplateQconfigSetter(get_qconfig(weight_dtype=torch.float16)),
        _templates(ConvDtypeTemplate(None, torch.float16)),
        _templates(ModuleNameTemplate({"conv": {"weight": torch.float16}})),
    ):
        with pytest.raises(QuantizationConfigError, match=r"`(conv|out)` has torch.float16 weights.*Give"):
            prepare(Fused("bn relu").eval(), (X,), setter, out_dir=None)


@pytest.mark.parametrize("names", ["conv", "out", "conv out"])
def test_a_sensitive_weight_in_float16_makes_its_layer_float16(names: str) -> None:
    rows = [[name, "weight", "Conv2d", 1.0, "qint8"] for name in names.split()]
    setter = _templates(SensitivityTemplate(rows, len(rows), high_precision_dtype=torch.float16))
    model = prepare(Fused("bn relu").eval(), (X,), setter, out_dir=None)
    assert [n for n in ("conv", "out") if isinstance(model.get_submodule(n), Float16)] == names.split()
    assert calibrate(model, (X,))(X).isfinite().all()


def test_eager_mode_refuses_float16_before_an_integer_operator() -> None:
    class Two(nn.Sequential):
        pass

    net = Two(QuantStub(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), DeQuantStub())
    setter = (ModuleNameQconfigSetter({"1": _HALF}), default_calibration_qconfig_setter)
    with pytest.raises(QuantizationConfigError, match=r"`2` .*takes a float16 result"):
        prepare(net, (X,), setter, "eager", out_dir=None)


class Mixed(nn.Module):
    """`first` is float16; what takes its result is given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function
        self.first, self.also, self.tanh, self.fc = nn.Sigmoid(), nn.SiLU(), nn.Tanh(), nn.Linear(16, 16)
        self.op = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


CONSUMERS: dict[str, Any] = {
    "a table": lambda m, x: m.tanh(m.first(x)),
    "a layer that is the output": lambda m, x: m.fc(m.first(x)),
    "a product that is the output": lambda m, x: torch.matmul(m.first(x), x.transpose(-1, -2)),
    "a chain of float16": lambda m, x: m.tanh(m.also(m.first(x)).reshape(4, -1)),
    "a sum": lambda m, x: m.tanh(m.op.add(m.first(x), x)),
    "a cat": lambda m, x: m.tanh(torch.cat([m.first(x), x], -1)),
    "two products": lambda m, x: m.tanh(torch.matmul(m.first(x), m.first(x).transpose(-1, -2))),
    "a softmax": lambda m, x: F.softmax(m.first(x), -1),
    "a mean": lambda m, x: m.first(x).mean(-1),
    "a number": lambda m, x: m.first(x) * 0.3,
}
FP16 = get_qconfig(in_dtype=torch.float16, weight_dtype=torch.float16, out_dtype=torch.float16)
INT16 = qconfig("qint16")
CONFIGURATIONS: dict[str, Any] = {
    "templates": {
        "qconfig_setter": QconfigSetter(
            get_qconfig(),
            [ModuleNameTemplate({"": "qint16", "first": torch.float16, "also": torch.float16})],
            save_dir=None,
        )
    },
    "a reference": {
        "qconfig_setter": QconfigSetter(
            get_qconfig(out_dtype="qint16"),
            [ModuleNameTemplate({"first": torch.float16, "also": torch.float16})],
            save_dir=None,
        )
    },
    "setters": {
        "qconfig_setter": (
            ModuleNameQconfigSetter({"first": FP16, "also": FP16}),
            calibration_8bit_weight_16bit_act_qconfig_setter,
        )
    },
    "a dictionary": {"qconfig_dict": {"": INT16, "module_name": [("first", HALF), ("also", HALF)]}},
    "a dictionary with outputs": {
        "qconfig_dict": {
            "": INT16,
            "module_name": [("first", HALF), ("also", HALF), ("fc", get_default_qat_out_qconfig())],
        }
    },
    "get_qconfig": {
        "qconfig_dict": {
            "": get_qconfig(out_dtype="qint16"),
            "module_name": [("first", FP16), ("also", FP16), ("fc", get_qconfig(out_dtype=None))],
        }
    },
}


@pytest.mark.in_turns("method", "configuration")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_float16_is_handed_over_in_int16_in_an_int16_model(configuration: str, method: str) -> None:
    x = torch.linspace(-3, 3, 4 * 16 * 16).reshape(4, 16, 16)
    for name, function in CONSUMERS.items():
        net = Mixed(function).eval()
        qat = calibrate(prepare(net, (x,), method=method, out_dir=None, **CONFIGURATIONS[configuration]), (x,))
        stubs = [m.activation_post_process.dtype for path, m in qat.named_modules() if path.endswith("_quant_0")]
        assert set(stubs) == {"qint16"}, name
        quantized = (convert_fx if method == "symbolic" else convert)(qat)
        with torch.no_grad():
            out, wanted = qat(x), net(x)
            assert torch.equal(quantized(x), out), name
        bound = 6e-3 if "layer" in name else 2e-3  # whose weights are int8
        assert float((out - wanted).abs().max() / wanted.abs().max()) < bound, name


def test_each_consumer_of_float16_gets_its_own_format() -> None:
    x = torch.linspace(-3, 3, 64).reshape(4, 16)
    net = Mixed(lambda m, x: m.tanh(cast := m.first(x)) + m.also(cast) + m.fc(cast)).eval()
    formats = {"": "qint16", "first": torch.float16, "also": "qint8", "fc": {"input": "qint8", "output": "qint16"}}
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate(formats)], save_dir=None)
    qat = prepare(net, (x,), setter, out_dir=None)
    stubs = {str(path): m.activation_post_process.dtype for path, m in qat.named_modules() if "_quant_" in path[-9:]}
    assert list(stubs.values()) == ["qint16", "qint8", "qint8"]


def test_a_fixed_output_scale_is_not_that_of_a_float16_operand() -> None:
    x = torch.linspace(-3, 3, 64).reshape(4, 16)
    fixed = QConfig(activation=FakeQuantize.with_args(observer=FixedScaleObserver, dtype="qint16", scale=1 / 32768))
    names = [("first", HALF), ("tanh", fixed)]
    net = Mixed(lambda m, x: m.tanh(m.first(x) * 4)).eval()
    qat = calibrate(prepare(net, (x,), qconfig_dict={"": HALF, "module_name": names}, out_dir=None), (x,))
    stub = next(m for path, m in qat.named_modules() if path.endswith("_generated_quant_0"))
    assert not stub.activation_post_process.is_fixed
    assert float((qat(x) - net(x)).abs().max()) < 4e-3


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, :1] = y[:, :1]
    return x


BESIDE: dict[str, Any] = {
    "greater than integers": lambda m, x: torch.where(m.first(x) > x, x, -x),
    "integers at least": lambda m, x: torch.where(x >= m.first(x), x, -x),
    "compared with a mean": lambda m, x: torch.where(m.first(x) > x.mean(1, keepdim=True), x, -x),
    "a mask": lambda m, x: x.masked_fill(m.first(x) > x, 0.0),
    "a mask on float16": lambda m, x: m.first(x).masked_fill(x > 0, 0.0),
    "a choice": lambda m, x: torch.where((m.first(x) > 0.4) & (x < 0.5), x, m.first(x)),
    "a limit": lambda m, x: torch.clamp(x, max=m.first(x)),
    "places": lambda m, x: m.first(x).gather(1, x.argmax(1, keepdim=True)),
    "written into float16": lambda m, x: _assigned(m.first(x), x),
    "written into integers": lambda m, x: _assigned(x * 1.0, m.first(x)),
    "its type": lambda m, x: m.first(x).to(x) * x,
}


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("name", BESIDE)
def test_functions_of_float16_and_integers(name: str, method: str) -> None:
    """An integer tensor of a converted model has integers in its memory: nobody may read them as real numbers."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    net = Mixed(BESIDE[name]).eval()
    qconfigs = {"": qconfig("qint16"), "module_name": [("first", HALF)]}
    qat = calibrate(prepare(net, (x,), method=method, qconfig_dict=qconfigs, out_dir=None), (x,))
    with torch.no_grad():
        out = qat(x)
        assert torch.equal(convert(qat)(x), out)
        assert float((out - net(x)).abs().max()) < 2e-3
