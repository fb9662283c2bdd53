"""Table look-up on integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class SegmentLUT(QuantizedModule):
    """A function of one variable: 256 exact entries for int8 inputs, a segment table for int16."""

    function: Callable[[Tensor], Tensor]
    name: str

    def configure(self, mod: Any) -> None:
        self.function, self.name = mod.function, mod.name

    def table(self, x: QTensor) -> Tensor:
        """The table for inputs of this scale and format, from the lowest input up."""
        assert self.scale is not None and self.out_dtype is not None
        out_scale, out_dtype = self.scale, self.out_dtype
        return self._plans.get(
            (x.scale,),
            str(x.dtype),
            lambda: fp.build_table(self.function, x.scale, x.dtype, out_scale, out_dtype).to(x.device),
        )

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        return self.output(fp.lookup(x.plain(), self.table(x), x.dtype.min))

    def extra_repr(self) -> str:
        return f"{self.name}, {super().extra_repr()}"
