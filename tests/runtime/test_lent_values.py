"""Ordinary tensors that are one with a quantized tensor in float: what a stub gives of it, or took for it.

Whoever writes to one of them changes both in float. Here they share no memory at any stage, and whoever reads the other
is refused: no stage has numbers that another has not.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    prepare_qat,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import calibrate, prepared_on, qconfig, run_onnx
from tests.runtime.test_views import METHODS, Body, Net, Wrapped, X

BY_RUNNING = ("wrapped", "eager")  # nobody sees these before they run


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


def _stages(body: Body, method: str, mode: Any = torch.no_grad, kind: Any = (Net, Wrapped)) -> dict[str, Any]:
    """How far each stage is from float, or how it is refused."""
    net = kind[method == "wrapped"](body).eval()
    with mode():
        want = net(X.clone())
        try:
            qat = prepared_on(method, net, (X,), "qint16").eval()
        except NotImplementedError as error:
            return {"prepare": str(error)}
        return {stage: _distance(run, want) for stage, run in _runs(qat, method)}


def _runs(qat: nn.Module, method: str) -> list[tuple[str, Callable[[], Tensor]]]:
    def run(state: FakeQuantState) -> Tensor:
        set_fake_quantize(qat, state)
        return qat(X.clone())

    states = (FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION)
    found: list[tuple[str, Callable[[], Tensor]]] = [(state.name, lambda state=state: run(state)) for state in states]
    return [*found, ("converted", lambda: (convert if method == "eager" else convert_fx)(qat)(X.clone()))]


def _distance(run: Callable[[], Tensor], want: Tensor) -> Any:
    try:
        return float((run() - want).detach().abs().max())
    except RuntimeError as error:  # also of what was not met before, as it was refused
        return str(error)


def _is_refused(stages: dict[str, Any]) -> bool:
    """Is it refused as soon as data are seen? If not, every stage must have float's result."""
    first = next(iter(stages.values()))
    if isinstance(first, str):
        lines = re.findall(r"test_(?:lent_values|views)\.py:\d+", first)
        assert len(lines) == 2 or (lines and "prepare" in stages), first
        return True
    assert all(not isinstance(found, str) and found < 0.03 for found in stages.values()), stages
    return False


SHARING: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "stub": lambda s, y: s.dequant(y),
    "dequantize": lambda s, y: y.dequantize(),
    "identity": lambda s, y: s.same(s.dequant(y)),
    "detach": lambda s, y: s.dequant(y).detach(),
    "view": lambda s, y: s.dequant(y)[:, :2],
    "list": lambda s, y: s.dequant([y])[0],
    "dict": lambda s, y: s.dequant({"y": y})["y"],
    "of a view": lambda s, y: s.dequant(y[:, :2]),
    "of data": lambda s, y: s.dequant(y.data),
    "of detach": lambda s, y: s.dequant(y.detach()),
    "of flatten": lambda s, y: s.dequant(s.flat(y)),
    "of identity": lambda s, y: s.dequant(s.same(y)),
    "as_subclass": lambda s, y: y.as_subclass(Tensor),
}


def _iadd(s: Net, r: Tensor) -> None:
    r += 1.0


def _setitem(s: Net, r: Tensor) -> None:
    r[...] = 3.0


WRITERS: dict[str, Callable[[Net, Tensor], Any]] = {
    "mul_": lambda s, r: r.mul_(2.0),
    "+=": _iadd,
    "[...] =": _setitem,
    "out": lambda s, r: torch.add(r, 1.0, out=r),
    "view": lambda s, r: r.view(-1)[3:].zero_(),
    "relu": lambda s, r: torch.nn.functional.hardtanh(r, 0, 0.1, inplace=True),
    "module": lambda s, r: nn.ReLU6(inplace=True)(r.neg_()),
    "copy_": lambda s, r: r.copy_(torch.zeros(r.shape)),
}


@pytest.mark.in_turns("sharing", "method", of=2)
@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_tensor_that_is_read_after_its_real_values_were_written_to(method: str, sharing: str) -> None:
    for writer in WRITERS if sharing == "stub" and method in BY_RUNNING else ("mul_", "out"):

        def body(s: Net, y: Tensor, write: Any = WRITERS[writer]) -> Tensor:
            write(s, SHARING[sharing](s, y))
            return y.flip(0)

        if method == "traced" and sharing in ("dequantize", "as_subclass", "dict"):
            continue  # tracing does not take these at all
        assert _is_refused(_stages(body, method)), (method, sharing, writer)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("method", BY_RUNNING)
def test_it_is_refused_in_every_mode_of_autograd(method: str, mode: Any) -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        s.dequant(y).mul_(2.0)
        return y.flip(0)

    assert _is_refused(_stages(body, method, mode))


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda r: r.data.mul_(2.0),
    "numpy": lambda r: r.detach().numpy().fill(1.0),
    "storage": lambda r: r.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("writer", UNSEEN)
