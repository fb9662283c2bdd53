"""Layers on integer kernels: the sums of `accumulator.py`, by the same plans, with the same integers.

Activations are int8, images with channels last. A kernel's sums leave it in float32 and are finished there as the plan
says, an image or a block of rows at a time, while they are in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan, Geometry

_CHUNK = 1 << 19  # sums that are finished together: two megabytes
_BYTE = (-128, 127)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad and x.numel() > 0


class ByteLayer:
    """A layer of int8 weights for one plan, packed when it first runs. Threads may use it at the same time.

    Args:
        geometry: of a convolution; None for a linear layer.
        input_range: smallest and largest integer of the input.
    """

    def __init__(self, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int]) -> None:
        self._plan, self._geometry = plan, geometry
        self._zero_point = 0 if input_range[0] >= 0 else 128
        self._walk = kernels.Walk() if geometry is None else _walk(geometry)
        self._lock = threading.Lock()
        self._conv: kernels.PackedConv | None = None
        self._matrix: Tensor | None = None
        spread = (-1,) if geometry is None else (-1, 1, 1)
        self._factor = plan.factor.reshape(spread)
        self._residual_factor = None if plan.residual_factor is None else plan.residual_factor.reshape(spread)

    @classmethod
    def of(
        cls, plan: AccumulatorPlan, geometry: Geometry | None, input_range: tuple[int, int], weight_bits: int
    ) -> ByteLayer | None:
        """The layer, if there is a kernel for it."""
        if geometry is not None and (geometry.is_transposed or len(geometry.stride) > 2):
            return None
        is_byte = weight_bits <= 8 and input_range[0] >= _BYTE[0] and input_range[1] <= _BYTE[1]
        is_one = plan.factor.dtype == torch.float32 and len(plan.weights) == 1
        return cls(plan, geometry, input_range) if is_byte and is_one and plan.factor.device.type == "cpu" else None

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, about."""
        return self._plan.weights[0].numel()

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output: int8, channels last; real numbers where the plan says so. None if it cannot take these.

        Args:
            x, residual: int8, or integers in float32.
        """
        if not _is_plain(x) or (residual is not None and not _is_plain(residual)):
            return None
        return self._linear(x, residual) if self._geometry is None else self._convolve(x, residual)

    def _linear(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        if self._matrix is None:
            with torch.inference_mode(False), torch.no_grad():
                self._matrix = self._plan.weights[0].to(torch.int8).t()
        shape = (*x.shape[:-1], self._matrix.shape[1])
        if residual is not None and residual.shape != shape:
            return None
        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(-1, shape[-1])
        out = self._new_output((len(rows), shape[-1]), torch.contiguous_format)
        step = max(_CHUNK // max(shape[-1], x.shape[-1]), 1)
        for part in _slices(len(rows), step):
            acc = kernels.multiply(rows[part].to(torch.int8), self._matrix).float()
            if self._plan.bias is not None:
                acc.add_(self._plan.bias)
            self._finish(acc, None if added is None else added[part], out[part])
        return out.reshape(shape)

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
        out = self._new_output(sizes, torch.channels_last)
        for part in _slices(len(x), max(_CHUNK // sizes[1:].numel(), 1)):
            taken = self._unsigned(x[part])
            conv = self._conv or self._pack(taken.shape)
            self._finish(conv(taken, self._plan.bias), None if residual is None else residual[part], out[part])
        return out

    def _output_sizes(self, x: Tensor) -> torch.Size:
        walk, weight = self._walk, self._plan.weights[0]
        kernel = (1, *weight.shape[2:])[-2:]
        axes = zip(x.shape[2:], kernel, walk.stride, walk.padding, walk.dilation, strict=True)
        return torch.Size([len(x), len(weight), *[(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]])

    def _pack(self, shape: torch.Size) -> kernels.PackedConv:
        with self._lock, torch.inference_mode(False), torch.no_grad():  # it outlives the call
            if self._conv is None:
                weight = self._plan.weights[0].to(torch.int8)
                weight = weight.unsqueeze(2) if weight.dim() == 3 else weight
                self._conv = kernels.PackedConv(weight, self._walk, self._zero_point, shape)
        return self._conv

    def _unsigned(self, x: Tensor) -> Tensor:
        """The bytes that a convolution takes: channels last, 128 more if there are negative integers."""
        if x.dtype != torch.int8:
            x = torch.empty(x.shape, dtype=torch.int8, memory_format=torch.channels_last).copy_(x)
        taken = x.contiguous(memory_format=torch.channels_last).view(torch.uint8)
        return taken.bitwise_xor(128) if self._zero_point else taken

    def _new_output(self, shape: torch.Size | tuple[int, ...], layout: torch.memory_format) -> Tensor:
        dtype = torch.int8 if self._is_byte_output else torch.float32
        return torch.empty(shape, dtype=dtype, memory_format=layout)

    @property
    def _is_byte_output(self) -> bool:
        return not self._plan.is_real and self._plan.low >= _BYTE[0] and self._plan.high <= _BYTE[1]

    def _finish(self, acc: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Residual, requantization and the output's type, of sums that this may write to."""
        plan = self._plan
        if residual is not None and self._residual_factor is not None:
            acc.add_(torch.mul(residual, self._residual_factor).add_(0.5).floor_())
        acc.mul_(self._factor)
        if plan.is_real:
            torch.add(acc, 0.0, out=out)
        else:
            out.copy_(acc.round_().clamp_(plan.low, plan.high))


def _walk(geometry: Geometry) -> kernels.Walk:
    """The walk over images; one axis is an image of one row."""
    (sh, sw), (dh, dw) = (1, *geometry.stride)[-2:], (1, *geometry.dilation)[-2:]
    ph, pw = (0, *geometry.padding)[-2:]
    return kernels.Walk((sh, sw), (ph, pw), (dh, dw), geometry.groups)


def _slices(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, start + step)
