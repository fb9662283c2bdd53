"""Annotations of outputs: set inside a model, read at its end, on every route and at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch import get_output_annotation, set_annotation
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
)

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
EXPECTED = ["boxes", None, "scores of cars"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.layer = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.dequant(self.layer(self.quant(x)))
        return {"a": set_annotation(y, "boxes"), "b": [y + 1, set_annotation(y * 2, annotation="scores of cars")]}


def test_outputs_and_float_models() -> None:
    net = Net()
    assert get_output_annotation(net(X)) == get_output_annotation(net, X) == EXPECTED
    assert get_output_annotation(net(X)["a"].detach()) == [None]
    with pytest.raises(TypeError, match=r"`Net` is known by running it.*get_output_annotation\(model\(x\)\)"):
        get_output_annotation(net)
    assert get_output_annotation(()) == [] and get_output_annotation([3, "x"]) == []


@pytest.mark.parametrize("method", [PrepareMethod.JIT_STRIP, PrepareMethod.JIT, PrepareMethod.SYMBOLIC], ids=str)
@torch.no_grad()
def test_prepared_and_converted_models(method: PrepareMethod) -> None:
    model = prepare(Net().eval(), (X,), method=method, qconfig_dict={"": get_default_qconfig()}, out_dir=None)
    calibrate(model, [X], progress=False)
    for stage in (model, convert(model)):
        assert get_output_annotation(stage, X) == get_output_annotation(stage(X)) == EXPECTED
        if method is PrepareMethod.SYMBOLIC:
            assert get_output_annotation(stage) == EXPECTED


def test_what_cannot_be_annotated_is_refused() -> None:
    with pytest.raises(TypeError, match="got list"):
        set_annotation([X], "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a text"):
        set_annotation(X, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TorchScript keeps no annotations"):
        get_output_annotation(torch.jit.trace(nn.ReLU(), X))
    y = X.clone()
    assert set_annotation(y, "first") is y and get_output_annotation(set_annotation(y, "second")) == ["second"]
    assert horizon.set_annotation is set_annotation
