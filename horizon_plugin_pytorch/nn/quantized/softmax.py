"""Softmax on integers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType, qint16
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized.small import bytes_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.untraced import as_number

EXP_SCALE = 2 / 65535  # exp(x - max) lies in [0, 1], published as 0.0000305


def softmax_axis(dim: int | None, rank: int) -> int:
    """The axis from the front; for None that of torch.

    >>> softmax_axis(None, 4), softmax_axis(None, 3), softmax_axis(-1, 3)
    (1, 0, 2)
    """
    if dim is None:
        return 0 if rank in (0, 1, 3) else 1
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise IndexError(f"axis {dim} does not exist in a tensor with {rank} axes.")
    return dim % max(rank, 1)


def exp_table(scale: Tensor, dtype: QuantDType) -> Tensor:
    """``exp`` of 0, -1, -2, ... steps of `scale`, in steps of 2/65535.

    The difference of two 8-bit integers has 256 values and of two 16-bit ones 65,536, so none is rounded.
    """
    steps = -torch.arange(1 << dtype.bits, dtype=torch.float64)
    targets = (torch.exp(steps * scale.detach().double().cpu()) / EXP_SCALE).clamp(max=qint16.max)
    return torch.round(targets).float() if dtype.bits <= 8 else fp.build_segments(targets, qint16).values


class Softmax(QuantizedModule):
    """``exp(x - max) / sum(exp(x - max))`` on integers."""

    takes_bytes: ClassVar[bool] = True

    def configure(self, mod: Any) -> None:
        self.dim: int | None = mod.dim
        self.is_negated: bool = mod.is_negated

    def forward(self, x: QTensor, hidden: Tensor | None = None) -> QTensor:
        x = self.quantized_input(x)
        values = self._integers(x, hidden) if x.dim() else x.plain().reshape(1)
        values = values.neg() if self.is_negated else values
        dim = softmax_axis(self.dim, x.dim())
        table = self._plans.get((x,), "table", lambda: exp_table(x.scale, x.dtype).to(x.device))
        return self.output(self.compute(values, dim, hidden, table, x).reshape(x.shape), *self.range())

    def _integers(self, x: QTensor, hidden: Tensor | None) -> Tensor:
        """The input's integers, in bytes where it can take them so."""
        takes_bytes = self.takes_bytes and hidden is None and not self.is_negated
        values = bytes_of(x, self.out_dtype) if takes_bytes else None
        return x.plain() if values is None else values

    def range(self) -> tuple[int, int]:
        """No weight is negative: products with the weights are planned by that."""
        return max(self.low, 0), self.high

    def compute(self, values: Tensor, dim: int, hidden: Tensor | None, table: Tensor, x: QTensor) -> Tensor:
        """The result's integers."""
        assert self.scale is not None
        is_double = fp.is_beyond_float32(values.shape[dim] * float(qint16.max))
        return fp.softmax(values, dim, hidden, table, 1.0 / as_number(self.scale), is_double, self.low, self.high)


class LogSoftmax(Softmax):
    """``x - max - log(sum(exp(x - max)))`` on integers."""

    takes_bytes = False

    def range(self) -> tuple[int, int]:
        return self.low, min(self.high, 0)

    def compute(self, values: Tensor, dim: int, hidden: Tensor | None, table: Tensor, x: QTensor) -> Tensor:
        assert self.scale is not None
        out_scale = self.scale.double()

        def plan() -> tuple[Tensor, float]:
            factor = float((-x.scale.double() / out_scale).float())
            return fp.choose_logarithm(EXP_SCALE).to(x.device), factor

        logarithms, factor = self._plans.get((x,), "logarithm", plan)
        is_double = fp.is_beyond_float32(values.shape[dim] * float(qint16.max))
        gain = 1.0 / as_number(out_scale)
        return fp.log_softmax(values, dim, table, logarithms, factor, gain, is_double, self.low, self.high)


class SoftmaxBernoulli2(SegmentLUT):
    """``exp(x)`` by table, divided by its sum in float."""

    def configure(self, mod: Any) -> None:
        super().configure(mod)
        self.max_value_only: bool = mod.max_value_only

    def forward(self, x: QTensor) -> Any:
        entries = super().forward(x).plain()
        total = entries.sum(1, keepdim=True).clamp(min=1.0)  # all entries of a position may round to 0
        return (entries.amax(1, keepdim=True) if self.max_value_only else entries) / total
