"""Table look-up on integers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import ConversionError, TableWarning
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.small import bytes_of
from horizon_plugin_pytorch.qtensor import QTensor

_NUDGES = (0, 1, -1, 2, -2, 4, -4, 8, -8)
MOST_STEPS = 2.0  # a table that is further from its function than this deserves a warning


class SegmentLUT(QuantizedModule):
    """A function of one variable: 256 exact entries for int8 inputs, a segment table for int16."""

    function: Callable[[Tensor], Tensor]
    name: str
    division: fp.Division | None
    form: Callable[[float, float], str] | None

    def configure(self, mod: Any) -> None:
        self.function, self.name, self.division, self.form = mod.function, mod.name, mod.division, mod.form
        self.magnitude = 0.0  # of the largest input that it was planned for: some chips limit it
        self._met: tuple[Tensor, QuantDType] | None = None
        for scale, dtype in mod.inputs_seen():
            self.table(scale.detach().to(mod.activation_post_process.scale.device), dtype)

    def table(self, in_scale: Tensor, in_dtype: QuantDType) -> fp.Table:
        """The table for inputs of this scale and format."""
        self._met = (in_scale, in_dtype)
        return self._plans.get((in_scale,), in_dtype, lambda: self._build(in_scale, in_dtype))

    def _build(self, in_scale: Tensor, in_dtype: QuantDType) -> fp.Table:
        assert self.scale is not None and self.out_dtype is not None
        table = fp.build_table(
            self.function, in_scale, in_dtype, self.scale, self.out_dtype, self.division, self._programs(in_scale)
        )
        reach = -in_dtype.min * float(in_scale)
        self.magnitude = max(self.magnitude, reach)
        if table.worst_error > MOST_STEPS:
            warnings.warn(
                f"the {in_dtype} table of `{self.name}` {self.place} is up to {table.worst_error:.1f} output steps "
                f"away from the function: over inputs of [-{reach:.4g}, {reach:.4g}] it bends too often for its "
                "segments. Narrow the range of its input (clamp it, or calibrate with typical data), give the "
                "function a smaller largest value, or take a coarser output such as qint8.",
                TableWarning,
                stacklevel=2,
            )
        return fp.Table(table.values.to(in_scale.device), table.worst_error, table.program)

    def _programs(self, in_scale: Tensor) -> Iterator[str]:
        """Quick forms of the function; some move the scale by a few 2**-23, away from a tie that float32 would miss."""
        assert self.scale is not None
        for nudge in _NUDGES if self.form is not None else ():
            program = self.form(float(in_scale), float(self.scale) * (1 + nudge * 2.0**-23))  # type: ignore[misc]
            if program:
                yield program

    def table_error(self, in_scale: Tensor | None = None, in_dtype: QuantDType | None = None) -> float:
        """The largest distance between table and function, in output steps, over all inputs of a scale and format.

        Without arguments: of the scale and format that were met last.
        """
        if in_scale is None or in_dtype is None:
            if self._met is None:
                raise ConversionError(f"the table of `{self.name}` {self.place} depends on its input; run it first.")
            in_scale, in_dtype = self._met
        return self.table(in_scale, in_dtype).worst_error

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        table = self.table(x.scale, x.dtype)
        found = self._on_bytes(x, table)
        if found is not None:
            return self.output(found)
        if table.program:
            return self.output(fp.evaluate(x.plain(), table.program, table.values, x.dtype.min))
        return self.output(fp.lookup(x.plain(), table.values, x.dtype.min))

    def _on_bytes(self, x: QTensor, table: fp.Table) -> Tensor | None:
        """What the table gives for bytes; None if the input is not here as bytes, or there would be none of them."""
        values = bytes_of(x, self.out_dtype) if len(table.values) <= 1 << 8 else None
        return None if values is None else fp.lookup_bytes(values, table)

    def extra_repr(self) -> str:
        error = "" if self._met is None else f", table_error={self.table_error():.2f} steps"
        return f"{self.name}, {super().extra_repr()}{error}"
