"""Layer, group, instance and root-mean-square norms while training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.nn.elementwise import Rsqrt
from horizon_plugin_pytorch.nn.qat.composite import PartedModule, shown_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.gemm import share_tensor, tensor_of
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized.normalization import Groups
from horizon_plugin_pytorch.nn.quantized.normalization import Normalization as _Quantized
from horizon_plugin_pytorch.operators.arguments import arguments_by_name
from horizon_plugin_pytorch.operators.support import INTS, Support, on
from horizon_plugin_pytorch.operators.table import Binder, Call, NotBindable, depends_on_graph
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


class MeanSquare(nn.Module):
    """The values themselves, and the mean of their squares."""

    def __init__(self, qconfig: Any) -> None:
        super().__init__()
        self.mul = FloatFunctional(qconfig)
        self.post_mean = FloatFunctional(qconfig)

    def forward(self, x: Any, dims: list[int]) -> tuple[Any, Any]:
        return x, self.post_mean.mean(self.mul.mul(x, x), dims, keepdim=True)


class Normalization(PartedModule):
    """``(x - mean) * rsqrt(var + eps) * weight + bias``, shown as the parts that the guides name.

    Args:
        source: the float module; weight and bias are shared with it.
        is_centred: subtract the mean.
    """

    quantized_class = _Quantized
    mul: Any
    weight_mul: Any
    bias_add: Any

    def __init__(self, source: Any, is_centred: bool = True) -> None:
        super().__init__()
        self.eps, self.is_centred = source.eps, is_centred
        self.weight: Tensor | None = source.weight
        self.bias: Tensor | None = getattr(source, "bias", None)
        self.qconfig = source.qconfig
        inner = shown_qconfig(self.qconfig)
        self.var_mean = (VarMean if is_centred else MeanSquare)(inner)
        table = getattr(source, "rsqrt_kwargs", None) or {}
        self.rsqrt = SegmentLUT(self._rsqrt(), "rsqrt", inner, **table)
        steps = ["mul"] + ["weight_mul"] * (self.weight is not None) + ["bias_add"] * (self.bias is not None)
        self.last = steps[-1]
        for step in steps:
            setattr(self, step, FloatFunctional(self.qconfig if step == self.last else inner))

    @property
    def groups(self) -> Callable[[tuple[int, ...]], Groups]:
        """Which values are normalised together, given the input's shape."""
        raise NotImplementedError

    @property
    def epsilon(self) -> float:
        """What is added to the variance."""
        return self.eps

    def _rsqrt(self) -> Callable[[Tensor], Tensor]:
        return Rsqrt(self.epsilon).quantized_function()

    def show_parts(self, x: QTensor, *masks: Tensor | None) -> None:
        groups = self.groups(tuple(x.shape))
        self.rsqrt.function = self._rsqrt()
        deviation, variance = self.var_mean(x.reshape(groups.view), groups.dims)
        factor = self.rsqrt(variance)
        if self.last == "mul":
            return
        out = self.mul.mul(deviation, factor)
        if self.weight is not None and self.last != "weight_mul":
            shape = self.weight.shape if groups.parameters is None else groups.parameters
            self.weight_mul.mul(out, self.weight.reshape(shape))


def with_parameters(norm: Any, weight: Tensor | None, bias: Tensor | None = None) -> Any:
    """A float norm that was made without parameters, with those of the model."""
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            share_tensor(norm, name, value)
    return norm


# Not in the published tables; chips with layer norm have what it is made of.
NORM = on(bayes=Support(INTS, INTS, note="made of several look-up tables"))


def norm_function(make: Callable[..., nn.Module], signature: str) -> Binder:
    """A binder for the functional form of a norm; tensors among its arguments are parameters of the model."""
    by_name = arguments_by_name(signature)

    def make_norm(**values: Any) -> nn.Module:
        return make(**{name: _constant(value, name) for name, value in values.items()})

    def bind(*args: Any, **kwargs: Any) -> Call:
        values = by_name(*args, **kwargs)
        x = values.pop("input")
        return Call(make_norm, (x,), settings=values)

    return bind


def _constant(value: Any, name: str) -> Any:
    if not depends_on_graph(value):
        return value
    if name != "normalized_shape":
        return tensor_of(value, name)
    raise NotBindable(
        f"its {name} is computed of sizes, which are not known while tracing: write the numbers (`(self.channels,)`), "
        "or prepare with `PrepareMethod.JIT_STRIP`, which runs the forward"
    )
