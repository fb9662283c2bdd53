"""Inputs and outputs of models, however they are nested: in tuples, lists, dicts, dataclasses, and what torch knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves(tree: Any) -> Iterator[Any]:
    """What is in the structure, in order; the fields of a dataclass are in the order of its definition.

    >>> @dataclasses.dataclass
    ... class Boxes:
    ...     corners: list
    ...     scores: dict
    >>> list(leaves((1, Boxes([2, 3], {"best": 4}))))
    [1, 2, 3, 4]
    """
    for leaf in pytree.tree_leaves(tree):
        if _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from leaves(getattr(leaf, field.name))
        else:
            yield leaf


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of the structure."""
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with what the function gives in place of each tensor."""
    return map_instances(function, Tensor, tree)


def map_instances(function: Callable[[Any], Any], types: type | tuple[type, ...], tree: Any) -> Any:
    """The same structure with what the function gives in place of each instance of the types, containers included.

    >>> map_instances(str, int, (1, {"a": [2.5, 3]}))
    ('1', {'a': [2.5, '3']})
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, types):
            return function(leaf)
        if not _is_dataclass(leaf):
            return leaf
        out = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            inner = map_instances(function, types, getattr(leaf, field.name))
            object.__setattr__(out, field.name, inner)  # it may be frozen
        return out

    return pytree.tree_map(one, tree, is_leaf=lambda value: isinstance(value, types))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
