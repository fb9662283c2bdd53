"""Models on integer kernels: the same bits as without, and integers that travel between layers as bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.models import TransformerBlock
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.fixed_point.kernels import (
    Reach,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor, byte_qtensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.fixed_point.reach import needs_all_bytes, needs_kernels, pretend


class Net(nn.Module):
    """Layers of every kind, a residual, and what is not on kernels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, 1, "same", groups=4)
        self.wrapped = nn.Conv2d(16, 16, 3, 1, 1, padding_mode="circular")
        self.reflected = nn.Conv2d(16, 16, 3, 1, 1, padding_mode="reflect", bias=False)
        self.pointwise = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.grouped(F.relu(self.depthwise(x)))
        y = self.reflected(self.wrapped(y))
        x = F.relu(self.pointwise(y) + x)
        x = F.max_pool2d(x, 2)
        return self.head(x.flatten(2).transpose(1, 2)).mean(1)


def models(dtype: QuantDType = qint8) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    set_march(March.BAYES)
    data = torch.randn(4, 3, 16, 16)
    qat = prepare_qat_fx(
        QuantWrapper(Net()).eval(), {"": get_default_qconfig(activation_qkwargs={"dtype": dtype})}
    ).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat, convert_fx(qat), data


@needs_kernels
@pytest.mark.parametrize("reach", [Reach.BYTES, Reach.SEVEN_BITS])
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_models_give_the_same_bits_with_and_without(
    dtype: QuantDType, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, reach)
    qat, quantized, data = models(dtype)
    results = []
    with torch.no_grad():
        for is_wanted in (True, False, True):
            fp.use_integer_kernels(is_wanted)
            assert fp.are_kernels_used() is is_wanted
            results += [qat(data), quantized(data), quantized(data[:1].expand(4, -1, -1, -1))]
        with torch.inference_mode():
            fp.use_integer_kernels(True)
            results += [qat(data), quantized(data), quantized(data[:1].expand(4, -1, -1, -1))]
    for first, other in zip(results[:3] * 3, results[3:], strict=True):
        assert torch.equal(first, other)
    assert torch.equal(results[0], results[1])


@needs_kernels
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_several_threads_give_the_same_bits(dtype: QuantDType) -> None:
    fp.use_integer_kernels(True)
    _, quantized, data = models(dtype)
    expected: list[Tensor] = []
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(5):
                found.append(quantized(data))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fp.use_integer_kernels(False)
    with torch.no_grad():
        expected.append(quantized(data))
    assert len(found) == 20 and all(torch.equal(out, expected[0]) for out in found)


@needs_kernels
def test_written_weights_are_seen() -> None:
    fp.use_integer_kernels(True)
    qat, quantized, data = models()
    with torch.no_grad():
        before = qat(data), quantized(data)
        for module in quantized.modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dtype == torch.int8:
                module.weight.data.neg_()
        qat.module.head.weight.data.mul_(-0.5)
        after = qat(data), quantized(data)
        fp.use_integer_kernels(False)
        assert torch.equal(after[0], qat(data)) and torch.equal(after[1], quantized(data))
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@needs_kernels
def test_programs_and_traces_have_the_operators_of_before() -> None:
    from horizon_plugin_pytorch.program import record_program
    from horizon_plugin_pytorch.program.exported import exported_program

    fp.use_integer_kernels(True)
    _, quantized, data = models()
    with torch.no_grad():
        expected = quantized(data)
        program = record_program(quantized, data)
        traced = torch.jit.trace(quantized, data, check_trace=False)
        exported = exported_program(program).module()
        assert torch.equal(program(data), expected)
        assert torch.equal(traced(data), expected)
        assert torch.equal(exported(data)[0], expected)
    for text in (str(program), str(traced.inlined_graph), str(exported.graph)):
        assert "horizon" in text and "conv" in text and "onednn" not in text and "int_mm" not in text


@needs_kernels
def test_integers_travel_as_bytes_until_somebody_asks() -> None:
    fp.use_integer_kernels(True)
    _, quantized, data = models()
    seen: list[QTensor] = []
    layers = [m for m in quantized.modules() if type(m).__name__.startswith("Conv")]
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, out: seen.append(out))
    with torch.no_grad():
        quantized(data)
    assert any(x._bytes is not None for x in seen)
    for x in seen:
        integers = x.plain()
        assert x._bytes is None and integers.is_contiguous() and integers.dtype == torch.float32
        assert torch.equal(x.int_repr(), integers.to(torch.int8))
        low, high = x.range
        assert low <= int(integers.min()) and int(integers.max()) <= high


def test_pooling_leaves_bytes_as_they_are() -> None:
    values = torch.arange(-32, 32, dtype=torch.int8).reshape(1, 1, 8, 8)
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(values), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        pooled = F.max_pool2d(x, 2)
        assert x.has_bytes and isinstance(pooled, QTensor) and pooled.has_bytes
        assert torch.equal(pooled.as_grid(), F.max_pool2d(values.float(), 2))


