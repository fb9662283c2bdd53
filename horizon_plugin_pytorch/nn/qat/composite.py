"""Shared by operators made of smaller ones (softmax, layer norm): int16 parts, the result as the qconfig says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import ConversionError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.qconfig import QConfig
from horizon_plugin_pytorch.nn.qat.module import QATModule, real
from horizon_plugin_pytorch.nn.qat.stubs import QuantStub
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.statistics.cache import Cache
from horizon_plugin_pytorch.statistics.observer import FixedScaleObserver, MovingAverageMinMaxObserver


def inner_qconfig(qconfig: Any, scale: float | None = None) -> QConfig:
    """The qconfig of a part: the same observer, in int16; or a fixed scale."""
    activation = qconfig.activation
    if scale is not None:
        fixed = activation.with_observer(FixedScaleObserver, dtype=qint16, scale=scale)
        return QConfig(activation=fixed, weight=None)
    if "scale" in activation.kwargs:  # a fixed scale of the result says nothing about the parts
        activation = activation.with_observer(MovingAverageMinMaxObserver)
    kwargs = {k: v for k, v in activation.kwargs.items() if k not in ("quant_min", "quant_max")}
    return QConfig(activation=type(activation)(activation.cls, {**kwargs, "dtype": qint16}), weight=None)


def shown_qconfig(qconfig: Any, scale: float | None = None) -> QConfig:
    """The qconfig of a part that only observes (see `PartedModule`): nothing trains its scale."""
    activation = inner_qconfig(qconfig, scale).activation
    kwargs = {k: v for k, v in activation.kwargs.items() if k != "use_grad_scaling"}
    return QConfig(activation=FakeQuantize.with_args(**kwargs), weight=None)


class Composite(PlacedModule):
    """An operator made of smaller QAT modules, which conversion replaces one by one."""

    follows: ClassVar[frozenset[str]] = frozenset()  # the settings of its float form that it reads whenever it runs

    def drop_float_parameters(self) -> None:
        """Called by conversion: forget parameters that are now integers of the parts."""


def optional(module: QATModule) -> Any:
    """Mark a part that calls may never use."""
    module.is_optional = True
    return module


def constant_stub(qconfig: Any) -> QuantStub:
    """A stub for a parameter or a mask: all its values may well be equal."""
    stub = QuantStub(qconfig=qconfig)
    assert stub.activation_post_process is not None
    stub.activation_post_process.activation_post_process.may_be_constant = True
    return stub


class Times(nn.Module):
    """A tensor times a positive number: the same integers with another scale, so nothing is computed or rounded."""

    def __init__(self) -> None:
        super().__init__()
        self._factor = 1.0
        self._scale = Cache()  # one object while the input's scale is one: plans are found by it

    def forward(self, x: QTensor, factor: float) -> QTensor:
        if factor == 1:
            return x
        if factor != self._factor:
            self._factor = factor
            self._scale.clear()
        scale = x.scale
        return x.with_scale(self._scale.get((scale,), lambda: scale.detach() * factor), factor)


def on_both(function: Callable[..., Tensor], *tensors: QTensor) -> QTensor:
    """A function that selects among values, on values and integers alike; the tensors have one scale."""
    first = tensors[0]
    if first.is_integer:
        return first.like(function(*[x.plain() for x in tensors]))
    grids = [x.grid for x in tensors]
    is_exact = all(grid is not None for grid in grids)
    if is_exact and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return first.with_grid(function(*grids))
    return first.like(function(*[x.plain() for x in tensors]), function(*grids) if is_exact else None)


class _Thread(threading.local):
    shows_parts = True


_THREAD = _Thread()


@contextmanager
def hidden_parts() -> Iterator[None]:
    """In here a `PartedModule` gives its result alone: for runs in which nothing observes or looks at the parts."""
    before, _THREAD.shows_parts = _THREAD.shows_parts, False
    try:
        yield
    finally:
        _THREAD.shows_parts = before


class PartedModule(QATModule):
    """An operator that the guides show as a chain of parts.

    Its parts show what an int16 value of that step would be: they observe, and reports list them. The result does not
    depend on them: it is computed by one kernel with wider sums, and training rounds the float function once, on the
    scale of the last part. Inputs besides the first are masks, or None.
    """

    last: str  # the part whose scale is the result's

    @property
    def activation_post_process(self) -> FakeQuantize:  # type: ignore[override]
        """The fake quantizer of the result."""
        return getattr(self, self.last).activation_post_process

    def fake_quantizers(self) -> list[FakeQuantize]:
        return [self.activation_post_process]

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        """The float function, on real values."""
        raise NotImplementedError

    def show_parts(self, x: QTensor, *masks: Tensor | None) -> None:
        """Run all parts but the last."""
        raise NotImplementedError

    def forward(self, x: Any, *masks: Tensor | None) -> Any:
        """Training route, or exact integers in the VALIDATION state."""
        if not isinstance(x, QTensor):
            raise ConversionError(
                f"`{type(self).__name__}` {self.place} got a float tensor; put a QuantStub where this tensor enters "
                "the quantized part of the model."
            )
        if self.is_exact:
            return self.exact(x, *masks, trained=lambda: self._train(x, *masks))
        if _THREAD.shows_parts:
            with torch.no_grad():
                self.show_parts(x, *masks)
        return self._train(x, *masks)

    def _train(self, x: QTensor, *masks: Tensor | None) -> Any:
        return self.activation_post_process(self.real_value(real(x), *masks))
