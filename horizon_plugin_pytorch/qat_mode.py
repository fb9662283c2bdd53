"""How batch normalisation is treated while training on the integer grid."""

from __future__ import annotations

from enum import Enum


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
