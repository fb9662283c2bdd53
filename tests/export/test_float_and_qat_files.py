"""Files of float and QAT models: ONNX Runtime gives what the model gives, and the file shows its scales."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import CalibrationWarning, ExportError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import BevPoolV2
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert_fx,
    fuse_modules,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx
from tests.models import make
from tests.routes import calibrate, prepared, qconfig, run_onnx
from tests.sequences.comparison import open_session
from tests.tiers import in_soak

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.lstm = nn.LSTM(4, 6, bidirectional=True)
        self.gru = nn.GRU(12, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.quant(x))
        out, _ = self.gru(out)
        return self.dequant(self.head(out))


def _net(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name != "recurrent":
        return make(name)
    torch.manual_seed(0)
    return Recurrent().eval(), (torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(1)),)


@functools.lru_cache(maxsize=2)  # one model for all opsets
def _prepared_net(name: str, dtype: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = _net(name)
    return prepared(model, inputs, dtype), inputs


def _export(model: nn.Module, inputs: Any, opset: int = 11, **options: Any) -> onnx.ModelProto:
    return export_to_onnx(model, inputs, io.BytesIO(), opset_version=opset, **options)


def _leaves(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _assert_close(found: list[Tensor], outputs: Any, steps: float = 1.0) -> None:
    """Real values within a step of their grid, float values within 1e-5 of the largest, others equal."""
    for x, out in zip(found, _leaves(outputs), strict=True):
        if isinstance(out, QTensor) and out.dtype != qbool:
            wanted, scale = out.dequantize(), out.scale.max()
            assert (x - wanted).abs().max() <= (steps + 1e-2) * scale
        elif isinstance(out, QTensor) or not out.is_floating_point():
            assert torch.equal(x, out.plain() if isinstance(out, QTensor) else out)
        else:
            torch.testing.assert_close(x, out, rtol=1e-5, atol=1e-5 * float(out.abs().max()), equal_nan=True)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
@pytest.mark.parametrize("name", ["resnet", "mobilenet", "vit", "recurrent"])
def test_a_float_file_gives_what_the_model_gives(name: str, opset: int) -> None:
    model, inputs = _net(name)
    file = _export(model, inputs, opset)
    assert [(i.domain, i.version) for i in file.opset_import] == [("", opset)]
    with torch.no_grad():
        for optimization in ("off", "on"):
            _assert_close(run_onnx(file, inputs, optimization), model(*inputs))


_NETS = ("resnet", "mobilenet", "vit", "recurrent")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "opset", "dtype"), [
    *itertools.chain(*(((name, 11, "qint8"), (name, 21, "qint16")) for name in _NETS)),
    ("resnet", 13, "qint8"),
    *in_soak(*itertools.chain(*(((name, 11, "qint16"), (name, 21, "qint8")) for name in _NETS))),
    *in_soak(*((name, 13, "qint8") for name in _NETS[1:])),
])  # fmt: skip
def test_a_qat_file_gives_what_training_gives(name: str, opset: int, dtype: str) -> None:
    qat, inputs = _prepared_net(name, dtype)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    step = float(qat(*inputs).detach().abs().max()) / (127 if dtype == "qint8" else 32767)
    exact = _export(qat, inputs, opset)
    set_fake_quantize(qat, FakeQuantState.QAT)
    trained = _export(qat, inputs, opset)
    assert trained.SerializeToString() == exact.SerializeToString()  # both states are written as the model trains
    with torch.no_grad():
        wanted = qat(*inputs)
    for optimization in ("off", "on"):
        # The default opset is safe from the int8 kernels that ONNX Runtime puts in, which round otherwise.
        (found,) = run_onnx(trained, inputs, optimization, int8_kernels=opset == 11)
        # Sums of floats are other ones on each processor: in a network of int16 a tie on the way is a step more.
        assert (found - wanted).abs().max() <= (1.01 if dtype == "qint8" else 2.05) * step
    assert {node.domain for node in trained.graph.node} == {""}


def test_nothing_is_rounded_in_a_file_of_calibration() -> None:
    model, inputs = make("resnet")
    qat = prepared(copy.deepcopy(model), inputs)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    file = _export(qat, inputs)
    assert not {"QuantizeLinear", "Round"} & {node.op_type for node in file.graph.node}
    with torch.no_grad():
        _assert_close(run_onnx(file, inputs), qat(*inputs))


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_scales_are_in_the_file(opset: int) -> None:
    qat = prepared(QuantWrapper(nn.Conv2d(3, 4, 3)), (IMAGE,))
    file = _export(qat, IMAGE, opset)
    constants = {x.name: onnx.numpy_helper.to_array(x) for x in file.graph.initializer}
    nodes = {node.output[0]: node for node in file.graph.node}
    assert {"quant/activation_post_process/QuantizeLinear", "module/Conv"} <= {node.name for node in file.graph.node}
    weight = nodes[nodes["module/Conv"].output[0]].input[1]
    scales = [constants[name] for name in nodes[weight].input if name in constants]
    wanted = qat.module.weight_fake_quant.scale.numpy()
    assert any(s.size == 4 and (s.ravel() == wanted).all() for s in scales)
    assert (nodes[weight].op_type == "DequantizeLinear") == (opset >= 13)
    stored = [x for x in constants.values() if x.shape == (4, 3, 3, 3)]
    assert [x.dtype for x in stored] == ["int8"]
    (quantize,) = [node for node in file.graph.node if node.name == "quant/activation_post_process/QuantizeLinear"]
    assert float(constants[quantize.input[1]]) == float(qat.quant.activation_post_process.scale)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.pool(self.relu(self.conv(self.quant(x))))
        return {"features": self.dequant(x), "grid": x}


def _prepared_by(method: str) -> nn.Module:
    torch.manual_seed(1)
    model = Small().eval()
    if method == "eager":
        fuse_modules(model, ["conv", "relu"], inplace=True)
        model.qconfig = qconfig()
        return calibrate(prepare_qat(model), (IMAGE,))
    if method == "fx":
        return prepared(model, (IMAGE,))
    for module in model.modules():
        module.qconfig = qconfig()
    return calibrate(prepare(model, IMAGE, method=PrepareMethod[method]), (IMAGE,))


@pytest.mark.parametrize("method", ["fx", "eager", "JIT", "JIT_STRIP", "EAGER"])
def test_models_of_every_method_are_written(method: str) -> None:
    qat = _prepared_by(method)
    before = {name: x.clone() for name, x in qat.state_dict().items()}
    set_fake_quantize(qat, FakeQuantState.QAT)
    file = _export(qat, {"x": IMAGE})
    assert [x.name for x in file.graph.input] == ["x"] and [x.name for x in file.graph.output] == ["features", "grid"]
    assert "MaxPool" in [node.op_type for node in file.graph.node]
    with torch.no_grad():
        wanted = qat(IMAGE)
        _assert_close(run_onnx(file, [IMAGE]), [wanted["grid"], wanted["grid"]])
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert all(torch.equal(x, before[name]) for name, x in qat.state_dict().items() if "observer" not in name)


ROWS = torch.tensor([0, 2, -1, 2, 1])  # one comes three times
SPREAD = torch.tensor([0, 2, 2, 3, 1]).reshape(1, 5, 1).expand(2, 5, 3)
KEPT = torch.tensor([True, False, True, True])


def _scattered(x: Tensor, reduce: str, include_self: bool) -> Tensor:
    return x.scatter_reduce(1, SPREAD, torch.cat([x, x + 1], 1), reduce, include_self=include_self)


def _lifted(x: Tensor) -> Tensor:
    depth, feat = x.reshape(1, 1, 2, 4, 3).softmax(2), (torch.arange(60.0) * x.mean()).reshape(1, 1, 4, 3, 5)
    ranks, cells = torch.tensor([0, 1, 5, 7, 20]), torch.tensor([1, 1, 1, 3, 3])
    return BevPoolV2()(
        depth, feat, ranks, ranks // 2, cells, torch.tensor([0, 3]), torch.tensor([3, 2]), (1, 1, 2, 2, 5)
    )


WRITES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "added": (16, lambda x: x.index_put((ROWS % 2, ROWS), x[0, :1].expand(5, 3), accumulate=True)),
    "added to rows": (16, lambda x: x[0].index_put((ROWS,), x[1, :1], accumulate=True)),
    "slices": (16, lambda x: x.index_add(1, ROWS % 4, torch.cat([x, x], 1)[:, :5], alpha=2)),
    "scatter_add": (16, lambda x: x.scatter_add(1, SPREAD, torch.cat([x, x], 1))),
    **{
        f"{name}, {kept}": (opset, functools.partial(_scattered, reduce=name, include_self=kept))
        for opset, names in ((16, ("sum", "prod", "mean")), (18, ("amax", "amin")))
        for name in names
        for kept in (True, False)
    },
    "kept": (11, lambda x: x[:, KEPT]),
    "kept of two axes": (11, lambda x: x[torch.stack([KEPT, ~KEPT])]),
    "row by mask": (11, lambda x: x.index_put((x[:, :, 0] > 0,), x[0, 0])),
    "added by mask": (11, lambda x: x.index_put((x[:, :, 0] > 0,), x[:1, 0], accumulate=True)),
    "a view from above": (11, _lifted),
}  # fmt: skip


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_positions(name: str) -> None:
    """Also several to one position, with one and two threads; below the opset that has them, its number is told."""
    opset, function = WRITES[name]
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    file = export_to_onnx(Written(function), x, io.BytesIO(), opset_version=opset, input_names=["x"])
    for level, threads in (("disable_all", 1), ("enable_all", 2)):
        session = open_session(file.SerializeToString(), level, threads)
        for batch in (x, -2 * x):
            given = torch.from_numpy(session.run(None, {"x": batch.numpy()})[0])
            assert torch.allclose(given, function(batch), atol=1e-5), (level, threads)
    if opset > 11:
        with pytest.raises(ExportError, match=rf"opset_version={opset}"):
            export_to_onnx(Written(function), x, io.BytesIO(), opset_version=opset - 1)


class Masked(nn.Module):
    """Scores that a mask leaves out of a softmax."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.quant, self.dequant, self.number = QuantStub(), DeQuantStub(), number

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.dequant(torch.softmax(self.quant(x).masked_fill(mask, self.number), -1))


