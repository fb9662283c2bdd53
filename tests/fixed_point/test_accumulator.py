"""Convolution, linear and matrix products against sums of Python and 64-bit integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point.accumulator import convolution
from horizon_plugin_pytorch.fixed_point.byte_shapes import output_sizes, walk_of
from horizon_plugin_pytorch.fixed_point.kernels import has_products
from horizon_plugin_pytorch.nn.quantized.conv2d import Conv2d
from horizon_plugin_pytorch.nn.quantized.conv_transpose2d import ConvTranspose2d
from horizon_plugin_pytorch.nn.quantized.linear import Linear
from tests.fixed_point import reference
from tests.strategies import fills, integers, ratios, seeds
from tests.tiers import in_soak

INT32 = (-(2**31), 2**31 - 1)
OUTPUTS = {"int8": (-128, 127), "relu": (0, 127), "relu6": (0, 77), "int16": (-32768, 32767), "real": (0, 0)}


@dataclass(frozen=True)
class Layer:
    """A layer to try: geometry, formats, and how its numbers are filled."""

    inputs: int = 3  # per group
    outputs: int = 2  # per group
    groups: int = 1
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    output_padding: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (4, 5)
    is_transposed: bool = False
    input_bits: int = 8
    input_low: int | None = None  # None: the format's lowest
    weight_bits: int = 8
    output: str = "int8"
    residual_bits: int = 0
    residual_shape: str = "full"
    weight_fill: str = "random"
    input_fill: str = "random"
    bias: str = "none"
    ratio: float = 0.01
    residual_ratio: float = 3.0
    seed: int = 0
    scales: tuple[float, ...] = field(default=(1.0, 0.7, 1.9))

    @property
    def axis(self) -> int:
        return 1 if self.is_transposed else 0


def numpy_conv(x: np.ndarray, w: np.ndarray, layer: Layer) -> np.ndarray:
    """The sum of products in int64, one kernel position at a time."""
    n, _, height, width = x.shape
    g = layer.groups
    x = x.reshape(n, g, layer.inputs, height, width)
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = layer.kernel, layer.stride, layer.padding, layer.dilation
    if not layer.is_transposed:
        w = w.reshape(g, layer.outputs, layer.inputs, kh, kw)
        x = np.pad(x, ((0, 0), (0, 0), (0, 0), (ph, ph), (pw, pw)))
        oh = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1
        ow = (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
        acc = np.zeros((n, g, layer.outputs, oh, ow), dtype=np.int64)
        for i in range(kh):
            for j in range(kw):
                part = x[..., i * dh : i * dh + sh * (oh - 1) + 1 : sh, j * dw : j * dw + sw * (ow - 1) + 1 : sw]
                acc += np.einsum("ngihw,goi->ngohw", part, w[..., i, j])
        return acc.reshape(n, -1, oh, ow)
    w = w.reshape(g, layer.inputs, layer.outputs, kh, kw)
    oh = (height - 1) * sh + dh * (kh - 1) + 1 + layer.output_padding[0]
    ow = (width - 1) * sw + dw * (kw - 1) + 1 + layer.output_padding[1]
    full = np.zeros((n, g, layer.outputs, oh, ow), dtype=np.int64)
    for i in range(kh):
        for j in range(kw):
            part = np.einsum("ngihw,gio->ngohw", x, w[..., i, j])
            full[..., i * dh : i * dh + sh * (height - 1) + 1 : sh, j * dw : j * dw + sw * (width - 1) + 1 : sw] += part
    return full[..., ph : oh - ph, pw : ow - pw].reshape(n, -1, oh - 2 * ph, ow - 2 * pw)


def bias_of(layer: Layer, scale: Tensor, acc: np.ndarray) -> Tensor | None:
    """Real biases: none, of the size of the sums, beyond int32, or cancelling the largest sum of each channel."""
    sizes = np.abs(acc).max(axis=tuple(i for i in range(acc.ndim) if i != 1)).astype(float) + 1
    sign = np.where(np.arange(len(sizes)) % 2, 1.0, -1.0)
    if layer.bias == "none":
        return None
    if layer.bias == "cancelling":
        peak = acc.reshape(acc.shape[0], acc.shape[1], -1)
        at = np.abs(peak).argmax(-1)[0]
        value = -peak[0, np.arange(acc.shape[1]), at] + 1.0
    else:
        value = sign * {"small": 3.3, "alike": sizes.max(), "huge": 1e12}[layer.bias]
    return torch.from_numpy(value * scale.numpy())


def check(layer: Layer) -> fp.AccumulatorPlan:
    """Run the layer both ways; the plan is returned so that a test can ask which route was taken."""
    channels = layer.outputs * layer.groups
    shape = (layer.inputs * layer.groups, layer.outputs) if layer.is_transposed else (channels, layer.inputs)
    weight = integers((*shape, *layer.kernel), layer.weight_bits, layer.seed, layer.weight_fill)
    x = integers((2, layer.inputs * layer.groups, *layer.size), layer.input_bits, layer.seed + 1, layer.input_fill)
    highest = (1 << (layer.input_bits - 1)) - 1
    lowest = -highest - 1 if layer.input_low is None else layer.input_low
    x = x.clamp(min=lowest)
    scale = 1e-4 * torch.tensor(layer.scales, dtype=torch.float64).repeat(channels)[:channels]
    acc = numpy_conv(x.long().numpy(), weight.long().numpy(), layer)
    bias = bias_of(layer, scale, acc)
    low, high = OUTPUTS[layer.output]
    output_scale = None if layer.output == "real" else torch.tensor([1e-4 / layer.ratio])
    residual_scale = torch.tensor([1e-4 * layer.residual_ratio]) if layer.residual_bits else None
    plan = fp.plan_accumulator(
        weight,
        bias,
        scale,
        output_scale,
        output_axis=layer.axis,
        groups=layer.groups,
        input_range=(lowest, highest),
        weight_bits=layer.weight_bits,
        low=low,
        high=high,
        residual_scale=residual_scale,
        residual_bits=layer.residual_bits or 8,
    )
    residual = None
    if layer.residual_bits:
        n, c, h, w = acc.shape
        shapes = {
            "full": (n, c, h, w),
            "channel": (1, c, 1, 1),
            "row": (n, 1, 1, w),
            "one": (1,),
            "wider": (2 * n, c, h, w),
        }
        shape = shapes[layer.residual_shape]
        if layer.residual_shape == "wider":  # one image, and a residual for each of several
            x, acc = x[:1], acc[:1]
        residual = integers(shape, layer.residual_bits, layer.seed + 2, layer.input_fill)
    before = x.clone()

    module: Any = (ConvTranspose2d if layer.is_transposed else Conv2d)()
    module.stride, module.padding, module.dilation = list(layer.stride), list(layer.padding), list(layer.dilation)
    module.groups, module.output_padding = layer.groups, list(layer.output_padding)
    module.explicit_padding, module.padding_mode = None, "constant"
    module.geometry = module._geometry(module.padding)
    got = module.compute(x, residual, plan)
    assert torch.equal(x, before), "the input must not change"

    assert_defined(got, acc, 1, scale, bias, residual, plan, low, high)
    on_bytes = fp.ByteLayer.of(plan, module.geometry, (lowest, highest), layer.weight_bits)
    if on_bytes is not None and fp.are_kernels_used():
        walk = walk_of(module.geometry)
        is_left = not layer.is_transposed and output_sizes(x.shape, weight.shape, walk) is None
        assert_same_on_bytes(on_bytes, x, residual, acc.shape, got, is_left)
    return plan


def assert_same_on_bytes(
    layer: fp.ByteLayer,
    x: Tensor,
    residual: Tensor | None,
    shape: tuple[int, ...],
    expected: Tensor,
    is_unsupported: bool = False,
) -> None:
    """Integer kernels give what float32 gives, to the bit; from floats, int8 and int16.

    Args:
        is_unsupported: is this what kernels do not compute, such as places that read padding alone?
    """
    small = [t if t is None else t.to(torch.int16 if t.abs().max() > 127 else torch.int8) for t in (x, residual)]
    for taken, added in ((x, residual), (small[0], small[1])):
        assert taken is not None
        out = layer(taken, added)
        if out is None:  # a residual of another shape, or a layer that is left to float32
            is_left = (isinstance(layer, fp.TransposedLayer) or x.dim() < 4) and not has_products()
            assert (residual is not None and residual.shape != shape) or is_left or is_unsupported
            continue
        assert torch.equal(out.float(), expected + 0.0)


def assert_defined(
    got: Tensor,
    acc: np.ndarray,
    axis: int,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: fp.AccumulatorPlan,
    low: int,
    high: int,
) -> None:
    """The definition: sum, bias, residual brought to the accumulator's grid, saturation, requantization."""
    total = acc.astype(object)
    spread = [1] * acc.ndim
    spread[axis] = -1
    if bias is not None:
        whole_bias = np.clip(np.round(bias.double().numpy() / scale.numpy()), *INT32)
        total = total + whole_bias.astype(np.int64).astype(object).reshape(spread)
    if residual is not None:
        assert plan.residual_factor is not None
        wide = (INT32[0] * 2**20, INT32[1] * 2**20)
        spread_out = residual.expand(np.broadcast_shapes(residual.shape, acc.shape))
        total = total + reference.requantize_channels(reference.whole(spread_out), plan.residual_factor, axis, *wide)
    beyond = np.abs(total) > plan.worst_case
    if beyond.any():  # only a residual that saturates the output whatever the layer adds
        ends = np.where(total > 0, high, low)
        assert residual is not None and not plan.is_real, "the worst case must be one"
        assert (got.numpy()[beyond] == ends[beyond]).all(), "the worst case must be one"
    if plan.limit:
        total = reference.clamp(total, *INT32)
    if plan.is_real:
        exact = total.astype(float) * scale.numpy().reshape(spread)
        np.testing.assert_allclose(got.double().numpy(), exact, rtol=2.0**-22, atol=0)
    else:
        reference.equal(got, reference.requantize_channels(total, plan.factor, axis, low, high))


