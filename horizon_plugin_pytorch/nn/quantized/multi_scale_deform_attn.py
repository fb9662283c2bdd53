"""The sampling of deformable attention, on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class DeformableSampling(QuantizedModule):
    """Samples on the grid of the values, then an exact weighted sum, requantized once."""

    def forward(self, value: Any, offsets: Any, weights: Any, reference: Any, shapes: Any) -> QTensor:
        value, offsets, weights = (self.quantized_input(x) for x in (value, offsets, weights))
        terms = offsets.shape[3] * offsets.shape[4]
        bound = terms * 2.0 ** (value.dtype.bits + weights.dtype.bits - 2)

        def plan() -> tuple[Tensor, float]:
            assert self.scale is not None
            ratio = value.scale.double() * weights.scale.double() / self.scale.double()
            return fp.choose_factor(ratio, self.low, self.high, bound).to(value.device), float(offsets.scale)

        factor, step = self._plans.get((value, weights, offsets), terms, plan)
        heights, widths = zip(*shapes, strict=True)
        place = reference.as_real() if isinstance(reference, QTensor) else reference
        return self.output(fp.deformable_attention(
            value.plain(), offsets.plain(), weights.plain(), place, heights, widths, step,
            fp.weight_bits(value.dtype.bits), factor, fp.is_beyond_float32(bound), self.low, self.high,
        ))  # fmt: skip
