"""Correlation of two images while training."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.correlation import Correlation as _Float
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import correlation as quantized
from horizon_plugin_pytorch.operators.support import INT8, Limit, Support, Use, between, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class Correlation(RoundedModule, _Float):
    """Correlation with its output rounded."""

    quantized_class = quantized.Correlation

    @classmethod
    def from_float(cls, mod: Any) -> Correlation:
        """The QAT form of a correlation."""
        self = cls(mod.kernel_size, mod.max_displacement, mod.stride1, mod.stride2, mod.pad_size, mod.is_multiply)
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self

    def require_settings(self) -> None:
        self.check_settings()


def _room(use: Use) -> tuple[float, float]:
    """The left and right side of the published inequality."""
    number = {
        name: use.numbers(name)[0] for name in ("kernel_size", "max_displacement", "stride1", "stride2", "pad_size")
    }
    reach = number["max_displacement"] // number["stride2"] * number["stride2"]
    side = min(use.inputs[0].shape[-2:])
    return side + 2 * number["pad_size"] - 2 * reach - number["kernel_size"] + 1, number["stride1"]


_ROOM = Limit(
    "min(H, W) + 2 * pad_size - 2 * (max_displacement // stride2 * stride2) - kernel_size + 1 >= stride1",
    lambda use: _room(use)[0] >= _room(use)[1], lambda use: "{} < {}".format(*_room(use)), "use a larger pad_size",
)  # fmt: skip
register(Operator(
    "correlation", ScaleRule.OWN, Correlation, quantized.Correlation, (_Float,),
    marches=on(bayes=Support(INT8, INT8, limits=(between("C", 1, 1024), _ROOM))),
))  # fmt: skip
