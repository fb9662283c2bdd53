"""States that a model keeps between forwards: refused where they are quantized, whatever holds them; else harmless."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, TraceError, UnsupportedOperatorError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

METHODS = ["jit-strip", "jit", "symbolic", "fx"]
X = torch.randn(1, 3, 4, 4)
ELSEWHERE = SimpleNamespace(state=None)
WRITTEN = torch.zeros(1, 3, 4, 4)
COUNT = torch.zeros(1)
_kept: Any = None
RING: list = [2.0]
RING.append(RING)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.d, self.c, self.q2 = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1), QuantStub()
        self.begin()

    def begin(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.step(self.c(self.q(x))))

    def step(self, y: Tensor) -> Tensor:
        raise NotImplementedError


# -- refused


class BeginsAsNone(Base):
    def begin(self) -> None:
        self.h = None

    def step(self, y):
        y = y if self.h is None else y + self.h
        self.h = y.detach()
        return y


class NotThereAtFirst(Base):
    def step(self, y):
        y = y + self.h if hasattr(self, "h") else y
        self.h = y
        return y


class BeginsAsANumber(Base):
    def begin(self) -> None:
        self.h = 0.0

    def step(self, y):
        y = y + self.h
        self.h = y
        return y


class BeginsAsATensor(Base):
    def begin(self) -> None:
        self.h = torch.zeros(1, 3, 4, 4)

    def step(self, y):
        y = y + self.h
        self.h = y
        return y


class BeginsAsABuffer(Base):
    def begin(self) -> None:
        self.register_buffer("h", torch.zeros(1, 3, 4, 4))

    def step(self, y):
        y = y + self.h
        self.h = y
        return y


class List(Base):
    def begin(self) -> None:
        self.past: list = []

    def step(self, y):
        y = y + self.past[-1] if self.past else y
        self.past.append(y)
        return y


class Dict(Base):
    def begin(self) -> None:
        self.past: dict = {}

    def step(self, y):
        y = torch.cat([y, self.past["y"]], 1)[:, :3] if "y" in self.past else y
        self.past["y"] = y
        return y


class Deque(Base):
    def begin(self) -> None:
        self.past: collections.deque = collections.deque(maxlen=2)

    def step(self, y):
        for earlier in self.past:
            y = y + earlier
        self.past.append(y)
        return y


class OnASubmodule(Base):
    def begin(self) -> None:
        self.c.h = None

    def step(self, y):
        y = y if self.c.h is None else torch.maximum(y, self.c.h)
        self.c.h = y
        return y


class OnAnotherObject(Base):
    def step(self, y):
        y = y if ELSEWHERE.state is None else y * ELSEWHERE.state
        ELSEWHERE.state = y
        return y


class Global(Base):
    def step(self, y):
        global _kept
        y = y if _kept is None else y + _kept
        _kept = y
        return y


class OnTheClass(Base):
    kept: Any = None

    def step(self, y):
        cls = type(self)
        y, cls.kept = (y if cls.kept is None else y + cls.kept), y
        return y


class BySetattr(Base):
    def step(self, y):
        earlier = getattr(self, "earlier", None)
        y = y if earlier is None else y + earlier
        setattr(self, "earlier", y)  # noqa: B010 - it is the subject
        return y


class InNestedContainers(Base):
    def begin(self) -> None:
        self.past: dict = {"levels": {"first": []}}

    def step(self, y):
        levels = self.past["levels"]["first"]
        y = y + levels[-1] if levels else y
        levels.append(y)
        return y


class InEvalOnly(Base):
    def begin(self) -> None:
        self.h = None

    def step(self, y):
        if not self.training:
            y = y if self.h is None else y + self.h
            self.h = y
        return y


class OfTwoForwardsAgo(Base):
    def begin(self) -> None:
        self.a = self.b = None

    def step(self, y):
        z = y if self.b is None else y + self.b
        self.a, self.b = y, self.a
        return z if self.a is None or self.b is None else z + self.b


class TheOutputItself(Base):
    def begin(self) -> None:
        self.h = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.q(x))
        y = y if self.h is None else y + self.h
        self.h = y
        return y


class InAClosure(Base):
    def begin(self) -> None:
        kept: dict = {}

        def step(y):
            y = y + kept["y"] if "y" in kept else y
            kept["y"] = y
            return y

        self.step = step


class Cell(Base):
    def begin(self) -> None:
        self.cell, self.h = nn.GRUCell(4, 4), None

    def step(self, y):
        self.h = self.cell(y[:, 0, 0], self.h) if self.h is not None else self.cell(y[:, 0, 0])
        return self.h


class WrittenGlobal(Base):
    def step(self, y):
        WRITTEN.mul_(0.5).add_(y)
        return y + WRITTEN


class WrittenInAClosure(Base):
    def begin(self) -> None:
        state = torch.zeros(1, 3, 4, 4)

        def step(y):
            state[:, :1] = y[:, :1]
            return y + state

        self.step = step


class WrittenInAList(Base):
    def begin(self) -> None:
        self.past = [torch.zeros(1, 3, 4, 4)]

    def step(self, y):
        self.past[0].copy_(y)
        return y + self.past[0]


REFUSED = [
    WrittenGlobal, WrittenInAClosure, WrittenInAList,
    InAClosure, Cell, OnTheClass, BySetattr, InNestedContainers,
    BeginsAsNone, NotThereAtFirst, BeginsAsANumber, BeginsAsATensor, BeginsAsABuffer, List, Dict, Deque, OnASubmodule,
    OnAnotherObject, Global, InEvalOnly, OfTwoForwardsAgo, TheOutputItself,
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    global _kept
    set_march(March.NASH_E)
    WRITTEN.detach_().zero_()
    COUNT.zero_()
    ELSEWHERE.state = _kept = OnTheClass.kept = ByHandOnTheClass.kept = None


def prepared(model: nn.Module, method: str) -> Any:
    config = {"": get_default_qconfig()}
    if method == "fx":
        return prepare_qat_fx(model.eval(), config)
    return prepare(model.eval(), (X,), qconfig_dict=config, method=method, out_dir=None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", REFUSED)
def test_a_quantized_state_is_refused_with_its_lines(cls, method) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_states.py:\d+.*input and an output of the model"):
        prepared(cls(), method)


class BufferGetsMemory(Base):
    def begin(self) -> None:
        self.register_buffer("state", torch.zeros(1, 3, 4, 4))

    def step(self, y):
        self.state.data = y
        return y


class NewTensorGetsMemory(Base):
    def step(self, y):
        new = torch.zeros(1, 3, 4, 4)
        new.data = y
        return new + 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", [BufferGetsMemory, NewTensorGetsMemory])
def test_memory_of_a_quantized_tensor_is_not_given_away(cls, method) -> None:
    error = TraceError if method in ("symbolic", "fx") else UnsupportedOperatorError
    with pytest.raises(error, match=r"test_states.py:\d+.*`x = y`.*input and an output of the model"):
        prepared(cls(), method)


def _counted(y: Tensor) -> Tensor:
    COUNT.add_(1.0)
    return y * COUNT


class CountsInAFunction(Base):
    def step(self, y):
        return _counted(y)


class CountsInADefault(Base):
    def step(self, y, count=torch.zeros(1)):  # noqa: B008 - it is the subject
        count += 1.0
        return y * count


class CountsOnTheClass(Base):
    count = torch.zeros(1)

    def step(self, y):
        self.count.view(-1)[0] = y.shape[1]
        return y * self.count


class CountsInAClosure(Base):
    def begin(self) -> None:
        count = torch.zeros(1)

        def step(y):
            torch.add(count, 1.0, out=count)
            return y * count

        self.step = step


@pytest.mark.parametrize("method", ["symbolic", "fx"])
@pytest.mark.parametrize("cls", [CountsInAFunction, CountsInADefault, CountsOnTheClass, CountsInAClosure])
def test_a_write_that_tracing_loses_is_told_with_its_line(cls, method) -> None:
    with pytest.warns(QuantizationWarning, match=r"`Counts\w+`.* writes to .*test_states.py:\d+.*JIT_STRIP"):
        prepared(cls(), method)


class DrawsNumbers(Base):
    def step(self, y):
        return y + torch.randn(4) * 0.1


@pytest.mark.parametrize("method", ["symbolic", "fx"])
def test_random_numbers_that_tracing_keeps_are_told(method) -> None:
    with pytest.warns(QuantizationWarning, match=r"draws random numbers \(.*test_states.py:\d+\).*JIT_STRIP"):
        prepared(DrawsNumbers(), method)


class MakesItself(Base):
    """Memory that torch does not report as made: of numpy, and of a constructor."""

    def step(self, y):
        offsets, canvas = torch.from_numpy(np.zeros(4, np.float32)), torch.Tensor([1.0, 2.0, 3.0, 4.0])
        offsets += 1.0
        canvas[0] = 3.0
        return y * offsets + canvas


@pytest.mark.parametrize("method", ["symbolic", "fx"])
def test_what_the_forward_makes_may_be_written(method) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*writes to")
        prepared(MakesItself(), method)


def test_a_trace_leaves_no_tensor_in_a_global() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedOperatorError, match="is kept and read by the next one"):
            prepared(Global(), "fx")


class NamesWhatHoldsItself(Base):
    """Its code names a list that has itself in it, and modules whose names lead around in circles."""

    def begin(self) -> None:
        self.ring: list = [1.0]
        self.ring.append(self.ring)

    def step(self, y):
        self.last = y
        return y * (RING[0] + self.ring[0]) if sys.modules else y + np.float32(1)


def test_what_holds_itself_is_looked_at_once() -> None:
    prepared(NamesWhatHoldsItself(), "fx")


# -- harmless


class WrittenOnly(Base):
    def begin(self) -> None:
        self.seen: list = []

    def step(self, y):
        self.last_features = y
        self.seen.append(y)
        return y + y


class WrittenOverATensor(Base):
    def begin(self) -> None:
        self.last = torch.zeros(1)

    def step(self, y):
        self.last = y.detach()
        return y


class WrittenAndReadInOneForward(Base):
    def begin(self) -> None:
        self.h = None

    def step(self, y):
        self.h = y + y
        return self.h * y


class CacheByShape(Base):
    def begin(self) -> None:
        self.cache: dict = {}

    def step(self, y):
        size = y.shape[-1]
        if size not in self.cache:
            self.cache[size] = torch.linspace(0, 1, 4)
        return y + self.cache[size]


class CacheOfAParameter(Base):
    def begin(self) -> None:
        self.w, self.table = nn.Parameter(torch.rand(3, 1, 1)), None

    def step(self, y):
        if self.table is None:
            self.table = (self.w * 2).detach()
        return y * self.table


class CacheOfZeros(Base):
    def begin(self) -> None:
        self.zero = None

    def step(self, y):
        if self.zero is None:
            self.zero = torch.zeros_like(y)
        return y + self.zero


class RealNumbers(Base):
    def begin(self) -> None:
        self.register_buffer("memory", torch.zeros(1, 3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.q(x)) + self.q2(self.memory)
        out = self.d(y)
        self.memory = out.detach()
        return out


class WrittenOverABuffer(Base):
    def begin(self) -> None:
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.d(self.c(self.q(x)))
        self.last = out.detach()
        return out


class CountsOnly(Base):
    def begin(self) -> None:
        self.calls = 0

    def step(self, y):
        self.calls += 1
        return y


HARMLESS = [
    WrittenOnly, WrittenOverATensor, WrittenAndReadInOneForward, CacheByShape, CacheOfAParameter, CountsOnly,
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", HARMLESS)
def test_what_is_kept_and_not_read_and_constants_do_no_harm(cls, method) -> None:
    net = cls()
    model = prepared(net, method)
    calibrate(model, [X, X], progress=False)
    with torch.no_grad():
        found, want = model(X), net(X)
        assert torch.equal(found, convert(model)(X)) and torch.equal(found, model(X))
        assert float((found - want).norm() / want.norm()) < 0.05
    copy.deepcopy(model)


@pytest.mark.parametrize("method", METHODS)
def test_zeros_of_a_shape_are_no_state(method) -> None:
    model = prepared(CacheOfZeros(), method)
    calibrate(model, [X, X], progress=False)
    with torch.no_grad():
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("method", ["jit-strip", "jit"])
def test_real_numbers_may_be_kept(method) -> None:
    model = prepared(RealNumbers(), method)
    calibrate(model, [X], progress=False)
    with torch.no_grad():
        first, second = model(X), model(X)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", ["symbolic", "fx"])
def test_a_buffer_that_is_only_written_is_not_said_to_be_read(method, recwarn) -> None:
    prepared(WrittenOverABuffer(), method)
    assert not [warning for warning in recwarn if "read by the next one" in str(warning.message)]


def eager(model: nn.Module) -> Any:
    model.qconfig = get_default_qconfig()
    return prepare_qat(model.eval())


class ByHand(Base):
    """In eager mode nobody sees the forward before it runs."""

    def begin(self) -> None:
        self.f, self.h = FloatFunctional(), None

    def step(self, y):
        y = y if self.h is None else self.f.add(y, self.h)
        self.h = y
        return y


class ByHandInAList(ByHand):
    def step(self, y):
        self.h = self.h or []
        y = self.f.add(y, self.h[-1].detach().reshape(y.shape)) if self.h else y
        self.h.append(y)
        return y


class ByHandInADeque(ByHand):
    def begin(self) -> None:
        self.f, self.h = FloatFunctional(), collections.deque(maxlen=2)

    def step(self, y):
        out = self.f.cat([y, *self.h], 1)
        self.h.append(y)
        return out


class ByHandOnASubmodule(ByHand):
    def step(self, y):
        kept = getattr(self.c, "kept", None)
        y = self.f.mul(y, kept["y"]) if kept else y
        setattr(self.c, "kept", {"y": y.clone()})  # noqa: B010 - it is the subject
        return y


class ByHandOnTheClass(ByHand):
    kept: Any = None

    def step(self, y):
        cls = type(self)
        y, cls.kept = (y if cls.kept is None else self.f.add(y, cls.kept)), y
        return y


class ByHandInAGlobal(ByHand):
    def step(self, y):
        y, ELSEWHERE.state = (y if ELSEWHERE.state is None else self.f.sub(y, ELSEWHERE.state)), y
        return y


class ByHandThroughALayer(ByHand):
    """The next forward's layer reads it, and no FloatFunctional."""

    def step(self, y):
        out, self.h = self.c(y if self.h is None else self.h), y
        return out