@st.composite
def layers(draw: Any) -> Layer:
    two = st.tuples
    small = st.integers(1, 3)
    layer = Layer(
        inputs=draw(st.integers(1, 5)),
        outputs=draw(small),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        kernel=draw(two(small, small)),
        stride=draw(two(st.integers(1, 2), st.integers(1, 2))),
        padding=draw(two(st.integers(0, 2), st.integers(0, 2))),
        dilation=draw(two(st.integers(1, 2), st.integers(1, 2))),
        size=draw(two(st.integers(1, 6), st.integers(1, 6))),
        is_transposed=draw(st.booleans()),
        input_bits=draw(st.sampled_from([8, 16])),
        input_low=draw(st.sampled_from([None, 0])),
        weight_bits=draw(st.sampled_from([8, 8, 16])),
        output=draw(st.sampled_from(list(OUTPUTS))),
        residual_bits=draw(st.sampled_from([0, 8, 16])),
        residual_shape=draw(st.sampled_from(["full", "full", "channel", "row", "one", "wider"])),
        weight_fill=draw(fills),
        input_fill=draw(fills),
        bias=draw(st.sampled_from(["none", "small", "alike", "huge", "cancelling"])),
        ratio=draw(ratios(-18, 1)),
        residual_ratio=draw(ratios(-4, 12)),
        seed=draw(seeds),
    )
    if layer.is_transposed and draw(st.booleans()):
        layer = Layer(**{**layer.__dict__, "output_padding": tuple(s - 1 for s in layer.stride)})
    for axis in range(2):
        reach = layer.dilation[axis] * (layer.kernel[axis] - 1) + 1
        if layer.is_transposed:
            out = (
                (layer.size[axis] - 1) * layer.stride[axis]
                + reach
                + layer.output_padding[axis]
                - 2 * layer.padding[axis]
            )
            assume(out >= 1)
        else:
            assume(layer.size[axis] + 2 * layer.padding[axis] >= reach)
    return layer


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(layers())
@example(Layer(weight_fill="min", input_fill="min", inputs=5, kernel=(3, 3), size=(5, 5)))
@example(
    Layer(weight_fill="min", input_fill="min", inputs=5, kernel=(3, 3), size=(5, 5), input_bits=16, weight_bits=16)
)
def test_any_layer_gives_the_defined_integers(layer: Layer) -> None:
    check(layer)


