"""Asserts of a forward that is traced: sizes are not known there, and hold as they did in float.

PYTEST_DONT_REWRITE: pytest would write other code for these asserts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
from tests.operators.cases.base import Body


def sizes(x: Tensor) -> Tensor:
    assert x.shape[1] == 3, f"{x.shape}"
    assert x.size(0) > 0 and x.numel() % 3 == 0
    assert not x.shape[2] < 2
    return x.relu()


def values(x: Tensor) -> Tensor:
    y = x.relu()
    assert (y >= 0).all()
    return y


def branch(x: Tensor) -> Tensor:
    return x.relu() if x.shape[1] == 3 else x


def either(x: Tensor) -> Tensor:
    assert x.shape[1] == 4 or x.shape[1] == 3
    return x


def _prepared(function: Any) -> nn.Module:
    return prepare_qat_fx(QuantWrapper(nn.Sequential(nn.Conv2d(3, 3, 1), Body(function))), {"": get_default_qconfig()})


@pytest.mark.parametrize("function", [sizes, values])
def test_what_a_forward_asserts_is_taken_to_hold(function: Any) -> None:
    model = _prepared(function)
    assert model(torch.randn(1, 3, 4, 4)).shape == (1, 3, 4, 4)


@pytest.mark.parametrize("function", [branch, either])
def test_other_questions_about_what_is_traced_are_refused_with_their_line(function: Any) -> None:
    with pytest.raises(TraceError, match=r"test_asserts\.py:\d+"):
        _prepared(function)