@pytest.mark.parametrize("number", [-1e4, -torch.inf])
def test_masked_scores(number: float) -> None:
    """Numbers that stand for infinity are bounded by what was calibrated, not by the values of one batch."""
    mask = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.7
    inputs = (torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(5)), mask)
    qat = prepared(Masked(number), inputs)
    file = _export(qat, inputs, 17)
    for batch in (inputs, (3 * inputs[0], ~mask)):
        _assert_close(run_onnx(file, batch, "on"), qat(*batch))


def test_arguments_that_change_nothing_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.warns(QuantizationWarning, match="weights are always written"):
        _export(model, IMAGE, export_params=False)
    with pytest.warns(QuantizationWarning, match="in eval mode"):
        _export(model, IMAGE, training=torch.onnx.TrainingMode.TRAINING)
    with pytest.warns(QuantizationWarning, match="keep_initializers_as_inputs"):
        _export(model, IMAGE, keep_initializers_as_inputs=True)
    with pytest.warns(QuantizationWarning, match="custom_opsets"):
        _export(model, IMAGE, custom_opsets={"mine": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _export(
            model, IMAGE, training=torch.onnx.TrainingMode.EVAL, do_constant_folding=True, strip_doc_string=True,
            operator_export_type=torch.onnx.OperatorExportTypes.ONNX_FALLTHROUGH, enable_onnx_checker=False,
        )  # fmt: skip
        _export(model, IMAGE, operator_export_type=None)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_what_has_no_form_is_refused_with_module_line_and_remedy() -> None:
    with pytest.raises(ExportError, match=r"at `0` \(test_float_and_qat_files.py:\d+\).*torch.where"):
        _export(nn.Sequential(Chooses()), IMAGE)


def test_a_converted_model_is_written_too() -> None:
    quantized = convert_fx(prepared(QuantWrapper(nn.Conv2d(3, 4, 3)), (IMAGE,)))
    file = _export(quantized, IMAGE)
    with torch.no_grad():
        assert torch.equal(run_onnx(file, [IMAGE])[0], quantized(IMAGE))


def test_onnx_runtime_does_not_round_weights_again() -> None:
    """Its optimiser takes weights without a DequantizeLinear for float ones, and gives all channels one scale."""
    set_march(March.BAYES)
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.data.mul_(torch.tensor([1.0, 1e-2, 1e-3, 1e-4]).reshape(4, 1, 1, 1))
    qat = prepared(QuantWrapper(nn.Sequential(layer, nn.ReLU())), (IMAGE,))
    file = _export(qat, IMAGE, 11)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": IMAGE.numpy()})
    assert torch.equal(torch.from_numpy(found), run_onnx(file, [IMAGE])[0])


def test_a_model_that_has_seen_no_data_is_told_and_its_weights_are_looked_at() -> None:
    qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 3)), {"": qconfig()}).eval()
    set_fake_quantize(qat, FakeQuantState.QAT)
    with pytest.warns(CalibrationWarning, match="no data have reached `quant`, `module`"):
        file = _export(qat, IMAGE, 13)
    (weight,) = [onnx.numpy_helper.to_array(x) for x in file.graph.initializer if x.dims == [4, 3, 3, 3]]
    assert abs(weight).max() == 127
