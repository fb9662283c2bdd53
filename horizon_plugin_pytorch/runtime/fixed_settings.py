"""Settings of a module that cannot change any more, because something was made of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationConfigError

PREPARED = (
    "its parts were made for {old!r} when the model was prepared. Set it on the float model, and prepare that again."
)
CONVERTED = (
    "the model is converted, and its integers are made for {old!r}. Set it on the prepared model, and convert that "
    "again."
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# What torch keeps of any module, and what has no part in the result of a prepared one.
_FREE = frozenset(vars(nn.Module())) | {"qconfig", "path", "line", "operator", "products", "inplace"}


@dataclass(frozen=True)
class FixedSettings:
    """What the settings of a module are, and why they stay so.

    Args:
        values: the settings by name.
        reason: why, and what to do instead; ``{old!r}`` stands for the value.

    >>> fixed = FixedSettings.of(nn.Softmax(1), CONVERTED)
    >>> fixed.values
    {'dim': 1}
    >>> fixed.require("dim", 1, "`Softmax.dim` at `head`")
    >>> fixed.require("dim", 2, "`Softmax.dim` at `head`")
    Traceback (most recent call last):
    horizon_plugin_pytorch.errors.QuantizationConfigError: `Softmax.dim` at `head` cannot become 2: the model is ...
    """

    values: dict[str, Any]
    reason: str

    @classmethod
    def of(cls, module: nn.Module, reason: str, free: Collection[str] = ()) -> FixedSettings:
        """Those of a module, without the names in `free`."""
        return cls(
            {
                name: value
                for name, value in vars(module).items()
                if name[0] != "_" and name not in _FREE and name not in free and _is_plain(value)
            },
            reason,
        )

    def require(self, name: str, value: Any, who: str) -> None:
        """Insist that a setting stays what it is.

        Raises:
            QuantizationConfigError: it would be another.
        """
        old = self.values[name]
        if not is_same(old, value):
            raise QuantizationConfigError(f"{who} cannot become {value!r}: {self.reason.format(old=old)}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def is_same(old: Any, new: Any) -> bool:
    """Are two values of a setting the same? Tuples and lists are."""
    return _listed(old) == _listed(new)


def _listed(value: Any) -> Any:
    return list(map(_listed, value)) if isinstance(value, (tuple, list)) else value
