"""A layer that is called as it was last asks few questions: none whose answer may have changed is left out."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
from tests.fixed_point.reach import needs_all_bytes, without_kernels

pytestmark = needs_all_bytes
FORMS = ["VALIDATION", "converted"]


@pytest.fixture(autouse=True)
def _on_kernels() -> None:
    """Whatever the environment says of them."""
    fp.use_integer_kernels(True)


class Net(nn.Module):
    """Convolutions, one of them with a sum, and a linear layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.quant(x))
        y = self.second(y) + y
        return self.dequant(self.last(self.middle(y.permute(0, 2, 3, 1))))


def _images() -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))


def _model(form: str) -> Any:
    torch.manual_seed(0)
    model = prepare_qat_fx(Net().eval(), {"": default_qat_8bit_fake_quant_qconfig}).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(_images())
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model if form == "VALIDATION" else convert_fx(model)


def _float32(model: Any, images: Tensor) -> Tensor:
    """The same on the route without kernels, which has no quick calls, of a copy that has run nothing."""
    with without_kernels():
        return copy.deepcopy(model)(images)


@pytest.fixture(params=FORMS)
def warm(request: pytest.FixtureRequest, answered: list[Any]) -> Any:
    """A model of each form whose layers have quick calls."""
    model = _model(request.param)
    with torch.no_grad():
        for _ in range(3):
            model(_images())
        assert len(answered) >= 6  # three layers whose output has a scale
        answered.clear()
        yield model


def _second(model: Any) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("_generated_add_0"))


def _write_data(model: Any) -> None:
    _second(model).weight.data.flatten()[:8] += 1


def _write_bias(model: Any) -> None:
    _second(model).bias.data[3] += 0.5


def _write_through_numpy(model: Any) -> None:
    _second(model).weight.detach().numpy().fill(1)


def _set_scale(model: Any) -> None:
    layer = _second(model)
    owner = getattr(layer, "activation_post_process", layer)
    owner.scale.data.mul_(1.5)


def _set_input_scale(model: Any) -> None:
    layer = model.get_submodule("first")
    owner = getattr(layer, "activation_post_process", layer)
    owner.scale.data.mul_(0.5)


def _swap(model: Any) -> None:
    layer = _second(model)
    weight = layer.weight.detach().clone()
    weight[0] += 1
    if isinstance(layer.weight, nn.Parameter):
        layer.weight = nn.Parameter(weight)
    else:
        layer.weight = weight


def _transpose(model: Any) -> None:
    weight = model.get_submodule("middle").weight
    weight.data = weight.data.t()


def _load(model: Any) -> None:
    model.load_state_dict({name: x + 1 if name.endswith(".bias") else x for name, x in model.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        _write_data, _write_bias, _write_through_numpy, _set_scale, _set_input_scale, _swap, _transpose, _load,
    ],
)  # fmt: skip
def test_a_write_is_seen(warm: Any, change: Callable[[Any], None]) -> None:
    images = _images()
    before = warm(images)
    change(warm)
    after = warm(images)
    assert torch.equal(after, _float32(warm, images)) and not torch.equal(after, before)
    assert torch.equal(warm(images), after) and torch.equal(warm(images), after)


@pytest.mark.parametrize(
    "register",
    [
        lambda module, hook: module.register_forward_hook(lambda m, i, o: hook()),
        lambda module, hook: module.register_forward_pre_hook(lambda m, i: hook()),
        lambda module, hook: module.register_forward_hook(lambda m, i, k, o: hook(), with_kwargs=True),
        lambda module, hook: nn.modules.module.register_module_forward_hook(lambda m, i, o: hook()),
        lambda module, hook: nn.modules.module.register_module_forward_pre_hook(lambda m, i: hook()),
    ],
)
def test_hooks_are_called(warm: Any, register: Callable[..., Any]) -> None:
    called = []
    handle = register(_second(warm), lambda: called.append(1))
    warm(_images())
    handle.remove()
    assert called
    count = len(called)
    warm(_images())
    assert len(called) == count


def test_hooks_that_change_the_output_do(warm: Any) -> None:
    images = _images()
    before = warm(images)
    handle = _second(warm).register_forward_hook(lambda m, i, out: i[0])
    assert not torch.equal(warm(images), before)
    handle.remove()
    assert torch.equal(warm(images), before)


def test_a_forward_of_the_users_is_called(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, called = _second(warm), []
    plain = layer.forward

    def forward(*args: Any) -> Any:
        called.append(1)
        return plain(*args)

    layer.forward = forward
    warm(_images())
    assert called
    del layer.forward
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *a, **k: called.append(self) or call(self, *a, **k))
    warm(_images())
    assert layer in called


