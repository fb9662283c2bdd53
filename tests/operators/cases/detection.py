"""Detection, BEV and colour."""

from __future__ import annotations

from tests.operators.cases.base import Case

CASES: list[Case] = []
