"""Shared by QAT convolutions and linear layers: rounded weights, a fused add and activation, a rounded output."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.nn import intrinsic
from horizon_plugin_pytorch.nn.intrinsic import check_rank
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.qat.module import QATModule, real
from horizon_plugin_pytorch.nn.support import EVERYWHERE, Marches
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization.fake_quantize import NO_LIMIT, FakeQuantize


class QATGemm(intrinsic.CalledByAdd, QATModule):
    """A layer with weights, mixed into the torch layer of the same kind."""

    float_class: ClassVar[Any]
    has_add: ClassVar[bool] = False
    limits: ClassVar[tuple[float, float]] = NO_LIMIT
    weight_axis: ClassVar[int] = 0
    input_rank: int | None = None
    weight: Tensor
    bias: Tensor | None

    def __init__(self, *args: Any, qconfig: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(qconfig)

    def attach(self, qconfig: Any) -> None:
        """Make the fake quantizers that a qconfig asks for."""
        if qconfig is None or qconfig.weight is None:
            raise QuantizationConfigError(
                f"`{type(self).__name__}` {self.place} needs a qconfig with weight quantization; use one of "
                "`horizon_plugin_pytorch.quantization.qconfig`, or qconfig=None to leave the layer float."
            )
        self.qconfig = qconfig
        channels = self.weight.shape[self.weight_axis]
        quantizer = qconfig.weight(channel_len=channels)
        if self.weight_axis and quantizer.ch_axis == 0:  # transposed: output channels are axis 1
            quantizer = qconfig.weight.with_args(ch_axis=self.weight_axis)(channel_len=channels)
        if quantizer.ch_axis not in (-1, self.weight_axis):
            raise QuantizationConfigError(
                f"`{type(self).__name__}` {self.place}: weights have one scale for each output channel, ch_axis="
                f"{self.weight_axis}; the qconfig says ch_axis={quantizer.ch_axis}."
            )
        self.weight_fake_quant: FakeQuantize = quantizer.to(self.weight.device)
        activation = None if qconfig.activation is None else qconfig.activation(channel_len=1).to(self.weight.device)
        self.register_module("activation_post_process", activation)  # printed also where it is None, as in the guides
        self._seen: tuple = ()

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a float layer, or of a fused float module; parameters are shared with it."""
        source = getattr(mod, "conv", None) or getattr(mod, "linear", None) or mod
        parameters = inspect.signature(cls.float_class.__init__).parameters
        names = [n for n in parameters if n not in ("self", "device", "dtype")]
        arguments = {n: getattr(source, n) for n in names if n != "bias"}
        arguments["bias"] = source.bias is not None
        with torch.device("meta"):
            self = cls.__new__(cls)
            QATModule.__init__(self, **arguments)
        self.weight, self.bias = source.weight, source.bias
        self.input_rank = getattr(source, "input_rank", None)
        self.path = getattr(mod, "path", "")
        self.enter_through(getattr(mod, "entry", None))
        self.attach(getattr(mod, "qconfig", None))
        return self

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The float layer with other weights."""
        raise NotImplementedError

    def inputs_seen(self) -> list[tuple]:
        """Scales, formats and ranges of the last inputs, for `convert` to plan with."""
        return [self._seen] if self._seen else []

    def forward(self, x: Any, residual: Any = None) -> Any:
        """Training route, or exact integers in the VALIDATION state."""
        check_rank(x, self.input_rank)
        if isinstance(x, QTensor) and (residual is None or isinstance(residual, QTensor)):
            added = () if residual is None else (residual.scale, residual.dtype)
            self._seen = (x.scale, x.dtype, x.range, *added)
        if self.is_exact:
            inputs = (x,) if residual is None else (x, residual)
            return self.exact(*inputs, trained=lambda: self._train(x, residual))
        return self._train(x, residual)

    def _train(self, x: Any, residual: Any) -> Any:
        out = self.product(real(x), self.weight_fake_quant.weight(self.weight))
        if residual is not None:
            out = out.add_(real(residual)) if residual.shape == out.shape else out + real(residual)
        if self.activation_post_process is not None:
            return self.activation_post_process(out, self.limits)
        return out if self.limits == NO_LIMIT else out.clamp(*self.limits)


def register_layers(
    name: str, layer: type[QATGemm], fused: tuple[type[QATGemm], ...], marches: Marches = EVERYWHERE
) -> None:
    """Rows for a layer and its fused forms, whose float classes in `intrinsic` have the same names."""
    forms = [(name, layer, layer.float_class)]
    forms += [(cls.__name__, cls, getattr(intrinsic, cls.__name__)) for cls in fused]
    for row_name, cls, float_class in forms:
        row = Operator(row_name, ScaleRule.OWN, cls, cls.quantized_class, (float_class,), marches=marches)
        register(replace(row, has_real_output=True))
