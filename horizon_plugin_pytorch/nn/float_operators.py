"""Rows for operators that compute in real numbers, before the QuantStub or after the DeQuantStub.

They have no scale and no module of ours to train; the table says that they are there, and on which chips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horizon_plugin_pytorch.nn.bgr_to_yuv444 import BgrToYuv444, bgr_to_yuv444
from horizon_plugin_pytorch.nn.operator_table import Call, Kind, Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.support import Marches, Support, on

FLOAT = ("float32",)
_EVERYWHERE = on(bernoulli2=Support(FLOAT, FLOAT), bayes=Support(FLOAT, FLOAT), nash_h=Support(FLOAT, FLOAT))


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _register(
    name: str, modules: tuple[type, ...] = (), functions: tuple[Callable, ...] = (), marches: Marches = _EVERYWHERE
) -> None:
    register(
        Operator(
            name,
            ScaleRule.NONE,
            modules=modules,
            functions=dict.fromkeys(functions, _as_it_is),
            marches=marches,
            results=(Kind.FLOAT,),
        )
    )


_register("bgr_to_yuv444", (BgrToYuv444,), (bgr_to_yuv444,))
