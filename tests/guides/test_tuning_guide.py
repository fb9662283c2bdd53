"""The scripts of the tuning guide, as printed, one after another on one network: each reads what those before wrote."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    get_qconfig,
    prepare,
    qconfig_template,
    set_fake_quantize,
)
from tests.guides.test_development_guide import run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.bn, self.relu = QuantStub(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.op_1, self.head, self.boxes = nn.Sigmoid(), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 2, 1)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.op_1(self.relu(self.bn(self.conv(self.quant(x)))))
        x = x + x.mean((2, 3), keepdim=True)
        return self.dequant(self.head(x)), self.dequant(self.boxes(x)), self.dequant(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net = Net().eval()
    dataloader = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    setters: dict[str, Any] = {name: getattr(qconfig_template, name) for name in qconfig_template.__all__}
    calibration = prepare(copy.deepcopy(net), dataloader[0], setters["default_calibration_qconfig_setter"])
    set_fake_quantize(calibration.eval(), FakeQuantState.CALIBRATION)
    for batch in dataloader:
        calibration(batch)
    set_fake_quantize(calibration, FakeQuantState.VALIDATION)
    models = {"float_net": net, "calibration_model": calibration, "dataloader": dataloader}

    folder = tmp_path / "horizon_quant_analysis"
    run("tuning_find_bad_case", **models)
    lines = (folder / "badcase.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["0-0", "0-1", "0-2"]  # as the guide prints three outputs
    assert {path.name for path in folder.iterdir()} == {"badcase.txt", "badcase_report.html", "all_badcase_info.pt"}
    run("tuning_compare_per_layer", **models)
    rows = (folder / "compare_per_layer_out.txt").read_text().splitlines()
    assert "torch.nn.modules.linear.Identity" in next(row for row in rows if "| bn " in row)
    assert not list(folder.glob("*sensitive_ops*"))
    run("tuning_sensitivity", **models)
    table = torch.load(folder / "output_0-0_L1_sensitive_ops.pt")
    assert {row[1] for row in table} == {"activation", "weight"}

    names = {
        "prepare": prepare, "torch": torch, "get_qconfig": get_qconfig, **setters,
        "model": net, "example_input": dataloader[0], "table": table,
    }  # fmt: skip
    first = next(row[0] for row in table if row[1] == "activation")
    for script in ("tuning_int8_int16", "tuning_int16_fp16", "tuning_int8_int16_fp16"):
        model = run(script, **names).qat_model
        quantizer = model.get_submodule(first).activation_post_process
        assert str(quantizer.dtype) == "qint16" or first == "op_1"
        assert (str(model.op_1.activation_post_process.dtype) == "torch.float16") == ("fp16" in script)
