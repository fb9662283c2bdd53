"""Choosing between two tensors on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.comparison import truth
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Where(QuantizedModule):
    """``where(condition, x, y)`` with both brought to the output's scale; numbers are put on its grid."""

    def forward(self, condition: Any, x: Any, y: Any) -> QTensor:
        mask: Tensor = truth(condition)
        x, y = self._operand(x), self._operand(y)
        are_tensors = isinstance(x, QTensor) and isinstance(y, QTensor)
        if are_tensors and not (self.has_output_grid(x) and self.has_output_grid(y)):
            factors = self.output_factor(x), self.output_factor(y)
            return self.output(fp.select(mask, x.plain(), y.plain(), *factors, self.low, self.high))
        left, right = (self.on_output_grid(v) if isinstance(v, QTensor) else v for v in (x, y))
        return self.output(torch.where(mask, left, right))

    def _operand(self, x: Any) -> Any:
        return self.steps(x) if is_number(x) else self.quantized_input(x)

    def steps(self, number: float) -> Tensor:
        """A number in steps of the output's grid, within its range."""
        assert self.scale is not None
        scale = self.scale
        return self._plans.get(
            (scale,), float(number), lambda: torch.round(float(number) / scale).clamp_(self.low, self.high).reshape(())
        )
