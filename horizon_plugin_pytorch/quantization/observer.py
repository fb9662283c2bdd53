"""The first generation's observer names, over the same machinery as `observer_v2`."""

from __future__ import annotations

from typing import Any

import torch

from horizon_plugin_pytorch.dtype import QuantDType, qint8
from horizon_plugin_pytorch.quantization.observer_v2 import FixedScaleObserver, ObserverBase

__all__ = ["FixedScaleObserver", "MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver"]


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
