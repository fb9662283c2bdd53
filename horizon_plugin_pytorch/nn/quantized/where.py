"""Choosing between two tensors on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.comparison import truth
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Where(QuantizedModule):
    """``where(condition, x, y)`` with both brought to the output's scale; numbers are put on its grid."""

    def forward(self, condition: Any, x: Any, y: Any) -> QTensor:
        return self.output(torch.where(truth(condition), self._operand(x), self._operand(y)))

    def _operand(self, x: Any) -> Tensor:
        return self.steps(x) if is_number(x) else self.on_output_grid(self.quantized_input(x))

    def steps(self, number: float) -> Tensor:
        """A number in steps of the output's grid, within its range."""
        assert self.scale is not None
        scale = self.scale
        return self._plans.get(
            (scale,), float(number), lambda: torch.round(float(number) / scale).clamp_(self.low, self.high).reshape(())
        )
