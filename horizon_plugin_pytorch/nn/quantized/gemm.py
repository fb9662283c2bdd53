"""Shared by quantized convolutions and linear layers: integer weights, and a plan for each input scale."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType, as_dtype
from horizon_plugin_pytorch.errors import AccumulatorWarning, ConversionError, QuantizationWarning
from horizon_plugin_pytorch.fake_quant.rounding import integer_limits
from horizon_plugin_pytorch.march import March, get_march
from horizon_plugin_pytorch.nn.intrinsic import CalledByAdd, Form, check_rank
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.quick_call import Held, QuickCall, is_known_by_a_number
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import QUICK
from horizon_plugin_pytorch.untraced import is_recorded


@dataclass(frozen=True)
class LayerPlan:
    """The arithmetic of a layer for one kind of input, and the same on integer kernels where these can do it."""

    accumulator: fp.AccumulatorPlan
    on_bytes: fp.ByteLayer | fp.WideLayer | fp.TransposedLayer | None


class QuantizedGemm(CalledByAdd, QuantizedModule):
    """A layer that sums products of integers.

    `weight` holds integers in their storage type, `bias` real numbers: the integer bias depends on the input's scale.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    weight_dtype: QuantDType
    limits: tuple[float, float]
    form: ClassVar[Form] = Form()
    output_axis: ClassVar[int] = 0
    groups: int = 1

    def configure(self, mod: Any) -> None:
        self.limits = mod.limits
        self.called_as(mod)
        self.input_rank: int | None = mod.input_rank
        quantizer = mod.weight_fake_quant
        if quantizer is None:
            raise ConversionError(
                f"`{type(mod).__name__}` {mod.place} has a qconfig without weight quantization, so it has no "
                "integer form. Give it a qconfig with a weight fake-quant, or qconfig=None to keep it float."
            )
        self.weight_dtype = quantizer.dtype
        weight, bias, scale = mod.deployed()
        axis = self.output_axis if scale.numel() > 1 else -1
        steps = fp.quantize(weight.detach(), scale.detach(), axis, quantizer.quant_min, quantizer.quant_max)
        self.register_buffer("weight", steps.to(quantizer.dtype.storage))
        self.register_buffer("weight_scale", scale.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.copy_geometry(mod)
        weight = self._buffers["weight"]
        seen = mod.inputs_seen()
        if seen and steps.dtype == torch.float32 and not steps.is_inference():
            # As `_build_plan` wants them: zeros without sign, in memory that is there.
            self._plans.get((), "weight", lambda: steps.copy_(weight))
        for inputs in seen:
            here: list[Any] = [v.detach().to(steps.device) if isinstance(v, Tensor) else v for v in inputs]
            self.plan(*here)

    def real_weight(self) -> Tensor:
        shape = [1] * self.weight.dim()
        shape[self.output_axis] = -1
        return self.weight * self.weight_scale.reshape(shape)

    def copy_geometry(self, mod: Any) -> None:
        """Take over strides and the like."""

    def plan(
        self,
        input_scale: Tensor,
        input_dtype: QuantDType,
        input_range: tuple[int, int],
        residual_scale: Tensor | None = None,
        residual_dtype: QuantDType | None = None,
    ) -> LayerPlan:
        """The arithmetic for inputs of these scales, formats and ranges."""
        scales = (input_scale,) if residual_scale is None else (input_scale, residual_scale)
        return self._plans.get(
            scales,
            (input_dtype, input_range, residual_dtype),
            lambda: self._build_plan(input_scale, input_dtype, input_range, residual_scale, residual_dtype),
        )

    def _build_plan(
        self,
        input_scale: Tensor,
        input_dtype: QuantDType,
        input_range: tuple[int, int],
        residual_scale: Tensor | None,
        residual_dtype: QuantDType | None,
    ) -> LayerPlan:
        weight_scale = self.weight_scale.double()
        if self.output_axis == 1 and weight_scale.numel() > 1:
            weight_scale = weight_scale.repeat(self.groups)
        low, high = self.low, self.high
        if self.scale is not None:
            low, high = integer_limits(self.scale, low, high, self.limits)
        residual_bits = 8 if residual_dtype is None else as_dtype(residual_dtype).bits
        # One for the plans of all inputs, as its sums are.
        integers: Tensor = self._plans.get((), "weight", self.weight.float)
        storage = self._buffers["weight"].dtype  # type: ignore[union-attr]
        largest = None if storage.is_floating_point else -float(torch.iinfo(storage).min)
        sums: fp.OutputSums = self._plans.get(
            (), "sums", lambda: fp.OutputSums.of(integers, self.output_axis, self.groups, largest)
        )
        weight, accumulator_scale = fp.coarsen(
            integers,
            self.bias,
            input_scale.double() * weight_scale,
            self.scale,
            output_axis=self.output_axis,
            groups=self.groups,
            input_size=float(max(-input_range[0], input_range[1])),
            output_steps=self.high - self.low,
            residual_size=0.0 if residual_scale is None else residual_scale * float(1 << (residual_bits - 1)),
            sums=sums,
        )
        plan = fp.plan_accumulator(
            weight,
            self.bias,
            accumulator_scale,
            self.scale,
            output_axis=self.output_axis,
            groups=self.groups,
            input_range=input_range,
            weight_bits=self.weight_dtype.bits,
            low=low,
            high=high,
            residual_scale=residual_scale,
            residual_bits=residual_bits,
            sums=sums if weight is integers else None,
        )
        if get_march() is March.NASH_M and input_dtype.bits > 8 and self.weight_dtype.bits > 8:
            warnings.warn(
                f"`{type(self).__name__}` {self.place}: its input and its weight are both qint16, which nash-m takes "
                "from OE 3.5.0 on; for older ones give it a qint8 weight, or the tensor before it qint8.",
                QuantizationWarning,
                stacklevel=2,
            )
        if plan.worst_case > fp.INT32_MAX:
            fate = "sums are saturated there" if plan.limit else "the sum is exact here, but the chip's may overflow"
            narrow = "a qint8 input" if plan.limit else "a qint8 input or weight"
            warnings.warn(
                f"`{type(self).__name__}` {self.place}: in the worst case its accumulator reaches "
                f"{plan.worst_case:.3g}, beyond int32 ({fp.INT32_MAX:.3g}); {fate}. Its input is "
                f"{input_dtype}, its weight {self.weight_dtype}: use {narrow}, fewer input channels, or more groups.",
                AccumulatorWarning,
                stacklevel=2,
            )
        return LayerPlan(plan, fp.ByteLayer.of(plan, self._walk(), input_range, self.weight_dtype.bits))

    def _walk(self) -> fp.Geometry | None:
        """How a convolution walks over its input; None for a linear layer."""
        return None

    def forward(self, x: QTensor, residual: QTensor | None = None) -> QTensor | Tensor:
        """Integers to integers, or to real numbers where the output has high precision."""
        return self.run(self.quantized_input(x), None if residual is None else self.quantized_input(residual))

    def run(self, x: QTensor, residual: QTensor | None) -> QTensor | Tensor:
        """The same on tensors of any stage: their integers are what counts. Booleans are numbers here already."""
        check_rank(x, self.input_rank)
        if residual is not None:
            plan = self.plan(x._scale, x._format, x.range, residual._scale, residual._format)
        else:
            plan = self.plan(x._scale, x._format, x.range)
        out = self._on_bytes(x, residual, plan)
        if out is None:
            out = self.compute(x.as_grid(), None if residual is None else residual.as_grid(), plan.accumulator)
        if self._buffers["scale"] is None:
            return self.real_output(out)
        result = self.output(out, plan.accumulator.low, plan.accumulator.high)
        if result._bytes is not None:
            self._learn(x, residual, plan, result)
        return result

    def _learn(self, x: QTensor, residual: QTensor | None, plan: LayerPlan, out: QTensor) -> None:
        """The next call may be like this one, which ran on integer kernels."""
        inputs = (x,) if residual is None else (x, residual)
        if self._planned_for is None or self.is_padding:
            return
        if all(map(is_known_by_a_number, inputs)):
            held = None if self._sealed is not None else Held(self._planned_for, self.__dict__["_kept"], self._plans)
            self.__dict__[QUICK] = QuickCall(plan.on_bytes, inputs, out, held)

    def _on_bytes(self, x: QTensor, residual: QTensor | None, plan: LayerPlan) -> Tensor | None:
        """What the layer gives on integer kernels; None where it does not run on them."""
        if plan.on_bytes is None or is_recorded() or not fp.are_kernels_used():
            return None
        return plan.on_bytes(self.padded(x.as_bytes()), None if residual is None else residual.as_bytes())

    @property
    def is_padding(self) -> bool:
        """Is its input padded with what the layer's plan does not know of?"""
        return False

    def padded(self, x: Tensor) -> Tensor:
        """The input with what the layer's plan does not know of."""
        return x

    def real_output(self, out: Tensor) -> QTensor | Tensor:
        """Real numbers as this layer's output: limited, and in its format."""
        if self.scale is not None:
            low, high = integer_limits(self.scale, self.low, self.high, self.limits)
            return self.output(fp.quantize(out, self.scale, -1, low, high), low, high)
        out = out if self.limits == (-torch.inf, torch.inf) else out.clamp_(*self.limits)
        return out if self.cast is None else self.cast(out)

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        """Run the plan."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)} {self.weight_dtype}, {super().extra_repr()}"
