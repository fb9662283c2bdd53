"""Writing to a part of a tensor while training."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.function_handlers import described, handle
from horizon_plugin_pytorch.in_place import require_own_memory, write
from horizon_plugin_pytorch.nn.assign import Assign as _Float
from horizon_plugin_pytorch.nn.comparison import truth
from horizon_plugin_pytorch.nn.qat.composite import Composite, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.where import Where
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Call, Counts, Operator, ScaleRule, Trait, register
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor


class Assign(Composite):
    """``x[index] = value``: both are joined on one scale, and the result selects from them.

    A number is put in with `where`, and so is what a computed mask chooses. Conversion replaces these parts.
    """

    def __init__(self, qconfig: Any) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.join, self.where = optional(FloatFunctional(qconfig)), optional(Where(qconfig))

    @classmethod
    def from_float(cls, mod: nn.Module) -> Assign:
        """The QAT form."""
        return cls(mod.qconfig)

    def forward(self, x: Any, value: Any, index: Any) -> Any:
        if isinstance(x, (dict, list)):
            raise NotImplementedError(
                f"a quantized tensor is written into an input of the model, a {type(x).__name__}, {self.place}, which "
                "tracing cannot follow. Keep it under a name of its own, or in a new dict or list; or let `prepare` "
                "run the model (`method=PrepareMethod.JIT_STRIP`), which can."
            )
        if isinstance(index, QTensor):
            mask = truth(index)
            mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
            if not is_number(value) and value.numel() != 1:
                raise NotImplementedError(
                    f"`x[mask] = values` {self.place} takes as many values as the mask has ones, which no chip can "
                    "plan for. Give a value for every place: `x = torch.where(mask, values, x)`."
                )
            return self.where(mask, value, x)
        if is_number(value):
            mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
            mask[index] = True
            return self.where(mask, value, x)
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        shape = places[index].shape
        while value.dim() > len(shape):  # torch drops leading axes of one
            value = value.squeeze(0)
        places[index] = torch.arange(shape.numel(), device=x.device).view(shape) + x.numel()
        joined = self.join.cat([x.reshape(-1), value.expand(shape).reshape(-1)])
        return joined.index_select(0, places.reshape(-1)).reshape(x.shape)


def _bind(x: Any, index: Any, value: Any) -> Call:
    return Call(_Float, (x, value, index))


register(Operator(
    "assign", ScaleRule.OWN, Assign, Assign, (_Float,), {operator.setitem: _bind}, {}, FROM_BAYES,
    traits=Trait.KEEPS_BOOLEANS | Trait.NUMBERS, counts=Counts(),
))  # fmt: skip


@handle(Tensor.__setitem__)
def _assign(func: Any, args: tuple, kwargs: dict) -> None:
    """Write booleans, or write into ordinary integers by a computed mask; anything else has a scale of its own."""
    x, index, value = args
    is_bool = isinstance(x, QTensor) and x.dtype == qbool
    if not (is_bool or (not isinstance(x, QTensor) and not x.is_floating_point())):
        raise NotImplementedError(
            f"{described(func)} needs a scale of its own: in eager mode call the module "
            "`horizon_plugin_pytorch.nn.Assign()(x, value, index)`, or put a DeQuantStub before it; `prepare` replaces "
            "it by itself."
        )
    old = truth(x) if is_bool else x
    if isinstance(index, QTensor):
        mask = truth(index)
        mask = mask.reshape(*mask.shape, *[1] * (old.dim() - mask.dim()))
    else:
        mask = torch.zeros(old.shape, dtype=torch.bool, device=old.device)
        mask[index] = True
    new = value.plain() if isinstance(value, QTensor) else value
    if isinstance(new, Tensor) and new.numel() != 1:
        raise NotImplementedError(f"{described(func)} of several booleans: write `x = torch.where(mask, values, x)`.")
    if is_bool:
        write(x, bool_qtensor((mask & truth(new)) | (~mask & old), x.is_integer), described(func), index)
    else:
        require_own_memory(x, described(func))
        write(x, torch.where(mask, new, old).to(old.dtype), described(func))
