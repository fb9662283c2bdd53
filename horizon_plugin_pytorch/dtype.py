"""Number formats of quantized tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from horizon_plugin_pytorch.errors import QuantizationConfigError


class QInfo(NamedTuple):
    """The smallest and largest integer of a format."""

    min: int
    max: int


class QuantDType(str):
    """A number format. It is a string, so that tables and comparisons read naturally.

    >>> qint8, qint8 == "qint8", qint16.bits
    ('qint8', True, 16)
    """

    bits: int
    min: int
    max: int
    storage: torch.dtype

    def __new__(cls, name: str, bits: int, storage: torch.dtype) -> "QuantDType":
        self = super().__new__(cls, name)
        self.bits = bits
        self.storage = storage
        self.min, self.max = (0, 1) if bits == 1 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        return self

    def __reduce__(self) -> tuple:
        return as_dtype, (str(self),)

    def __deepcopy__(self, memo: dict) -> "QuantDType":
        return self


qbool = QuantDType("qbool", 1, torch.bool)
qint4 = QuantDType("qint4", 4, torch.int8)
qint8 = QuantDType("qint8", 8, torch.int8)
qint16 = QuantDType("qint16", 16, torch.int16)
qint32 = QuantDType("qint32", 32, torch.int32)

_BY_NAME = {str(d): d for d in (qbool, qint4, qint8, qint16, qint32)}


def as_dtype(dtype: "QuantDType | str | torch.dtype") -> QuantDType:
    """The format of that name; torch's own ``torch.qint8`` and ``torch.int8`` spellings are understood.

    >>> as_dtype(torch.qint8), as_dtype("qint16")
    ('qint8', 'qint16')
    """
    if isinstance(dtype, QuantDType):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if "q" + name in _BY_NAME:
        return _BY_NAME["q" + name]
    raise QuantizationConfigError(f"unknown quantized dtype {dtype!r}: expected one of {', '.join(_BY_NAME)}.")


def qinfo(dtype: "QuantDType | str | torch.dtype") -> QInfo:
    """The range of a format.

    >>> qinfo(qint16)
    QInfo(min=-32768, max=32767)
    """
    d = as_dtype(dtype)
    return QInfo(d.min, d.max)


QINT8_MAX = 128
QINT16_MAX = 32768
