"""What every quantized module has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import CalibrationWarning, ConversionError, warn
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, require_same_range
from horizon_plugin_pytorch.nn.quantized.former_parameter import FormerParameter
from horizon_plugin_pytorch.nn.quantized.plans import PlanCache
from horizon_plugin_pytorch.qtensor import QTensor, byte_qtensor, integer_qtensor
from horizon_plugin_pytorch.running import asked_by_model, asked_in_forward
from horizon_plugin_pytorch.runtime.located import QUICK, PlacedModule
from horizon_plugin_pytorch.statistics.cache import Cache


def require_float32(fn: Callable[[Tensor], Tensor], what: str) -> None:
    """Refuse a change of the float type: integers live in float32, and those of 16 bits do not fit a half.

    Args:
        fn: what `torch.nn.Module._apply` does to each tensor.
        what: the module, for the message.
    """
    dtype = fn(torch.zeros(0, dtype=torch.float32, device="cpu")).dtype
    if dtype != torch.float32:
        raise TypeError(f"{what} computes its integers in float32 and cannot become {dtype}; leave it in float32.")


def is_real(x: Any) -> bool:
    """Is this a float tensor without a scale, such as one in float16? Operators that keep formats leave it one."""
    return isinstance(x, Tensor) and not isinstance(x, QTensor) and x.is_floating_point()


def size_of(dtype: QuantDType) -> float:
    """The largest magnitude of a format's integers."""
    return float(1 << (dtype.bits - 1))


def without_scale(who: str, x: Any) -> ConversionError:
    """The error of an operator that got something which has no scale.

    Args:
        who: the operator, with its place.
    """
    return ConversionError(
        f"{who} got {_kind_of(x)} instead of integers with a scale. {_remedy(x)}, then calibrate and convert again; "
        "or, if it is meant to stay float, as post-processing is, give the module `qconfig = None` before preparing."
    )


