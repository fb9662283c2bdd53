"""Setters on whole models: however the graph was captured, and down to the integers."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.capture.region import quantized_nodes
from horizon_plugin_pytorch.config.graph_view import PLACEHOLDER, GraphView
from horizon_plugin_pytorch.config.resolve import resolve_qconfigs
from horizon_plugin_pytorch.config.setters import (
    apply_setters,
    default_calibration_qconfig_setter,
    default_qat_fixed_act_qconfig_setter,
    default_qat_qconfig_setter,
    qat_8bit_weight_16bit_fixed_act_qconfig_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
    sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter,
)
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.passes.fuse import fuse_graph
from horizon_plugin_pytorch.passes.own_scales import OwnScales
from horizon_plugin_pytorch.passes.preparation import RecordedPreparation
from horizon_plugin_pytorch.passes.replace import replace_functions
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QconfigSetter,
    QuantStub,
    default_qat_8bit_fake_quant_qconfig,
    explain,
    get_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate
from horizon_plugin_pytorch.workflow.prepare import Captured
from tests.models import ZOO, make
from tests.routes import assert_one_arithmetic, calibrate

SETTERS = {"int8": default_qat_fixed_act_qconfig_setter, "int16": qat_8bit_weight_16bit_fixed_act_qconfig_setter}


@pytest.mark.in_turns("march", "setter", "name")
@pytest.mark.slow
@pytest.mark.parametrize("march", [March.BAYES, March.NASH_M], ids=str)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("name", ZOO)
def test_models_have_one_arithmetic(name: str, setter: str, march: March, tmp_path: Path) -> None:
    set_march(march)
    model, inputs = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        qat = calibrate(prepare_qat_fx(model, qconfig_setter=SETTERS[setter]), inputs)
    assert_one_arithmetic(qat, inputs, tmp_path, has_float_code=name == "surrounded")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.head = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.head((self.bn(self.conv(x)) + x).sigmoid() * 2.0))


X = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def test_a_recorded_graph_gets_the_same_choices_as_a_traced_one() -> None:
    setter = (QconfigSetter(get_qconfig(), [ModuleNameTemplate({"bn": qint16})], save_dir=None),)
    traced = prepare_qat_fx(Net(), qconfig_setter=setter).__dict__["choices"]
    model = Net()
    captured: Any = Captured(model, record(model, (X,)))
    choices = resolve_qconfigs(model, {"": PLACEHOLDER})
    region = quantized_nodes(captured)
    prep = RecordedPreparation(captured, March.BAYES, OwnScales(), region, choices)
    replace_functions(prep)
    fuse_graph(prep)
    view = GraphView(captured, captured.graph, region, choices)
    apply_setters(view, setter)
    assert [operator.path for operator in view] == [
        "quant",
        "_generated_add_0",
        "_generated_sigmoid_0",
        "_generated_mul_0",
        "head",
    ]
    for operator in view:
        assert choices[operator.path] == traced[operator.path]
    assert [operator.path for operator in view.producers(view["_generated_add_0"])] == ["quant"]
    assert view.is_output(view["head"]) and not view.is_output(view["quant"])


def test_reasons_survive_copies_and_pickles(capsys: pytest.CaptureFixture) -> None:
    qat = prepare_qat_fx(Net(), qconfig_setter=SETTERS["int8"])
    wanted = explain(qat)
    assert explain(copy.deepcopy(qat)) == wanted
    assert explain(pickle.loads(pickle.dumps(qat))) == wanted
    assert wanted["dequant"] == ("gives real numbers",)


def test_a_calibrated_checkpoint_loads_into_training() -> None:
    table = [["_generated_mul_0", "activation", "", 1.0, "qint8"]]
    calib = prepare_qat_fx(
        Net(),
        qconfig_setter=(
            sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, topk=1),
            default_calibration_qconfig_setter,
        ),
    )
    calibrate(calib, (X,))
    qat = prepare_qat_fx(
        Net(),
        qconfig_setter=(
            sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter(table, ratio=1.0),
            default_qat_fixed_act_qconfig_setter,
        ),
    )
    qat.load_state_dict(calib.state_dict())  # all keys match
    assert torch.equal(qat.eval()(X), calib(X))
    set_fake_quantize(qat.train(), FakeQuantState.QAT)
    qat(3 * X).sum().backward()
    for path, module in qat.named_modules():
        if path.endswith("activation_post_process") and isinstance(module, FakeQuantize):
            assert torch.equal(module.scale, calib.get_submodule(path).scale), path


def test_a_setter_under_an_attribute_of_the_whole_model_is_warned_of() -> None:
    model = Net()
    model.qconfig = default_qat_8bit_fake_quant_qconfig
    with pytest.warns(QuantizationWarning, match="the setter changes nothing"):
        qat = prepare_qat_fx(model, qconfig_setter=SETTERS["int16"])
    assert qat.get_submodule("quant").activation_post_process.dtype == qint8


def test_a_result_that_nobody_reads_is_no_output() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor, with_state: bool = False) -> Any:
            y, state = self.gru(self.quant(x))
            y = self.dequant(self.head(y))
            return (y, self.dequant(state)) if with_state else y

    x = torch.randn(2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepare(Recurrent().eval(), (x,), default_qat_qconfig_setter, out_dir=None)
    with pytest.warns(QuantizationWarning, match="outputs that are not in high precision: `gru`"):
        prepare(Recurrent().eval(), (x, True), default_qat_qconfig_setter, out_dir=None)
