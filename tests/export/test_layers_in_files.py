"""Layers on ONNX Runtime's int8 kernels: at every optimisation level, on one and two threads, and at their limits."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.export import onnx_forms
from horizon_plugin_pytorch.export.onnx_digits import byte_digits, float_digit_ends, float_digits
from horizon_plugin_pytorch.export.onnx_forms import Integers, note_integers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph
from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    default_qat_out_8bit_fake_quant_qconfig,
    get_default_qconfig,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.routes import as_numbers, assert_one_arithmetic, prepared, run_onnx
from tests.sequences.comparison import LEVELS, THREADS, open_session

FORMATS = ("qint8", "qint16")


class Between(nn.Module):
    """Something between the stubs, and float code after them."""

    def __init__(self, body: nn.Module, after: Any = None) -> None:
        super().__init__()
        self.quant, self.dequant, self.body, self.after = QuantStub(), DeQuantStub(), body, after

    def forward(self, x: Tensor) -> Any:
        out = self.dequant(self.body(self.quant(x)))
        return out if self.after is None else self.after(out)


def bits(x: Tensor) -> Tensor:
    """Numbers as they are stored: -0 is not 0, and NaN is itself."""
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


def exported(model: nn.Module, x: Tensor) -> onnx.ModelProto:
    return export_quantized_onnx(model, x, io.BytesIO(), input_names=["x"])


def assert_same_bits(file: onnx.ModelProto, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """In every session the file gives what the model gives."""
    with torch.no_grad():
        wanted = [[bits(y) for y in as_numbers(model(x))] for x in batches]
    for level in LEVELS:
        for threads in THREADS:
            session = open_session(file.SerializeToString(), level, threads)
            for x, numbers in zip(batches, wanted, strict=True):
                given = [bits(torch.from_numpy(np.asarray(y))) for y in session.run(None, {"x": x.numpy()})]
                different = [int((a != b).sum()) for a, b in zip(given, numbers, strict=True)]
                assert not any(different), (level, threads, different)


def kinds(file: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in file.graph.node]


# -- the sign of zero ------------------------------------------------------------------------------------------------

AFTER = {
    "inverse": lambda x: 1 / x,
    "angle": lambda x: torch.atan2(x, -torch.ones_like(x)),
    "zero is added": lambda x: 1 / (-x.abs() + 0.0),
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("after", AFTER)
def test_zero_has_no_sign_on_any_route(after: str, dtype: str) -> None:
    """Rounding leaves -0 of small negative numbers; a byte has no such thing, and float code sees the difference."""
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    body = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False))
    qat = prepared(Between(body, AFTER[after]).eval(), (x,), dtype)
    x *= 0.01 if dtype == "qint8" else 1e-4
    model = convert_fx(qat)
    with torch.no_grad():
        wanted, trained = model(x), qat(x)
    assert bool((wanted == np.inf).any() if after != "angle" else (wanted == np.float32(np.pi)).any())  # zeros occur
    assert not bool((wanted == (-np.inf if after != "angle" else -np.float32(np.pi))).any())
    assert torch.equal(bits(wanted), bits(trained))
    file = exported(model, x)
    for level in LEVELS:
        session = open_session(file.SerializeToString(), level, 1)
        given = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        if after == "angle":  # its kernels differ in the last bit
            assert torch.allclose(given, wanted, atol=1e-6) and torch.equal(given.signbit(), wanted.signbit())
        else:
            assert torch.equal(bits(given), bits(wanted)), level


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_zero_has_no_sign_in_sums_that_leave_as_real_numbers(layer: str) -> None:
    body = nn.Linear(5, 3, bias=False) if layer == "linear" else nn.Conv2d(4, 3, 1, bias=False)
    with torch.no_grad():
        body.weight.fill_(-1.0)
    x = torch.ones(2, 4, 6, 5)
    last = {"module_name": [("body", default_qat_out_8bit_fake_quant_qconfig)]}
    qat = prepared(Between(body).eval(), (x,), "qint8", **last)
    model = convert_fx(qat)
    with torch.no_grad():
        assert not bool(model(0 * x).signbit().any()) and not bool(qat(0 * x).signbit().any())
    assert_same_bits(exported(model, x), model, [0 * x, -0.0 * x, x])


# -- bytes -----------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Signed and unsigned inputs, depthwise and dense kernels, strides, dilations and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU())
        self.dense = nn.Conv2d(16, 8, 1)
        self.signed = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(8, 70, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.signed(self.dense(self.depthwise(self.first(x))))))


def widen_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights at the ends of their range, in runs: the largest sums, and the largest pairs of neighbours."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape[:1], generator=generator) * 2.0 - 1
            parameter.copy_(signs.reshape(-1, *[1] * (parameter.dim() - 1)).expand_as(parameter))
    return model


@pytest.mark.parametrize("weights", ["random", "at their ends"])
def test_int8_convolutions_on_bytes_are_exact_at_every_level(weights: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 24, 24, generator=generator)
    net = Between(Chain()).eval()
    model = convert_fx(prepared(widen_(net) if weights != "random" else net, (x,)))
    file = exported(model, x)
    assert kinds(file).count("QLinearConv") == 5 and "Conv" not in kinds(file)
    ends = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1e9, 1e9)
    special = x.clone()
    special[0, 0, :3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert_same_bits(file, model, [x, 3 * x, ends, torch.full_like(x, 1e9), torch.full_like(x, -1e9), special])


@pytest.mark.parametrize("weights", ["random", "at their ends"])
def test_pairs_of_products_fit_where_kernels_add_them_in_16_bits(weights: str) -> None:
    """On processors without VNNI, kernels of unsigned inputs and signed weights add two products in 16 bits, and
    saturate. Unsigned weights are widened first. So signed weights meet bytes up to 127, or are at most 64."""
    x = torch.randn(1, 3, 24, 24)
    net = Between(Chain()).eval()
    file = exported(convert_fx(prepared(widen_(net) if weights != "random" else net, (x,))), x)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    producers = {name: node for node in file.graph.node for name in node.output}
    seen = set()
    for node in (n for n in file.graph.node if n.op_type == "QLinearConv"):
        zero, kernel = constants[node.input[2]], producers.get(node.input[3])
        if kernel is not None:  # halves, made when the file is loaded
            seen.add("halves")
            clip, cast = (producers[name] for name in kernel.input)
            assert (clip.op_type, cast.op_type) == ("Clip", "Cast") and producers[cast.input[0]].op_type == "Sub"
            whole = constants[clip.input[0]].astype(int)
            half = whole.clip(*(int(constants[name]) for name in clip.input[1:]))
            largest, byte = max(np.abs(half).max(), np.abs(whole - half).max()), 255
        elif constants[node.input[3]].dtype == np.uint8:
            seen.add("unsigned")
            continue
        else:
            seen.add("signed")
            producer = producers[node.input[0]]
            assert zero == 0 and producer.op_type == "Clip" and constants[producer.input[2]] <= 127
            largest, byte = np.abs(constants[node.input[3]].astype(int)).max(), 127
        assert 2 * byte * int(largest) <= (1 << 15) - 1
    assert seen == {"signed", "unsigned", "halves"}


def test_a_sum_that_may_leave_int32_is_not_given_to_bytes() -> None:
    """Kernels add in int32 and wrap around; the definition saturates."""
    set_march(March.NASH_E)
    x = torch.randn(1, 3, 6, 6)
    net = Between(nn.Conv2d(3, 2, 3)).eval()
    with torch.no_grad():
        net.body.weight.mul_(1e-6)
        net.body.bias.fill_(1e4)
    model = convert_fx(prepared(net, (x,)))
    file = exported(model, x)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    for node in (n for n in file.graph.node if n.op_type == "QLinearConv"):
        reach = 128 * 27 * 255 + np.abs(constants[node.input[8]].astype(float)).max()
        assert reach <= INT32_MAX
    assert_same_bits(file, model, [x, 100 * x])


# -- int16 -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Products of matrices with more and fewer outputs than inputs, kernels in digits and parts, taps in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU6())
        self.project, self.signed = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.dense, self.deep = nn.Conv2d(8, 160, 3, stride=2), nn.Conv2d(160, 4, 3, padding=1)
        self.narrow, self.wide = nn.Linear(5, 3), nn.Linear(3, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.signed(self.project(self.depthwise(self.expand(x))))
        return self.wide(self.narrow(self.deep(self.dense(x)) + 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "at their ends"])
def test_int16_layers_are_exact_at_every_level(weights: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 12, 12, generator=generator)
    torch.manual_seed(2)
    net = Between(Wide()).eval()
    model = convert_fx(prepared(widen_(net) if weights != "random" else net, (x,), "qint16"))
    file = exported(model, x)
    ends = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1e9, 1e9)
    assert_same_bits(file, model, [x, 3 * x, ends, torch.full_like(x, 1e9), torch.full_like(x, -1e9)])
    if weights == "random":  # taps are in two parts at most; sums are cut off by a cast, which is faster than a floor
        nodes = [(node.op_type, node.output[0].split("/")[1]) for node in file.graph.node if "/" in node.output[0]]
        assert all(1 <= nodes.count(("Conv", part)) <= 2 for part in ("signed", "depthwise"))
        assert not {part for kind, part in nodes if kind == "Floor"} & {"expand", "depthwise", "project", "dense"}
        assert "Pad" in kinds(file)


@pytest.mark.parametrize("shape", [(4, 2, 4, 5, 5), (2, 4, 5, 5), (4, 1, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_residuals_of_other_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    """More axes than the sum, or fewer, are those of the result."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.other, self.conv = QuantStub(), QuantStub(), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.conv(self.quant(x)) + self.other(y)

    inputs = torch.randn(2, 3, 5, 5), torch.randn(shape)
    model = convert_fx(prepared(Added().eval(), inputs, dtype))
    file = export_quantized_onnx(model, inputs, io.BytesIO())
    for optimization in ("off", "on"):
        assert torch.equal(run_onnx(file, inputs, optimization)[0], model(*inputs).int_repr())
    fast = run_onnx(export_quantized_onnx(model, inputs, io.BytesIO(), fast=True).model, inputs, "on")[0]
    assert int((fast.int() - model(*inputs).int_repr().int()).abs().max()) <= (1 if dtype == "qint8" else 0)


