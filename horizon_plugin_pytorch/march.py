"""Which chip the model is for."""

from __future__ import annotations

from enum import Enum, EnumMeta

from horizon_plugin_pytorch.errors import MarchNotSetError


class _MarchMeta(EnumMeta):
    """Accept the guides' other spellings: ``March.Bayes``, ``March.Bernoulli2``."""

    def __getattr__(cls, name: str) -> "March":
        if not name.startswith("_"):
            member = cls.__members__.get(name.upper())
            if member is not None:
                return member  # type: ignore[return-value]
        raise AttributeError(f"`March` has no member {name!r}; choose one of: {', '.join(cls.__members__)}")


class March(str, Enum, metaclass=_MarchMeta):
    """A BPU architecture.

    >>> March.BAYES is March.Bayes
    True
    >>> March.NASH_E.value
    'nash-e'
    """

    BERNOULLI = "bernoulli"
    BERNOULLI2 = "bernoulli2"
    BAYES = "bayes"
    BAYES_E = "bayes-e"
    NASH_B = "nash-b"
    NASH_B_LITE = "nash-b-lite"
    NASH_B_PLUS = "nash-b-plus"
    NASH_E = "nash-e"
    NASH_M = "nash-m"
    NASH_H = "nash-h"
    NASH_P = "nash-p"

    @property
    def family(self) -> str:
        """``bernoulli``, ``bayes`` or ``nash``."""
        return self.value.split("-")[0].rstrip("2")

    def __str__(self) -> str:
        return self.value


_current: March | None = None
# What people call the chips; a family of several has no single march, so these only help a message.
_NASH = "nash-e, nash-m, nash-h or nash-p"
_CHIPS = {
    "x3": "bernoulli2", "rdk-x3": "bernoulli2", "j5": "bayes", "rdk-ultra": "bayes", "x5": "bayes-e",
    "rdk-x5": "bayes-e", "s100": "nash-e or nash-m", "rdk-s100": "nash-e or nash-m", "j6": _NASH, "nash": _NASH,
    "j6b": "nash-b", "j6e": "nash-e", "j6m": "nash-m", "j6h": "nash-h", "j6p": "nash-p",
}  # fmt: skip


def as_march(march: March | str) -> March:
    """A `March` from a member or any of its spellings.

    >>> as_march("nash_e"), as_march("Bayes")
    (<March.NASH_E: 'nash-e'>, <March.BAYES: 'bayes'>)
    """
    if isinstance(march, March):
        return march
    if isinstance(march, str):
        spelling = march.strip().lower().replace("_", "-").replace(" ", "-")
        for member in March:
            if member.value == spelling:
                return member
    names = ", ".join(m.value for m in March)
    known = _CHIPS.get(spelling) if isinstance(march, str) else None
    hint = f" For {march}, that is {known}." if known else ""
    raise ValueError(f"unknown march {march!r}: pass a `March` member or one of the strings {names}.{hint}")


def set_march(march: March | str | None) -> None:
    """Choose the chip that models are prepared for; call it before `prepare_qat_fx`.

    >>> set_march(March.BAYES)
    >>> get_march()
    <March.BAYES: 'bayes'>
    """
    global _current
    _current = None if march is None else as_march(march)


def get_march() -> March | None:
    """The chip chosen with `set_march`, or None.

    >>> set_march("bayes")
    >>> get_march().family
    'bayes'
    """
    return _current


def require_march(what: str) -> March:
    """The current march, or an error that says what to call."""
    if _current is None:
        raise MarchNotSetError(
            f"{what} needs to know the chip, and no march is set. Call "
            "`horizon_plugin_pytorch.march.set_march(March.BAYES)` (RDK Ultra / J5; BERNOULLI2 for RDK X3, BAYES_E for "
            "RDK X5, NASH_E or NASH_M for RDK S100 / J6) first."
        )
    return _current
