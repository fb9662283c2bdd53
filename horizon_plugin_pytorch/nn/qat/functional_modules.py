"""`FloatFunctional` while training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.operator_table import Call, Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.placed import placed
from horizon_plugin_pytorch.nn.qat.module import QATModule, real
from horizon_plugin_pytorch.nn.quantized.functional_modules import (
    FUNCTIONAL_METHODS,
    QFunctional,
    dims_of,
    is_number,
    transposed,
)
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional as _Float
from horizon_plugin_pytorch.qtensor import QTensor


class FloatFunctional(QATModule):
    """Operators as methods, each with its output rounded to the grid of one scale."""

    quantized_class = QFunctional

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
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("FloatFunctional has no forward: call one of its methods, such as `self.add.add(x, y)`.")

    @placed
    def _run(self, method: str, train: Callable[[], Tensor], *args: Any, **kwargs: Any) -> Any:
        if self.is_exact or (self.activation_post_process is None and _all_exact(args)):
            return self.exact(
                *args,
                call=lambda twin, *integers: getattr(twin, method)(*integers, **kwargs),
                trained=lambda: self._finish(train()),
            )
        return self._finish(train())

    def _finish(self, value: Tensor) -> Any:
        return value if self.activation_post_process is None else self.activation_post_process(value)

    def add(self, x: Any, y: Any) -> Any:
        """``x + y``."""
        return self._run("add", lambda: real(x) + real(y), x, y)

    def sub(self, x: Any, y: Any) -> Any:
        """``x - y``."""
        return self._run("sub", lambda: real(x) - real(y), x, y)

    def mul(self, x: Any, y: Any) -> Any:
        """``x * y``."""
        return self._run("mul", lambda: real(x) * real(y), x, y)

    def cat(self, x: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate along `dim`."""
        return self._run("cat", lambda: torch.cat([real(v) for v in x], dim), list(x), dim=dim)

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
        return self._run("add_scalar", lambda: torch.add(real(x), y), x, y)

    def mul_scalar(self, x: Any, y: float) -> Any:
        """``x * y`` for a number y."""
        return self._run("mul_scalar", lambda: torch.mul(real(x), y), x, y)

    def add_relu(self, x: Any, y: Any) -> Any:
        """``relu(x + y)``."""
        return self._run("add_relu", lambda: torch.relu(torch.add(real(x), real(y))), x, y)


def _all_exact(args: tuple) -> bool:
    flat = [v for a in args for v in (a if isinstance(a, (list, tuple)) else [a])]
    tensors = [v for v in flat if isinstance(v, QTensor)]
    return bool(tensors) and all(t.grid is not None for t in tensors)


def _binary(method: str) -> Callable[..., Call | None]:
    def bind(x: Any, y: Any = None, *, other: Any = None, alpha: Any = 1, **kwargs: Any) -> Call | None:
        y = other if y is None else y
        if alpha != 1 or kwargs:
            return None
        if is_number(x) and is_number(y):
            return None
        if method == "sub" or not (is_number(x) or is_number(y)):
            return Call(_Float(), (x, y), method=method)
        tensor, number = (y, x) if is_number(x) else (x, y)
        return Call(_Float(), (tensor, number), method=f"{method}_scalar")

    return bind


def _div(x: Any, y: Any, **kwargs: Any) -> Call | None:
    if is_number(y) and not kwargs:
        return Call(_Float(), (x, 1.0 / y), method="mul_scalar")
    return None


def _cat(tensors: Any, dim: int = 0, *, axis: int | None = None) -> Call:
    return Call(_Float(), (tensors,), {"dim": dim if axis is None else axis}, "cat")


_add, _sub, _mul = _binary("add"), _binary("sub"), _binary("mul")


def _right_sub(x: Any, y: Any) -> Call | None:
    return _sub(y, x)


# A FloatFunctional may be called for matmul, whose accumulator can leave as float; other methods check at the call.
_functional = dict(qat=FloatFunctional, quantized=QFunctional, has_real_output=True)
register(Operator("functional", ScaleRule.OWN, modules=(_Float,), **_functional))  # type: ignore[arg-type]
for _name, _functions, _methods in (
    ("add", {torch.add: _add, operator.add: _add, operator.iadd: _add}, {"add": _add, "add_": _add}),
    ("sub", {torch.sub: _sub, torch.subtract: _sub, operator.sub: _sub, operator.isub: _sub, torch.rsub: _right_sub},
     {"sub": _sub, "sub_": _sub, "subtract": _sub}),
    ("mul", {torch.mul: _mul, torch.multiply: _mul, operator.mul: _mul, operator.imul: _mul},
     {"mul": _mul, "mul_": _mul, "multiply": _mul}),
    ("div", {torch.div: _div, torch.true_divide: _div, operator.truediv: _div, operator.itruediv: _div},
     {"div": _div, "div_": _div}),
    ("cat", {torch.cat: _cat, torch.concat: _cat, torch.concatenate: _cat}, {}),
):  # fmt: skip
    register(Operator(_name, ScaleRule.OWN, functions=_functions, methods=_methods, **_functional))  # type: ignore[arg-type]
assert set(FUNCTIONAL_METHODS) <= set(dir(FloatFunctional))