def test_a_sum_that_a_cast_could_not_hold_keeps_its_floor() -> None:
    """A factor so large that scaled sums leave int32, where a cast is not defined."""
    x = torch.randn(1, 3, 6, 6)
    net = Between(nn.Conv2d(3, 4, 3, bias=False)).eval()
    qat = prepared(net, (x,), "qint16")
    qat.body.activation_post_process.scale.mul_(1e-6)
    model = convert_fx(qat)
    file = exported(model, x)
    assert "Floor" in kinds(file)
    assert_same_bits(file, model, [x, 3 * x, 1e6 * x])


# -- 16-bit integers in bytes ----------------------------------------------------------------------------------------


def digits_in_runtime(values: Tensor, ends: tuple[int, int]) -> list[Tensor]:
    """What ONNX Runtime gives for the digits of integers: two of float32, two of bytes, and what these stand for."""
    g = OnnxGraph()
    g.add_input("x", torch.float32, values.shape)
    floats, digits = float_digits(g, "x", ends), byte_digits(g, "x", ends)
    names = [(name, torch.float32) for name in floats] + [(digit.name, torch.uint8) for digit in digits]
    named = [(g.output(f"y{i}", name), dtype, values.shape) for i, (name, dtype) in enumerate(names)]
    session = open_session(g.model(["x"], named, "digits").SerializeToString(), "enable_all", 1)
    found = [torch.from_numpy(y).int() for y in session.run(None, {"x": values.numpy()})]
    for byte, digit in zip(found[2:], digits, strict=True):
        plain = byte - digit.zero
        assert (int(plain.min()), int(plain.max())) == digit.ends
        assert not digit.is_safe or int(byte.max()) <= 128
        found.append(plain * digit.size)
    return found