@needs_kernels
@pytest.mark.parametrize("act", [nn.SiLU, nn.Hardswish, nn.Sigmoid])
def test_tables_leave_bytes_to_the_next_layer(act: type[nn.Module]) -> None:
    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    layers = [nn.Conv2d(32, 32, 3, padding=1), act(), nn.Conv2d(32, 32, 3, padding=1), act(), nn.Conv2d(32, 8, 1)]
    data = torch.randn(2, 32, 15, 17)
    qat = prepare_qat_fx(nn.Sequential(QuantStub(), *layers).eval(), {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert_fx(qat)
    seen: list[bool] = []
    for name in "35":
        quantized.get_submodule(name).register_forward_pre_hook(lambda module, xs: seen.append(xs[0].has_bytes))
    with torch.no_grad():
        on_bytes = [model(data).int_repr() for model in (quantized, qat)]
        assert seen == [True, True]
        fp.use_integer_kernels(False)
        assert all(torch.equal(model(data).int_repr(), x) for model, x in zip((quantized, qat), on_bytes, strict=True))


class Neck(nn.Module):
    """Branches of different ranges that are joined, resized and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
        self.third = nn.Conv2d(8, 4, 1)
        self.joined = nn.Sequential(nn.Conv2d(20, 8, 3, 1, 1), nn.ReLU())
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.first(x)
        z = self.second(y)
        y = self.joined(torch.cat([y, z * 3.0, self.third(z)], 1))
        return self.last(torch.cat([F.interpolate(y, scale_factor=2.0), x.relu()], dim=1))


@needs_kernels
@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
def test_joined_and_resized_images_stay_bytes(method: str) -> None:
    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    torch.manual_seed(0)
    data = torch.randn(2, 8, 18, 14)
    qat = prepare(Neck().eval(), (data,), qconfig_dict={"": get_default_qconfig()}, method=method, out_dir=None)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert(qat)
    seen: list[tuple[bool, int]] = []
    for name in ("joined.0", "last"):
        layer = quantized.get_submodule(name)
        layer.register_forward_pre_hook(lambda module, xs: seen.append((xs[0].has_bytes, xs[0].range[0])))
    with torch.no_grad():
        on_bytes = [model(data).int_repr() for model in (quantized, qat)]
        fp.use_integer_kernels(False)
        on_floats = [model(data).int_repr() for model in (quantized, qat)]
    assert seen[:2] == [(True, -128), (True, 0)]  # of the second, nothing is negative
    assert all(torch.equal(out, on_bytes[0]) for out in (*on_bytes, *on_floats))


VIEWS = {
    "reshape": lambda x: x.reshape(4, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(-1, -2),
    "movedim": lambda x: torch.movedim(x, 1, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "select": lambda x: x.select(2, 1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "slice": lambda x: x[:, 1:, ..., ::2],
    "last": lambda x: x[:, -1],
    "new axis": lambda x: x[:, None],
    "moved and contiguous": lambda x: x.flatten(2).transpose(1, 2).contiguous().view(2, -1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: torch.split(x, 3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
}
VALUES = (torch.arange(-40, 40) * 3).to(torch.int8).reshape(2, 4, 5, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_bytes_are_bytes(name: str, layout: torch.memory_format) -> None:
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        x.set_range(-120, 117)
        seen = VIEWS[name](x)
        assert isinstance(seen, QTensor) and seen.has_bytes and x.has_bytes and seen.is_integer == is_integer
        expected = VIEWS[name](VALUES.float())
        assert seen.shape == expected.shape and seen.range == (-120, 117) and seen.q_scale().item() == 0.5
        assert torch.equal(seen.as_grid(), expected) and torch.equal(seen.dequantize(), expected * 0.5)
        assert torch.equal(x.as_grid(), VALUES.float())


def shows_the_same_bytes(x: QTensor, other: QTensor) -> bool:
    return x.has_bytes and other.has_bytes and x.as_bytes() is other.as_bytes()


COPIES = {  # where the bytes need not move: what is contiguous there, of images or not, is not in float
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "channels last, then rows": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1),
    "rows of channels": lambda x: x.flatten(2).transpose(1, 2).contiguous(),
    "channels first": lambda x: x.permute(0, 3, 1, 2).contiguous(),
    "indexed": lambda x: x[:, torch.tensor([0, 3])].contiguous(),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("is_read", [False, True], ids=["bytes", "floats"])
@pytest.mark.parametrize("name", COPIES)
def test_what_float_copies_is_no_view(name: str, is_read: bool, layout: torch.memory_format) -> None:
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    if is_read:
        x.as_grid()
    copy = COPIES[name](x)
    copy.relu_()
    assert torch.equal(x.as_grid(), VALUES.float())
    assert torch.equal(copy.as_grid(), COPIES[name](VALUES.float()).relu())


@pytest.mark.parametrize("reads", ["nobody", "view", "base"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
def test_what_contiguous_gives_is_never_changed_unseen(layout: torch.memory_format, reads: str) -> None:
    """In float it may be a copy, where the numbers that are here need none."""
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    for view in (x, x.permute(0, 2, 3, 1), x.permute(0, 3, 1, 2), x.transpose(1, 2)):
        if reads != "nobody":
            (view if reads == "view" else x).as_grid()
        former, expected = view.contiguous(), view.as_grid().clone()
        assert former is not view
        former.relu_()
        assert torch.equal(former.as_grid(), expected.relu())
        try:
            now = view.as_grid()
        except UnsupportedOperatorError:
            break
        assert torch.equal(now, expected)


def test_images_of_bytes_can_be_viewed_as_in_float() -> None:
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=torch.channels_last)), torch.tensor([0.5]), qint8)
    assert shows_the_same_bytes(x, x.contiguous())
    assert torch.equal(x.contiguous(memory_format=torch.channels_last).as_grid(), VALUES.float())
    assert torch.equal(x.view(2, -1).as_grid(), VALUES.float().view(2, -1))
    assert x.is_contiguous()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("first", ["base", "view", "neither"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_bytes_is_stale_after_a_write_to_its_base(name: str, first: str, layout: torch.memory_format) -> None:
    """Also where the float32 numbers of one of them have memory of their own by then."""
    if name == "moved and contiguous":  # a copy
        return
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    seen = VIEWS[name](x)
    other = seen[..., :1] if first == "view" else seen
    if first != "neither":
        (x if first == "base" else seen).as_grid()
    later = x[:1] if first == "base" else seen[..., :1]
    x.relu_()
    for stale in (seen, other, later):
        with pytest.raises(UnsupportedOperatorError, match="was changed in place"):
            stale.dequantize()


@needs_all_bytes
def test_a_transformer_hands_on_bytes() -> None:
    """Behind the first layer, between layers, norms, products of activations and sums, nothing is float32."""
    fp.use_integer_kernels(True)
    set_march(March.NASH_M)
    torch.manual_seed(0)
    model = nn.Sequential(QuantStub(), TransformerBlock(64, 2), TransformerBlock(64, 2)).eval()
    data = torch.randn(2, 100, 64)
    qat = prepare_qat_fx(model, {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert_fx(qat)
    seen: dict[str, bool] = {}

    def note(module: nn.Module, inputs: tuple, out: Any) -> None:
        if isinstance(module, QuantizedModule) and isinstance(out, QTensor):
            seen[module.path] = out.has_bytes

    with torch.no_grad():
        hook = register_module_forward_hook(note)
        try:
            on_bytes = [quantized(data).int_repr()]
        finally:
            hook.remove()
        on_bytes.append(qat(data).int_repr())
        assert len(seen) > 10 and [path for path, has_bytes in seen.items() if not has_bytes] == ["0", "1.norm1"]
        fp.use_integer_kernels(False)
        assert all(torch.equal(m(data).int_repr(), out) for m, out in zip((quantized, qat), on_bytes, strict=True))


def test_another_name_of_bytes_leaves_them_as_they_are() -> None:
    values = torch.arange(-32, 32, dtype=torch.int8).reshape(1, 1, 8, 8)
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(values), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        x.set_range(-32, 31)
        other = x.alias()
        assert other is not x and other.has_bytes and other.is_integer == is_integer and other.range == (-32, 31)
        assert torch.equal(other.as_grid(), values.float()) and x.has_bytes


@needs_kernels
@pytest.mark.parametrize("state", [FakeQuantState.VALIDATION, None])
def test_a_relu_that_writes_in_place_leaves_bytes_to_the_next_layer(state: FakeQuantState | None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = QuantStub()
            self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            for conv in self.convs:
                x = self.relu(conv(x))
            return x

    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    data = torch.randn(1, 32, 16, 16)
    qconfigs = {"": get_default_qconfig()}
    qat = prepare(Net().eval(), (data,), qconfig_dict=qconfigs, method="jit-strip", out_dir=None)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    model = qat if state else convert(qat)
    seen: list[bool] = []
    for conv in list(model.convs)[1:]:
        conv.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].has_bytes))
    with torch.no_grad():
        on_bytes = model(data)
        assert seen == [True, True]
        fp.use_integer_kernels(False)
        assert torch.equal(on_bytes.int_repr(), model(data).int_repr())


@needs_kernels
def test_who_watches_modules_gets_the_integers_of_who_does_not() -> None:
    qat, quantized, data = models()
    seen: list[type] = []
    with torch.no_grad():
        alone = qat(data)
        handle = register_module_forward_hook(lambda module, inputs, out: seen.append(type(module)))
        try:
            watched = qat(data)
        finally:
            handle.remove()
    trained = qat(data)
    assert seen.count(type(quantized.get_submodule("module.grouped"))) == 3  # and `wrapped`, `reflected`
    assert trained.requires_grad and torch.equal(alone, watched) and torch.equal(alone, trained)
