"""Norms, variances and running sums on integers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.functional_modules import dims_of
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.untraced import as_number

KINDS = {1.0: fp.MAGNITUDES, 2.0: fp.SQUARES, math.inf: fp.LARGEST, -math.inf: fp.SMALLEST}


def _count(x: QTensor, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


class _Measure(QuantizedModule):
    """A measure of groups of values."""

    dim: Any
    keepdim: bool

    def measure(self, x: QTensor, kind: str, is_root: bool, divisor: float) -> QTensor:
        """The measure over the square root of `divisor` if it is a root itself, else over `divisor`."""
        assert self.scale is not None
        dims = dims_of(x, self.dim)
        in_scale, out_scale = as_number(x.scale), as_number(self.scale)
        if kind in (fp.SQUARES, fp.VARIANCE) and not is_root:
            in_scale *= in_scale
        factor = in_scale / out_scale / (math.sqrt(divisor) if is_root else divisor)
        largest = max(-x.range[0], x.range[1])
        is_double = fp.is_wide(kind, _count(x, dims), largest)
        return self.output(
            fp.norm(x.plain(), dims, self.keepdim, kind, is_root, factor, is_double, self.low, self.high)
        )


class Norm(_Measure):
    """A norm on integers: an exact sum, one rounding."""

    def configure(self, mod: Any) -> None:
        self.ord, self.dim, self.keepdim = mod.ord, mod.dim, mod.keepdim

    def forward(self, x: QTensor) -> QTensor:
        return self.measure(self.quantized_input(x), KINDS[self.ord], self.ord == 2, 1.0)


class Var(_Measure):
    """A variance on integers: exact sums, one rounding."""

    is_root = False

    def configure(self, mod: Any) -> None:
        self.dim, self.correction, self.keepdim = mod.dim, mod.correction, mod.keepdim

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        count = _count(x, dims_of(x, self.dim))
        divisor = float(count) * (count - self.correction)
        if divisor <= 0:
            raise RuntimeError(f"a variance over {count} values with correction {self.correction:g} does not exist")
        return self.measure(x, fp.VARIANCE, self.is_root, divisor)


class Std(Var):
    """A standard deviation on integers."""

    is_root = True


class Normalize(QuantizedModule):
    """Division by a norm, on integers."""

    def configure(self, mod: Any) -> None:
        self.ord, self.dim, self.eps = mod.ord, mod.dim, mod.eps

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        dims, kind = dims_of(x, self.dim), KINDS[self.ord]
        # A group that is not all zero has a norm of one step at least.
        smallest = max(self.eps / as_number(x.scale), 1.0)
        is_double = fp.is_wide(kind, _count(x, dims), max(-x.range[0], x.range[1]))
        gain = 1 / as_number(self.scale)
        return self.output(fp.divide_by_norm(x.plain(), dims, kind, gain, smallest, is_double, self.low, self.high))


class CumSum(QuantizedModule):
    """Running sums of integers, requantized."""

    def configure(self, mod: Any) -> None:
        self.dim = mod.dim

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        ratio = x.scale.detach().double().cpu() / self.scale.detach().double().cpu()
        bound = float(x.shape[self.dim] if x.dim() else 1) * max(-x.range[0], x.range[1])

        def plan() -> Tensor:
            return fp.choose_factor(ratio, self.low, self.high, bound).reshape(()).to(x.device)

        factor = self._plans.get((x,), ("cumsum", bound), plan)
        return self.output(fp.cumsum(x.plain(), self.dim, factor, fp.is_beyond_float32(bound), self.low, self.high))
