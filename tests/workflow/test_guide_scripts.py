"""The tuning guide's scripts with setters, in their own shape: calibrate, train, mix formats."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    PrepareMethod,
    QconfigSetter,
    QuantStub,
    get_qconfig,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.observer_v2 import MinMaxObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_qconfig_setter,
    qat_8bit_weight_16bit_act_qconfig_setter,
    sensitive_op_8bit_weight_16bit_act_calibration_setter,
    sensitive_op_8bit_weight_16bit_act_qat_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
    sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), torch.quantization.DeQuantStub()
        self.conv1, self.op_1, self.head = nn.Conv2d(2, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.op_1(self.conv1(self.quant(x)))
        return self.dequant(self.head(x + torch.sigmoid(x)))


model_input = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    set_march(March.NASH_M)
    monkeypatch.chdir(tmp_path)
    rows = [(name, "activation", "op", metric, "qint8") for name, metric in (("conv1", 2.0), ("quant", 1.0))]
    rows += [(name, "activation", "op", 0.1, "qint8") for name in ("op_1", "_generated_add_0", "_generated_sigmoid_0")]
    torch.save(rows, "output_0-0_dataindex_1_sensitive_ops.pt")
    return torch.load("output_0-0_dataindex_1_sensitive_ops.pt", weights_only=True)


def calibrate_and_train(calibration: Any, training: Any) -> tuple[nn.Module, nn.Module]:
    """The guide's two steps; the calibrated state goes to the model that is trained."""
    float_model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        calib_model = prepare(float_model, example_inputs=(model_input,), qconfig_setter=calibration)
        calib_model.eval()
        set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
        calib_model(model_input)
        calib_model.eval()
        set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
        calib_model(model_input)
        qat_model = prepare(
            copy.deepcopy(float_model),
            example_inputs=(model_input,),
            qconfig_setter=training,
            method=PrepareMethod.JIT_STRIP,
        )
    missing, unexpected = qat_model.load_state_dict(calib_model.state_dict(), strict=False)
    assert not missing and not unexpected
    qat_model.train()
    set_fake_quantize(qat_model, FakeQuantState.QAT)
    qat_model(model_input).sum().backward()
    assert Path("model_check_result.txt").is_file() and Path("fx_graph.txt").is_file()
    return calib_model, qat_model


def output(model: nn.Module, path: str) -> Any:
    return model.get_submodule(path).activation_post_process.dtype


def test_int8_and_int16_by_sensitivity(table: Any) -> None:
    for model in calibrate_and_train(
        (
            sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, ratio=0.2),
            default_calibration_qconfig_setter,
        ),
        (sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter(table, ratio=0.2), default_qat_qconfig_setter),
    ):
        assert [output(model, path) for path in ("quant", "conv1", "op_1")] == [qint8, qint16, qint8]
        assert model.get_submodule("head").activation_post_process is None


def test_int16_and_float16_by_name(table: Any) -> None:
    module_name_to_qconfig = {
        "op_1": get_qconfig(in_dtype=torch.float16, weight_dtype=torch.float16, out_dtype=torch.float16),
    }
    for model in calibrate_and_train(
        (ModuleNameQconfigSetter(module_name_to_qconfig), calibration_8bit_weight_16bit_act_qconfig_setter),
        (ModuleNameQconfigSetter(module_name_to_qconfig), qat_8bit_weight_16bit_act_qconfig_setter),
    ):
        assert isinstance(model.get_submodule("op_1"), Float16) and output(model, "conv1") == qint16


def test_int8_int16_and_float16(table: Any) -> None:
    by_name = ModuleNameQconfigSetter({"op_1": get_qconfig(None, torch.float16, torch.float16, torch.float16)})
    for model in calibrate_and_train(
        (
            by_name,
            sensitive_op_8bit_weight_16bit_act_calibration_setter(table, ratio=0.2),
            default_calibration_qconfig_setter,
        ),
        (by_name, sensitive_op_8bit_weight_16bit_act_qat_setter(table, ratio=0.2), default_qat_qconfig_setter),
    ):
        assert isinstance(model.get_submodule("op_1"), Float16) and output(model, "conv1") == qint16


def test_new_templates(table: Any) -> None:
    def setter(reference: Any) -> QconfigSetter:
        return QconfigSetter(
            reference_qconfig=reference,
            templates=[
                ModuleNameTemplate({"": qint8}),
                ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8),
                MatmulDtypeTemplate(input_dtypes=qint8),
                SensitivityTemplate(
                    sensitive_table=table,
                    topk_or_ratio=1,
                    sensitive_type="activation",
                    low_precision_dtype=qint8,
                    high_precision_dtype=qint16,
                ),
            ],
        )

    reference = get_qconfig(observer=MinMaxObserver, in_dtype=qint8, weight_dtype=qint8, out_dtype=qint8)
    for model in calibrate_and_train(setter(get_qconfig()), setter(reference)):
        assert [output(model, path) for path in ("quant", "conv1", "op_1")] == [qint8, qint16, qint8]
    assert Path("qconfig_changelogs.txt").is_file() and Path("qconfig_dtypes.pt").is_file()
