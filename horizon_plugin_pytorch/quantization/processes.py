"""Several processes that observe together, over ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationError


def is_distributed() -> bool:
    """Is there more than one process?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Which of the processes this is; 0 if there is one."""
    return dist.get_rank() if is_distributed() else 0


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
