"""Example inputs that are given on the command line, by shape or by file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_profiler.command_line.outcomes import UsageError
from horizon_plugin_profiler.command_line.targets import load_tensors
from horizon_plugin_pytorch.nested import map_tensors, tensors_of

_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<rest>.+)", re.DOTALL)
_SHAPE = re.compile(r"\d+(?:x\d+)*")
_FILES = (".npy", ".npz", ".pt", ".pth")
_FORM = "give a shape, 1x3x224x224, with a type if it is not float32, 1x128:int64, or a file (.npy, .npz, .pt)"


def inputs_of(specs: Sequence[str], seed: int = 0) -> Any:
    """The arguments of a model, as the tools take them.

    Args:
        specs: ``[name=]SHAPE[:DTYPE[:LOW:HIGH]]`` or ``[name=]FILE``. Without limits, real numbers are normally
            distributed, and integers are 0 or 1.
        seed: of the random numbers.

    Raises:
        UsageError: one of them makes no sense, or cannot be read.

    >>> [tuple(x.shape) for x in inputs_of(["1x3x8x8", "1x4:int64:0:100"])]
    [(1, 3, 8, 8), (1, 4)]
    >>> list(inputs_of(["image=1x3", "scale=1"]))
    ['image', 'scale']
    """
    generator = torch.Generator().manual_seed(seed)
    found = [_one(spec, generator) for spec in specs]
    named = {name: value for name, value in found if name}
    if not named:
        return found[0][1] if len(found) == 1 else tuple(value for _, value in found)
    if len(named) < len(found):
        raise UsageError("Inputs have names or an order: name all of them (--input image=1x3x224x224), or none.")
    return named


def batches_of(inputs: Any, size: int | None) -> list[Any]:
    """Inputs cut along their first axis into batches; a last one that is smaller is one, too.

    Args:
        size: of a batch; None does not cut.

    Raises:
        UsageError: the inputs do not have first axes of one length.

    >>> [len(batch) for batch in batches_of(torch.ones(5, 3), 2)]
    [2, 2, 1]
    """
    if size is None:
        return [inputs]
    lengths = {x.shape[0] if x.dim() else None for x in tensors_of(inputs)}
    if size < 1 or len(lengths) != 1 or None in lengths:
        raise UsageError(f"--batch {size}: it must be 1 or more, and all inputs must have a first axis of one length.")
    (length,) = lengths
    assert length is not None
    return [map_tensors(itemgetter(slice(at, at + size)), inputs) for at in range(0, length, size)]


def _one(spec: str, generator: torch.Generator) -> tuple[str, Any]:
    parsed = _SPEC.fullmatch(spec)
    if parsed is None:
        raise UsageError(f"--input {spec!r} is empty: {_FORM}.")
    name, rest = parsed["name"] or "", parsed["rest"]
    if rest.endswith(_FILES):
        return name, _read(rest)
    return name, _random(spec, rest.split(":"), generator)


def _random(spec: str, parts: list[str], generator: torch.Generator) -> Tensor:
    if not _SHAPE.fullmatch(parts[0]) or len(parts) not in (1, 2, 4):
        raise UsageError(f"--input {spec!r} cannot be read: {_FORM}.")
    shape = [int(size) for size in parts[0].split("x")]
    dtype = getattr(torch, parts[1], None) if len(parts) > 1 else torch.float32
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise UsageError(f"--input {spec!r}: {parts[1]!r} is no type of torch's: give float32, int64, bool, ...")
    limits = None
    if len(parts) == 4:
        try:
            limits = float(parts[2]), float(parts[3])
        except ValueError:
            raise UsageError(f"--input {spec!r}: the limits {parts[2]!r} and {parts[3]!r} are no numbers.") from None
        if not limits[0] < limits[1]:
            raise UsageError(f"--input {spec!r}: the lower limit must be below the upper one.")
    if dtype.is_floating_point:
        if limits is None:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.empty(shape).uniform_(*limits, generator=generator).to(dtype)
    low, high = (0, 2) if limits is None or dtype is torch.bool else (int(limits[0]), int(limits[1]))
    return torch.randint(low, max(high, low + 1), shape, generator=generator).to(dtype)


def _read(path: str) -> Any:
    if path.endswith((".pt", ".pth")):
        return load_tensors(path)
    try:
        found = np.load(path, allow_pickle=False)
        if path.endswith(".npz"):
            with found:
                return {name: torch.from_numpy(found[name]) for name in found.files}
        return torch.from_numpy(found)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # of whatever the bytes mean to numpy
        raise UsageError(f"{path} cannot be read as tensors: {error}.") from error
