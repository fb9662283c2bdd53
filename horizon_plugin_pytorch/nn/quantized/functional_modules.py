"""`FloatFunctional`, the module form of operators without parameters, and its integer form `QFunctional`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import AccumulatorWarning, OperatorInputError, QuantizationWarning, warn
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule, size_of
from horizon_plugin_pytorch.nn.quantized.small import bytes_of
from horizon_plugin_pytorch.plain_values import plain_value
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import located, take_stubs
from horizon_plugin_pytorch.untraced import is_recorded

# The methods, each with its row in the operator table.
FUNCTIONAL_METHODS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "add_scalar": "add_scalar", "mul_scalar": "mul_scalar",
    "add_relu": "add", "maximum": "maximum", "minimum": "minimum", "cat": "cat", "stack": "stack", "matmul": "matmul",
    "sum": "sum", "mean": "mean",
}  # fmt: skip
_FEWEST_STEPS = 4  # of a common scale, that an input of `cat` should have
_WITH_NUMBER = {"add": "add_scalar", "sub": "add_scalar", "mul": "mul_scalar"}


class FloatFunctional(nn.Module):
    """Operators as methods, so that each has a place for its quantization parameters.

    Use one instance for one call: a shared instance has one scale for all its calls.

    >>> ff = FloatFunctional()
    >>> ff.add(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([3.])
    """

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError(
            "FloatFunctional has no forward: call one of its methods, such as `self.add.add(x, y)`; it has "
            + ", ".join(FUNCTIONAL_METHODS) + "."
        )  # fmt: skip

    def add(self, x: Any, y: Any, alpha: float = 1) -> Any:
        """``x + alpha * y``."""
        return self.activation_post_process(torch.add(x, y, alpha=alpha))

    def sub(self, x: Any, y: Any, alpha: float = 1) -> Any:
        """``x - alpha * y``."""
        return self.activation_post_process(x - (y if alpha == 1 else alpha * y))

    def mul(self, x: Any, y: Any) -> Any:
        """``x * y``."""
        return self.activation_post_process(torch.mul(x, y))

    def div(self, x: Any, y: Any) -> Any:
        """``x / y``."""
        return self.activation_post_process(x / y)

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two values, element by element."""
        return self.activation_post_process(torch.maximum(x, y))

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two values, element by element."""
        return self.activation_post_process(torch.minimum(x, y))

    def cat(self, x: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate along `dim`."""
        return self.activation_post_process(torch.cat(list(x), dim))

    def stack(self, x: Sequence[Any], dim: int = 0) -> Any:
        """Join along a new axis `dim`."""
        return self.activation_post_process(torch.stack(list(x), dim))

    def matmul(self, x: Any, y: Any, x_trans: bool = False, y_trans: bool = False) -> Any:
        """Matrix product; either operand can be transposed first."""
        return self.activation_post_process(torch.matmul(*transposed(x, y, x_trans, y_trans)))

    def sum(self, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Sum over axes."""
        return self.activation_post_process(torch.sum(x, dims_of(x, dim), keepdim))

    def mean(self, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Mean over axes."""
        return self.activation_post_process(torch.mean(x, dims_of(x, dim), keepdim))

    def add_scalar(self, x: Any, y: float) -> Any:
        """``x + y`` for a number y."""
        return self.activation_post_process(torch.add(x, y))

    def mul_scalar(self, x: Any, y: float) -> Any:
        """``x * y`` for a number y."""
        return self.activation_post_process(torch.mul(x, y))

    def add_relu(self, x: Any, y: Any) -> Any:
        """``relu(x + y)``."""
        return self.activation_post_process(torch.relu(torch.add(x, y)))


def is_number(x: Any) -> bool:
    """Is this a Python number, rather than a tensor? ``True`` counts as 1, as in Python and torch."""
    return isinstance(x, Number)


def number_of(y: Any, method: str, place: str) -> Any:
    """The number that ``add_scalar`` and ``mul_scalar`` take, also in a tensor that does not train.

    Raises:
        OperatorInputError: names the module that is given something else.
    """
    is_tensor = isinstance(y, Tensor) and not isinstance(y, QTensor) and y.numel() == 1 and not y.requires_grad
    if not (is_tensor or is_number(y)):
        kind = f"a tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise OperatorInputError(
            f"`{method}_scalar` {place} takes a number, and got {kind}. Call `{method}` for two tensors; for a number "
            f"that trains too, with a QuantStub: `{method}(x, self.quant(y))`."
        )
    return y.item() if is_tensor else y


def row_name_of(method: str, operands: Sequence[Any]) -> str:
    """The row of a method; an operator has another where one of the first two operands is a number.

    >>> row_name_of("add", (torch.ones(1), torch.ones(1))), row_name_of("sub", (torch.ones(1), 1.0))
    ('add', 'add_scalar')
    """
    has_number = method in _WITH_NUMBER and any(is_number(x) for x in operands[:2])
    return _WITH_NUMBER[method] if has_number else FUNCTIONAL_METHODS.get(method, "")


def dims_of(x: Tensor, dim: Any) -> list[int]:
    """Axes as a list of non-negative numbers; None, or none at all, means all."""
    dim = plain_value(dim)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    for d in dims:
        if not -max(x.dim(), 1) <= d < max(x.dim(), 1):
            raise IndexError(f"axis {d} does not exist in a tensor with {x.dim()} axes.")
    return sorted(d % x.dim() for d in dims) if x.dim() else []


def transposed(x: Any, y: Any, x_trans: bool, y_trans: bool) -> tuple[Any, Any]:
    """Operands of a matrix product, with their last two axes swapped where asked."""
    return (x.transpose(-1, -2) if x_trans else x), (y.transpose(-1, -2) if y_trans else y)


def _most(x: QTensor) -> float:
    """The largest magnitude that can occur."""
    return float(max(-x.range[0], x.range[1]))


class QFunctional(QuantizedModule):
    """FloatFunctional on integers."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("QFunctional has no forward: call one of its methods.")

    def _warn_beyond_int32(self, operator: str, bound: float) -> None:
        if bound > fp.INT32_MAX:
            warnings.warn(
                f"{operator} {self.place}: in the worst case its accumulator reaches {bound:.3g}, beyond int32 "
                f"({fp.INT32_MAX:.3g}). The sum is exact here, but the chip's may overflow: give one of the inputs "
                "qint8, or sum over fewer elements.",
                AccumulatorWarning,
                stacklevel=2,
            )

    def _add(self, x: Any, y: Any, alpha: float, low: int) -> QTensor:
        if is_number(y):
            return self._affine(x, 1.0, alpha * float(y), low)
        if is_number(x):
            return self._affine(y, float(alpha), float(x), low)
        x, y = self.quantized_input(x), self.quantized_input(y)
        is_narrow = x.dtype.bits <= 8 and y.dtype.bits <= 8

        def plan() -> Any:
            self._warn_no_effect(x, y, alpha)
            return fp.choose_sum_factors(float(self.ratio(x.scale)), alpha * float(self.ratio(y.scale)), is_narrow)

        factors = self._plans.get((x, y), ("add", alpha), plan)
        has_bytes = is_narrow and any(bytes_of(v, self.out_dtype) is not None for v in (x, y))
        left, right = (v.as_bytes() if has_bytes else v.plain() for v in (x, y))
        return self.output(fp.add(left, right, *factors, is_narrow, low, self.high))

    def _warn_no_effect(self, x: QTensor, y: QTensor, alpha: float) -> None:
        """Say that an operand of a sum changes nothing."""
        for name, steps in (("first", self._steps(x)), ("second", abs(alpha) * self._steps(y))):
            if 0 < steps < 0.5:
                warn(
                    f"`add` {self.place}: its {name} operand has no effect: all its values are "
                    "smaller than half a step of the result. Give the result qint16, or look at the ranges of the "
                    "operands: a mask of large numbers, such as -1e4, leaves nothing of what it is added to.",
                    QuantizationWarning,
                )

    @located
    def add(self, x: Any, y: Any, alpha: float = 1) -> QTensor:
        """``x + alpha * y``."""
        return self._add(x, y, alpha, self.low)

    @located
    def sub(self, x: Any, y: Any, alpha: float = 1) -> QTensor:
        """``x - alpha * y``."""
        return self._add(x, y, -alpha, self.low)

    @located
    def add_relu(self, x: Any, y: Any) -> QTensor:
        """``relu(x + y)``."""
        return self._add(x, y, 1, 0)

    @located
    def mul(self, x: Any, y: Any) -> QTensor:
        """``x * y``."""
        if is_number(x) or is_number(y):
            tensor, number = (y, x) if is_number(x) else (x, y)
            return self._affine(tensor, float(number), 0.0, self.low)
        x, y = self.quantized_input(x), self.quantized_input(y)
        bound = size_of(x.dtype) * size_of(y.dtype)
        factor = self._plans.get(
            (x, y),
            "mul",
            lambda: fp.choose_factor(self.ratio(x.scale, y.scale), self.low, self.high, bound).to(x.device),
        )
        return self.output(fp.mul(x.plain(), y.plain(), factor, self.low, self.high))

    @located
    def div(self, x: Any, y: Any) -> QTensor:
        """``x / y``; a divisor near 0 counts as `fixed_point.smallest_divisor`."""
        if is_number(y):
            return self._affine(x, 1.0 / float(y), 0.0, self.low)
        y = self.quantized_input(y)
        one = torch.ones((), dtype=torch.float32, device=y.device)  # a number is so many times 1
        number, dividend = (float(x), None) if is_number(x) else (1.0, self.quantized_input(x))
        operands = (y,) if dividend is None else (y, dividend)
        factor = self._plans.get(
            operands,
            ("div", number),
            lambda: fp.choose_quotient_factor(
                number * float(self.ratio(*[x.scale for x in operands[1:]])) / float(y.scale.detach().double())
            ),
        )
        grid = one if dividend is None else dividend.plain()
        return self.output(fp.div(grid, y.plain(), factor, fp.smallest_divisor(y.dtype), self.low, self.high))

    def _extremum(self, x: Any, y: Any, is_minimum: bool) -> QTensor:
        x, y = self.quantized_input(x), self.quantized_input(y)
        if self.has_output_grid(x) and self.has_output_grid(y):
            return self.output((torch.minimum if is_minimum else torch.maximum)(x.plain(), y.plain()))
        factors = self.output_factor(x), self.output_factor(y)
        return self.output(fp.extremum(x.plain(), y.plain(), *factors, is_minimum, self.low, self.high))

    @located
    def maximum(self, x: Any, y: Any) -> QTensor:
        """The larger of two values, element by element."""
        return self._extremum(x, y, False)

    @located
    def minimum(self, x: Any, y: Any) -> QTensor:
        """The smaller of two values, element by element."""
        return self._extremum(x, y, True)

    @located
    def cat(self, x: Sequence[Any], dim: int = 0) -> QTensor:
        """Concatenate along `dim`, each input first brought to the output's scale."""
        inputs = [self.quantized_input(v) for v in x]
        ranges = [self._range_here(v) for v in inputs]
        low, high = (
            min((low for low, _ in ranges), default=self.low),
            max((top for _, top in ranges), default=self.high),
        )
        parts = [self._bytes_here(v) for v in inputs] if self._takes_bytes(inputs) else self._joined(inputs, "cat")
        return self.output(torch.cat(parts, dim), low, high)

    def _range_here(self, x: QTensor) -> tuple[int, int]:
        """The smallest and largest integer of an input at the output's scale."""
        if self.has_output_grid(x):
            return x.range
        return (max(self.low, 0) if x.range[0] >= 0 else self.low), self.high

    def _takes_bytes(self, inputs: Sequence[QTensor]) -> bool:
        """Are inputs joined as bytes? If some are here as such: those of layers on integer kernels."""
        if is_recorded() or not any(v.has_bytes for v in inputs) or not fp.are_kernels_used():
            return False
        formats = [self.out_dtype, *(v.dtype for v in inputs)]
        if any(f is None or f.bits > 8 for f in formats) or len({v.dim() for v in inputs}) > 1:
            return False
        self._warn_erased_once(inputs, "cat")
        return True

    def _bytes_here(self, x: QTensor) -> Tensor:
        """An input's integers at the output's scale, in int8, images with channels last."""
        values = x.as_bytes()
        layout = torch.channels_last if values.dim() == 4 else torch.contiguous_format
        if values.dtype != torch.int8:
            if not self.has_output_grid(x):
                values = fp.requantize(values, self.output_factor(x), -1, self.low, self.high)
            return torch.empty(values.shape, dtype=torch.int8, memory_format=layout).copy_(values)
        values = values.contiguous(memory_format=layout)
        if self.has_output_grid(x):
            return values
        return fp.lookup_bytes(values, self._plans.get((x,), "requantized bytes", lambda: self._byte_table(x)))

    def _byte_table(self, x: QTensor) -> fp.Table:
        """For every byte of an input the one at the output's scale."""
        return fp.Table(fp.requantize(_every_byte(), self.output_factor(x), -1, self.low, self.high), 0.0)

    @located
    def stack(self, x: Sequence[Any], dim: int = 0) -> QTensor:
        """Join along a new axis `dim`, each input first brought to the output's scale."""
        return self.output(torch.stack(self._joined([self.quantized_input(v) for v in x], "stack"), dim))

    def _joined(self, inputs: Sequence[QTensor], name: str) -> list[Tensor]:
        """The integers of several inputs at the output's scale."""
        self._warn_erased_once(inputs, name)
        return [self.on_output_grid(v) for v in inputs]

    def _warn_erased_once(self, inputs: Sequence[QTensor], name: str) -> None:
        self._plans.get(tuple(inputs), name, lambda: self._warn_erased(inputs, name))

    def _steps(self, x: QTensor) -> float:
        """How many steps of the output the largest values of an input have."""
        return _most(x) * float(self.ratio(x.scale))

    def _warn_erased(self, inputs: Sequence[QTensor], name: str) -> bool:
        """Say which inputs have next to nothing left at the output's scale."""
        erased = [str(i) for i, x in enumerate(inputs) if self._steps(x) < _FEWEST_STEPS]
        if erased and len(erased) < len(inputs):
            warn(
                f"`{name}` {self.place}: input {', '.join(erased)} is so much smaller than others "
                f"that fewer than {_FEWEST_STEPS} steps of the common scale are left of its values, or none. Give the "
                "output qint16, bring the inputs to similar ranges first, or keep them apart.",
                QuantizationWarning,
            )
        return True

    @located
    def matmul(self, x: Any, y: Any, x_trans: bool = False, y_trans: bool = False) -> Any:
        """Matrix product; real numbers if the output has high precision."""
        x, y = self.quantized_input(x), self.quantized_input(y)
        is_on_bytes = fp.has_products() and not is_recorded()
        operands = (x.as_bytes(), y.as_bytes()) if is_on_bytes else (x.plain(), y.plain())
        left, right = transposed(*operands, x_trans, y_trans)
        bound = left.shape[-1] * _most(x) * _most(y)

        def plan() -> tuple[Tensor, bool]:
            self._warn_beyond_int32("matmul", bound)
            if self.scale is None:
                product = x.scale.double() * y.scale.double()
                is_double = fp.is_beyond_float32(bound)
                return (product if is_double else product.float()), is_double
            factor = fp.choose_factor(self.ratio(x.scale, y.scale), self.low, self.high, bound).to(x.device)
            return factor, fp.is_beyond_float32(bound)

        plans = self._plans.get((x, y), ("matmul", left.shape[-1]), plan)
        settings = (*plans, self.low, self.high, self.scale is None)
        out = fp.matmul_on_bytes(left, right, (x.range, y.range), *settings) if is_on_bytes else None
        if out is None:
            out = fp.matmul(*transposed(x.plain(), y.plain(), x_trans, y_trans), *settings)
        return out if self.scale is None else self.output(out)

    def _sum(self, x: Any, dim: Any, keepdim: bool, is_mean: bool) -> QTensor:
        x = self.quantized_input(x)
        dims = dims_of(x, dim)
        count = 1
        for d in dims:
            count *= x.shape[d]
        bound = count * size_of(x.dtype)

        def plan() -> Tensor:
            self._warn_beyond_int32("sum", bound)
            ratio = self.ratio(x.scale) / (count if is_mean else 1)
            factor = fp.choose_factor(ratio, self.low, self.high, bound)
            return factor.reshape(()).to(x.device)  # no axes, so that it fits a sum over all of them

        factor = self._plans.get((x,), ("sum", count, is_mean), plan)
        is_double = fp.is_beyond_float32(bound)
        return self.output(fp.sum(x.plain(), dims, keepdim, factor, is_double, self.low, self.high))

    @located
    def sum(self, x: Any, dim: Any = None, keepdim: bool = False) -> QTensor:
        """Sum over axes."""
        return self._sum(x, dim, keepdim, False)

    @located
    def mean(self, x: Any, dim: Any = None, keepdim: bool = False) -> QTensor:
        """Mean over axes."""
        return self._sum(x, dim, keepdim, True)

    def _affine(self, x: Any, scale: float, offset: float, low: int) -> QTensor:
        x = self.quantized_input(x)
        factor, shift = self._plans.get(
            (x,),
            ("affine", scale, offset, low),
            lambda: tuple(
                t.to(x.device)
                for t in fp.choose_affine(
                    self.ratio(x.scale) * scale,
                    torch.tensor([offset], dtype=torch.float64) / self.out_scale(),
                    x.range,
                    low,
                    self.high,
                )
            ),
        )
        values = bytes_of(x, self.out_dtype)
        if values is None:
            return self.output(fp.affine(x.plain(), factor, shift, -1, low, self.high))
        table = self._plans.get(
            (x,),
            ("bytes of affine", scale, offset, low),
            lambda: fp.Table(fp.affine(_every_byte(), factor, shift, -1, low, self.high), 0.0),
        )
        return self.output(fp.lookup_bytes(values, table))

    @located
    def add_scalar(self, x: Any, y: float) -> QTensor:
        """``x + y`` for a number y."""
        return self._affine(x, 1.0, float(number_of(y, "add", self.place)), self.low)

    @located
    def mul_scalar(self, x: Any, y: float) -> QTensor:
        """``x * y`` for a number y."""
        return self._affine(x, float(number_of(y, "mul", self.place)), 0.0, self.low)


take_stubs(QFunctional, FUNCTIONAL_METHODS)


def _every_byte() -> Tensor:
    return torch.arange(-128.0, 128.0, dtype=torch.float32)
