"""Hypothesis strategies shared by the tests: scales, formats, and integer tensors with their extremes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16

formats = st.sampled_from([qint8, qint16])


def ratios(low: int = -20, high: int = 6) -> st.SearchStrategy[float]:
    """Positive numbers whose logarithm is spread evenly from ``2**low`` to ``2**high``, powers of two included."""
    exponents = st.one_of(st.integers(low, high).map(float), st.floats(low, high, allow_nan=False))
    return exponents.map(lambda e: 2.0**e)


seeds = st.integers(0, 2**31 - 1)


def integers(shape: Sequence[int], bits: int, seed: int, fill: str = "random") -> Tensor:
    """Integers of a format in a float32 carrier.

    Args:
        fill: ``random``; ``min``; ``max``; ``edges``, a mix of the two extremes, 0 and -1; or ``high``, the largest
            eighth, whose sums come near the worst case without being round numbers.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    generator = torch.Generator().manual_seed(seed)
    if fill in ("random", "high"):
        return torch.randint(
            low if fill == "random" else high - high // 8, high + 1, tuple(shape), generator=generator
        ).float()
    choices = {"min": [low], "max": [high], "edges": [low, high, 0, -1]}[fill]
    picked = torch.randint(0, len(choices), tuple(shape), generator=generator)
    return torch.tensor(choices, dtype=torch.float32)[picked]


fills = st.sampled_from(["random", "random", "min", "max", "edges", "high"])


def limits_of(dtype: QuantDType, activation: str = "none") -> tuple[int, int]:
    """The integers that an output of this format takes after a fused activation."""
    return {"none": (dtype.min, dtype.max), "relu": (0, dtype.max), "relu6": (0, dtype.max // 2 + 3)}[activation]


activations = st.sampled_from(["none", "relu", "relu6"])
