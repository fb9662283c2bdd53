"""Inputs and outputs of models, however they are nested: in tuples, lists, dicts, dataclasses, and what torch knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
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
        parts = _parts(leaf)
        if parts is None:
            yield leaf
        else:
            for part in parts.values():
                yield from leaves(part)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of the structure."""
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with what the function gives in place of each tensor; its containers are new ones.

    >>> from types import SimpleNamespace
    >>> map_tensors(lambda x: "a tensor", {"boxes": SimpleNamespace(count=1, scores=Tensor())})
    {'boxes': namespace(count=1, scores='a tensor')}
    """
    return map_instances(function, Tensor, tree)


def map_instances(function: Callable[[Any], Any], types: type | tuple[type, ...], tree: Any) -> Any:
    """The same structure with what the function gives in place of each instance of the types, containers included.

    >>> map_instances(str, int, (1, {"a": [2.5, 3]}))
    ('1', {'a': [2.5, '3']})
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, types):
            return function(leaf)
        parts = _parts(leaf, types)
        if parts is None:
            return leaf
        out = copy.copy(leaf)
        for name, part in parts.items():
            put = dict.__setitem__ if isinstance(out, dict) else list.__setitem__ if isinstance(out, list) else _set
            put(out, name, map_instances(function, types, part))  # type: ignore[arg-type]
        return out

    return pytree.tree_map(one, tree, is_leaf=lambda value: isinstance(value, types))


def located(
    tree: Any, types: type | tuple[type, ...] = Tensor, spells_keys: bool = False
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors of the structure, or other leaves, in order: the keys, positions and fields that lead to each.

    >>> [path for path, leaf in located((1, {"boxes": [2, 3]}), int)]
    [(0,), (1, 'boxes', 0), (1, 'boxes', 1)]

    With `spells_keys` a number is a position, as numbers that are keys of a dictionary are spelled:

    >>> [path for path, leaf in located([{8: 1, 16: [2]}], int, spells_keys=True)]
    [(0, '8'), (0, '16', 0)]
    """
    try:
        flat = pytree.tree_flatten_with_path(tree)[0]
        pairs = [(tuple(_key(entry, spells_keys) for entry in path), leaf) for path, leaf in flat]
    except ValueError:  # a class that is registered without names for its parts
        pairs = [((index,), leaf) for index, leaf in enumerate(pytree.tree_leaves(tree))]
    for path, leaf in pairs:
        parts = None if isinstance(leaf, types) else _parts(leaf, types)
        if parts is not None:
            is_spelled = spells_keys and isinstance(leaf, dict)
            for name, part in parts.items():
                key = str(name) if is_spelled and isinstance(name, int) else name
                yield from (((*path, key, *rest), found) for rest, found in located(part, types, spells_keys))
        elif isinstance(leaf, types):
            yield path, leaf


def _key(entry: Any, spells: bool) -> Any:
    """What an entry of a path of torch's names: a position, a key or a field."""
    if spells and isinstance(getattr(entry, "key", None), int):
        return str(entry.key)
    return next((getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name)), str(entry))


def fresh(tree: Any) -> Any:
    """The same arguments in containers of their own: a forward may write into what it is given.

    >>> batch = {"x": Tensor()}
    >>> fresh(batch).pop("x") is batch["x"]
    True
    """
    return tree if isinstance(tree, Tensor) else map_tensors(lambda x: x, tree)


_set = object.__setattr__  # a dataclass may be frozen


def _parts(value: Any, types: type | tuple[type, ...] = Tensor) -> dict[Any, Any] | None:
    """What a container that torch does not know holds: a dataclass, a list or dict of another class, an object.

    Objects count if they hold tensors, or what else is looked for, at any depth; others are values.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return dict(enumerate(value))
    wanted = (Tensor, *types) if isinstance(types, tuple) else (Tensor, types)
    is_plain = isinstance(value, (Tensor, Module, type)) or not hasattr(value, "__dict__") or callable(value)
    return None if is_plain or next(tensors_in(value, wanted), None) is None else dict(vars(value))


def has_tensor(value: Any) -> bool:
    """Does an object hold a tensor?"""
    return next(tensors_in(value), None) is not None


_CONTAINERS = (list, tuple, set, frozenset)


def tensors_in(value: Any, types: type | tuple[type, ...] = Tensor) -> Iterator[Any]:
    """Tensors in a value, or what else is looked for: itself, or what containers, dataclasses and other objects hold.

    Modules are not looked into.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> list(tensors_in({"boxes": SimpleNamespace(scores=[torch.tensor(1)])}))
    [tensor(1)]
    """
    pending, seen = [value], set()
    while pending:
        here = pending.pop()
        if isinstance(here, types):
            yield here
            continue
        if isinstance(here, (str, bytes, int, float, type, Module)) or here is None or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, Mapping):
            pending.extend(here.values())
        elif isinstance(here, _CONTAINERS):
            pending.extend(here)
        else:
            pending.extend(getattr(here, "__dict__", {}).values())
            pending.extend(getattr(here, name, None) for name in getattr(type(here), "__slots__", ()))
