"""What rules may ask of a document."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence
from horizon_plugin_pytorch.analysis.profile.document import Document, Operator


def evidence_of(*operators: Operator) -> Evidence:
    return Evidence(Document("net", "FvsQ", "float", "qat", operators=operators), nn.Identity(), nn.Identity())


def operator_of(index: int, operator: str, *inputs: int) -> Operator:
    return Operator(index, f"[{operator}]", "", operator, inputs=inputs, operator=operator)


def test_functions_behind_what_does_nothing() -> None:
    names = ("linear", "dropout", "sigmoid", "dequant")
    evidence = evidence_of(*(operator_of(i, name, *range(max(i - 1, 0), i)) for i, name in enumerate(names)))
    head = evidence.operators[0]
    assert evidence.is_dequantized(head) and evidence.functions_behind(head) == ["sigmoid"]


def test_functions_that_meet_again_and_again() -> None:
    """Each takes the results of the two before it: there are more ways from the first to the last than one can walk."""
    count = 200
    chain = [operator_of(i, "mul", *range(max(i - 2, 0), i)) for i in range(count)]
    evidence = evidence_of(*chain, operator_of(count, "dequant", count - 2, count - 1))
    assert evidence.is_dequantized(chain[0]) and evidence.functions_behind(chain[0]) == ["mul"]
