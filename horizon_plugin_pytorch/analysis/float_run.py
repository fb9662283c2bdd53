"""Does a prepared model still compute what the float model does? Its own forward decides, which may ask anything."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, at
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, unrounded
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import CallSite
from horizon_plugin_pytorch.runtime.dispatch import meeting
from horizon_plugin_pytorch.runtime.results import relative_error

_HINT = ". Does the forward ask `type(module)`? `isinstance(module, cls)` answers as in float"
_TOLERANCE = 0.02  # of the norm; folding changes less by far, another path more


@torch.no_grad()
def compare_with_float(
    prepared: nn.Module, args: tuple, kwargs: dict[str, Any] | None, wanted: Any, sites: Iterable[CallSite]
) -> None:
    """Run a prepared model without any rounding, and say where it differs from the float model.

    Args:
        args, kwargs: the inputs that the float model was recorded with.
        wanted: what it gave.
        sites: the calls that it made, and that have modules now, in order.
    """
    model = _copied(prepared).eval()
    state = torch.get_rng_state()
    try:
        with unrounded(model), meeting() as met, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model(*args, **(kwargs or {}))
    except Exception as error:
        _warn(prepared, f"it stops with: {str(error).rstrip('.')}")
        return
    finally:
        torch.set_rng_state(state)
    missed = next((site for site in sites if site not in met), None)
    if missed is not None:
        _warn(prepared, f"`{missed.name}` {at(missed.scope, missed.line)} ran in float and does not run now{_HINT}")
        return
    distance = _distance(tensors_of(wanted), tensors_of(out))
    if distance > _TOLERANCE:
        _warn(prepared, f"its outputs differ by {distance:.1%} although nothing is rounded{_HINT}")


def _copied(model: nn.Module) -> nn.Module:
    """A copy that can run, and keep what it likes, without a trace in the model.

    Fake quantizers are most of a model's objects, and a run that does not observe leaves them alone: they are shared,
    and so are the notes.
    """
    kept = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    notes = [note_of(model, name) for name in ("graph", "choices")]
    return copy.deepcopy(model, {id(one): one for one in (*kept, *notes) if one is not None})


def _warn(model: nn.Module, what: str) -> None:
    warnings.warn(
        f"`{type(model).__name__}`: the prepared model does not do what the float model does on the example inputs: "
        f"{what}.",
        QuantizationWarning,
        stacklevel=5,
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