class RealByHand(ByHand):
    """Real numbers may be kept."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.q(x))
        y = y if self.h is None else self.f.add(y, self.q2(self.h))
        self.h = self.d(y)
        return self.h


class WrittenByHand(Base):
    def begin(self) -> None:
        self.zero = None

    def step(self, y):
        self.last = y
        self.zero = torch.zeros(3) if self.zero is None else self.zero
        return y


class ReadInTheSameForward(ByHand):
    def step(self, y):
        self.h = y
        return self.f.add(self.c(self.h), self.h)


class Wrapped(Base):
    """Nor does tracing see code that it does not enter."""

    def begin(self) -> None:
        self.h = None

    @wrap()
    def step(self, y):
        y = y if self.h is None else y + self.h
        self.h = y
        return y


class RealWrapped(Wrapped):
    @wrap()
    def step(self, y):
        y = y if self.h is None else y + self.q2(self.h)
        self.h = self.d(y)
        return y


def traced(model: nn.Module) -> Any:
    return prepared(model, "fx")


UNSEEN = [
    *((eager, cls) for cls in (
        ByHand, ByHandInAList, ByHandInADeque, ByHandOnASubmodule, ByHandOnTheClass, ByHandInAGlobal,
        ByHandThroughALayer,
    )),
    (traced, Wrapped),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "cls"), UNSEEN)
def test_a_state_of_code_that_nobody_saw_is_refused_when_it_is_read(make, cls) -> None:
    model = make(cls())
    model(X)
    with pytest.raises(UnsupportedOperatorError, match=r"at `.+` \(test_states.py:\d+\) reads.*input and an output"):
        model(X)


@pytest.mark.parametrize("cls", [RealByHand, WrittenByHand, ReadInTheSameForward])
def test_what_eager_mode_may_keep(cls) -> None:
    model = eager(cls())
    calibrate(model, [X, X], progress=False)
    converted = convert(model)
    for _ in range(2):
        model(X), converted(X)


class ConstantByHand(ByHand):
    """A constant that is quantized once."""

    def begin(self) -> None:
        self.f, self.constant = FloatFunctional(), None
        self.table = nn.Parameter(torch.randn(1, 3, 4, 4))

    def step(self, y):
        if self.constant is None:
            self.constant = self.q2(self.table)
        return self.f.add(y, self.constant)


class BufferByHand(ConstantByHand):
    def begin(self) -> None:
        self.f, self.constant = FloatFunctional(), None
        self.register_buffer("table", torch.randn(1, 3, 4, 4))


class WrappedConstant(ConstantByHand):
    @wrap()
    def step(self, y):
        if self.constant is None:
            self.constant = self.q2(self.table)
        return self.f.add(y, self.constant)


CONSTANTS = [(eager, ConstantByHand), (eager, BufferByHand), (lambda m: prepared(m, "fx"), WrappedConstant)]


@pytest.mark.parametrize(
    ("make", "cls"), [*CONSTANTS, *((lambda m, by=by: prepared(m, by), ConstantByHand) for by in METHODS)]
)
def test_a_constant_that_is_quantized_once_is_no_state(make, cls) -> None:
    model = make(cls().eval())
    calibrate(model, [X, X], progress=False)
    converted = convert(model)
    with torch.no_grad():
        assert all(torch.equal(model(X), found(X)) for found in (model, converted, converted))


@pytest.mark.parametrize(("make", "cls"), CONSTANTS)
def test_a_constant_that_changes_after_it_was_quantized_is_refused(make, cls) -> None:
    """In float it follows, as it is the parameter itself."""
    model = make(cls().eval())
    with torch.no_grad():
        model(X)
        next(t for name, t in (*model.named_parameters(), *model.named_buffers()) if name == "table").mul_(2.0)
        with pytest.raises(UnsupportedOperatorError, match=r"`QuantStub` at `q2` \(test_states.py:\d+\).*changed"):
            model(X)


def test_a_prepared_model_inside_another_leaves_its_forward_alone() -> None:
    class Outer(ByHand):
        def begin(self) -> None:
            super().begin()
            self.inner = eager(nn.Sequential(nn.Conv2d(3, 3, 1)))

        def step(self, y):
            z = self.inner(y)
            y = self.f.add(y, z) if self.h is None else self.f.add(z, self.h)
            self.h = y
            return y

    net = Outer()
    inner, net.inner = net.inner, nn.Identity()
    model = eager(net)
    model.inner = inner
    model(X)
    with pytest.raises(UnsupportedOperatorError, match=r"at `f` \(test_states.py:\d+\) reads.*input and an output"):
        model(X)
    model.h = None
    model(X)


def test_quantized_tensors_go_from_one_prepared_model_to_another() -> None:
    """They are inputs there."""
    first, second = eager(nn.Sequential(QuantStub(), nn.Conv2d(3, 3, 1))), eager(nn.Sequential(nn.Conv2d(3, 3, 1)))
    y = first(X)
    for _ in range(2):
        second(second(y))
    assert second[0](y).shape == X.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "cls"),
    [(eager, RealByHand), (lambda m: prepared(m, "jit-strip"), RealNumbers), (traced, RealWrapped)],
)
def test_a_state_is_not_exported_as_a_constant(make, cls) -> None:
    model = make(cls())
    calibrate(model, [X, X], progress=False)
    model.h = None
    with pytest.raises(ExportError, match=r"reads it in the next forward \(line test_states.py:\d+\).*an input and"):
        export_quantized_onnx(convert(model), X, io.BytesIO())


@pytest.mark.slow
def test_what_is_kept_and_not_read_is_exported() -> None:
    for model in (eager(WrittenByHand()), *(prepared(cls(), "jit-strip") for cls in HARMLESS)):
        calibrate(model, [X], progress=False)
        export_quantized_onnx(convert(model), X, io.BytesIO())


@pytest.mark.parametrize("method", METHODS)
def test_the_models_own_attributes_are_not_those_of_the_recording(method) -> None:
    model = prepared(WrittenOnly(), method)
    if method in ("symbolic", "fx"):
        assert not hasattr(model, "last_features") and getattr(model, "seen", []) == []
    pickle.loads(pickle.dumps(model.state_dict()))
