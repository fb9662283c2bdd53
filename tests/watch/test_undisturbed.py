"""A model after an undisturbed run: it goes on as if nothing had run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, prepare_qat_fx
from horizon_plugin_pytorch.quantization import set_fake_quantize as set_state
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from tests.routes import qconfig


class DropPath(nn.Module):
    """Wrapped code with calls that only a training model meets."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    @wrap()
    def drop(self, x: Tensor) -> Tensor:
        return x.div(0.9) * torch.ones(x.shape[0], 1) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.drop(self.quant(x)))


def test_calls_of_wrapped_code_that_it_met_are_new_again() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    prepared = prepare_qat_fx(DropPath(), {"": qconfig()})
    names = [name for name, _ in prepared.named_modules()]
    set_state(prepared.train(), FakeQuantState.CALIBRATION)
    with undisturbed(prepared):
        prepared(x)
        assert len(list(prepared.named_modules())) > len(names)
    assert [name for name, _ in prepared.named_modules()] == names
    assert torch.allclose(prepared(y), y / 0.9, atol=1e-5)