WIDE = {
    "one piece": (Layer(inputs=1000), 1),
    "two pieces": (Layer(inputs=1200), 2),
    "two pieces, bias cancels the sum": (Layer(inputs=1500, bias="cancelling", ratio=0.02), None),
    "two pieces, bias beyond 2**24": (Layer(inputs=1500, bias="alike", ratio=1e-4), None),
    "two pieces, relu": (Layer(inputs=1500, output="relu", ratio=1e-5), None),
    "two pieces, ratio so small that steps lie beyond 2**24": (Layer(inputs=2000, ratio=2.0**-19), None),
    "two pieces, real output": (Layer(inputs=1500, output="real"), None),
    "two pieces and a residual": (Layer(inputs=1500, residual_bits=8, residual_ratio=900.0), None),
    "three pieces": (Layer(inputs=3000), 3),
    "many pieces": (Layer(inputs=7000, kernel=(3, 3), size=(3, 3), outputs=1), None),
    "a kernel that no cut of channels makes fit": (Layer(inputs=1, kernel=(40, 40), size=(41, 41), outputs=1), None),
    "groups": (Layer(inputs=700, groups=2, kernel=(2, 2), size=(3, 3)), None),
    "groups, uneven parts": (Layer(inputs=601, groups=3, outputs=1, kernel=(2, 2), size=(3, 3)), None),
    "transposed": (Layer(inputs=700, is_transposed=True, kernel=(2, 2), stride=(2, 2), size=(2, 3)), None),
    "transposed groups": (Layer(inputs=700, groups=2, is_transposed=True, kernel=(2, 2), size=(2, 3)), None),
    "depthwise": (Layer(inputs=1, outputs=1, groups=8, kernel=(40, 40), size=(42, 42)), None),
    "unsigned input": (Layer(inputs=1500, input_low=0), None),
    "int16 input": (Layer(inputs=700, input_bits=16, output="int16", ratio=1e-5), None),
    "int16 input, 3x3": (Layer(inputs=150, input_bits=16, kernel=(3, 3), output="int16", ratio=1e-5), None),
    "int16 input and weight": (Layer(inputs=40, input_bits=16, weight_bits=16, output="int16", ratio=1e-6), None),
    "int16 weight": (Layer(inputs=400, weight_bits=16, ratio=1e-5, kernel=(3, 3)), None),
    "int16 groups": (Layer(inputs=300, groups=2, input_bits=16, kernel=(2, 2), output="int16", ratio=1e-5), None),
}


