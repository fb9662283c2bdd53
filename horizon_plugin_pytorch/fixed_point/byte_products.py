"""Products of two activations on integer kernels: the sums of `accumulator.matmul`, with the same integers.

Integers of 8 bits are multiplied as they are. Those of 16 bits are taken apart, ``x == 256 * high + low + 128`` with
two signed bytes, and each byte of one operand is multiplied by each of the other; what the 128 stands for is a sum over
the rows or columns of the other operand. All of it is added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator import finish_product, in_pairs
from horizon_plugin_pytorch.fixed_point.byte_shapes import BYTE, TWO_BYTES, is_plain, is_within

_FEWEST_PRODUCTS = 1 << 17  # of a pair of matrices: for fewer the way to the kernel takes longer


@dataclass(frozen=True)
class _Bytes:
    """A matrix as bytes, lowest first, of which each counts 256 times the one before; and what all numbers lack."""

    digits: list[Tensor]
    rest: int

    @staticmethod
    def of(x: Tensor, limits: tuple[int, int]) -> _Bytes:
        if is_within(limits, BYTE):
            return _Bytes([x.to(torch.int8)], 0)
        whole = x.to(torch.int16)
        low = whole.to(torch.uint8).bitwise_xor_(128).view(torch.int8)
        return _Bytes([low, (whole >> 8).to(torch.int8)], 128)


def matmul_on_bytes(
    a: Tensor,
    b: Tensor,
    limits: tuple[tuple[int, int], tuple[int, int]],
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
    is_real: bool,
) -> Tensor | None:
    """What `matmul` gives; None where it is to be asked.

    Args:
        a, b: int8 or int16, or integers in float32.
        limits: the smallest and largest integer of each.
    """
    if not kernels.has_products() or not (is_plain(a) and is_plain(b)) or min(a.dim(), b.dim()) < 2:
        return None
    if not all(is_within(each, TWO_BYTES) for each in limits):
        return None
    if a.shape[-2] * a.shape[-1] * b.shape[-1] < _FEWEST_PRODUCTS:
        return None
    pairs, shape = in_pairs(a, b)
    out = torch.empty((len(pairs), *pairs[0][0].shape[:1], b.shape[-1]), dtype=torch.float32)
    dtype = torch.float64 if is_double else torch.float32
    for (left, right), rows in zip(pairs, out, strict=True):
        acc = _product(left, right, limits, dtype)
        rows.copy_(finish_product(acc, factor, low, high, is_real))
    return out.reshape(shape)


def _product(
    left: Tensor, right: Tensor, limits: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype
) -> Tensor:
    a, b = _Bytes.of(left, limits[0]), _Bytes.of(right, limits[1])
    columns = [digit.t().contiguous().t() for digit in b.digits]  # as the proof has them
    if len(a.digits) == len(columns) == 1:
        return kernels.multiply(a.digits[0].contiguous(), columns[0]).to(dtype)
    acc = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float64)
    for i, digit in enumerate(a.digits):
        for j, column in enumerate(columns):
            acc.add_(kernels.multiply(digit.contiguous(), column), alpha=256.0 ** (i + j))
    if a.rest:
        acc.add_(right.sum(0, dtype=torch.float64), alpha=a.rest)
    if b.rest:
        acc.add_(left.sum(1, keepdim=True, dtype=torch.float64), alpha=b.rest)
    return acc.sub_(a.rest * b.rest * left.shape[1]).to(dtype)
