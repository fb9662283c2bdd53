"""What `tune` is asked for, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import Tensor

from horizon_plugin_profiler.tuning.judge import Judge
from horizon_plugin_pytorch.analysis.tuning.outputs import first_batches
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, as_march, get_march, require_march, set_march

_BOTH = (March.NASH_H, March.NASH_P)  # multiply int16 by int16, whatever the toolchain's version


def check_request(
    judge: Judge, target: float | None, max_loss: float | None, share: float | None, operations: float | None
) -> None:
    """Refuse what cannot be asked for together, and numbers that are none.

    Raises:
        QuantizationConfigError: says what is wrong.
    """
    given = {"target": target, "max_loss": max_loss, "int16_share": share, "int16_operations": operations}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise QuantizationConfigError(
            f"tune: give one of {', '.join(given)}; got {' and '.join(named) or 'none of them'}."
        )
    value = given[named[0]]
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise QuantizationConfigError(f"tune: {named[0]} must be a number, got {value!r}.")
    if max_loss is not None and (judge.evaluate is None or max_loss < 0):
        raise QuantizationConfigError("tune: max_loss is for the value of `evaluate`, and not negative; give a target.")
    if target is not None and judge.evaluate is None:
        if judge.metric == "Cosine" and not -1 <= target <= 1:
            raise QuantizationConfigError(f"tune: a target for Cosine lies between -1 and 1, as 0.99; got {target!r}.")
        if not judge.higher_is_better and target < 0:
            raise QuantizationConfigError(f"tune: {judge.metric} is never negative; got the target {target!r}.")
    if named[0].startswith("int16") and not 0 <= value <= 1:
        raise QuantizationConfigError(f"tune: {named[0]} is a share between 0 and 1, got {value!r}.")


@contextmanager
def on_march(march: March | str | None) -> Iterator[None]:
    """The chip, in here."""
    before = get_march()
    if march is not None:
        set_march(as_march(march))
    try:
        yield
    finally:
        set_march(before)


def prepare_arguments(given: Mapping[str, Any] | None, own_scales: bool | Iterable[str]) -> dict[str, Any]:
    """What to tell `prepare`, as far as it is not what it does anyway."""
    arguments = dict(given or {})
    if taken := sorted(arguments.keys() & {"model", "example_inputs", "qconfig_setter", "qconfig_dict", "out_dir"}):
        raise QuantizationConfigError(f"tune: prepare_args cannot have {' and '.join(taken)}, which tune itself gives.")
    if own_scales is not False:
        if "own_scales" in arguments:
            raise QuantizationConfigError("tune: own_scales is given twice, the second time in prepare_args.")
        arguments["own_scales"] = own_scales
    asked = arguments.get("own_scales")
    if asked is not None and not isinstance(asked, bool):
        arguments["own_scales"] = (asked,) if isinstance(asked, str) else tuple(asked)
    return arguments


def check_seed(seed: Any) -> None:
    """Refuse what no generator of random numbers takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise QuantizationConfigError(f"tune: seed must be a whole number of 64 bits, got {seed!r}.")


def thresholds(given: Mapping[str, Any] | None) -> dict[str, float]:
    """Scales that are fixed, as largest magnitudes by path."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(path, str) for path in given):
        raise QuantizationConfigError(
            f'tune: fixed_scales are largest magnitudes by path, such as {{"quant": 200.0}}; got {given!r}.'
        )
    return {path: end.item() if isinstance(end, Tensor) and end.numel() == 1 else end for path, end in given.items()}


def allows_both_int16(asked: bool | None) -> bool:
    """May input and weight of a layer both be int16?"""
    return require_march("tune") in _BOTH if asked is None else asked


def measured_on(batches: list[Any], samples: int) -> list[Any]:
    """The first batches that have so many samples together."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise QuantizationConfigError(f"tune: samples must be a whole number of at least 1, got {samples!r}.")
    return first_batches(batches, samples)