@pytest.mark.parametrize("fill", ["min", "max", "random", "edges", "high"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_layers_are_exact_in_the_worst_case(name: str, fill: str) -> None:
    layer, parts = WIDE[name]
    plan = check(Layer(**{**layer.__dict__, "weight_fill": fill, "input_fill": fill}))
    if parts is not None and fill == "min":
        assert plan.parts == parts


@pytest.mark.parametrize("chunk", [1, 7, 24])
@pytest.mark.parametrize("name", WIDE)
def test_large_images_are_finished_in_blocks_of_channels(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horizon_plugin_pytorch.fixed_point import accumulator

    monkeypatch.setattr(accumulator, "_CHUNK", chunk)
    layer, _ = WIDE[name]
    for bias in ("none", "small"):
        check(Layer(**{**layer.__dict__, "bias": bias, "outputs": 5}))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1060, 2200),
    st.sampled_from(["cancelling", "alike", "small"]),
    ratios(-16, 1),
    seeds,
    st.sampled_from(["int8", "relu", "relu6", "real"]),
    st.sampled_from([0, 0, 8]),
)
def test_two_pieces_and_a_bias_never_lose_a_unit(inputs, bias, ratio, seed, output, residual_bits) -> None:
    """Three numbers below 2**24 can pass it on the way to a small sum."""
    check(
        Layer(
            inputs=inputs,
            outputs=4,
            size=(1, 3),
            bias=bias,
            ratio=ratio,
            seed=seed,
            output=output,
            residual_bits=residual_bits,
            residual_ratio=500.0,
            input_fill="high",
            weight_fill="high",
        )
    )


@pytest.mark.parametrize("fill", ["min", "max", "edges"])
@pytest.mark.parametrize("residual_bits", [0, 16])
@pytest.mark.parametrize("weight_bits", [8, 16])
def test_sums_beyond_int32(fill: str, residual_bits: int, weight_bits: int) -> None:
    """They saturate where weights have 8 bits, and are exact where they have 16."""
    layer = Layer(
        inputs=200 if weight_bits == 16 else 2000,
        kernel=(3, 3),
        size=(4, 4),
        input_bits=16,
        weight_bits=weight_bits,
        output="int16",
        ratio=2.0**-26,
        weight_fill=fill,
        input_fill=fill,
        residual_bits=residual_bits,
        bias="small",
    )
    plan = check(layer)
    assert plan.worst_case > INT32[1]
    assert plan.limit == (INT32[1] if weight_bits == 8 else 0)
    narrow = check(Layer(**{**layer.__dict__, "inputs": 2, "kernel": (1, 1), "weight_bits": 8, "residual_bits": 0}))
    assert narrow.limit == 0


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 40),
    st.integers(1, 7),
    st.sampled_from([8, 16]),
    st.sampled_from(list(OUTPUTS)),
    st.sampled_from([0, 8, 16]),
    st.sampled_from(["none", "small", "huge"]),
    ratios(-16, 0),
    fills,
    fills,
    seeds,
)
def test_any_linear_layer_gives_the_defined_integers(
    batch, inputs, outputs, bits, output, residual_bits, bias_kind, ratio, weight_fill, input_fill, seed
) -> None:
    low, high = OUTPUTS[output]
    weight = integers((outputs, inputs), 8, seed, weight_fill)
    x = integers((*batch, inputs), bits, seed + 1, input_fill)
    scale = torch.linspace(1, 2, outputs, dtype=torch.float64) * 1e-4
    values = {"none": 0.0, "small": 3.3, "huge": 1e12}
    bias = None if bias_kind == "none" else values[bias_kind] * scale * (torch.arange(outputs) % 2 * 2 - 1)
    residual = integers((*batch, outputs), residual_bits, seed + 2, input_fill) if residual_bits else None
    plan = fp.plan_accumulator(
        weight,
        bias,
        scale,
        None if output == "real" else torch.tensor([1e-4 / ratio]),
        output_axis=0,
        groups=1,
        input_range=(-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        weight_bits=8,
        low=low,
        high=high,
        residual_scale=torch.tensor([3e-4]) if residual_bits else None,
        residual_bits=residual_bits or 8,
    )
    got = Linear().compute(x, residual, plan)
    acc = x.long().numpy() @ weight.long().numpy().T
    assert_defined(got, np.asarray(acc), acc.ndim - 1, scale, bias, residual, plan, low, high)
    on_bytes = fp.ByteLayer.of(plan, None, (-(1 << (bits - 1)), (1 << (bits - 1)) - 1), 8)
    if on_bytes is not None and fp.are_kernels_used():
        assert_same_on_bytes(on_bytes, x, residual, acc.shape, got)


@pytest.mark.parametrize("inputs", [1023, 1024, 1300, 2049, 5000])
@pytest.mark.parametrize("fill", ["min", "max", "edges"])
def test_wide_linear_layers_are_exact(inputs: int, fill: str) -> None:
    weight, x = integers((3, inputs), 8, 0, fill), integers((4, inputs), 8, 1, fill)
    scale = torch.full((3,), 1e-4, dtype=torch.float64)
    plan = fp.plan_accumulator(
        weight,
        None,
        scale,
        torch.tensor([25.0]),
        output_axis=0,
        groups=1,
        input_range=(-128, 127),
        weight_bits=8,
        low=-128,
        high=127,
    )
    acc = x.long().numpy() @ weight.long().numpy().T
    assert_defined(Linear().compute(x, None, plan), acc, 1, scale, None, None, plan, -128, 127)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(
        [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 2)), ((4,), (4,)), ((2, 1, 3, 4), (3, 4, 1)), ((1, 1), (1, 1))]
    ),
    st.sampled_from([(8, 8), (8, 16), (16, 16)]),
    st.sampled_from(list(OUTPUTS)),
    ratios(-20, 0),
    fills,
    seeds,
)
def test_any_matrix_product_is_exact(shapes, bits, output, ratio, fill, seed) -> None:
    a, b = integers(shapes[0], bits[0], seed, fill), integers(shapes[1], bits[1], seed + 1, fill)
    low, high = OUTPUTS[output]
    bound = shapes[0][-1] * 2.0 ** (sum(bits) - 2)
    is_double = fp.is_beyond_float32(bound)
    acc = np.asarray(np.matmul(a.long().numpy(), b.long().numpy())).astype(object)
    if output == "real":
        scale = torch.tensor([ratio], dtype=torch.float64 if is_double else torch.float32)
        got = fp.matmul(a, b, scale, is_double, low, high, True)
        np.testing.assert_allclose(
            got.double().numpy().reshape(acc.shape), acc.astype(float) * scale.item(), rtol=2.0**-22
        )
        return
    factor = fp.choose_factor(torch.tensor([ratio]), low, high, bound)
    got = fp.matmul(a, b, factor, is_double, low, high, False)
    reference.equal(got.reshape(acc.shape), np.asarray(reference.requantize(acc, factor.item(), low, high)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-32768, 32767), min_size=1))
