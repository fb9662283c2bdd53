"""What a process may have set for all tensors that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default(what: torch.dtype | str) -> Iterator[None]:
    """What torch makes tensors of, or where."""
    if isinstance(what, str):
        with torch.device(what):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
