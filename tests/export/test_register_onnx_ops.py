"""Plain `torch.onnx.export` after `import horizon_plugin_pytorch.utils._register_onnx_ops`."""

from __future__ import annotations

import importlib
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantWrapper, convert_fx, set_fake_quantize
from tests.routes import prepared, run_onnx

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def test_torchs_export_writes_prepared_and_converted_models(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "export", torch.onnx.export)  # put back afterwards
    importlib.reload(importlib.import_module("horizon_plugin_pytorch.utils._register_onnx_ops"))
    qat = prepared(QuantWrapper(nn.Conv2d(3, 4, 3)), (IMAGE,))
    quantized = convert_fx(qat)
    for model in (qat, quantized):
        if model is qat:
            set_fake_quantize(qat, FakeQuantState.QAT)
        file = tmp_path / "model.onnx"
        torch.onnx.export(model, (IMAGE,), file, input_names=["image"], opset_version=11, do_constant_folding=True)
        found = onnx.load(file)
        assert [(x.name, found.opset_import[0].version) for x in found.graph.input] == [("image", 11)]
        with torch.no_grad():
            wanted = model(IMAGE)
        step = float(qat.module.activation_post_process.scale)
        assert (run_onnx(found, [IMAGE])[0] - wanted).abs().max() <= (1.01 * step if model is qat else 0)
    with pytest.raises(ExportError, match="dynamic_axes"):
        torch.onnx.export(quantized, (IMAGE,), tmp_path / "m.onnx", dynamic_shapes=({0: "batch"},))
    with pytest.raises(ExportError, match="path of the file"):
        torch.onnx.export(quantized, (IMAGE,))


def test_other_models_are_torchs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.onnx, "export", lambda model, args, f, **options: seen.append((model, options)))
    importlib.reload(importlib.import_module("horizon_plugin_pytorch.utils._register_onnx_ops"))
    layer = nn.Linear(2, 2)
    torch.onnx.export(layer, (torch.zeros(1, 2),), tmp_path / "m.onnx", opset_version=18)
    assert seen == [(layer, {"opset_version": 18})]
