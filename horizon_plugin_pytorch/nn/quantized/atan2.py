"""The angle of a point, on integers."""

from __future__ import annotations

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class Atan2(QuantizedModule):
    """Logarithms by table, their difference, and the angle by table."""

    def _plan(self, y: QTensor, x: QTensor) -> fp.AngleTables:
        assert self.scale is not None
        tables = fp.build_angles(y.scale.detach(), y.dtype, x.scale.detach(), x.dtype, self.scale)
        return fp.AngleTables(*(t.to(x.device) for t in (tables.y_log, tables.x_log, tables.angles)))

    def forward(self, y: QTensor, x: QTensor) -> QTensor:
        y, x = self.quantized_input(y), self.quantized_input(x)
        t = self._plans.get((y, x), "tables", lambda: self._plan(y, x))
        out = fp.atan2(y.plain(), x.plain(), t.y_log, t.x_log, t.angles, y.dtype.min, x.dtype.min, self.low, self.high)
        return self.output(out)
