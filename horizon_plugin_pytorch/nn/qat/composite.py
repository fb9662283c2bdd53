"""Shared by operators made of smaller ones (softmax, layer norm): int16 inside, the qconfig's format outside."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.quantization.observer import FixedScaleObserver, MovingAverageMinMaxObserver
from horizon_plugin_pytorch.quantization.qconfig import QConfig


def inner_qconfig(qconfig: Any, scale: float | None = None) -> QConfig:
    """The qconfig of a part: the same observer, in int16; or a fixed scale."""
    activation = qconfig.activation
    if scale is not None:
        fixed = activation.with_args(observer=FixedScaleObserver, dtype=qint16, scale=scale)
        return QConfig(activation=fixed, weight=None)
    kwargs = {k: v for k, v in activation.kwargs.items() if k not in ("scale", "quant_min", "quant_max")}
    if "scale" in activation.kwargs:  # a fixed scale of the result says nothing about the parts
        kwargs["observer"] = MovingAverageMinMaxObserver
    return QConfig(activation=type(activation)(activation.cls, {**kwargs, "dtype": qint16}), weight=None)
