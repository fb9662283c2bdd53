"""Observers: what range a tensor takes, and the scale that follows from it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import QuantDType, as_dtype, qint8
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.quantization.partial import Partial

_PER_TENSOR = (torch.per_tensor_symmetric,)
_PER_CHANNEL = (torch.per_channel_symmetric,)
_SMALLEST_SCALE = 2.0**-60


class ObserverBase(nn.Module):
    """Range and number format of one tensor.

    The scale is ``max(|min|, |max|) / ((quant_max - quant_min) / 2)``: 127.5 steps for int8, 32767.5 for int16.

    Args:
        averaging_constant: weight of the newest batch in the moving average; 0 freezes the range after the first.
        ch_axis: channel axis for ``per_channel_symmetric``.
        dtype: number format.
        qscheme: ``torch.per_tensor_symmetric`` or ``torch.per_channel_symmetric``.
        quant_min, quant_max: range of integers, from dtype if not given.
        is_sync_quantize: take the range over all processes of ``torch.distributed``.
        factory_kwargs: device and dtype for the buffers.
        channel_len: number of channels, if known.
    """

    min_val: Tensor
    max_val: Tensor
    _schemes: tuple[torch.qscheme, ...] = _PER_TENSOR + _PER_CHANNEL
    _ranks_values = False  # does the range depend on more than the smallest and largest value?

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
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not 0 <= averaging_constant <= 1:
            raise QuantizationConfigError(f"`{name}`: averaging_constant must lie in [0, 1], got {averaging_constant}.")
        if qscheme not in self._schemes:
            supported = " and ".join(str(s) for s in self._schemes)
            raise QuantizationConfigError(f"`{name}` supports {supported}, got {qscheme}; quantization is symmetric.")
        self.dtype = as_dtype(dtype)
        self.quant_min = self.dtype.min if quant_min is None else int(quant_min)
        self.quant_max = self.dtype.max if quant_max is None else int(quant_max)
        if not self.dtype.min <= self.quant_min < self.quant_max <= self.dtype.max:
            raise QuantizationConfigError(
                f"`{name}`: quant_min={self.quant_min}, quant_max={self.quant_max} do not fit {self.dtype}, whose "
                f"range is [{self.dtype.min}, {self.dtype.max}]."
            )
        self.averaging_constant = averaging_constant
        self.qscheme = qscheme
        self.is_per_channel = qscheme in _PER_CHANNEL
        self.ch_axis = ch_axis if self.is_per_channel else -1
        if self.is_per_channel and ch_axis < 0:
            raise QuantizationConfigError(f"`{name}`: per_channel_symmetric needs ch_axis >= 0, got {ch_axis}.")
        self.is_sync_quantize = is_sync_quantize
        length = channel_len if self.is_per_channel else 1
        kwargs = factory_kwargs or {}
        self.register_buffer("min_val", torch.full((length,), math.inf, **kwargs))
        self.register_buffer("max_val", torch.full((length,), -math.inf, **kwargs))
        self.owner = ""
        self.may_be_constant = False  # parameters may, and nothing is wrong with them
        self._warned: set[str] = set()
        self.counts_together = False  # are all tensors until the next `begin_batch` one batch?
        self._batch: tuple[Tensor, ...] | None = None  # the range before that batch, and the batch's so far

    @property
    def _name(self) -> str:
        """What messages call it: the path of the module that it observes for, if that is known."""
        return self.owner or type(self).__name__

    @property
    def half_range(self) -> float:
        """Half the number of steps: what the largest magnitude is divided by."""
        return (self.quant_max - self.quant_min) / 2

    @property
    def has_statistics(self) -> bool:
        """Has any usable value been seen?"""
        return bool((self.max_val >= self.min_val).all())

    def forward(self, x_orig: Tensor) -> Tensor:
        """Observe a tensor and return it."""
        self.observe(x_orig)
        return x_orig

    @torch.no_grad()
    def observe(self, x: Tensor, low: float = -math.inf, high: float = math.inf) -> None:
        """Take in a tensor as it is after clamping to ``[low, high]`` (the range of a fused activation)."""
        found = self._usable_range(x.detach() if type(x) is Tensor else x.detach().as_subclass(Tensor), low, high)
        if self.is_sync_quantize and dist.is_available() and dist.is_initialized():
            # A process without usable data takes part all the same: the others wait for it.
            smallest, largest = found or (
                torch.full_like(self.min_val, math.inf),
                torch.full_like(self.max_val, -math.inf),
            )
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            found = (smallest, largest) if bool((smallest <= largest).all()) else None
        if found is not None:
            self._update(*found)

    def _usable_range(self, x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor] | None:
        """Range of the finite values, warning of what calibration should not see; None if there are none."""
        if x.numel() == 0:
            self._warn("empty", "saw an empty tensor and ignored it")
            return None
        if self._ranks_values and (low != -math.inf or high != math.inf):
            x = x.clamp(low, high)  # of the extremes alone, clamping the result is the same and costs nothing
        smallest, largest = self._range(x)
        # A sum that is not finite costs one look at every value; it may come from large finite ones.
        if not math.isfinite(float(smallest.sum() + largest.sum())) and not bool((finite := x.isfinite()).all()):
            self._warn(
                "finite",
                f"saw {int((~finite).sum())} values of {x.numel()} that are NaN or infinite and ignored them; "
                "look for a division by zero or an overflow in the float model",
            )
            if not bool(finite.any()):
                return None
            # Zero adds nothing to a symmetric range, and keeps the channels apart.
            smallest, largest = self._range(torch.where(finite, x, 0) if self.is_per_channel else x[finite])
        if low != -math.inf or high != math.inf:
            smallest, largest = smallest.clamp(low, high), largest.clamp(low, high)
        if x.numel() > 1 and not (self.is_per_channel or self.may_be_constant) and bool(smallest == largest):
            self._warn(
                "constant",
                f"saw a tensor whose values are all {float(smallest):g}; its scale says little about other data",
            )
        return smallest.to(self.min_val.dtype), largest.to(self.max_val.dtype)

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value, of shape [1] or [channels]."""
        if not self.is_per_channel:
            smallest, largest = torch.aminmax(x)
            return smallest.reshape(1), largest.reshape(1)
        if self.ch_axis >= x.dim():
            raise QuantizationConfigError(
                f"`{self._name}`: ch_axis={self.ch_axis} does not exist in a tensor of shape {tuple(x.shape)}."
            )
        by_channel = x.transpose(0, self.ch_axis).flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        return by_channel.amin(1), by_channel.amax(1)  # aminmax over an axis is many times slower

    def _update(self, smallest: Tensor, largest: Tensor) -> None:
        if self.min_val.shape != smallest.shape:
            if self.has_statistics and self.min_val.numel() > 1:
                raise QuantizationConfigError(
                    f"`{self._name}` has seen {self.min_val.numel()} channels on axis {self.ch_axis}, "
                    f"now there are {smallest.numel()}; quantize tensors of varying size with per_tensor_symmetric."
                )
            self.min_val = torch.full_like(smallest, math.inf)
            self.max_val = torch.full_like(largest, -math.inf)
        if self.counts_together:
            smallest, largest = self._join_batch(smallest, largest)
        if not self.has_statistics:
            self.min_val.copy_(smallest)
            self.max_val.copy_(largest)
        elif self.averaging_constant:
            self.min_val.add_(smallest.sub_(self.min_val), alpha=self.averaging_constant)
            self.max_val.add_(largest.sub_(self.max_val), alpha=self.averaging_constant)

    def begin_batch(self) -> None:
        """What comes next belongs to a new batch, for an observer that `counts_together`."""
        self._batch = None

    def _join_batch(self, smallest: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The range of the batch so far; statistics go back to what they were before it."""
        if self._batch is None:
            self._batch = (self.min_val.clone(), self.max_val.clone(), smallest, largest)
        else:
            before_min, before_max, low, high = self._batch
            self.min_val.copy_(before_min)
            self.max_val.copy_(before_max)
            self._batch = (before_min, before_max, torch.minimum(low, smallest), torch.maximum(high, largest))
        return self._batch[2].clone(), self._batch[3].clone()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point (always 0). Without usable statistics, and for an all-zero range, the scale is 1."""
        largest = torch.maximum(self.min_val.abs(), self.max_val.abs())
        usable = (self.max_val >= self.min_val) & (largest > 0)
        scale = torch.where(usable, largest / self.half_range, 1.0).clamp_(min=_SMALLEST_SCALE)
        return scale, torch.zeros_like(scale, dtype=torch.long)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"`{self._name}` {what}.", CalibrationWarning, stacklevel=3)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in ("min_val", "max_val"):  # a checkpoint knows the number of channels, a fresh observer may not
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape != getattr(self, name).shape:
                setattr(self, name, torch.empty_like(value, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @classmethod
    def with_args(cls, **kwargs: Any) -> Partial:
        """A constructor with some arguments already given."""
        return Partial(cls, kwargs)


class MinMaxObserver(ObserverBase):
    """Moving average of the smallest and largest value; the first batch initialises it.

    >>> ob = MinMaxObserver()
    >>> _ = ob(torch.tensor([-1.0, 2.55]))
    >>> round(float(ob.calculate_qparams()[0]), 6)
    0.02
    """


class PercentileObserver(ObserverBase):
    """The given percentile of the magnitudes in each batch, from a histogram, as a moving average.

    The range is symmetric, and ends at the lower edge of the bin in which the percentile falls, as the guides print it.

    Args:
        percentile: share of magnitudes, in percent, that the scale must cover; 100 takes the largest magnitude.
        bins: number of bins of the histogram.

    Other arguments are those of `MinMaxObserver`.

    >>> ob = PercentileObserver(50.0, bins=100)
    >>> _ = ob(torch.linspace(0, 1, 1001))
    >>> round(float(ob.max_val), 2), round(float(ob.min_val), 2)
    (0.49, -0.49)
    """

    _ranks_values = True

    def __init__(
        self,
        percentile: float = 99.99,
        bins: int = 2048,
        averaging_constant: float = 0.01,
        ch_axis: int = -1,
        dtype: QuantDType | str | torch.dtype = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict | None = None,
        channel_len: int = 1,
    ) -> None:
        super().__init__(
            averaging_constant,
            ch_axis,
            dtype,
            qscheme,
            quant_min,
            quant_max,
            is_sync_quantize,
            factory_kwargs,
            channel_len,
        )
        if not 0 < percentile <= 100 or bins < 2:
            raise QuantizationConfigError(
                f"PercentileObserver: need 0 < percentile <= 100 and bins >= 2, got {percentile}, {bins}."
            )
        if self.is_per_channel:
            raise QuantizationConfigError("PercentileObserver is per tensor; use min_max for per-channel weights.")
        self.percentile, self.bins = percentile, bins

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        smallest, largest = super()._range(x)
        top = torch.maximum(smallest.abs(), largest.abs()).float()
        if not math.isfinite(float(smallest)) or not math.isfinite(float(largest)) or float(top) == 0:
            return smallest, largest
        # Divided by the largest, so that the histogram of huge or tiny values does not overflow.
        histogram = torch.histc(x.float().abs() / top, self.bins, 0, 1)
        covered = histogram.cumsum(0) / histogram.sum()
        index = int(torch.searchsorted(covered, self.percentile / 100))
        share = 1.0 if self.percentile == 100 else max(index, 1) / self.bins
        return -top * share, top * share


class FixedScaleObserver(ObserverBase):
    """A scale that is given, not observed.

    Args:
        scale: positive number, or one per channel.
        zero_point: must be 0.

    >>> float(FixedScaleObserver(scale=1 / 128).calculate_qparams()[0])
    0.0078125
    """

    fixed_scale: Tensor

    def __init__(
        self,
        scale: float | Tensor,
        zero_point: Any = 0,
        dtype: QuantDType | str | torch.dtype = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        ch_axis: int = -1,
        quant_min: int | None = None,
        quant_max: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("averaging_constant", None)
        super().__init__(
            dtype=dtype, qscheme=qscheme, ch_axis=ch_axis, quant_min=quant_min, quant_max=quant_max, **kwargs
        )
        value = torch.as_tensor(scale, dtype=torch.float32).detach().clone().reshape(-1)
        if not bool((value > 0).all() & value.isfinite().all()):
            raise QuantizationConfigError(f"FixedScaleObserver: scale must be positive and finite, got {scale}.")
        if value.numel() != 1 and not self.is_per_channel:
            raise QuantizationConfigError(
                f"FixedScaleObserver: {value.numel()} scales need qscheme=torch.per_channel_symmetric and a ch_axis."
            )
        if zero_point is not None and bool((torch.as_tensor(zero_point) != 0).any()):
            raise QuantizationConfigError(f"FixedScaleObserver: zero_point must be 0, got {zero_point}.")
        self.register_buffer("fixed_scale", value, persistent=False)

    @property
    def has_statistics(self) -> bool:
        return True

    def observe(self, x: Tensor, low: float = -math.inf, high: float = math.inf) -> None:
        """Nothing to learn."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.fixed_scale, torch.zeros_like(self.fixed_scale, dtype=torch.long)

    def extra_repr(self) -> str:
        return f"scale={self.fixed_scale}"
