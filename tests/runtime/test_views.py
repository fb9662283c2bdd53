"""Writes through views of quantized tensors, on every method: float's result at every stage, or an error with its line.

Nothing in between: a write that is lost, or that only some stages see, would be silently wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import TraceError, UnsupportedOperatorError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast
from horizon_plugin_pytorch.quantization.qconfig import QConfig
from tests.routes import prepared_on, qconfig

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
METHODS = ("wrapped", "traced", "JIT", "JIT_STRIP", "eager")
Body = Callable[["Net", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


class Net(nn.Module):
    """A layer, and what `body` does with its result."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.quant, self.dequant, self.fc = body, QuantStub(), DeQuantStub(), nn.Linear(8, 8)
        self.act, self.same, self.flat = nn.ReLU(inplace=True), nn.Identity(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self, self.fc(self.quant(x))))


class Wrapped(Net):
    """The same in code that tracing does not enter."""

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.fc(self.quant(x))))


def _stages(body: Body, method: str) -> dict[str, float]:
    """How far each stage is from float."""
    net = (Wrapped if method == "wrapped" else Net)(body).eval()
    with torch.no_grad():
        want = net(X.clone())
        found, qat = {}, prepared_on(method, net, (X,), "qint16").eval()
        for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION):
            set_fake_quantize(qat, state)
            found[state.name] = qat(X.clone())
        found["converted"] = (convert if method == "eager" else convert_fx)(qat)(X.clone())
    assert all(x.shape == want.shape for x in found.values())
    return {stage: float((x - want).abs().max()) for stage, x in found.items()}


def _tried(run: Callable[[], Any]) -> tuple[Any, str]:
    """What a run gives, or how it is refused."""
    try:
        return run(), ""
    except (NotImplementedError, TraceError) as error:
        return None, str(error)


def _follows_float_or_refuses(body: Body, method: str) -> bool:
    """Has it float's result? If not, it must be refused."""
    distances, refusal = _tried(lambda: _stages(body, method))
    if distances is None:
        assert re.search(r"test_views\.py:\d+", refusal), refusal
        return False
    assert max(distances.values()) < 0.03, distances  # weights are int8; what is lost is larger
    return True


VIEWS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "slice": lambda s, y: y[:, :2],
    "index": lambda s, y: y[0],
    "ellipsis": lambda s, y: y[..., 1:3],
    "new axis": lambda s, y: y[None],
    "position": lambda s, y: y[:, torch.tensor(1)],
    "view": lambda s, y: y.view(2, -1),
    "view_as": lambda s, y: y.view_as(y),
    "reshape": lambda s, y: y.reshape(2, -1),
    "flatten": lambda s, y: torch.flatten(y, 1),
    "ravel": lambda s, y: y.ravel(),
    "unflatten": lambda s, y: y.unflatten(1, (2, 2)),
    "chunk": lambda s, y: y.chunk(2, 1)[1],
    "split": lambda s, y: y.split(2, -1)[0],
    "tensor_split": lambda s, y: torch.tensor_split(y, 2, 1)[0],
    "unbind": lambda s, y: y.unbind(0)[1],
    "transpose": lambda s, y: y.transpose(1, 2),
    "permute": lambda s, y: y.permute(2, 0, 1),
    "movedim": lambda s, y: y.movedim(0, 2),
    "swapaxes": lambda s, y: y.swapaxes(0, 1),
    "mT": lambda s, y: y.mT,
    "squeeze": lambda s, y: y[:1].squeeze(0),
    "unsqueeze": lambda s, y: y.unsqueeze(0),
    "expand": lambda s, y: y.expand(2, 4, 8),
    "expand_as": lambda s, y: y.expand_as(y),
    "narrow": lambda s, y: y.narrow(1, 0, 2),
    "select": lambda s, y: y.select(1, 0),
    "diagonal": lambda s, y: y.diagonal(0, 1, 2),
    "unfold": lambda s, y: y.unfold(2, 2, 2),
    "data": lambda s, y: y.data,
    "detach": lambda s, y: y.detach(),
    "contiguous": lambda s, y: y.contiguous(),
    "float": lambda s, y: y.float(),
    "to": lambda s, y: y.to("cpu"),
    "several": lambda s, y: y[0].view(-1)[:4],
    "dropout": lambda s, y: F.dropout(y, 0.5, False),
    "identity": lambda s, y: s.same(y),
    "Flatten": lambda s, y: s.flat(y),
    "itself": lambda s, y: y,
}


def _iadd(s: Net, v: Tensor) -> None:
    v += 0.5


def _isub_part(s: Net, v: Tensor) -> None:
    v[0] -= 1


def _mask(s: Net, v: Tensor) -> None:
    v[v < 0] = 0.0


def _all(s: Net, v: Tensor) -> None:
    v[:] = 0.25


def _part(s: Net, v: Tensor) -> None:
    v[0] = 0.25