def test_digits_are_bytes_that_make_up_the_number(values: list[int]) -> None:
    low, high = fp.split_digits(torch.tensor(values, dtype=torch.float32), 2)
    assert (low + 256 * high).tolist() == values
    assert float(low.abs().max()) <= 128
    assert float(high.abs().max()) <= 128


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sided_input_of_a_depthwise_layer_stays_exact_in_every_part(sign: int) -> None:
    """Weights of one sign before those of the other: a part must bound positive and negative sums together."""
    row = sign * torch.tensor([-127.0] * 4 + [127.0] * 5 + [0.0] * 16)
    weight = row.reshape(1, 1, 5, 5).repeat(8, 1, 1, 1)
    weight[5:] = torch.randint(-20, 20, (3, 1, 5, 5)).float()
    plan = fp.plan_accumulator(
        weight,
        None,
        torch.full((8,), 1e-6, dtype=torch.float64),
        None,
        output_axis=0,
        groups=8,
        input_range=(0, 32767),
        weight_bits=8,
        low=0,
        high=0,
    )
    assert plan.parts > 1 and plan.input_digits == 1
    x = torch.randint(0, 32768, (4, 8, 12, 12)).float()
    for piece in plan.weights:
        for side in (piece.clamp(min=0), piece.clamp(max=0)):
            assert float(side.flatten(1).sum(1).abs().max()) * 32767 < fp.EXACT_FLOAT32
        exact = F.conv2d(x.double(), piece.double(), groups=8)
        assert torch.equal(F.conv2d(x, piece, groups=8).double(), exact)


