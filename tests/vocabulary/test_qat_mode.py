"""The mode in which batch normalisation trains."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from horizon_plugin_pytorch import quantization
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode, set_qat_mode


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    before = get_qat_mode()
    yield
    set_qat_mode(before)


@pytest.mark.parametrize(
    ("name", "value"), [("FuseBN", "fuse_bn"), ("WithBN", "with_bn"), ("WithBNReverseFold", "with_bn_reverse_fold")]
)
def test_modes_can_be_set_by_member_or_value(name: str, value: str) -> None:
    for spelling in (QATMode[name], value):
        set_qat_mode(spelling)
        assert get_qat_mode() is QATMode[name]
    assert pickle.loads(pickle.dumps(QATMode[name])) is QATMode[name]


def test_bn_is_folded_unless_asked_otherwise() -> None:
    assert get_qat_mode() is QATMode.FuseBN
    assert quantization.QATMode is QATMode
    assert quantization.set_qat_mode is set_qat_mode


@pytest.mark.parametrize("wrong", ["fuse", None, 1])
def test_an_unknown_mode_is_refused_with_the_choices(wrong) -> None:
    with pytest.raises(
        ValueError, match=r"unknown QAT mode.*QATMode\.FuseBN, QATMode\.WithBN, QATMode\.WithBNReverseFold"
    ):
        set_qat_mode(wrong)
    assert get_qat_mode() is QATMode.FuseBN
