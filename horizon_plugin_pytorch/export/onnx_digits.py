"""16-bit integers as digits: terms of which float32 or bytes hold exact sums of products.

Bytes go to ``MatMulInteger``, whose kernels take a third of the time of float32 on processors with VNNI. A convolution
is a product of matrices there: channels last, the values under each place of the kernel side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_forms import Integers, blocks_of, integers_of
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph
from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX, Geometry, reaches

HALF_WEIGHT = 64  # 255 * (64 + 64) fits in 16 bits
_SIZE = 256
_NO_TIES = 256.004  # divides 128, 384, ..., 32640 to just below a half, and no integer above them
_SAFE_BYTE = 128  # 128 * (127 + 127) and 128 * (-128 - 128) fit in 16 bits, too
_TO_THE_END = (1 << 63) - 1


@dataclass(frozen=True)
class Sum:
    """A layer's sum: its value, its type, the largest magnitude that it can have, if that matters, and what was added.

    Args:
        lift: what the sum has more than the products, for each output channel.
    """

    name: str
    dtype: torch.dtype
    reach: float = math.inf
    lift: Tensor | None = None


@dataclass(frozen=True)
class Digit:
    """A term of integers: ``size * (byte - zero)``.

    Args:
        name: the bytes.
        ends: the smallest and largest value of ``byte - zero``.
    """

    name: str
    zero: int
    size: int
    ends: tuple[int, int]

    @property
    def is_safe(self) -> bool:
        """Do two products with weights of 8 bits fit in 16 bits, as kernels add them without VNNI?"""
        return self.zero + self.ends[1] <= _SAFE_BYTE


def float_digits(g: OnnxGraph, x: str, ends: tuple[int, int]) -> list[str]:
    """What is left, -128 to 128, and multiples of 256, in float32.

    Args:
        ends: the smallest and largest of the integers. If none is negative, bytes hold the multiples, and rounding to
            bytes and back is faster than rounding numbers.
    """
    return g.once(("float digits", x, ends[0] < 0), lambda: _float_digits(g, x, ends[0] < 0))


def _float_digits(g: OnnxGraph, x: str, is_signed: bool) -> list[str]:
    if not is_signed:
        return list(_positive(g, x)[:2])
    rounded = g.node("Round", g.node("Mul", x, g.scalar(1 / _SIZE, torch.float32)))
    high = g.node("Mul", rounded, g.scalar(_SIZE, torch.float32))
    return [g.node("Sub", x, high), high]


def float_digit_ends(ends: tuple[int, int]) -> list[tuple[int, int]]:
    """The smallest and largest number of each of the digits in float32."""
    low, high = (_SIZE * round(end / _SIZE) for end in ends)
    return [(-128, 128), (low, high)]


def _positive(g: OnnxGraph, x: str) -> tuple[str, str, str]:
    """Of integers from 0 on: what is left, -127 to 128; multiples of 256; and these by 256, as bytes up to 128."""
    return g.once(("positive digits", x), lambda: _made_positive(g, x))


def _made_positive(g: OnnxGraph, x: str) -> tuple[str, str, str]:
    zero = g.constant(0, torch.uint8, "zero_point")
    high = g.node("QuantizeLinear", x, g.scalar(_NO_TIES, torch.float32), zero)
    multiples = g.node("DequantizeLinear", high, g.scalar(_SIZE, torch.float32), zero)
    return g.node("Sub", x, multiples), multiples, high


def byte_digits(g: OnnxGraph, x: str, ends: tuple[int, int]) -> list[Digit]:
    """The two bytes of 16-bit integers; as `float_digits`."""
    if has_cheap_bytes(g, x):
        return g.once(("byte digits", x), lambda: _bytes_of_blocks(g, x))
    return g.once(("byte digits", x, ends[0] < 0), lambda: _byte_digits(g, x, ends[0] < 0))


def has_cheap_bytes(g: OnnxGraph, x: str) -> bool:
    """Are there int32 numbers, none of them negative, that its bytes can be made of?"""
    known = [integers_of(g, block.name) for block in blocks_of(g, x, 0)]
    return all(each is not None and 0 <= each.low <= each.high < 1 << 15 for each in known)


def _bytes_of_blocks(g: OnnxGraph, x: str) -> list[Digit]:
    by_block = [_bytes_of_integers(g, integers_of(g, block.name)) for block in blocks_of(g, x, 0)]
    if len(by_block) == 1:
        return by_block[0]
    names = [g.node("Concat", *(digit.name for digit in same), axis=1) for same in zip(*by_block, strict=True)]
    return [replace(digit, name=name) for name, digit in zip(names, by_block[0], strict=True)]


def _bytes_of_integers(g: OnnxGraph, integers: Integers | None) -> list[Digit]:
    """A cast of integers to bytes keeps their lower eight bits; one of real numbers cuts off the rest."""
    assert integers is not None
    whole = g.node("Clip", integers.name, *(g.constant(end, torch.int32) for end in (integers.low, integers.high)))
    upper = g.node("DequantizeLinear", whole, g.scalar(1 / _SIZE, torch.float32))
    digits = ((whole, 1, _SIZE - 1), (upper, _SIZE, integers.high // _SIZE))
    return [Digit(g.cast(name, torch.uint8), 0, size, (0, end)) for name, size, end in digits]


def _byte_digits(g: OnnxGraph, x: str, is_signed: bool) -> list[Digit]:
    one = g.scalar(1.0, torch.float32)
    if not is_signed:
        left, _, high = _positive(g, x)
        low = g.node("QuantizeLinear", left, one, g.constant(127, torch.uint8, "zero_point"))
        return [Digit(low, 127, 1, (-127, 128)), Digit(high, 0, _SIZE, (0, 128))]
    none, middle = (g.constant(zero, torch.uint8, "zero_point") for zero in (0, 128))
    size = g.scalar(_SIZE, torch.float32)
    lifted = g.node("Add", x, g.scalar((1 << 15) - 127.5, torch.float32))  # rounded, this is the floor of x / 256
    high = g.node("QuantizeLinear", lifted, size, none)
    low = g.node("QuantizeLinear", g.node("Sub", x, g.node("DequantizeLinear", high, size, middle)), one, none)
    return [Digit(low, 0, 1, (0, 255)), Digit(high, 128, _SIZE, (-128, 127))]


def conv_of_digits(g: OnnxGraph, x: str, weight: Tensor, geometry: Geometry, ends: tuple[int, int]) -> Sum:
    """The sums of a convolution of 16-bit integers and 8-bit weights, without bias."""
    axes = len(geometry.stride)
    rows = weight.permute(*range(2, 2 + axes), 1, 0).flatten(0, -2)
    digits = [_under_kernel(g, digit, list(weight.shape[2:]), geometry) for digit in byte_digits(g, x, ends)]
    total = _product_of_digits(g, digits, rows)
    return Sum(g.node("Transpose", total.name, perm=[0, axes + 1, *range(1, axes + 1)]), total.dtype, total.reach)


def linear_of_digits(g: OnnxGraph, x: str, weight: Tensor, ends: tuple[int, int]) -> Sum:
    """The sums of a linear layer of 16-bit integers and 8-bit weights, without bias."""
    return _product_of_digits(g, byte_digits(g, x, ends), weight.T)


def _under_kernel(g: OnnxGraph, digit: Digit, kernel: list[int], geometry: Geometry) -> Digit:
    """Channels last, and for each place of the output the values under the kernel, the last axis of it first."""
    axes = len(kernel)
    name = g.once(
        ("channels last", digit.name),
        lambda: g.node("Transpose", digit.name, perm=[0, *range(2, axes + 2), 1]),
    )
    if any(geometry.padding):
        pads = [0, *geometry.padding, 0] * 2
        value = g.constant(digit.zero, torch.uint8, "zero_point")
        name = g.node("Pad", name, g.constant(pads, torch.int64, "pads"), value)
    for axis in reversed(range(axes)):
        size, step, gap = kernel[axis], geometry.stride[axis], geometry.dilation[axis]
        if size == 1 and step == 1:
            continue
        places = []
        for place in range(size):
            last = (place + 1 - size) * gap or _TO_THE_END  # counted from the end, as for any size of the input
            bounds = ([place * gap], [last], [axis + 1], [step])
            places.append(g.node("Slice", name, *(g.constant(bound, torch.int64, "slice") for bound in bounds)))
        name = places[0] if size == 1 else g.node("Concat", *places, axis=axes + 1)
    return Digit(name, digit.zero, digit.size, digit.ends)


def _product_of_digits(g: OnnxGraph, digits: list[Digit], weight: Tensor) -> Sum:
    """Products with weights [inputs, outputs], added in int32, or in float64 if that is too small for them."""
    columns = weight.T.float()
    reach = sum(digit.size * float(reaches(columns, *digit.ends).max()) for digit in digits)
    dtype = torch.int32 if reach <= INT32_MAX else torch.float64
    stored = g.constant(weight.contiguous(), torch.int8, "weight")
    is_small = float(weight.abs().max()) <= HALF_WEIGHT
    total = None
    for digit in digits:
        kernels = (
            [stored] if digit.is_safe or is_small else g.once(("halves", stored), lambda: halves_of_weight(g, stored))
        )
        zero = g.constant(digit.zero, torch.uint8, "zero_point")
        sums = [g.node("MatMulInteger", digit.name, kernel, zero) for kernel in kernels]
        term = sums[0] if len(sums) == 1 else g.node("Add", *sums)
        if dtype != torch.int32:
            term = g.cast(term, dtype)
        if digit.size > 1:
            term = g.node("Mul", term, g.constant(digit.size, dtype))
        total = term if total is None else g.node("Add", total, term)
    assert total is not None
    return Sum(total, dtype, reach)


def halves_of_weight(g: OnnxGraph, weight: str) -> list[str]:
    """Two weights of at most 64 whose sum is this one; made when the file is loaded."""
    return g.once(("halves", weight), lambda: _halves(g, weight))


def _halves(g: OnnxGraph, weight: str) -> list[str]:
    half = g.node("Clip", weight, *(g.constant(end, torch.int8) for end in (-HALF_WEIGHT, HALF_WEIGHT)))
    rest = g.node("Sub", g.cast(weight, torch.int32), g.cast(half, torch.int32))
    return [half, g.cast(rest, torch.int8)]
