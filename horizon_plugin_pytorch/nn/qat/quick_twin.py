"""The call of a QAT layer in the VALIDATION state that ran before on inputs of the same kind; see `QuickCall`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.nn.quantized.quick_call import QuickCall
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.hooks import forward_of
from horizon_plugin_pytorch.runtime.located import QUICK
from horizon_plugin_pytorch.statistics.cache import Settings


class QuickTwin:
    """What a layer does through its integer form, while that is of its weights, scales and settings.

    Args:
        layer: the QAT layer.
        twin: its integer form.
        call: what that does.
        others: its `float_parts`, of whose settings the integer form is made, too.
    """

    __slots__ = ("_call", "_children", "_formats", "_others", "_settings", "_twin")

    def __init__(self, layer: Any, twin: Any, call: QuickCall, others: list[nn.Module]) -> None:
        self._twin, self._call, self._children = twin, call, dict(layer._modules)
        self._formats = [(child, child.format) for child in layer.fake_quantizers()]
        self._settings = Settings(layer)
        self._others = [(part, Settings(part), dict(part._modules), forward_of(part)) for part in others]

    @classmethod
    def of(cls, layer: Any, twin: Any) -> QuickTwin | None:
        """The next call of a layer, if it is like the one that has just been made; None if that cannot be asked."""
        call = twin.__dict__.get(QUICK)
        if call is None:
            return None
        others = layer.float_parts()
        return cls(layer, twin, call, others) if all(map(Settings.can_tell, (layer, *others))) else None

    def __call__(self, layer: Any, args: tuple) -> QTensor | None:
        """The output; None if the layer has to be called as a whole."""
        if torch.is_grad_enabled() or fake_quantize_base.check_nan_scale is not None:
            return None
        if layer._modules != self._children or not self._settings.are_of(layer):
            return None
        for part, settings, children, forward in self._others:
            if not settings.are_of(part) or part._modules != children or forward_of(part) != forward:
                return None
        for quantizer, format in self._formats:
            if not quantizer.is_exact or quantizer.format != format:
                return None
        if layer.known_twin() is not self._twin:
            return None
        out = self._call(self._twin, args)
        return out if out is None else out._as_training()

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the layer finds its own."""

    def __reduce__(self) -> tuple:
        return type(None), ()
