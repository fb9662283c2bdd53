"""What is fused."""

from __future__ import annotations

from enum import Enum


class FuseMode(Enum):
    """What is fused: layers with batch normalisation, add and ReLU, or nothing."""

    BNAddReLU = "BNAddReLU"
    NoFuse = "NoFuse"

    @classmethod
    def of(cls, value: FuseMode | str, what: str) -> FuseMode:
        """A mode or its value.

        >>> FuseMode.of("NoFuse", "prepare")
        <FuseMode.NoFuse: 'NoFuse'>
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(f"FuseMode.{m.name} ({m.value!r})" for m in cls)
            raise ValueError(f"{what}: fuse_mode must be one of {names}, got {value!r}.") from None