WRITERS: dict[str, Callable[[Net, Tensor], Any]] = {
    "mul_": lambda s, v: v.mul_(2.0),
    "clamp_": lambda s, v: v.clamp_(0, 1),
    "relu_": lambda s, v: v.relu_(),
    "sigmoid_": lambda s, v: v.sigmoid_(),
    "neg_": lambda s, v: v.neg_(),
    "masked_fill_": lambda s, v: v.masked_fill_(v < 0, 0.0),
    "copy_": lambda s, v: v.copy_(v * 2),
    "zero_": lambda s, v: v.zero_(),
    "fill_": lambda s, v: v.fill_(1.0),
    "tril_": lambda s, v: v.tril_(),
    "unsqueeze_": lambda s, v: v.unsqueeze_(0),
    "data": lambda s, v: v.data.mul_(2.0),
    "out": lambda s, v: torch.add(v, 1.0, out=v),
    "F.relu": lambda s, v: F.relu(v, inplace=True),
    "F.silu": lambda s, v: F.silu(v, True),
    "nn.ReLU": lambda s, v: s.act(v),
    "+=": _iadd,
    "part -=": _isub_part,
    "mask": _mask,
    "all": _all,
    "part": _part,
}
EVERYWHERE = ("mul_", "relu_", "nn.ReLU", "+=")  # with every view; the other writers with some


def _writers(method: str, view: str) -> list[str]:
    if view in ("slice", "view", "itself"):
        return list(WRITERS)
    return list(EVERYWHERE) if method in ("wrapped", "eager") else ["mul_", "+="]


@pytest.mark.in_turns("method", "view", of=2)
@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("method", METHODS)
def test_a_base_that_is_read_after_a_write_through_a_view(method: str, view: str) -> None:
    for writer in _writers(method, view):

        def body(s: Net, y: Tensor, write: Any = WRITERS[writer]) -> Tensor:
            write(s, VIEWS[view](s, y))
            return y.flip(0)

        _follows_float_or_refuses(body, method)


@pytest.mark.in_turns("method", "view", of=2)
@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("method", METHODS)
def test_a_view_that_is_read_after_a_write_to_its_base(method: str, view: str) -> None:
    for writer in _writers(method, view):

        def body(s: Net, y: Tensor, write: Any = WRITERS[writer]) -> Tensor:
            v = VIEWS[view](s, y)
            write(s, y)
            return v.flip(0)

        _follows_float_or_refuses(body, method)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda y: y.clone(),
    "list": lambda y: y[:, [0, 1]],
    "copying reshape": lambda y: y.transpose(1, 2).reshape(2, -1),
    "copying contiguous": lambda y: y.transpose(1, 2).contiguous(),
    "index_select": lambda y: y.index_select(1, torch.tensor([0, 1])),
    "repeat": lambda y: y.repeat(1, 1, 2),
    "flip": lambda y: y.flip(0),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("method", ["wrapped", "JIT", "JIT_STRIP"])
def test_a_copy_and_its_source_are_written_apart(method: str, copy: str) -> None:
    def after(s: Net, y: Tensor) -> Tensor:
        COPIES[copy](y).mul_(2.0)
        return y.flip(0)

    def before(s: Net, y: Tensor) -> Tensor:
        c = COPIES[copy](y)
        y += 1.0
        return c.flip(0)

    assert _follows_float_or_refuses(after, method) and _follows_float_or_refuses(before, method)


def _augmented(s: Net, y: Tensor) -> Tensor:
    y[0] += 1.0
    y[:, :2] *= 2.0
    y[:, [0, 3]] -= 1.0
    y += 0.5
    y[y < 0] = 0.0
    return y.flip(0)


def _parts(s: Net, y: Tensor) -> Tensor:
    q, k = y.chunk(2, 1)
    q *= 2.0
    k = k + q
    return torch.cat([q, k], 1)


def _parts_of_what_was_written(s: Net, y: Tensor) -> Tensor:
    v = y.view(-1)
    v.mul_(2.0)
    a, b = v.chunk(2)
    a += 1.0
    return torch.cat([a, b])


def _forgotten_base(s: Net, y: Tensor) -> Tensor:
    v = y.view(-1)
    v.mul_(2.0)
    return v.view(2, 4, 8)


@pytest.mark.parametrize("body", [_augmented, _parts, _parts_of_what_was_written, _forgotten_base])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "eager"])
def test_writes_that_nobody_else_sees_have_the_result_of_float(method: str, body: Body) -> None:
    assert _follows_float_or_refuses(body, method)


def _other_index(s: Net, y: Tensor) -> Tensor:
    t = y[0]
    t += 1.0
    y[1] = t
    return y.flip(0)


def _written_after_it_was_written_back(s: Net, y: Tensor) -> Tensor:
    t = y[0]
    t += 1.0
    y[0] = t
    t.mul_(2.0)
    return y.flip(0)


def _read_after_it_was_written_back(s: Net, y: Tensor) -> Tensor:
    t = y[0]
    t += 1.0
    y[0] = t
    return torch.cat([y.flip(0), t[None]])


def _chained(s: Net, y: Tensor) -> Tensor:
    y[0][1] += 1.0
    return y.flip(0)


