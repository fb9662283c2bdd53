"""`FloatFunctional` while training."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.nn.qat.masked_scores import tell_mask, within_reach
from horizon_plugin_pytorch.nn.qat.module import QATModule, real
from horizon_plugin_pytorch.nn.quantized.functional_modules import (
    FUNCTIONAL_METHODS,
    QFunctional,
    dims_of,
    is_number,
    number_of,
    transposed,
)
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional as _Float
from horizon_plugin_pytorch.nn.quantized.module import without_scale
from horizon_plugin_pytorch.operators.support import FROM_BAYES, Limit, Marches, Support, Use, at_most, between, on
from horizon_plugin_pytorch.operators.table import (
    Call,
    Counts,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    advise,
    is_pair,
    register,
)
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import located, take_stubs


class FloatFunctional(QATModule):
    """Operators as methods, each with its output rounded to the grid of one scale."""

    quantized_class = QFunctional
    _has_told_divisor: bool = False  # is it said that it divides by small numbers?
    _looks_for_masks: bool = False  # that take the steps of what they are added to, until one is told
    softmax_axis: int | None = None  # of the softmax that takes its sums, if nothing else does
    is_added_to: bool = False  # does a bias or a mask come between?

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.activation_post_process = None
        if qconfig is not None and qconfig.activation is not None:
            self.activation_post_process = qconfig.activation(channel_len=1)

    @classmethod
    def from_float(cls, mod: nn.Module) -> FloatFunctional:
        """The QAT form of a float FloatFunctional, ours or torch's."""
        self = cls(getattr(mod, "qconfig", None))
        self.follow_scores(mod)
        return self

    def follow_scores(self, mod: nn.Module) -> None:
        """Take over what `passes.scores` has found about a float module that is, or has, this sum."""
        self.softmax_axis = getattr(mod, "softmax_axis", None)
        self.is_added_to = getattr(mod, "is_added_to", False)
        self._looks_for_masks = True  # parts of other operators need not
        observer = getattr(self.activation_post_process, "activation_post_process", None)
        if observer is not None:
            observer.may_be_mask = getattr(mod, "may_be_mask", False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("FloatFunctional has no forward: call one of its methods, such as `self.add.add(x, y)`.")

    @located
    def _run(self, method: str, train: Callable[[], Tensor], *args: Any, **kwargs: Any) -> Any:
        if self.is_exact or (self.activation_post_process is None and _all_exact(args)):
            return self.exact(
                *args,
                call=lambda twin, *integers: getattr(twin, method)(*integers, **kwargs),
                trained=lambda: self._finish(train()),
            )
        return self._finish(train())

    def require_scales(self, args: tuple, kwargs: dict[str, Any]) -> None:
        leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        plain = next((v for v in leaves if not isinstance(v, QTensor)), None)
        if plain is not None and not self.is_hybrid and any(isinstance(v, QTensor) for v in leaves):
            line = "" if self.line else calling_line()  # a graph says where it is called; eager mode does not
            raise without_scale(f"`{type(self).__name__}` {self.place}{line}", plain)

    def _finish(self, value: Tensor) -> Any:
        if self.activation_post_process is not None:
            return self.activation_post_process(value)
        fake_quantize_base.check(self.path, None, value)
        return value

    def add(self, x: Any, y: Any, alpha: float = 1) -> Any:
        """``x + alpha * y``."""
        return self._run("add", lambda: self._sum_of(x, y, alpha), x, y, alpha=alpha)

    def sub(self, x: Any, y: Any, alpha: float = 1) -> Any:
        """``x - alpha * y``."""
        return self._run("sub", lambda: self._sum_of(x, y, -alpha), x, y, alpha=alpha)

    def _sum_of(self, x: Any, y: Any, alpha: float) -> Any:
        """``x + alpha * y``; what is observed of scores ends where a softmax is 0."""
        values = real(x), _times(real(y), alpha)
        total, quantizer = values[0] + values[1], self.activation_post_process
        if quantizer is None or not quantizer.is_observing or not (isinstance(x, QTensor) and isinstance(y, QTensor)):
            return total
        is_scores = self.softmax_axis is not None
        if self._looks_for_masks and quantizer.is_calibrating:
            formats = (x.dtype, y.dtype) if is_scores else (quantizer.dtype, quantizer.dtype)
            self._looks_for_masks = not tell_mask(self, values, formats, is_scores)
        return within_reach(total, self.softmax_axis, self.is_added_to)

    def mul(self, x: Any, y: Any) -> Any:
        """``x * y``."""
        return self._run("mul", lambda: real(x) * real(y), x, y)

    def div(self, x: Any, y: Any) -> Any:
        """``x / y``; a divisor counts as at least 1/256 of its range."""
        return self._run("div", lambda: real(x) / self._divisor(y), x, y)

    def _divisor(self, y: Any) -> Any:
        if not isinstance(y, QTensor):
            return y
        return away_from_zero(y.as_numbers(), self, f"`{type(self).__name__}` {self.place}")

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two values, element by element."""
        return self._run("maximum", lambda: torch.maximum(real(x), real(y)), x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two values, element by element."""
        return self._run("minimum", lambda: torch.minimum(real(x), real(y)), x, y)

    def cat(self, x: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate along `dim`."""
        return self._run("cat", lambda: torch.cat([real(v) for v in x], dim), list(x), dim=dim)

    def stack(self, x: Sequence[Any], dim: int = 0) -> Any:
        """Join along a new axis `dim`."""
        return self._run("stack", lambda: torch.stack([real(v) for v in x], dim), list(x), dim=dim)

    def matmul(self, x: Any, y: Any, x_trans: bool = False, y_trans: bool = False) -> Any:
        """Matrix product."""
        return self._run(
            "matmul",
            lambda: torch.matmul(*transposed(real(x), real(y), x_trans, y_trans)),
            x, y, x_trans=x_trans, y_trans=y_trans,
        )  # fmt: skip

    def sum(self, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Sum over axes."""
        return self._run("sum", lambda: torch.sum(real(x), dims_of(x, dim), keepdim), x, dim=dim, keepdim=keepdim)

    def mean(self, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Mean over axes."""
        return self._run("mean", lambda: torch.mean(real(x), dims_of(x, dim), keepdim), x, dim=dim, keepdim=keepdim)

    def add_scalar(self, x: Any, y: float) -> Any:
        """``x + y`` for a number y."""
        y = number_of(y, "add", self.place)
        return self._run("add_scalar", lambda: torch.add(real(x), y), x, y)

    def mul_scalar(self, x: Any, y: float) -> Any:
        """``x * y`` for a number y."""
        y = number_of(y, "mul", self.place)
        return self._run("mul_scalar", lambda: torch.mul(real(x), y), x, y)

    def add_relu(self, x: Any, y: Any) -> Any:
        """``relu(x + y)``."""
        return self._run("add_relu", lambda: torch.relu(torch.add(real(x), real(y))), x, y)


take_stubs(FloatFunctional, FUNCTIONAL_METHODS)


def _all_exact(args: tuple) -> bool:
    flat = [v for a in args for v in (a if isinstance(a, (list, tuple)) else [a])]
    tensors = [v for v in flat if isinstance(v, QTensor)]
    return bool(tensors) and all(t.grid is not None for t in tensors)


def _times(x: Any, alpha: float) -> Any:
    return x if alpha == 1 else x * alpha


def away_from_zero(y: QTensor, module: FloatFunctional, place: str) -> Tensor:
    """Real values that can be divided by: they count as at least 1/256 of the range.

    While calibrating there is no scale yet, and the range is that of the batch. It is said, once for each module, if it
    makes quotients less than half of what they are in float.

    Args:
        module: what divides.
        place: the operator it is, or is a part of.
    """
    if y.is_rounded:
        return fp.away_from_zero(y.as_real(), float(y.scale) * fp.smallest_divisor(y.dtype))
    values = y.as_real()
    magnitudes = values.detach().abs()
    largest = float(magnitudes.amax()) if y.numel() else 0.0
    limit = max(largest * fp.smallest_divisor(y.dtype) / -y.dtype.min, torch.finfo(torch.float32).tiny)
    if not module._has_told_divisor and largest > 0:
        smallest = float(magnitudes.masked_fill_(magnitudes == 0, math.inf).amin())
        if 2 * smallest < limit:
            module._has_told_divisor = True
            _tell_divisor(place, smallest, largest, limit)
    return fp.away_from_zero(values, limit)


def _tell_divisor(place: str, smallest: float, largest: float, limit: float) -> None:
    warn(
        f"{place} divides by numbers between {smallest:.3g} and {largest:.3g}, and those below 1/256 of the largest "
        f"count as that ({limit:.3g}), here and in the deployed model: quotients become up to {limit / smallest:.3g} "
        "times too small. Give the divisor a lower limit in the model (`y.clamp(min=...)`), or divide after the "
        "DeQuantStub.",
        QuantizationWarning,
    )


def _binary(method: str) -> Callable[..., Call | None]:
    def bind(x: Any, y: Any = None, *, other: Any = None, alpha: Any = 1, out: Any = None) -> Call | None:
        y = other if y is None else y
        if out is not None:
            raise NotBindable("use its result instead of `out`")
        if is_number(x) and is_number(y):
            return None
        if not (is_number(x) or is_number(y)):
            return Call(_Float, (x, y), {} if alpha == 1 else {"alpha": alpha}, method=method)
        if method == "sub":
            return Call(_Float, (x, y if alpha == 1 else y * alpha), method=method)
        tensor, number = (y, x) if is_number(x) else (x, y)
        return Call(_Float, (tensor, number if alpha == 1 else number * alpha), method=f"{method}_scalar")

    return bind


def _extremum(method: str) -> Callable[..., Call]:
    def bind(x: Any, y: Any = None, *, other: Any = None) -> Call:
        return Call(_Float, (x, other if y is None else y), method=method)

    return bind


def _join(method: str) -> Callable[..., Call]:
    def bind(tensors: Any, dim: int = 0, *, axis: int | None = None) -> Call:
        return Call(_Float, (tensors,), {"dim": dim if axis is None else axis}, method)

    return bind


_add, _sub, _mul = _binary("add"), _binary("sub"), _binary("mul")
_cat, _stack, _maximum, _minimum = _join("cat"), _join("stack"), _extremum("maximum"), _extremum("minimum")


def _right_sub(x: Any, y: Any, alpha: float = 1) -> Call | None:
    return _sub(y, x, alpha=alpha)


def _has_whole_operand(use: Use) -> bool:
    shapes = [x.shape for x in use.inputs]
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    largest = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    return len(shapes) < 2 or (largest in padded and all(shape[0] == largest[0] for shape in padded if rank == 4))


_BERNOULLI2 = Support(limits=(
    at_most("C", 2048),
    Limit("two tensors, no constant",
          lambda use: len(use.inputs) > 1 and not any(x.is_constant for x in use.inputs),
          lambda use: "a number or constant", "write a BatchNorm2d or a Conv2d of 1 x 1 instead"),
))  # fmt: skip
_PAIR = on(
    bernoulli2=_BERNOULLI2,
    bayes=Support(limits=(
        Limit("one operand broadcast, on other axes than N", _has_whole_operand, advice="expand one of them first"),
    )),
)  # fmt: skip
_ONE_FORMAT = Limit(
    "operands and result of one format",
    lambda use: len({x.format for x in (*use.inputs, *use.outputs)}) == 1,
    lambda use: f"{', '.join(x.format for x in use.inputs)} -> {', '.join(x.format for x in use.outputs)}",
    "give the producers of both and this operator the same activation format",
)
_ADD = on(
    bernoulli2=_BERNOULLI2, bayes=_PAIR["bayes"],
    nash=Support(limits=(_ONE_FORMAT,), note="int32 only where it is fused into a convolution"),
)  # fmt: skip
_JOINED = on(
    bernoulli2=Support(),
    bayes=Support(limits=(between("inputs", 2, 1024), at_most("N", 4096), *(at_most(axis, 65536) for axis in "CHW"))),
)

# A FloatFunctional may be called for matmul, whose accumulator can leave as float; other methods check at the call.
register(Operator(
    "functional", ScaleRule.OWN, FloatFunctional, QFunctional, (_Float,), has_real_output=True, traits=Trait.FUNCTIONAL,
))  # fmt: skip
_ROWS: tuple[tuple[str, dict[Callable, Any], dict[str, Any], Marches, Trait], ...] = (
    ("add", {torch.add: _add, operator.add: _add}, {"add": _add, "add_": _add}, _ADD,
     Trait.NUMBERS | Trait.MASKS | Trait.FUSED),
    ("sub", {torch.sub: _sub, torch.subtract: _sub, operator.sub: _sub, torch.rsub: _right_sub},
     {"sub": _sub, "sub_": _sub, "subtract": _sub, "subtract_": _sub}, _PAIR, Trait.NUMBERS),
    ("mul", {torch.mul: _mul, torch.multiply: _mul, operator.mul: _mul},
     {"mul": _mul, "mul_": _mul, "multiply": _mul, "multiply_": _mul}, _PAIR,
     Trait.NUMBERS | Trait.MASKS),
    ("cat", {torch.cat: _cat, torch.concat: _cat, torch.concatenate: _cat}, {}, _JOINED, Trait.NONE),
    ("stack", {torch.stack: _stack}, {}, _JOINED, Trait.NONE),
)  # fmt: skip
for _name, _functions, _methods, _marches, _traits in _ROWS:
    register(Operator(
        _name, ScaleRule.OWN, FloatFunctional, QFunctional, functions=_functions, methods=_methods, marches=_marches,
        traits=_traits, counts=Counts(has_booleans=Trait.NUMBERS in _traits),
    ))  # fmt: skip
for _name in ("add_scalar", "mul_scalar"):  # what `add`, `sub` and `mul` are where one operand is a number
    register(Operator(_name, ScaleRule.OWN, FloatFunctional, QFunctional, marches=FROM_BAYES, traits=Trait.NUMBERS))
for _name, _bind, _spelled in (("maximum", _maximum, "maximum fmax max"), ("minimum", _minimum, "minimum fmin min")):
    register(Operator(
        _name, ScaleRule.OWN, FloatFunctional, QFunctional,
        functions={getattr(torch, n): _bind for n in _spelled.split()}, methods=dict.fromkeys(_spelled.split(), _bind),
        marches=FROM_BAYES, takes=is_pair, counts=Counts(),
    ))  # fmt: skip
advise(
    "write it with torch.cat, which names its axis",
    torch.hstack, torch.vstack, torch.dstack, torch.column_stack, torch.row_stack,
)  # fmt: skip
assert set(FUNCTIONAL_METHODS) <= set(dir(FloatFunctional))
