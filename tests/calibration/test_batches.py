"""What every call takes as batches, and what it keeps of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.quantization import (
    QuantWrapper,
    auto_calibrate,
    calibrate,
    correct_bias,
    equalize,
    get_default_qconfig,
    prepare_qat_fx,
    reestimate_bn,
    weight_reconstruction,
)

COUNT = 6


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(COUNT)]


def float_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    return QuantWrapper(nn.Sequential(*layers)).eval()


def prepared() -> nn.Module:
    return prepare_qat_fx(float_net(), {"": get_default_qconfig()})


def calibrated() -> nn.Module:
    model = prepared()
    calibrate(model, images())
    return model


@functools.wraps(weight_reconstruction)
def few_steps(*args: Any, **kwargs: Any) -> Any:
    return weight_reconstruction(*args, custom_config_dict={"num_steps": 5}, **kwargs)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "calibrate": (calibrate, prepared),
    "auto_calibrate": (auto_calibrate, prepared),
    "weight_reconstruction": (few_steps, calibrated),
    "correct_bias": (correct_bias, calibrated),
    "equalize": (equalize, float_net),
    "reestimate_bn": (reestimate_bn, float_net),
}
every_call = pytest.mark.parametrize(("call", "make"), CALLS.values(), ids=CALLS)


class Stream(IterableDataset):
    """Images one by one; how many there are is not known before."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.cat(images())


class Unknown(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.in_turns("spelled", "call", of=2)
@every_call
@pytest.mark.parametrize(
    "spelled",
    [tuple, iter, lambda data: DataLoader(Stream(), batch_size=4), lambda data: DataLoader(Unknown(), batch_size=4)],
    ids=["tuple", "generator", "DataLoader", "DataLoader that refuses its length"],
)
def test_batches_come_in_any_form(call, make, spelled) -> None:
    found, expected = make(), _of_a_list(call, make)
    call(found, spelled(images()))
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


@functools.cache
def _of_a_list(call, make) -> dict[str, Tensor]:
    """The state of a model after a call with its batches in a list."""
    model = make()
    call(model, images())
    return model.state_dict()


@every_call
@pytest.mark.parametrize("given", [images()[0], {"x": images()[0]}, "images", None], ids=["one", "dict", "str", "None"])
def test_one_batch_is_no_batches(call, make, given) -> None:
    name = call.__name__
    with pytest.raises(QuantizationConfigError, match=rf"^{name}: .* must be a list, .*{type(given).__name__}; give"):
        call(make(), given)


@every_call
def test_a_generator_that_is_used_up_is_named(call, make) -> None:
    used = iter(images())
    list(used)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(QuantizationConfigError, match=f"^{call.__name__}: the data have no batches; a generator"):
        call(model, used)
    if call is not calibrate:  # its observers wait for data
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["calibrate", "reestimate_bn"])
def test_a_call_of_one_pass_keeps_no_batches(name: str) -> None:
    call, make = CALLS[name]
    seen: list[weakref.ref] = []
    alive: list[int] = []

    def stream() -> Iterator[Tensor]:
        for _ in range(COUNT):
            batch = torch.randn(4, 3, 6, 6)
            seen.append(weakref.ref(batch))
            alive.append(sum(ref() is not None for ref in seen))
            yield batch
            del batch

    call(make(), stream())
    assert len(alive) == COUNT and max(alive) <= 2  # the one that was run, and the next


def test_data_that_fail_leave_the_statistics_as_they_were() -> None:
    def stream() -> Iterator[Tensor]:
        yield images()[0]
        raise OSError("disk")

    net = float_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(OSError, match="disk"):
        reestimate_bn(net, stream())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training and net.module[1].momentum == 0.1
