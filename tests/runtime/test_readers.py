"""Whoever reads a result gets that result: layers are fused only where nobody reads what is between them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnknownCallError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, get_qconfig
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.routes import as_numbers, calibrate, mismatches, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Features:
    features: dict[str, Tensor]


class Net(nn.Module):
    """A convolution, what follows it, and whoever else reads it."""

    def __init__(self, body: Callable[..., Any], stride: int = 1) -> None:
        super().__init__()
        self.quant, self.dequant, self.relu, self.bn = QuantStub(), DeQuantStub(), nn.ReLU(), nn.BatchNorm2d(4)
        self.conv, self.last, self.body = nn.Conv2d(4, 4, 3, stride, padding=1), None, body

    def forward(self, x: Tensor, is_read: bool = False) -> Any:
        x = self.quant(x)
        return self.body(self, x, self.conv(x), is_read)


def _prepared(model: nn.Module) -> nn.Module:
    return calibrate(prepare(model.eval(), (X,), qconfig_dict={"": qconfig("qint16")}, out_dir=None), (X,))


def returned(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    return net.dequant(net.relu(a)), a


def in_a_dataclass(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    return net.dequant(a + x), Features({"low": a})


def after_batch_norm(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    return net.dequant(net.bn(a)), [a]


def kept(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    net.last = a
    return net.dequant(F.relu(a))


@pytest.mark.parametrize("body", [returned, in_a_dataclass, after_batch_norm, kept])
def test_a_result_that_is_handed_out_is_not_fused(body: Any) -> None:
    torch.manual_seed(0)
    model = Net(body)
    qat = _prepared(model)

    def handed_out(net: nn.Module) -> Tensor:
        out = net(X)
        found = net.last if body is kept else out[1]
        found = found.features["low"] if isinstance(found, Features) else found
        (found,) = found if isinstance(found, list) else [found]
        return found if net is model else found.dequantize()

    with torch.no_grad():
        assert torch.allclose(handed_out(qat), handed_out(model), atol=0.01)
        assert torch.equal(handed_out(convert(qat)), handed_out(qat))


def dequantized(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    out = net.relu(a)
    return [net.dequant(out), *([net.dequant(a)] if is_read else [])]


def in_a_list(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    b = a + x
    return net.dequant(torch.cat([b, a if is_read else b], 1))


def returned_by_flag(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    out = net.dequant(net.relu(a))
    return (out, Features({"low": a})) if is_read else out


def printed(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    out = net.dequant(net.bn(a))
    return out + float(a.mean()) if is_read else out


@pytest.mark.parametrize("body", [dequantized, in_a_list, returned_by_flag, printed])
@pytest.mark.parametrize("dtype", ["qint8", torch.float16])
def test_a_reader_that_was_not_met_is_an_error_with_both_lines(body: Any, dtype: Any) -> None:
    set_march(March.NASH_P)
    chosen = {"": get_qconfig(out_dtype=dtype)}
    qat = calibrate(prepare(Net(body).eval(), (X,), qconfig_dict=chosen, out_dir=None), (X,))
    for model in (qat, convert(qat), copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        first = as_numbers(model(X))
        with pytest.raises(UnknownCallError, match=r"`conv`, .*\(test_readers.py:\d+\).*|`mean` .* was not met"):
            model(X, True)
        assert not mismatches(first, as_numbers(model(X)))


def measured(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    return net.dequant(a + F.interpolate(x, size=a.shape[2:], mode="nearest"))


def measured_by_flag(net: Any, x: Tensor, a: Tensor, is_read: bool) -> Any:
    return net.dequant(a + F.interpolate(x, size=a.shape[2:] if is_read else (4, 4), mode="nearest"))


def test_the_shape_between_fused_modules_is_that_of_float() -> None:
    torch.manual_seed(0)
    model = Net(measured, stride=2)
    qat = _prepared(model)
    with torch.no_grad():
        assert torch.allclose(qat(X), model(X), atol=0.01)
    with pytest.raises(UnknownCallError, match=r"`conv`, `_generated_add_0` \(test_readers.py:\d+\) are fused"):
        _prepared(Net(measured_by_flag, stride=2))(X, True)
    assert type(_prepared(Net(measured))._generated_add_0).__name__ == "ConvAdd2d"  # the shape stays: it is fused
