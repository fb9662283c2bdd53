"""Operators on the CPU among quantized ones: the models of the development guide, and the same by running."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    check_model,
    convert,
    convert_fx,
    load_observer_params,
    prepare_qat,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.prepare import PrepareMethod, prepare
from horizon_plugin_pytorch.quantization.qconfig import (
    default_calib_8bit_fake_quant_qconfig,
    default_calib_out_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, mismatches, qconfig, run_onnx

X = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
HYBRID: dict[str, Any] = {"module_name": ["conv1.conv", "conv3"]}


class _ConvBlock(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.prelu = nn.Conv2d(channels, channels, 1), nn.PReLU()

    def forward(self, input: Tensor) -> Tensor:
        return F.selu(self.prelu(self.conv(input)))


class _SeluModule(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return F.selu(input)


class HybridModel(nn.Module):
    """The guide's."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv0 = nn.Conv2d(channels, channels, 1)
        self.prelu = nn.PReLU()
        self.conv1 = _ConvBlock(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.conv3 = nn.Conv2d(channels, channels, 1)
        self.conv4 = nn.Conv2d(channels, channels, 1)
        self.selu = _SeluModule()
        self.dequant = DeQuantStub()
        self.identity = nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        x = self.conv0(self.quant(input))
        x = self.prelu(self.identity(x))
        x = self.conv3(self.conv2(self.conv1(F.selu(x))))
        x = self.conv4(self.identity(x))
        return self.dequant(self.selu(x))


# The guide prints this forward for its model.
PRINTED = """
quant conv0 identity prelu_input_dequant_0 prelu selu conv1_conv conv1_prelu selu_1 selu_1_activation_post_process conv2
conv3_input_dequant_0 conv3 conv3_activation_post_process identity_1 conv4 selu_2_input_dequant_0 selu_2 dequant
""".split()
LISTED = HYBRID | {"module_type": [_SeluModule]}


def _float() -> nn.Module:
    torch.manual_seed(0)
    return HybridModel().eval()


def _fx(config: Any, last: Any) -> nn.Module:
    return prepare_qat_fx(_float(), {"": config, "module_name": [("conv4", last)]}, hybrid=True, hybrid_dict=LISTED)


@pytest.mark.parametrize("march", [March.BAYES, March.BERNOULLI2])
def test_the_guides_model_has_the_structure_that_is_printed(march: March) -> None:
    set_march(march)
    model = _fx(default_qat_8bit_fake_quant_qconfig, default_qat_out_8bit_fake_quant_qconfig)
    assert [n.name for n in model.graph.nodes if n.op not in ("placeholder", "output")] == PRINTED
    added = {name for name, _ in model.named_children()} - {name for name, _ in _float().named_children()}
    assert added == {
        "prelu_input_dequant", "selu_1_activation_post_process", "conv3_activation_post_process",
        "conv3_input_dequant", "selu_2_input_dequant",
    }  # fmt: skip
    assert isinstance(model.conv0, qat.Conv2d) and type(model.conv3) is nn.Conv2d
    assert type(model.conv1.conv) is nn.Conv2d and type(model.prelu).__module__.startswith("torch.nn")
    assert model.conv4.activation_post_process is None


def test_the_guides_script_calibrates_trains_and_converts(tmp_path: Any) -> None:
    set_march(March.BAYES)
    float_model = _float()
    calibration = calibrate(_fx(default_calib_8bit_fake_quant_qconfig, default_calib_out_8bit_fake_quant_qconfig), (X,))
    model = _fx(default_qat_8bit_fake_quant_qconfig, default_qat_out_8bit_fake_quant_qconfig)
    assert load_observer_params(calibration, model) == []
    model.train()(X).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        validated, quantized = calibration(X), convert_fx(calibration)
        assert torch.allclose(validated, float_model(X), atol=0.05)
        assert torch.equal(quantized(X), validated)
    found = run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx"), (X,))
    assert torch.allclose(found[0], validated, atol=0.03)  # the CPU's float operators differ in the last bits


@pytest.mark.slow
def test_running_gives_the_same_numbers_as_tracing() -> None:
    set_march(March.BAYES)
    traced = calibrate(prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict=LISTED), (X,))
    model = prepare(_float(), (X,), qconfig_dict={"": qconfig()}, hybrid=True, hybrid_dict=LISTED, out_dir=None)
    model = calibrate(model, (X,))
    with torch.no_grad():
        wanted = as_numbers(traced(X))
        for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), convert(model)):
            assert mismatches(as_numbers(same(X)), wanted) == 0
    assert type(model.conv3) is nn.Conv2d and isinstance(model.conv2, qat.Conv2d)


