"""Layers on integer kernels: the sums of `accumulator.py`, by the same plans, with the same integers.

Activations are int8 or int16, images with channels last; integers of 16 bits go through the kernels as two bytes. A
kernel's sums leave it in float32 and are finished as the plan says, some images or rows at a time, while they are in
the cache. Where two float32 roundings are proved to give the plan's requantization, the kernel makes the bytes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator import Layout, WideFinish, whole_weight
from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan, Geometry, channel_parts, cut_layer
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, Line, choose_line

_CHUNK = 1 << 19  # sums that are finished together: two megabytes
_FEW_PRODUCTS = 256  # of a sum: to cut 16 bits into bytes takes longer than what kernels save
_MOST_UNPROVED = 0.25  # of the channels
_FEW_SUMS = 1 << 16  # of which to compute some channels again takes longer than to finish them all
_BYTE, _TWO_BYTES = (-128, 127), (-(1 << 15), (1 << 15) - 1)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad and x.numel() > 0


def _is_within(limits: tuple[int, int], others: tuple[int, int]) -> bool:
    return limits[0] >= others[0] and limits[1] <= others[1]


@dataclass(frozen=True)
class _Piece:
    """A sum that the kernel gives exactly: of one byte of the input, over some of its channels (None: all)."""

    weight: Tensor
    digit: int
    channels: slice | None


def _pieces(plan: AccumulatorPlan, groups: int, digits: int) -> list[_Piece] | None:
    """The pieces of a convolution; None where no cut of the channels makes them small enough."""
    weights = plan.weights
    if digits == 2 or plan.is_double:
        whole = whole_weight(weights, plan.parts, Layout(1, 1, groups, (-1, 1, 1))).float()
        nothing = torch.zeros(len(whole), dtype=torch.float64)
        by_output = whole.flatten(1)
        ranges = [(0, 255), _BYTE] if digits == 2 else [_BYTE]
        counts = [channel_parts(by_output, whole.shape[1], *ends, nothing) for ends in ranges]
        if min(counts) == 0:
            return None
        weights = cut_layer(whole, 1, 1, max(counts), 1, groups).weights
    pieces, start = [], 0
    for weight in weights:
        stop = start + weight.shape[1]
        channels = slice(start, stop) if groups == 1 and len(weights) > 1 else None
        pieces += [_Piece(weight, digit, channels) for digit in range(digits)]
        start = stop
    return pieces


@dataclass(frozen=True)
class _Rounding:
    """A layer whose kernel requantizes, and the channels for which it does not: these are finished as in others.

    Attributes:
        rest: the channels; None if there are none.
        rest_conv, rest_bias, rest_factor: their layer.
        takes_rest: does their layer have as many inputs as they are? A depthwise one has.
    """

    conv: kernels.PackedConv
    line: Line
    low: int
    high: int
    rest: Tensor | None = None
    rest_conv: kernels.PackedConv | None = None
    rest_bias: Tensor | None = None
    rest_factor: Tensor | None = None
    takes_rest: bool = False

    def is_faster(self, sums: int) -> bool:
        """Is it, for so many sums, than to finish them all on float32?"""
        return self.rest is None or sums >= _FEW_SUMS

    def __call__(self, taken: Tensor) -> Tensor:
        """int8, channels last, of unsigned bytes."""
        out = self.conv.rounded(taken, self.line.scale, self.line.offset, self.low, self.high)
        if self.rest is None:
            return out
        assert self.rest_conv is not None and self.rest_factor is not None
        acc = self.rest_conv(taken.index_select(1, self.rest) if self.takes_rest else taken, self.rest_bias)
        acc.mul_(self.rest_factor).round_().clamp_(self.low, self.high)
        return out.index_copy_(1, self.rest, acc.to(torch.int8))


class ByteLayer:
    """A layer of int8 weights for one plan, packed when it first runs. Threads may use it at the same time.

    Args:
        geometry: of a convolution; None for a linear layer.
        input_range: smallest and largest integer of the input.
        pieces: of a convolution.
    """

    def __init__(
        self,
        plan: AccumulatorPlan,
        geometry: Geometry | None,
        input_range: tuple[int, int],
        pieces: list[_Piece],
    ) -> None:
        self._plan, self._geometry, self._pieces = plan, geometry, pieces
        self._range = input_range
        self._digits = 1 if _is_within(input_range, _BYTE) else 2
        self._has_negative = input_range[0] < 0
        self._walk = kernels.Walk() if geometry is None else _walk(geometry)
        self._lock = threading.Lock()
        self._convs: list[kernels.PackedConv] = []
        self._matrix: Tensor | None = None
        self._offset: Tensor | None = None
        spread = (-1,) if geometry is None else (-1, 1, 1)
        self._factor = plan.factor.reshape(spread)
        self._residual_factor = None if plan.residual_factor is None else plan.residual_factor.reshape(spread)
        bias = None if plan.bias is None else plan.bias.reshape(spread)
        is_wide = plan.factor.dtype == torch.float64
        self._wide = WideFinish(plan, self._factor, bias, self._residual_factor) if is_wide else None
        self._bias = bias
        self._has_run = False
        self._rounding: _Rounding | None = None
        self._is_rounding_known = not self._may_round()

    @classmethod
    def of(
        cls, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int], weight_bits: int
    ) -> ByteLayer | None:
        """The layer, if there is a kernel for it."""
        if weight_bits > 8 or not _is_within(input_range, _TWO_BYTES) or plan.factor.device.type != "cpu":
            return None
        if geometry is None:
            return cls(plan, geometry, input_range, [])
        if geometry.is_transposed or len(geometry.stride) > 2:
            return None
        digits = 1 if _is_within(input_range, _BYTE) else 2
        if digits == 2 and plan.weights[0][0].numel() < _FEW_PRODUCTS:
            return None
        pieces = _pieces(plan, geometry.groups, digits)
        return None if pieces is None else cls(plan, geometry, input_range, pieces)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, about."""
        weights = [piece.weight for piece in self._pieces] or self._plan.weights[:1]
        return sum(weight.numel() for weight in weights)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output: int8 or int16, channels last; real numbers where the plan says so.

        None if it cannot take these.

        Args:
            x, residual: int8 or int16, or integers in float32.
        """
        if not _is_plain(x) or (residual is not None and not _is_plain(residual)):
            return None
        return self._linear(x, residual) if self._geometry is None else self._convolve(x, residual)

    def _may_round(self) -> bool:
        """Are its sums one float32 number that only has to be multiplied and rounded to a byte?"""
        plan = self._plan
        is_one = self._digits == 1 and self._wide is None and len(self._pieces) <= 1 and plan.residual_factor is None
        return is_one and not plan.is_real and _is_within((plan.low, plan.high), _BYTE) and plan.low < plan.high

    def _rounding_of(self, sums: int, shape: tuple[int, ...]) -> _Rounding | None:
        """The kernel that requantizes, where it is to do so; for so many sums of inputs of a shape.

        To look for the numbers that it needs takes as long as some runs do: not for a layer that runs only once.
        """
        if not self._is_rounding_known:
            if not self._has_run:
                self._has_run = True
                return None
            with self._lock, torch.inference_mode(False), torch.no_grad():
                if not self._is_rounding_known:
                    self._rounding = self._find_rounding(torch.Size(shape)) if kernels.are_kernels_rounding() else None
                    self._is_rounding_known = True
        rounding = self._rounding
        return rounding if rounding is not None and rounding.is_faster(sums) else None

    def _find_rounding(self, shape: torch.Size) -> _Rounding | None:
        plan, walk = self._plan, self._walk
        weight = self._pieces[0].weight if self._pieces else self._whole_matrix()[..., None, None]
        size = weight.flatten(1).float().abs().sum(1, dtype=torch.float64)  # a byte cannot hold that of -128
        reach = size * max(-self._range[0], self._range[1])
        if float(reach.max()) >= EXACT_FLOAT32:
            return None
        line = choose_line(plan.factor, plan.bias, plan.low, plan.high, reach)
        rest = line.unproved
        is_depthwise = weight.shape[:2] == (walk.groups, 1)
        if len(rest) > _MOST_UNPROVED * len(weight) or (len(rest) and walk.groups > 1 and not is_depthwise):
            return None
        conv = self._convs[0] if self._convs else self._pack_for(weight, walk, self._digits - 1, shape)
        if len(rest) == 0:
            return _Rounding(conv, line, plan.low, plan.high)
        takes_rest = is_depthwise and walk.groups > 1
        rest_walk = replace(walk, groups=len(rest)) if takes_rest else walk
        rest_conv = self._pack_for(weight[rest], rest_walk, self._digits - 1, shape)
        bias, factor = None if plan.bias is None else plan.bias[rest], plan.factor[rest].reshape(-1, 1, 1)
        return _Rounding(conv, line, plan.low, plan.high, rest, rest_conv, bias, factor, takes_rest)

    def _linear(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        rows = x.reshape(-1, x.shape[-1])
        rounding = None
        if residual is None:
            rounding = self._rounding_of(len(rows) * len(self._factor), (1, x.shape[-1], len(rows), 1))
        if rounding is not None:  # rows are the positions of an image
            image = rounding(self._bytes_of(rows.t()[None, :, :, None])[0])
            return image[0, :, :, 0].t().reshape(*x.shape[:-1], image.shape[1])
        matrix = self._matrix if self._matrix is not None else self._transpose()
        shape = (*x.shape[:-1], matrix.shape[1])
        if residual is not None and residual.shape != shape:
            return None
        added = None if residual is None else residual.reshape(-1, shape[-1])
        out = self._new_output((len(rows), shape[-1]), torch.contiguous_format)
        for part in _slices(len(rows), max(_CHUNK // max(shape[-1], x.shape[-1]), 1)):
            acc = self._sums_of_rows(rows[part], matrix)
            self._finish(acc, None if added is None else added[part], out[part])
        return out.reshape(shape)

    def _transpose(self) -> Tensor:
        """The matrix of a linear layer, and what the sums with the low byte lack: that byte is taken 128 smaller."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._matrix is None:
                matrix = self._whole_matrix().t()
                self._offset = matrix.sum(0, dtype=torch.int64).mul_(128).double() if self._digits == 2 else None
                self._matrix = matrix
        return self._matrix

    def _whole_matrix(self) -> Tensor:
        weights, parts = self._plan.weights, self._plan.parts
        if len(weights) == parts and weights[0].dtype == torch.float32:  # bytes at once: float64 is eight times as much
            return torch.cat([weight.to(torch.int8) for weight in weights], -1)
        return whole_weight(weights, parts, Layout(1, -1, 1, (-1,))).to(torch.int8)

    def _sums_of_rows(self, rows: Tensor, matrix: Tensor) -> Tensor:
        dtype = torch.float32 if self._wide is None else torch.float64
        if self._digits == 1:
            acc = kernels.multiply(rows.to(torch.int8), matrix).to(dtype)
        else:
            assert self._offset is not None
            low, high = _low_and_high(rows.to(torch.int16))
            acc = kernels.multiply(high, matrix).double().mul_(256).add_(self._offset)
            acc += kernels.multiply(low.bitwise_xor_(128).view(torch.int8), matrix)
        if self._wide is None and self._bias is not None:
            acc.add_(self._bias)
        return acc

    def _convolve(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        assert self._geometry is not None
        if x.dim() == len(self._geometry.stride) + 1:  # one image without a batch axis
            out = self._convolve(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0))
            return None if out is None else out.squeeze(0)
        if len(self._geometry.stride) == 1:  # one row of an image
            out = self._images(x.unsqueeze(2), None if residual is None else residual.unsqueeze(2))
            return None if out is None else out.squeeze(2)
        return self._images(x, residual)

    def _images(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        sizes = self._output_sizes(x)
        if min(sizes) <= 0 or (residual is not None and residual.shape != sizes):
            return None
        rounding = self._rounding_of(sizes.numel(), x.shape) if residual is None else None
        if rounding is not None:
            return rounding(self._bytes_of(x)[0])
        out = self._new_output(sizes, torch.channels_last)
        most = _CHUNK if self._wide is None else _CHUNK // 2
        step = max(most // sizes[1:].numel(), 1)
        if step >= sizes[0]:
            self._finish(self._sums_of_images(self._bytes_of(x)), residual, out)
            return out
        for part in _slices(sizes[0], step):
            acc = self._sums_of_images(self._bytes_of(x[part]))
            self._finish(acc, None if residual is None else residual[part], out[part])
        return out

    def _sums_of_images(self, digits: list[Tensor]) -> Tensor:
        convs = self._convs or self._pack(digits[0].shape)
        if self._wide is None and len(convs) == 1:
            return convs[0](digits[0], self._plan.bias)
        total: Tensor | None = None
        for conv, piece in zip(convs, self._pieces, strict=True):
            taken = digits[piece.digit]
            if piece.channels is not None:
                taken = taken[:, piece.channels].contiguous(memory_format=torch.channels_last)
            value = conv(taken, None)
            if self._wide is not None:
                value = value.double()
            if piece.digit:
                value.mul_(256)
            total = value if total is None else total.add_(value)
        assert total is not None
        if self._wide is None and self._bias is not None:
            total.add_(self._bias)
        return total

    def _output_sizes(self, x: Tensor) -> torch.Size:
        walk, weight = self._walk, self._pieces[0].weight
        kernel = (1, *weight.shape[2:])[-2:]
        axes = zip(x.shape[2:], kernel, walk.stride, walk.padding, walk.dilation, strict=True)
        return torch.Size([len(x), len(weight), *[(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]])

    def _pack(self, shape: torch.Size) -> list[kernels.PackedConv]:
        with self._lock, torch.inference_mode(False), torch.no_grad():  # they outlive the call
            if not self._convs:
                self._convs = [self._pack_for(p.weight, self._walk, p.digit, shape) for p in self._pieces]
        return self._convs

    def _pack_for(self, weight: Tensor, walk: kernels.Walk, digit: int, shape: torch.Size) -> kernels.PackedConv:
        weight = weight.to(torch.int8)
        weight = weight.unsqueeze(2) if weight.dim() == 3 else weight
        is_signed = self._has_negative and digit == self._digits - 1
        count, _, height, width = shape
        seen = torch.Size([count, weight.shape[1] * walk.groups, height, width])
        return kernels.PackedConv(weight, walk, 128 if is_signed else 0, seen)

    def _bytes_of(self, x: Tensor) -> list[Tensor]:
        """What convolutions take: unsigned bytes, channels last; the signed one 128 more if there are negatives."""
        dtype = torch.int8 if self._digits == 1 else torch.int16
        if x.dtype != dtype:
            x = torch.empty(x.shape, dtype=dtype, memory_format=torch.channels_last).copy_(x)
        x = x.contiguous(memory_format=torch.channels_last)
        if self._digits == 1:
            top = x.view(torch.uint8)
            return [top.bitwise_xor(128) if self._has_negative else top]
        low, high = _low_and_high(x)
        top = high.view(torch.uint8)
        return [low, top.bitwise_xor_(128) if self._has_negative else top]

    def _new_output(self, shape: torch.Size | tuple[int, ...], layout: torch.memory_format) -> Tensor:
        limits, dtype = (self._plan.low, self._plan.high), torch.float32
        if not self._plan.is_real and _is_within(limits, _TWO_BYTES):
            dtype = torch.int8 if _is_within(limits, _BYTE) else torch.int16
        return torch.empty(shape, dtype=dtype, memory_format=layout)

    def _finish(self, acc: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Residual, requantization and the output's type, of sums that this may write to."""
        if self._wide is not None:
            out.copy_(self._wide(acc, residual))
            return
        plan = self._plan
        if residual is not None and self._residual_factor is not None:
            acc.add_(torch.mul(residual, self._residual_factor).add_(0.5).floor_())
        acc.mul_(self._factor)
        if plan.is_real:
            torch.add(acc, 0.0, out=out)
        else:
            out.copy_(acc.round_().clamp_(plan.low, plan.high))


def _low_and_high(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of int16 numbers: ``x == 256 * high + low``, `low` unsigned."""
    return x.to(torch.uint8), (x >> 8).to(torch.int8)


def _walk(geometry: Geometry) -> kernels.Walk:
    """The walk over images; one axis is an image of one row."""
    (sh, sw), (dh, dw) = (1, *geometry.stride)[-2:], (1, *geometry.dilation)[-2:]
    ph, pw = (0, *geometry.padding)[-2:]
    return kernels.Walk((sh, sw), (ph, pw), (dh, dw), geometry.groups)


def _slices(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, start + step)
