"""Functions of one variable, by table: sigmoid, tanh, exp and their kin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.elementwise import Exp, Reciprocal, Rsqrt, Sqrt
from horizon_plugin_pytorch.nn.operator_table import (
    Operator,
    ScaleRule,
    as_module,
    register,
)
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import segment_lut as quantized
from horizon_plugin_pytorch.nn.support import EVERYWHERE, FROM_BAYES


class SegmentLUT(RoundedModule):
    """A function of one variable with its output rounded; deployed as a look-up table.

    Args:
        function: maps a real tensor to a real tensor, element by element.
        name: how it appears in reports.
        qconfig: gives the output's format.
    """

    quantized_class = quantized.SegmentLUT

    def __init__(self, function: Callable[[Tensor], Tensor], name: str = "", qconfig: Any = None) -> None:
        super().__init__()
        self.function, self.name, self.qconfig = function, name, qconfig
        self.activation_post_process = qconfig.activation(channel_len=1)

    @classmethod
    def from_float(cls, mod: nn.Module) -> SegmentLUT:
        """The QAT form of an activation module."""
        function, name = _FUNCTIONS[type(mod)](mod)
        self = cls(function, name, mod.qconfig)
        return self

    def value(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


_FUNCTIONS: dict[type, Callable[[Any], tuple[Callable[[Tensor], Tensor], str]]] = {
    nn.Sigmoid: lambda m: (torch.sigmoid, "sigmoid"),
    nn.Tanh: lambda m: (torch.tanh, "tanh"),
    nn.SiLU: lambda m: (F.silu, "silu"),
    nn.GELU: lambda m: (partial(F.gelu, approximate=m.approximate), "gelu"),
    Exp: lambda m: (torch.exp, "exp"),
    Sqrt: lambda m: (m.quantized_function(), "sqrt"),
    Rsqrt: lambda m: (m.quantized_function(), "rsqrt"),
    Reciprocal: lambda m: (m.quantized_function(), "reciprocal"),
}

_sigmoid, _tanh = as_module(nn.Sigmoid, "input"), as_module(nn.Tanh, "input")
_silu = as_module(lambda inplace: nn.SiLU(), "input, inplace=False")
_gelu = as_module(nn.GELU, "input, *, approximate='none'")
_exp, _sqrt, _rsqrt = as_module(Exp, "input"), as_module(Sqrt, "input"), as_module(Rsqrt, "input")
_reciprocal = as_module(Reciprocal, "input")
for _name, _modules, _functions, _methods in (
    (
        "sigmoid",
        (nn.Sigmoid,),
        {torch.sigmoid: _sigmoid, F.sigmoid: _sigmoid, torch.special.expit: _sigmoid},
        {"sigmoid": _sigmoid},
    ),
    ("tanh", (nn.Tanh,), {torch.tanh: _tanh, F.tanh: _tanh}, {"tanh": _tanh}),
    ("silu", (nn.SiLU,), {F.silu: _silu}, {}),
    ("gelu", (nn.GELU,), {F.gelu: _gelu}, {}),
    ("exp", (Exp,), {torch.exp: _exp}, {"exp": _exp}),
    ("sqrt", (Sqrt,), {torch.sqrt: _sqrt}, {"sqrt": _sqrt}),
    ("rsqrt", (Rsqrt,), {torch.rsqrt: _rsqrt}, {"rsqrt": _rsqrt}),
    ("reciprocal", (Reciprocal,), {torch.reciprocal: _reciprocal}, {"reciprocal": _reciprocal}),
):
    # Published tables: these are looked up on BERNOULLI2 too, the others only from BAYES on.
    _marches = EVERYWHERE if _name in ("sigmoid", "tanh", "silu", "gelu", "exp") else FROM_BAYES
    register(Operator(_name, ScaleRule.OWN, SegmentLUT, quantized.SegmentLUT, _modules, _functions, _methods, _marches))
