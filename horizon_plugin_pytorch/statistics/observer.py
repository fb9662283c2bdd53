"""The first generation's observer names, over the same machinery as `observer_v2`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, qint8
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase, Usable
from horizon_plugin_pytorch.statistics.observer_names import named
from horizon_plugin_pytorch.statistics.observer_v2 import FixedScaleObserver, HistogramObserver

__all__ = [
    "CalibObserver",
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "PerChannelMinMaxObserver",
]

CalibObserver = HistogramObserver


class MovingAverageMinMaxObserver(ObserverBase):
    """Moving average of the smallest and largest value, one scale for the tensor."""

    _schemes = (torch.per_tensor_symmetric,)

    def __init__(
        self,
        averaging_constant: float = 0.01,
        dtype: QuantDType | str | torch.dtype = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("ch_axis", None)  # a qconfig for weights names it even where there is one scale
        super().__init__(
            averaging_constant=averaging_constant, dtype=dtype, qscheme=qscheme, quant_min=quant_min,
            quant_max=quant_max, is_sync_quantize=is_sync_quantize, factory_kwargs=factory_kwargs, **kwargs,
        )  # fmt: skip


class MovingAveragePerChannelMinMaxObserver(ObserverBase):
    """Moving average of the smallest and largest value of each channel."""

    _schemes = (torch.per_channel_symmetric,)

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: QuantDType | str | torch.dtype = qint8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            averaging_constant=averaging_constant, ch_axis=ch_axis, dtype=dtype, qscheme=qscheme, quant_min=quant_min,
            quant_max=quant_max, is_sync_quantize=is_sync_quantize, factory_kwargs=factory_kwargs, **kwargs,
        )  # fmt: skip


class MinMaxObserver(ObserverBase):
    """The smallest and the largest value of all that was seen.

    >>> ob = MinMaxObserver()
    >>> for x in (torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 3.0]), torch.tensor([0.0, 2.0])):
    ...     _ = ob(x)
    >>> float(ob.min_val), float(ob.max_val)
    (-1.0, 3.0)
    """

    def _update(self, smallest: Tensor, largest: Tensor) -> None:
        goes_on = self.has_statistics and self.min_val.shape == smallest.shape
        if goes_on and self.averaging_constant:
            torch.minimum(self.min_val, smallest, out=self.min_val)
            torch.maximum(self.max_val, largest, out=self.max_val)
            self._count_batch()
        else:
            super()._update(smallest, largest)


class PerChannelMinMaxObserver(MinMaxObserver):
    """The smallest and the largest value of each channel, of all that was seen."""

    _schemes = (torch.per_channel_symmetric,)

    def __init__(self, ch_axis: int = 0, qscheme: torch.qscheme = torch.per_channel_symmetric, **kwargs: Any) -> None:
        super().__init__(ch_axis=ch_axis, qscheme=qscheme, **kwargs)


@named("clip")
class ClipObserver(ObserverBase):
    """The moving average of smallest and largest value, but not beyond given limits.

    Args:
        xmin, xmax: limits of the range; the documents name the observer and leave them open.

    >>> ob = ClipObserver(xmax=2.0)
    >>> _ = ob(torch.tensor([-0.5, 7.0]))
    >>> float(ob.max_val)
    2.0
    """

    _is_for_weights = True
    _settings = (*ObserverBase._settings, "xmin", "xmax")

    def __init__(self, xmin: float = -1.0, xmax: float = 1.0, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not xmin < xmax:
            raise QuantizationConfigError(f"ClipObserver: xmin must be less than xmax, got {xmin}, {xmax}.")
        self.xmin, self.xmax = xmin, xmax

    def _update(self, smallest: Tensor, largest: Tensor) -> None:
        super()._update(smallest.clamp(self.xmin, self.xmax), largest.clamp(self.xmin, self.xmax))


@named("clip_std")
class ClipStdObserver(ObserverBase):
    """The moving average of the range ``mean - std_scale * std`` to ``mean + std_scale * std``, within what was seen.

    Args:
        std_scale: how many standard deviations; the documents name the observer and leave it open.
    """

    _needs_values = True
    _is_for_weights = True
    _settings = (*ObserverBase._settings, "std_scale")

    def __init__(self, std_scale: float = 3.0, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if std_scale <= 0:
            raise QuantizationConfigError(f"ClipStdObserver: std_scale must be positive, got {std_scale}.")
        self.std_scale = std_scale

    def _look_at(self, usable: Usable) -> Any:
        x, smallest, largest = usable.clamped(), usable.smallest, usable.largest
        rows = self._by_channel(x).float() if self.is_per_channel else x.float().reshape(1, -1)
        std, mean = torch.std_mean(rows, 1, correction=0)
        return (
            torch.maximum(smallest, (mean - self.std_scale * std).to(smallest.dtype)),
            torch.minimum(largest, (mean + self.std_scale * std).to(largest.dtype)),
        )


class NoopObserver(ObserverBase):
    """Observes nothing; the scale stays 1, or what `set_qparams` gave."""

    learns = False

    def observe(self, x: Tensor, low: float = -math.inf, high: float = math.inf) -> None:
        """Nothing to learn."""


show_at(
    "quantization.observer",
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    ClipObserver,
    ClipStdObserver,
    NoopObserver,
)
