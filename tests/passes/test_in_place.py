"""Writes in place: other names of the tensor see them, or the model is refused; nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    default_qat_8bit_fake_quant_qconfig,
    fuse_fx,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.models import make
from tests.operators.cases.base import Body
from tests.routes import calibrate, prepared, qconfig

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.body = QuantStub(), DeQuantStub(), body

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self.quant(x)))


def _difference(body: Callable[[Tensor], Tensor]) -> float:
    """Between the prepared model, not rounding yet, and the float model."""
    qat = prepare_qat_fx(Net(body).eval(), {"": default_qat_8bit_fake_quant_qconfig})
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        return float((qat(X.clone()) - Net(body)(X.clone())).abs().max())


def _other_name(x: Tensor) -> Tensor:
    x = x * 1.0
    y = x
    y += 1.0
    y -= 0.5
    y *= 2.0
    y /= 4.0
    return x * 2


def _parts(x: Tensor) -> Tensor:
    q, k, v = (x * 1.0).chunk(3, -1)
    q *= 0.5
    k = k + q
    return torch.cat([q, k, v], -1)


def _sizes(x: Tensor) -> Tensor:
    count = x.shape[1]
    all_of_them = count
    count += 1
    count -= 2
    x = x * 1.0
    return x[:, :count] + x[:, all_of_them - count :]


def _cast(x: Tensor) -> Tensor:
    x = x * 1.0
    y = x.float()  # the same tensor
    y += 1.0
    x.float().mul_(3.0)
    return x * 2


@pytest.mark.parametrize("body", [_other_name, _parts, _sizes, _cast])
def test_python_operators_in_place(body: Any) -> None:
    assert _difference(body) < 1e-6


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, 1:],
    "cpu": lambda x: x.cpu(),
    "type_as": lambda x: x.type_as(x),
    "dropout2d": lambda x: F.dropout2d(x, 0.5, False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_is_written_while_its_source_is_read_is_refused(name: str) -> None:
    def by_method(x: Tensor) -> Tensor:
        x = x * 1.0
        VIEWS[name](x).add_(1.0)
        return x * 2

    def by_operator(x: Tensor) -> Tensor:
        x = x * 1.0
        y = VIEWS[name](x)
        y += 1.0
        return x * 2

    for body in (by_method, by_operator):
        with pytest.raises(UnsupportedOperatorError, match="in place"):
            _difference(body)


class Written(nn.Module):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x = x * 1.0
        x.add_(z)
        torch.relu_(x)
        return x * 2


def test_fuse_fx_keeps_writes() -> None:
    model = Written()
    z = torch.randn(6)
    assert torch.equal(fuse_fx(model)(X, z), model(X, z))


def _relu_in_place(x: Tensor) -> Tensor:
    F.relu(x, inplace=True)
    return x * 2


def _add_in_place(x: Tensor) -> Tensor:
    x.add_(1.0)
    return x * 2


def _both_read(x: Tensor) -> Tensor:
    y = x + 0.5
    z = F.relu(y, inplace=True)
    return y + z


@pytest.mark.parametrize("body", [_relu_in_place, _add_in_place, _both_read])
def test_readers_after_an_in_place_operator_see_what_it_wrote(body: Any) -> None:
    model = QuantWrapper(Body(body))
    qat = prepared(model, (X.clone(),), "qint16")
    assert (qat(X.clone()) - model(X.clone())).abs().max() < 1e-3


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1.0),
        lambda x: x.mul_(2.0),
        lambda x: x.clamp_(0.0),
        lambda x: x.relu_(),
        lambda x: x.__iadd__(1.0),
        lambda x: F.relu(x, inplace=True),
        lambda x: x.__setitem__(0, 0.0),
    ],
)
def test_fuse_fx_does_not_move_a_layer_past_a_write_to_its_input(write: Callable[[Tensor], Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.sum = nn.Conv1d(4, 4, 1), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            y = self.conv(x)
            write(x)
            return self.sum.add(y, x)

    model = Net().eval()
    assert torch.equal(fuse_fx(model)(X), model(X))


def test_writing_to_memory_that_a_view_shows_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        v = x.view(2, -1)
        x.mul_(2)
        return v * 1.0 + x.view(2, -1)

    with pytest.raises(UnsupportedOperatorError, match=r"in place .*without in-place operators"):
        prepare_qat_fx(QuantWrapper(Body(body)), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize(
    "alias", [nn.Identity(), nn.Flatten(), lambda y: y.contiguous(), lambda y: y.view(2, -1).view(2, 4, 6)]
)
def test_writing_through_another_name_is_refused(alias: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.alias = QuantStub(), alias

        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x) * 2.0
            v = self.alias(y)
            v.relu_()
            return y * 1.0

    with pytest.raises(UnsupportedOperatorError, match="in place"):
        prepare_qat_fx(Net(), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.slow
def test_a_sum_in_place_that_is_fused_runs_in_the_models_own_forward() -> None:
    """The residual of torchvision's ResNet, `out += identity`: between its members nothing has values yet."""
    set_march(March.NASH_E)
    model, inputs = make("resnet")
    qat = calibrate(prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None), inputs)
    assert type(qat.layer1._generated_add_0).__name__ == "ConvAddReLU2d"
    with torch.no_grad():
        assert torch.equal(qat(*inputs), convert(qat)(*inputs))
