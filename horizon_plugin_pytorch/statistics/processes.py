"""Several processes that observe together, over ``torch.distributed``."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationError


def is_distributed() -> bool:
    """Is there more than one process?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Which of the processes this is; 0 if there is one."""
    return dist.get_rank() if is_distributed() else 0


def processes() -> int:
    """How many there are."""
    return dist.get_world_size() if is_distributed() else 1


def require_same(mine: dict[str, str], who: str, device: torch.device) -> None:
    """Insist that all processes describe what they are about to do alike; each has to call it.

    Args:
        mine: what this process has, by name.

    Raises:
        CalibrationError: they do not; it names the first difference, in every process.
    """
    text = repr(list(mine.items())).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    all_reduce(ends, dist.ReduceOp.MIN, who)
    if int(ends[0]) == -int(ends[1]):
        return
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, list(mine.items()))
    raise CalibrationError(f"{who}: the processes do not do the same: {_first_difference(everybody)}.")


def _first_difference(everybody: list[list[tuple[str, str]]]) -> str:
    """What two processes have at the first place where not all are the same."""
    for entries in itertools.zip_longest(*everybody):
        other = next((i for i, entry in enumerate(entries) if entry != entries[0]), None)
        if other is None:
            continue
        first, second = entries[0], entries[other]
        if first is None or second is None or first[0] != second[0]:
            had, has = ("nothing more" if entry is None else f"{entry[0]} ({entry[1]})" for entry in (first, second))
            return f"where process 0 has {had}, process {other} has {has}. Prepare the same model in every process"
        if first[0].startswith("the weights"):
            return (
                f"{first[0]} of process {other} are not those of process 0. Load the same checkpoint in every process, "
                "set the same seed, or broadcast parameters and buffers of one before you prepare "
                "(`torch.distributed.broadcast`): training leaves each process batch-norm statistics of its own"
            )
        return f"{first[0]} is {first[1]} in process 0 and {second[1]} in process {other}"
    return "the order of their modules"


def all_reduce(x: Tensor, operation: Any, who: str, when: str = "") -> None:
    """Reduce a tensor over all processes, in place.

    Args:
        who, when: what needs it, and when, for the message.

    Raises:
        CalibrationError: another process is gone, or did not answer in time.
    """
    try:
        dist.all_reduce(x, operation)
    except RuntimeError as error:
        raise CalibrationError(
            f"{who}: process {dist.get_rank()} of {dist.get_world_size()} lost another process{when}: it has ended, or "
            "did not answer in time. The output of the others, or of `torchrun`, says which and why. Scales are not "
            "complete: calibrate anew, or with `calibrate(..., state_file=...)` from the last state. How long to wait "
            "for a process is the `timeout` of `torch.distributed.init_process_group`."
        ) from error
