"""Functions on QTensors that no module of a model runs: in eager mode, and on tensors of one's own.

What keeps the range of its input (resizing, sampling, averages over windows) runs on the input's grid. Functions of
this package that compute in real numbers say that they do.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.qconfig import QConfig
from horizon_plugin_pytorch.function_handlers import calling_line, described, handle, unsupported
from horizon_plugin_pytorch.nn.boxes import require_real
from horizon_plugin_pytorch.nn.filtering import filter, rle
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.operators.table import NotBindable, Operator, ScaleRule, Trait, row_of_function, rows
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.statistics.observer_v2 import FixedScaleObserver
from horizon_plugin_pytorch.torch_functions import plain_tensors

_MOST, _MOST_BYTES = 256, 1 << 26
_BETWEEN_LOOKS = 64  # calls: to look takes longer than a call, and a module takes more memory with each new size


class _Modules:
    """The modules of calls, which keep their plans: so many, so much memory; threads may use it at the same time."""

    def __init__(self) -> None:
        self._made: dict[tuple, QATModule] = {}
        self._lock = threading.Lock()
        self._calls = 0

    def get(self, key: tuple, make: Callable[[], QATModule]) -> QATModule:
        """The module for a call; the key is all that it depends on."""
        made = self._made.get(key)
        if made is None:
            made = make()
        with self._lock:
            self._calls += 1
            self._made.pop(key, None)
            self._made[key] = made  # as the one that was in use last
            if len(self._made) > _MOST:
                del self._made[next(iter(self._made))]
            if not self._calls % _BETWEEN_LOOKS:
                self._shrink()
        return made

    def _shrink(self) -> None:
        twins: dict[tuple, Any] = {key: module.twin() for key, module in self._made.items()}
        sizes: dict[tuple, int] = {key: twin.plan_bytes for key, twin in twins.items()}
        total = sum(sizes.values())
        for key in list(sizes)[:-1]:
            if total <= _MOST_BYTES:
                break
            total -= sizes[key]
            del self._made[key]

    def __len__(self) -> int:
        return len(self._made)


_MODULES = _Modules()


def _on_the_grid(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function that keeps the range of its input, with the input's scale."""
    if interceptor() is not None:  # the model has no module for this call, as it has no qconfig here
        raise unsupported(func)
    found = row_of_function(func, args, kwargs)
    assert found is not None
    row, bind = found
    try:
        call = bind(*args, **kwargs)
    except NotBindable as error:
        raise NotImplementedError(f"{described(func)} has no quantized form as it is called here: {error}.") from error
    assert call is not None
    x = call.args[0]
    if not isinstance(x, QTensor):  # only the positions are quantized
        real = pytree.tree_map(lambda v: v.as_real() if isinstance(v, QTensor) else v, (args, kwargs))
        return func(*real[0], **real[1])
    try:
        module = _module(row, call, x)
    except UnsupportedOperatorError as error:  # which knows no line
        raise UnsupportedOperatorError(str(error).replace(at(""), calling_line().strip(), 1)) from error
    if not x.is_integer:
        return module(*call.args, **call.kwargs)
    with torch.no_grad():
        return module.twin()(*call.args, **call.kwargs)


def _module(row: Operator, call: Any, x: QTensor) -> QATModule:
    """The module for a call."""
    is_average = Trait.AVERAGE in row.traits
    # A tensor among the settings is read: as text it would be rounded, and it may be written to later.
    settings = pytree.tree_map(lambda v: v.tolist() if isinstance(v, Tensor) else v, call.settings)
    key: tuple = (row.name, repr(sorted(settings.items())), str(x.device))
    if is_average:
        key = (*key, str(x._format), float(x.scale), _state(x))

    def make() -> QATModule:
        float_module = replace(call, settings=settings).make()
        float_module.qconfig = _qconfig_of(x) if is_average else None
        float_module.path = ""
        made = row.qat.from_float(float_module).to(x.device)  # type: ignore[union-attr]
        for quantizer in made.fake_quantizers():
            quantizer.set_state(_state(x))
        return made.eval()

    return _MODULES.get(key, make)


def _qconfig_of(x: QTensor) -> QConfig:
    """The scale and format of a tensor as those of a result."""
    fixed = FakeQuantize.with_args(observer=FixedScaleObserver, dtype=x._format, scale=float(x.scale))
    return QConfig(activation=fixed, weight=None)


def _state(x: QTensor) -> FakeQuantState:
    """The state in which the module that gave a tensor ran."""
    if x.is_integer or x.grid is not None:
        return FakeQuantState.VALIDATION
    return FakeQuantState.QAT if x.is_rounded else FakeQuantState.CALIBRATION


def _refused(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Functions of this package that compute in real numbers do it before or after the quantized part, and say so."""
    inspect.unwrap(func)(*args, **kwargs)
    require_real(func.__name__, args, kwargs)


def _as_written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of this package that knows what to do with a QTensor."""
    with plain_tensors():
        return func(*args, **kwargs)


for _row in rows():
    _keeps_range = _row.qat is not None and _row.scale_rule is ScaleRule.INHERIT and Trait.FUSED not in _row.traits
    for _function in _row.functions:
        if _keeps_range or Trait.AVERAGE in _row.traits:
            handle(_function)(_on_the_grid)
        elif _function in (filter, rle):
            handle(_function)(_as_written)
        elif _row.is_real and getattr(_function, "__horizon_leaf__", False):
            handle(_function)(_refused)
            vars(_function).setdefault("__horizon_float__", "put a DeQuantStub before it, on each tensor that it gets")