@pytest.mark.parametrize("method", BY_RUNNING)
def test_writes_that_torch_does_not_count_are_the_same_at_every_stage(method: str, writer: str, mode: Any) -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        UNSEEN[writer](s.dequant(y))
        return y.flip(0)

    def without(s: Net, y: Tensor) -> Tensor:
        return y.flip(0)

    written, want = _stages(body, method, mode), Net(without).eval()(X)
    net = (Wrapped if method == "wrapped" else Net)(without).eval()
    assert not any(isinstance(found, str) for found in written.values())
    net.body = body
    with mode():
        for stage, run in _runs(prepared_on(method, net, (X,), "qint16").eval(), method):
            assert float((run() - want).detach().abs().max()) < 0.03, stage


def _written_and_forgotten(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y)
    r.mul_(2.0)
    return r.view(y.shape).to(y.device)


def _copy(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y).clone()
    r.mul_(2.0)
    return s.dequant(y.flip(0)) + r


def _other_part(s: Net, y: Tensor) -> Tensor:
    a, b = y[0], y[1]
    r = s.dequant(a)
    r.mul_(2.0)
    return r + s.dequant(b.flip(0))


def _of_a_copy(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y.flip(0))
    r.mul_(2.0)
    return r + s.dequant(y)


def _several(s: Net, y: Tensor) -> Tensor:
    r, t = s.dequant(y), s.dequant(y) + 1.0
    return r + t.mul_(2.0) + s.dequant(y.flip(0))


def _again(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y)
    r.relu_()
    z = s.quant2(r)
    return s.dequant(z.flip(0)) + r


class _TwoStubs(Net):
    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.quant2 = type(self.quant)()


class _WrappedTwoStubs(Wrapped, _TwoStubs):
    pass


KIND = (_TwoStubs, _WrappedTwoStubs)


@pytest.mark.in_turns("mode", "body", "method")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("body", [_written_and_forgotten, _copy, _other_part, _of_a_copy, _several, _again])
@pytest.mark.parametrize("method", METHODS)
def test_writes_that_no_quantized_tensor_sees_have_the_result_of_float(method: str, body: Body, mode: Any) -> None:
    assert not _is_refused(_stages(body, method, mode, KIND))


def _values_after_a_write(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y)
    y.relu_()
    return r.flip(0) + s.dequant(y)


def _outputs_after_a_write(s: Net, y: Tensor) -> Tensor:
    outs = [s.dequant(y)]
    y += 1.0
    outs.append(s.dequant(y))
    return outs[0] + outs[1]


def _view_after_a_write(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y).flatten(1)
    y.mul_(2.0)
    return r.view(y.shape)


def _view_of_the_base_after_a_write(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y[:, :2])
    y.mul_(2.0)
    return r + s.dequant(y[:, :2])


def _written_after_a_write(s: Net, y: Tensor) -> Tensor:
    r = s.dequant(y)
    y.relu_()
    r.add_(1.0)
    return y.flip(0)


@pytest.mark.parametrize(
    "body",
    [_values_after_a_write, _outputs_after_a_write, _view_after_a_write, _view_of_the_base_after_a_write,
     _written_after_a_write],
)  # fmt: skip
@pytest.mark.parametrize("method", ["wrapped", "traced", "JIT", "JIT_STRIP"])
def test_real_values_that_are_read_after_the_quantized_tensor_was_written_to(method: str, body: Body) -> None:
    _is_refused(_stages(body, method))


def test_real_values_that_nobody_reads_any_more_do_not_forbid_a_write() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        r = s.dequant(y)
        t = r * 2.0
        y.relu_()
        return t + s.dequant(y)

    assert not _is_refused(_stages(body, "wrapped"))


@pytest.mark.parametrize("method", METHODS)
def test_what_a_stub_took_is_written_to(method: str) -> None:
    def after(s: Net, y: Tensor) -> Tensor:
        f = s.dequant(y).abs()
        q = s.quant2(f)
        f.mul_(2.0)
        return q.flip(0)

    def before(s: Net, y: Tensor) -> Tensor:
        f = s.dequant(y).abs()
        f.mul_(2.0)
        return s.quant2(f).flip(0)

    def twice(s: Net, y: Tensor) -> Tensor:
        f = s.dequant(y).abs()
        q = s.quant2(f).flip(0)
        f.mul_(2.0)
        return s.dequant(q) + f

    assert _is_refused(_stages(after, method, kind=KIND))
    assert not _is_refused(_stages(before, method, kind=KIND)) and not _is_refused(_stages(twice, method, kind=KIND))


def _relu(s: Any, x: Tensor) -> Tensor:
    q = s.quant(x)
    q.relu_()
    return s.dequant(q) + x


