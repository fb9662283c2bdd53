"""Layers of every layout, cut into blocks of every size, against sums of plain integers; and edges of the plans."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import accumulator, blocks
from tests.fixed_point import reference
from tests.fixed_point.test_accumulator import OUTPUTS, Layer, assert_defined, check
from tests.strategies import integers
from tests.tiers import in_soak


@dataclass(frozen=True)
class Geometry:
    """A convolution over any number of axes."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    inputs: int = 2
    outputs: int = 3
    groups: int = 1
    stride: int = 1
    padding: int = 0
    is_transposed: bool = False


LAYOUTS = {
    "conv1d": Geometry((7,), (3,), padding=1),
    "conv2d": Geometry((4, 3), (3, 2), stride=2, padding=1),
    "conv2d, 1x1": Geometry((3, 4), (1, 1)),
    "conv3d": Geometry((3, 2, 3), (2, 1, 2)),
    "grouped": Geometry((4, 3), (2, 2), groups=2),
    "depthwise": Geometry((4, 3), (3, 3), inputs=1, outputs=1, groups=5, padding=1),
    "depthwise, two for each": Geometry((4, 3), (2, 2), inputs=1, outputs=2, groups=3),
    "transposed1d": Geometry((4,), (3,), stride=2, is_transposed=True),
    "transposed2d": Geometry((3, 2), (2, 2), stride=2, is_transposed=True),
    "transposed3d": Geometry((2, 1, 2), (2, 2, 1), is_transposed=True),
    "transposed, grouped": Geometry((3, 2), (2, 2), groups=2, is_transposed=True),
}


