"""Transposed convolutions on integer kernels, as the convolutions that they are made of.

With stride ``s`` an output at ``s * q + r - padding`` reads only every ``s``-th weight, those at ``r + s * m``: all
outputs of one phase ``r`` are a convolution of stride 1 with these weights. One layer computes every phase as output
channels of its own; then its pixels are put side by side. The sums are those of the transposed layer, term by term.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan, Geometry
from horizon_plugin_pytorch.fixed_point.byte_convs import has_kernel, is_on_kernels
from horizon_plugin_pytorch.fixed_point.byte_shapes import is_plain

Layer = Callable[[Tensor, "Tensor | None"], "Tensor | None"]


class TransposedLayer:
    """A transposed convolution of int8 weights for one plan. Threads may use it at the same time.

    Args:
        input_range: smallest and largest integer of the input.
        make: a layer for the plan and geometry of an ordinary convolution; None if there is no kernel for it.
    """

    def __init__(
        self,
        plan: AccumulatorPlan,
        geometry: Geometry,
        input_range: tuple[int, int],
        make: Callable[[AccumulatorPlan, Geometry], Layer | None],
    ) -> None:
        self._plan, self._range, self._make = plan, input_range, make
        self._groups, self._axes = geometry.groups, len(geometry.stride)
        self._stride = _pair(geometry.stride, 1)
        self._padding, self._output_padding = _pair(geometry.padding, 0), _pair(geometry.output_padding, 0)
        self._kernel = _pair(list(plan.weights[0].shape[2:]), 1)
        self._taps = tuple(-(-k // s) for k, s in zip(self._kernel, self._stride, strict=True))  # of a phase
        self._lock = threading.Lock()
        self._layer: Layer | None = None
        self._is_made = False

    @classmethod
    def of(
        cls,
        plan: AccumulatorPlan,
        geometry: Geometry,
        input_range: tuple[int, int],
        make: Callable[[AccumulatorPlan, Geometry], Layer | None],
    ) -> TransposedLayer | None:
        """The layer, if it can be made of convolutions that lose nothing to their own borders."""
        is_dense = len(geometry.stride) <= 2 and all(d == 1 for d in geometry.dilation)
        if not is_dense or plan.residual_factor is not None:
            return None
        layer = cls(plan, geometry, input_range, make)
        inputs, outputs = plan.weights[0].shape[0] // layer._groups, plan.weights[0].shape[1]
        phases = torch.Size([outputs * layer._groups * layer._stride[0] * layer._stride[1], inputs])
        if not has_kernel(phases, layer._groups):
            return None
        facts = zip(layer._stride, layer._padding, layer._output_padding, layer._kernel, layer._taps, strict=True)
        # More output padding than the last pixel's phases have places for is left to the definition.
        return layer if all(op <= p + s * taps - k for s, p, op, k, taps in facts) else None

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, about."""
        return self._plan.weights[0].numel()

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output: int8 or int16, channels last; real numbers where the plan says so.

        None if it cannot take these.

        Args:
            x: int8 or int16, or integers in float32.
            residual: nothing; layers with one have no kernel.
        """
        if residual is not None or not is_plain(x) or not is_on_kernels(self._range):
            return None
        if x.dim() == self._axes + 1:  # one image without a batch axis
            out = self(x.unsqueeze(0), None)
            return None if out is None else out.squeeze(0)
        if self._axes == 1:  # one row of an image
            out = self._images(x.unsqueeze(2))
            return None if out is None else out.squeeze(2)
        return self._images(x)

    def _images(self, x: Tensor) -> Tensor | None:
        layer = self._layer if self._is_made else self._prepare()
        phases = None if layer is None else layer(x, None)
        if phases is None:
            return None
        (sh, sw), (ph, pw) = self._stride, self._padding
        facts = zip(x.shape[2:], self._stride, self._padding, self._output_padding, self._kernel, strict=True)
        height, width = [(n - 1) * s - 2 * p + k + op for n, s, p, op, k in facts]
        if min(height, width) <= 0:
            return None
        split = phases.permute(0, 2, 3, 1).unflatten(3, (self._groups, sh, sw, -1))  # pixels, then phases of a group
        whole = split.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        image = whole[:, ph : ph + height, pw : pw + width].permute(0, 3, 1, 2)
        return image.contiguous(memory_format=torch.channels_last)

    def _prepare(self) -> Layer | None:
        with self._lock, torch.inference_mode(False), torch.no_grad():  # it outlives the call
            if not self._is_made:
                plan = replace(
                    self._plan,
                    weights=[self._convolution(weight) for weight in self._plan.weights],
                    factor=self._by_phase(self._plan.factor),
                    bias=None if self._plan.bias is None else self._by_phase(self._plan.bias),
                )
                walk = Geometry([1, 1], [taps - 1 for taps in self._taps], [1, 1], [0, 0], self._groups, False)
                self._layer = self._make(plan, walk)
                self._is_made = True
        return self._layer

    def _convolution(self, weight: Tensor) -> Tensor:
        """The weights of all phases: [groups * phases * outputs of a group, inputs of a group, taps]."""
        weight = weight.unsqueeze(2) if weight.dim() == 3 else weight
        (sh, sw), (th, tw) = self._stride, self._taps
        missing = (0, tw * sw - weight.shape[3], 0, th * sh - weight.shape[2])
        taps = F.pad(weight, missing).unflatten(3, (tw, sw)).unflatten(2, (th, sh)).unflatten(0, (self._groups, -1))
        # Group, input, output, tap and phase down, tap and phase across; a convolution runs over its taps backwards.
        return taps.permute(0, 4, 6, 2, 1, 3, 5).flip(-1, -2).flatten(0, 3).contiguous()

    def _by_phase(self, values: Tensor) -> Tensor:
        """One number for each output channel, for every phase of it; in memory, where kernels read them."""
        sh, sw = self._stride
        return values.reshape(self._groups, 1, -1).repeat(1, sh * sw, 1).view(-1)


def _pair(numbers: list[int], first: int) -> tuple[int, int]:
    """A number for each of two axes; one axis is an image of one row."""
    height, width = (first, *numbers)[-2:]
    return height, width
