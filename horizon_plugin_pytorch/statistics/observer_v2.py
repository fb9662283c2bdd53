"""Observers: what range a tensor takes, and the scale that follows from it.

All but `MinMaxObserver` and `FixedScaleObserver` choose the range from a `Sketch` of the magnitudes, so none of them
costs more than counting; of weights with a scale for each channel they look at the values themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, as_dtype, qint8
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, require_whole, warn
from horizon_plugin_pytorch.statistics import search
from horizon_plugin_pytorch.statistics.ends import largest_of
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase, Usable
from horizon_plugin_pytorch.statistics.observer_names import make_like, named, range_methods
from horizon_plugin_pytorch.statistics.processes import all_reduce
from horizon_plugin_pytorch.statistics.row_ranges import best_ranges, least_error
from horizon_plugin_pytorch.statistics.samples import MANY, MORE, Rows, each_of, rows_of
from horizon_plugin_pytorch.statistics.sketch import Sketch
from horizon_plugin_pytorch.statistics.tail import Tail, reach_of, tail_of

MIX_PERCENTILES = (99.0, 99.9, 99.95, 99.99, 99.995, 99.999, 100.0)


def _require_percentile(who: str, value: Any, most: int) -> None:
    """Refuse what is no percentile; `most` is 1 or 100."""
    if not (isinstance(value, Real) and 0 < float(value) <= most):
        meaning = "a share between 0 and 1 here" if most == 1 else "a number of percent between 0 and 100"
        raise QuantizationConfigError(f"{who}: percentile is {meaning}, got {value!r}.")


@named("min_max")
class MinMaxObserver(ObserverBase):
    """Moving average of the smallest and largest value; the first batch initialises it.

    >>> ob = MinMaxObserver()
    >>> _ = ob(torch.tensor([-1.0, 2.55]))
    >>> round(float(ob.calculate_qparams()[0]), 6)
    0.02
    """

    _is_for_weights = True
    _method_settings = ()

    def choose(self, sketch: Sketch) -> float:
        """The end of the range of what is in a sketch."""
        return sketch.largest

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        """The end of the range of each row."""
        return rows.abs().amax(1)


class SketchObserver(ObserverBase):
    """The range of each batch from a sketch of its magnitudes, as a moving average; the range is symmetric."""

    _needs_values = True
    _method_settings: tuple[str, ...] | None = ()
    _enough: int | None = None  # values that are counted of a large tensor, at least; None for the usual number

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: tuple[Usable, Tensor] | None = None  # weights are the same in every batch of a calibration
        self._rows: tuple[Tensor, Rows] | None = None  # those of the tensor that is being looked at

    def choose(self, sketch: Sketch) -> float:
        """The end of the range."""
        raise NotImplementedError(f"{type(self).__name__} must say what it chooses")

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        """The end of the range of each row."""
        raise QuantizationConfigError(
            f"`{self._name}`: {type(self).__name__} has no scale for each channel: give it `choose_by_channel(rows)`, "
            "or take another observer for weights."
        )

    def _look_at(self, usable: Usable) -> Any:
        if self.is_per_channel:
            return self._ends_by_channel(usable)
        known, self.__dict__["_rows"] = self._rows, None
        rows = known[1] if known is not None and known[0] is usable.values else None
        ends = usable.smallest.item(), usable.largest.item()
        flat = usable.values.reshape(-1)
        tail = self._tail(flat, ends, usable.limits, rows)
        if tail is not None:
            return tail
        sketch = Sketch(self.min_val.device)
        sketch.update(flat, ends, usable.limits, rows, self._enough)
        return sketch

    def _tail(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], rows: Rows | None
    ) -> Tail | None:
        """The largest values of a large tensor, where these are all that the range depends on."""
        return None

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self._has_rows(x):
            return super()._range(x)
        rows = rows_of(x.view(-1))
        self.__dict__["_rows"] = (x, rows)
        smallest, largest = rows.ends()
        return smallest.view(1), largest.view(1)

    def _known_ends(self, x: Tensor) -> tuple[float, float] | None:
        is_known = self.clamped is not None and self.clamped[0] is x
        if not is_known and (passes() is None or self._has_rows(x)):
            return None
        return super()._known_ends(x)

    def _has_rows(self, x: Tensor) -> bool:
        """Will its rows be looked at, which have its ends?"""
        return not self.is_per_channel and each_of(x, self._enough) > 1 and x.is_contiguous()

    def _joined(self, first: Any, second: Any) -> Any:
        if self.is_per_channel:
            return torch.maximum(first, second)
        sketch = _sketch_of(first)
        sketch.merge(_sketch_of(second))
        return sketch

    def _measure(self, local: Any) -> tuple[Tensor, Tensor] | None:
        if self.is_per_channel:
            return self._measure_channels(local)
        if self._is_in_step:
            self._meet_others(self.min_val)
            local = Sketch(self.min_val.device) if local is None else _sketch_of(local)
            synchronize(local, f"`{self._name}`")
        end = self._take(local) if isinstance(local, Tail) or (local is not None and local.total) else None
        if end is None:
            return None
        self._meet_end(end)  # the one that it chooses: what it cuts off of a single tensor, it means to
        value = self._filled(end)
        return -value, value

    def _filled(self, end: float) -> Tensor:
        """The end of a range as the buffers have it; half a step beyond the largest number there is none."""
        return torch.full_like(self.max_val, min(end, largest_of(self.max_val.dtype)))

    def _take(self, sketch: Any) -> float | None:
        """The end of the range after this batch; None as long as there is none."""
        return self.choose(sketch)

    def _ends_by_channel(self, usable: Usable) -> Tensor:
        if self._last is None or self._last[0] is not usable:
            rows = self._by_channel(usable.clamped()).float()
            self._last = (usable, self.choose_by_channel(rows).to(self.max_val.dtype))
        return self._last[1]

    def _measure_channels(self, value: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self._is_in_step:
            own = torch.zeros_like(self.max_val) if value is None else value
            self._meet_others(own)
            value = _mean_over_processes(own, value is not None, f"`{self._name}`")
        return None if value is None else (-value, value)


def _sketch_of(local: Sketch | Tail) -> Sketch:
    return Sketch.of_tail(local) if isinstance(local, Tail) else local


def _mean_over_processes(value: Tensor, counts: bool, who: str) -> Tensor | None:
    """The mean of the processes whose value counts; None if there is none."""
    found = torch.cat([value * counts, value.new_tensor([float(counts)])])
    all_reduce(found, dist.ReduceOp.SUM, who)
    return found[:-1] / found[-1] if bool(found[-1]) else None


def synchronize(sketch: Sketch, who: str) -> None:
    """Merge the sketches of all processes; each has the same afterwards."""
    device = sketch.counts.device
    reach = torch.tensor([-sketch.ends[0], sketch.ends[1], sketch.total], dtype=torch.float64, device=device)
    all_reduce(reach, dist.ReduceOp.MAX, who)
    low, high, most = reach.tolist()
    ends = (-low, high)
    counts, peaks = sketch.aligned(ends)
    # What all have together must fit 32 bits: of more, every process halves its counts alike, and the shares stay.
    halvings = max(int(most * dist.get_world_size()).bit_length() - 30, 0)
    if halvings:
        counts = ((counts.long() + (1 << halvings) - 1) >> halvings).int()
    counts = torch.cat([counts, counts.new_tensor([peak >> halvings for peak in peaks])])
    all_reduce(counts, dist.ReduceOp.SUM, who)
    counts, (low_peak, high_peak) = counts[:-2].clone(), counts[-2:].tolist()
    sketch.replace(counts, ends, int(counts.sum()), (low_peak, high_peak))


def percentiles_by_channel(rows: Tensor, shares: Sequence[float]) -> Tensor:
    """Percentiles of the magnitudes of each row, exact; of shape [rows, shares].

    >>> percentiles_by_channel(torch.tensor([[1.0, -4.0, 2.0, 3.0]]), [50.0, 100.0])
    tensor([[2., 4.]])
    """
    magnitudes = rows.abs()
    wanted = [max(math.ceil(rows.shape[1] * share / 100), 1) for share in shares]
    if len(wanted) == 1:
        return magnitudes.kthvalue(wanted[0], dim=1, keepdim=True).values
    return magnitudes.sort(1).values[:, [index - 1 for index in wanted]]


@named("percentile")
class PercentileObserver(SketchObserver):
    """The given percentile of the magnitudes in each batch, as a moving average.

    The range ends at the lower edge of the bin in which the percentile falls, as the guides print it. Where few of the
    largest values decide, these are all that is looked at; then it is the percentile of all values, however large the
    tensor.

    Args:
        percentile: share of magnitudes, in percent, that the scale must cover; 100 takes the largest magnitude.
        bins: number of bins of the histogram.

    Other arguments are those of `MinMaxObserver`.

    >>> ob = PercentileObserver(50.0, bins=100)
    >>> _ = ob(torch.linspace(0, 1, 1001))
    >>> round(float(ob.max_val), 2), round(float(ob.min_val), 2)
    (0.49, -0.49)
    """

    _is_for_weights = True
    _settings = (*ObserverBase._settings, "percentile", "bins")
    _method_settings = ("percentile",)

    def __init__(self, percentile: float = 99.99, bins: int = 2048, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_percentile("PercentileObserver", percentile, 100)
        require_whole("PercentileObserver", "bins", bins, 2)
        self.percentile, self.bins = percentile, bins

    def choose(self, sketch: Sketch | Tail) -> float:
        if self.percentile == 100:
            return sketch.largest
        share = sketch.percentile(self.percentile) / sketch.largest if sketch.largest else 0.0
        return sketch.largest * max(int(min(share, 1 - 0.5 / self.bins) * self.bins), 1) / self.bins

    def _tail(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], rows: Rows | None
    ) -> Tail | None:
        cls = type(self)
        if cls.choose is not PercentileObserver.choose or cls._take is not SketchObserver._take:
            return None  # a subclass may ask a sketch for more
        each = each_of(x, self._enough)
        if each == 1:
            return None
        return tail_of(x, ends, limits, rows or rows_of(x), each, reach_of(self.percentile, x.numel()))

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        ends = percentiles_by_channel(rows, [self.percentile])
        whole = ends * (self.half_range / self.quant_max)  # unless `unclipped`, it lies at 127.5 steps; 127 is the last
        return least_error(rows, torch.cat([ends, whole], 1), self.quant_min, self.quant_max, self.half_range)


@named("mse")
class MSEObserver(SketchObserver):
    """The range with the least squared error of quantizing in each batch, as a moving average.

    Shares of the largest magnitude are compared, then the neighbourhood of the best.

    Args:
        stride: compare every `stride`-th of a hundred shares only.
        memory_estimate_ratio: has no effect, and warns: a sketch needs no estimate of memory.

    Other arguments are those of `MinMaxObserver`.

    >>> ob = MSEObserver()
    >>> _ = ob(torch.randn(100000, generator=torch.Generator().manual_seed(0)))
    >>> 3.5 < float(ob.max_val) < 4.3  # not the largest value, 4.8
    True
    """

    _is_for_weights = True
    _settings = (*ObserverBase._settings, "stride")
    _method_settings = ("stride",)

    def __init__(self, stride: int = 1, *args: Any, memory_estimate_ratio: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_whole("MSEObserver", "stride", stride, 1, 50)
        if memory_estimate_ratio is not None:
            warn("MSEObserver: memory_estimate_ratio has no effect; what it counts fits 64 KiB.", QuantizationWarning)
        self.stride = stride

    def choose(self, sketch: Sketch) -> float:
        return sketch.best_scale(self.quant_min, self.quant_max, self.stride) * self.half_range

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        return best_ranges(rows, self.quant_min, self.quant_max, self.half_range, self.stride)


class CountingObserver(SketchObserver):
    """An observer that keeps the sketch of everything that it has seen."""

    _counted = (*SketchObserver._counted, "sketch")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sketch = Sketch(self.min_val.device)

    @property
    def _covers_everything(self) -> bool:
        return self.batches is not None and not self.is_per_channel

    def _update(self, smallest: Tensor, largest: Tensor) -> None:
        if not self._covers_everything:
            super()._update(smallest, largest)
            return
        if self.counts_together:
            self._join_batch(smallest, largest)  # only to know whether a range is there from before this batch
        if self.averaging_constant or not self.has_statistics:
            self.min_val.copy_(smallest)
            self.max_val.copy_(largest)

    def begin_calibration(self) -> None:
        super().begin_calibration()
        self._forget()

    def _forget(self) -> None:
        """Begin to count anew."""
        self.sketch = Sketch(self.min_val.device)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "min_val" in state_dict:  # the range of other data than were counted
            self._forget()

    def statistics(self) -> dict[str, Tensor]:
        return {**super().statistics(), **self.sketch.state()}

    def restore(self, statistics: dict[str, Tensor]) -> None:
        super().restore(statistics)
        self.sketch.load(statistics)


@named("kl")
class KLObserver(CountingObserver):
    """The range whose quantized histogram diverges least from the histogram of all that was seen.

    Args:
        bins: number of bins of the histogram.
        update_interval: compute the range at every so many batches; with more than there are, once at the end.
            Ranges by channel are computed from each batch.

    Other arguments are those of `MinMaxObserver`.
    """

    _enough = MANY
    _settings = (*ObserverBase._settings, "bins", "update_interval")
    _counted = (*CountingObserver._counted, "_waiting")
    _method_settings = ("bins",)

    def __init__(self, bins: int = 512, update_interval: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_whole("KLObserver", "bins", bins, 4)
        require_whole("KLObserver", "update_interval", update_interval, 1)
        self.bins, self.update_interval = bins, update_interval
        self._waiting: int = 0

    def choose(self, sketch: Sketch) -> float:
        return sketch.least_divergence(self.bins, self.quant_max + 1)

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        return rows.new_tensor([self.choose(Sketch.of(row)) for row in rows])

    def _take(self, sketch: Sketch) -> float | None:
        self.sketch.merge(sketch)
        self._waiting += 1
        if self._waiting < self.update_interval:
            return None
        self._waiting = 0
        return self.choose(self.sketch)

    def _forget(self) -> None:
        super()._forget()
        self._waiting = 0

    def statistics(self) -> dict[str, Tensor]:
        return {**super().statistics(), "waiting": torch.tensor(self._waiting)}

    def restore(self, statistics: dict[str, Tensor]) -> None:
        super().restore(statistics)
        self._waiting = int(statistics["waiting"])

    def finish(self) -> bool:
        super().finish()
        if not self._waiting:
            return False
        if not self.has_statistics:
            self._warn(
                "interval",
                f"saw {self._waiting} batches, fewer than update_interval={self.update_interval}; the range was "
                "computed at the end",
            )
        self._waiting = 0
        end = self._filled(self.choose(self.sketch))
        self._update(-end, end)
        return True


@named("mix")
class MixObserver(SketchObserver):
    """The percentile, of a few, with the least squared error of quantizing in each batch, as a moving average."""

    def choose(self, sketch: Sketch) -> float:
        counted = sketch.counted()
        ends = search.percentiles(counted, MIX_PERCENTILES)
        scales = np.array(ends) / self.half_range
        return ends[int(search.squared_errors(counted, scales, self.quant_min, self.quant_max).argmin())]

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        ends = percentiles_by_channel(rows, MIX_PERCENTILES)
        return least_error(rows, ends, self.quant_min, self.quant_max, self.half_range)


@named("histogram")
class HistogramObserver(CountingObserver):
    """Counts everything that it sees, and takes the range from all of it; `reset_scale` takes it anew in another way.

    Args:
        method: ``"mse"``, ``"percentile"``, ``"kl"``, ``"mix"`` or ``"min_max"``.
        method_kwargs: ``{"percentile": 0.9999}`` (a share of one), ``{"stride": 2}``, ``{"bins": 512}``.

    Other arguments are those of `MinMaxObserver`; an `averaging_constant` of 0 freezes the range after the first batch.

    >>> ob = HistogramObserver(method="percentile", method_kwargs={"percentile": 0.5})
    >>> _ = ob(torch.linspace(-1, 1, 1001))
    >>> round(float(ob.max_val), 2)
    0.5
    """

    _enough = MORE  # for any method, which may be chosen later
    _settings = (*ObserverBase._settings, "method", "method_kwargs")
    _method_settings = None

    def __init__(self, *args: Any, method: str = "mse", method_kwargs: dict | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use(method, method_kwargs)

    def _use(self, method: str, method_kwargs: dict | None) -> None:
        """Find ranges by a method; what does not fit is refused before anything changes."""
        self._finder = (_by_method(self, method, method_kwargs or {}),)  # in a tuple: it is no part of the model
        self.method, self.method_kwargs = method, dict(method_kwargs or {})

    def choose(self, sketch: Sketch) -> float:
        return self._finder[0].choose(sketch)

    def choose_by_channel(self, rows: Tensor) -> Tensor:
        return self._finder[0].choose_by_channel(rows)

    @property
    def _covers_everything(self) -> bool:
        return not self.is_per_channel

    def _take(self, sketch: Sketch) -> float | None:
        self.sketch.merge(sketch)
        return self.choose(self.sketch)

    @staticmethod
    @torch.no_grad()
    def reset_scale(
        model: nn.Module,
        method: str = "percentile",
        method_kwargs: dict | None = None,
        dtype: QuantDType | str | None = None,
        prefix: str | tuple[str, ...] | list[str] = "",
    ) -> list[str]:
        """Choose the scales of a calibrated model anew from what its observers have counted, without data.

        Args:
            method: as in the constructor.
            method_kwargs: as in the constructor; a percentile is a share of one.
            dtype: only tensors of this format.
            prefix: only modules whose path begins so.

        Returns:
            paths of the fake quantizers whose scale was set.
        """
        wanted = None if dtype is None else as_dtype(dtype)
        prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix)
        done = []
        for path, module in model.named_modules():
            observer = getattr(module, "activation_post_process", None)
            if not isinstance(observer, HistogramObserver) or not observer.sketch.total:
                continue
            if not path.startswith(prefixes) or wanted not in (None, observer.dtype):
                continue
            observer._use(method, method_kwargs)
            end = observer._filled(observer.choose(observer.sketch))
            observer.min_val.copy_(-end)
            observer.max_val.copy_(end)
            module.refresh_scale()
            done.append(path)
        if not done:
            raise QuantizationConfigError(
                "reset_scale: no HistogramObserver has seen data in this process"
                + (f" under {', '.join(prefixes)}" if any(prefixes) else "")
                + (f" in {wanted}" if wanted is not None else "")
                + ". Prepare with observer=HistogramObserver, and calibrate before; a checkpoint has no counts."
            )
        return done


class _ShareObserver(PercentileObserver):
    """The percentile as a HistogramObserver takes it: a share of one, and not the edge of a bin."""

    def __init__(self, percentile: float = 0.9999, **kwargs: Any) -> None:
        _require_percentile("HistogramObserver", percentile, 1)
        super().__init__(percentile * 100, **kwargs)

    def choose(self, sketch: Sketch | Tail) -> float:
        return sketch.percentile(self.percentile)


def _by_method(like: ObserverBase, method: str, kwargs: dict) -> Any:
    """An observer for the same tensor that finds the end of a range by a method."""
    methods = range_methods() | {"percentile": _ShareObserver}
    if method not in methods:
        raise QuantizationConfigError(f"HistogramObserver: method must be one of {', '.join(methods)}, got {method!r}.")
    for name in kwargs:
        if name not in methods[method]._method_settings:
            raise QuantizationConfigError(f"HistogramObserver: method {method!r} has no parameter {name!r}.")
    return make_like(methods[method], like, **kwargs)


@named("fixed_scale")
class FixedScaleObserver(ObserverBase):
    """A scale that is given, not observed.

    Args:
        scale: positive number, or one per channel.
        zero_point: must be 0.

    >>> float(FixedScaleObserver(scale=1 / 128).calculate_qparams()[0])
    0.0078125
    """

    fixed_scale: Tensor
    _is_for_weights = True
    learns = False

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
    def is_fixed(self) -> bool:
        return True

    @property
    def has_statistics(self) -> bool:
        return True

    def observe(self, x: Tensor, low: float = -math.inf, high: float = math.inf) -> None:
        """Nothing to learn."""

    def calculate_scale(self) -> Tensor:
        return self.fixed_scale

    def extra_repr(self) -> str:
        return f"scale={self.fixed_scale}"


show_at(
    "quantization.observer_v2",
    MinMaxObserver,
    SketchObserver,
    synchronize,
    percentiles_by_channel,
    PercentileObserver,
    MSEObserver,
    CountingObserver,
    KLObserver,
    MixObserver,
    HistogramObserver,
    FixedScaleObserver,
)