@pytest.mark.parametrize("is_signed", [False, True])
def test_digits_of_every_16_bit_integer(is_signed: bool) -> None:
    ends = (-(1 << 15) if is_signed else 0, (1 << 15) - 1)
    values = torch.arange(ends[0], ends[1] + 1, dtype=torch.float32)
    low, high, _, _, low_byte, high_byte = digits_in_runtime(values, ends)
    for parts, limits in (((low, high), float_digit_ends(ends)), ((low_byte, high_byte), None)):
        assert torch.equal(parts[0] + parts[1], values.int())
        assert int((parts[1] % 256).count_nonzero()) == 0
        for part, limit in zip(parts, limits or (), strict=limits is not None):
            assert limit[0] <= int(part.min()) and int(part.max()) <= limit[1]


def test_bytes_of_int32_numbers_that_are_clamped() -> None:
    """Beyond the range on both sides, and every number in it; at every level, as casts are what optimisers merge."""
    values = torch.cat([torch.arange(-300, 33100), torch.tensor([-(2**31), -65536, 65535, 2**31 - 1])]).int()
    for low, high in ((0, 32767), (5, 20000)):
        g = OnnxGraph()
        g.add_input("n", torch.int32, values.shape)
        x = g.clip(g.cast("n", torch.float32), low, high)
        note_integers(g, x, Integers("n", low, high))
        digits = byte_digits(g, x, (0, high))
        assert [digit.ends for digit in digits] == [(0, 255), (0, high // 256)]
        named = [(g.output(f"y{i}", digit.name), torch.uint8, values.shape) for i, digit in enumerate(digits)]
        file = g.model(["n"], named, "bytes")
        assert "Cast" in kinds(file) and "QuantizeLinear" not in kinds(file)
        for level in LEVELS:
            given = open_session(file.SerializeToString(), level, 1).run(None, {"n": values.numpy()})
            wanted = values.clamp(low, high)
            assert np.array_equal(given[0], (wanted % 256).numpy()) and np.array_equal(
                given[1], (wanted // 256).numpy()
            )


class Inverted(nn.Module):
    """Few channels that become many, a kernel for each of these, and few again; what is many is read twice, too."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.expand = nn.Conv2d(3, 6, 1), nn.Sequential(nn.Conv2d(6, 100, 1), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(100, 100, 3, 2, 1, groups=100), nn.ReLU())
        self.project, self.other = nn.Conv2d(100, 24, 1), nn.Conv2d(100, 24, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        many = self.expand(self.few(x))
        return self.project(self.depthwise(many)) + self.other(many)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "at their ends"])
def test_int16_layers_in_blocks_of_channels_are_exact_at_every_level(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_forms, "_IN_CACHE", 1 << 11)  # so that small images are large ones
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 9, 8, generator=generator)
    torch.manual_seed(2)
    net = Between(Inverted()).eval()
    model = convert_fx(prepared(widen_(net) if weights != "random" else net, (x,), "qint16"))
    file = exported(model, x)
    nodes = [(node.op_type, node.output[0].split("/")[1]) for node in file.graph.node if "/" in node.output[0]]
    assert nodes.count(("MatMul", "expand")) == 7 and nodes.count(("BatchNormalization", "depthwise")) == 7
    assert nodes.count(("Concat", "expand")) == 8  # the weights', and the one that `other` reads
    assert nodes.count(("MatMulInteger", "_generated_add_0")) == 3
    ends = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1e9, 1e9)
    assert_same_bits(file, model, [x, 3 * x, ends, torch.full_like(x, 1e9), torch.full_like(x, -1e9)])
    opened = export_quantized_onnx(
        model, x, io.BytesIO(), input_names=["x"], dynamic_axes={"x": {0: "n", 2: "h", 3: "w"}}
    )
    assert_same_bits(opened, model, [x, torch.randn(1, 3, 11, 13, generator=generator)])


class Deep(nn.Module):
    """Layers of many channels: signed and positive inputs, strides, gaps, borders, residuals, rows of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 128, 1)
        self.dense = nn.Sequential(nn.Conv2d(128, 130, 3, stride=2, padding=1), nn.ReLU())
        self.gaps = nn.Conv2d(130, 128, (3, 1), padding=(2, 0), dilation=(2, 1), bias=False)
        self.left, self.right = nn.Conv2d(128, 128, 1), nn.Sequential(nn.Conv2d(128, 128, 1, stride=2), nn.ReLU())
        self.last = nn.Linear(128, 129)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gaps(self.dense(self.first(x)))
        x = self.right(F.relu(self.left(x) + x))
        return self.last(x.permute(0, 2, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "at their ends"])
def test_int16_layers_of_many_channels_are_exact_at_every_level(weights: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 9, 8, generator=generator)
    torch.manual_seed(2)
    net = Between(Deep()).eval()
    model = convert_fx(prepared(widen_(net) if weights != "random" else net, (x,), "qint16"))
    file = exported(model, x)
    # A digit up to 128 meets the weights, one up to 255 their halves: three products where no input is negative.
    assert kinds(file).count("MatMulInteger") == 4 + 3 + 4 + 3 + 3
    ends = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1e9, 1e9)
    assert_same_bits(file, model, [x, 3 * x, ends, torch.full_like(x, 1e9), torch.full_like(x, -1e9)])


@pytest.mark.parametrize("opset", [11, 21])
def test_int16_layers_of_many_channels_at_other_opsets_and_sizes(opset: int) -> None:
    """Bytes cannot be clamped before opset 12. With bytes, nothing depends on the size of the image."""
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(1))
    model = convert_fx(prepared(Between(Deep()).eval(), (x,), "qint16"))
    axes = {0: "batch"} if opset == 11 else {0: "batch", 2: "height", 3: "width"}
    file = export_quantized_onnx(
        model, x, io.BytesIO(), opset_version=opset, input_names=["x"], dynamic_axes={"x": axes}
    )
    assert ("MatMulInteger" in kinds(file)) == (opset > 11)
    session = open_session(file.SerializeToString(), "enable_all", 1)
    for shape in ((1, 3, 9, 8), (5, 3, 9, 8), *([] if opset == 11 else [(3, 3, 14, 11), (2, 3, 7, 16)])):
        batch = torch.randn(shape)
        with torch.no_grad():
            assert torch.equal(torch.from_numpy(session.run(None, {"x": batch.numpy()})[0]), model(batch))


