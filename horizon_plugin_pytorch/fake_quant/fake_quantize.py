"""Putting values on the integer grid while training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, qint8
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.fake_quant.loaded_scale import LoadedScale, end_of_range, fitted_scale
from horizon_plugin_pytorch.fake_quant.rounding import clamped, clamped_ends, integer_limits, round_to_grid
from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.function_handlers import is_backward
from horizon_plugin_pytorch.qtensor import QTensor, real_qtensor
from horizon_plugin_pytorch.statistics.cache import Cache
from horizon_plugin_pytorch.statistics.ends import ends_of_rows
from horizon_plugin_pytorch.statistics.observer import (
    CalibObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from horizon_plugin_pytorch.statistics.observer_base import is_asynchronous
from horizon_plugin_pytorch.statistics.partial import Partial, show_signature
from horizon_plugin_pytorch.untraced import is_traced, untraced


class FakeQuantState(Enum):
    """What fake quantization does.

    ============ ========= ==========
    state        observes  quantizes
    ============ ========= ==========
    QAT          yes       yes
    CALIBRATION  yes       no
    VALIDATION   no        yes
    _FLOAT       no        no
    ============ ========= ==========
    """

    QAT = "qat"
    CALIBRATION = "calibration"
    VALIDATION = "validation"
    _FLOAT = "_float"


SWITCHES = {
    FakeQuantState.QAT: (True, True),
    FakeQuantState.CALIBRATION: (True, False),
    FakeQuantState.VALIDATION: (False, True),
    FakeQuantState._FLOAT: (False, False),
}


def answer_to_torch(cls: type) -> None:
    """Let ``model.apply(torch.quantization.disable_observer)`` and its relatives reach the fake quantizers of a class.

    They act on torch's own base class alone and pass over everything else in silence. It is known by name, as
    `torch.ao` is leaving torch and is never imported here.
    """
    base = getattr(sys.modules.get("torch.ao.quantization.fake_quantize"), "FakeQuantizeBase", None)
    if base is not None and (base, cls) not in _ANSWERING:  # to register it again takes longer than all the rest
        base.register(cls)
        _ANSWERING.add((base, cls))


_ANSWERING: set[tuple[type, type]] = set()


def require_same_range(written: Any, own: tuple[int, int], name: str) -> None:
    """Insist that a range written to a module is the one it has: `torch.func.functional_call` writes whole state dicts.

    Raises:
        ValueError: says what to do about another.
    """
    if not isinstance(written, Tensor) or written.tolist() != list(own):
        raise ValueError(
            f"`quant_range` of `{name}` is {list(own)} by its qconfig, and cannot be made {written!r}: prepare the "
            "model with the number format of this state."
        )


class FakeQuantize(nn.Module):
    """Observe a tensor, update the scale, and round the tensor to the grid of that scale.

    Args:
        observer: the observer's class.
        saturate: give values outside the range no gradient; None means True.
        in_place, compat_mask: other values than the defaults change nothing, with a warning: memory is reused where
            autograd allows.
        channel_len: number of channels of a per-channel scale.
        observer_kwargs: arguments of the observer: dtype, qscheme, ch_axis, averaging_constant, unclipped, scale, ...

    >>> fq = FakeQuantize(dtype="qint8")
    >>> fq(torch.tensor([-1.0, 0.3, 2.55])).int_repr()
    tensor([-50,  15, 127], dtype=torch.int8)
    """

    enabled: ClassVar[bool] = True  # `utils.quant_switch.GlobalFakeQuantSwitch`
    saturate: bool
    in_place: bool
    compat_mask: bool
    channel_len: int
    _known: dict[str, Cache]
    fake_quant_enabled: Tensor
    observer_enabled: Tensor
    scale: Tensor
    zero_point: Tensor
    _gathered: list[Tensor] | None = None
    _keeps_range: bool = False
    _is_frozen: bool = False
    loaded: LoadedScale = LoadedScale.AS_IT_IS  # what became of the last checkpoint's scale
    finest_scale: float = 0.0  # an observed scale is not smaller; whole numbers need no finer grid than 1
    _was_set: bool = False
    state_is_loaded: bool = False  # did a checkpoint decide what it does, and nobody since?

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        show_signature(cls)

    def __init__(
        self,
        observer: type = MovingAverageMinMaxObserver,
        saturate: bool | None = None,
        in_place: bool = False,
        compat_mask: bool = True,
        channel_len: int = 1,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        answer_to_torch(FakeQuantize)
        try:
            self.activation_post_process = observer(channel_len=channel_len, **observer_kwargs)
        except TypeError as error:
            raise QuantizationConfigError(
                f"FakeQuantize cannot make its observer `{getattr(observer, '__name__', observer)}` from the arguments "
                f"{', '.join(observer_kwargs)}: {error}."
            ) from error
        known = ("fake_quant_enabled", "observer_enabled", "scale", "range")
        vars(self).update(  # as an observer does
            saturate=True if saturate is None else bool(saturate),
            in_place=in_place,
            compat_mask=compat_mask,
            channel_len=channel_len,
            _known={name: Cache() for name in known},
        )
        if in_place or not compat_mask:
            warn(
                f"FakeQuantize: {'in_place=True' if in_place else 'compat_mask=False'} has no effect; memory is reused "
                "where autograd allows it.",
                QuantizationWarning,
            )
        length = channel_len if self.activation_post_process.is_per_channel else 1
        device = self.activation_post_process.min_val.device
        self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8, device=device))
        self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.ones(length, dtype=torch.float32, device=device))
        self.register_buffer("zero_point", torch.zeros(length, dtype=torch.long, device=device))
        if self.is_fixed:
            self.refresh_scale()

    @classmethod
    def with_args(cls, **kwargs: Any) -> Partial:
        """A constructor with some arguments already given.

        >>> FakeQuantize.with_args(dtype="qint16")().quant_max
        32767
        """
        return Partial(cls, kwargs)

    @property
    def dtype(self) -> QuantDType:
        """The number format."""
        return self.activation_post_process.dtype

    @property
    def quant_min(self) -> int:
        """The smallest integer."""
        return self.activation_post_process.quant_min

    @property
    def quant_max(self) -> int:
        """The largest integer."""
        return self.activation_post_process.quant_max

    @property
    def qscheme(self) -> torch.qscheme:
        """Per tensor or per channel."""
        return self.activation_post_process.qscheme

    @property
    def ch_axis(self) -> int:
        """The channel axis, -1 for one scale."""
        return self.activation_post_process.ch_axis

    @property
    def format(self) -> tuple[QuantDType, int, int, int]:
        """The number format, the smallest and largest integer, and the channel axis."""
        observer: Any = self._modules["activation_post_process"]  # quicker than as an attribute, in every forward
        return observer.dtype, observer.quant_min, observer.quant_max, observer.ch_axis

    @property
    def is_fixed(self) -> bool:
        """Was the scale given rather than observed?"""
        return self.activation_post_process.is_fixed

    @property
    def has_statistics(self) -> bool:
        """Does the scale come from data, a checkpoint or the user, rather than being the initial 1?"""
        return self._was_set or self.activation_post_process.has_statistics

    def _flag(self, name: str) -> bool:
        """A switch buffer as a bool, on a GPU read again only after it was written to: reading waits for the device."""
        buffer: Any = self._buffers[name]
        if not is_asynchronous(buffer) and not is_traced():
            return bool(buffer.item())
        return self._flag_untraced(name, buffer)

    @untraced
    def _flag_untraced(self, name: str, buffer: Tensor) -> bool:
        if not is_asynchronous(buffer):
            return bool(buffer.item())
        return self._known[name].get((buffer,), lambda: bool(buffer.item()))

    @property
    def is_observing(self) -> bool:
        """Does it observe?"""
        return FakeQuantize.enabled and self._flag("observer_enabled") and not is_written()

    @property
    def is_quantizing(self) -> bool:
        """Does it round?"""
        return FakeQuantize.enabled and self._flag("fake_quant_enabled")

    @property
    def is_calibrating(self) -> bool:
        """Is it in the CALIBRATION state?"""
        return self.is_observing and not self.is_quantizing

    @property
    def is_exact(self) -> bool:
        """In the VALIDATION state the integers of deployment are computed, not an approximation of them."""
        buffers: Any = self._buffers
        observes, rounds = buffers["observer_enabled"], buffers["fake_quant_enabled"]
        if is_asynchronous(observes) or is_asynchronous(rounds) or is_traced():
            return not self.is_observing and self.is_quantizing and not is_written()
        return bool(rounds.item()) and not observes.item() and FakeQuantize.enabled and not is_written()

    @property
    def _scale(self) -> Tensor:
        """`scale`, whether it is trained or not, sooner than torch finds it."""
        found: Any = self._buffers.get("scale")
        return self.scale if found is None else found

    def set_owner(self, path: str) -> None:
        """The module's path in the model, for messages."""
        self.activation_post_process.owner = path

    def check_nan(self, x: Tensor | None = None) -> None:
        """Raise where values or the scale are NaN, if `fake_quantize_base.check_nan_scale` asks for it."""
        if fake_quantize_base.check_nan_scale is not None:
            fake_quantize_base.check(self.activation_post_process.owner, self.scale, x)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Round to the grid, or not."""
        self.fake_quant_enabled.fill_(int(bool(enabled)))

    def disable_fake_quant(self) -> None:
        """Do not round."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Observe, or not."""
        self.observer_enabled.fill_(int(bool(enabled)))

    def disable_observer(self) -> None:
        """Do not observe."""
        self.enable_observer(False)

    def set_state(self, state: FakeQuantState) -> None:
        """Observe and quantize as the state says."""
        observes, quantizes = SWITCHES[state]
        self.state_is_loaded = False
        observer = self.activation_post_process
        if observes or self.is_calibrating:  # training finds ranges of its own
            observer.uneven = observer.clipping if self.is_calibrating and not observes else 1.0
        observer.extreme = 0.0
        self.forget_scale()
        self.finish()
        self.enable_observer(observes)
        self.enable_fake_quant(quantizes)

    def finish(self) -> None:
        """Observing ends, or pauses: take in what the observer still waits with."""
        if self._flag("observer_enabled") and self.activation_post_process.finish():
            self.refresh_scale()

    def forget_scale(self) -> None:
        """Look at the scale anew: ``scale.data`` may have been written to, which torch does not count."""
        self._known["scale"].clear()
        self._known["range"].clear()

    def sound_scale(self) -> Tensor:
        """The scale; one that is trained is repaired if a step of the optimizer has spoilt it."""
        return self.scale

    def require_scale(self) -> None:
        """Refuse a scale that integers cannot have.

        Raises:
            CalibrationError: it is not positive and finite.
        """
        scale = self.sound_scale()
        if not bool(((scale > 0) & scale.isfinite()).all()):
            fake_quantize_base.refuse(self.activation_post_process.owner, scale)

    def set_qparams(self, scale: Tensor | float, zero_point: Any = None) -> None:
        """Give the scale. It stays until an enabled observer sees the next tensor.

        >>> fq = FakeQuantize()
        >>> fq.set_qparams(0.5)
        >>> fq.scale
        tensor([0.5000])
        """
        if zero_point is not None and bool((torch.as_tensor(zero_point) != 0).any()):
            raise QuantizationConfigError(f"quantization is symmetric: zero_point must be 0, got {zero_point}.")
        value = torch.as_tensor(scale, dtype=self.scale.dtype, device=self.scale.device).detach().reshape(-1)
        if value.numel() != 1 and self.ch_axis < 0:
            raise QuantizationConfigError(
                f"set_qparams: {value.numel()} scales need qscheme=torch.per_channel_symmetric."
            )
        if not bool((value > 0).all() & value.isfinite().all()):
            raise QuantizationConfigError(f"set_qparams: scale must be positive and finite, got {scale}.")
        self._store_scale(value)
        self._was_set = True

    def snapshot(self) -> Callable[[], None]:
        """What puts state, scale and range back as they are now."""
        tensors = {name: tensor.detach().clone() for name, tensor in self._own_tensors().items()}
        was_set, undo_observer = self._was_set, self.activation_post_process.snapshot()

        @torch.no_grad()
        def undo() -> None:
            for name, tensor in self._own_tensors().items():
                if tensor.shape == tensors[name].shape:
                    tensor.copy_(tensors[name])  # which is counted as a write
                else:
                    tensor.data = tensors[name].clone()
            self._was_set = was_set
            undo_observer()
            self.forget_scale()

        return undo

    def _own_tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}

    @property
    def _follows_range(self) -> bool:
        """Is the scale that of the observer's range, rather than given or trained?"""
        expected = self.activation_post_process.calculate_scale().clamp(min=self.finest_scale)
        scale = self.sound_scale().detach()
        return expected.shape == scale.shape and torch.allclose(expected, scale, rtol=1e-6, atol=0)

    def _pull_range(self) -> None:
        """Bring the observer's range after a scale that training has moved away from it."""

    def copy_statistics(self, source: FakeQuantize) -> None:
        """Take range and scale from another fake quantizer; a scale for another format follows from the range."""
        if self.is_fixed or not source.has_statistics:
            return
        source._pull_range()
        mine, theirs = self.activation_post_process, source.activation_post_process
        has_range = not source.is_fixed and theirs.has_statistics
        if has_range:
            mine.copy_from(theirs)
        is_other = source.dtype != self.dtype or source.quant_max != self.quant_max
        if has_range and is_other and source._follows_range:
            self.refresh_scale()
        else:
            ratio = (theirs.quant_max - theirs.quant_min) / (mine.quant_max - mine.quant_min)
            self._store_scale(source.sound_scale().detach().to(self.scale.device) * ratio)
        self._was_set = True

    def join_statistics(self, sources: Sequence[FakeQuantize]) -> None:
        """Take the range that covers those of several others, such as the calls of one module."""
        known = [source for source in sources if source.has_statistics]
        if self.is_fixed or not known:
            return
        widest = max(
            known,
            key=lambda source: float(source.sound_scale().detach().max()) * source.activation_post_process.half_range,
        )
        self.copy_statistics(widest)
        observers = [source.activation_post_process for source in known if not source.is_fixed]
        mine = self.activation_post_process
        for source in known:
            source._pull_range()
        for other in observers:
            mine.min_val = torch.minimum(mine.min_val, other.min_val.to(mine.min_val.device))
            mine.max_val = torch.maximum(mine.max_val, other.max_val.to(mine.max_val.device))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point from the observer."""
        return self.activation_post_process.calculate_qparams()

    def current_scale(self) -> Tensor:
        """The scale as it is now. The buffer goes on changing while training; a tensor's scale must not."""
        return self._known["scale"].get((self.scale,), self._copied_scale)

    def _moved_scale(self) -> Tensor:
        """`current_scale` while batches move it, so that to compare it with the last one is in vain."""
        scale = self.sound_scale()
        if is_asynchronous(scale) or is_traced() or torch.is_inference_mode_enabled():
            return self.current_scale()
        return scale.detach().clone()

    def _copied_scale(self) -> Tensor:
        if self.is_exact:
            self.require_scale()
        return self.scale.detach().clone()

    def _store_scale(self, value: Tensor) -> None:
        scale = self.scale
        if value.shape != scale.shape and value.numel() != 1:
            self._resize(value)
            scale = self.scale
        scale.detach().copy_(value)  # counted as a write to the scale, of which autograd knows nothing

    def _resize(self, like: Tensor) -> None:
        """Make room for as many scales as `like` has."""
        self.scale = torch.ones_like(like, device=self.scale.device)
        self.zero_point = torch.zeros_like(self.scale, dtype=torch.long)

    def refresh_scale(self) -> None:
        """Take the scale from the observer."""
        if self.activation_post_process._write_scale(self.scale, self.finest_scale):
            return
        scale = self.activation_post_process.calculate_scale()
        self._store_scale(scale if not self.finest_scale or self.is_fixed else scale.clamp(min=self.finest_scale))

    @untraced
    def observe(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> None:
        """Update statistics and scale from a tensor, clamped to the limits of a fused activation."""
        observer: Any = self._modules["activation_post_process"]
        if observer.is_fixed or self._is_frozen or (self._was_set and not observer.averaging_constant):
            return  # given, or given once and frozen
        if is_backward():
            return  # a checkpoint recomputes what has been seen in the forward
        if observer.joins_calibration:
            observer.counts_together = not self.is_quantizing
        observer.observe(x, *limits)
        if not observer.has_statistics:
            return
        sources = observer.min_val, observer.max_val, self.scale
        if not is_asynchronous(x) and (torch.is_grad_enabled() or sources[0].numel() == 1):
            self.refresh_scale()  # it takes less time than to compare, or has moved, as at every step of a training
        elif not self._known["range"].holds(sources):
            self.refresh_scale()
            self._known["range"].get((observer.min_val, observer.max_val, self.scale), lambda: True)

    def release(self) -> None:
        """Take in what the observer was told to hold."""
        if self.activation_post_process.release():
            self.refresh_scale()

    def gather(self, x: Tensor) -> bool:
        """Inside `observe_together`, keep a tensor for the end; says whether it did."""
        if self._gathered is None:
            return False
        self._gathered.append(x.detach())
        return True

    def round(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> Tensor:
        """Real values on the grid; gradients pass straight through inside the range."""
        observer: Any = self._modules["activation_post_process"]
        ends = observer.quant_min, observer.quant_max
        return round_to_grid(x, self.scale, observer.ch_axis, *ends, limits, self.saturate)

    def forward(
        self, x: Tensor, limits: tuple[float, float] = NO_LIMITS, owned: bool = False, seen: Tensor | None = None
    ) -> QTensor:
        """Observe and round as the state says.

        Args:
            x: real values.
            limits: range of a fused activation, such as ``(0, 6)`` for ReLU6.
            owned: nobody else needs `x`; its memory may be used again.
            seen: what is observed in place of `x`, which may take these values.
        """
        if type(x) is not Tensor:
            x = x.as_subclass(Tensor)
        self.check_nan(x)
        is_quantizing, is_observing, is_clamped = self.is_quantizing, self.is_observing, limits == NO_LIMITS
        if not self.gather(x) and is_observing and not self._keeps_range and not self._is_shown():
            if owned and seen is None and limits != NO_LIMITS and not is_quantizing:
                is_clamped = self._observe_clamped(x, limits)
            else:
                self.observe(x if seen is None else seen, limits)
        if is_quantizing and self._gathered is None:
            out = self.round(x, limits)
        else:
            out = x if is_clamped else clamped(x, limits, owned)
        observer: Any = self._modules["activation_post_process"]
        scale = self._moved_scale() if is_observing else self.current_scale()
        result = real_qtensor(out, scale, observer.dtype, observer.ch_axis, is_rounded=is_quantizing)
        if limits != NO_LIMITS and not (is_observing and is_asynchronous(x)):  # only exact integers use the range
            result.set_range(*integer_limits(scale, observer.quant_min, observer.quant_max, limits))
        return result

    def _observe_clamped(self, x: Tensor, limits: tuple[float, float]) -> bool:
        """Observe a tensor that may be written to, clamping it in the same pass where that is possible; was it?"""
        ends = clamped_ends(x, limits)
        seen = vars(self.activation_post_process)
        if ends is not None:
            seen["clamped"] = (x, ends)
        try:
            self.observe(x, limits)
        finally:
            seen.pop("clamped", None)
        return ends is not None

    def _is_shown(self) -> bool:
        """Is the model shown to `torch.jit.trace`, which calls it several times, rather than run on data?"""
        return is_traced() and self.has_statistics

    def weight(self, weight: Tensor) -> Tensor:
        """Observe weights and round them as the state says; an ordinary tensor comes back."""
        self.check_nan(weight)
        if not self.is_observing:
            return self.round_weight(weight) if self.is_quantizing else weight
        seen = vars(self.activation_post_process)
        seen["ends_of"] = (weight, None)
        try:
            self.observe(weight)
            return self.round_weight(weight) if self.is_quantizing else weight
        finally:
            seen.pop("ends_of", None)

    def round_weight(self, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """The rounded weights, as an ordinary tensor.

        Args:
            scale: instead of the quantizer's own, one that follows from it (of weights folded with a batch norm).
        """
        scale = self.scale if scale is None else scale
        # Weights rarely leave their range; where none does, the gradient needs no mask.
        saturate = self.saturate and not self.covers(weight, scale)
        return round_to_grid(weight, scale, self.ch_axis, self.quant_min, self.quant_max, saturate=saturate)

    @untraced
    def covers(self, x: Tensor, scale: Tensor) -> bool:
        """Is it known that every value lies where the gradient passes? On a GPU a mask is cheaper than to ask."""
        if is_asynchronous(x):
            return False
        observer: Any = self._modules["activation_post_process"]
        known, scale = observer.ends_of, scale.detach()
        if known is not None and known[0] is x and known[1] is not None and known[1][0].shape == scale.shape:
            smallest, largest = known[1]
        elif scale.numel() > 1:
            smallest, largest = ends_of_rows(x.detach().transpose(0, observer.ch_axis).flatten(1))
        else:
            smallest, largest = torch.aminmax(x.detach())
        lower, upper = (observer.quant_min - 0.5) * scale, (observer.quant_max + 1) * scale
        return bool(((smallest > lower) & (largest < upper)).all())

    def extra_repr(self) -> str:
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, observer_enabled={self.observer_enabled}, "
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, dtype={self.dtype}, qscheme={self.qscheme}, "
            f"ch_axis={self.ch_axis}, scale={self.scale}, zero_point={self.zero_point}"
        )

    @property
    def quant_range(self) -> Tensor:
        """The smallest and largest integer, as state dicts have them: what the scale is for."""
        return torch.tensor([self.quant_min, self.quant_max], dtype=torch.int32, device=self.scale.device)

    @quant_range.setter
    def quant_range(self, written: Tensor) -> None:
        require_same_range(written, (self.quant_min, self.quant_max), type(self).__name__)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if not self.scale.is_meta and not self.has_statistics:
            self.finish()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "quant_range"] = self.quant_range

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing: list, unexpected: list,
        errors: list,
    ) -> None:  # fmt: skip
        scale, written = state_dict.get(prefix + "scale"), state_dict.pop(prefix + "quant_range", None)
        before = self.is_observing, self.is_quantizing
        self.loaded = LoadedScale.AS_IT_IS
        if isinstance(scale, Tensor):
            if scale.shape != self.scale.shape and (self.ch_axis >= 0 or scale.numel() == 1):
                self._resize(scale)  # else torch says that the sizes differ
            self._was_set = self._was_set or bool((scale != 1).any())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self.state_is_loaded = self.state_is_loaded or before != (self.is_observing, self.is_quantizing)
        if self.is_fixed:
            self.refresh_scale()
            if isinstance(scale, Tensor) and not torch.equal(scale.to(self.scale), self.scale):
                self.loaded = LoadedScale.IGNORED
        elif isinstance(scale, Tensor) and scale.shape == self.scale.shape:
            self.loaded, fitting = fitted_scale(
                scale, end_of_range(state_dict, prefix, scale), written, self.activation_post_process, self.finest_scale
            )
            if fitting is not None:
                with torch.no_grad():
                    self._store_scale(fitting.to(self.scale.device))


class CalibFakeQuantize(FakeQuantize):
    """The first generation's quantizer for calibration: a `FakeQuantize` whose observer counts all that it sees.

    The documents name it, and its observer's histogram; arguments are those of `FakeQuantize`.

    >>> fq = CalibFakeQuantize()
    >>> type(fq.activation_post_process).__name__
    'HistogramObserver'
    """

    def __init__(self, observer: type = CalibObserver, *args: Any, **kwargs: Any) -> None:
        super().__init__(observer, *args, **kwargs)


default_8bit_fake_quant = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, dtype=qint8)
default_weight_8bit_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0, dtype=qint8
)

show_at(
    "quantization.fake_quantize",
    FakeQuantState,
    FakeQuantize,
    CalibFakeQuantize,
)
