"""Layers on integer kernels: the sums of `accumulator.py`, by the same plans, with the same integers.

Activations are int8, images with channels last. A kernel's sums leave it in float32 and are finished as the plan says,
some images or rows at a time, while they are in the cache. Where two float32 roundings are proved to give the plan's
requantization, the kernel makes the bytes itself (`byte_roundings.py`). Layers of 16 bits are in `wide_layers.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import Passes, is_serial
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan, Geometry, channel_parts
from horizon_plugin_pytorch.fixed_point.byte_convs import (
    FloatConv,
    fits_kernel,
    has_kernel,
    is_on_kernels,
    pack,
    summed_range,
    zero_point_of,
)
from horizon_plugin_pytorch.fixed_point.byte_roundings import OneCall, Rounding, find_rounding
from horizon_plugin_pytorch.fixed_point.byte_shapes import (
    BYTE,
    TWO_BYTES,
    is_plain,
    is_within,
    output_sizes,
    output_type,
    pixel_strides,
    slices,
    walk_of,
)
from horizon_plugin_pytorch.fixed_point.kernels import PackedConv, PackedLinear, Walk
from horizon_plugin_pytorch.fixed_point.transposed_layers import TransposedLayer
from horizon_plugin_pytorch.fixed_point.wide_layers import WideLayer

_CHUNK = 1 << 19  # sums that are finished together: two megabytes
_ROWS = 256  # for which the weights of a linear layer are laid out
_MOST_TASKS = 64  # shapes of inputs that a layer remembers
_FEW_PIXEL_SUMS = 1 << 16  # of a pointwise convolution, which a product of matrices gives sooner than a kernel
_FEW_ROW_SUMS = 1 << 15  # which a product of matrices gives sooner than a kernel with the weights of a layer


@dataclass(frozen=True)
class _Piece:
    """A sum that the kernel gives exactly, over some channels of the input (None: all)."""

    weight: Tensor
    channels: slice | None


def _pieces(plan: AccumulatorPlan, groups: int, input_range: tuple[int, int]) -> list[_Piece]:
    """The pieces of a layer; the weights of a linear one are those of a pointwise convolution."""
    weights = [weight[..., None, None] if weight.dim() == 2 else weight for weight in plan.weights]
    if groups == 1 and not all(fits_kernel(weight, input_range) for weight in weights):
        whole = torch.cat(weights, 1)
        nothing = torch.zeros(len(whole), dtype=torch.float64)
        parts = channel_parts(whole.flatten(1), whole.shape[1], *summed_range(input_range), nothing)
        weights = list(whole.tensor_split(parts, 1)) if parts else weights
    pieces, start = [], 0
    for weight in weights:
        stop = start + weight.shape[1]
        pieces.append(_Piece(weight, slice(start, stop) if groups == 1 and len(weights) > 1 else None))
        start = stop
    return pieces


@dataclass(frozen=True)
class _Numbers:
    """What sums are finished with, of each channel."""

    bias: Tensor | None
    factor: Tensor
    residual_factor: Tensor | None

    def reshape(self, *shape: int) -> _Numbers:
        """The same, to go with sums whose channels are followed by these axes."""
        bias, residual = (None if x is None else x.reshape(shape) for x in (self.bias, self.residual_factor))
        return _Numbers(bias, self.factor.reshape(shape), residual)


@dataclass(frozen=True)
class _Task:
    """What a convolution has to do for images of one shape.

    Attributes:
        sizes: the output's shape; None if it is not to take such images.
        sums: how many numbers that are.
        is_product: does it run as a product of matrices?
        at_once: images whose sums are finished together.
    """

    sizes: torch.Size | None
    sums: int = 0
    is_product: bool = False
    at_once: int = 1


class ByteLayer:
    """A layer of int8 weights for one plan, packed when it first runs. Threads may use it at the same time.

    Args:
        geometry: of a convolution; None for a linear layer.
        input_range: smallest and largest integer of the input.
        pieces: the sums that are added up.
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
        self._walk = walk_of(geometry)
        self._is_pointwise = self._has_rows()
        self._lock = threading.Lock()
        self._convs: Sequence[PackedConv | FloatConv] = ()
        self._matrix: Tensor | None = None
        self._is_of_rows = self._is_pointwise or geometry is None
        self._rows_kernel: PackedLinear | None = None
        self._is_rows_kernel_known = not self._is_of_rows
        numbers = _Numbers(plan.bias, plan.factor, plan.residual_factor)
        self._of_rows, self._of_images = numbers.reshape(-1), numbers.reshape(-1, 1, 1)
        self._width, self._type = plan.factor.numel(), output_type(plan)
        self._tasks: dict[torch.Size, _Task] = {}
        self._has_run = False
        self._rounding: Rounding | None = None
        self._is_rounding_known = not self._may_round()

    @classmethod
    def of(
        cls, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int], weight_bits: int
    ) -> ByteLayer | WideLayer | TransposedLayer | None:
        """The layer, if there is a kernel for it."""
        if weight_bits > 8 or not is_within(input_range, TWO_BYTES) or plan.factor.device.type != "cpu":
            return None
        if geometry is not None and len(geometry.stride) > 2:
            return None
        if geometry is not None and geometry.is_transposed:
            return TransposedLayer.of(plan, geometry, input_range, lambda p, g: cls.of(p, g, input_range, weight_bits))
        if plan.factor.dtype == torch.float64 or not is_within(input_range, BYTE):
            return WideLayer.of(plan, geometry, input_range)
        return cls(plan, geometry, input_range, _pieces(plan, 1 if geometry is None else geometry.groups, input_range))

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, at most and about: those of rows are laid out for two kernels."""
        return sum(piece.weight.numel() for piece in self._pieces) * (2 if self._is_of_rows else 1)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output: int8 or int16, channels last; real numbers where the plan says so.

        None if it cannot take these.

        Args:
            x, residual: int8 or int16, or integers in float32.
        """
        if not is_plain(x) or (residual is not None and not is_plain(residual)):
            return None
        return self._linear(x, residual) if self._geometry is None else self._convolve(x, residual)

    def as_one_call(self, x: Tensor) -> OneCall | None:
        """What it does with images such as these, which it has had before, if that is one call of a kernel."""
        rounding, task = self._rounding, self._tasks.get(x.shape)
        if rounding is None or rounding.rest is not None or task is None or task.sizes is None:
            return None
        return OneCall(rounding, x.shape, task.sizes) if x.dim() == 4 else None

    def _has_rows(self) -> bool:
        """Is it a convolution that is a linear layer of each pixel?"""
        if self._geometry is None or len(self._plan.weights) > 1:
            return False
        return self._plan.weights[0].shape[2:].numel() == 1 and self._walk == Walk()

    def _may_round(self) -> bool:
        """Are its sums one float32 number that only has to be multiplied and rounded to a byte?"""
        plan = self._plan
        is_one = len(self._pieces) <= 1 and plan.residual_factor is None
        return is_one and not plan.is_real and is_within((plan.low, plan.high), BYTE) and plan.low < plan.high

    def _rounding_of(self, sums: int, shape: tuple[int, ...]) -> Rounding | None:
        """The kernel that requantizes, where it is to do so; for so many sums of inputs of a shape.

        To look for the numbers that it needs takes as long as some runs do: not for a layer that runs only once.
        """
        if not self._is_rounding_known:
            if not self._has_run:
                self._has_run = True
                return None
            with self._lock, torch.inference_mode(False), torch.no_grad():
                if not self._is_rounding_known:
                    may_round = self._has_kernel() and kernels.are_kernels_rounding()
                    self._rounding = self._find_rounding(torch.Size(shape)) if may_round else None
                    self._is_rounding_known = True
        rounding = self._rounding
        return rounding if rounding is not None and rounding.is_faster(sums) else None

    def _has_kernel(self) -> bool:
        """Do its convolutions run on integer kernels?"""
        return is_on_kernels(self._range) and has_kernel(self._pieces[0].weight.shape, self._walk.groups)

    def _find_rounding(self, shape: torch.Size) -> Rounding | None:
        packed = self._convs[0] if self._convs else None
        return find_rounding(
            self._plan,
            self._pieces[0].weight,
            self._walk,
            self._range,
            shape,
            linear=self._kernel_of_rows,
            conv=packed if isinstance(packed, PackedConv) else None,
            is_linear=self._geometry is None,
        )

    @property
    def _kernel_of_rows(self) -> PackedLinear | None:
        """The kernel of a linear layer, or of a pointwise convolution, that is one sum; None where it is not proved.

        Two threads may both pack it: it is asked for under the lock, too.
        """
        if not self._is_rows_kernel_known:
            with torch.inference_mode(False), torch.no_grad():
                if len(self._pieces) == 1 and kernels.has_linear():  # a piece's sums fit the kernel
                    self._rows_kernel = PackedLinear(self._whole_matrix(), zero_point_of(self._range), _ROWS)
                self._is_rows_kernel_known = True
        return self._rows_kernel

    def _linear(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        if not is_on_kernels(self._range):  # float32 takes as long on bytes, and has to make them
            return None
        rows = x.reshape(-1, x.shape[-1])
        rounding = None
        if residual is None:
            rounding = self._rounding_of(len(rows) * self._width, (1, x.shape[-1], len(rows), 1))
        if rounding is not None and rounding.has_rows:
            return rounding(rows).reshape(*x.shape[:-1], self._width)
        if rounding is not None:  # rows are the positions of an image
            image = rounding(_as_image(rows))
            return image[0, :, :, 0].t().reshape(*x.shape[:-1], image.shape[1])
        shape = (*x.shape[:-1], self._width)
        if residual is not None and residual.shape != shape:
            return None
        return self._rows(rows, None if residual is None else residual.reshape(-1, shape[-1])).reshape(shape)

    def _rows(self, rows: Tensor, residual: Tensor | None) -> Tensor:
        """Rows of a linear layer, or the pixels of a pointwise one, some at a time."""
        count, length = rows.shape
        at_once = max(_CHUNK // max(self._width, length), 1)
        if count <= at_once:
            return self._finished(self._sums_of_rows(rows), residual, self._of_rows)
        out = torch.empty((count, self._width), dtype=self._type)
        at_once = -(-count // -(-count // at_once))  # as many in each: products of few rows take longer for each
        for part in slices(count, at_once):
            added = None if residual is None else residual[part]
            self._finish(self._sums_of_rows(rows[part]), added, out[part], self._of_rows)
        return out

    def _sums_of_rows(self, rows: Tensor) -> Tensor:
        """int32 without the bias, or float32 with it."""
        if len(rows) * self._width >= _FEW_ROW_SUMS:
            linear = self._kernel_of_rows
            if linear is not None:
                return linear(linear.taken(rows), self._plan.bias)
        matrix = self._matrix if self._matrix is not None else self._transpose()
        if matrix is None:
            return self._sums_of_images(_as_image(rows))[0, :, :, 0].t()
        if matrix.dtype is torch.int8:
            return kernels.multiply(rows.to(torch.int8).contiguous(), matrix)
        bias, floats = self._plan.bias, rows.float()
        return torch.mm(floats, matrix) if bias is None else torch.addmm(bias, floats, matrix)

    def _transpose(self) -> Tensor | None:
        """The matrix of a linear layer: int8 where products of bytes have a kernel. None where only convolutions do."""
        has_products = kernels.proved_reach() is kernels.Reach.BYTES
        if not has_products and is_on_kernels(self._range):
            return None
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._matrix is None:
                matrix = self._whole_matrix().t()
                self._matrix = matrix if has_products else matrix.float()
        return self._matrix

    def _whole_matrix(self) -> Tensor:
        return torch.cat([weight.flatten(1).to(torch.int8) for weight in self._plan.weights], -1)

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
        task = self._tasks.get(x.shape) or self._task_for(x.shape)
        sizes = task.sizes
        if sizes is None or (residual is not None and residual.shape != sizes):
            return None
        rounding = self._rounding_of(task.sums, x.shape) if residual is None else None
        if rounding is not None:
            return _as_pixels(rounding(_pixels_of(x)), sizes) if rounding.has_rows else rounding(x)
        if task.is_product:
            return self._pixels(x, residual, sizes)
        if task.at_once >= sizes[0]:
            return self._finished(self._sums_of_images(x), residual, self._of_images)
        out = torch.empty(sizes, dtype=self._type, memory_format=torch.channels_last)
        for part in slices(sizes[0], task.at_once):
            acc = self._sums_of_images(x[part])
            self._finish(acc, None if residual is None else residual[part], out[part], self._of_images)
        return out

    def _task_for(self, shape: torch.Size) -> _Task:
        sizes = output_sizes(shape, self._pieces[0].weight.shape, self._walk)
        task = _Task(None)
        if sizes is not None:
            sums = sizes.numel()
            is_product = self._is_pointwise and self._is_product(sums)
            task = _Task(sizes, sums, is_product, max(_CHUNK // sizes[1:].numel(), 1))
        if len(self._tasks) >= _MOST_TASKS:
            self._tasks = {}
        self._tasks[shape] = task
        return task

    def _is_product(self, sums: int) -> bool:
        """Is a pointwise convolution to run as a product of matrices? For few pixels this kernel is reached sooner."""
        has_products = kernels.proved_reach() is kernels.Reach.BYTES
        return sums < _FEW_PIXEL_SUMS if has_products else not is_on_kernels(self._range)

    def _pixels(self, x: Tensor, residual: Tensor | None, sizes: torch.Size) -> Tensor:
        """A pointwise convolution as a product of matrices."""
        return _as_pixels(self._rows(_pixels_of(x), None if residual is None else _pixels_of(residual)), sizes)

    def _sums_of_images(self, x: Tensor) -> Tensor:
        convs = self._convs or self._pack_pieces(x.shape)
        taken = convs[0].taken(x)
        if len(convs) == 1:
            return convs[0](taken, self._plan.bias)
        total: Tensor | None = None
        for conv, piece in zip(convs, self._pieces, strict=True):
            some = taken
            if piece.channels is not None:
                some = taken[:, piece.channels].contiguous(memory_format=torch.channels_last)
            value = conv(some, None)
            total = value if total is None else total.add_(value)
        assert total is not None
        bias = self._of_images.bias
        return total if bias is None else total.add_(bias)

    def _pack_pieces(self, shape: torch.Size) -> Sequence[PackedConv | FloatConv]:
        with self._lock, torch.inference_mode(False), torch.no_grad():  # they outlive the call
            if not self._convs:
                self._convs = self._pack([piece.weight for piece in self._pieces], self._walk, shape)
        return self._convs

    def _pack(self, weights: list[Tensor], walk: Walk, shape: torch.Size) -> Sequence[PackedConv | FloatConv]:
        return pack([weight.to(torch.int8) for weight in weights], walk, self._range, shape)

    def _finish(self, acc: Tensor, residual: Tensor | None, out: Tensor, by: _Numbers) -> None:
        """Residual, requantization and the output's type, of sums that this may write to.

        Args:
            acc: float32 with the bias, or int32 without.
            by: of each channel, as the sums have them.
        """
        made = passes()
        if made is None or not self._is_finished(made, acc, residual, out, by):
            out.copy_(self._values(acc, residual, by))

    def _finished(self, acc: Tensor, residual: Tensor | None, by: _Numbers) -> Tensor:
        """The same of all sums at once, laid out as they are."""
        made = passes()
        if made is not None:
            out = torch.empty_like(acc, dtype=self._type)
            if self._is_finished(made, acc, residual, out, by):
                return out
        return self._values(acc, residual, by).to(self._type)

    def _values(self, acc: Tensor, residual: Tensor | None, by: _Numbers) -> Tensor:
        """The finished sums in float32."""
        plan = self._plan
        if acc.dtype is torch.int32:
            acc = acc.float()
            if by.bias is not None:  # in a call of its own: one that converts as it adds takes twice as long as both
                acc.add_(by.bias)
        if residual is not None and by.residual_factor is not None:
            acc.add_(torch.mul(residual, by.residual_factor).add_(0.5).floor_())
        acc.mul_(by.factor)
        return acc.add_(0.0) if plan.is_real else acc.round_().clamp_(plan.low, plan.high)

    def _is_finished(self, made: Passes, acc: Tensor, residual: Tensor | None, out: Tensor, by: _Numbers) -> bool:
        """Has a compiled pass done it?"""
        plan = self._plan
        if plan.is_real or not is_serial(out):
            return False
        is_known = residual is None or (residual.dtype == torch.int8 and by.residual_factor is not None)
        sums, added, given = (None if x is None else _rows_of(x) for x in (acc, residual, out))
        if not is_known or sums is None or given is None or (residual is not None and added is None):
            return False
        bias = by.bias if acc.dtype == torch.int32 else None
        by_column = (bias, by.residual_factor if residual is not None else None, by.factor)
        if any(x is not None and (x.numel() != given.shape[1] or x.dtype != torch.float32) for x in by_column):
            return False
        made.settle(sums, bias, added, by.residual_factor, by.factor, (plan.low, plan.high), given)
        return True


def _as_image(rows: Tensor) -> Tensor:
    """Rows as the positions of an image."""
    return rows.t()[None, :, :, None]


def _pixels_of(x: Tensor) -> Tensor:
    """The pixels of images, in rows; no copy where channels are last."""
    batch, channels, height, width = x.shape
    if x.is_contiguous(memory_format=torch.channels_last):
        return x.as_strided((batch * height * width, channels), (channels, 1))
    return x.permute(0, 2, 3, 1).reshape(-1, channels)


def _as_pixels(rows: Tensor, sizes: torch.Size) -> Tensor:
    """Images whose pixels these rows are."""
    return rows.contiguous().as_strided(sizes, pixel_strides(sizes))


def _rows_of(x: Tensor) -> Tensor | None:
    """Rows, or the pixels of images, as they are one after the other in memory; None if they are not."""
    rows = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
    return rows.reshape(-1, rows.shape[-1]) if rows.is_contiguous() else None
