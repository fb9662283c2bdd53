"""From one scale to another: an integer multiplier, a rounding shift, and the proof that float32 does the same.

A ratio of scales becomes ``M / 2**n`` with a 20-bit integer ``M``. The definition of requantization is

    y = clamp((acc * M + 2**(n - 1)) >> n, low, high)            (round half up)

A *factor* is the tensor ``M / 2**n``. Its dtype says how to compute with it:

* float32: ``clamp(round(acc * factor))`` was proved equal to the definition for every reachable ``acc``;
* float64: ``clamp(floor(acc * factor + 0.5))``, which is the definition, exactly, for any ``|acc| <= 2**32``.

Integer kernels take two float32 roundings instead: see `lines.py`.

``M / 2**n`` lies within ``2**-20`` of the ratio, relatively, and within ``2**-11`` where the proof had to move ``M``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MULTIPLIER_BITS = 20
EXACT_FLOAT32 = 1 << 24
# A channel whose multiplier fails moves it: far below the grid, and off the bad points. One in a hundred does.
_OFFSETS = np.array([(i + 1) // 2 * (1 if i % 2 else -1) for i in range(256)], dtype=np.float64)
MOST_STEPS = 512
_HARD = 4.0  # bad points that a factor is expected to have; with fewer, hardly any factor has some for each offset
_HARDEST, _HARD_AT_ONCE = 16, 4  # how many of such factors are tried before the others
_AT_ONCE = 512  # factors that are proved together: few calls, and their temporaries stay in the cache
_IN_CACHE = 1 << 17  # numbers that stay in the cache of a core


def largest_of(x: Tensor) -> float:
    """The largest magnitude.

    >>> largest_of(torch.tensor([3.0, -5.0]))
    5.0
    """
    return max(abs(float(end)) for end in torch.aminmax(x)) if x.numel() else 0.0


def last_sum(x: Tensor, largest: float | None = None) -> Tensor:
    """Sums of integers over the last axis, in float64; of few and small ones without a copy of that size.

    Args:
        largest: their largest magnitude, or a number above it, where somebody knows one.

    >>> last_sum(torch.tensor([[3.0, -5.0], [2.0**24, 1.0]]))
    tensor([-2.0000e+00,  1.6777e+07], dtype=torch.float64)
    """
    if x.numel() == 0:
        return x.sum(-1, dtype=torch.float64)
    largest = largest_of(x) if largest is None else largest
    if x.dtype == torch.float32 and largest * x.shape[-1] < EXACT_FLOAT32:
        return x.sum(-1).double()
    return x.sum(-1, dtype=torch.float64)


def signed_sums(x: Tensor, largest: float | None = None) -> tuple[Tensor, Tensor]:
    """Sums of integers over the last axis, of the positive and of the negative ones without their sign, in float64.

    Args:
        largest: as of `last_sum`.

    >>> [part.tolist() for part in signed_sums(torch.tensor([[3.0, -5.0, 2.0]]))]
    [[5.0], [5.0]]
    """
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -2)
    largest = largest_of(x) if largest is None else largest
    total, size = last_sum(rows, largest), torch.zeros(len(rows), dtype=torch.float64, device=x.device)
    step = max(_IN_CACHE // max(rows.shape[-1], 1), 1)
    room = torch.empty_like(rows[:step])
    for part, into in zip(rows.split(step), size.split(step), strict=True):
        into.copy_(last_sum(torch.abs(part, out=room[: len(part)]), largest))
    positive, negative = (size + total) / 2, (size - total) / 2
    return positive.reshape(x.shape[:-1]), negative.reshape(x.shape[:-1])


@dataclass(frozen=True)
class OutputSums:
    """Sums of the integer weights that each output channel of a layer reads, in float64.

    Attributes:
        positive, negative: of the positive weights, and of the negative ones without their sign.
        largest: the largest magnitude of a weight, or a number above it.
    """

    positive: Tensor
    negative: Tensor
    largest: float

    @staticmethod
    def of(weight: Tensor, output_axis: int, groups: int, largest: float | None = None) -> OutputSums:
        """The sums of a layer's weight.

        Args:
            output_axis: 0 for Conv2d and Linear, 1 for ConvTranspose2d.
            largest: as of `last_sum`.

        >>> OutputSums.of(torch.tensor([[3.0, -5.0, 2.0], [0.0, 1.0, 0.0]]), 0, 1).positive.tolist()
        [5.0, 1.0]
        """
        largest = largest_of(weight) if largest is None else largest
        return OutputSums(*signed_sums(by_output(weight, output_axis, groups).flatten(1), largest), largest)


def by_output(weight: Tensor, output_axis: int, groups: int) -> Tensor:
    """A layer's weight as [out, in / groups, ...]; that of ConvTranspose2d is [in, out / groups, ...]."""
    return weight if output_axis == 0 else weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def multiplier_and_shift(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The integers ``M`` (20 bits) and ``n`` with ``M / 2**n`` nearest to each ratio.

    >>> m, n = multiplier_and_shift(torch.tensor([0.3], dtype=torch.float64))
    >>> int(m), int(n), round(int(m) / 2 ** int(n), 6)
    (629146, 21, 0.3)
    """
    mantissa, exponent = torch.frexp(ratio.double())
    multiplier = torch.round(mantissa * (1 << MULTIPLIER_BITS)).long()
    return multiplier, MULTIPLIER_BITS - exponent.long()


def _value(multiplier: Tensor, shift: Tensor) -> Tensor:
    # With an integer exponent, ldexp would form the power of two in the default dtype and lose the far ones.
    return torch.ldexp(multiplier.double(), -shift.double())


@dataclass(frozen=True)
class Steps:
    """Where outputs from `low` to `high` step to the next integer ``k``: at ``k - 1/2``.

    Each step is a row, for factors in columns; first those to an odd ``k``. An even ``k`` is left out where ``1 - k``
    is there, which steps at the same place on the other side of 0: what shows a difference at ``k`` shows one there.
    Arrays of numpy, as in all of the proof: it makes many calls for few numbers.
    """

    half: np.ndarray
    half_in_float32: np.ndarray
    odd: int  # how many are odd
    farthest: float  # the largest magnitude of an output, and one more

    @staticmethod
    @lru_cache(maxsize=64)
    def between(low: int, high: int) -> Steps:
        k = np.arange(low + 1, high + 1)
        odd, even = k[k % 2 == 1], k[k % 2 == 0]
        even = even[(1 - even <= low) | (1 - even > high)]
        half = np.concatenate([odd, even])[:, None] - 0.5
        return Steps(half, half.astype(np.float32), len(odd), max(abs(low), abs(high)) + 1.0)

    def bad_points(self, factor: float) -> float:
        """At how many steps float32 rounding is expected to differ: products lie anywhere, as far apart as the factor.

        Of those next to a step it differs where they are rounded to ``k - 1/2``.
        """
        return float(np.ldexp(1.0, np.frexp(self.half)[1] - 25).sum()) / factor  # half of float32's distance there


def is_proved(value: np.ndarray, steps: Steps, bound: int) -> np.ndarray:
    """For each factor: does float32 rounding agree with the definition for every ``|acc| <= bound``?

    Both are monotone step functions of the integer ``acc``, so it is enough to compare them at the integer where the
    definition steps to ``k``, and at the one before it, for every ``k`` in ``(low, high]``. The definition steps where
    ``acc * factor`` reaches ``k - 1/2``, which is a float32 number: the float32 product reaches it there too, and does
    not pass it before. So they differ only where the product is rounded to ``k - 1/2`` itself, which becomes the even
    one of ``k - 1`` and ``k``: at the step if ``k`` is odd, before it if ``k`` is even. A step that lies beyond the
    bound is replaced by the bound: there too the float32 form must not have stepped early.

    Args:
        value: factors in float64.
        steps: those of the output.
    """
    # The quotient is a fraction over the multiplier: below 2**24 it is nearer to an integer than float64 tells only
    # where it is one.
    last = np.divide(steps.half, value)
    np.ceil(last, out=last)
    last[steps.odd :] -= 1.0
    product = last.astype(np.float32)  # the integer in question
    if value.size and steps.farthest / float(value.min()) >= bound:
        odd, even = product[: steps.odd], product[steps.odd :]
        odd[odd > bound] = even[even < -bound] = 0  # is not met; its product is no half
        np.maximum(odd, np.float32(-bound), out=odd)
        np.minimum(even, np.float32(bound), out=even)
    np.multiply(product, value.astype(np.float32), out=product)
    return ~np.equal(product, steps.half_in_float32).any(0)


def choose_factor(ratio: Tensor, low: int, high: int, bound: float = EXACT_FLOAT32 - 1) -> Tensor:
    """The factor for a ratio of scales: float32 where that is proved exact for every ``|acc| <= bound``.

    Where a proof below 2**24 exists, the multiplier is the same whatever the dtype of the result.

    Args:
        ratio: input scale over output scale, one element or one per channel; positive.
        low, high: range of the output.
        bound: largest ``|acc|`` that can occur; from 2**24 on the result is float64.
    """
    multiplier, shift = multiplier_and_shift(ratio.detach().double().reshape(-1))
    wide = _value(multiplier, shift)
    if high - low > MOST_STEPS or bool((shift < 1).any()) or bool((shift > 52).any()):
        return wide
    limit = int(min(bound, EXACT_FLOAT32 - 1))
    chosen = _proved_factors(wide.cpu().numpy(), shift.cpu().numpy(), limit, Steps.between(low, high))
    if chosen is None:
        return wide
    proved = torch.from_numpy(chosen).to(wide.device)
    return proved.float() if bound < EXACT_FLOAT32 else proved


def _proved_factors(wide: np.ndarray, shift: np.ndarray, bound: int, steps: Steps) -> np.ndarray | None:
    """The proved factors nearest to some of so many binary places; None if one of them has none."""
    unit = np.ldexp(1.0, -shift)
    pending = np.arange(len(wide))
    # One channel without a proof is enough to need none of the others': the smallest factors are the likeliest.
    if len(pending) > _HARDEST and steps.bad_points(float(wide.min())) > _HARD:
        hardest = wide.argsort(kind="stable")[:_HARDEST]
        for some in hardest.reshape(-1, _HARD_AT_ONCE):
            if not _prove(wide[some], unit[some], _OFFSETS, bound, steps)[1].all():
                return None
    chosen, done = wide.copy(), 0
    while pending.size and done < len(_OFFSETS):
        tried = _OFFSETS[done : done + max(_AT_ONCE // len(pending), 1)]  # several of them where channels are few
        done += len(tried)
        first, is_done = _prove(wide[pending], unit[pending], tried, bound, steps)
        chosen[pending[is_done]] = first[is_done]
        pending = pending[~is_done]
    return None if pending.size else chosen


def _prove(
    wide: np.ndarray, unit: np.ndarray, offsets: np.ndarray, bound: int, steps: Steps
) -> tuple[np.ndarray, np.ndarray]:
    """For each factor, it moved by the first of some offsets that is proved, and whether one is."""
    trial = wide[:, None] + unit[:, None] * offsets  # exact: 21 bits
    flat = trial.reshape(-1)
    parts = [is_proved(flat[begin : begin + _AT_ONCE], steps, bound) for begin in range(0, len(flat), _AT_ONCE)]
    proved = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(trial.shape)
    first = proved.argmax(1)  # of equal ones, the first
    rows = np.arange(len(trial))
    return trial[rows, first], proved[rows, first]


def is_exact_in_float32(factor: Tensor, low: int, high: int, reach: float) -> bool:
    """Does ``clamp(round(float32(acc) * float32(factor)))`` give the definition for every ``|acc| <= reach``?

    A sum beyond 2**24 is rounded when it becomes a float32 number. Rounding is monotone, so that is harmless where the
    output is saturated there.

    >>> [is_exact_in_float32(torch.tensor([factor]), -128, 127, 1e9) for factor in (0.0101, 0.3, 0.5)]
    [True, False, False]
    """
    mantissa, exponent = torch.frexp(factor.detach().double().reshape(-1))
    multiplier = torch.ldexp(mantissa, torch.tensor(24.0, dtype=torch.float64)).long()
    shift = 24 - exponent.long()
    value = _value(multiplier, shift)
    is_written = bool((value == factor.double().reshape(-1)).all())
    if not is_written or high - low > MOST_STEPS or bool((shift < 1).any()) or bool((shift > 52).any()):
        return False
    last_step = (max(abs(low), abs(high)) + 1) / float(factor.min())
    if reach >= EXACT_FLOAT32 and last_step >= EXACT_FLOAT32:
        return False
    steps = Steps.between(low, high)
    return all(bool(is_proved(part.cpu().numpy(), steps, EXACT_FLOAT32 - 1).all()) for part in value.split(_AT_ONCE))


def rescale_(acc: Tensor, factor: Tensor, low: float, high: float) -> Tensor:
    """Requantize an accumulator, reusing its memory where the route allows; float32 result."""
    if acc.dim() == 0:
        factor = factor.reshape(())
    if factor.dtype == torch.float32 and acc.dtype == torch.float32:
        return acc.mul_(factor).round_().clamp_(low, high)
    if acc.dtype != torch.float64:
        acc = acc.double()
    # Beyond 2**24 float32 rounds, but that is beyond every range too.
    return acc.mul_(factor.double()).add_(0.5).floor_().float().clamp_(low, high)
