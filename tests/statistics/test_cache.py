"""Values that are kept while tensors hold the same numbers, whatever writes to them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch.statistics.cache import Cache


def _fused_step(x: Tensor) -> None:
    parameter = torch.nn.Parameter(x.detach())  # shares the memory
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam([parameter], 0.1, fused=True).step()


def _swapped(x: Tensor) -> None:
    torch.utils.swap_tensors(x, x.detach() + 1)


def _two_values(x: Tensor) -> None:
    flat = x.data.view(-1)
    flat[0], flat[1] = flat[1].clone(), flat[0].clone()


def _last_bit(x: Tensor) -> None:
    x.detach().view(-1).view(torch.int32)[-1] ^= 1


def _resized(x: Tensor) -> None:
    x.data = x.data.reshape(-1)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "data": lambda x: x.data.add_(1),
    "data, one value": lambda x: x.data.view(-1)[3:4].add_(1e-6),
    "data, replaced": lambda x: setattr(x, "data", x.data + 1),
    "data, another shape": _resized,
    "a numpy array": lambda x: x.detach().numpy().__setitem__(0, 7.0),
    "a fused optimizer": _fused_step,
    "swap_tensors": _swapped,
    "two values change places": _two_values,
    "the last bit of the last value": _last_bit,
    "a sign of zero": lambda x: x.data.view(-1)[5:6].neg_(),
}


def _tensor(layout: str) -> Tensor:
    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    return {"contiguous": x, "transposed": x.transpose(0, 1), "every other": x[:, ::2]}[layout]


def _filled(x: Tensor) -> Cache:
    """A cache that holds a value for the tensor, and kept it when it was asked again."""
    cache, made = Cache(), []
    for _ in range(3):
        cache.get((x,), lambda: made.append(1) or "old")
    assert len(made) == 1 and cache.holds((x,))
    return cache


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_seen(write: str) -> None:
    x = _tensor("contiguous")
    cache = _filled(x)
    WRITES[write](x)
    assert not cache.holds((x,))
    assert cache.get((x,), lambda: "new") == "new"


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "every other"])
def test_tensors_of_any_layout_are_compared(layout: str) -> None:
    x = _tensor(layout)
    cache = _filled(x)
    x.data[1, -1, 1, 0] += 1
    assert not cache.holds((x,))


def test_tensors_of_inference_mode_are_compared() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        cache = _filled(x)
        x[1] = 2
    assert not cache.holds((x,))


def test_the_same_numbers_in_another_place_are_the_same() -> None:
    x = torch.randn(3, 4)
    cache = _filled(x)
    assert cache.holds((x.clone(),))
    for other in (x.double(), x[:2], x.T.contiguous(), x.to("meta")):
        assert not cache.holds((other,))
    assert not cache.holds((x, x)) and not cache.holds(())


def test_tensors_without_numbers_are_known_by_identity() -> None:
    x = torch.empty(3, device="meta")
    cache = _filled(x)
    assert not cache.holds((torch.empty(3, device="meta"),))
    assert _filled(torch.empty(0)).holds((torch.empty(0),))


def test_a_copy_is_empty() -> None:
    x = torch.ones(2)
    for other in (copy.deepcopy(_filled(x)), pickle.loads(pickle.dumps(_filled(x)))):
        assert not other.holds((x,))


def test_what_is_written_while_a_value_is_made_is_seen() -> None:
    x, cache = torch.ones(2), Cache()

    def build() -> float:
        found = float(x.sum())
        x.data.zero_()  # another thread
        return found

    assert cache.get((x,), build) == 2
    assert cache.get((x,), lambda: float(x.sum())) == 0


def test_what_is_written_while_a_value_is_made_and_taken_back_later_is_seen() -> None:
    x, cache = torch.ones(3), Cache()
    cache.get((x,), lambda: float(x.mul_(2).sum()))
    x.fill_(1)
    assert cache.get((x,), lambda: float(x.sum())) == 3


def test_threads_that_read_and_forget_never_see_half_a_value() -> None:
    sources = [(torch.full((50,), float(i)), torch.full((3,), float(i))) for i in range(3)]
    cache, failed = Cache(), []

    def work(seed: int) -> None:
        for i in range(400):
            pair = sources[(i + seed) % 3]
            try:
                if cache.get(pair, lambda pair=pair: float(pair[0][0])) != float(pair[0][0]):
                    failed.append("another's value")
                if i % 7 == seed:
                    cache.clear()
            except Exception as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
