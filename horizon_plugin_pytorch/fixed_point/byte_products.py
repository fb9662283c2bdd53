"""Products of two activations on integer kernels: the sums of `accumulator.matmul`, with the same integers.

Integers of 8 bits are multiplied as they are, some matrices at a time. Those of 16 bits are taken apart,
``x == 256 * high + low + 128`` with two signed bytes, and each byte of one operand is multiplied by each of the other;
what the 128 stands for is a sum over the rows or columns of the other operand. All of it is added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator import finish_product, in_pairs
from horizon_plugin_pytorch.fixed_point.byte_shapes import BYTE, TWO_BYTES, is_plain, is_within, slices, type_of

_FEWEST_PRODUCTS = 1 << 17  # of a pair of matrices: for fewer the way to the kernel takes longer
_GROUP = 1 << 17  # sums of matrices that are finished together: half a megabyte


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
    """What `matmul` gives, in the smallest type that holds it; None where `matmul` is to be asked.

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
    is_narrow = all(is_within(each, BYTE) for each in limits)
    if is_narrow:
        a, b = a.to(torch.int8).contiguous(), _dense(b.to(torch.int8))
    pairs, shape = in_pairs(a, b)
    sizes = torch.Size([len(pairs[0][0]), shape[-1]])
    out = torch.empty((len(pairs), *sizes), dtype=type_of((low, high), is_real))
    dtype = torch.float64 if is_double else torch.float32
    for group in slices(len(pairs), max(_GROUP // sizes.numel(), 1) if is_narrow else 1):
        some = pairs[group]
        acc = _sums(some, sizes) if is_narrow else _product(*some[0], limits).unsqueeze(0)
        out[group].copy_(finish_product(acc.to(dtype), factor, low, high, is_real))
    return out.reshape(shape)


def _dense(x: Tensor) -> Tensor:
    """Matrices without gaps, each as it lies in memory: the kernel takes rows and columns."""
    is_transposed = x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2] > 1
    return x.mT.contiguous().mT if is_transposed else x.contiguous()


def _sums(pairs: list[tuple[Tensor, Tensor]], sizes: torch.Size) -> Tensor:
    """The products of pairs of bytes, side by side in int32."""
    sums = torch.empty((len(pairs), *sizes), dtype=torch.int32)
    for (left, right), into in zip(pairs, sums.unbind(), strict=True):
        kernels.multiply(left, right, into)
    return sums


def _product(left: Tensor, right: Tensor, limits: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
    """A product of integers of which some have 16 bits, in float64."""
    a, b = _Bytes.of(left, limits[0]), _Bytes.of(right, limits[1])
    columns = [_dense(digit) for digit in b.digits]
    acc = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float64)
    for i, digit in enumerate(a.digits):
        for j, column in enumerate(columns):
            acc.add_(kernels.multiply(digit.contiguous(), column), alpha=256.0 ** (i + j))
    if a.rest:
        acc.add_(right.sum(0, dtype=torch.float64), alpha=a.rest)
    if b.rest:
        acc.add_(left.sum(1, keepdim=True, dtype=torch.float64), alpha=b.rest)
    return acc.sub_(a.rest * b.rest * left.shape[1])
