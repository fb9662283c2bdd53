"""A layer that is one call of a kernel, and nothing else: which layers are, and on which images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.fixed_point import lines
from horizon_plugin_pytorch.qtensor import QTensor, byte_qtensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
from tests.fixed_point.reach import count_calls, needs_all_bytes

pytestmark = needs_all_bytes
KINDS = {"3x3": (32, 12, 3, 3), "depthwise": (32, 1, 3, 3), "1x1": (64, 96, 1, 1)}


@pytest.fixture(autouse=True)
def _on_kernels() -> Iterator[None]:
    """Whatever the environment says of them; and without gradients."""
    fp.use_integer_kernels(True)
    with torch.no_grad():
        yield


def _channels(shape: tuple[int, ...]) -> int:
    return shape[0] if shape[1] == 1 else shape[1]


def _images(shape: tuple[int, ...], *size: int, low: int = -128) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    images = torch.randint(low, 128, (size[0], _channels(shape), *size[1:]), generator=generator).to(torch.int8)
    return images.contiguous(memory_format=torch.channels_last)


def _layer(shape: tuple[int, ...], low: int = -128) -> tuple[fp.ByteLayer, Any]:
    """A layer of small factors, and the same on float32."""
    generator = torch.Generator().manual_seed(len(shape))
    weight = torch.randint(-127, 128, shape, generator=generator).float()
    scale = 10 ** -(torch.rand(shape[0], generator=generator, dtype=torch.float64) * 2 + 2)
    bias = torch.randn(shape[0], generator=generator, dtype=torch.float64) * 30
    groups = shape[0] if shape[1] == 1 else 1
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": -128, "high": 127, "input_range": (low, 127)}
    plan = fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), **facts)
    walk = fp.Geometry([1, 1], [shape[2] // 2] * 2, [1, 1], [0, 0], groups, False)
    layer = fp.ByteLayer.of(plan, walk, (low, 127), 8)
    assert isinstance(layer, fp.ByteLayer)
    return layer, lambda x: fp.conv(x.float(), None, *fp.flatten(plan, walk))


@pytest.mark.parametrize("low", [-128, 0], ids=["signed", "relu"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_gives_the_integers_of_the_layer(kind: str, low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KINDS[kind]
    layer, on_float32 = _layer(shape, low)
    images = _images(shape, 2, 30, 30, low=low)
    assert layer.as_one_call(images) is None  # it has not run
    for _ in range(2):  # the second makes what the third uses
        layer(images, None)
    one = layer.as_one_call(images)
    assert one is not None
    calls = count_calls(monkeypatch)
    out = one(images)
    assert sum(calls.values()) == calls["rounded"] + calls["rounded rows"] == 1
    assert out is not None and out.dtype == torch.int8 and out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out.float(), on_float32(images))


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_takes_images_of_its_shape_type_and_layout(kind: str) -> None:
    shape = KINDS[kind]
    layer, _ = _layer(shape)
    images = _images(shape, 2, 30, 30)
    for _ in range(2):
        layer(images, None)
    one = layer.as_one_call(images)
    assert one is not None and one(images) is not None
    assert one(images.contiguous()) is None
    assert one(images.float()) is None and one(images.to(torch.int16)) is None
    assert one(_images(shape, 1, 30, 30)) is None and one(_images(shape, 2, 15, 60)) is None
    assert layer.as_one_call(_images(shape, 1, 30, 30)) is None  # a shape that it has not had


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_finishes_some_channels_elsewhere_is_not_one_call(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_MOVES", lines._MOVES[:0])  # which leave hardly any channel unproved
    shape = KINDS[kind]
    layer, on_float32 = _layer(shape)
    images = _images(shape, 2, 50, 50)
    calls = count_calls(monkeypatch)
    for _ in range(3):
        calls.clear()
        out = layer(images, None)
        assert out is not None and torch.equal(out.float(), on_float32(images))
    assert calls["rounded"] + calls["rounded rows"] == 1 and sum(calls.values()) > 1  # the rest is a sum of its own
    assert layer.as_one_call(images) is None


def test_a_linear_layer_is_not_one_call() -> None:
    weight = torch.randint(-127, 128, (40, 64), generator=torch.Generator().manual_seed(0)).float()
    facts = {"output_axis": 0, "groups": 1, "weight_bits": 8, "low": -128, "high": 127, "input_range": (-128, 127)}
    scale = torch.full((40,), 1e-3, dtype=torch.float64)
    plan = fp.plan_accumulator(weight, None, scale, torch.tensor([1.0]), **facts)
    layer = fp.ByteLayer.of(plan, None, (-128, 127), 8)
    assert isinstance(layer, fp.ByteLayer)
    rows = torch.ones(2000, 64, dtype=torch.int8)
    for _ in range(3):
        layer(rows, None)
    assert layer.as_one_call(rows) is None


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.layer = QuantStub(), DeQuantStub(), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layer(self.quant(x)))


def _converted(size: int) -> Any:
    torch.manual_seed(0)
    net = Net(nn.Conv2d(12, 32, size, padding=size // 2)).eval()
    model = prepare_qat_fx(net, {"": default_qat_8bit_fake_quant_qconfig}).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(torch.randn(2, 12, 30, 30))
    return convert_fx(model).layer


def _given(images: Tensor) -> QTensor:
    return byte_qtensor(ByteTensor(images), torch.tensor([0.02]), qint8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often kernels run, and layers on bytes as a whole."""
    calls = count_calls(monkeypatch)
    whole = fp.ByteLayer.__call__

    def counted(*args: Any) -> Any:
        calls["layer"] += 1
        return whole(*args)

    monkeypatch.setattr(fp.ByteLayer, "__call__", counted)
    return calls


@pytest.mark.parametrize("size", [3, 1], ids=["3x3", "1x1"])
def test_the_third_call_is_one_of_a_kernel(size: int, calls: Counter[str]) -> None:
    layer, images = _converted(size), _images((32, 12, size, size), 2, 40, 40)
    fp.use_integer_kernels(False)
    expected = layer(_given(images)).int_repr()
    fp.use_integer_kernels(True)
    for _ in range(3):
        calls.clear()
        assert torch.equal(layer(_given(images)).int_repr(), expected)
    assert sum(calls.values()) == calls["rounded"] + calls["rounded rows"] == 1


@pytest.mark.parametrize("size", [3, 1], ids=["3x3", "1x1"])
def test_other_images_are_a_call_of_the_whole_layer(size: int, calls: Counter[str]) -> None:
    """Those with channels first, and of another shape, between others: each gives its own integers."""
    layer, shape = _converted(size), (32, 12, size, size)
    images = _images(shape, 2, 40, 40)
    given = [images, images.contiguous(), images, _images(shape, 1, 40, 40), _images(shape, 2, 20, 80), images]
    fp.use_integer_kernels(False)
    expected = [layer(_given(x)).int_repr() for x in given]
    fp.use_integer_kernels(True)
    for _ in range(2):
        layer(_given(images))
    counts = []
    for x, integers in zip(given, expected, strict=True):
        calls.clear()
        assert torch.equal(layer(_given(x)).int_repr(), integers)
        counts.append(calls["layer"])
    assert counts[:4] == [0, 1, 0, 1]
