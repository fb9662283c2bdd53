"""Ranges that differ so much between batches that the one that is taken cuts off values."""

from __future__ import annotations

from collections.abc import Mapping

from horizon_plugin_pytorch.errors import CalibrationWarning, warn

CLIPPED = 2.0  # times the range: more than batches of ordinary data differ
CLIPPED_INPUT = 1.5  # what enters a model is normalised, and varies less
_SHOWN = 5


def tell_clipped(ratios: Mapping[str, float], who: str) -> None:
    """Warn of tensors that have lost values.

    Args:
        ratios: by the path of each such module, the widest range of a batch over the one that was taken.
        who: whom the message names.
    """
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)
    if worst:
        shown = ", ".join(f"`{name}` {ratios[name]:.1f} times" for name in worst[:_SHOWN])
        more = f" and {len(worst) - _SHOWN} others" if len(worst) > _SHOWN else ""
        warn(
            f"{who}: ranges differ between batches, and values of the widest batch are clipped: it needed {shown}"
            f"{more} the range that was taken, the mean of the batches. Are all batches normalised alike? If they are: "
            "larger batches, the observer histogram, or `auto_calibrate`.",
            CalibrationWarning,
        )