class Unsupported(nn.Module):
    """Operators without a quantized form, as functions; the last one needs no stub."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        x = torch.lgamma(F.relu(self.conv(x)) + 2.0) + x
        return torch.lgamma(self.last(x) + 4.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_quantized_runs_on_the_cpu() -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    model = Unsupported().eval()
    with pytest.raises(UnsupportedOperatorError, match="lgamma"):
        prepare(model, (X,), qconfig_dict={"": qconfig()}, out_dir=None)
    by_running = calibrate(prepare(model, (X,), qconfig_dict={"": qconfig()}, hybrid=True, out_dir=None), (X,))
    traced = calibrate(prepare_qat_fx(model, {"": qconfig()}, hybrid=True), (X,))
    with torch.no_grad():
        wanted = as_numbers(traced(X))
        assert torch.allclose(wanted[0], model(X), atol=0.1)
        assert mismatches(as_numbers(by_running(X)), wanted) == 0
        assert mismatches(as_numbers(convert(by_running)(X)), wanted) == 0


class CpuFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.conv, self.dequant = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.front(x)))


def test_a_model_may_begin_on_the_cpu() -> None:
    set_march(March.BAYES)
    model = CpuFirst().eval()
    arguments: dict[str, Any] = {"hybrid": True, "hybrid_dict": {"module_name": ["front"]}}
    traced = calibrate(prepare_qat_fx(model, {"": qconfig()}, **arguments), (X,))
    assert type(traced.front) is nn.Conv2d and isinstance(traced.conv, qat.Conv2d)
    by_running = prepare(model, (X,), qconfig_dict={"": qconfig()}, out_dir=None, **arguments)
    with torch.no_grad():
        wanted = as_numbers(traced(X))
        assert mismatches(as_numbers(calibrate(by_running, (X,))(X)), wanted) == 0
        assert mismatches(as_numbers(convert_fx(traced)(X)), wanted) == 0


class Steps(nn.Module):
    """The guide's model of step quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv0, self.conv1, self.conv2 = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        return self.dequant(self.conv2(self.conv1(self.conv0(self.quant(input)))))


def test_step_quantization() -> None:
    set_march(March.BAYES)
    model = Steps()
    traced = prepare_qat_fx(
        model, {"": default_qat_8bit_fake_quant_qconfig}, hybrid=True, hybrid_dict={"module_name": ["conv1"]}
    )
    model.qconfig, model.conv1.qconfig = default_qat_8bit_fake_quant_qconfig, None
    eager = prepare_qat(model, hybrid=True)
    for prepared in (traced, eager):
        assert isinstance(prepared.conv0, qat.Conv2d) and type(prepared.conv1) is nn.Conv2d
        assert prepared(X).shape == X.shape
    with pytest.raises(NotImplementedError, match="QTensor"):
        prepare_qat(model)(X)


def test_mistakes_are_named() -> None:
    set_march(March.BAYES)
    with pytest.raises(QuantizationConfigError, match="'conv9'"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict={"module_name": ["conv9"]})
    with pytest.raises(QuantizationConfigError, match="module_names"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict={"module_names": ["conv0"]})
    with pytest.raises(QuantizationConfigError, match="hybrid=True"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid_dict={"module_name": ["conv0"]})
    with pytest.raises(QuantizationConfigError, match="lists classes, such as nn.SiLU, got 'Conv2d'"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict={"module_type": ["Conv2d"]})
    with pytest.raises(QuantizationConfigError, match="must be a list"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict={"module_name": "conv0"})
    with pytest.warns(QuantizationWarning, match="no module of it"):
        prepare_qat_fx(_float(), {"": qconfig()}, hybrid=True, hybrid_dict={"module_type": [nn.GELU]})
    for method in PrepareMethod:
        with pytest.raises(QuantizationConfigError, match="hybrid=True"):
            prepare(_float(), (X,), method=method, hybrid_dict={"module_name": ["conv0"]}, out_dir=None)
    with pytest.raises(QuantizationConfigError, match="EAGER has no hybrid_dict"):
        prepare(_float(), (X,), None, "eager", hybrid=True, hybrid_dict=HYBRID, out_dir=None)