def _chained_assignment(s: Net, y: Tensor) -> Tensor:
    y[0][1] = 1.0
    return y.flip(0)


def _another_part(s: Net, y: Tensor) -> Tensor:
    a = y[:, :2]
    y[:, 2:] = 0.0
    return torch.cat([a, y], 1)


def _another_part_and_then_this(s: Net, y: Tensor) -> Tensor:
    a = y[:, :2]
    y[:, 2:] = 0.0
    a.mul_(2.0)
    return y.flip(0)


def _rows(s: Net, y: Tensor) -> Tensor:
    for row in y.chunk(2):
        row += 1.0
    return y.flip(0)


def _swapped(s: Net, y: Tensor) -> Tensor:
    y[0], y[1] = y[1], y[0]
    return y.flip(0)


def _given(s: Net, y: Tensor) -> Tensor:
    y[:, :2].mul_(2.0)
    return y


def _listed(s: Net, y: Tensor) -> Tensor:
    y[:, :2].mul_(2.0)
    return torch.cat([y, y], 1)


def _part_of_mask(s: Net, y: Tensor) -> Tensor:
    mask = y > 0
    mask[:, 0][:, 1] = True
    return torch.where(mask, y, y * 0.5)


def _view_of_mask(s: Net, y: Tensor) -> Tensor:
    mask = y > 0
    v = mask.view(-1)
    v &= False
    return torch.where(mask, y, y * 0.5)


def _row_of_zeros(s: Net, y: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 8)
    for i in range(2):
        out[i][:2] = y[i, :2]
    return out + y


def _earlier_row_of_zeros(s: Net, y: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 8)
    row = out[0]
    out[:, 1:3] = y[:, :2]
    return out + row


def _row_of_what_was_zeros(s: Net, y: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 8)
    out[:, 1:3] = y[:, :2]
    row = out[0]
    row += 1.0
    return out + y


STATEMENTS = [
    _other_index, _written_after_it_was_written_back, _read_after_it_was_written_back, _chained, _chained_assignment,
    _another_part, _another_part_and_then_this, _rows, _swapped, _given, _listed, _part_of_mask, _view_of_mask,
    _row_of_zeros, _earlier_row_of_zeros, _row_of_what_was_zeros,
]  # fmt: skip


@pytest.mark.parametrize("body", STATEMENTS)
@pytest.mark.parametrize("method", METHODS)
def test_statements_that_write_have_the_result_of_float_or_are_refused(method: str, body: Body) -> None:
    _follows_float_or_refuses(body, method)


def test_a_view_of_memory_that_nobody_has_a_name_for_is_written() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        out = torch.zeros(64).view(2, 4, 8)
        for i in range(2):
            out[i, :2] = y[i, :2]
        return out + y

    assert all(_follows_float_or_refuses(body, method) for method in ("wrapped", "JIT"))


def test_the_error_says_who_reads_and_who_wrote() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        v = y.view(-1)
        v.clamp_(0, 1)
        return y * 2

    line = body.__code__.co_firstlineno
    with pytest.raises(
        UnsupportedOperatorError,
        match=rf"read at `_leaf_inner` \(test_views.py:{line + 3}\) .* by `torch.Tensor.clamp_` "
        rf"\(test_views.py:{line + 2}\) through another tensor.*`x = x \+ 1`",
    ):
        _stages(body, "wrapped")


def test_shape_and_device_of_a_stale_tensor_can_be_asked_for() -> None:
    def body(s: Net, y: Tensor) -> Tensor:
        v = y.view(-1)
        v.mul_(2.0)
        return v.view(y.shape).to(y.device)

    assert _follows_float_or_refuses(body, "wrapped")


FLOAT16 = [_augmented, _parts, _forgotten_base, _other_index, _chained, _rows, _given, _listed]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("body", [*FLOAT16, lambda s, y: (s.act(y[:, :2]), y.flip(0))[1]])
def test_float16_results_in_wrapped_code(body: Body, is_inside: bool) -> None:
    """Real numbers that come from outside of the wrapped code share memory; those computed inside have modules."""

    class Half(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x)
            return self.dequant(self.inner(y if is_inside else self.fc(y)))

    wanted = (lambda s, y: body(s, y * 1.0)) if is_inside else body
    integers = qconfig("qint16")
    half = QConfig(activation=FakeCast.with_args(dtype=torch.float16), weight=integers.weight)
    net = Half(wanted).eval()

    def furthest() -> float:
        with torch.no_grad():
            want, found = net(X.clone()), []
            qat = prepare_qat_fx(net, {"": half, "module_name": {"quant": integers}}).eval()
            for state in (FakeQuantState.CALIBRATION, FakeQuantState.VALIDATION):
                set_fake_quantize(qat, state)
                found.append(qat(X.clone()))
            found.append(convert_fx(qat)(X.clone()))
        return max(float((x - want).abs().max()) for x in found)

    distance, refusal = _tried(furthest)
    assert distance is None or distance < 0.03
    assert distance is not None or (is_inside and re.search(r"test_views\.py:\d+", refusal)), refusal
