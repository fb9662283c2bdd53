"""Two models that run in step: every pair is compared, nothing else is held."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.watch import CallLog, OperatorCall, Pairing, pair_calls, run_in_step
from horizon_plugin_pytorch.watch.in_step import NotAlike, run_alike
from tests.watch.models import ROUTES, at_stage, data, net_of


def paired(first: nn.Module, second: nn.Module, *inputs: Any) -> Pairing:
    return pair_calls(*(CallLog.of(model, *inputs) for model in (first, second)))


def real(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QTensor) else x


@pytest.mark.parametrize("route", ROUTES)
def test_features_of_float_and_integers(route: str) -> None:
    first, second, x = net_of(route).eval(), at_stage(route, "converted"), data()
    pairing, found = paired(first, second, x), {}

    def compare(one: OperatorCall, other: OperatorCall) -> None:
        wanted, values = (real(call.outputs[0]).detach() for call in (one, other))
        found[one.name, other.name] = float((values - wanted).norm() / wanted.norm())

    outs = run_in_step(first, second, pairing, compare, lambda model: model(x))
    assert list(found) == [(one.name, other.name) for one, other in pairing.pairs]
    assert max(found.values()) < 0.3
    for out, model in zip(outs, (first, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(out), tensors_of(model(x)), strict=True))


def test_only_the_pair_at_hand_is_held() -> None:
    nets = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))).eval() for _ in range(2)]
    pairing = paired(*nets, torch.ones(1, 4))
    given: list[weakref.ref] = []
    alive: list[int] = []

    def note(one: OperatorCall, other: OperatorCall) -> None:
        given.extend(weakref.ref(call.output) for call in (one, other))
        alive.append(sum(ref() is not None for ref in given))

    with torch.no_grad():
        run_in_step(*nets, pairing, note, lambda model: model(torch.ones(1, 4)))
    assert len(alive) == 9 and max(alive) == 4  # in each model what goes in and what comes out


class Dropping(nn.Module):
    """Chance, and an order that depends on it not."""

    def __init__(self, is_swapped: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.is_swapped = nn.Dropout(0.5), nn.Dropout(0.5), is_swapped

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.b(x), self.a(x)) if self.is_swapped else (self.a(x), self.b(x))


def test_each_model_has_its_own_random_numbers() -> None:
    first, second, x = Dropping(), Dropping(is_swapped=True), torch.ones(64)
    pairing, found = paired(first, second, x), {}
    alone = []
    for model in (first, second):
        torch.manual_seed(3)
        alone.append(model(x))
        after = torch.get_rng_state()
    torch.manual_seed(3)
    together = run_in_step(first, second, pairing, lambda a, b: found.update({b.name: a.name}), lambda m: m(x))
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))
    assert found == {"b": "b", "a": "a"} and torch.equal(torch.get_rng_state(), after)


def test_gradients_flow_as_outside() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    pairing = paired(first, second, x)
    one, other = run_in_step(first, second, pairing, lambda a, b: None, lambda m: m(x))
    assert one.requires_grad and other.requires_grad
    with torch.no_grad():
        one, _ = run_in_step(first, second, pairing, lambda a, b: None, lambda m: m(x))
    assert not one.requires_grad


def _fail(*args: Any) -> None:
    raise ZeroDivisionError("of the consumer")


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            raise ValueError("of the model")
        return x


@pytest.mark.parametrize("place", [0, 1, 2])
def test_errors_come_out_and_no_thread_stays(place: int) -> None:
    nets = [nn.Sequential(nn.ReLU(), Fails(), nn.Sigmoid()), nn.Sequential(nn.ReLU(), nn.Identity(), nn.Sigmoid())]
    nets = nets[::-1] if place == 1 else nets
    pairing, count = paired(*nets, torch.ones(2)), threading.active_count()
    x, consumer = (torch.ones(2), _fail) if place == 2 else (torch.full((2,), 99.0), lambda a, b: None)
    with pytest.raises((ZeroDivisionError, ValueError), match="of the"):
        run_in_step(*nets, pairing, consumer, lambda model: model(x))
    assert threading.active_count() == count


def test_a_model_that_takes_another_branch_is_told() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.ReLU(), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    first, second = Branch(), Branch()
    pairing = paired(first, second, torch.ones(1))
    with pytest.raises(CheckError, match="call 2 was `a` when the calls were paired and is `b` now"):
        run_in_step(first, second, pairing, lambda a, b: None, lambda m: m(-torch.ones(1)))


class Stopping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor, goes_on: bool) -> Tensor:
        return self.b(self.a(x)) if goes_on else self.a(x)


@pytest.mark.parametrize(("is_paired", "text"), [(True, "`b` ran when"), (False, "`b` did not run when")])
def test_a_forward_that_ends_earlier_or_later_is_told(is_paired: bool, text: str) -> None:
    first, second, x = Stopping(), Stopping(), torch.ones(1)
    pairing = paired(first, second, x, is_paired)
    with pytest.raises(CheckError, match=text):
        run_in_step(first, second, pairing, lambda a, b: None, lambda m: m(x, not is_paired))


def test_models_that_are_alike() -> None:
    """Calls are taken as they come, and both are written down; the first one that is another ends it."""
    x = torch.randn(2, 4)
    one, other = nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh())
    seen: list[str] = []
    logs = run_alike(one, other, lambda a, b: seen.append(f"{a.name} {b.name}"), lambda model: model(x))
    assert seen == ["0 0", "1 1"] and [len(log.calls) for log in logs] == [2, 2]
    assert logs[0].producers == logs[1].producers == [[None], [0]]
    for longer in (nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.Sigmoid())):
        for pair in ((one, longer), (longer, one)):
            with pytest.raises(NotAlike):
                run_alike(*pair, lambda a, b: None, lambda model: model(x))
