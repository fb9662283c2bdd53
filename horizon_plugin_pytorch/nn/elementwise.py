"""Module forms of torch functions of one variable; their quantized forms are look-up tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.operators import finite


class Elementwise(nn.Module):
    """A function of one variable.

    A subclass gives `function`, and `tabulated` where the quantized form differs: functions with a pole are clipped,
    and those with a limited domain have values outside of it (see `nn.finite`).

    Args:
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    function: ClassVar[Callable[..., Tensor]]
    tabulated: ClassVar[Callable[..., Tensor] | None] = None
    arguments: ClassVar[tuple[str, ...]] = ()  # what `tabulated` takes besides x; attributes of the module

    def __init__(self, **table_kwargs: Any) -> None:
        super().__init__()
        self.table_kwargs = table_kwargs

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(x)

    def quantized_function(self) -> Callable[[Tensor], Tensor]:
        """What is put into the table."""
        function = type(self).tabulated or type(self).function
        given = {name: getattr(self, name) for name in self.arguments}
        return partial(function, **given) if given else function

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.arguments)


class SegmentLUT(Elementwise):
    """Any function of one variable, deployed as a look-up table.

    An int8 input has 256 entries, each rounded to nearest. An int16 input has up to 64 segments of 64 intervals,
    between whose ends the value is interpolated.

    Args:
        simulated_func: maps a real tensor to a real tensor, element by element; torch functions, no Python branches.
        name: how it appears in reports.
        auto_divide_strategy: ``"curvature"`` makes segments short where the function bends, ``"evenly"`` equally wide.
        max_segments: at most so many segments, up to 64.

    >>> SegmentLUT(torch.sin, auto_divide_strategy="curvature")(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(
        self,
        simulated_func: Callable[[Tensor], Tensor],
        name: str = "",
        auto_divide_strategy: str = "curvature",
        max_segments: int = 64,
    ) -> None:
        super().__init__(auto_divide_strategy=auto_divide_strategy, max_segments=max_segments)
        self.simulated_func = simulated_func
        self.name = name or getattr(simulated_func, "__name__", "function")

    def forward(self, x: Tensor) -> Tensor:
        return self.simulated_func(x)

    def quantized_function(self) -> Callable[[Tensor], Tensor]:
        return self.simulated_func

    def extra_repr(self) -> str:
        return self.name


class Acos(Elementwise):
    """``torch.acos``; beyond [-1, 1] the quantized form is that of the nearest end."""

    function = staticmethod(torch.acos)
    tabulated = staticmethod(finite.acos)


class Acosh(Elementwise):
    """``torch.acosh``; the quantized form is 0 below 1."""

    function = staticmethod(torch.acosh)
    tabulated = staticmethod(finite.acosh)


class Asin(Elementwise):
    """``torch.asin``; beyond [-1, 1] the quantized form is that of the nearest end."""

    function = staticmethod(torch.asin)
    tabulated = staticmethod(finite.asin)


class Asinh(Elementwise):
    """``torch.asinh``."""

    function = staticmethod(torch.asinh)


class Atan(Elementwise):
    """``torch.atan``."""

    function = staticmethod(torch.atan)


class Atanh(Elementwise):
    """``torch.atanh``; the quantized form lies in ``[-max_value, max_value]``, also beyond (-1, 1).

    Args:
        max_value: largest magnitude of the quantized form's output.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    function = staticmethod(torch.atanh)
    tabulated = staticmethod(finite.atanh)
    arguments = ("max_value",)

    def __init__(self, max_value: float = 6.0, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.max_value = max_value


class Ceil(Elementwise):
    """``torch.ceil``; no gradient, as in torch."""

    function = staticmethod(torch.ceil)


class Cos(Elementwise):
    """``torch.cos``."""

    function = staticmethod(torch.cos)


class Cosh(Elementwise):
    """``torch.cosh``."""

    function = staticmethod(torch.cosh)


class Erf(Elementwise):
    """``torch.erf``."""

    function = staticmethod(torch.erf)


class Exp(Elementwise):
    """``torch.exp``."""

    function = staticmethod(torch.exp)


class Floor(Elementwise):
    """``torch.floor``; no gradient, as in torch."""

    function = staticmethod(torch.floor)


class HardLog(Elementwise):
    """``torch.log``; the quantized form is at least `min_value`, also for x <= 0.

    Args:
        min_value: smallest output of the quantized form.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    function = staticmethod(torch.log)
    tabulated = staticmethod(finite.log)
    arguments = ("min_value",)

    def __init__(self, min_value: float = -10.0, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.min_value = min_value


class Logit(Elementwise):
    """``torch.logit``, the inverse of sigmoid; without `eps` the quantized form lies in [-10, 10].

    Args:
        eps: x is taken within ``[eps, 1 - eps]``.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    tabulated = staticmethod(finite.logit)
    arguments = ("eps",)

    def __init__(self, eps: float | None = None, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.logit(x, self.eps)


class Pow(Elementwise):
    """``torch.pow(x, exponent)`` for a number `exponent`.

    With a negative exponent the quantized form is clipped to ``[-max_value, max_value]``; with a broken exponent it
    counts a negative x as 0.

    Args:
        exponent: the power.
        max_value: largest magnitude of the quantized form's output.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.

    >>> Pow(2)(torch.tensor([3.0]))
    tensor([9.])
    """

    tabulated = staticmethod(finite.pow)
    arguments = ("exponent", "max_value")

    def __init__(self, exponent: float, max_value: float = finite.LARGEST, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.exponent, self.max_value = exponent, max_value

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(x, self.exponent)


class Reciprocal(Elementwise):
    """``torch.reciprocal``; its quantized form is clipped to ``[-max_value, max_value]``.

    A value near 0 would otherwise make the scale useless for all others.

    Args:
        max_value: largest magnitude of the quantized form's output.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    function = staticmethod(torch.reciprocal)
    tabulated = staticmethod(finite.reciprocal)
    arguments = ("max_value",)

    def __init__(self, max_value: float = finite.LARGEST, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.max_value = max_value


class Round(Elementwise):
    """``torch.round``, halves to even; no gradient, as in torch."""

    function = staticmethod(torch.round)


class Rsqrt(Elementwise):
    """``torch.rsqrt`` of ``x + epsilon``; its quantized form is clipped to `max_value`.

    Args:
        epsilon: added first, as normalisation layers do. A rounded variance below 0 counts as 0.
        max_value: largest output of the quantized form; None takes ``1 / sqrt(epsilon)``, or 100 without epsilon.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    tabulated = staticmethod(finite.rsqrt)
    arguments = ("epsilon", "max_value")

    def __init__(self, epsilon: float = 0.0, max_value: float | None = None, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.epsilon = epsilon
        self.max_value = max_value if max_value is not None else epsilon**-0.5 if epsilon > 0 else finite.LARGEST

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x + self.epsilon)


class Selu(Elementwise):
    """``torch.selu``."""

    function = staticmethod(F.selu)


class Sign(Elementwise):
    """``torch.sign``; no gradient, as in torch."""

    function = staticmethod(torch.sign)


class Sin(Elementwise):
    """``torch.sin``."""

    function = staticmethod(torch.sin)


class Sinh(Elementwise):
    """``torch.sinh``."""

    function = staticmethod(torch.sinh)


class Sqrt(Elementwise):
    """``torch.sqrt``; the quantized form of a negative number is 0."""

    function = staticmethod(torch.sqrt)
    tabulated = staticmethod(finite.sqrt)


class Tan(Elementwise):
    """``torch.tan``; its quantized form is clipped to ``[-max_value, max_value]``.

    Args:
        max_value: largest magnitude of the quantized form's output.
        table_kwargs: parameters of the int16 table, as `SegmentLUT` takes them.
    """

    function = staticmethod(torch.tan)
    tabulated = staticmethod(finite.tan)
    arguments = ("max_value",)

    def __init__(self, max_value: float = finite.LARGEST, **table_kwargs: Any) -> None:
        super().__init__(**table_kwargs)
        self.max_value = max_value


class Trunc(Elementwise):
    """``torch.trunc``; no gradient, as in torch."""

    function = staticmethod(torch.trunc)
