"""At which stage of its life a model is."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule

PREPARED = ("calibration", "qat")  # the stages that have fake quantizers


def stage_of(model: nn.Module) -> str:
    """``float``, ``calibration``, ``qat`` (also in the VALIDATION state) or ``quantized``.

    >>> stage_of(nn.Linear(1, 1))
    'float'
    """
    modules = list(model.modules())
    if any(isinstance(m, QATModule) for m in modules):
        quantizers = [m for m in modules if isinstance(m, FakeQuantize)]
        return "calibration" if any(q.is_observing and not q.is_quantizing for q in quantizers) else "qat"
    return "quantized" if any(isinstance(m, QuantizedModule) for m in modules) else "float"
