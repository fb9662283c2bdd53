"""The structure of what a model is given and gives, with a slot in place of each tensor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
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
