"""The state of a run: models that are interrupted, that call each other, and that run in several threads."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from horizon_plugin_pytorch import running
from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, set_fake_quantize
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from tests.routes import qconfig


class Net(nn.Module):
    """A net that can be interrupted, and that can ask a teacher."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.tail = nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), Stop())
        with torch.no_grad():
            self.conv.weight.mul_(gain)
        self.teacher: list[nn.Module] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.quant(x)
        y = F.relu(self.tail(F.gelu(self.conv(y)) * y) + y)
        return self.dequant(y * 0.5), *(teacher(x) for teacher in self.teacher)


class Stop(nn.Module):
    """Code of the user that can be interrupted."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if self.error is not None:
            raise self.error
        return x


INPUT = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def _prepared(gain: float, **of: Any) -> Any:
    torch.manual_seed(1)
    model = prepare(Net(gain).eval(), (INPUT,), qconfig_dict=of or {"": qconfig()}, out_dir=None).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(INPUT)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


def _half() -> dict[str, Any]:
    return {"": qconfig(), "module_name": {"conv": get_qconfig(out_dtype=torch.float16, weight_dtype=qint8)}}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError()])
@pytest.mark.parametrize("of", [{}, _half()], ids=["integers", "with float16"])
def test_an_interrupted_model_leaves_nothing_behind(error: BaseException, of: dict[str, Any]) -> None:
    first, second = _prepared(1, **of), _prepared(50, **of)
    own, other = first(INPUT)[0], second(INPUT)[0]
    first.tail[1].error = error
    with pytest.raises(type(error)):
        first(INPUT)
    assert running.interceptor() is None
    assert not _get_current_function_mode_stack()
    assert torch.equal(second(INPUT)[0], other)
    first.tail[1].error = None
    assert torch.equal(first(INPUT)[0], own)
    assert torch.equal(_prepared(50, **of)(INPUT)[0], other)


def test_a_run_that_was_interrupted_takes_its_mode_and_no_other() -> None:
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = _prepared(1, **_half())
    want = model(INPUT)[0]
    model.tail[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(INPUT)
    model.tail[1].error = None
    with Mine() as mine:
        assert running.current() is None
        assert _get_current_function_mode_stack() == [mine]
    assert torch.equal(model(INPUT)[0], want)


@pytest.mark.parametrize("of", [{}, _half()], ids=["integers", "with float16"])
def test_a_model_that_another_one_calls_runs_by_itself(of: dict[str, Any]) -> None:
    student, teacher = _prepared(1, **of), _prepared(50, **of)
    own, other = student(INPUT)[0], teacher(INPUT)[0]
    student.teacher = [teacher, copy.deepcopy(student)]
    got, asked, copied = student(INPUT)
    assert torch.equal(got, own)
    assert torch.equal(asked[0], other)
    assert torch.equal(copied[0], own)


def test_an_interruption_that_the_caller_handles() -> None:
    student, teacher = _prepared(1), _prepared(50)
    own = student(INPUT)[0]

    def asked(x: Tensor) -> Tensor:
        teacher.tail[1].error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            teacher(x)
        return student.dequant(student.quant(x))

    student.teacher = [asked]
    assert torch.equal(student(INPUT)[0], own)


@pytest.mark.slow
def test_threads_run_models_of_their_own() -> None:
    models = [_prepared(gain) for gain in (1, 50)]
    want = [model(INPUT)[0] for model in models]
    found: list[bool] = []

    def work(index: int) -> None:
        found.extend(torch.equal(models[index](INPUT)[0], want[index]) for _ in range(5))

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


class Passing(TorchFunctionMode):
    """Somebody who looks at all calls."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._passed(func, args, kwargs or {})

    def _passed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@pytest.mark.parametrize("of", [{}, _half()], ids=["integers", "with float16"])
def test_modes_of_the_user_are_no_call_sites(of: dict[str, Any]) -> None:
    model = _prepared(1, **of)
    want = model(INPUT)[0]
    with Passing():
        assert torch.equal(model(INPUT)[0], want)
        inside = _prepared(1, **of)
    assert torch.equal(inside(INPUT)[0], want)


def test_recording_keeps_no_activations() -> None:
    gone: list[bool] = []

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = x + 1
            seen = weakref.ref(first)
            x = first * 2
            del first
            gone.append(seen() is None)
            return x

    record(Chain(), (INPUT,))
    assert gone == [True, True]  # in the eval run and in the training run
