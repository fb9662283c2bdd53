"""Layers and products on integer kernels, one at a time: the integers of the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import byte_convs, byte_layers, byte_products, kernels, lines, wide_layers
from horizon_plugin_pytorch.fixed_point.byte_convs import is_on_kernels
from horizon_plugin_pytorch.fixed_point.kernels import Kernels, Walk, disproof
from tests.fixed_point.reach import count_calls, needs_all_bytes, needs_kernels, pretend, with_all_bytes
from tests.fixed_point.test_kernels import rounded_early


class Largest(TorchDispatchMode):
    """The largest tensor that is made, in bytes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.size = max(self.size, made.untyped_storage().nbytes())
        return made


@needs_all_bytes
@pytest.mark.parametrize("limit", [127, 32767], ids=["int8", "int16"])
def test_weights_of_linear_layers_become_bytes_at_once(limit: int) -> None:
    """A layer whose input has a new scale at every step, as in training, makes them at every step."""
    fp.use_integer_kernels(True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (64, 512), generator=generator).float()
    scale, ends = torch.full((64,), 1e-4, dtype=torch.float64), (-limit - 1, limit)
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([10.0]), input_range=ends, **facts)
    layer = fp.ByteLayer.of(plan, None, ends, 8)
    assert layer is not None
    x = torch.randint(-limit - 1, limit + 1, (3, 512), generator=generator).float()
    with Largest() as largest:
        out = layer(x, None)
    assert largest.size == weight.numel()
    assert out is not None and torch.equal(out.float(), fp.linear(x, None, *fp.flatten(plan)))


LAYERS = {
    "dense": ((32, 12, 3, 3), 1),
    "pointwise": ((64, 96, 1, 1), 1),
    "depthwise": ((48, 1, 3, 3), 48),
    "grouped": ((16, 4, 3, 3), 4),
    "one axis": ((24, 16, 3), 1),
    "linear": ((40, 64), 1),
}


def _same_size(weight: tuple[int, ...], groups: int) -> fp.Geometry | None:
    """A convolution whose output is as large as its input; None for a linear layer."""
    axes = len(weight) - 2
    return fp.Geometry([1] * axes, [weight[-1] // 2] * axes, [1] * axes, [0] * axes, groups, False) if axes else None


@needs_kernels
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "not moved"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("low", "high", "lowest"), [(-128, 127, -128), (0, 127, 0), (0, 93, -128)], ids=["int8", "relu", "relu6"]
)
def test_kernels_that_requantize_give_the_integers_of_the_definition(
    kind: str, low: int, high: int, lowest: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:  # hardly any channel is left without a line where factors are moved to one
        monkeypatch.setattr(lines, "_MOVES", lines._MOVES[:0])
    shape, groups = LAYERS[kind]
    generator = torch.Generator().manual_seed(len(kind))
    weight = torch.randint(-127, 128, shape, generator=generator).float()
    weight[0] = -128
    # Small factors, where two roundings are often not the definition: some channels must be finished elsewhere.
    scale = 10 ** -(torch.rand(shape[0], generator=generator, dtype=torch.float64) * 2 + 2)
    bias = torch.randn(shape[0], generator=generator, dtype=torch.float64) * 30
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": low, "high": high}
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), input_range=(lowest, 127), **facts)
    axes = len(shape) - 2
    walk = _same_size(shape, groups)
    layer = fp.ByteLayer.of(plan, walk, (lowest, 127), 8)
    assert layer is not None
    if walk is None and not is_on_kernels((lowest, 127)):
        pytest.skip("a linear layer for whose inputs the kernels of this machine are not exact runs on float32")
    size = (1700, shape[1]) if walk is None else (2, shape[1] * groups, *[3000][: axes % 2], *[48] * axes)[: axes + 2]
    x = torch.randint(lowest, 128, size, generator=generator).float()
    x[0] = 127
    run = fp.linear if walk is None else fp.conv
    expected = run(x, None, *fp.flatten(*([plan] if walk is None else [plan, walk])))
    for _ in range(3):  # the second makes what the third uses
        out = layer(x, None)
        assert out is not None and out.dtype == torch.int8 and torch.equal(out.float(), expected)
    small = x[:1, ..., :9, :9] if axes == 2 else x[:1]
    out = layer(small, None)
    expected = run(small, None, *fp.flatten(*([plan] if walk is None else [plan, walk])))
    assert out is not None and torch.equal(out.float(), expected)
    assert layer._rounding is not None or kind in ("grouped", "linear") or not is_on_kernels((lowest, 127))


