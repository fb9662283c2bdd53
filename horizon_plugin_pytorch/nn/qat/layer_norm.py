"""Layer normalisation while training: int16 inside, the last step in the qconfig's format."""

from __future__ import annotations

from typing import Any

from torch import nn

from horizon_plugin_pytorch.errors import ConversionError
from horizon_plugin_pytorch.nn.elementwise import Rsqrt
from horizon_plugin_pytorch.nn.layer_norm import LayerNorm as _Float
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.placed import PlacedModule
from horizon_plugin_pytorch.nn.qat.composite import constant_stub, inner_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.support import FROM_BAYES
from horizon_plugin_pytorch.qtensor import QTensor


class VarMean(nn.Module):
    """Deviation from the mean, and variance."""

    def __init__(self, qconfig: Any) -> None:
        super().__init__()
        self.pre_mean = FloatFunctional(qconfig)
        self.sub = FloatFunctional(qconfig)
        self.mul = FloatFunctional(qconfig)
        self.post_mean = FloatFunctional(qconfig)

    def forward(self, x: Any, dims: list[int]) -> tuple[Any, Any]:
        deviation = self.sub.sub(x, self.pre_mean.mean(x, dims, keepdim=True))
        return deviation, self.post_mean.mean(self.mul.mul(deviation, deviation), dims, keepdim=True)


class LayerNorm(PlacedModule):
    """``(x - mean) * rsqrt(var + eps) * weight + bias`` from smaller operators; conversion replaces these."""

    mul: Any
    weight_mul: Any
    bias_add: Any

    def __init__(self, source: nn.LayerNorm, qconfig: Any) -> None:
        super().__init__()
        self.normalized_shape, self.eps = source.normalized_shape, source.eps
        self.dim: int | None = getattr(source, "dim", None)
        self.weight, self.bias = source.weight, source.bias
        self.qconfig = qconfig
        inner = inner_qconfig(qconfig)
        self.var_mean = VarMean(inner)
        self.rsqrt = SegmentLUT(Rsqrt(self.eps).quantized_function(), "rsqrt", inner)
        steps = ["mul"] + ["weight_mul"] * (self.weight is not None) + ["bias_add"] * (self.bias is not None)
        for step in steps:
            setattr(self, step, FloatFunctional(qconfig if step == steps[-1] else inner))
        if self.weight is not None:
            self.weight_quant = constant_stub(inner)
        if self.bias is not None:
            self.bias_quant = constant_stub(inner)

    @classmethod
    def from_float(cls, mod: nn.LayerNorm) -> LayerNorm:
        """The QAT form of a layer norm, ours or torch's; weight and bias are shared with it."""
        return cls(mod, mod.qconfig)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, QTensor):
            raise ConversionError(f"LayerNorm {self.place} got a float tensor; put a QuantStub before it.")
        dims = [self.dim] if self.dim is not None else list(range(x.dim() - len(self.normalized_shape), x.dim()))
        deviation, variance = self.var_mean(x, dims)
        out = self.mul.mul(deviation, self.rsqrt(variance))
        if self.weight is not None:
            out = self.weight_mul.mul(out, self.weight_quant(self.weight))
        return out if self.bias is None else self.bias_add.add(out, self.bias_quant(self.bias))


register(Operator("layer_norm", ScaleRule.OWN, LayerNorm, LayerNorm, (nn.LayerNorm, _Float), marches=FROM_BAYES))