class Readers(nn.Module):
    """Results of the CPU with readers of all kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.quant, self.dequant, self.kind = QuantStub(), DeQuantStub(), kind
        self.conv, self.last, self.flat, self.relu = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Identity(), nn.ReLU()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "no stub":
            return self.dequant(self.last(F.selu(x + 1)))
        x = self.quant(x)
        y = F.selu(self.conv(x))
        match self.kind:
            case "handed out":
                return self.dequant(self.last(y)), y
            case "read on the CPU":
                return self.dequant(self.last(y)), F.selu(y)
            case "moved":
                z = self.flat(y).transpose(2, 3)[:, :, 2:]
                return self.dequant(self.last(z)), F.selu(z), y.argmax(1)
            case "moved by a module":
                return self.dequant(self.last(self.flat(y))), F.selu(self.flat(y)), self.dequant(self.flat(x))
            case "functions":
                return self.dequant(torch.sigmoid(y) + x), self.dequant(torch.cat([y, x, y], 1)), y
            case "fused":
                return self.dequant(self.last(self.relu(self.bn(self.conv(x)) + y))), y
            case "fused layer":
                return self.dequant(self.relu(self.bn(self.last(y)) + x)), y
            case "read again":  # one module, two results of the CPU
                return self.dequant(self.last(y)), self.dequant(self.last(F.selu(x))), y
            case _:  # in a loop
                for _ in range(2):
                    y = F.selu(self.last(y))
                return y


KINDS = [
    "handed out", "read on the CPU", "moved", "moved by a module", "functions", "fused", "fused layer", "read again",
    "loop", "no stub",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_only_quantized_operators_read_through_the_stub(kind: str) -> None:
    set_march(March.NASH_E)
    found = []
    for method in ("jit-strip", "symbolic"):
        torch.manual_seed(0)
        model = prepare(
            Readers(kind).eval(), (X,), qconfig_dict={"": qconfig()}, method=method, hybrid=True, out_dir=None
        )
        model = calibrate(model, (X,))
        with torch.no_grad():
            for same in (model, copy.deepcopy(model), (convert if method == "jit-strip" else convert_fx)(model)):
                found.append(same(X) if isinstance(same(X), tuple) else (same(X),))
    for out in found:
        assert all(type(x) is Tensor for x in out)
        assert mismatches(as_numbers(out), as_numbers(found[0])) == 0
    if kind == "no stub":
        return
    with torch.no_grad():  # what the CPU reads is not rounded again
        plain = F.selu(model.conv(model.quant(X)).dequantize())
    if kind in ("handed out", "functions", "fused", "fused layer", "read again"):
        assert torch.equal(found[-1][-1], plain)
    if kind == "read on the CPU":
        assert torch.equal(found[-1][1], F.selu(plain))


def test_a_shared_module_on_the_cpu() -> None:
    class Shared(Steps):
        def forward(self, input: Tensor) -> Tensor:
            return self.dequant(self.conv0(torch.sigmoid(self.conv0(self.quant(input)))))

    set_march(March.BAYES)
    found = []
    for method in ("jit-strip", "symbolic"):
        torch.manual_seed(0)
        model = prepare(
            Shared().eval(), (X,), method=method, qconfig_dict={"": qconfig()}, out_dir=None,
            hybrid=True, hybrid_dict={"module_name": ["conv0"]},
        )  # fmt: skip
        found.append(calibrate(model, (X,))(X))
    assert all(type(out) is Tensor for out in found) and torch.equal(*found)


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_the_check_knows_operators_of_the_cpu(method: str, capsys: pytest.CaptureFixture) -> None:
    set_march(March.BAYES)
    model = prepare(
        Steps().eval(), (X,), default_calibration_qconfig_setter, method, out_dir=None,
        hybrid=True, hybrid_dict={"module_name": ["conv1"]},
    )  # fmt: skip
    assert not check_qat_model(model, X - 0.5, save_results=False).mistakes


class Masked(nn.Module):
    """A mask of an operator of the CPU, which is False in all calibration data."""

    def __init__(self, is_joined: bool) -> None:
        super().__init__()
        self.quant, self.dequant, self.is_joined = QuantStub(), DeQuantStub(), is_joined

    def forward(self, x: Tensor) -> Tensor:
        y = self.quant(x)
        mask = torch.signbit(y)
        if self.is_joined:
            mask = mask & (y < 0)  # a quantized mask, which the CPU takes as booleans
        return self.dequant(torch.where(mask, y * 0.5, y))


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP])
def test_a_mask_that_is_false_in_calibration_is_a_mask(method: PrepareMethod, is_joined: bool) -> None:
    set_march(March.NASH_M)
    model = prepare(
        Masked(is_joined).eval(), (X,), qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None, hybrid=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(model, (X,))  # not negative
        quantized = convert(model)
    assert not mismatches(model(-X), quantized(-X))
    assert (quantized(-X) - Masked(is_joined)(-X)).abs().max() < 0.01


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT, PrepareMethod.JIT_STRIP])
def test_check_model_says_what_it_has_not_checked(method: PrepareMethod, capsys: pytest.CaptureFixture) -> None:
    set_march(March.BAYES)
    model = prepare(Masked(False).eval(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None, hybrid=True)
    quantized = convert(calibrate(model, (X,)))
    capsys.readouterr()
    assert check_model(quantized, (X,)) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "On the CPU, and not checked: `signbit`.",
        "Every operator on the BPU keeps the published formats and limits of bayes.",
    ]
