"""Layer normalisation while training: int16 inside, the last step in the qconfig's format."""

from __future__ import annotations

from typing import Any

from torch import nn

from horizon_plugin_pytorch.nn.elementwise import Rsqrt
from horizon_plugin_pytorch.nn.layer_norm import LayerNorm as _Float
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.qat.composite import functional, inner_qconfig
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.qat.stubs import QuantStub
from horizon_plugin_pytorch.qtensor import QTensor


class VarMean(nn.Module):
    """Deviation from the mean, and variance."""

    def __init__(self, qconfig: Any, path: str) -> None:
        super().__init__()
        self.pre_mean = functional(qconfig, f"{path}.pre_mean")
        self.sub = functional(qconfig, f"{path}.sub")
        self.mul = functional(qconfig, f"{path}.mul")
        self.post_mean = functional(qconfig, f"{path}.post_mean")

    def forward(self, x: Any, dims: list[int]) -> tuple[Any, Any]:
        deviation = self.sub.sub(x, self.pre_mean.mean(x, dims, keepdim=True))
        return deviation, self.post_mean.mean(self.mul.mul(deviation, deviation), dims, keepdim=True)


class LayerNorm(nn.Module):
    """``(x - mean) * rsqrt(var + eps) * weight + bias`` from smaller operators; conversion replaces these."""

    mul: Any
    weight_mul: Any
    bias_add: Any

    def __init__(self, source: nn.LayerNorm, qconfig: Any, path: str = "") -> None:
        super().__init__()
        self.normalized_shape, self.eps = source.normalized_shape, source.eps
        self.dim: int | None = getattr(source, "dim", None)
        self.weight, self.bias = source.weight, source.bias
        self.qconfig, self.path = qconfig, path
        inner = inner_qconfig(qconfig)
        self.var_mean = VarMean(inner, f"{path}.var_mean")
        self.rsqrt = SegmentLUT(Rsqrt.forward_static(self.eps), "rsqrt", inner)
        self.rsqrt.path = f"{path}.rsqrt"
        steps = ["mul"] + ["weight_mul"] * (self.weight is not None) + ["bias_add"] * (self.bias is not None)
        for step in steps:
            setattr(self, step, functional(qconfig if step == steps[-1] else inner, f"{path}.{step}"))
        if self.weight is not None:
            self.weight_quant = QuantStub(qconfig=inner)
        if self.bias is not None:
            self.bias_quant = QuantStub(qconfig=inner)

    @classmethod
    def from_float(cls, mod: nn.LayerNorm) -> LayerNorm:
        """The QAT form of a layer norm, ours or torch's; weight and bias are shared with it."""
        self = cls(mod, mod.qconfig, getattr(mod, "path", ""))
        self.train(mod.training)
        return self

    def forward(self, x: Any) -> Any:
        if not isinstance(x, QTensor):
            raise TypeError(f"the quantized LayerNorm at `{self.path}` got a float tensor; put a QuantStub before it.")
        dims = [self.dim] if self.dim is not None else list(range(x.dim() - len(self.normalized_shape), x.dim()))
        deviation, variance = self.var_mean(x, dims)
        out = self.mul.mul(deviation, self.rsqrt(variance))
        if self.weight is not None:
            out = self.weight_mul.mul(out, self.weight_quant(self.weight))
        return out if self.bias is None else self.bias_add.add(out, self.bias_quant(self.bias))


register(Operator("layer_norm", ScaleRule.OWN, LayerNorm, LayerNorm, (nn.LayerNorm, _Float)))
