"""One layer on tensors of bytes made by hand: each question that its quick call asks before it answers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import ConversionError, QuantizationConfigError
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.qtensor import LentValuesError, QTensor, byte_qtensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    fake_quantize_base,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.statistics.cache import Cache
from tests.fixed_point.reach import count_calls, needs_all_bytes, without_kernels

pytestmark = needs_all_bytes
FORMS = ["VALIDATION", "converted"]


class One(nn.Module):
    """One layer, or one and its batch norm, that takes an image or rows; with a sum behind it if it is asked for."""

    def __init__(self, layer: nn.Module, norm: nn.Module | None = None, is_added: bool = False) -> None:
        super().__init__()
        self.quant, self.dequant, self.layer, self.norm = QuantStub(), DeQuantStub(), layer, norm
        self.is_added = is_added

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.layer(x)
        y = y if self.norm is None else self.norm(y)
        return self.dequant(y + x if self.is_added else y)


def _calibrated(model: Any, images: Tensor, form: str) -> Any:
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(images)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model if form == "VALIDATION" else convert_fx(model)


def _layer(form: str, make: Callable[[], nn.Module], size: tuple[int, ...], **kinds: Any) -> Any:
    torch.manual_seed(0)
    model = One(make(), **kinds)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            assert m.running_var is not None
            m.running_var.uniform_(0.01, 0.02)
    prepared = prepare_qat_fx(model.eval(), {"": default_qat_8bit_fake_quant_qconfig}).eval()
    model = _calibrated(prepared, torch.randn(size), form)
    return next(m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor) and hasattr(m, "path"))


def _bytes(
    form: str, *size: int, low: int = -128, scale: float = 0.02, format: QuantDType = qint8, seed: int = 0
) -> QTensor:
    """A tensor as a layer on integer kernels gives it; new each time, as whoever reads one unpacks it."""
    high = 127 if format == qint8 else 3000
    values = torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(seed)).to(format.storage)
    values = values.contiguous(memory_format=torch.channels_last) if len(size) == 4 else values
    made = byte_qtensor(ByteTensor(values), torch.tensor([scale]), format)
    made.set_range(low if low == 0 else format.min, format.max)
    return made._as_training() if form == "VALIDATION" else made


def _linear() -> nn.Module:
    return nn.Linear(8, 8)


def _conv() -> nn.Module:
    return nn.Conv2d(4, 8, 3, padding=1)


def _integers(x: Any) -> Tensor:
    return x.int_repr()


def _on_float32(layer: Any, *inputs: QTensor) -> Tensor:
    """The same on the route without kernels, of a copy that has no quick call."""
    with without_kernels():
        return _integers(copy.deepcopy(layer)(*inputs))


def _warm(layer: Any, answered: list[Any], make: Callable[[], QTensor]) -> Tensor:
    """What a layer gives through its quick call, which it has from here on."""
    for _ in range(3):
        out = layer(make())
    assert answered
    answered.clear()
    return _integers(out)


@pytest.fixture(autouse=True)
def _on_kernels() -> Iterator[None]:
    """Whatever the environment says of them; and without gradients."""
    fp.use_integer_kernels(True)
    with torch.no_grad():
        yield
    set_qat_mode(QATMode.FuseBN)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("make", "size"), [(_linear, (5, 8)), (_conv, (2, 4, 6, 6))], ids=["linear", "conv"])
def test_inputs_with_and_without_negative_numbers_by_turns(
    form: str, make: Any, size: tuple[int, ...], answered: list[Any]
) -> None:
    """Of one scale: what was made for numbers from 0 to 127 gives others for negative ones."""
    layer = _layer(form, make, size)
    _warm(layer, answered, lambda: _bytes(form, *size, low=0))
    for low in (-128, 0, -128, -128, 0, 0, -128):
        expected = _on_float32(layer, _bytes(form, *size, low=low))
        assert torch.equal(_integers(layer(_bytes(form, *size, low=low))), expected)
    assert len(answered) == 2  # the second of two alike


@pytest.mark.parametrize("form", FORMS)
def test_another_format_of_the_same_scale(form: str, answered: list[Any]) -> None:
    layer = _layer(form, _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes(form, 5, 8))
    expected = _on_float32(layer, _bytes(form, 5, 8, format=qint16))
    for _ in range(3):
        assert torch.equal(_integers(layer(_bytes(form, 5, 8, format=qint16))), expected)


@pytest.mark.parametrize("form", FORMS)
def test_another_rank_behind_which_a_batch_norm_has_other_channels(form: str, answered: list[Any]) -> None:
    set_qat_mode(QATMode.WithBN)  # no hook of the layer asks for the rank
    layer = _layer(form, _linear, (5, 8), norm=nn.BatchNorm1d(8))
    assert layer.input_rank == 2
    _warm(layer, answered, lambda: _bytes(form, 5, 8))
    with pytest.raises(RuntimeError, match="right for 2-d inputs only"):
        layer(_bytes(form, 5, 8, 8))


@pytest.mark.parametrize("form", FORMS)
def test_a_view_of_what_was_changed_as_real_numbers_is_refused(form: str, answered: list[Any]) -> None:
    layer = _layer(form, _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes(form, 5, 8))
    x = _bytes(form, 5, 8)
    view = x[1:]
    values = x.lent("somebody")
    assert torch.equal(_integers(layer(view)), _on_float32(layer, _bytes(form, 5, 8)[1:]))
    assert view.has_bytes and answered
    values.mul_(2)
    with pytest.raises(LentValuesError, match="somebody"):
        layer(view)


@pytest.mark.parametrize("form", FORMS)
def test_no_kernel_runs_while_they_are_off(form: str, answered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(form, _conv, (2, 4, 6, 6))
    expected = _warm(layer, answered, lambda: _bytes(form, 2, 4, 6, 6))
    calls = count_calls(monkeypatch)
    fp.use_integer_kernels(False)
    assert torch.equal(_integers(layer(_bytes(form, 2, 4, 6, 6))), expected) and not calls
    fp.use_integer_kernels(None)
    monkeypatch.setenv("HORIZON_INTEGER_KERNELS", "1")
    assert torch.equal(_integers(layer(_bytes(form, 2, 4, 6, 6))), expected) and sum(calls.values()) == 1
    calls.clear()
    monkeypatch.setenv("HORIZON_INTEGER_KERNELS", "0")
    assert torch.equal(_integers(layer(_bytes(form, 2, 4, 6, 6))), expected) and not calls


def test_gradients_are_attached(answered: list[Any]) -> None:
    layer = _layer("VALIDATION", _linear, (5, 8))
    expected = _warm(layer, answered, lambda: _bytes("VALIDATION", 5, 8))
    with torch.enable_grad():
        out = layer(_bytes("VALIDATION", 5, 8))
        out.dequantize().sum().backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.any())
    assert torch.equal(_integers(out), expected)


def test_a_wrong_choice_of_checks_is_told(answered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer("VALIDATION", _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes("VALIDATION", 5, 8))
    monkeypatch.setattr(fake_quantize_base, "check_nan_scale", "backward")
    with pytest.raises(QuantizationConfigError, match="check_nan_scale must be"):
        layer(_bytes("VALIDATION", 5, 8))


def _other_child(layer: Any) -> None:
    child = copy.deepcopy(layer.activation_post_process)
    child.activation_post_process.quant_max = 20
    layer.activation_post_process = child


def _other_format(layer: Any) -> None:
    layer.activation_post_process.activation_post_process.quant_max = 20


def _other_limits(layer: Any) -> None:
    layer.limits[1] = float(layer.activation_post_process.scale) * 20


@pytest.mark.parametrize("change", [_other_child, _other_format, _other_limits])
def test_another_largest_output(change: Callable[[Any], None], answered: list[Any]) -> None:
    """Of a new fake quantizer with the same scale, of the one that is there, of limits that are written to."""
    layer = _layer("VALIDATION", _linear, (50, 8))
    if change is _other_limits:  # a list is the same object when it is written to: the layer gets no quick call
        layer.limits = [-float("inf"), float("inf")]
        for _ in range(3):
            before = _integers(layer(_bytes("VALIDATION", 50, 8)))
    else:
        before = _warm(layer, answered, lambda: _bytes("VALIDATION", 50, 8))
    change(layer)
    after = _integers(layer(_bytes("VALIDATION", 50, 8)))
    assert torch.equal(after, before.clamp(max=20)) and int(before.max()) > 20


def test_another_setting_of_the_batch_norm(answered: list[Any]) -> None:
    set_qat_mode(QATMode.WithBN)
    layer = _layer("VALIDATION", lambda: nn.Conv2d(4, 8, 3), (2, 4, 6, 6), norm=nn.BatchNorm2d(8))
    before = _warm(layer, answered, lambda: _bytes("VALIDATION", 2, 4, 6, 6))
    layer.bn.eps = 0.5
    after = _integers(layer(_bytes("VALIDATION", 2, 4, 6, 6)))
    assert int(after.abs().max()) < int(before.abs().max()) / 2
    assert torch.equal(after, _on_float32(layer, _bytes("VALIDATION", 2, 4, 6, 6)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_named", [False, True], ids=["by position", "by name"])
def test_a_second_operand(is_named: bool, form: str, answered: list[Any]) -> None:
    size = (2, 8, 6, 6)
    layer = _layer(form, lambda: nn.Conv2d(8, 8, 1), size, is_added=True)
    assert type(layer).__name__ == "ConvAdd2d"
    before = _warm(layer, answered, lambda: _bytes(form, *size))
    x, added = _bytes(form, *size), _bytes(form, *size, seed=1)
    after = _integers(layer(x, residual=added) if is_named else layer(x, added))
    assert not torch.equal(after, before)
    assert torch.equal(after, _on_float32(layer, _bytes(form, *size), _bytes(form, *size, seed=1)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_all_modules_see_the_layer(register: str, form: str, answered: list[Any]) -> None:
    layer, called = _layer(form, _linear, (5, 8)), []
    _warm(layer, answered, lambda: _bytes(form, 5, 8))
    handle = getattr(nn.modules.module, register)(lambda module, *rest: called.append(module))
    try:
        layer(_bytes(form, 5, 8))
    finally:
        handle.remove()
    assert layer in called


@pytest.mark.parametrize("form", FORMS)
def test_the_output_is_of_the_stage_of_the_layer(form: str, answered: list[Any]) -> None:
    layer = _layer(form, _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes(form, 5, 8))
    out = layer(_bytes(form, 5, 8))
    assert answered and out.is_integer == (form == "converted")


def test_a_layer_that_an_older_version_saved(answered: list[Any]) -> None:
    """It does not say which tensors its plans are made of."""
    layer = _layer("converted", _linear, (5, 8))
    expected = _on_float32(layer, _bytes("converted", 5, 8))
    del layer.__dict__["_planned_for"]
    for _ in range(3):
        assert torch.equal(_integers(layer(_bytes("converted", 5, 8))), expected)
    layer.weight.data.zero_()
    assert torch.equal(_integers(layer(_bytes("converted", 5, 8))), _on_float32(layer, _bytes("converted", 5, 8)))


def test_a_tensor_without_a_scale_is_refused(answered: list[Any]) -> None:
    layer = _layer("converted", _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes("converted", 5, 8))
    with pytest.raises(ConversionError, match="instead of integers with a scale"):
        layer(torch.zeros(5, 8))


@pytest.mark.parametrize("form", FORMS)
def test_images_of_a_shape_that_no_kernel_takes(form: str, answered: list[Any]) -> None:
    """In a column of one pixel the weights of a dilated convolution meet nothing but padding in some places."""
    layer = _layer(form, lambda: nn.Conv2d(4, 4, 2, padding=1, dilation=(1, 2)), (2, 4, 7, 7))
    _warm(layer, answered, lambda: _bytes(form, 2, 4, 7, 7))
    expected = _on_float32(layer, _bytes(form, 2, 4, 7, 1))
    for _ in range(3):
        assert torch.equal(_integers(layer(_bytes(form, 2, 4, 7, 1))), expected)
    assert not answered


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_padding_that_is_not_of_zeros(mode: str, form: str) -> None:
    layer = _layer(form, lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode=mode), (2, 4, 6, 6))
    expected = _on_float32(layer, _bytes(form, 2, 4, 6, 6))
    for _ in range(4):
        assert torch.equal(_integers(layer(_bytes(form, 2, 4, 6, 6))), expected)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_reach_the_sums(form: str, answered: list[Any]) -> None:
    """Groups of three channels have no kernel: their bytes are summed by a convolution in float32."""
    layer = _layer(form, lambda: nn.Conv2d(6, 6, 3, groups=2), (2, 6, 6, 6))
    expected = _warm(layer, answered, lambda: _bytes(form, 2, 6, 6, 6))
    with torch.autocast("cpu"):
        assert torch.equal(_integers(layer(_bytes(form, 2, 6, 6, 6))), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_recording_has_the_operators_of_float32(form: str, answered: list[Any]) -> None:
    """Also of a layer whose input is no part of what is recorded."""
    layer = _layer(form, _conv, (2, 4, 6, 6))
    fresh = copy.deepcopy(layer)
    _warm(layer, answered, lambda: _bytes(form, 2, 4, 6, 6))

    def operators(module: Any) -> list[str]:
        constant = _bytes(form, 2, 4, 6, 6)
        traced = torch.jit.trace(lambda x: x + module(constant).dequantize(), torch.zeros(1), check_trace=False)
        return sorted(node.kind() for node in traced.graph.nodes())

    assert operators(layer) == operators(fresh)


class Twice(nn.Module):
    """One layer on two parts of one tensor: both have its scale, and the outputs of both have their own."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.first, self.layer = QuantStub(), DeQuantStub(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(self.quant(x))
        return self.dequant(self.layer(y[:2])), self.dequant(self.layer(y[2:]))


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_have_scales_of_their_own(form: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    x[2:] *= 0.05
    facts: Any = {"qconfig_dict": {"": default_qat_8bit_fake_quant_qconfig}, "own_scales": True, "out_dir": None}
    model = _calibrated(prepare(Twice().eval(), (x,), **facts).eval(), x, form)
    fp.use_integer_kernels(False)
    expected = copy.deepcopy(model)(x)
    fp.use_integer_kernels(True)
    for _ in range(4):
        assert all(map(torch.equal, model(x), expected))


def test_forgotten_plans_are_freed(answered: list[Any]) -> None:
    layer = _layer("converted", _linear, (5, 8))
    _warm(layer, answered, lambda: _bytes("converted", 5, 8))
    x = _bytes("converted", 5, 8)
    on_bytes = weakref.ref(layer.plan(x.scale, x.dtype, x.range).on_bytes)
    assert on_bytes() is not None
    layer.forget_plans()
    assert on_bytes() is None


def test_memory_that_was_given_back_is_not_compared() -> None:
    """As sharded training gives it back: the tensor keeps its shape."""
    weight, cache = torch.ones(3, 4), Cache()
    assert cache.get((weight,), lambda: "made") == "made" and cache.known((weight,)) == "made"
    weight.untyped_storage().resize_(0)
    assert weight.shape == (3, 4) and cache.known((weight,)) is None
