"""Which memory tensors show, and what a write to it means where nothing can be written to.

A program has values and no memory. A tensor is known by what it shows of a memory, a write in place is an operator
that gives a new value, and what shows the same memory is read from that value afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.qtensor import QTensor

Key = tuple[Hashable, ...]


def plain(x: Any) -> Any:
    """An ordinary tensor for a QTensor."""
    return x.plain() if isinstance(x, QTensor) else x


def operands(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator; they are at most one list deep."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [part for part in value if isinstance(part, Tensor)]
    return found


def memory_of(x: Tensor) -> Hashable:
    """The memory that a tensor shows all or part of."""
    return plain(x).untyped_storage()._cdata


def tensor_key(x: Tensor) -> Key:
    """What a tensor shows of memory: two Python objects for the same data have the same key."""
    x = plain(x)
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def is_shared(x: Tensor) -> bool:
    """Does somebody besides torch show the memory, such as an array of numpy? Nobody sees what that one writes.

    >>> x, y = torch.zeros(2), torch.zeros(2)
    >>> array = y.numpy()
    >>> is_shared(x), is_shared(y)
    (False, True)
    """
    return not plain(x).untyped_storage().resizable()


def shows_all(x: Tensor) -> bool:
    """Does a tensor show each number of its memory once?"""
    is_whole = x.storage_offset() == 0 and x.numel() * x.element_size() == x.untyped_storage().nbytes()
    return is_whole and torch.ops.aten.is_non_overlapping_and_dense(x)


def axes_in_memory(x: Tensor) -> list[int]:
    """The axes of a tensor from the slowest to the fastest one.

    >>> axes_in_memory(torch.zeros(2, 3, 4).permute(2, 0, 1))
    [1, 2, 0]
    """
    return sorted(range(x.dim()), key=lambda axis: (-x.stride()[axis], -x.shape[axis]))


def written_arguments(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [value] if isinstance(value, Tensor) else value or []
    return found


@functools.lru_cache(maxsize=1024)
def functional_form(func: Any) -> Any:
    """The operator that gives what another one writes; None if there is none.

    >>> functional_form(torch.ops.aten.add_.Tensor), functional_form(torch.ops.aten.add.out)
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    schema = func._schema
    space, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    wanted = _arguments(func)
    for overload in () if packet is None else packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and _arguments(candidate) == wanted:
            return candidate
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]


def without_outputs(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call without the tensors that it is only to write to (``out=``)."""
    outputs = {argument.name for argument in func._schema.arguments if argument.is_out}
    positions = [argument.is_out for argument in func._schema.arguments]
    kept = tuple(value for value, is_out in zip(args, positions, strict=False) if not is_out)
    return kept, {name: value for name, value in kwargs.items() if name not in outputs}
