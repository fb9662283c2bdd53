"""The structure of what a model is given and gives, with a slot in place of each tensor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError, listed
from horizon_plugin_pytorch.nested import located, map_instances, map_tensors


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a tensor in a structure."""

    index: int


def with_slots(tree: Any) -> Any:
    """A structure with a slot in place of each tensor.

    >>> with_slots({"boxes": [torch.zeros(1), None]})
    {'boxes': [Slot(index=0), None]}
    """
    count = itertools.count()
    return map_tensors(lambda x: Slot(next(count)), tree)


def filled(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """A structure with tensors in its slots.

    >>> filled({"boxes": [Slot(1), Slot(0)]}, ["a", "b"])
    {'boxes': ['b', 'a']}
    """
    return map_instances(lambda slot: tensors[slot.index], Slot, structure)


def slot_paths(structure: Any) -> list[tuple[Any, ...]]:
    """The keys, positions and fields that lead to each slot, in the order of the slots; numbers are positions.

    >>> slot_paths({"boxes": [Slot(0), Slot(1)]})
    [('boxes', 0), ('boxes', 1)]
    """
    found = sorted(located(structure, Slot, spells_keys=True), key=lambda pair: pair[1].index)
    return [path for path, slot in found]


def in_order(args: Sequence[Any], paths: Sequence[tuple[Any, ...]], who: str) -> list[Tensor]:
    """The tensors of arguments in the order in which paths lead to them, whatever the order of a dictionary is.

    Structures of another kind, as lists in the place of a class that is not known here, are taken in their own order.

    Args:
        args: arguments by position; tensors may also be given one by one.
        paths: of each tensor, as `located` finds them; an argument may be named instead of numbered.
        who: takes them, for messages.

    Raises:
        ExportError: there are more or less of them, or keys of other names.

    >>> views = {"right": torch.tensor(2), "left": [torch.tensor(1)]}
    >>> in_order([0.5, views], [("views", "left", 0), ("views", "right")], "the model")
    [tensor(1), tensor(2)]
    >>> in_order([torch.tensor(i) for i in range(3)], [("views", i) for i in range(3)], "the model")
    [tensor(0), tensor(1), tensor(2)]
    """
    found = dict(located(tuple(args), spells_keys=True))
    if len(found) != len(paths):
        expected = listed(map(_spelled, paths))
        raise ExportError(f"{who} takes {len(paths)} tensors, got {len(found)} (expected {expected}).")
    given, wanted = (list(dict.fromkeys(path[0] for path in of)) for of in (found, paths))
    renamed = {name: wanted[i] if i < len(wanted) else f"argument {name}" for i, name in enumerate(given)}
    found = {(renamed[path[0]], *path[1:]): x for path, x in found.items()}
    missing, others = [path for path in paths if path not in found], [path for path in found if path not in paths]
    if not missing:
        return [found[path] for path in paths]
    if {_kind(path) for path in missing} & {_kind(path) for path in others if len(path) > 1}:
        names = listed(map(_spelled, missing)), listed(map(_spelled, others))
        raise ExportError(f"{who} takes a tensor as {names[0]}, and got one as {names[1]}.")
    return list(found.values())


def _kind(path: tuple[Any, ...]) -> tuple[type, ...]:
    """Which parts of a path are keys, and which positions; arguments count as neither."""
    return tuple(map(type, path[1:]))


def _spelled(path: tuple[Any, ...]) -> str:
    """``(0, "left", 1)`` as ``0.left.1``."""
    return "`" + ".".join(map(str, path)) + "`"


def without_classes(structure: Any) -> Any:
    """The same structure in containers of Python's own, so that it is read where the user's classes are not.

    A named tuple becomes a tuple; a dataclass or another object becomes a `SimpleNamespace`.

    >>> Boxes = dataclasses.make_dataclass("Boxes", ["corners", "count"])
    >>> without_classes((Boxes(Slot(0), 3), {"best": Slot(1)}))
    (namespace(corners=Slot(index=0), count=3), {'best': Slot(index=1)})
    """
    if isinstance(structure, Slot) or type(structure) in _PLAIN:
        return structure
    if isinstance(structure, dict):
        return {key: without_classes(part) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        parts = [without_classes(part) for part in structure]
        return parts if isinstance(structure, list) else tuple(parts)
    if next(located(structure, Slot), None) is not None:
        return SimpleNamespace(**{name: without_classes(part) for name, part in vars(structure).items()})
    for kind in (int, float, str):  # of a class of their own, such as an enum
        if isinstance(structure, kind):
            return kind(structure)
    raise ExportError(
        f"the model gives a `{type(structure).__name__}` besides tensors, which cannot be read where its class is not. "
        "Give its numbers instead."
    )


_PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