@pytest.mark.parametrize("is_positive", [True, False])
def test_residuals_of_int16_are_added_in_int32(is_positive: bool) -> None:
    """What is negative is lifted before a cast cuts it off; floors of float64 are not needed."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.before, self.conv = (
                QuantStub(),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(self.quant(x))
            x = F.relu(x) if is_positive else x
            return self.conv(x) + x

    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    model = convert_fx(prepared(Added().eval(), (x,), "qint16"))
    file = exported(model, x)
    assert "Floor" not in kinds(file)
    assert_same_bits(file, model, [x, 3 * x, 1e6 * x, -1e6 * x])


# -- float files -----------------------------------------------------------------------------------------------------


def test_float_files_let_onnx_runtime_fold_batch_normalisation() -> None:
    """A file of float is what others are compared with: it should be as fast as it can be."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.BatchNorm2d(4, affine=False)).eval()
    with torch.no_grad():
        for norm in (net[1], net[3]):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 8, 8)
    file = export_to_onnx(net, x, io.BytesIO())
    assert kinds(file)[:4] == ["Conv", "BatchNormalization", "Clip", "BatchNormalization"]
    with torch.no_grad():
        assert torch.allclose(run_onnx(file, (x,), "on")[0], net(x), atol=1e-5, rtol=1e-5)


