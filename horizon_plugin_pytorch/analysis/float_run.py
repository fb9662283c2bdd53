"""Does a prepared model still compute what the float model does? Its own forward decides, which may ask anything."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, at, warn
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import CallSite
from horizon_plugin_pytorch.runtime.dispatch import meeting
from horizon_plugin_pytorch.statistics.metrics import relative_error

_HINT = ". Does the forward ask `type(module)`? `isinstance(module, cls)` answers as in float"
_TOLERANCE = 0.02  # of the norm; folding changes less by far, another path more


class FloatComparison:
    """Says where a prepared model, run without any rounding on the example inputs, differs from the float model.

    Whoever runs the prepared model in eval mode does so in this context, and then says what it gave.

    Args:
        prepared: the model.
        wanted: the tensors that the float model gave.
        sites: the calls that it made, and that have modules now, in order.
    """

    def __init__(self, prepared: nn.Module, wanted: list[Tensor], sites: Iterable[CallSite]) -> None:
        self._prepared, self._wanted, self._sites = prepared, wanted, tuple(sites)
        self._met: set[CallSite] = set()
        self._meeting = ExitStack()
        self._error: BaseException | None = None

    def __enter__(self) -> FloatComparison:
        self._met = self._meeting.enter_context(meeting())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *rest: object) -> None:
        self._meeting.close()
        self._error = error

    def conclude(self, out: Any) -> None:
        """The prepared model gave this, if it came to an end."""
        if self._error is not None:
            self._warn(f"it stops with: {str(self._error).rstrip('.')}")
            return
        missed = next((site for site in self._sites if site not in self._met), None)
        if missed is not None:
            self._warn(f"`{missed.name}` {at(missed.scope, missed.line)} ran in float and does not run now{_HINT}")
            return
        distance = _distance(self._wanted, tensors_of(out))
        if distance > _TOLERANCE:
            self._warn(f"its outputs differ by {distance:.1%} although nothing is rounded{_HINT}")

    def _warn(self, what: str) -> None:
        warn(
            f"`{type(self._prepared).__name__}`: the prepared model does not do what the float model does on the "
            f"example inputs: {what}.",
            QuantizationWarning,
        )


def _distance(wanted: list[Tensor], out: list[Tensor]) -> float:
    """The largest relative error of what is finite in float outputs; infinite where they are others."""
    if [x.shape for x in wanted] != [x.shape for x in out]:
        return float("inf")
    found = [0.0]
    for one, other in zip(wanted, out, strict=True):
        if not one.is_floating_point():
            continue
        other = other.as_real() if isinstance(other, QTensor) else other
        is_finite = one.isfinite() & other.isfinite()
        if bool(one[is_finite].any()):
            found.append(relative_error(other[is_finite], one[is_finite]))
    return max(found)
