"""Files with int8 kernels throughout: what they say of themselves is so."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_fast import METADATA
from horizon_plugin_pytorch.quantization import QuantStub, convert_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import prepared
from tests.sequences.comparison import LEVELS, THREADS, open_session


class Net(nn.Module):
    """A residual after a convolution, with or without ReLU, and a sum of two convolutions; gives integers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.quant, self.form = QuantStub(), form
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.second, self.third = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.quant(x))
        if self.form == "plain":
            return self.third(self.second(x))
        if self.form == "residual":
            return self.second(x) + x
        if self.form == "residual and relu":
            return self.relu(self.second(x) + x)
        return x + self.relu(self.third(self.second(x)))


X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def converted(form: str, dtype: str = "qint8") -> nn.Module:
    torch.manual_seed(0)
    return convert_fx(prepared(Net(form).eval(), (X,), dtype))


def written(report: Any) -> dict[str, Any]:
    return json.loads({entry.key: entry.value for entry in report.model.metadata_props}[METADATA])


def outputs(file: onnx.ModelProto, level: str = "enable_all", threads: int = 1) -> Tensor:
    session = open_session(file.SerializeToString(), level, threads)
    return torch.from_numpy(np.asarray(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]))


def test_a_network_whose_layers_are_all_proved_is_said_to_be_exact(tmp_path: Path) -> None:
    model = converted("plain")
    report = export_quantized_onnx(model, X, tmp_path / "m.onnx", fast=True)
    assert report.is_exact and report.differing == 0 and not report.layers and report.share == 0
    assert "exact" in str(report)
    assert written(report)["is_exact"] is True and written(report)["integers"] == report.integers > 0
    assert onnx.load(tmp_path / "m.onnx") == report.model
    wanted = model(X).int_repr()
    assert all(torch.equal(outputs(report.model, level, n), wanted) for level in LEVELS for n in THREADS)


@pytest.mark.parametrize("form", ["residual", "residual and relu", "sum"])
def test_what_differs_is_counted_named_and_written(form: str) -> None:
    model = converted(form)
    report = export_quantized_onnx(model, X, io.BytesIO(), fast=True)
    assert not report.is_exact and len(report.layers) == 1 and "add" in next(iter(report.layers))
    assert 0 <= report.share < 0.5 and next(iter(report.layers)) in str(report)
    known = written(report)
    assert (
        known["layers"] == report.layers and known["share"] == report.share and "ONNX Runtime" in known["checked_with"]
    )
    wanted = model(X).int_repr().int()
    for level in LEVELS:
        steps = (outputs(report.model, level).int() - wanted).abs()
        assert int(steps.max()) <= 1, level  # one rounding more than the model
    if form != "sum":  # the count is of the integers inside, and these are the last of them
        assert report.differing == int((outputs(report.model).int() != wanted).sum()) > 0


@pytest.mark.parametrize("form", ["residual", "residual and relu", "sum"])
def test_layers_take_int8_kernels(form: str) -> None:
    kinds = [n.op_type for n in export_quantized_onnx(converted(form), X, io.BytesIO(), fast=True).model.graph.node]
    assert "Conv" not in kinds and "Floor" not in kinds and "QLinearConv" in kinds


def test_int16_stays_exact() -> None:
    model = converted("residual", "qint16")
    report = export_quantized_onnx(model, X, io.BytesIO(), fast=True)
    assert report.is_exact and report.differing == 0
    assert torch.equal(outputs(report.model), model(X).int_repr())


def test_every_batch_size() -> None:
    model = converted("residual")
    report = export_quantized_onnx(
        model, X, io.BytesIO(), input_names=["x"], dynamic_axes={"x": {0: "batch"}}, fast=True
    )
    session = open_session(report.model.SerializeToString(), "enable_all", 1)
    for count in (1, 5):
        images = X[:1].expand(count, -1, -1, -1).contiguous()
        steps = session.run(None, {"x": images.numpy()})[0].astype(int) - model(images).int_repr().numpy()
        assert abs(steps).max() <= 1


def test_an_opset_without_clamped_bytes_is_refused() -> None:
    with pytest.raises(ExportError, match="opset 12"):
        export_quantized_onnx(converted("plain"), X, io.BytesIO(), opset_version=11, fast=True)