class Moved(nn.Module):
    """Linear on tokens whose first axis is another than in the input, as the encoders of detection have it."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order, self.layer = order, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(*self.order))


@pytest.mark.filterwarnings("ignore:int16 weights on bayes")
@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0), (1, 2, 0, 3), (0, 2, 1, 3)], ids=str)
def test_float64_products_of_transposed_tensors(order: tuple[int, ...]) -> None:
    """ONNX Runtime's optimiser ended the process where float64 was made between the transpose and the product."""
    shape = [8 if axis == order[-1] else 2 + axis for axis in range(len(order))]
    batches = [torch.randn(shape) for _ in range(2)]
    wide = get_default_qconfig(activation_qkwargs={"dtype": "qint16"}, weight_qkwargs={"dtype": "qint16"})
    model = convert_fx(prepared(Between(Moved(order)), (batches[0],), "qint16", module_name=[("body", wide)]))
    assert_same_bits(exported(model, batches[0]), model, batches)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("channels", [2, 3])
def test_one_output_that_is_cut_into_an_input_each_is_no_depthwise_layer(
    layer: Any, channels: int, tmp_path: Any
) -> None:
    torch.manual_seed(channels)
    body = layer(channels, 1, 3)
    body.bias.data.fill_(1e4)  # a sum that float32 does not hold
    axes = 2 if layer is nn.Conv2d else 3
    x = torch.randn(2, channels, *[5] * axes)
    assert_one_arithmetic(prepared(Between(body), [x]), [x], tmp_path)


@pytest.mark.parametrize("channels", [1, 4])
def test_an_image_of_one_channel_and_an_output_of_one_column(channels: int, tmp_path: Any) -> None:
    torch.manual_seed(channels)
    body = nn.Sequential(nn.Conv2d(channels, 1, 1), nn.Conv2d(1, 1, 3, (1, 2), 1), nn.Conv2d(1, 2, 1))
    x = torch.randn(3, channels, 5, 2)
    model = prepared(Between(body), [x])
    quantized = assert_one_arithmetic(model, [x], tmp_path)
    with torch.no_grad():
        for laid in (x.contiguous(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)):
            assert torch.equal(model(laid), model(x)) and torch.equal(quantized(laid), quantized(x))
