"""Tensors that the forward makes and writes into: the same by tracing as by running, in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare
from tests.routes import as_numbers, calibrate, mismatches


class Net(nn.Module):
    """Code before, in or after the quantized part."""

    def __init__(self, before: Callable = lambda x: x, inside: Callable = lambda x: x, after: Callable = lambda x: x):
        super().__init__()
        self.quant, self.dequant, self.fc, self.add = QuantStub(), DeQuantStub(), nn.Linear(4, 4), FloatFunctional()
        self.before, self.inside, self.after = before, inside, after

    def forward(self, x: Tensor) -> Any:
        y = self.inside(self.fc(self.quant(self.before(x))))
        return self.after(self.dequant(y))


def canvas(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    made[:, :2] = x[:, :2]
    return made


def canvas_that_is_computed_with(x: Tensor) -> Tensor:
    made = torch.ones(2, 4)
    made[:, 0] = x[:, 0]
    made[:, 1] = x[:, 1] * 2
    return made * 2 - made.flip(1)


def sum_of_parts(x: Tensor) -> Tensor:
    total = torch.zeros(2, 4)
    total += x
    total += 1
    return total * 2


def method(x: Tensor) -> Tensor:
    total = torch.ones(2, 4)
    total.add_(x).mul_(0.5)
    return torch.cat([total, x], 1).narrow(1, 0, 4)


def copied(x: Tensor) -> Tensor:
    made = torch.empty(2, 4)
    made.copy_(x)
    return made + made.abs()


def copied_over_nan(x: Tensor) -> Tensor:
    made = torch.full((2, 4), float("nan"))  # as `torch.empty` may be
    made.copy_(x)
    return made + made.abs()


def masked(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    made[x > 0] = 1.0
    return made + x


def out_argument(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    torch.add(x, 1, out=made)
    return made * 2


def index_copied(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    made.index_copy_(1, torch.tensor([2]), x[:, :1])
    return made.reshape(made.shape) * 2


def before_and_after(x: Tensor) -> Tensor:
    made = torch.ones(2, 4)
    before = made * x
    made[:, 1:] = x[:, 1:]
    return before + made.to(made.dtype)


def moved_constant(x: Tensor) -> Tensor:
    offset = np.ones(4, np.float32)
    made = x + torch.from_numpy(offset)
    offset += 1
    return made + torch.from_numpy(offset)


FUNCTIONS = [
    canvas, canvas_that_is_computed_with, sum_of_parts, method, copied, copied_over_nan, masked, out_argument,
    index_copied, before_and_after, moved_constant,
]  # fmt: skip


def inside(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    made[:, :2] = x[:, 2:]
    return made + x


CASES: dict[str, dict[str, Callable]] = {
    **{f"{f.__name__} before": {"before": f} for f in FUNCTIONS},
    **{f"{f.__name__} after": {"after": f} for f in FUNCTIONS},
    "inside": {"inside": inside},
    "a constant moves inside": {"inside": moved_constant},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_again_by_tracing_as_by_running(name: str) -> None:
    net, results = Net(**CASES[name]).eval(), []
    x = torch.randn(2, 4)
    batches = [x, x.flip(0)]  # in the range of the first
    for method in ("symbolic", "jit-strip"):
        qconfig = get_default_qconfig(activation_qkwargs={"dtype": "qint16", "averaging_constant": 0})
        model = prepare(net, (batches[0],), qconfig_dict={"": qconfig}, method=method, out_dir=None)
        calibrate(model, (x,))
        quantized = convert(model)
        with torch.no_grad():
            for batch in batches * 3:  # nothing is left of a run
                got, wanted = model(batch), net(batch)
                assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()
                assert mismatches(as_numbers(got), as_numbers(quantized(batch))) == 0
            results.append(as_numbers(model(batches[1])))
    assert mismatches(*results) == 0


def view_of_it(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    view = made.view(-1)
    made += x
    return view.reshape(2, 4) * 2


def through_a_view(x: Tensor) -> Tensor:
    made = torch.zeros(2, 4)
    row = made[0]
    row += x[0]
    return made + x


@pytest.mark.parametrize("function", [view_of_it, through_a_view])
def test_memory_that_two_tensors_share_is_refused_with_both_lines(function: Callable) -> None:
    with pytest.raises(TraceError, match=r"test_made_tensors\.py:\d+.*line test_made_tensors\.py:\d+ has written"):
        prepare(Net(before=function), (torch.randn(2, 4),), qconfig_dict={"": get_default_qconfig()}, method="symbolic")