@needs_all_bytes
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (0, 127), (-128, 90)])
@pytest.mark.parametrize("lowest", [-128, 0], ids=["signed", "relu"])
@pytest.mark.parametrize("kind", ["linear", "pointwise"])
def test_rows_run_on_a_kernel_of_their_own(
    kind: str, lowest: int, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers and pointwise convolutions, where they have many sums; proved channels and others."""
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(lines, "_MOVES", lines._MOVES[:0])  # which leave hardly any channel unproved
    is_linear = kind == "linear"
    generator = torch.Generator().manual_seed(low + high)
    weight = torch.randint(-127, 128, (100, 64, *[1] * (0 if is_linear else 2)), generator=generator).float()
    scale = 10 ** -(torch.rand(100, generator=generator, dtype=torch.float64) * 2 + 2.1)
    bias = torch.randn(100, generator=generator, dtype=torch.float64) * 30
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": low, "high": high}
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), input_range=(lowest, 127), **facts)
    walk = _same_size(weight.shape, 1)
    layer = fp.ByteLayer.of(plan, walk, (lowest, 127), 8)
    assert layer is not None
    run = (
        (lambda x: fp.linear(x, None, *fp.flatten(plan)))
        if walk is None
        else (lambda x: fp.conv(x, None, *fp.flatten(plan, walk)))
    )
    for count in (100, 500, 1000):  # sums below all limits, between them, above
        size = (count, 64) if is_linear else (2, 64, count // 20, 10)
        x = torch.randint(lowest, 128, size, generator=generator).float()
        expected = run(x)
        for _ in range(3):
            out = layer(x.to(torch.int8), None)
            assert out is not None and out.dtype == torch.int8 and torch.equal(out.float(), expected)
    assert layer._rounding is not None and layer._rounding.has_rows and layer._rounding.rest is not None
    assert calls["rows"] > 0 and calls["rounded rows"] > 0 and calls["products"] > 0
    assert not calls["sums"] and not calls["rounded"]


KERNELS = ["this machine's", "rounds bytes' sums"]


def _take_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_bytes(monkeypatch)
    if kernel == "this machine's":
        if disproof(Kernels()):
            pytest.skip("the kernels of this machine are not exact for all inputs")
        return
    monkeypatch.setattr(byte_convs, "PackedConv", RoundedEarly)
    monkeypatch.setattr(byte_layers, "PackedConv", RoundedEarly)
    monkeypatch.setattr(kernels, "PackedConv", RoundedEarly)


@pytest.mark.parametrize(("lowest", "highest"), [(-128, 127), (-32768, 32767)], ids=["int8", "int16"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "groups", "pieces"),
    [((8, 224, 3, 3), 1, 2), ((8, 2000, 1, 1), 1, 2), ((8, 224, 3, 3), 2, 1)],
    ids=["3x3", "1x1", "groups"],
)
def test_sums_of_bytes_stay_below_the_limit(
    shape: tuple[int, ...], groups: int, pieces: int, kernel: str, lowest: int, highest: int, monkeypatch
) -> None:
    """Without the zero point these pass it nowhere, and one piece would be enough."""
    _take_kernel(kernel, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(37, 53, shape, generator=generator).float()
    assert 128 * float(weight.flatten(1).sum(1).max()) < 2**24 < 255 * float(weight.flatten(1).sum(1).min())
    scale = torch.full((shape[0],), 1.0, dtype=torch.float64)
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": -128, "high": 127}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([2.0]), input_range=(lowest, highest), **facts)
    walk = _same_size(shape, groups)
    layer = fp.ByteLayer.of(plan, walk, (lowest, highest), 8)
    assert layer is not None
    if highest == 127:
        assert plan.parts == 1 and len(layer._pieces) == pieces
    x = torch.randint(-1, 2, (2, shape[1] * groups, 5, 5), generator=generator).float()
    x.mul_(torch.rand(x.shape, generator=generator) < 0.01)  # sums that do not saturate the output: one unit shows
    expected = fp.conv(x, None, *fp.flatten(plan, walk))
    assert expected.unique().numel() > 50
    for _ in range(3):
        out = layer(x, None)
        assert out is not None and torch.equal(out.float(), expected)


LONG_SUMS = {  # weight, groups, range of the input, its numbers, parts of each of its bytes
    "int8": ((8, 224, 3, 3), 1, (-128, 127), (100, 127), []),
    "int8, groups": ((8, 224, 3, 3), 2, (-128, 127), (100, 127), []),
    "int8, cut without the zero point too": ((8, 448, 3, 3), 1, (-128, 127), (100, 127), [3]),
    "int8, no negative numbers": ((8, 448, 3, 3), 1, (0, 127), (100, 127), [2]),
    "int16": ((8, 224, 3, 3), 1, (-32768, 32767), (60 * 256, 85 * 256 + 255), [2, 2]),
    "int16, groups": ((8, 224, 3, 3), 2, (-32768, 32767), (60 * 256, 85 * 256 + 255), [2, 2]),
    "int16, no negative numbers": ((8, 224, 3, 3), 1, (0, 32767), (60 * 256, 85 * 256 + 255), [2, 1]),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", LONG_SUMS)
def test_no_unit_is_lost_in_sums_of_large_bytes(kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is real, so that each unit of the sums shows; what kernels add up as bytes would pass the limit."""
    _take_kernel(kernel, monkeypatch)
    shape, groups, ends, numbers, parts = LONG_SUMS[kind]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(37, 53, shape, generator=generator).float()
    x = torch.randint(numbers[0], numbers[1] + 1, (2, shape[1] * groups, 5, 5), generator=generator).float()
    bias = None
    if parts:  # so that float32 holds the output: the sums themselves pass 2**24
        middle = (numbers[0] + numbers[1]) / 2
        bias = -(middle * weight.flatten(1).sum(1, dtype=torch.float64)).round()
    scale = torch.full((shape[0],), 1.0, dtype=torch.float64)
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": -128, "high": 127}
    plan = fp.plan_accumulator(weight, bias, scale, None, input_range=ends, **facts)
    walk = fp.Geometry([1, 1], [0, 0], [1, 1], [0, 0], groups, False)
    layer = fp.ByteLayer.of(plan, walk, ends, 8)
    if parts:
        assert isinstance(layer, fp.WideLayer) and layer._parts == parts
    else:
        assert isinstance(layer, fp.ByteLayer) and plan.parts == 1

    highest = x if ends[1] == 127 else (x / 256).floor()
    zero_point = 128 if ends[0] < 0 else 0
    if zero_point:
        raw = F.conv2d((highest + zero_point).double(), weight.double(), groups=groups)
        assert float(raw.min()) > 2**24
        whole = RoundedEarly(weight, Walk(groups=groups), zero_point, x.shape)
        exact = F.conv2d(highest.double(), weight.double(), groups=groups)
        assert not torch.equal(whole(whole.taken(highest), None).double(), exact)

    expected = F.conv2d(x.double(), weight.double(), bias, groups=groups)
    assert float(expected.abs().max()) < 2**24 and expected.unique().numel() == expected.numel()
    for given in (x, x.to(torch.int8 if ends[1] == 127 else torch.int16)):
        out = layer(given, None)
        assert out is not None and torch.equal(out.double(), expected)
    convs = [piece.conv for piece in layer._pieces] if isinstance(layer, fp.WideLayer) else list(layer._convs)
    assert len(convs) == (sum(parts) if parts else 2 // groups)
    if kind == "int8, groups":  # of which no kernel has a part
        assert isinstance(convs[0], byte_convs.FloatConv)
    else:
        assert all(isinstance(conv, kernels.PackedConv) for conv in convs)


@pytest.mark.parametrize(("reach", "pieces"), [(kernels.Reach.BYTES, 2), (kernels.Reach.SEVEN_BITS, 1)], ids=str)
def test_sums_on_float32_are_not_cut_for_a_zero_point(
    reach: kernels.Reach, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_bytes(monkeypatch)
    if reach is kernels.Reach.SEVEN_BITS:
        pretend(monkeypatch, reach)
    weight = torch.full((8, 224, 3, 3), 45.0)
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127, "input_range": (-128, 127)}
    plan = fp.plan_accumulator(weight, None, torch.ones(8, dtype=torch.float64), torch.tensor([2.0]), **facts)
    layer = fp.ByteLayer.of(plan, _same_size((8, 224, 3, 3), 1), (-128, 127), 8)
    assert isinstance(layer, fp.ByteLayer) and len(layer._pieces) == pieces


class RoundedEarly(kernels.PackedConv):
    """Sums of bytes that become float32 before the zero point is taken off, in the place of the kernel."""

    def __init__(self, weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> None:
        self._zero_point = zero_point
        self._stand_in = rounded_early(weight, walk, zero_point, shape)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._stand_in(x, bias).contiguous(memory_format=torch.channels_last)

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
        return self._stand_in.rounded(x, scale, offset, low, high).contiguous(memory_format=torch.channels_last)


@needs_all_bytes
@pytest.mark.parametrize("lowest", [-128, 0], ids=["signed", "relu"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("axes", [1, 2])
def test_few_pixels_are_rows_of_a_matrix(axes: int, has_residual: bool, lowest: int) -> None:
    generator = torch.Generator().manual_seed(axes)
    weight = torch.randint(-127, 128, (24, 33, *[1] * axes), generator=generator).float()
    weight[0], weight[1] = -128, 127
    scale = torch.rand(24, generator=generator, dtype=torch.float64).add_(0.1).mul_(1e-3)
    bias = torch.randn(24, generator=generator, dtype=torch.float64) * 30
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127}
    if has_residual:
        facts["residual_scale"] = torch.tensor([0.37])
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), input_range=(lowest, 127), **facts)
    walk = fp.Geometry([1] * axes, [0] * axes, [1] * axes, [0] * axes, 1, False)
    layer = fp.ByteLayer.of(plan, walk, (lowest, 127), 8)
    assert layer is not None
    x = torch.randint(lowest, 128, (2, 33, *[9] * axes), generator=generator).float()
    x[0, ..., 0], x[1, ..., 0] = 127, lowest
    residual = torch.randint(-128, 128, (2, 24, *[9] * axes), generator=generator).float() if has_residual else None
    expected = fp.conv(x, residual, *fp.flatten(plan, walk))
    given = [x, x.to(torch.int8)]
    given += [x.to(torch.int8).contiguous(memory_format=torch.channels_last)] if axes == 2 else []
    for taken in given:
        added = None if residual is None else residual.to(taken.dtype)
        out = layer(taken, added)
        assert out is not None and out.dtype == torch.int8 and torch.equal(out.float(), expected)
    assert layer._matrix is not None and not layer._convs


@pytest.mark.skipif("wrong sums" in kernels.products_disproof(Kernels()), reason="products are not exact here")
@needs_kernels
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_small_weights_take_the_routes_of_vnni_on_any_machine(
    kind: str, bits: int, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products of a byte and a weight up to 60 fit into 16 bits."""
    with_all_bytes(monkeypatch)
    shape, groups = LAYERS[kind]
    axes = len(shape) - 2
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randint(-60, 61, shape, generator=generator).float()
    low, high = (-128, 127) if bits == 8 else (-32768, 32767)
    scale = torch.rand(shape[0], generator=generator, dtype=torch.float64).add_(0.5).mul_(1.0 / high)
    bias = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": low, "high": high}
    if has_residual:
        facts |= {"residual_scale": torch.tensor([0.37]), "residual_bits": bits}
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([0.5]), input_range=(low, high), **facts)
    walk = _same_size(shape, groups)
    layer = fp.ByteLayer.of(plan, walk, (low, high), 8)
    assert layer is not None
    storage = torch.int8 if bits == 8 else torch.int16
    run, constants = (fp.linear, [plan]) if walk is None else (fp.conv, [plan, walk])
    for size in (9, 40):  # few pixels, and many
        x = torch.randint(low, high + 1, (2, shape[1] * groups, *[size] * axes), generator=generator).float()
        x = x if axes else x.repeat(size, 1)
        residual = None
        if has_residual:
            there = run(x, torch.zeros(()), *fp.flatten(*constants)).shape
            residual = torch.randint(low, high + 1, there, generator=generator).float()
        expected = run(x, residual, *fp.flatten(*constants))
        for _ in range(3):  # the second makes what the third uses
            for given in (torch.float32, storage):
                out = layer(x.to(given), None if residual is None else residual.to(given))
                assert out is not None and torch.equal(out.float(), expected)


TRANSPOSED = {  # weight, stride, padding, output padding, groups
    "twice, kernel 4": ((6, 5, 4, 4), (2, 2), (1, 1), (0, 0), 1),
    "twice, kernel 3": ((6, 5, 3, 3), (2, 2), (1, 1), (1, 1), 1),
    "side by side": ((6, 5, 2, 2), (2, 2), (0, 0), (0, 0), 1),
    "stride 1": ((6, 5, 3, 5), (1, 1), (1, 2), (0, 0), 1),
    "gaps": ((6, 5, 2, 1), (3, 2), (0, 0), (1, 1), 1),
    "groups": ((12, 4, 3, 4), (2, 3), (1, 1), (1, 0), 3),
    "one axis": ((6, 5, 4), (2,), (1,), (1,), 1),
    "one output": ((6, 1, 4, 4), (2, 2), (1, 1), (0, 0), 1),
}


@needs_kernels
@pytest.mark.parametrize("kind", TRANSPOSED)
@pytest.mark.parametrize("bits", [7, 8, 16])
def test_transposed_convolutions_are_the_convolutions_of_their_phases(
    bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, stride, padding, output_padding, groups = TRANSPOSED[kind]
    if bits > 7:  # small weights, of which no machine saturates two products
        with_all_bytes(monkeypatch)
    fp.use_integer_kernels(True)
    generator = torch.Generator().manual_seed(bits)
    largest, (low, high) = (127 if bits == 7 else 60), {7: (0, 127), 8: (-128, 127), 16: (-32768, 32767)}[bits]
    weight = torch.randint(-largest, largest + 1, shape, generator=generator).float()
    outputs = shape[1] * groups
    scale = torch.rand(outputs, generator=generator, dtype=torch.float64).add_(0.5).mul_(1e-2 / (high >> 6))
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64)
    limits = {"low": -128, "high": 127} if bits < 16 else {"low": -32768, "high": 32767}
    facts = {"output_axis": 1, "groups": groups, "weight_bits": 8, **limits}
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([0.05]), input_range=(low, high), **facts)
    axes = len(stride)
    walk = fp.Geometry(list(stride), list(padding), [1] * axes, list(output_padding), groups, True)
    layer = fp.ByteLayer.of(plan, walk, (low, high), 8)
    assert isinstance(layer, fp.TransposedLayer)
    x = torch.randint(low, high + 1, (2, shape[0], *(5, 7)[-axes:]), generator=generator).float()
    expected = fp.conv(x, None, *fp.flatten(plan, walk))
    for given in (x, x.to(torch.int16 if bits == 16 else torch.int8), x[:, :, :1], x):
        out = layer(given, None)
        assert out is not None and out.dtype == (torch.int16 if bits == 16 else torch.int8)
        assert torch.equal(out.float(), fp.conv(given.float(), None, *fp.flatten(plan, walk)))
    alone = layer(x[0], None)
    assert alone is not None and torch.equal(alone.float(), expected[0])
    assert layer(x, expected) is None


@needs_kernels
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 3), (1, 2), (4, 6), (6, 4)])
def test_groups_that_are_not_of_four_channels_run_on_float32(inputs: int, outputs: int) -> None:
    """oneDNN has no kernel for them, and takes many times as long."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (5 * outputs, inputs, 3, 3), generator=generator)
    (packed,) = byte_convs.pack([weight.to(torch.int8)], Walk(groups=5), (0, 127), torch.Size([1, 5 * inputs, 8, 8]))
    assert isinstance(packed, byte_convs.FloatConv)
    x = torch.randint(0, 128, (1, 5 * inputs, 8, 8), generator=generator)
    sums = packed(packed.taken(x.to(torch.int8)), None)
    assert torch.equal(sums.double(), F.conv2d(x.double(), weight.double(), groups=5))


UNSUPPORTED = {  # weight, image, stride, padding, dilation, groups: oneDNN's kernels give other numbers, or crash
    "padding alone, above": ((3, 1, 2, 2), (5, 5), (1, 1), (2, 0), (1, 1), 1),
    "padding alone, beside": ((16, 16, 3, 3), (5, 5), (1, 1), (1, 3), (1, 1), 1),
    "padding alone, pointwise": ((4, 4, 1, 1), (5, 5), (1, 1), (1, 1), (1, 1), 1),
    "padding alone, depthwise": ((8, 1, 5, 5), (6, 6), (1, 1), (5, 5), (1, 1), 8),
    "padding alone, one axis": ((16, 16, 3), (9,), (1,), (4,), (1,), 1),
    "over the image": ((16, 16, 2, 2), (7, 1), (1, 1), (1, 1), (1, 2), 1),
    "one column": ((16, 1, 3, 3), (9, 5), (1, 3), (1, 0), (1, 1), 1),
}
SUPPORTED = {
    "padding as wide as the image": ((4, 4, 3, 3), (1, 1), (1, 1), (2, 2), (1, 1), 1),
    "stride over the padding": ((4, 4, 1, 1), (6, 6), (2, 2), (0, 0), (1, 1), 1),
    "wide dilation": ((4, 4, 3, 3), (5, 5), (1, 1), (4, 4), (4, 4), 1),
    "over the image, not met": ((4, 4, 3, 3), (1, 1), (1, 1), (2, 2), (2, 2), 1),
    "one column": ((16, 1, 3, 3), (9, 5), (2, 3), (0, 1), (1, 1), 1),
    "one row of one column": ((16, 1, 3, 3), (3, 5), (1, 3), (0, 0), (1, 1), 1),
}


@needs_all_bytes
@pytest.mark.parametrize("kind", [*UNSUPPORTED, *(f"{name}, supported" for name in SUPPORTED)])
@pytest.mark.parametrize("bits", [8, 16])
def test_what_the_kernels_do_not_compute_is_left_to_float32(bits: int, kind: str) -> None:
    is_supported = kind.endswith(", supported")
    shape, image, stride, padding, dilation, groups = (
        SUPPORTED[kind.removesuffix(", supported")] if is_supported else UNSUPPORTED[kind]
    )
    generator = torch.Generator().manual_seed(bits)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    weight = torch.randint(-127, 128, shape, generator=generator).float()
    scale = torch.full((shape[0],), 1e-2 / (high >> 6), dtype=torch.float64)
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": low, "high": high}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([0.05]), input_range=(low, high), **facts)
    walk = fp.Geometry(list(stride), list(padding), list(dilation), [0] * len(stride), groups, False)
    layer = fp.ByteLayer.of(plan, walk, (low, high), 8)
    assert layer is not None
    x = torch.randint(low, high + 1, (2, shape[1] * groups, *image), generator=generator).float()
    for _ in range(3):  # the second makes what the third uses
        out = layer(x, None)
        assert (out is not None) == is_supported
        assert out is None or torch.equal(out.float(), fp.conv(x, None, *fp.flatten(plan, walk)))


def test_other_transposed_convolutions_have_no_kernel() -> None:
    weight, scale = torch.ones(3, 4, 3, 3), torch.full((4,), 1e-3, dtype=torch.float64)
    facts = {"output_axis": 1, "groups": 1, "weight_bits": 8, "low": -128, "high": 127, "input_range": (0, 127)}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([0.05]), **facts)
    assert fp.ByteLayer.of(plan, fp.Geometry([2, 2], [0, 0], [2, 2], [0, 0], 1, True), (0, 127), 8) is None
    depthwise = fp.plan_accumulator(torch.ones(4, 1, 3, 3), None, scale, torch.tensor([0.05]), **{**facts, "groups": 4})
    assert fp.ByteLayer.of(depthwise, fp.Geometry([2, 2], [0, 0], [1, 1], [0, 0], 4, True), (0, 127), 8) is None
    # Output padding beyond what the last pixel reaches.
    assert fp.ByteLayer.of(plan, fp.Geometry([3, 3], [0, 0], [1, 1], [2, 2], 1, True), (0, 127), 8) is None


PRODUCTS = {  # shapes of two operands
    "matrices": ((96, 80), (80, 64)),
    "heads": ((2, 3, 65, 64), (2, 3, 64, 70)),
    "one for all": ((4, 65, 64), (64, 70)),
    "broadcast": ((2, 1, 65, 64), (3, 64, 70)),
    "long sums": ((33, 2100), (2100, 40)),
}


@pytest.mark.skipif("wrong sums" in kernels.products_disproof(Kernels()), reason="products are not exact here")
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("bits", [(8, 8), (16, 8), (8, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("is_real", [False, True], ids=["integers", "real"])
def test_products_of_activations_are_those_of_the_definition(
    bits: tuple[int, int], kind: str, is_real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_bytes(monkeypatch)
    generator = torch.Generator().manual_seed(sum(bits))
    limits = [(-(1 << (n - 1)), (1 << (n - 1)) - 1) for n in bits]
    a, b = (
        torch.randint(low, high + 1, shape, generator=generator).float()
        for shape, (low, high) in zip(PRODUCTS[kind], limits, strict=True)
    )
    a[..., 0, :], b[..., 0] = limits[0][1], limits[1][0]  # the largest sum
    a[..., 1, :] = limits[0][0]
    bound = float(a.shape[-1] * limits[0][0] * limits[1][0])
    factor = torch.tensor([3e-7 if is_real else 300 / bound], dtype=torch.float64)
    is_double = fp.is_beyond_float32(bound)
    factor = (
        factor if is_double and is_real else factor.float() if is_real else fp.choose_factor(factor, -128, 127, bound)
    )
    settings = (factor, is_double, -128, 127, is_real)
    expected = fp.matmul(a, b, *settings)
    small = [x.to(torch.int8 if n == 8 else torch.int16) for x, n in zip((a, b), bits, strict=True)]
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in small]
    for left, right in ((a, b), small, turned):
        out = fp.matmul_on_bytes(left, right, tuple(limits), *settings)
        assert out is not None and out.dtype == (torch.float32 if is_real else torch.int8)
        assert torch.equal(out.float(), expected)


@needs_all_bytes
@pytest.mark.parametrize("limits", [(-128, 127), (0, 127), (-32768, 32767)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_products_are_finished_some_at_a_time(
    at_once: int, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads as attention has them: views of one tensor, one of them with other axes last."""
    fp.use_integer_kernels(True)
    monkeypatch.setattr(byte_products, "_GROUP", at_once * 50 * 50)
    generator = torch.Generator().manual_seed(0)
    parts = torch.randint(-128, 128, (3, 50, 3, 2, 64), generator=generator).to(torch.int8)
    parts[0, :, :, 0] = -128
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
    ends, factor = ((-128, 127), (-128, 127)), torch.tensor([2.0**-11 / 3])
    for left, right in ((query, key.transpose(-2, -1)), (key.transpose(-2, -1), value), (query, value[:1].mT)):
        out = fp.matmul_on_bytes(left, right, ends, factor, False, *limits, False)
        assert out is not None and out.dtype == (torch.int16 if limits[1] > 127 else torch.int8)
        assert torch.equal(out.float(), fp.matmul(left.float(), right.float(), factor, False, *limits, False))


def test_small_products_are_left_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_bytes(monkeypatch)
    a = torch.ones(4, 8)
    ends = ((-128, 127), (-128, 127))
    assert fp.matmul_on_bytes(a, a.t(), ends, torch.tensor([0.1]), False, -128, 127, False) is None
    assert (
        fp.matmul_on_bytes(torch.ones(900), torch.ones(900, 300), ends, torch.tensor([0.1]), False, 0, 1, False) is None
    )


def test_a_layer_that_has_no_kernel_says_so() -> None:
    weight = torch.full((4, 3, 1, 1), 9.0)
    scale = torch.full((4,), 1e-4, dtype=torch.float64)
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([0.01]), input_range=(-128, 127), **facts)
    flat = fp.Geometry([1, 1], [0, 0], [1, 1], [0, 0], 1, False)
    assert fp.ByteLayer.of(plan, flat, (-128, 127), 8) is not None
    assert fp.ByteLayer.of(plan, flat, (-128, 127), 16) is None
    assert fp.ByteLayer.of(plan, fp.Geometry([1] * 3, [0] * 3, [1] * 3, [0] * 3, 1, False), (-128, 127), 8) is None
    layer = fp.ByteLayer.of(plan, flat, (-128, 127), 8)
    assert layer is not None
    assert layer(torch.empty(0, 3, 2, 2), None) is None


@needs_kernels
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("lowest", [-(1 << 15), 0], ids=["signed", "relu"])
@pytest.mark.parametrize(("outputs", "inputs", "stride"), [(1, 1, 1), (24, 33, 2), (130, 512, 1)])
def test_pointwise_layers_of_two_bytes(outputs: int, inputs: int, stride: int, lowest: int, has_residual: bool) -> None:
    """As products of bytes or, where kernels have none that is exact, of float64."""
    generator = torch.Generator().manual_seed(outputs)
    limits = (lowest, (1 << 15) - 1)
    weight = torch.randint(-128, 128, (outputs, inputs, 1, 1), generator=generator).float()
    weight[0] = -128
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": limits[0], "high": limits[1], "residual_bits": 16}
    scale = torch.rand(outputs, generator=generator, dtype=torch.float64).mul_(1e-3).add_(1e-4)
    if has_residual:
        facts["residual_scale"] = torch.tensor([0.3])
    bias = torch.randn(outputs, generator=generator) * 30
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([2.0]), input_range=limits, **facts)
    walk = fp.Geometry([stride, stride], [0, 0], [1, 1], [0, 0], 1, False)
    layer = fp.ByteLayer.of(plan, walk, limits, 8)
    assert isinstance(layer, fp.WideLayer)
    x = torch.randint(lowest, 1 << 15, (2, inputs, 9, 7), generator=generator).float()
    x[0] = lowest or limits[1]
    residual = None
    if has_residual:
        size = (2, outputs, -(-9 // stride), -(-7 // stride))
        residual = torch.randint(-(1 << 15), 1 << 15, size, generator=generator).float()
    expected = fp.conv(x, residual, *fp.flatten(plan, walk))
    for given in (x, x.short(), x.short().contiguous(memory_format=torch.channels_last)):
        out = layer(given, None if residual is None else residual.short())
        assert out is not None and torch.equal(out.float(), expected)


@needs_all_bytes
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("block", [1, 600, 1 << 18])
@pytest.mark.parametrize("kind", ["dense", "depthwise", "pointwise", "linear"])
def test_int16_layers_do_not_depend_on_the_size_of_blocks(
    kind: str, block: int, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block is smaller than the others, and all of them write to the same memory."""
    fp.use_integer_kernels(True)
    monkeypatch.setattr(wide_layers, "_BLOCK", block)
    monkeypatch.setattr(wide_layers, "_MOST_ROW_SUMS", 5 * block)
    shape, groups = LAYERS[kind]
    generator = torch.Generator().manual_seed(0)
    limits = (-(1 << 15), (1 << 15) - 1)
    weight = torch.randint(-128, 128, shape, generator=generator).float()
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": limits[0], "high": limits[1]}
    if has_residual:
        facts |= {"residual_bits": 16, "residual_scale": torch.tensor([0.3])}
    scale = torch.rand(shape[0], generator=generator, dtype=torch.float64).mul_(1e-3).add_(1e-4)
    plan = fp.plan_accumulator(weight, scale * 7, scale, torch.tensor([0.5]), input_range=limits, **facts)
    walk = None if kind == "linear" else fp.Geometry([1, 1], [0, 0], [1, 1], [0, 0], groups, False)
    layer = fp.ByteLayer.of(plan, walk, limits, 8)
    assert isinstance(layer, fp.WideLayer)
    size = (37, shape[1]) if walk is None else (3, shape[1] * groups, 9, 7)
    x = torch.randint(limits[0], limits[1] + 1, size, generator=generator).float()
    x[0] = limits[0]
    run = fp.linear if walk is None else fp.conv
    constants = fp.flatten(plan) if walk is None else fp.flatten(plan, walk)
    residual = torch.randint_like(run(x, None, *constants), *limits).short() if has_residual else None
    expected = run(x, None if residual is None else residual.float(), *constants)
    out = layer(x.short(), residual)
    assert out is not None and torch.equal(out.float(), expected)


@needs_all_bytes
@pytest.mark.parametrize("rows", [1, 7, 8, 23])
def test_rows_of_a_linear_layer_are_cut_evenly(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_layers, "_CHUNK", 7 * 64)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-128, 128, (40, 64), generator=generator).float()
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127}
    scale = torch.rand(40, generator=generator, dtype=torch.float64).mul_(1e-3).add_(1e-4)
    plan = fp.plan_accumulator(weight, scale * 9, scale, torch.tensor([0.5]), input_range=(-128, 127), **facts)
    layer = fp.ByteLayer.of(plan, None, (-128, 127), 8)
    assert isinstance(layer, fp.ByteLayer)
    sizes: list[int] = []
    sums_of = layer._sums_of_rows
    monkeypatch.setattr(layer, "_sums_of_rows", lambda part: sizes.append(len(part)) or sums_of(part))
    x = torch.randint(-128, 128, (rows, 64), generator=generator).to(torch.int8)
    out = layer(x, None)  # the first time it does not look for a kernel that rounds
    assert out is not None and torch.equal(out.float(), fp.linear(x.float(), None, *fp.flatten(plan)))
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= len(sizes)


@needs_kernels
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(64, 64, 16), (5, 65, 16), (64, 65, 1), (1, 3, 4)])
def test_rows_that_lie_in_one_place_are_as_many_rows(rows: int, inputs: int, outputs: int, bits: int) -> None:
    """The kernel takes rows one after another: of those of an `expand` it gave other numbers."""
    if bits == 16 and not kernels.has_products():
        pytest.skip("bytes have no exact products here: such layers run on float32")
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator).float()
    scale = torch.full((outputs,), 1e-2 / (high >> 6), dtype=torch.float64)
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": low, "high": high, "input_range": (low, high)}
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([0.05]), **facts)
    layer = fp.ByteLayer.of(plan, None, (low, high), 8)
    assert layer is not None
    x = torch.randint(low, high + 1, (rows, inputs), generator=generator).to(torch.int8 if bits == 8 else torch.int16)
    spread = torch.stack([x, x + 1], -1).flatten(1)[:, ::2]
    for given in (x[:1].expand_as(x), x[:, :1].expand_as(x), x.t().contiguous().t(), spread):
        for _ in range(3):  # the second makes what the third uses
            out = layer(given, None)
            assert out is None or torch.equal(out.float(), fp.linear(given.float(), None, *fp.flatten(plan)))
