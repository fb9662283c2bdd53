"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass

UNBIND_ADVICE = (
    "a tensor is iterated, as by `zip(x, y)` or `for part in x`, or unbound: take parts with `split` or `x[:, i]`"
)


@dataclass(frozen=True)
class Finding:
    """One limit that an operator of the model breaks."""

    place: str
    operator: str
    limit: str
    found: str
    advice: str
