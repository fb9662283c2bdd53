"""Setters in eager mode: the rules are those of the other methods, as far as the graph is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.conv2d import ConvAddReLU2d
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QconfigSetter,
    QuantStub,
    convert,
    explain,
    fuse_modules,
    get_qconfig,
    prepare,
    prepare_qat,
    reason_of,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import ConvDtypeTemplate, ModuleNameTemplate
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_qconfig_setter,
)
from tests.routes import calibrate

X = torch.linspace(-1, 1, 2 * 2 * 4 * 4).reshape(2, 2, 4, 4)


@pytest.fixture(autouse=True)
def nash() -> None:
    set_march(March.NASH_M)


class Net(nn.Module):
    """Float code before the stub, a block that is fused by hand, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.add = QuantStub(), DeQuantStub(), FloatFunctional()
        self.before, self.conv, self.head = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.bn, self.relu = nn.BatchNorm2d(2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(self.before(x))
        return self.dequant(self.head(self.relu(self.add.add(self.bn(self.conv(x)), x))))


def fused() -> nn.Module:
    return fuse_modules(Net(), ["conv", "bn", "add", "relu"])


def output(model: nn.Module, path: str) -> Any:
    quantizer = model.get_submodule(path).activation_post_process
    return None if quantizer is None else quantizer.dtype


def test_with_example_inputs_the_rules_are_those_of_the_other_methods() -> None:
    torch.manual_seed(0)
    model = fused()
    eager = prepare(model, (X,), default_calibration_qconfig_setter, "eager", out_dir=None)
    assert [output(eager, path) for path in ("quant", "add", "head")] == [qint8, qint8, None]
    assert isinstance(eager.get_submodule("add"), ConvAddReLU2d) and type(eager.before) is nn.Conv2d
    assert reason_of(eager, "head").startswith(
        "float32: high-precision output (int32); was int8 from default_calibration"
    )
    torch.manual_seed(0)
    by_running = prepare(Net(), (X,), default_calibration_qconfig_setter, out_dir=None)
    assert explain(eager)["add"] == explain(by_running)["add"]
    wanted = calibrate(by_running, (X,))(X)
    assert torch.equal(calibrate(eager, (X,))(X), wanted)
    assert torch.equal(convert(eager)(X), wanted)


def test_names_and_keyword_inputs() -> None:
    setters = (ModuleNameQconfigSetter({"quant": get_qconfig(out_dtype=qint16)}), default_qat_qconfig_setter)
    qat = prepare_qat(fused(), example_inputs=X, qconfig_setter=setters)
    assert [output(qat, path) for path in ("quant", "add", "head")] == [qint16, qint8, None]
    by_keyword = prepare(fused(), None, setters, "eager", example_kw_inputs={"x": X}, out_dir=None)
    assert output(by_keyword, "head") is None
    with pytest.raises(QuantizationConfigError, match=r"'hed'.*'head'"):
        prepare_qat(fused(), example_inputs=X, qconfig_setter=ModuleNameQconfigSetter({"hed": get_qconfig()}))


def test_without_example_inputs_modules_are_all_that_is_known() -> None:
    with pytest.warns(QuantizationWarning, match="without example_inputs"):
        qat = prepare_qat(fused(), qconfig_setter=calibration_8bit_weight_16bit_act_qconfig_setter)
    assert {output(qat, path) for path in ("quant", "add", "head", "before")} == {qint16}


def test_coordinates_are_int16() -> None:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.offset, self.act = QuantStub(), nn.Conv2d(2, 2, 1), nn.Tanh()
            self.dequant = DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            grid = self.act(self.offset(x)).permute(0, 2, 3, 1)
            return self.dequant(F.grid_sample(x, grid, align_corners=False))

    qat = prepare_qat(Sampler(), example_inputs=(X,), qconfig_setter=default_calibration_qconfig_setter)
    assert [output(qat, path) for path in ("quant", "offset", "act")] == [qint8, qint16, qint16]


def test_an_input_that_cannot_be_made_is_warned_of() -> None:
    templates = [ModuleNameTemplate({"": qint16}), ConvDtypeTemplate(qint8, qint8)]
    with pytest.warns(QuantizationWarning, match="`1.conv` takes inputs as they come"):
        prepare_qat(
            nn.Sequential(QuantStub(), Twice(), DeQuantStub()),
            example_inputs=(X,),
            qconfig_setter=QconfigSetter(get_qconfig(), templates, save_dir=None),
        )


class Twice(nn.Module):
    """One result for a layer and for a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.sum = nn.Conv2d(2, 2, 1), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum.add(self.conv(x), x)