def convolved(x: np.ndarray, w: np.ndarray, g: Geometry) -> np.ndarray:
    """The sum of products in int64, one kernel position at a time."""
    n, axes = len(x), len(g.size)
    x = x.reshape(n, g.groups, g.inputs, *g.size)
    if g.is_transposed:
        w = w.reshape(g.groups, g.inputs, g.outputs, *g.kernel)
        whole = tuple((size - 1) * g.stride + k for size, k in zip(g.size, g.kernel, strict=True))
        acc = np.zeros((n, g.groups, g.outputs, *whole), dtype=np.int64)
        for at in itertools.product(*map(range, g.kernel)):
            place = tuple(slice(i, i + (size - 1) * g.stride + 1, g.stride) for i, size in zip(at, g.size, strict=True))
            acc[(..., *place)] += np.einsum("ngi...,gio->ngo...", x, w[(..., *at)])
        inner = tuple(slice(g.padding, size - g.padding) for size in whole)
        return acc[(..., *inner)].reshape(n, -1, *acc[(..., *inner)].shape[3:])
    w = w.reshape(g.groups, g.outputs, g.inputs, *g.kernel)
    x = np.pad(x, [(0, 0)] * 3 + [(g.padding, g.padding)] * axes)
    out = tuple((size + 2 * g.padding - k) // g.stride + 1 for size, k in zip(g.size, g.kernel, strict=True))
    acc = np.zeros((n, g.groups, g.outputs, *out), dtype=np.int64)
    for at in itertools.product(*map(range, g.kernel)):
        place = tuple(slice(i, i + (o - 1) * g.stride + 1, g.stride) for i, o in zip(at, out, strict=True))
        acc += np.einsum("ngi...,goi->ngo...", x[(..., *place)], w[(..., *at)])
    return acc.reshape(n, -1, *out)


FORMATS = [(8, 8, "int8"), (8, 8, "int16"), (8, 8, "real"), (16, 8, "int16"), (16, 8, "int8"), (8, 16, "int16"),
           (16, 16, "int16"), (16, 16, "real")]  # fmt: skip


def _residuals(shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    rank = len(shape)
    return [None, shape, (1,) * rank, (shape[1], *[1] * (rank - 2)), (1, *shape[1:]), (3, *shape), shape[-1:]]


def run(g: Geometry, x: Tensor, weight: Tensor, formats: tuple[int, int, str], has_bias: bool) -> None:
    """All residuals of one layer."""
    input_bits, weight_bits, output = formats
    acc = convolved(x.long().numpy(), weight.long().numpy(), g)
    channels = g.outputs * g.groups
    scale = torch.linspace(1, 2, channels, dtype=torch.float64) * 1e-4
    bias = torch.linspace(-0.3, 0.5, channels, dtype=torch.float64) if has_bias else None
    low, high = OUTPUTS[output]
    largest = float(np.abs(acc).max()) * 2e-4 + 0.5
    for shape, bits in itertools.product(_residuals(acc.shape), (8, 16)):
        if shape is None and bits == 16:
            continue
        residual = None if shape is None else integers(shape, bits, 2, "random")
        plan = fp.plan_accumulator(
            weight,
            bias,
            scale,
            None if output == "real" else torch.tensor([largest / (high + 1) / 1.5]),
            output_axis=int(g.is_transposed),
            groups=g.groups,
            input_range=(-(1 << (input_bits - 1)), (1 << (input_bits - 1)) - 1),
            weight_bits=weight_bits,
            low=low,
            high=high,
            residual_scale=None if shape is None else torch.tensor([3e-4]),
            residual_bits=bits,
        )
        axes = len(g.size)
        geometry = fp.Geometry([g.stride] * axes, [g.padding] * axes, [1] * axes, [0] * axes, g.groups, g.is_transposed)
        got = fp.conv(x, residual, *fp.flatten(plan, geometry))
        whole = acc if shape is None else acc + np.zeros(shape, dtype=np.int64)
        assert got.shape == whole.shape
        assert_defined(got, whole, whole.ndim - axes - 1, scale, bias, residual, plan, low, high)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), [
    *zip(LAYOUTS, itertools.cycle((6, 1 << 18))),
    *in_soak(*zip(LAYOUTS, itertools.cycle((1 << 18, 6)))),
    *in_soak(*itertools.product(LAYOUTS, (1, 50))),
])  # fmt: skip
def test_blocks_of_any_size_give_the_defined_integers(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "_CHUNK", chunk)
    g = LAYOUTS[name]
    channels, shape = g.inputs * g.groups, (g.outputs * g.groups, g.inputs)
    for formats in FORMATS:
        weight = integers((*((channels, g.outputs) if g.is_transposed else shape), *g.kernel), formats[1], 0, "edges")
        x = integers((2, channels, *g.size), formats[0], 1, "random")
        run(g, x, weight, formats, has_bias=formats[1] == 8)


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "chunk"), [
    (1023, 5), (1024, 1 << 18), (2200, 5), *in_soak((1023, 1 << 18), (1024, 5), (2200, 1 << 18)),
])  # fmt: skip
def test_parts_of_wide_layers_in_blocks(inputs: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the limits of one, two and three parts, for a convolution over one, two and three axes."""
    monkeypatch.setattr(accumulator, "_CHUNK", chunk)
    fill = "min"
    for size, output in itertools.product([(2,), (1, 2), (1, 1, 2)], ("int8", "int16")):
        g = Geometry(size, (1,) * len(size), inputs=inputs, outputs=2)
        weight = integers((2, inputs, *g.kernel), 8, 0, fill)
        run(g, integers((2, inputs, *size), 8, 1, fill), weight, (8, 8, output), has_bias=True)


@pytest.mark.parametrize("output", ["int16", "real"])
@pytest.mark.parametrize("fill", ["min", "max", "edges", "high"])
@pytest.mark.parametrize("kernel", [(2, 2), (1, 5), (3, 2), (3, 3), (3, 4), (4, 4)])
def test_taps_of_a_saturated_int16_depthwise_layer(kernel: tuple[int, int], fill: str, output: str) -> None:
    """Each part of the taps stays below 2**24 when weights and inputs are at their extremes."""
    layer = Layer(
        inputs=1, outputs=1, groups=6, kernel=kernel, size=(5, 5), input_bits=16, output=output, ratio=2.0**-11,
        weight_fill=fill, input_fill=fill,
    )  # fmt: skip
    plan = check(layer)
    if plan.input_digits == 1 and not plan.is_double:
        for piece in plan.weights:
            up, down = piece.clamp(min=0).flatten(1).sum(1), piece.clamp(max=0).neg().flatten(1).sum(1)
            reach = torch.maximum(up * 32767.0 + down * 32768.0, down * 32767.0 + up * 32768.0)
            assert float(reach.max()) < 2**24


@pytest.mark.parametrize("power", range(11, 22))
@pytest.mark.parametrize("output", ["int8", "relu", "int16", "real"])
def test_residuals_far_coarser_than_the_accumulator(power: int, output: str) -> None:
    """Up to where an 8-bit residual alone passes 2**24 steps of the sum."""
    for odd in (1.0, 1.37, 1.99997):
        layer = Layer(inputs=4, kernel=(1, 1), size=(3, 4), output=output, residual_bits=8, ratio=2.0 ** (6 - power),
                      residual_ratio=2.0**power * odd, input_fill="edges", bias="small")  # fmt: skip
        check(layer)


@pytest.mark.parametrize(("low", "high"), [(0, 127), (-128, 127), (0, 77)])
def test_a_factor_in_float32_agrees_with_the_definition_at_every_integer(low: int, high: int) -> None:
    """Every integer up to beyond the last step: the one before a step counts as much as the step."""
    for ratio in np.exp2(np.linspace(-9, 0.9, 120)).tolist() + [1 / 3, 0.5, 0.25, 3 / 128, 0.75, 5 / 512]:
        factor = fp.choose_factor(torch.tensor([ratio], dtype=torch.float64), low, high)
        assert factor.dtype == torch.float32
        end = int(140 / ratio)
        acc = torch.arange(-end, end + 1)
        numerator, denominator = float(factor).as_integer_ratio()
        shift = max(denominator.bit_length() - 1, 1)
        multiplier = numerator * (1 << shift) // denominator
        wanted = reference.requantize_int64(acc.numpy(), multiplier, shift, low, high)
        got = fp.requantize(acc.float(), factor, -1, low, high)
        assert np.array_equal(got.numpy(), wanted), ratio


@pytest.mark.parametrize("channels", [1, 127, 128, 129, 300])
def test_factors_do_not_depend_on_how_many_are_chosen_together(channels: int) -> None:
    ratios = torch.logspace(-4, 0, channels, dtype=torch.float64)
    together = fp.choose_factor(ratios, -128, 127)
    alone = torch.cat([fp.choose_factor(r.reshape(1), -128, 127) for r in ratios])
    assert torch.equal(together.double(), alone.double())


@pytest.mark.parametrize(("times", "is_coarser"), [(0.999, False), (1.001, True)])
def test_a_grid_is_coarser_where_it_moves_an_output_by_less_than_an_eighth_of_a_step(
    times: float, is_coarser: bool
) -> None:
    scale, weight, lost, size = 2.0**-24, torch.tensor([[148.0]]), 20.0, 128.0  # 148 = 2 * 64 + 20
    step = lost * size * scale * 8 * times
    coarse, _ = fp.coarsen(
        weight, torch.ones(1), torch.tensor([scale], dtype=torch.float64), torch.tensor([step], dtype=torch.float64),
        output_axis=0, groups=1, input_size=size, output_steps=255,
    )  # fmt: skip
    assert coarse.tolist() == ([[2.0]] if is_coarser else [[148.0]])


@pytest.mark.parametrize("block", [1, 3, 7, 24, 25])
def test_elementwise_functions_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", block)
    a, b = integers((2, 3, 4), 16, 0, "edges"), integers((2, 3, 4), 16, 1, "random")
    factor = fp.choose_factor(torch.tensor([2.0**-15]), -32768, 32767, 2.0**30)
    wanted = reference.requantize(reference.whole(a) * reference.whole(b), float(factor), -32768, 32767)
    for x, y in ((a, b), (a.transpose(0, 2).contiguous().transpose(0, 2), b)):
        reference.equal(fp.mul(x, y, factor, -32768, 32767), wanted)


@pytest.mark.parametrize("chunk", [1, 10, 1 << 18])
@pytest.mark.parametrize(
    "shapes",
    [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((4,), (4, 3)),
     ((3, 4), (4,)), ((1, 4), (2, 4, 3)), ((0, 3, 4), (4, 5))],
)  # fmt: skip
def test_matrix_products_in_blocks(shapes: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "_CHUNK", chunk)
    for bits in ((8, 8), (16, 16)):
        a, b = integers(shapes[0], bits[0], 0, "edges"), integers(shapes[1], bits[1], 1, "random")
        bound = 4 * 2.0 ** (sum(bits) - 2)
        factor = fp.choose_factor(torch.tensor([2.0**-9]), -32768, 32767, bound)
        got = fp.matmul(a, b, factor, fp.is_beyond_float32(bound), -32768, 32767, False)
        acc = np.matmul(a.long().numpy(), b.long().numpy()).astype(object)
        assert got.shape == acc.shape
        if acc.size:
            reference.equal(got, reference.requantize(acc, float(factor), -32768, 32767))
