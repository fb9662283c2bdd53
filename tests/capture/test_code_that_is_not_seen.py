"""What a recorded model cannot follow is an error with its line; what it can, it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.routes import assert_one_arithmetic, calibrate, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@torch.jit.script
def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


class Stubbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.fc, self.relu = nn.Conv2d(4, 4, 1), nn.Linear(8, 8), nn.ReLU()


class Scripted(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(mish(self.conv(self.quant(x))))


class ScriptedModule(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.jit.script(nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.conv(self.quant(x))))


class ScriptedAfter(ScriptedModule):
    def forward(self, x: Tensor) -> Tensor:
        return mish(self.head(self.dequant(self.conv(self.quant(x)))))


class Masked(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.quant(x)) * x.sigmoid())


class ByName(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.relu.forward(self.conv(self.quant(x))))


class Memory(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(2, 4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(x)) + self.before
        self.before = y.detach()
        return self.dequant(y)


class Unregistered(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Conv2d(4, 4, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layers[0](self.quant(x)))


def _prepared(model: nn.Module) -> nn.Module:
    return calibrate(prepare(model.eval(), (X,), qconfig_dict={"": qconfig("qint16")}, out_dir=None), (X,))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ScriptedModule, r"`aten.convolution.default` .*\(test_code_that_is_not_seen.py:\d+\) .*torch.jit.script"),
        (Masked, r"`mul` .*\(test_code_that_is_not_seen.py:\d+\) takes a float tensor .* QuantStub"),
        (ByName, r"`relu` \(test_code_that_is_not_seen.py:\d+\) is called by its name.*self.conv\(x\)"),
        (Memory, r"`before` .* quantized one \(line test_code_that_is_not_seen.py:\d+\).* an input and an output"),
        (Unregistered, r"weight belongs to a module that is not registered.*nn.ModuleList"),
    ],
)
def test_what_cannot_be_followed_is_an_error_of_prepare(cls: Any, message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        prepare(cls().eval(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)


def test_scripted_code_may_follow_the_quantized_part() -> None:
    model = ScriptedAfter().eval()
    with torch.no_grad():
        assert torch.allclose(_prepared(model)(X), model(X), atol=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = torch.sigmoid(self.conv(x))
        return x if times == 1 else self.forward(x, times - 1) * 2


class BlockByName(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.block.forward(self.quant(x)))


class Tied(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(F.linear(self.fc(self.quant(x)), self.fc.weight, self.fc.bias))


class TiedConvolutions(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.conv(x) + F.conv2d(x, self.conv.weight))


class TiedProduct(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.fc(self.quant(x)) @ self.fc.weight.t())


@pytest.mark.parametrize("cls", [BlockByName, Tied, TiedConvolutions, TiedProduct])
def test_what_can_be_followed_gives_the_same_integers_everywhere(cls: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = cls()
    qat = _prepared(model)
    with torch.no_grad():
        assert torch.allclose(qat(X), model(X), atol=0.05)
    assert_one_arithmetic(qat, (X,), tmp_path)


class Asks(Stubbed):
    """A branch of training alone: mmdet's checkpointing asks so."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        return self.dequant(x * 2 if x.requires_grad else x)


def test_a_branch_on_requires_grad_is_recorded() -> None:
    qat = prepare(Asks(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)
    assert "_generated_mul_0" in dict(qat.named_children())
    qat(X).mean().backward()
    assert qat.conv.weight.grad is not None


class Writes(Stubbed):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        scale.mul_(2)
        x = self.quant(x)
        x += 1
        return self.dequant(self.conv(x)) * scale


def test_example_inputs_are_not_written_to(tmp_path: Any) -> None:
    x, scale = X.clone(), torch.ones(1)
    prepare(Writes().eval(), (x, scale), qconfig_dict={"": qconfig()}, out_dir=tmp_path)
    assert torch.equal(x, X) and torch.equal(scale, torch.ones(1))


class RealMemory(Memory):
    """The state that the guide advises."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_before = QuantStub()

    def forward(self, x: Tensor) -> Tensor:
        out = self.dequant(self.conv(self.quant(x)) + self.quant_before(self.before))
        self.before = out.detach()
        return out


def test_a_state_of_real_numbers_is_kept_by_model_and_checkpoint() -> None:
    qat = _prepared(RealMemory())
    quantized = convert(qat)
    with torch.no_grad():
        frames = [(qat(X), quantized(X)) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in frames) and not torch.equal(frames[0][0], frames[1][0])
    assert type(qat.state_dict()["before"]) is Tensor