def _relu_twice(s: Any, x: Tensor) -> Tensor:
    q = s.quant(x)
    q.relu_()
    q.clamp_(max=0.5)
    return s.dequant(q) * x.mean()


def _view_before(s: Any, x: Tensor) -> Tensor:
    part = x[:, :2]
    q = s.quant(x)
    nn.functional.relu(q, inplace=True)
    return s.dequant(q)[:, :2] + part


def _of_a_view(s: Any, x: Tensor) -> Tensor:
    q = s.quant(x[:, :2])
    q.relu_()
    return s.dequant(q) + x[:, :2]


@pytest.mark.parametrize("body", [_relu, _relu_twice, _view_before, _of_a_view])
@pytest.mark.parametrize("method", BY_RUNNING)
def test_what_a_stub_took_sees_writes_to_the_quantized_tensor(method: str, body: Any, tmp_path: Any) -> None:
    net = (_WrappedTaking if method == "wrapped" else _Taking)(body)
    x, other = X.clone(), X.clone()
    with torch.no_grad():
        want = net(other)
        qat = calibrate(prepared_on(method, net, (X,), "qint16"), (x,))
        assert torch.allclose(x, other, atol=0.05)  # as the float model does to its input
        for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION):
            set_fake_quantize(qat, state)
            assert torch.allclose(qat(X.clone()), want, atol=0.05), state
        quantized = (convert if method == "eager" else convert_fx)(qat)
        integers = quantized(X.clone())
        assert torch.equal(integers, qat(X.clone()))
        (found,) = run_onnx(export_quantized_onnx(quantized, (X.clone(),), tmp_path / "m.onnx"), (X,))
    assert torch.allclose(found, integers, atol=1e-5)


@pytest.mark.parametrize("method", BY_RUNNING)
def test_a_part_of_what_a_stub_took_cannot_see_writes(method: str) -> None:
    def body(s: Any, x: Tensor) -> Tensor:
        q = s.quant(x)
        q[:, :2].relu_()
        return s.dequant(q[:, :2]) + x[:, :2]

    net = (_WrappedTaking if method == "wrapped" else _Taking)(body)
    qat = prepared_on(method, net, (X,), "qint16")
    with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match=r"(?s)test_lent_values\.py:\d+.*made of an"):
        qat(X.clone())


class _Taking(nn.Module):
    """The code that a test gives has the stubs."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.body = QuantStub(), DeQuantStub(), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class _WrappedTaking(_Taking):
    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_float_part_that_writes_in_place() -> None:
    """Operators of the CPU in a hybrid model get the memory of the quantized tensor, and no copy of it."""

    class Hybrid(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.reads, self.quant, self.fc = reads, Net(lambda s, y: y).quant, nn.Linear(8, 8)
            self.elu, self.quant2, self.dequant = nn.ELU(inplace=True), Net(lambda s, y: y).quant, Net(None).dequant

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(self.quant(x))
            z = self.quant2(self.elu(y))
            return self.dequant(y if self.reads else z)

    for reads in (False, True):
        net = Hybrid(reads).eval()
        for path, module in net.named_modules():
            module.qconfig = qconfig("qint16") if path in ("quant", "fc", "quant2") else None
        with torch.no_grad():
            qat = prepare_qat(net, hybrid=True).eval()
            set_fake_quantize(qat, FakeQuantState.CALIBRATION)
            if not reads:
                qat(X)
                continue
            with pytest.raises(UnsupportedOperatorError, match=r"test_lent_values.*a float operator.*test_lent_values"):
                qat(X)


def test_quantized_values_written_into_real_ones() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        r = s.dequant(y)
        r[0] = y[1]
        return torch.cat([r, y.flip(0)])

    assert all(_is_refused(_stages(body, method)) for method in METHODS if method != "eager")  # which takes no setitem


def test_the_error_names_who_reads_and_the_stub() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        r = s.dequant(y)
        r.clamp_(0, 1)
        return y * 2

    line = body.__code__.co_firstlineno
    found = _stages(body, "wrapped")["CALIBRATION"]
    assert f"of `_leaf_inner` (test_lent_values.py:{line + 3}) reads" in found
    assert f"`DeQuantStub` at `dequant` (test_lent_values.py:{line + 1})" in found and ".clone()" in found


def test_real_values_outside_of_a_model_have_memory_of_their_own() -> None:
    q = QTensor(torch.tensor([1.0, 2.0]), 0.5, "qint8")
    q.dequantize().mul_(2.0)
    assert q.dequantize().tolist() == [1.0, 2.0]


@pytest.mark.slow
def test_loans_of_a_tensor_that_lives_long_are_forgotten() -> None:
    q = QTensor(torch.ones(4), 0.5, "qint8")
    for _ in range(100):
        q.lent("somebody")
    gc.collect()
    assert len(vars(q)["_membership"].group.loans) < 10
