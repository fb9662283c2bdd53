"""The routes that a model can take to its integers, and the check that they all arrive at the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    PrepareMethod,
    convert,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

OPTIMIZATION = {
    "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "on": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def qconfig(dtype: str = "qint8") -> Any:
    """Scales stay at what the first batch gave, so that training and validation can be compared."""
    return get_default_qconfig(activation_qkwargs={"dtype": dtype, "averaging_constant": 0})


def calibrate(qat: nn.Module, inputs: Sequence[Any]) -> nn.Module:
    """Run one batch in the CALIBRATION state; the model is left in VALIDATION and eval."""
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(*inputs)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat


def prepared(model: nn.Module, inputs: Sequence[Any], dtype: str = "qint8", **qconfig_dict: Any) -> nn.Module:
    """A calibrated QAT model in the VALIDATION state."""
    return calibrate(prepare_qat_fx(model, {"": qconfig(dtype), **qconfig_dict}), inputs)


def prepared_on(route: str, model: nn.Module, inputs: Sequence[Any], dtype: str = "qint8") -> nn.Module:
    """A QAT model that has seen nothing.

    Args:
        route: "eager", "traced" or "wrapped" (tracing that does not enter some of the model's code), or a name of
            `PrepareMethod`.
    """
    if route == "eager":
        model.qconfig = qconfig(dtype)  # type: ignore[assignment]
        return prepare_qat(model, inplace=False)
    if route in ("traced", "wrapped"):
        return prepare_qat_fx(model, {"": qconfig(dtype)})
    return prepare(model, tuple(inputs), qconfig_dict={"": qconfig(dtype)}, method=PrepareMethod[route], out_dir=None)


def as_numbers(outputs: Any) -> list[Tensor]:
    """Outputs as ordinary tensors: integers in their storage type, or float."""
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return [x.int_repr() if isinstance(x, QTensor) else x.detach() for x in leaves]


def mismatches(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """How many numbers differ; shapes and types must not."""
    assert [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in b]
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


def session_of(model: onnx.ModelProto, optimization: str = "off", int8_kernels: bool = True) -> ort.InferenceSession:
    """Stock ONNX Runtime on one thread.

    Args:
        int8_kernels: may it replace layers between QuantizeLinear and DequantizeLinear by kernels of its own?
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION[optimization]
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not int8_kernels:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(session: ort.InferenceSession, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a file, given its inputs in order."""
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(np.asarray(x)) for x in session.run(None, feed)]


def run_onnx(
    model: onnx.ModelProto, inputs: Sequence[Tensor], optimization: str = "off", int8_kernels: bool = True
) -> list[Tensor]:
    """The file's outputs in a session of its own."""
    return run_session(session_of(model, optimization, int8_kernels), inputs)


def assert_one_arithmetic(
    qat: nn.Module,
    inputs: Sequence[Tensor],
    tmp_path: Any,
    batches: Sequence[Any] = (),
    has_float_code: bool = False,
    record: Callable[[int], None] | None = None,
) -> nn.Module:
    """QAT in VALIDATION == converted == ONNX Runtime, optimised or not, integer for integer; gives the converted model.

    Args:
        batches: more inputs to compare on.
        has_float_code: the model computes with float after its DeQuantStub, where ONNX Runtime has its own kernels:
            float outputs are compared to six digits, integers as ever.
        record: gets the number of mismatches, before anything is asserted of it.
    """
    different: dict[str, int] = {}
    quantized = convert_fx(qat) if isinstance(qat, fx.GraphModule) else convert(qat)
    file = tmp_path / "model.onnx"
    model = export_quantized_onnx(quantized, tuple(inputs), file)
    onnx.checker.check_model(onnx.load(file), full_check=True)
    assert {i.domain for i in model.opset_import} == {""} and {n.domain for n in model.graph.node} == {""}
    sessions = {optimization: session_of(model, optimization) for optimization in OPTIMIZATION}
    for batch in (inputs, *batches):
        with torch.no_grad():
            trained, integers = as_numbers(qat(*batch)), as_numbers(quantized(*batch))
        _count(different, "QAT and converted model", mismatches(trained, integers))
        for optimization, session in sessions.items():
            found = run_session(session, pytree.tree_leaves(tuple(batch)))
            if has_float_code:
                close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(integers, found, strict=True)]
                found = [
                    a if a.is_floating_point() and ok else b for a, b, ok in zip(integers, found, close, strict=True)
                ]
            _count(different, f"converted and ONNX Runtime, {optimization}", mismatches(integers, found))
    if record is not None:
        record(sum(different.values()))
    assert not any(different.values()), different
    return quantized


def _count(different: dict[str, int], routes: str, count: int) -> None:
    different[routes] = different.get(routes, 0) + count
