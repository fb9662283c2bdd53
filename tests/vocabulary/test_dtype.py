"""Number formats: names, ranges, storage, and being values."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.dtype import as_dtype, qbool, qinfo, qint4, qint8, qint16, qint32
from horizon_plugin_pytorch.errors import QuantizationConfigError

FORMATS = [
    (qbool, "qbool", 1, 0, 1, torch.bool),
    (qint4, "qint4", 4, -8, 7, torch.int8),
    (qint8, "qint8", 8, -128, 127, torch.int8),
    (qint16, "qint16", 16, -32768, 32767, torch.int16),
    (qint32, "qint32", 32, -(2**31), 2**31 - 1, torch.int32),
]


@pytest.mark.parametrize(("dtype", "name", "bits", "low", "high", "storage"), FORMATS)
def test_a_format_knows_its_name_range_and_storage(dtype, name, bits, low, high, storage) -> None:
    assert dtype == name
    assert f"{dtype}" == str(dtype) == name
    assert (dtype.bits, dtype.min, dtype.max, dtype.storage) == (bits, low, high, storage)
    assert qinfo(dtype) == (low, high)
    assert (qinfo(dtype).min, qinfo(dtype).max) == (low, high)
    assert as_dtype(name) is as_dtype(dtype) is dtype
    if bits > 1 and bits != 4:
        assert torch.iinfo(storage).min == low
        assert torch.iinfo(storage).max == high


@pytest.mark.parametrize("dtype", [f[0] for f in FORMATS])
def test_copies_are_the_same_object(dtype) -> None:
    file = io.BytesIO()
    torch.save({"dtype": dtype}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)["dtype"] is dtype
    assert pickle.loads(pickle.dumps(dtype)) is copy.copy(dtype) is copy.deepcopy(dtype) is dtype
    assert {dtype: 1}[str(dtype)] == 1


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [(torch.qint8, qint8), (torch.int8, qint8), (torch.int16, qint16), (torch.qint32, qint32), (torch.int32, qint32),
     ("int8", qint8), ("torch.qint8", qint8), (torch.bool, qbool)],
)  # fmt: skip
def test_torchs_spellings_are_understood(spelling, dtype) -> None:
    assert as_dtype(spelling) is dtype


@pytest.mark.parametrize("wrong", ["qint7", "", None, 8, torch.float32, torch.quint8])
def test_an_unknown_format_is_refused_with_the_choices(wrong) -> None:
    with pytest.raises(QuantizationConfigError, match="unknown quantized dtype.*qint8, qint16"):
        as_dtype(wrong)


def test_documented_places() -> None:
    assert horizon.dtype.qinfo is horizon.quantization.qinfo
    assert horizon.quantization.qint8 is horizon.dtype.qint8
    assert horizon.quantization.qint16 is horizon.dtype.qint16
