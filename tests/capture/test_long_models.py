"""Models of thousands of modules: nothing recurses along the graph, and nothing grows with its square."""

from __future__ import annotations

import copy
import pickle
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert,
    get_default_qconfig,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import calibrate, run_onnx
from tests.tiers import in_soak

pytestmark = pytest.mark.slow
X = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    """Residual blocks of a layer, nine activations, and code that writes in place."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), *(nn.ReLU(inplace=True) for _ in range(9))) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = F.dropout(y, 0.1, self.training).clamp_(-1.0, 1.0)
        return x


def _prepared(count: int, method: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = QuantWrapper(Chain(count)).eval()
        return prepare(net, (X,), qconfig_dict={"": get_default_qconfig()}, method=method, out_dir=None)


@pytest.mark.parametrize("count", [110, *in_soak(200)])  # of ten modules: beyond Python's recursion limit of 1,000
@pytest.mark.parametrize("method", ["symbolic", "jit"])
def test_thousands_of_modules_go_all_the_way(method: str, count: int, tmp_path: Any) -> None:
    limit = sys.getrecursionlimit()
    qat = _prepared(count, method)
    calibrate(qat, (X,))
    set_fake_quantize(qat.train(), FakeQuantState.QAT)
    qat(X).square().sum().backward()
    assert qat.module.blocks[0][0].weight.grad is not None
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        quantized = convert(qat)
        out = qat(X)
        assert torch.equal(quantized(X), out)
        for copied in (copy.deepcopy(qat), pickle.loads(pickle.dumps(qat)), pickle.loads(pickle.dumps(quantized))):
            assert torch.equal(copied(X), out)
    assert torch.equal(run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "long.onnx"), (X,))[0], out)
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("method", ["symbolic", "jit"])
def test_long_code_before_the_quantstub(method: str) -> None:
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table = QuantWrapper(nn.Linear(4, 4)), nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            table = self.table
            for _ in range(550):
                x, table = x * 0.5 + x * 0.5, table + 0.0 + 0.0
            q = self.body.module(self.body.quant(x))
            return self.body.dequant(q * table)

    net = Before().eval()
    qat = prepare(net, (X,), qconfig_dict={"": get_default_qconfig()}, method=method, out_dir=None)
    calibrate(qat, (X,))
    with torch.no_grad():
        assert torch.allclose(qat(X), net(X), atol=0.05)
        assert torch.equal(convert(qat)(X), qat(X))


@pytest.mark.parametrize("method", ["symbolic", "jit"])
def test_time_grows_with_the_number_of_modules(method: str) -> None:
    def seconds(count: int) -> float:
        begin = time.process_time()
        qat = _prepared(count, method)
        calibrate(qat, (X,))
        convert(qat)
        return time.process_time() - begin

    seconds(5)
    short, long = seconds(16), seconds(80)
    assert long < 9 * short, f"five times as many modules take {long / short:.1f} times as long"
