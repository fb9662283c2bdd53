"""A forward that branches on `self.training`: tracing has one mode, and says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, get_default_qconfig, prepare_qat_fx
from horizon_plugin_pytorch.utils.fx_helper import wrap


class Net(nn.Module):
    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__()
        self.quant, self.head, self.dequant = QuantStub(), head(), DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.head(self.quant(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.extra = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)


class Auxiliary(Head):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.training:
            x = self.extra(x)
        return x


class Statistics(Head):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(x.mean()) > 100:  # cannot be traced
            return x
        return self.conv(x)


class Dropped(Head):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(self.conv(x), 0.5, self.training), p=0.1, training=self.training)


class Hidden(Head):
    @wrap()
    def code(self, x: Tensor) -> Tensor:
        return self.extra(x) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.conv(x))


class Both(Head):
    def forward(self, x: Tensor) -> Tensor:
        assert self.training in (True, False)
        return self.conv(x)


def _prepared(head: Callable, is_training: bool) -> tuple[nn.Module, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = prepare_qat_fx(Net(head).train(is_training), {"": get_default_qconfig()})
    return model, [str(w.message) for w in said if w.category is QuantizationWarning and "mode" in str(w.message)]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_forward_that_does_something_else_in_the_other_mode_is_told(is_training: bool) -> None:
    model, said = _prepared(Auxiliary, is_training)
    here, there = ("train", "eval") if is_training else ("eval", "train")
    assert len(said) == 1
    assert f"`Net` is traced in {here} mode, and its forward does something else in {there} mode" in said[0]
    assert "(test_modes.py:" in said[0] and "JIT_STRIP" in said[0] and "wrap()" in said[0]
    assert all(module.training == is_training for module in model.modules())


def test_a_mode_that_cannot_be_traced_is_told_too() -> None:
    _, said = _prepared(Statistics, False)
    assert len(said) == 1 and "test_modes.py:" in said[0]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("head", [Dropped, Hidden, Both, Head])
def test_what_follows_the_mode_or_does_not_depend_on_it_gives_no_warning(head: type, is_training: bool) -> None:
    if head is Head:
        head = type("Plain", (Head,), {"forward": lambda self, x: self.conv(x)})
    model, said = _prepared(head, is_training)
    assert not said
    assert model.training == is_training and model(torch.randn(1, 3, 4, 4)).shape == (1, 4, 4, 4)
