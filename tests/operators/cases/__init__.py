"""Every operator of the table in every form that a model can write it."""

from __future__ import annotations

from tests.operators.cases import arithmetic, attention, detection, gemm, norms, reductions, shapes, spatial, tables
from tests.operators.cases.base import Case, bench

CASES: list[Case] = [
    *gemm.CASES,
    *arithmetic.CASES,
    *reductions.CASES,
    *tables.CASES,
    *norms.CASES,
    *spatial.CASES,
    *shapes.CASES,
    *attention.CASES,
    *detection.CASES,
]

__all__ = ["CASES", "Case", "bench"]
