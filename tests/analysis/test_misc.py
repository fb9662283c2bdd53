"""Nested structures as text, and conversion of what is in them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.utils.misc import pytree_convert, tensor_struct_repr

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Boxes:
    corners: Any
    scores: Any


ONE = torch.zeros(2, 3, dtype=torch.float16)
SHOWN = "Tensor(shape=(2, 3), dtype=torch.float16, device=cpu)"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ONE, SHOWN),
        (torch.nn.Parameter(ONE), SHOWN.replace("Tensor", "Parameter", 1)),
        ([ONE], f"[{SHOWN}]"),
        ((ONE,), f"({SHOWN},)"),
        ((ONE, 1), f"({SHOWN}, 1)"),
        ({"a": {"b": [ONE]}, 3: None}, f"{{'a': {{'b': [{SHOWN}]}}, 3: None}}"),
        (OrderedDict(a=ONE), f"OrderedDict({{'a': {SHOWN}}})"),
        (Pair(ONE, "x"), f"Pair(first={SHOWN}, second='x')"),
        (Boxes(ONE, []), f"Boxes(corners={SHOWN}, scores=[])"),
        (QTensor(torch.zeros(1), 0.25, "qint8"), "QTensor(shape=(1,), dtype=qint8, device=cpu, scale=0.25)"),
        (
            QTensor(torch.zeros(2, 1), torch.tensor([0.1, 0.2]), "qint8", 0),
            "QTensor(shape=(2, 1), dtype=qint8, device=cpu, scale=2 channels)",
        ),
        (Boxes, repr(Boxes)),
        ((), "()"),
        ({}, "{}"),
        (2.5, "2.5"),
    ],
)
def test_structures_as_text(data: Any, expected: str) -> None:
    assert tensor_struct_repr(data) == expected


def test_everything_of_a_type_is_converted_and_the_rest_is_kept() -> None:
    data = {"a": [ONE, 1], "b": Pair(ONE, Boxes((ONE,), "x")), "c": OrderedDict(d=ONE)}
    found = pytree_convert(data, Tensor, lambda x: tuple(x.shape))
    assert found == {"a": [(2, 3), 1], "b": Pair((2, 3), Boxes(((2, 3),), "x")), "c": OrderedDict(d=(2, 3))}
    assert isinstance(found["b"], Pair) and isinstance(found["b"].second, Boxes) and data["a"][0] is ONE
    assert pytree_convert(ONE, Tensor, str) == str(ONE) and pytree_convert(3, Tensor, str) == 3
    assert pytree_convert([np.ones(1), 2, 2.5], (np.ndarray, float), type) == [np.ndarray, 2, float]
    assert pytree_convert([[1, 2], (3, [4])], list, tuple) == ([1, 2], (3, [4]))  # the outermost, as it is
    assert pytree_convert({"a": [1]}, list, tuple) == {"a": (1,)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], str, "x"), "'x' cannot be called"),
        (([], lambda x: x, Tensor), "is no type"),
        (([], (), str), "is no type"),
        (([], (int, "x"), str), "is no type"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pytree_convert(*arguments)
