"""Reductions while training: sums and means, norms, variances, running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.nn import reduction as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.module import CopiedModule, real
from horizon_plugin_pytorch.nn.quantized import reduction as quantized
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional as _Float
from horizon_plugin_pytorch.nn.quantized.functional_modules import QFunctional
from horizon_plugin_pytorch.operators.support import FROM_BAYES, INT8, INTS, Limit, Support, Use, on
from horizon_plugin_pytorch.operators.table import (
    Call,
    Kind,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    as_module,
    register,
)
from horizon_plugin_pytorch.qtensor import QTensor


class Norm(CopiedModule, floats.Norm):
    """A norm whose output is rounded."""

    quantized_class = quantized.Norm
    copied = ("ord", "dim", "keepdim")


class Normalize(CopiedModule, floats.Normalize):
    """Division by a norm, rounded.

    On the grid a group is all zero, or its norm is one step at least; a smaller `eps` would only make the gradient of
    a zero group enormous.
    """

    quantized_class = quantized.Normalize
    copied = ("ord", "dim", "eps")

    def _train(self, x: Any) -> Any:
        assert self.activation_post_process is not None
        is_rounded = isinstance(x, QTensor) and x.is_rounded
        smallest = max(self.eps, float(x.scale)) if is_rounded else None
        return self.activation_post_process(self.real_value(real(x), smallest))


class Var(CopiedModule, floats.Var):
    """A variance whose output is rounded."""

    quantized_class = quantized.Var
    copied = ("dim", "correction", "keepdim")


class Std(CopiedModule, floats.Std):
    """A standard deviation whose output is rounded."""

    quantized_class = quantized.Std
    copied = ("dim", "correction", "keepdim")


class CumSum(CopiedModule, floats.CumSum):
    """Running sums, rounded."""

    quantized_class = quantized.CumSum
    copied = ("dim",)


class VarMean(Composite):
    """Variance (or standard deviation) and mean, each with a scale of its own."""

    def __init__(self, mod: floats.Var) -> None:
        super().__init__()
        self.dim, self.keepdim = mod.dim, mod.keepdim
        self.qconfig = mod.qconfig
        self.var = Std.from_float(mod) if isinstance(mod, floats.Std) else Var.from_float(mod)
        self.mean = FloatFunctional(mod.qconfig)

    @classmethod
    def from_float(cls, mod: floats.Var) -> VarMean:
        """The QAT form."""
        return cls(mod)

    def forward(self, x: Any) -> tuple[Any, Any]:
        return self.var(x), self.mean.mean(x, self.dim, self.keepdim)


def _dims(use: Use) -> set[int]:
    """The axes that a reduction of images is over."""
    dim, rank = use.attributes.get("dim"), len(use.inputs[0].shape)
    dims = range(rank) if dim is None else (dim,) if isinstance(dim, int) else dim
    return {d % rank for d in dims}


def _over(axes: set[int], text: str) -> Limit:
    return Limit(
        f"over {text} only",
        lambda use: len(use.inputs[0].shape) != 4 or _dims(use) <= axes,
        lambda use: f"axes {sorted(_dims(use))}",
        "permute the tensor first, or reduce in two steps",
    )


_NOT_BATCH = _over({1, 2, 3}, "C, H and W")
_SUM = on(
    bernoulli2=Support(INT8, ("qint8", "qint32"), limits=(_over({0, 1}, "N or C"),)),
    bayes=Support(limits=(_NOT_BATCH,)),
)
_MEAN = on(bernoulli2=Support(INTS, INTS, limits=(_over({1}, "C"),)), bayes=Support(limits=(_NOT_BATCH,)))


def _no_dtype(dtype: Any) -> None:
    if dtype not in (None, torch.float32):
        raise NotBindable("the number format comes from the qconfig; leave dtype out")


def _reduce(method: str) -> Callable[..., Call]:
    def bind(
        input: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, keepdims: bool = False,
        dtype: Any = None,
    ) -> Call:  # fmt: skip
        _no_dtype(dtype)
        arguments = {"dim": dim if axis is None else axis, "keepdim": keepdim or keepdims}
        return Call(_Float, (input,), arguments, method)

    return bind


def _norm_of(ord: Any) -> float:
    known = {None: 2.0, "fro": 2.0}
    ord = known.get(ord, ord)
    if not isinstance(ord, (int, float)) or float(ord) not in quantized.KINDS:
        raise NotBindable(f"a norm of order {ord!r} has no quantized form; 1, 2, inf and -inf have")
    return float(ord)


def _norm(p: Any, dim: Any, keepdim: bool, dtype: Any, out: Any = None) -> floats.Norm:
    _no_dtype(dtype)
    return floats.Norm(_norm_of(p), dim, keepdim)


def _vector_norm(ord: Any, dim: Any, keepdim: bool, dtype: Any) -> floats.Norm:
    return _norm(ord, dim, keepdim, dtype)


def _linalg_norm(ord: Any, dim: Any, keepdim: bool, dtype: Any) -> floats.Norm:
    is_matrix = ord not in (None, "fro") and (dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 2))
    if is_matrix:
        raise NotBindable("this may be a norm of matrices, which has no quantized form; for vectors, write "
                          "`torch.linalg.vector_norm(x, ord, dim)`")  # fmt: skip
    return _norm(ord, dim, keepdim, dtype)


def _normalize(p: float, dim: Any, eps: float, out: Any) -> floats.Normalize:
    if p == -math.inf:
        raise NotBindable("division by the smallest magnitude has no quantized form")
    return floats.Normalize(_norm_of(p), dim, eps)


def _variance(make: type[floats.Var]) -> Callable[..., Call]:
    def bind(
        input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None,
        axis: Any = None,
    ) -> Call:  # fmt: skip
        if isinstance(dim, bool):  # x.var(False)
            dim, unbiased = None, dim
        if unbiased is not None:
            correction = float(unbiased)
        settings = {
            "dim": dim if axis is None else axis,
            "correction": 1.0 if correction is None else correction,
            "keepdim": keepdim,
        }
        return Call(make, (input,), settings=settings)

    return bind


def _cumsum(dim: int, axis: int | None, dtype: Any) -> floats.CumSum:
    _no_dtype(dtype)
    return floats.CumSum(dim if axis is None else axis)


_bind_norm = as_module(_norm, "input, p='fro', dim=None, keepdim=False, out=None, dtype=None")
_bind_cumsum = as_module(_cumsum, "input, dim=None, *, axis=None, dtype=None")
_bind_var, _bind_std = _variance(floats.Var), _variance(floats.Std)
for _name, _function, _marches, _traits in (
    ("sum", torch.sum, _SUM, Trait.COUNTS_BOOLEANS),
    ("mean", torch.mean, _MEAN, Trait.NONE),
):
    register(Operator(
        _name, ScaleRule.OWN, FloatFunctional, QFunctional, functions={_function: _reduce(_name)},
        methods={_name: _reduce(_name)}, marches=_marches, traits=_traits,
    ))  # fmt: skip
register(Operator(
    "norm", ScaleRule.OWN, Norm, quantized.Norm, (floats.Norm,),
    {torch.norm: _bind_norm,
     torch.linalg.norm: as_module(_linalg_norm, "A, ord=None, dim=None, keepdim=False, *, dtype=None"),
     torch.linalg.vector_norm: as_module(_vector_norm, "x, ord=2, dim=None, keepdim=False, *, dtype=None")},
    {"norm": as_module(_norm, "input, p='fro', dim=None, keepdim=False, dtype=None")}, FROM_BAYES,
))  # fmt: skip
register(Operator(
    "normalize", ScaleRule.OWN, Normalize, quantized.Normalize, (floats.Normalize,),
    {F.normalize: as_module(_normalize, "input, p=2.0, dim=1, eps=1e-12, out=None")}, marches=FROM_BAYES,
))  # fmt: skip
register(Operator("var", ScaleRule.OWN, Var, quantized.Var, (floats.Var,), {torch.var: _bind_var}, {"var": _bind_var},
                  FROM_BAYES))  # fmt: skip
register(Operator("std", ScaleRule.OWN, Std, quantized.Std, (floats.Std,), {torch.std: _bind_std}, {"std": _bind_std},
                  FROM_BAYES))  # fmt: skip
register(Operator(
    "var_mean", ScaleRule.OWN, VarMean, VarMean, (floats.VarMean, floats.StdMean),
    {torch.var_mean: _variance(floats.VarMean), torch.std_mean: _variance(floats.StdMean)}, marches=FROM_BAYES,
    results=(Kind.QUANTIZED, Kind.QUANTIZED),
))  # fmt: skip
register(Operator("cumsum", ScaleRule.OWN, CumSum, quantized.CumSum, (floats.CumSum,), {torch.cumsum: _bind_cumsum},
                  {"cumsum": _bind_cumsum}, FROM_BAYES))  # fmt: skip
