"""The stages of a model's way to ONNX Runtime, one after the other, and how far it came."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.quantization import FakeQuantState, convert, get_default_qconfig, prepare, set_fake_quantize
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, mismatches, run_onnx

STAGES = ("prepares", "calibrates", "QAT step", "converts", "ONNX exact")


@dataclass
class Walk:
    """How far a model came.

    Args:
        passed: stages that went well.
        error: why the next one did not.
    """

    passed: list[str] = field(default_factory=list)
    error: str = ""
    trace: str = ""
    numbers: int = 0
    distance: float = 0.0


def walk(
    model: nn.Module, inputs: tuple, folder: Path, dtype: str = "qint8", has_float_code: bool = False, **kwargs: Any
) -> Walk:
    """Take a float model to ONNX Runtime.

    Args:
        has_float_code: the model computes with float after a DeQuantStub, where ONNX Runtime has kernels of its own:
            floats are compared to six digits there.
    """
    result = Walk()
    try:
        _walk(model, inputs, folder, dtype, result, has_float_code, kwargs)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        result.trace = traceback.format_exc()
    return result


def _walk(
    model: nn.Module, inputs: tuple, folder: Path, dtype: str, result: Walk, has_float_code: bool, kwargs: Any
) -> None:
    model.eval()
    with torch.no_grad():
        expected = as_numbers(model(*inputs))
    qconfig = get_default_qconfig(
        activation_qkwargs={"dtype": dtype, "averaging_constant": 0}, weight_qkwargs={"dtype": dtype}
    )
    qat = prepare(model, inputs, qconfig_dict={"": qconfig}, out_dir=folder, **kwargs)
    result.passed.append("prepares")

    calibrate(qat, inputs)
    with torch.no_grad():
        got = as_numbers(qat(*inputs))
    assert all(torch.isfinite(x).all() for x in got if x.is_floating_point()), "numbers that are not finite"
    result.distance = max(
        (
            ((a - b).norm() / a.norm().clamp_min(1e-6)).item()
            for a, b in zip(expected, got, strict=True)
            if a.is_floating_point()
        ),
        default=0.0,
    )
    result.passed.append("calibrates")

    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    # What has no parameters passes gradients on to what stands before it.
    learned = list(qat.parameters())
    trained_inputs = inputs if learned else pytree.tree_map_only(Tensor, _trainable, inputs)
    learned = learned or [x for x in pytree.tree_leaves(trained_inputs) if x.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=1e-4)
    floats = [x for x in qat(*trained_inputs) if x.requires_grad]
    assert floats, "no output has a gradient"
    sum(x.square().mean() for x in floats).backward()
    gradients = [p.grad for p in learned if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients), "gradients that are not finite"
    assert any(g.abs().sum() > 0 for g in gradients), "every gradient is zero"
    optimizer.step()
    result.passed.append("QAT step")

    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        trained = as_numbers(qat(*inputs))
        quantized = convert(qat)
        integers = as_numbers(quantized(*inputs))
    different = mismatches(trained, integers)
    assert different == 0, f"{different} numbers of the converted model differ from the QAT model's"
    result.passed.append("converts")

    graph = export_quantized_onnx(quantized, inputs, folder / "model.onnx")
    found = run_onnx(graph, pytree.tree_leaves(inputs))
    if has_float_code:
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(integers, found, strict=True))
        integers = found
    different = mismatches(integers, found)
    assert different == 0, f"{different} numbers in ONNX Runtime differ"
    result.numbers = sum(x.numel() for x in integers)
    result.passed.append("ONNX exact")


def _trainable(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() else x