def test_kernels_are_turned_off(warm: Any, answered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images()
    before = warm(images)
    answered.clear()
    fp.use_integer_kernels(False)
    assert torch.equal(warm(images), before) and not answered
    fp.use_integer_kernels(None)
    monkeypatch.setenv("HORIZON_INTEGER_KERNELS", "0")
    assert torch.equal(warm(images), before) and not answered


def test_gradients_and_states_are_asked_for(answered: list[Any]) -> None:
    model, images = _model("VALIDATION"), _images()
    with torch.no_grad():
        for _ in range(3):
            exact = model(images)
    answered.clear()
    with torch.enable_grad():
        out = model(images)
        out.sum().backward()
    assert torch.equal(out, exact) and not answered
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model(images)
        enabled = _second(model).activation_post_process.fake_quant_enabled
        counts = []
        for is_on in (1, 0, 1):
            enabled[0] = is_on
            answered.clear()
            model(images)
            counts.append(len(answered))
        assert counts[0] == counts[2] > counts[1]
        set_fake_quantize(model, FakeQuantState.CALIBRATION)
        model(images * 3)
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        wider = model(images)
        assert not torch.equal(wider, exact) and torch.equal(wider, _float32(model, images))


def test_other_shapes_and_ranks(warm: Any) -> None:
    for shape in ((2, 4, 8, 8), (1, 4, 8, 8), (3, 4, 5, 7), (2, 4, 8, 8)):
        images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        assert torch.equal(warm(images), _float32(warm, images))


def test_a_wrong_shape_is_told_with_the_place(warm: Any) -> None:
    layer = warm.get_submodule("middle")
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda m, i, o: seen.append(i[0]))
    warm(_images())
    handle.remove()
    x = seen[0]
    assert isinstance(layer(x), QTensor)
    with pytest.raises(RuntimeError, match="at `middle`"):
        layer(x[..., :5])


def test_a_copy_has_calls_of_its_own(warm: Any) -> None:
    images = _images()
    before = warm(images)
    buffer = io.BytesIO()
    torch.save(warm, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(warm), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(images), before)
        _write_data(other)
        after = other(images)
        assert not torch.equal(after, before) and torch.equal(after, _float32(other, images))
        assert torch.equal(warm(images), before)


def test_a_shallow_copy_with_another_setting() -> None:
    model, images = _model("VALIDATION"), _images()
    with torch.no_grad():
        for _ in range(3):
            model(images)
        layer, seen = model.get_submodule("middle"), []
        handle = layer.register_forward_hook(lambda m, i, o: seen.append(i[0]))
        model(images)
        handle.remove()
        plain = layer(seen[0])
        other = copy.copy(layer)
        other.limits = (0.0, 0.25)
        assert float(other(seen[0]).dequantize().max()) <= 0.25 < float(plain.dequantize().max())
        assert torch.equal(layer(seen[0]).dequantize(), plain.dequantize())


def test_a_layer_is_freed_with_its_last_owner() -> None:
    model, seen = _model("VALIDATION"), []
    _second(model).register_forward_hook(lambda m, i, o: seen.append(i))
    with torch.no_grad():
        model(_images())
        layer = copy.deepcopy(_second(model))
        layer._forward_hooks.clear()
        for _ in range(3):
            layer(*seen[0])
    assert layer._quick is not None
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(layer)
        del layer
        assert kept() is None
    finally:
        gc.enable()


def test_training_frees_the_integer_forms() -> None:
    model = _model("VALIDATION")
    with torch.no_grad():
        for _ in range(3):
            model(_images())
    twin = weakref.ref(_second(model).twin())
    model.train()
    gc.collect()
    assert twin() is None


def test_a_recorded_model_is_recorded_as_a_whole(warm: Any) -> None:
    images = _images()
    traced = torch.jit.trace(warm, (images,), check_trace=False)
    other = torch.randn(2, 4, 8, 8)
    assert torch.equal(traced(other), warm(other))


def test_threads_get_the_same_integers(warm: Any) -> None:
    images = [torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [warm(x) for x in images]
    wrong: list[int] = []

    def run(index: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(warm(images[index]), expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inputs_of_two_kinds_by_turns(answered: list[Any]) -> None:
    """A shared layer meets inputs of two scales."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.other = QuantStub(), DeQuantStub(), QuantStub()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.layer(self.quant(x)) + self.layer(self.other(x * 0.1)))

    torch.manual_seed(0)
    x = torch.randn(5, 8)
    model = prepare_qat_fx(Shared().eval(), {"": default_qat_8bit_fake_quant_qconfig}).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(x)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    with torch.no_grad():
        converted = convert_fx(model)
        expected = _float32(converted, x)
        for _ in range(4):
            assert torch.equal(model(x), expected) and torch.equal(converted(x), expected)
