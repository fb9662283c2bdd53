"""Observers by the names that qconfigs and methods know them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase

OBSERVERS: dict[str, type[ObserverBase]] = {}
_Observer = TypeVar("_Observer", bound=type[ObserverBase])


def named(name: str) -> Callable[[_Observer], _Observer]:
    """Give an observer class a name, by which everything that takes names of observers finds it.

    >>> @named("twice")
    ... class Twice(ObserverBase):
    ...     def _update(self, smallest, largest):
    ...         super()._update(2 * smallest, 2 * largest)
    >>> OBSERVERS.pop("twice").__name__
    'Twice'
    """

    def register(cls: _Observer) -> _Observer:
        taken = OBSERVERS.setdefault(name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise QuantizationConfigError(f"`{cls.__name__}`: {taken.__name__} has the name {name!r}; give another.")
        OBSERVERS[name] = cls  # a notebook's cell may run again
        return cls

    return register


def range_methods() -> dict[str, Any]:
    """By name, the observers that find the end of a range in a sketch, whoever has counted it."""
    # A class without a `choose` of its own is none, whatever it derives from: it may find its range otherwise.
    return {n: cls for n, cls in OBSERVERS.items() if cls._method_settings is not None and "choose" in vars(cls)}


def make_like(cls: type[ObserverBase], like: ObserverBase, **settings: Any) -> Any:
    """An observer for the same tensor as another one: with its format, channels and device."""
    made = cls(
        ch_axis=like.ch_axis, dtype=like.dtype, qscheme=like.qscheme, quant_min=like.quant_min,
        quant_max=like.quant_max, channel_len=like.min_val.numel(), pow_quantization=like.pow_quantization,
        unclipped=like.unclipped, factory_kwargs={"device": like.min_val.device},
        averaging_constant=like.averaging_constant, **settings,
    )  # fmt: skip
    for name in ("owner", "may_be_constant", "may_be_mask", "clipped_from"):
        setattr(made, name, getattr(like, name))
    return made