def _kind_of(x: Any) -> str:
    """What something is that should have been a QTensor, for messages."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    kind = "a float" if x.is_floating_point() else "a boolean" if x.dtype == torch.bool else "an integer"
    return f"{kind} tensor of shape {tuple(x.shape)}"


def _remedy(x: Any) -> str:
    if isinstance(x, Tensor) and not x.is_floating_point():
        return "Positions, counts and masks have no scale: give this one to a QuantStub as `quant(x.float())`"
    return "Put a QuantStub where this tensor enters the quantized part of the model"


class QuantizedModule(PlacedModule):
    """Base of quantized modules: an output scale and format, and plans for the inputs met so far."""

    scale: Tensor | None
    _was_told: bool = False
    _planned_for: tuple[str, ...] | None = None  # the tensors that plans are made of; None while they are not all there
    _sealed: PlanCache | None = None
    trained: frozenset[str] = frozenset()  # the parameters that wanted a gradient when they became numbers

    @property
    def _plans(self) -> PlanCache:
        """The plans for the numbers that its tensors hold now, whoever wrote them."""
        if self._sealed is not None:
            return self._sealed
        kept: Cache | None = self.__dict__.get("_kept")
        if kept is None:
            kept = self.__dict__["_kept"] = Cache()
        buffers = self._buffers
        found = [buffers.get(name) for name in (buffers if self._planned_for is None else self._planned_for)]
        return kept.get(tuple([x for x in found if x is not None]), PlanCache)

    @classmethod
    def from_float(cls, mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What torch's own `convert` calls with a mapping of these classes, which it cannot convert to."""
        raise ConversionError(
            f"torch's own `convert` cannot make `{cls.__name__}` of `{type(mod).__name__}`: call `convert` of "
            "`horizon_plugin_pytorch.quantization`, or `convert_fx`, without a mapping."
        )

    def forget_plans(self) -> None:
        """Drop all plans; they are made anew when needed."""
        self.__dict__["_kept"] = Cache()
        self.__dict__.pop(QUICK, None)

    @property
    def plan_bytes(self) -> int:
        """Bytes that the plans take."""
        return self._plans.size

    def seal(self) -> None:
        """Nobody else knows its tensors, so nobody writes to them: its plans need not look."""
        self._sealed = self._plans
        self.forget_plans()

    @classmethod
    def from_qat(cls, mod: Any) -> Any:
        """The integer form of a QAT module, for its current weights and scales."""
        self = cls()
        self.path, self.line, self.operator, self.stub_paths = mod.path, mod.line, mod.operator, mod.stub_paths
        self.is_accumulator = mod.is_accumulator
        self.set_output(mod.activation_post_process)
        self.configure(mod)
        self._planned_for = tuple(self._buffers)
        self.trained = frozenset(name for name, x in mod._parameters.items() if x is not None and x.requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # The model's own forward may ask for ``self.conv.weight.dtype``, and must get the answer it got in float.
        is_stored = name == "weight" and isinstance(value, Tensor) and not value.is_floating_point()
        if not is_stored and name not in self.trained:
            return value
        if asked_by_model():
            return self.as_parameter(name)
        if is_stored and asked_in_forward():
            self._tell_unread()
            return self.as_parameter(name)
        return value

    @property
    def gives_real(self) -> bool:
        """Are its results float16, or of high precision?"""
        return self.is_accumulator or self._modules.get("cast") is not None

    def as_parameter(self, name: str) -> Any:
        """A former parameter as the user's forward reads it: real numbers, and one tensor for all readers."""
        value = self._buffers[name]
        if name == "weight" and value is not None and not value.is_floating_point():
            value = self.written_weight()
        if value is None or name not in self.trained:
            return value
        return self._plans.get((), ("parameter", name), lambda: FormerParameter.of(value))

    def _tell_unread(self) -> None:
        """Warn of a weight of which nobody knew, when the model was converted, that the forward reads it."""
        if "float_weight" not in self._buffers and not self._was_told:
            self._was_told = True
            warn(
                f"the forward reads the weight of `{type(self).__name__}` {self.place}, and did not before the model "
                "was converted. It gets the rounded weight, and computes something else than the QAT model does: run "
                "the QAT model once, in any state, before you convert it.",
                CalibrationWarning,
            )

    def written_weight(self) -> Tensor:
        """The weight in real numbers, as the user's forward reads it: one tensor for all readers."""
        if "float_weight" in self._buffers:
            return self.float_weight
        return self._plans.get((), "real_weight", self.real_weight)

    def real_weight(self) -> Tensor:
        """The weight in real numbers."""
        raise NotImplementedError

    def configure(self, mod: Any) -> None:
        """Take over what the operator needs besides its output's scale."""

    def set_output(self, quantizer: FakeQuantize | FakeCast | None) -> None:
        """Take scale, format and range from a fake quantizer; None means that the accumulator leaves as float."""
        self.out_dtype: QuantDType | None = None
        self.low, self.high = 0, 0
        self.cast = quantizer if isinstance(quantizer, FakeCast) else None
        if quantizer is None or isinstance(quantizer, FakeCast):
            self.register_buffer("scale", None)
            return
        self.register_buffer("scale", quantizer.sound_scale().detach().clone())
        self.out_dtype, self.low, self.high = quantizer.dtype, quantizer.quant_min, quantizer.quant_max

    def output(self, grid: Tensor, low: int | None = None, high: int | None = None) -> QTensor:
        """Integers as this module's output, with the range that they can take if it is narrower than the format's."""
        scale = self._buffers["scale"]
        assert scale is not None and self.out_dtype is not None
        if not grid.is_floating_point():
            out = byte_qtensor(ByteTensor(grid), scale, self.out_dtype)
        else:
            out = integer_qtensor(grid, scale, self.out_dtype)
        out.set_range(self.low if low is None else low, self.high if high is None else high)
        return out

    def out_scale(self) -> Tensor:
        """The output's scale in float64, on the CPU."""
        if self.scale is None:
            raise ConversionError(
                f"`{type(self).__name__}` {self.place} has a qconfig without activation quantization, and only layers "
                "and matrix products have a high-precision output. Give it a qconfig with an activation fake-quant."
            )
        return self.scale.detach().double().cpu()

    def ratio(self, *scales: Tensor) -> Tensor:
        """The product of scales over the output's scale, in float64."""
        product = torch.ones(1, dtype=torch.float64)
        for scale in scales:
            product = product * scale.detach().double().cpu()
        return product / self.out_scale()

    def has_output_grid(self, x: QTensor) -> bool:
        """Does the tensor have the output's scale and format already?"""
        low, high = x.range
        if x.dtype != self.out_dtype or low < self.low or high > self.high:
            return False
        return self._plans.get((x,), "has_output_grid", lambda: float(self.ratio(x.scale)) == 1.0)

    def output_factor(self, x: QTensor) -> Tensor:
        """The factor that brings the tensor's integers to the output's scale."""
        return self._plans.get(
            (x,),
            "output_factor",
            lambda: fp.choose_factor(self.ratio(x.scale), self.low, self.high, size_of(x.dtype)).to(x.device),
        )

    def on_output_grid(self, x: QTensor) -> Tensor:
        """The tensor's integers at the output's scale."""
        if self.has_output_grid(x):
            return x.plain()
        return fp.requantize(x.plain(), self.output_factor(x), -1, self.low, self.high)

    def quantized_input(self, x: Any) -> QTensor:
        """Insist on integers; booleans count as 0 and 1."""
        if isinstance(x, QTensor):
            integers = x if x.is_integer else x.as_integers()  # of a module that `preserve_qat_mode` has kept
            return integers.as_numbers()
        raise without_scale(f"`{type(self).__name__}` {self.place}", x)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        require_float32(fn, f"`{type(self).__name__}` {self.place}")
        self.forget_plans()
        return super()._apply(fn, recurse)

    @property
    def quant_range(self) -> Tensor:
        """The smallest and largest integer of the output, as state dicts have them: what the scale is for."""
        return torch.tensor([self.low, self.high], dtype=torch.int32)

    @quant_range.setter
    def quant_range(self, written: Tensor) -> None:
        require_same_range(written, (int(self.low), int(self.high)), type(self).__name__)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[prefix + "quant_range"] = self.quant_range

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing: list, unexpected: list,
        errors: list,
    ) -> None:  # fmt: skip
        self.forget_plans()
        other = self.other_format(state_dict, prefix)
        state_dict.pop(prefix + "quant_range", None)
        if other:  # numbers of another format mean something else: leave all as it is
            errors.append(f"{other}. Convert a model that was prepared with the formats of the checkpoint.")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def other_format(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        """What the integers of a checkpoint are, if not those of this module."""
        written = state_dict.get(prefix + "quant_range")
        if isinstance(written, Tensor) and self.scale is not None and written.tolist() != [self.low, self.high]:
            if written.shape != (2,):
                return f"{prefix}quant_range has {written.numel()} numbers and not a smallest and a largest one"
            low, high = written.tolist()
            return f"{prefix[:-1]}: its output is [{low}, {high}] in the checkpoint and [{self.low}, {self.high}] here"
        for name, mine in self._buffers.items():
            theirs = state_dict.get(prefix + name)
            if mine is None or not isinstance(theirs, Tensor) or mine.is_floating_point():
                continue
            if theirs.dtype != mine.dtype:
                return f"{prefix}{name} is {theirs.dtype} in the checkpoint and {mine.dtype} here"
        return ""

    def extra_repr(self) -> str:
        if self.out_dtype is None:
            return f"out_dtype={torch.float32 if self.cast is None else self.cast.dtype}"
        assert self.scale is not None
        scale = f"{float(self.scale):.7g}" if self.scale.numel() == 1 else f"{self.scale.numel()} channels"
        return f"out_scale={scale}, out_dtype={self.out_dtype}"
