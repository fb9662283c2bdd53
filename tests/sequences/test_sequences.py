"""A sample of what `make soak` compares: pairs of operators and usual sequences, at every optimisation level."""

from __future__ import annotations

import pytest
import torch

from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph
from tests.sequences.comparison import LEVELS, THREADS, _differing, differences, outcome, written
from tests.sequences.forms import Alone, form_of
from tests.sequences.parts import found, pair_at, parts, sample
from tests.sequences.usual import USUAL

_AT_ONCE = 30
_PAIRS = 60
FORMATS = ("qint8", "qint16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("start", range(0, len(USUAL), 2 * _AT_ONCE))
def test_usual_sequences(start: int, dtype: str) -> None:
    """Every other one in int8 and in int16."""
    chosen = list(USUAL.values())[start : start + 2 * _AT_ONCE][FORMATS.index(dtype) :: 2]
    assert not differences(chosen, dtype)


@pytest.mark.parametrize("start", range(0, _PAIRS, _AT_ONCE))
@pytest.mark.slow
def test_pairs_of_operators(start: int) -> None:
    found = outcome(sample(_PAIRS)[start : start + _AT_ONCE], FORMATS[start // _AT_ONCE % 2])
    assert not found.differences and not found.broken and not found.refused


def test_the_comparison_sees_a_fusion_that_changes_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime makes padding part of a pooling, and pads with the smallest number instead of zeros."""
    monkeypatch.setattr(OnnxGraph, "apart_from_pad", lambda self, x: x)
    found = differences([USUAL["pad-zeros-max"], USUAL["conv-add-relu"]], "qint8")
    assert {d.name for d in found} == {"pad-zeros-max"}
    rewritten = [level for level in LEVELS if level != "disable_all"]
    assert {(d.level, d.threads) for d in found} == {(level, count) for level in rewritten for count in THREADS}


def test_operators_begin_and_end_as_their_files_do() -> None:
    by_name = {part.case.name: part for part in parts()}

    def form(name: str) -> object:
        part = by_name[name]
        return form_of(written([Alone(part)], "qint16")[1], len(part.case.shapes))

    assert str(form("same-conv-1x1")) == "Form(beginnings=('Reshape',), ending='Clip>Reshape')"
    assert str(form("deep-linear")) == "Form(beginnings=('Add+Sub',), ending='Sub>Clip')"


def test_a_pair_is_one_that_runs_in_float() -> None:
    """A diagonal has a layout that a view does not take; a pair is found again by its key."""
    by_name = {part.case.name: part for part in parts()}
    assert found(by_name["torch-diagonal"], by_name["view"], 0) is None
    pair = found(by_name["same-conv"], by_name["view"], 0)
    assert pair is not None and pair_at(pair.key) == pair


def test_real_numbers_of_positions_are_float_code() -> None:
    """Of integers without a scale float code makes real numbers: close. Positions and integers with one are equal."""
    by_name = {part.case.name: part for part in parts()}
    real = found(by_name["where-integers"], by_name["torch-logsumexp"], 0)
    exact = found(by_name["where-compared"], by_name["torch-logsumexp"], 0)
    assert real is not None and real.is_float_code and exact is not None and not exact.is_float_code
    assert not differences([real, exact], "qint16")


def test_float_code_may_not_be_far_off() -> None:
    x = torch.tensor([1.0, 2.0, float("nan"), 100.0])
    y = torch.tensor([1.0 + 1e-7, 2.1, float("nan"), 100.0])
    assert (_differing(x, y, False), _differing(x, y, True), _differing(x.long(), y.long() + 1, True)) == (2, 1, 4)
