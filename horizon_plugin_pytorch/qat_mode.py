"""Settings for models that are prepared from now on: batch normalisation, powers of two, shared layers."""

from __future__ import annotations

from enum import Enum
from typing import Any


class QATMode(str, Enum):
    """`FuseBN` folds BN into the convolution at prepare; the other two keep BN while training."""

    FuseBN = "fuse_bn"
    WithBN = "with_bn"
    WithBNReverseFold = "with_bn_reverse_fold"


_current = QATMode.FuseBN


def set_qat_mode(mode: QATMode | str) -> None:
    """Choose the mode for models prepared from now on.

    >>> set_qat_mode(QATMode.FuseBN)
    >>> get_qat_mode()
    <QATMode.FuseBN: 'fuse_bn'>
    """
    global _current
    try:
        _current = QATMode(mode)
    except ValueError:
        names = ", ".join(f"QATMode.{m.name}" for m in QATMode)
        raise ValueError(f"unknown QAT mode {mode!r}: choose one of {names}.") from None


def get_qat_mode() -> QATMode:
    """The mode that models are prepared in.

    >>> get_qat_mode()
    <QATMode.FuseBN: 'fuse_bn'>
    """
    return _current


class ConsistencyStrategy:
    """How far scales follow what the chip computes without rounding: powers of two (NASH_E, NASH_M).

    ===== ==========================================
    level scales
    ===== ==========================================
    0     as they are observed
    1     of activations: powers of two, rounded up
    2     of activations and weights: powers of two
    ===== ==========================================

    The documents set it before `prepare`, and ask for training after a change to 1 or 2. They also say that the chip
    then resizes and samples in a more consistent way; here QAT, the converted model and the ONNX file agree in every
    integer at any level. Of levels 3 and 4, which one document counts, none says what they mean; they are refused.
    """

    _level: int | None = None

    @classmethod
    def set_consistency_level(cls, level: int | None) -> None:
        """Choose the level for models prepared from now on; None, the default, is 0 without a word.

        >>> ConsistencyStrategy.set_consistency_level(1)
        >>> ConsistencyStrategy.get_consistency_level()
        1
        >>> ConsistencyStrategy.set_consistency_level(None)
        """
        if level is not None and (isinstance(level, bool) or level not in (0, 1, 2)):
            raise ValueError(
                f"set_consistency_level takes 0, 1 or 2, got {level!r}; what other levels mean is not documented."
            )
        cls._level = level

    @classmethod
    def get_consistency_level(cls) -> int:
        """The level that models are prepared with."""
        return cls._level or 0


class Tricks:
    """Switches of the fx methods that the documents name: set them before preparing a model.

    Args:
        fx_force_duplicate_shared_convbn: give each call of a layer that is shared together with its batch norm its own
            copy of both, so that they can be fused; the copies have one set of weights, and activation scales of their
            own (as `own_scales` of `prepare` does). The documents name the switch; that is all they say.

    >>> tricks.fx_force_duplicate_shared_convbn
    False
    """

    fx_force_duplicate_shared_convbn: bool

    def __init__(self) -> None:
        self.fx_force_duplicate_shared_convbn = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__annotations__:
            raise AttributeError(f"tricks has no switch {name!r}; it has {', '.join(type(self).__annotations__)}.")
        if not isinstance(value, bool):
            raise TypeError(f"tricks.{name} is True or False, got {value!r}.")
        super().__setattr__(name, value)


tricks = Tricks()
