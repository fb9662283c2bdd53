"""Layers on integer kernels whose sums pass 2**24, or whose output has 16 bits; the others are in `byte_layers.py`.

Integers of 16 bits go through the kernels as two bytes, ``x == 256 * high + low`` with `low` unsigned. Each kernel
gives exact sums: those of a convolution in float32, below 2**24, for which input channels are cut where it needs that;
those of a product of matrices, as which pointwise convolutions run, in int32. They are added, scaled and rounded in
float64, as `accumulator.WideFinish` says, some pixels at a time, in memory that stays in the cache; or, where passes
are compiled, in one. Where kernels have no exact product of matrices, one product in float64 takes as long as those of
the two bytes in float32, and nothing is left to add.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import is_serial
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator import WideFinish
from horizon_plugin_pytorch.fixed_point.accumulator_plan import (
    INT32_MAX,
    AccumulatorPlan,
    Geometry,
    channel_parts,
    cut_layer,
)
from horizon_plugin_pytorch.fixed_point.byte_convs import FloatConv, pack, summed_range, zero_point_of
from horizon_plugin_pytorch.fixed_point.byte_shapes import (
    BYTE,
    is_plain,
    is_within,
    new_output,
    output_sizes,
    slices,
    walk_of,
)
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

_MOST_SUMS, _MOST_ROW_SUMS = 1 << 20, 1 << 19  # that a kernel gives at once: of a convolution, of a product
_BLOCK = 1 << 18  # numbers in float64 that are worked on together: of sums, and of what is added to them
_PRODUCT = 1 << 16  # sums of a product in float64 that are finished together: half a megabyte
_TOP_BIT = -(1 << 15)


@dataclass(frozen=True)
class _Piece:
    """A convolution whose sums are exact: of one byte of the input, over some of its channels (None: all)."""

    conv: kernels.PackedConv | FloatConv
    digit: int
    channels: slice | None


class WideLayer:
    """A layer of int8 weights for one plan, packed when it first runs. Threads may use it at the same time.

    Args:
        geometry: of a convolution; None for a linear layer.
        input_range: smallest and largest integer of the input.
        parts: for each byte of the input, in how many parts the channels of a convolution are cut.
    """

    def __init__(
        self, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int], parts: Sequence[int]
    ) -> None:
        self._plan, self._geometry, self._parts = plan, geometry, parts
        self._ranges = _digit_ranges(input_range)
        self._dtype = torch.int8 if len(self._ranges) == 1 else torch.int16
        self._has_negative = input_range[0] < 0
        self._walk = walk_of(geometry)
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._matrix: Tensor | None = None
        # A pointwise convolution of two bytes for which kernels have no product may run on float64.
        is_small = geometry is not None and _is_pointwise(plan, geometry)
        self._has_doubles = is_small and bool(parts) and self._dtype == torch.int16
        self._doubles: Tensor | None = None  # its matrix
        self._finish = self._finish_with(None)
        self._is_joined = False  # are the sums of both bytes added as they leave the kernel?

    @classmethod
    def of(cls, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int]) -> WideLayer | None:
        """The layer, if there is a kernel for it."""
        if plan.is_real and plan.factor.dtype == torch.float32:  # a product that float64 would round otherwise
            return None
        parts: list[int] = []
        if geometry is None and not kernels.has_products():
            return None
        is_cut = plan.parts > 1 and is_within(input_range, BYTE) and not zero_point_of(input_range)
        if geometry is not None and geometry.groups == 1 and is_cut:
            parts = [plan.parts]
        elif geometry is not None and not (_is_pointwise(plan, geometry) and kernels.has_products()):
            weight = _whole_weight(plan, geometry.groups).float()
            nothing = torch.zeros(len(weight), dtype=torch.float64)
            ranges = [summed_range(ends) for ends in _digit_ranges(input_range)]
            parts = [channel_parts(weight.flatten(1), weight.shape[1], *ends, nothing) for ends in ranges]
            if min(parts) == 0:
                return None
        return cls(plan, geometry, input_range, parts)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, about."""
        weights = self._plan.weights[: 1 if self._plan.is_double else None]
        return sum(weight.numel() for weight in weights) * (sum(self._parts) or 1)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output: int8 or int16, channels last; real numbers where the plan says so.

        None if it cannot take these.

        Args:
            x, residual: int8 or int16, or integers in float32.
        """
        if not is_plain(x) or (residual is not None and not is_plain(residual)):
            return None
        if self._geometry is None:
            return self._linear(x, residual)
        axes = len(self._geometry.stride)
        if x.dim() == axes + 1:  # one image without a batch axis
            out = self(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0))
            return None if out is None else out.squeeze(0)
        if axes == 1:  # one row of an image
            out = self._images(x.unsqueeze(2), None if residual is None else residual.unsqueeze(2))
            return None if out is None else out.squeeze(2)
        return self._images(x, residual)

    def _linear(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        shape = torch.Size([*x.shape[:-1], self._plan.factor.numel()])
        if residual is not None and residual.shape != shape:
            return None
        out = new_output(self._plan, (shape[:-1].numel(), shape[-1]), torch.contiguous_format)
        self._rows(x.reshape(-1, x.shape[-1]), None if residual is None else residual.reshape(out.shape), out)
        return out.reshape(shape)

    def _images(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        weight = self._plan.weights[0].shape
        sizes = output_sizes(x.shape, weight, self._walk)
        if sizes is None or (residual is not None and residual.shape != sizes):
            return None
        if x.dtype != self._dtype:
            x = torch.empty(x.shape, dtype=self._dtype, memory_format=torch.channels_last).copy_(x)
        out = new_output(self._plan, sizes, torch.channels_last)
        if not self._parts or (self._has_doubles and passes() is None):  # where they are compiled, bytes are faster
            down, right = self._walk.stride
            self._rows(_pixels(x[:, :, ::down, ::right]), None if residual is None else _pixels(residual), _pixels(out))
            return out
        x = x.contiguous(memory_format=torch.channels_last)
        pieces = self._pieces or self._pack(x.shape)
        for part in slices(sizes[0], max(_MOST_SUMS // sizes[1:].numel(), 1)):
            sums = self._sums(pieces, x[part])
            self._store(sums, None if residual is None else _pixels(residual[part]), _pixels(out[part]))
        return out

    def _sums(self, pieces: list[_Piece], x: Tensor) -> list[Tensor]:
        """The sums of pixels, one tensor for each piece."""
        sums = []
        digits = [x] if self._dtype == torch.int8 else self._digits(x, isinstance(pieces[-1].conv, kernels.PackedConv))
        for digit, group in itertools.groupby(pieces, lambda piece: piece.digit):
            some = list(group)
            whole = some[0].conv.taken(digits[digit])
            for piece in some:
                taken = whole
                if piece.channels is not None:
                    taken = whole[:, piece.channels].contiguous(memory_format=torch.channels_last)
                sums.append(_pixels(piece.conv(taken, None)))
        return sums

    def _digits(self, x: Tensor, is_packed: bool) -> list[Tensor]:
        """The bytes of int16 numbers: the high one signed, or with the zero point of a kernel."""
        is_turned = is_packed and self._has_negative
        low, high = _low_and_high(x, _TOP_BIT if is_turned else 0)
        return [low, high if is_turned else high.view(torch.int8)]

    def _rows(self, rows: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """A product of matrices, the input's rows by the weights."""
        if self._has_doubles:
            self._double_rows(rows, residual, out)
            return
        matrix = self._matrix if self._matrix is not None else self._transpose()
        if rows.dtype != self._dtype:
            rows = torch.empty(rows.shape, dtype=self._dtype).copy_(rows)
        rows = rows.contiguous()
        step = min(max(_MOST_ROW_SUMS // max(matrix.shape), 1), len(rows))
        # All parts have their sums in one memory: what is taken anew is seldom in the cache.
        room = [torch.empty((step, matrix.shape[1]), dtype=torch.int32) for _ in self._ranges]
        for part in slices(len(rows), step):
            some = rows[part]
            digits = [some] if self._dtype == torch.int8 else _low_and_high(some, 128)
            sums = [
                kernels.multiply(digit.view(torch.int8), matrix, into[: len(some)])
                for digit, into in zip(digits, room, strict=True)
            ]
            self._store(sums, None if residual is None else residual[part], out[part])

    def _double_rows(self, rows: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """The same product in float64, whose sums are whole numbers below 2**53."""
        matrix = self._doubles
        if matrix is None:
            with torch.inference_mode(False), torch.no_grad():  # it outlives the call
                matrix = self._doubles = _whole_weight(self._plan, 1).flatten(1).t().double()
        for part in slices(len(rows), max(_PRODUCT // max(matrix.shape), 1)):
            acc = torch.mm(rows[part].double(), matrix)
            self._finish.write(acc, None if residual is None else residual[part], out[part])

    def _store(self, sums: list[Tensor], residual: Tensor | None, out: Tensor) -> None:
        """Add the sums of rows, finish them, and write them to the output, which is of rows too."""
        weights = [256 if piece.digit else 1 for piece in self._pieces] or [1, 256]
        if self._is_finished(sums, weights, residual, out):
            return
        if self._is_joined:
            sums = [sums[0].add_(sums[1], alpha=256)]
        rows, columns = out.shape
        step = min(max(_BLOCK // (len(sums) * columns), 1), rows)
        room = [torch.empty((step, columns), dtype=torch.float64) for _ in sums[:2]]  # of a sum, and of what is added
        if step == rows:
            self._store_block(sums, weights, residual, out, room)
            return
        for block in slices(rows, step):
            term = None if residual is None else residual[block]
            self._store_block([x[block] for x in sums], weights, term, out[block], room)

    def _store_block(
        self, sums: list[Tensor], weights: list[int], residual: Tensor | None, out: Tensor, room: list[Tensor]
    ) -> None:
        """The same for a block, in room for at least as many rows."""
        acc, other = (x[: out.shape[0]] for x in (room[0], room[-1]))
        acc.copy_(sums[0])  # of the low byte, or the only one
        for weight, part in zip(weights[1:], sums[1:], strict=False):
            acc.add_(other.copy_(part), alpha=weight)
        self._finish.write(acc, residual, out)

    def _is_finished(self, sums: list[Tensor], weights: list[int], residual: Tensor | None, out: Tensor) -> bool:
        """Has a compiled pass done it?"""
        made, finish = passes(), self._finish
        if made is None or not finish.is_plain or finish.bias is None or not is_serial(out):
            return False
        is_known = residual is None or (residual.dtype == torch.int16 and residual.is_contiguous())
        if not is_known or out.is_floating_point() or not all(x.is_contiguous() for x in (*sums, out)):
            return False
        made.finish(
            sums, weights, residual, finish.residual_factor, finish.bias, finish.factor, finish.low, finish.high, out
        )
        return True

    def _pack(self, shape: torch.Size) -> list[_Piece]:
        with self._lock, torch.inference_mode(False), torch.no_grad():  # they outlive the call
            if not self._pieces:
                pieces = [piece for digit in range(len(self._ranges)) for piece in self._packed(digit, shape)]
                is_of_two_bytes = len(pieces) == len(self._ranges) == 2
                self._is_joined = is_of_two_bytes and self._size() * self._most() < EXACT_FLOAT32
                self._pieces = pieces
        return self._pieces

    def _packed(self, digit: int, shape: torch.Size) -> list[_Piece]:
        """The pieces of one byte of the input."""
        groups, pieces, start = self._walk.groups, [], 0
        whole = _whole_weight(self._plan, groups)
        weights = cut_layer(whole, 1, 1, self._parts[digit], 1, groups).weights
        convs: Sequence[kernels.PackedConv | FloatConv] = pack(weights, self._walk, self._ranges[digit], shape)
        for weight, conv in zip(weights, convs, strict=True):
            stop = start + weight.shape[1]
            pieces.append(_Piece(conv, digit, slice(start, stop) if groups == 1 and len(weights) > 1 else None))
            start = stop
        return pieces

    def _transpose(self) -> Tensor:
        """The matrix of a linear or pointwise layer; the low byte is taken 128 smaller, to be signed."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._matrix is None:
                matrix = _whole_weight(self._plan, 1).flatten(1)
                if len(self._ranges) == 2:
                    self._is_joined = self._size() * self._most() <= INT32_MAX
                    self._finish = self._finish_with(matrix.sum(1, dtype=torch.int64).mul_(128).double())
                self._matrix = matrix.t()
        return self._matrix

    def _size(self) -> int:
        """The largest sum of an output's weights, without their signs."""
        weight = _whole_weight(self._plan, self._walk.groups).flatten(1)
        above = weight.clamp(min=0).sum(1, dtype=torch.int64)
        return int((2 * above - weight.sum(1, dtype=torch.int64)).max())

    def _most(self) -> int:
        """What the bytes of an input can count for, each at its largest."""
        return sum(max(-low, high) * 256**place for place, (low, high) in enumerate(self._ranges))

    def _finish_with(self, more: Tensor | None) -> WideFinish:
        """How sums are finished that lack something, one number for each output."""
        plan = self._plan
        bias = torch.zeros(plan.factor.numel(), dtype=torch.float64) if plan.bias is None else plan.bias.double()
        bias = bias if more is None else bias + more
        factor = None if plan.residual_factor is None else plan.residual_factor.double()
        return WideFinish(plan, plan.factor.double(), bias, factor)


def _digit_ranges(input_range: tuple[int, int]) -> list[tuple[int, int]]:
    """The range of each byte of an input, lowest first."""
    low, high = min(input_range[0], 0), max(input_range[1], 0)
    return [(low, high)] if is_within(input_range, BYTE) else [(0, 255), (low >> 8, high >> 8)]


def _is_pointwise(plan: AccumulatorPlan, geometry: Geometry) -> bool:
    is_small = plan.weights[0].shape[2:].numel() == 1 and geometry.groups == 1
    return is_small and not any(geometry.padding)


def _whole_weight(plan: AccumulatorPlan, groups: int) -> Tensor:
    """The layer's weights as bytes, at once: float64 is eight times as much."""
    if plan.is_double:
        return plan.weights[0].to(torch.int8)
    parts = [weight.to(torch.int8) for weight in plan.weights]
    return torch.stack(parts).sum(0, dtype=torch.int8) if groups > 1 else torch.cat(parts, 1)


def _low_and_high(x: Tensor, turned: int) -> tuple[Tensor, Tensor]:
    """The bytes of int16 numbers, ``x == 256 * high + low``, as they are in memory; with some bits turned around."""
    made = passes()
    is_dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    if made is not None and is_dense and is_serial(x):
        return made.halves(x, turned)
    low, high = x.to(torch.uint8), (x >> 8).to(torch.uint8)
    if turned == 128:
        low.bitwise_xor_(128)
    elif turned:
        high.bitwise_xor_(128)
    return low, high


def _pixels(x: Tensor) -> Tensor:
    """The pixels of images, in rows."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
