"""Modules that wrapped code calls on quantized tensors and constants, such as attention on learnt queries."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import GridSample
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import run_onnx

X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), torch.ao.quantization.DeQuantStub()
        self.query, self.position = nn.Embedding(5, 16), nn.Parameter(torch.randn(1, 7, 16))
        self.mha, self.proj = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)
        self.register_buffer("mask", torch.zeros(5, 7).masked_fill_(torch.rand(5, 7) > 0.7, -20.0))

    @wrap()
    def attend(self, x: Tensor) -> Tensor:
        query = self.query.weight[None].expand(x.shape[0], -1, -1)
        out, _ = self.mha(query=query, key=x + self.position, value=x, attn_mask=self.mask)
        for _ in range(2):  # one line: its calls share their stub
            out, _ = self.mha(out, self.position.expand(x.shape[0], -1, -1), x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.proj(self.attend(self.quant(x))))


def _prepared(model: nn.Module) -> nn.Module:
    return prepare_qat_fx(copy.deepcopy(model), {"": get_default_qconfig(activation_qkwargs={"dtype": "qint16"})})


def test_constants_get_stubs_and_masks_stay_real(tmp_path: Path) -> None:
    model = Queries().eval()
    prepared = _prepared(model)
    calibrate(prepared, [X], progress=False)
    stubs = [name for name, module in prepared.named_modules() if "_generated_quant_mha" in name.rpartition(".")[2]]
    assert len(stubs) == 2
    out = prepared(X)
    assert (out - model(X)).norm() / model(X).norm() < 0.02
    quantized = convert(prepared)
    assert torch.equal(quantized(X), out)
    file = export_quantized_onnx(quantized, (X,), tmp_path / "queries.onnx")
    assert torch.equal(run_onnx(file, [X])[0], out)
    assert torch.equal(copy.deepcopy(prepared)(X), out)


def test_scales_of_such_constants_are_in_the_checkpoint() -> None:
    model = Queries().eval()
    prepared = _prepared(model)
    calibrate(prepared, [X], progress=False)
    fresh = _prepared(model)
    fresh.load_state_dict(prepared.state_dict())
    set_fake_quantize(fresh.eval(), FakeQuantState.VALIDATION)
    assert torch.equal(fresh(X), prepared(X))


def test_queries_are_trained() -> None:
    prepared = _prepared(Queries())
    prepared(X)
    prepared.train()(X).square().mean().backward()
    assert prepared.query.weight.grad is not None
    assert bool(prepared.query.weight.grad.any())


class Sampled(nn.Module):
    """A grid may be real numbers: it gets no stub, neither before nor after conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), torch.ao.quantization.DeQuantStub()
        self.sample, self.grid = GridSample(), torch.rand(1, 8, 8, 2) * 2 - 1

    @wrap()
    def moved(self, x: Tensor) -> Tensor:
        return self.sample(x, self.grid.repeat(x.shape[0], 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.moved(self.quant(x)))


def test_what_may_be_real_gets_no_stub() -> None:
    model, x = Sampled().eval(), torch.randn(2, 3, 8, 8)
    prepared = _prepared(model)
    calibrate(prepared, [x], progress=False)
    assert not any("_generated_" in name for name, _ in prepared.named_modules())
    assert torch.equal(convert(prepared)(x), prepared(x))