def _linear_plan(weight: Tensor, bias: Tensor | None, output: str, residual_bits: int = 0) -> fp.AccumulatorPlan:
    low, high = OUTPUTS[output]
    return fp.plan_accumulator(
        weight,
        bias,
        torch.linspace(1, 2, len(weight), dtype=torch.float64) * 1e-4,
        None if output == "real" else torch.tensor([3e-3]),
        output_axis=0,
        groups=1,
        input_range=(-128, 127),
        weight_bits=8,
        low=low,
        high=high,
        residual_scale=torch.tensor([3e-4]) if residual_bits else None,
        residual_bits=residual_bits or 8,
    )


@pytest.mark.in_turns("chunk", "inputs", "batch", of=2)
@pytest.mark.parametrize("chunk", [5, 1 << 18, *in_soak(1, 40)])
@pytest.mark.parametrize("inputs", [4, 1200, 2500], ids=["one piece", "two pieces", "three pieces"])
@pytest.mark.parametrize("batch", [(), (3,), (1, 3), (2, 3), (1, 1, 4), (2, 1, 3), (0, 3), (1, 0)])
def test_rows_of_a_linear_layer_are_finished_on_their_own(
    batch: tuple[int, ...], inputs: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are rows, whatever the axes before them are; the scales belong to the last axis."""
    from horizon_plugin_pytorch.fixed_point import accumulator

    monkeypatch.setattr(accumulator, "_CHUNK", chunk)
    weight, x = integers((7, inputs), 8, 0, "random"), integers((*batch, inputs), 8, 1, "random")
    scale = torch.linspace(1, 2, 7, dtype=torch.float64) * 1e-4
    acc = np.asarray(x.long().numpy() @ weight.long().numpy().T)
    shapes = [None, (*batch, 7), (7,), (1,), (1,) * len(batch) + (7,), (2, *batch, 7)]
    for output in ("int8", "int16", "real"):
        for bias in (None, torch.linspace(-3, 5, 7, dtype=torch.float64)):
            for bits, shape in ((b, s) for b in (8, 16) for s in shapes):
                residual = None if shape is None else integers(shape, bits, 2, "random")
                plan = _linear_plan(weight, bias, output, 0 if residual is None else bits)
                got = Linear().compute(x, residual, plan)
                whole = acc if residual is None else acc + np.zeros(shape, dtype=np.int64)
                assert got.shape == whole.shape
                if got.numel():
                    assert_defined(got, whole, whole.ndim - 1, scale, bias, residual, plan, *OUTPUTS[output])


@pytest.mark.parametrize("image", ["plain", "channels last", "other rows", "of several"])
@pytest.mark.parametrize("weights", ["plain", "channels last", "of several"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_one_channel_may_have_any_stride(image: str, weights: str, outputs: int) -> None:
    """Torch 2.13 takes it for channels last, and gives one column of an output, with a stride across, other rows."""
    torch.manual_seed(outputs)
    x, weight = torch.randint(0, 128, (3, 1, 5, 2)).float(), torch.randint(-128, 128, (outputs, 1, 3, 3)).float()

    def laid(x: Tensor, how: str) -> Tensor:
        _, _, rows, columns = x.shape
        if how == "of several":
            return x.repeat(1, 3, 1, 1).contiguous(memory_format=torch.channels_last)[:, 1:2]
        channel = {"plain": rows * columns, "channels last": 1, "other rows": columns}[how]
        return x.as_strided(x.shape, (rows * columns, channel, columns, 1))

    for stride in ((1, 2), (2, 3), (1, 1)):
        exact = F.conv2d(x.double(), weight.double(), None, stride, 1)
        found = convolution(laid(x, image), laid(weight, weights), None, stride, (1, 1), (1, 1), 1)
        assert torch.equal(found.double(), exact)
