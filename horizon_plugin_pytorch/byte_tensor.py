"""Integers of 8 and 16 bits as layers hand them to each other: in little memory, images with channels last.

Views of them are such integers too, in the same memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ByteTensor:
    """Integers in int8 or int16, which nobody writes to; as float32 when somebody asks for them so.

    >>> ByteTensor(torch.tensor([3, -7], dtype=torch.int8)).floats()
    tensor([ 3., -7.])
    """

    __slots__ = ("_floats", "_laid", "values")

    def __init__(self, values: Tensor, laid: Tensor | None = None) -> None:
        self.values = values
        self._laid = laid
        self._floats: Tensor | None = None

    @property
    def laid(self) -> Tensor:
        """A tensor that lies in its memory as float has it, maybe without numbers: images have channels last here."""
        if self._laid is None:
            is_dense = self.values.is_contiguous()
            self._laid = self.values if is_dense else torch.empty(self.values.shape, device="meta")
        return self._laid

    def floats(self) -> Tensor:
        """The same integers in float32, laid out as float layers do: one tensor for all who ask."""
        if self._floats is None:
            # First the layout, then the type: the longer way through memory is made on bytes.
            self._floats = self.values.contiguous().float()
        return self._floats

    def placeholder(self) -> Tensor:
        """A float32 tensor of that shape without memory of its own."""
        shape = self.values.shape
        return torch.empty_strided(shape, (0,) * len(shape), dtype=torch.float32, device=self.values.device)
