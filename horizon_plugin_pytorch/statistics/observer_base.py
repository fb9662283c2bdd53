"""What all observers share: the range of a tensor as a moving average, and the scale that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_plain, is_serial
from horizon_plugin_pytorch.dtype import QuantDType, as_dtype, qint8
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError, warn
from horizon_plugin_pytorch.statistics.cache import Cache
from horizon_plugin_pytorch.statistics.clipping import CLIPPED
from horizon_plugin_pytorch.statistics.ends import LARGEST_FLOAT32, ends_of_rows, extremes, largest_of
from horizon_plugin_pytorch.statistics.partial import Partial, show_signature
from horizon_plugin_pytorch.statistics.processes import all_reduce, require_same

_PER_TENSOR = (torch.per_tensor_symmetric,)
_PER_CHANNEL = (torch.per_channel_symmetric,)
_SMALLEST_SCALE = 2.0**-60
HIDDEN = 1e4  # what a mask adds or subtracts, in the range of its stub: more than any score
_SOURCE = (
    "look for a division by zero or an overflow in the float model; a mask of -inf masks where only a softmax takes "
    "the sum, and else as `scores.masked_fill(mask, float('-inf'))`"
)


class Usable(NamedTuple):
    """The finite values of a tensor.

    Args:
        smallest, largest: of shape [1] or [channels], clamped to `limits`.
        limits: what the values are to be clamped to; ``NO_LIMITS`` if they lie inside.
    """

    values: Tensor
    smallest: Tensor
    largest: Tensor
    limits: tuple[float, float] = NO_LIMITS

    def clamped(self) -> Tensor:
        """The values inside the limits."""
        return self.values if self.limits == NO_LIMITS else self.values.clamp(*self.limits)


# What a subclass may have of its own, where a range is no longer a plain moving average.
_AVERAGING = (
    "observe", "_usable", "_range", "_extremes", "_known_ends", "_look_at", "_take_in", "_measure", "_measured",
    "_update", "_covers_everything", "_meet_end", "_can_wait", "_by_channel",
)  # fmt: skip


class ObserverBase(nn.Module):
    """Range and number format of one tensor.

    The scale is ``max(|min|, |max|) / ((quant_max - quant_min) / 2)``: 127.5 steps for int8, 32767.5 for int16. With
    `unclipped` it is ``max(|min|, |max|) / quant_max``, 127 and 32767 steps, and both ends of the range are integers.

    Args:
        averaging_constant: weight of the newest batch in the moving average; 0 freezes the range after the first.
        ch_axis: channel axis for ``per_channel_symmetric``.
        dtype: number format.
        qscheme: ``torch.per_tensor_symmetric`` or ``torch.per_channel_symmetric``.
        quant_min, quant_max: range of integers, from dtype if not given.
        is_sync_quantize: take the range over all processes of ``torch.distributed``.
        factory_kwargs: device and dtype for the buffers.
        channel_len: number of channels, if known.
        pow_quantization: round scales up to powers of two.
        unclipped: let the ends of the range be integers, instead of half a step beyond the last one.
    """

    dtype: QuantDType
    quant_min: int
    quant_max: int
    is_per_channel: bool
    averaging_constant: float
    qscheme: torch.qscheme
    ch_axis: int
    is_sync_quantize: bool
    pow_quantization: bool
    unclipped: bool
    min_val: Tensor
    max_val: Tensor
    _warned: set[str]
    _unchanged: Cache  # what was usable of weights, which are the same in every batch of a calibration
    _resting: Cache  # says that the range is that of these weights
    _schemes: tuple[torch.qscheme, ...] = _PER_TENSOR + _PER_CHANNEL
    _needs_values = False  # does the range depend on more than the smallest and largest value?
    # Attributes that statistics and scales depend on.
    _settings: tuple[str, ...] = (
        "quant_min",
        "quant_max",
        "ch_axis",
        "averaging_constant",
        "pow_quantization",
        "unclipped",
    )
    _is_for_weights = False  # can `get_default_qconfig(weight_observer=...)` name it?
    # It is also a method of `HistogramObserver` and a candidate of `auto_calibrate`, with these constructor arguments
    # as `method_kwargs`; None if not.
    _method_settings: tuple[str, ...] | None = None
    _is_average: ClassVar[bool] = False  # is it the moving average of this class, of which nothing is changed?
    learns = True  # from the tensors that it sees
    clipped_from: float = CLIPPED  # so many times its range are worth a warning
    extreme: float = 0.0  # the end of the widest range that a moving average has seen since the state was set
    uneven: float = 1.0  # so many times the range that the last calibration took, its widest batch needed
    joins_calibration: bool = False  # does it count together in the CALIBRATION state?
    owner: str = ""
    may_be_constant: bool = False  # parameters may, and nothing is wrong with them
    may_be_mask: bool = False  # does a softmax take what it is added to, so that -inf and -1e9 mean the same as -1e4?
    batches: int | None = None  # how many batches were averaged with equal weight; None for a moving average
    widest: Tensor | None = None  # the largest magnitude of their ranges
    counts_together: bool = False  # are all tensors until the next `begin_batch` one batch? (`calibrate` holds them)
    # What was before that batch, and the batch's range so far.
    _batch: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    _has_range: bool = False
    _holds: bool = False
    _held: Any = None  # what was seen since `hold`
    _has_rested: bool = False  # has it seen since `hold` what left everything as it is?
    # A tensor that was clamped on the way here, and the smallest and largest value, all finite, that it had before.
    clamped: tuple[Tensor, tuple[float, float]] | None = None
    # A tensor whose ends somebody asks for again once it is observed, and these, if all its values are finite.
    ends_of: tuple[Tensor, tuple[Tensor, Tensor] | None] | None = None
    _left_out: Tensor | None = None  # batches with NaN or infinity that an accelerator has left out
    _has_met: bool = False  # have the processes that share ranges found that they are at the same tensor?
    _counted: ClassVar[tuple[str, ...]] = ("batches", "widest")  # what it has learned beside the range

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # What a subclass passes on to this constructor is part of its signature, which users look up and print.
        super().__init_subclass__(**kwargs)
        show_signature(cls)
        cls._is_average = not cls._needs_values and all(getattr(cls, n) is getattr(ObserverBase, n) for n in _AVERAGING)

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = -1,
        dtype: QuantDType | str | torch.dtype = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict | None = None,
        channel_len: int = 1,
        pow_quantization: bool = False,
        unclipped: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not 0 <= averaging_constant <= 1:
            raise QuantizationConfigError(f"`{name}`: averaging_constant must lie in [0, 1], got {averaging_constant}.")
        if qscheme not in self._schemes:
            supported = " and ".join(str(s) for s in self._schemes)
            raise QuantizationConfigError(f"`{name}` supports {supported}, got {qscheme}; quantization is symmetric.")
        number = as_dtype(dtype)
        low = number.min if quant_min is None else int(quant_min)
        high = number.max if quant_max is None else int(quant_max)
        if not number.min <= low < high <= number.max:
            raise QuantizationConfigError(
                f"`{name}`: quant_min={low}, quant_max={high} do not fit {number}, whose range is "
                f"[{number.min}, {number.max}]."
            )
        if not low <= 0 < high:
            raise QuantizationConfigError(
                f"`{name}`: quantization is symmetric and represents 0, so quant_min must be at most 0 and quant_max "
                f"positive; got quant_min={low}, quant_max={high}."
            )
        is_per_channel = qscheme in _PER_CHANNEL
        if is_per_channel and ch_axis < 0:
            raise QuantizationConfigError(f"`{name}`: per_channel_symmetric needs ch_axis >= 0, got {ch_axis}.")
        length = channel_len if is_per_channel else 1
        kwargs = {"dtype": torch.float32} | (factory_kwargs or {})
        self.register_buffer("min_val", torch.full((length,), math.inf, **kwargs))
        self.register_buffer("max_val", torch.full((length,), -math.inf, **kwargs))
        # At once: a model has hundreds of observers, and `nn.Module.__setattr__` takes long to see an ordinary value.
        vars(self).update(
            dtype=number,
            quant_min=low,
            quant_max=high,
            is_per_channel=is_per_channel,
            averaging_constant=averaging_constant,
            qscheme=qscheme,
            ch_axis=ch_axis if is_per_channel else -1,
            is_sync_quantize=is_sync_quantize,
            pow_quantization=pow_quantization,
            unclipped=unclipped,
            _warned=set(),
            _unchanged=Cache(),
            _resting=Cache(),
        )

    @property
    def _name(self) -> str:
        """What messages call it: the path of the module that it observes for, if that is known."""
        return self.owner or type(self).__name__

    @property
    def half_range(self) -> float:
        """What the largest magnitude is divided by: half the number of steps, or the last integer on both sides."""
        if self.unclipped:
            return float(min(-self.quant_min or self.quant_max, self.quant_max))
        return (self.quant_max - self.quant_min) / 2

    @property
    def has_statistics(self) -> bool:
        """Has any usable value been seen?"""
        if not self._has_range and not self.max_val.is_meta:  # remembered: on a GPU, reading waits for the device
            self._has_range = bool((self.max_val >= self.min_val).all())
        return self._has_range

    @property
    def _covers_everything(self) -> bool:
        """Is a new range that of all data so far, so that there is nothing to average?"""
        return False

    @property
    def clipping(self) -> float:
        """The end of the widest range that a moving average of ranges has seen, over the one that it has taken."""
        is_average = self.averaging_constant and not (self.is_per_channel or self._covers_everything)
        if not is_average or self.batches is not None or not self.has_statistics:
            return 1.0
        taken = float(torch.maximum(self.min_val.neg(), self.max_val))
        return self.extreme / taken if taken > 0 else 1.0

    def forward(self, x_orig: Tensor) -> Tensor:
        """Observe a tensor and return it."""
        self.observe(x_orig)
        return x_orig

    @property
    def is_fixed(self) -> bool:
        """Was the scale given, so that there is nothing to observe?"""
        return False

    def observe(self, x: Tensor, low: float = -math.inf, high: float = math.inf) -> None:
        """Take in a tensor as it is after clamping to ``[low, high]`` (the range of a fused activation)."""
        if torch.is_grad_enabled() and self._is_average and self._average(x, low, high):
            return
        if self.may_be_mask:
            x = x.detach().clamp(-HIDDEN, HIDDEN)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._observe(x, low, high)
        elif (low, high) == NO_LIMITS and isinstance(x, nn.Parameter) and not self._can_wait(x):
            self._observe_constant(x)
        else:
            self._observe(x, low, high)

    def _observe(self, x: Tensor, low: float, high: float) -> None:
        if self._can_wait(x):
            local: Any = self._range_later(_plain(x), low, high)
            if self._holds:
                self._hold(local)
            else:
                self._update(*self._measured(*local))
            return
        self._unchanged.clear()
        values = _plain(x)
        usable = self._usable(values, low, high)
        asked = self.ends_of
        if asked is not None and asked[0] is x and usable is not None and usable.values is values:
            self.__dict__["ends_of"] = (x, (usable.smallest, usable.largest))
        local = None if usable is None else self._look_at(usable)
        if self._holds:
            self._hold(local)
        else:
            self._take_in(local)

    def _observe_constant(self, x: Tensor) -> None:
        """Take in weights, which are the same in every batch of a calibration."""
        is_known = self._unchanged.holds((x,))
        if is_known and self._rests and self._resting.holds((self.min_val, self.max_val)):
            self.__dict__["_has_rested"] = True
            if not self._holds:
                self._count_batch()
            return
        if not is_known:
            self._resting.clear()
        usable = self._unchanged.get((x,), lambda: self._usable(_plain(x), *NO_LIMITS))
        local = None if usable is None else self._look_at(usable)
        if not self._holds:
            found = self._take_in(local)
        else:
            found = self._measure(local) if self._rests else None
        ranges = self.min_val, self.max_val
        if found is not None and all(map(torch.equal, ranges, found)):
            self._resting.get(ranges, lambda: True)
            self.__dict__["_has_rested"] = True
        elif self._holds:
            self._hold(local)

    def _average(self, x: Tensor, low: float, high: float) -> bool:
        """Take in a tensor of a training step by a few operators, if nothing about it is special; says whether it did.

        These are what `observe` else does to such a tensor, hundreds of times in a step.
        """
        known = self._buffers
        least, most = known["min_val"], known["max_val"]
        assert least is not None and most is not None
        if is_asynchronous(x) or is_asynchronous(least) or not self._is_ordinary(x):
            return False
        values = _plain(x)
        ends = self._known_ends(values)
        if ends is None:
            smallest, largest = self._range(values)
            lowest, highest = self._extremes(smallest, largest)
        else:
            lowest, highest = ends
            smallest, largest = torch.tensor(ends, dtype=torch.float32, device=x.device).split(1)
        if not -LARGEST_FLOAT32 <= lowest < highest <= LARGEST_FLOAT32 or smallest.shape != least.shape:
            return False
        if lowest < low or highest > high:
            if not (lowest < high and highest > low):  # one value is left, of which the other route tells
                return False
            smallest, largest = smallest.clamp(low, high), largest.clamp(low, high)
            lowest, highest = max(lowest, low), min(highest, high)
        state = self.__dict__
        state["extreme"] = max(self.extreme, -lowest, highest)
        if (asked := self.ends_of) is not None and asked[0] is x:
            state["ends_of"] = (x, (smallest, largest))
        self._unchanged.clear()
        least.lerp_(smallest, self.averaging_constant)
        most.lerp_(largest, self.averaging_constant)
        return True

    def _is_ordinary(self, x: Tensor) -> bool:
        """Does the moving average of one process go on, outside of any calibration?"""
        if not x.dtype is torch.float32 is self.min_val.dtype:
            return False
        if self.batches is not None or self.counts_together or self._holds or self.is_sync_quantize:
            return False
        return bool(self.averaging_constant) and self._has_range and not self.may_be_mask and x.numel() > 0

    def hold(self, holds: bool = True) -> None:
        """Keep what is seen until `release`: one batch, whatever calls it came in.

        Several processes then share it once a batch, whatever each of them ran; those that share while the model runs
        must run the same operators in the same order. False ends holding, and forgets what was held.
        """
        self._holds, self._held, self._has_rested = holds, None, False

    def release(self) -> bool:
        """Share and take in what was held; says whether there was anything. Holding ends."""
        local, has_rested = self._held, self._has_rested
        self.hold(False)
        if local is None and has_rested:
            self._count_batch()
            return False
        self.begin_batch()
        with torch.no_grad():
            return self._take_in(local) is not None

    def begin_calibration(self) -> None:
        """Every batch from here on counts the same, and nothing that was seen before, but for a frozen range."""
        self.batches, self.widest = 0, None
        if self.averaging_constant:
            self.set_range(torch.full_like(self.min_val, math.inf), torch.full_like(self.max_val, -math.inf))

    def _count_batch(self) -> None:
        if self.batches is not None:
            self.batches += 1

    def _hold(self, local: Any) -> None:
        if local is not None:
            self._held = local if self._held is None else self._joined(self._held, local)

    def _look_at(self, usable: Usable) -> Any:
        """What this process contributes to the range of a batch."""
        return usable.smallest, usable.largest

    def _joined(self, first: Any, second: Any) -> Any:
        """Two contributions as one."""
        return torch.minimum(first[0], second[0]), torch.maximum(first[1], second[1])

    def _take_in(self, local: Any) -> tuple[Tensor, Tensor] | None:
        """Update statistics with the range of a batch, if there is any."""
        found = self._measure(local)
        if found is not None:
            self._update(*found)
        return found

    @property
    def _rests(self) -> bool:
        """Does a range that is that of the tensor stay so, whenever the tensor comes again?"""
        if self.counts_together or self._is_in_step:
            return False
        return self.is_per_channel or not (self._needs_values or self._holds)  # other tensors may be held beside it

    def finish(self) -> bool:
        """Observing ends: take in what is still waiting; says whether anything was."""
        self._unchanged.clear()
        self._resting.clear()
        if self._left_out is not None and bool(self._left_out):
            self._warn(
                "finite",
                f"left out {int(self._left_out)} batches, which had values that are NaN or infinite; {_SOURCE}",
            )
        self._left_out = None
        return False

    def _measure(self, local: Any) -> tuple[Tensor, Tensor] | None:
        """The range of one batch, over all processes if they are in step."""
        if local is None and not self._is_in_step:
            return None
        # A process without usable data takes part all the same: the others wait for it.
        if local is None:
            local = torch.full_like(self.min_val, math.inf), torch.full_like(self.max_val, -math.inf)
        smallest, largest = self._measured(*local)
        if smallest.numel() == 1:
            is_range = smallest.item() <= largest.item()
        else:
            is_range = bool((smallest <= largest).all())
        return (smallest, largest) if is_range else None

    def _measured(self, smallest: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The range over all processes that are in step."""
        if self._is_in_step:
            self._meet_others(smallest)
            smallest, largest = smallest.clone(), largest.clone()
            all_reduce(smallest, dist.ReduceOp.MIN, f"`{self._name}`")
            all_reduce(largest, dist.ReduceOp.MAX, f"`{self._name}`")
        return smallest, largest

    @property
    def _is_in_step(self) -> bool:
        """Do several processes observe together?"""
        return self.is_sync_quantize and dist.is_available() and dist.is_initialized()

    def _meet_others(self, found: Tensor) -> None:
        """Insist, before the first range is shared, that the other processes are at the same tensor."""
        if not self._has_met:
            mine = {f"the tensor `{self._name}`": f"{self.dtype}, {found.numel()} ranges, {self.settings()}"}
            require_same(mine, f"`{self._name}`", self.min_val.device)
            self._has_met = True

    def _usable(self, x: Tensor, low: float, high: float) -> Usable | None:
        """The finite values and their range, warning of what calibration should not see; None if there are none."""
        if x.numel() == 0:
            self._warn("empty", "saw an empty tensor and ignored it")
            return None
        ends = self._known_ends(x)
        if ends is None:
            smallest, largest = self._range(x)
            lowest, highest = self._extremes(smallest, largest)
        else:
            smallest, largest = torch.tensor(ends, dtype=torch.float32, device=x.device).split(1)
            lowest, highest = ends
        kind = self.min_val.dtype
        most = largest_of(kind)
        if not -most <= lowest <= highest <= most and not bool(
            (finite := x.isfinite() & (x.abs() <= most)).all()  # float16 takes `most` for infinite
        ):
            self._warn(
                "finite",
                f"saw {int((~finite).sum())} values of {x.numel()} that are NaN or infinite and ignored them; "
                f"{_SOURCE}",
            )
            if not bool(finite.any()):
                return None
            # Zero adds nothing to a symmetric range, and keeps the channels apart.
            x = torch.where(finite, x, 0) if self.is_per_channel else x[finite]
            smallest, largest = self._range(x)
            lowest, highest = self._extremes(smallest, largest)
        limits = NO_LIMITS
        if lowest < low or highest > high:
            limits = (low, high)
            if self.is_per_channel or not low <= lowest <= high:
                smallest = smallest.clamp(low, high)
            if self.is_per_channel or not low <= highest <= high:
                largest = largest.clamp(low, high)
            lowest, highest = min(max(lowest, low), high), min(max(highest, low), high)
        if lowest == highest and x.numel() > 1 and not (self.is_per_channel or self.may_be_constant):
            self._warn(
                "constant",
                f"saw a tensor whose values are all {lowest + 0.0:g}; its scale says little about other data. If it is "
                "not always so, calibrate with data in which it varies",
            )
        if not self._needs_values:
            self._meet_end(max(-lowest, highest))
        if smallest.dtype is not kind:
            smallest, largest = smallest.to(kind), largest.to(kind)
        return Usable(x, smallest, largest, limits)

    def _known_ends(self, x: Tensor) -> tuple[float, float] | None:
        """The smallest and the largest value, where they are known or a compiled pass finds them."""
        if self.clamped is not None and self.clamped[0] is x:
            return self.clamped[1]
        compiled = passes()
        if compiled is None or self.is_per_channel or not is_plain(x) or not is_serial(x):
            return None
        return compiled.range(x)

    def _meet_end(self, end: float) -> None:
        """The range of a tensor ends here; `calibrate` counts for itself."""
        if self.batches is None and end > self.extreme:
            self.__dict__["extreme"] = end

    def _extremes(self, smallest: Tensor, largest: Tensor) -> tuple[float, float]:
        """The two numbers; NaN stays NaN."""
        if not self.is_per_channel:
            return smallest.item(), largest.item()
        return float(smallest.amin()), float(largest.amax())

    def _can_wait(self, x: Tensor) -> bool:
        """Can it be taken in without waiting for an accelerator? The first batch cannot."""
        return is_asynchronous(x) and not self._needs_values and self._has_range and x.numel() > 0

    def _range_later(self, x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """The range, without looking at it; where it is not finite, the range so far."""
        smallest, largest = (end.to(self.min_val.dtype) for end in self._range(x))
        is_sound = smallest.isfinite() & largest.isfinite()
        is_skipped = (~is_sound).any()
        self._left_out = is_skipped.long() if self._left_out is None else self._left_out + is_skipped
        smallest = torch.where(is_sound, smallest, self.min_val)
        largest = torch.where(is_sound, largest, self.max_val)
        return smallest.clamp_(low, high), largest.clamp_(low, high)

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value, of shape [1] or [channels]."""
        if not self.is_per_channel:
            smallest, largest = extremes(x)
            return smallest.view(1), largest.view(1)
        if self.ch_axis >= x.dim():
            raise QuantizationConfigError(
                f"`{self._name}`: ch_axis={self.ch_axis} does not exist in a tensor of shape {tuple(x.shape)}."
            )
        return ends_of_rows(self._by_channel(x))

    def _by_channel(self, x: Tensor) -> Tensor:
        """A row for each channel."""
        return x.transpose(0, self.ch_axis).flatten(1) if x.dim() > 1 else x.unsqueeze(1)

    def _update(self, smallest: Tensor, largest: Tensor) -> None:
        if smallest.dtype is not self.min_val.dtype:
            smallest, largest = smallest.to(self.min_val.dtype), largest.to(self.max_val.dtype)
        if self.min_val.shape != smallest.shape:
            if self.has_statistics and self.min_val.numel() > 1:
                raise QuantizationConfigError(
                    f"`{self._name}` has seen {self.min_val.numel()} channels on axis {self.ch_axis}, "
                    f"now there are {smallest.numel()}; quantize tensors of varying size with per_tensor_symmetric."
                )
            self.min_val = torch.full_like(smallest, math.inf)
            self.max_val = torch.full_like(largest, -math.inf)
            self._has_range = False
        if self.counts_together:
            smallest, largest = self._join_batch(smallest, largest)
        if self.batches is not None:
            magnitude = torch.maximum(smallest.neg(), largest)
            self.widest = magnitude if self.widest is None else torch.maximum(self.widest, magnitude)
        if not self.has_statistics:
            self.min_val.copy_(smallest)
            self.max_val.copy_(largest)
        elif self.averaging_constant:
            constant = self.averaging_constant if self.batches is None else 1 / (self.batches + 1)
            self.min_val.lerp_(smallest, constant)
            self.max_val.lerp_(largest, constant)
        self._count_batch()

    def begin_batch(self) -> None:
        """What comes next belongs to a new batch, for an observer that `counts_together`."""
        self._batch = None

    def _join_batch(self, smallest: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The range of the batch so far; statistics go back to what they were before it."""
        batch = self._batch  # read once: another thread may begin one
        if batch is None:
            batch = (self.min_val.clone(), self.max_val.clone(), smallest, largest)
        else:
            before_min, before_max, low, high = batch
            self.min_val.copy_(before_min)
            self.max_val.copy_(before_max)
            self._has_range = False  # to be looked at again
            batch = (before_min, before_max, torch.minimum(low, smallest), torch.maximum(high, largest))
        self._batch = batch
        return batch[2].clone(), batch[3].clone()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point (always 0). Without statistics the scale is 1; zeros count as the range from -1 to 1."""
        scale = self.calculate_scale()
        return scale, torch.zeros_like(scale, dtype=torch.long)

    def calculate_scale(self) -> Tensor:
        """The scale that follows from the range."""
        value = self._one_scale()
        if value is not None:
            return self.min_val.new_full(self.min_val.shape, value)
        largest = torch.maximum(self.min_val.neg(), self.max_val)  # min_val <= max_val, so this is the magnitude
        if not (is_asynchronous(largest) or self.pow_quantization) and largest.amin().item() > 0:
            return largest.div_(self.half_range).clamp_(min=_SMALLEST_SCALE)  # what comes below, by fewer operators
        steps = torch.where(largest == 0, 1.0, largest) / self.half_range
        scale = torch.where(largest >= 0, steps, 1.0).clamp_(min=_SMALLEST_SCALE)
        return torch.exp2(torch.log2(scale).ceil()) if self.pow_quantization else scale

    def _write_scale(self, scale: Tensor, finest: float) -> bool:
        """Write the scale, or one as large as `finest`, where that takes one operator; says whether it did."""
        value = self._one_scale() if type(self).calculate_scale is ObserverBase.calculate_scale else None
        if value is None or is_asynchronous(scale):
            return False
        scale.detach().fill_(max(value, finest))  # counted as a write to the scale, of which autograd knows nothing
        return True

    def _one_scale(self) -> float | None:
        """The scale of a single range on the host, by Python, which is faster than six operators on one value."""
        known, half = self._buffers, self.half_range
        least, most = known["min_val"], known["max_val"]
        assert least is not None and most is not None
        if half < 1 or self.pow_quantization or least.numel() != 1 or is_asynchronous(least):
            return None
        low, high = least.item(), most.item()
        end = -1.0 if math.isnan(low) or math.isnan(high) else max(-low, high)
        return max((end or 1.0) / half, _SMALLEST_SCALE) if end >= 0 else 1.0

    def statistics(self) -> dict[str, Tensor]:
        """All that was learned so far, as tensors, to go on later."""
        batches = -1 if self.batches is None else self.batches
        widest = self.min_val.new_empty(0) if self.widest is None else self.widest
        return {"min_val": self.min_val, "max_val": self.max_val, "batches": torch.tensor(batches), "widest": widest}

    def restore(self, statistics: dict[str, Tensor]) -> None:
        """Go on from what `statistics` gave.

        Raises:
            ValueError: they do not fit.
        """
        ranges = statistics["min_val"], statistics["max_val"]
        knows_channels = self.min_val.numel() > 1 or not self.is_per_channel
        if knows_channels and any(r.shape != self.min_val.shape for r in ranges):
            raise ValueError(f"ranges of {ranges[0].numel()} channels instead of {self.min_val.numel()}")
        if any(bool(r.isnan().any()) for r in ranges):
            raise ValueError("ranges that are NaN")
        self.min_val, self.max_val = (r.to(self.min_val, copy=True) for r in ranges)
        self._has_range = False
        batches = int(statistics["batches"])
        self.batches = None if batches < 0 else batches
        widest = statistics["widest"].to(self.min_val)
        self.widest = widest if widest.numel() else None

    def snapshot(self) -> Callable[[], None]:
        """What puts range and counts back as they are now."""
        ends = self.min_val.clone(), self.max_val.clone()
        counted = {name: getattr(self, name) for name in self._counted}

        def undo() -> None:
            self.set_range(*ends)
            for name, value in counted.items():
                setattr(self, name, value)

        return undo

    def settings(self) -> str:
        """What the statistics depend on, as text."""
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._settings)})"

    def copy_from(self, source: ObserverBase) -> None:
        """Take another observer's range."""
        self.set_range(source.min_val.detach().clone(), source.max_val.detach().clone())

    def set_range(self, smallest: Tensor, largest: Tensor) -> None:
        """Take a range as it is."""
        self.min_val, self.max_val = smallest.to(self.min_val.device), largest.to(self.max_val.device)
        self._has_range = False

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"`{self._name}` {what}.", CalibrationWarning)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        self._has_range = False
        for name in ("min_val", "max_val"):  # a checkpoint knows the number of channels, a fresh observer may not
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape != getattr(self, name).shape:
                setattr(self, name, torch.empty_like(value, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @classmethod
    def with_args(cls, **kwargs: Any) -> Partial:
        """A constructor with some arguments already given."""
        return Partial(cls, kwargs)


def _plain(x: Tensor) -> Tensor:
    if type(x) is Tensor:
        return x.detach() if x.requires_grad else x
    return x.detach().as_subclass(Tensor)


def is_asynchronous(x: Tensor) -> bool:
    """Is the tensor on a device that computes while Python goes on, so that to look at a value is to wait for it?"""
    return not x.is_cpu
