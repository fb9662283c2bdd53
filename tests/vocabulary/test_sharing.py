"""Which tensors with a scale show one memory in float, and which a write makes stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.qtensor import QTensor, _Stale
from horizon_plugin_pytorch.sharing import is_shown_elsewhere, overlap

Q = Callable[[], QTensor]


@pytest.fixture(params=["integers", "values"])
def make(request: Any) -> Q:
    data = torch.arange(-8, 8)
    data = data.to(torch.int8) if request.param == "integers" else data * 0.5
    return lambda: QTensor(data.view(4, 4).clone(), 0.5, "qint8")


def test_a_write_makes_those_stale_that_show_what_it_wrote(make: Q) -> None:
    x = make()
    first, last, all_of_it, copy = x[0], x[3], x.view(-1), x.clone()
    first.relu_()
    assert [type(t) is _Stale for t in (x, first, last, all_of_it, copy)] == [True, False, False, True, False]
    assert last.dequantize().tolist() == [2, 2.5, 3, 3.5]
    with pytest.raises(UnsupportedOperatorError, match=r"read \(test_sharing.py:\d+\).*`torch.Tensor.relu_` \(test_sh"):
        x.dequantize()
    assert x.shape == (4, 4) and x.dim() == 2 and repr(x) == "Stale()"


def test_a_view_of_what_was_written_is_a_view(make: Q) -> None:
    x = make()
    x.relu_()
    rows = x[:2]
    x[:3].tril_()
    for stale in (x, rows):
        with pytest.raises(UnsupportedOperatorError, match="tril_"):
            stale.int_repr()


def test_a_tensor_that_gets_another_shape_changes_no_value(make: Q) -> None:
    x = make()
    row = x[:1]
    row.squeeze_(0)
    assert row.shape == (4,) and type(x) is QTensor
    row.relu_()
    assert type(x) is _Stale


def test_a_stale_tensor_is_neither_copied_nor_saved(make: Q) -> None:
    import copy
    import pickle

    x = make()
    x[0].relu_()
    for use in (copy.deepcopy, pickle.dumps, torch.clone, lambda t: torch.cat([t]), lambda t: t + 1):
        with pytest.raises(UnsupportedOperatorError, match="relu_"):
            use(x)


def test_tensors_that_are_gone_are_forgotten(make: Q) -> None:
    x = make()
    for _ in range(100):
        x.view(-1)
    assert len(x._membership.group._members) == 1


def test_an_ordinary_tensor_knows_whether_others_show_its_memory() -> None:
    x = torch.zeros(2, 2)
    assert not is_shown_elsewhere(x)
    row = x[0]
    assert is_shown_elsewhere(x) and is_shown_elsewhere(row)
    del row
    assert not is_shown_elsewhere(x)
    nameless = torch.zeros(4).view(2, 2)
    assert not is_shown_elsewhere(nameless)


PLACES = st.integers(0, 3).flatmap(
    lambda axes: st.tuples(
        st.integers(0, 12),
        st.tuples(*[st.integers(0, 4)] * axes),
        st.tuples(*[st.integers(0, 6)] * axes),
    )
)


def _positions(place: tuple[int, tuple[int, ...], tuple[int, ...]]) -> set[int]:
    offset, shape, strides = place
    found = {offset} if 0 not in shape else set()
    for size, stride in zip(shape, strides, strict=True):
        found = {position + step * stride for position in found for step in range(size)}
    return found


@given(PLACES, PLACES)
def test_places_overlap_that_have_a_position_in_common(place: Any, other: Any) -> None:
    assert overlap(place, other) == (place == other or bool(_positions(place) & _positions(other)))
