"""What a forward asks to be None: tracing knows it, or says what it took it for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, get_default_qconfig, prepare_qat_fx
from horizon_plugin_pytorch.utils.fx_helper import wrap


@wrap()
def mask_of(x: Tensor) -> Tensor | None:
    return None


@wrap()
def parts_of(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return x, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.last, self.dequant = (
            QuantStub(),
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(3, 3, 1),
            DeQuantStub(),
        )
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self.conv(self.quant(x))))


class AtOnce(Net):
    def body(self, y: Tensor) -> Tensor:
        return self.last(y) if mask_of(y) is None else y


class Named(Net):
    def body(self, y: Tensor) -> Tensor:
        mask = mask_of(y)
        return y if mask is not None else self.last(y)


class Part(Net):
    def body(self, y: Tensor) -> Tensor:
        y, mask = parts_of(y)
        if mask is None:
            y = self.last(y)
        return y


class Walrus(Net):
    def body(self, y: Tensor) -> Tensor:
        if (mask := mask_of(y)) is None:
            return self.last(y)
        return y * mask


class Attribute(Net):
    def body(self, y: Tensor) -> Tensor:
        self.mask = mask_of(y)
        return y if self.mask is not None else self.last(y)


class Equal(Net):
    def body(self, y: Tensor) -> Tensor:
        mask = mask_of(y)
        return self.last(y) if mask == None else y  # noqa: E711


@pytest.mark.slow
@pytest.mark.parametrize("net", [AtOnce, Named, Part, Walrus, Attribute, Equal])
def test_a_question_about_wrapped_code_is_told(net: type[Net]) -> None:
    told = r"asks whether `\w+` \(test_results_that_may_be_none.py:\d+\) gives None"
    with pytest.warns(QuantizationWarning, match=told):
        prepare_qat_fx(net(), {"": get_default_qconfig()})


class Dropped(Net):
    def body(self, y: Tensor) -> Tensor:
        mask_of(y)
        return self.last(y) if self.mask is None else y


class Other(Net):
    def body(self, y: Tensor) -> Tensor:
        scale = None
        z, _ = parts_of(y)
        return z if scale is not None else self.last(z)


class Gradient(Net):
    def body(self, y: Tensor) -> Tensor:
        return self.last(y) if y.grad is None else y


@pytest.mark.slow
@pytest.mark.parametrize("net", [Dropped, Other, Gradient])
def test_no_question_about_it_is_told(net: type[Net]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        model = prepare_qat_fx(net(), {"": get_default_qconfig()})
    assert "last" in [node.target for node in model.graph.nodes]


@pytest.mark.parametrize("name", ["grad_fn", "_base"])
def test_what_is_not_known_while_tracing_is_refused(name: str) -> None:
    class Asks(Net):
        def body(self, y: Tensor) -> Tensor:
            return self.last(y) if getattr(y, name) is None else y

    with pytest.raises(TraceError, match=rf"test_results_that_may_be_none.py:\d+: `x.{name}` is not known"):
        prepare_qat_fx(Asks(), {"": get_default_qconfig()})
    assert torch.is_grad_enabled()
