"""Arguments by keyword: every operator takes the names that its float form documents, on every route."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import row_of_module
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, prepare
from tests.operators.cases import CASES, Case
from tests.routes import as_numbers, calibrate, qconfig


class Named(nn.Module):
    """A model that gives its operator the arguments by the names of its float forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.names = list(inspect.signature(type(model.body).forward).parameters)[1:]

    def forward(self, *inputs: Tensor) -> Any:
        quantized = [getattr(self.model, f"quant_{i}")(x) for i, x in enumerate(inputs[: self.model.count])]
        y = self.model.body(**dict(zip(self.names, (*quantized, *inputs[self.model.count :]), strict=False)))
        if self.model.picks is None:
            return y, self.model.dequant(y)
        return (y, *[self.model.dequant(y[i]) for i in self.model.picks])


class Placed(Named):
    """The same by position."""

    def forward(self, *inputs: Tensor) -> Any:
        return self.model.run(*inputs)


def _module_cases() -> list[Case]:
    """One case for each class of the table that is a module by itself."""
    found: dict[type, Case] = {}
    for case in CASES:
        cls = type(case.make())
        row = row_of_module(cls)
        parameters = [] if row is None else list(inspect.signature(cls.forward).parameters.values())[1:]
        if row is not None and row.qat is not None and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
            found.setdefault(cls, case)
    return list(found.values())


MODULE_CASES = _module_cases()


def _integers(model: nn.Module, inputs: tuple, method: str) -> list[list[Tensor]]:
    """What the prepared and the converted model give."""
    model.qconfig = qconfig()  # type: ignore[assignment]
    given = {} if method == "eager" else {"qconfig_dict": {"": qconfig()}}
    qat = calibrate(prepare(model, inputs, method=method, out_dir=None, **given), inputs)
    with torch.no_grad():
        return [as_numbers(qat(*inputs)), as_numbers(convert(qat)(*inputs))]


@pytest.mark.in_turns("method", "case")
@pytest.mark.parametrize("method", ["jit-strip", "eager"])
@pytest.mark.parametrize("case", MODULE_CASES, ids=lambda case: case.name)
def test_every_module_takes_the_names_of_its_float_forward(case: Case, method: str) -> None:
    set_march(case.march)
    # Inputs of their own for each: in eager mode a module that writes in place changes them, as in float.
    by_name = _integers(Named(case.model()).eval(), case.inputs(), method)
    by_place = _integers(Placed(case.model()).eval(), case.inputs(), method)
    for a, b in zip(by_name, by_place, strict=True):
        assert len(a) == len(b) and all(map(torch.equal, a, b))


class Net(nn.Module):
    """QuantStub, a function of the model, DeQuantStub."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.function, self.ff = QuantStub(), DeQuantStub(), function, FloatFunctional()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(x=self.function(self, self.quant(x=x)))


CALLS = {
    "fused": (lambda m, x: m.relu(input=m.bn(input=m.conv(input=x)) + x), lambda m, x: m.relu(m.bn(m.conv(x)) + x)),
    "functional": (lambda m, x: m.ff.add(x=x, y=m.conv(input=x)), lambda m, x: m.ff.add(x, m.conv(x))),
    "functional-mixed": (lambda m, x: m.ff.add(x, y=m.conv(x)), lambda m, x: m.ff.add(x, m.conv(x))),
    "functional-cat": (lambda m, x: m.ff.cat(x=[x, x], dim=1), lambda m, x: m.ff.cat([x, x], 1)),
    "functional-scalar": (lambda m, x: m.ff.mul_scalar(x=x, y=2.0), lambda m, x: m.ff.mul_scalar(x, 2.0)),
    "add": (lambda m, x: torch.add(input=x, other=m.conv(x)), lambda m, x: torch.add(x, m.conv(x))),
    "add-swapped": (lambda m, x: torch.add(other=x, input=m.conv(x)), lambda m, x: torch.add(m.conv(x), x)),
    "sub": (lambda m, x: torch.sub(input=x, other=m.conv(x)), lambda m, x: torch.sub(x, m.conv(x))),
    "mul-method": (lambda m, x: x.mul(other=x), lambda m, x: x.mul(x)),
    "mul-number": (lambda m, x: torch.mul(input=x, other=2.0), lambda m, x: torch.mul(x, 2.0)),
    "div": (lambda m, x: torch.div(input=x, other=4.0), lambda m, x: torch.div(x, 4.0)),
    "matmul": (lambda m, x: torch.matmul(input=x, other=x), lambda m, x: torch.matmul(x, x)),
    "bmm": (lambda m, x: torch.bmm(input=x[0], mat2=x[1]), lambda m, x: torch.bmm(x[0], x[1])),
    "max": (lambda m, x: torch.max(input=x, other=m.conv(x)), lambda m, x: torch.max(x, m.conv(x))),
    "maximum": (lambda m, x: torch.maximum(x, other=m.conv(x)), lambda m, x: torch.maximum(x, m.conv(x))),
    "where": (
        lambda m, x: torch.where(condition=x > 0, input=x, other=m.conv(x)),
        lambda m, x: torch.where(x > 0, x, m.conv(x)),
    ),
    "masked-fill": (
        lambda m, x: torch.masked_fill(input=x, mask=torch.ones(8) > 0, value=1.0),
        lambda m, x: torch.masked_fill(x, torch.ones(8) > 0, 1.0),
    ),
    "addmm": (
        lambda m, x: torch.addmm(input=x[0, 0], mat1=x[0, 1], mat2=x[0, 2]),
        lambda m, x: torch.addmm(x[0, 0], x[0, 1], x[0, 2]),
    ),
    "rsub": (lambda m, x: torch.rsub(input=x, other=1.0), lambda m, x: 1.0 - x),
    "cat": (lambda m, x: torch.cat(tensors=[x, x], dim=1), lambda m, x: torch.cat([x, x], 1)),
    "softmax": (lambda m, x: F.softmax(input=x, dim=1), lambda m, x: F.softmax(x, 1)),
    "permute": (lambda m, x: x.permute(dims=(0, 2, 3, 1)), lambda m, x: x.permute(0, 2, 3, 1)),
    "attention": (
        lambda m, x: m.attention(query=x[0], key=x[0], value=x[0], need_weights=False)[0],
        lambda m, x: m.attention(x[0], x[0], x[0], need_weights=False)[0],
    ),
}


@pytest.mark.in_turns("method", "name")
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_functions_and_fused_layers_take_keywords(name: str, method: str) -> None:
    set_march(March.NASH_M)
    found, x = [], torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for function in CALLS[name]:
        torch.manual_seed(0)
        found.append(_integers(Net(function).eval(), (x,), method))
    for a, b in zip(*found, strict=True):
        assert all(map(torch.equal, a, b))
