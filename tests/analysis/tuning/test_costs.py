"""Multiply-accumulates by format, those inside of attention and recurrent modules among them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_profiler import tune
from horizon_plugin_pytorch.analysis.tuning.costs import cost_of
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, calibrate, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.quant, self.dequant = kind, QuantStub(), DeQuantStub()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)
        self.inner = (
            nn.LSTM(16, 8, batch_first=True) if kind == "lstm" else nn.MultiheadAttention(16, 2, batch_first=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.quant(x))
        if self.kind == "function":
            y = self.layer(x)
            return self.dequant(F.scaled_dot_product_attention(y, y, y))
        if self.kind == "product":
            return self.dequant(x @ self.layer(x).transpose(1, 2))
        return self.dequant(self.inner(x)[0] if self.kind == "lstm" else self.inner(x, x, x, need_weights=False)[0])


BATCH, TOKENS, WIDTH = 2, 5, 16
LAYER, BETWEEN = BATCH * TOKENS * WIDTH * WIDTH, BATCH * TOKENS * TOKENS * WIDTH
LSTM = BATCH * TOKENS * 4 * 8 * (16 + 8)


@pytest.mark.parametrize(
    ("kind", "narrow", "wide"),
    [
        ("module", {"int8 x int8": 4 * LAYER + 2 * BETWEEN},
         {"int16 x int8": 3 * LAYER, "int8 x int8": LAYER + 2 * BETWEEN}),
        ("function", {"int8 x int8": LAYER + 2 * BETWEEN}, {"int16 x int8": LAYER, "int8 x int8": 2 * BETWEEN}),
        ("product", {"int8 x int8": LAYER + BETWEEN}, {"int16 x int8": LAYER + BETWEEN}),
        ("lstm", {"int8 x int8": LSTM}, None),
    ],
)  # fmt: skip
def test_products_inside_of_modules_count(kind, narrow, wide):
    set_march(March.NASH_M)
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    for formats, products in (({}, narrow), ({"norm": {"output": qint16}}, wide)):
        if products is None:
            continue
        setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate(formats)] if formats else [], save_dir=None)
        model = prepare(Net(kind).eval(), (x,), setter, out_dir=None)
        calibrate(model, [x], patience=0, progress=False)
        cost = cost_of(model, x)
        assert cost.products == products and sum(cost.by_operator.values()) == sum(products.values())
        assert set(cost.by_operator) <= {"inner", "layer", *(p for p in cost.by_operator if p.startswith("_generated"))}


@pytest.mark.parametrize(
    ("kind", "path", "products"),
    [
        ("module", "inner", {"float16 x float16": 4 * LAYER + 2 * BETWEEN}),
        ("lstm", "inner", {"float16 x float16": LSTM}),
        ("product", "layer", {"float16 x float16": LAYER, "int8 x int8": BETWEEN}),
    ],
)
def test_products_in_float16_count(kind, path, products):
    set_march(March.NASH_M)
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    costs = {}
    for formats in ({}, {path: {"weight": torch.float16, "output": torch.float16}}):
        setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate(formats)] if formats else [], save_dir=None)
        model = prepare(Net(kind).eval(), (x,), setter, out_dir=None)
        calibrate(model, [x], patience=0, progress=False)
        costs[bool(formats)] = cost_of(model, x)
    assert costs[True].products == products and costs[True].wide_share > 0
    assert costs[True].traffic > costs[False].traffic  # two bytes for what float16 gives, and for who reads it


def test_a_budget_of_operations_counts_what_attention_multiplies():
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net, data = Net("module").eval(), [torch.randn(BATCH, TOKENS, WIDTH)]
    with torch.no_grad():
        net.norm.weight[3] = 300.0  # the norm is what int16 would help most
        net.inner.in_proj_weight[:, 3] = 0.0
    least = tune(net, data, int16_operations=0.5, out_dir=None, progress=False)
    most = tune(net, data, int16_operations=1.0, out_dir=None, progress=False)
    assert "norm" not in least.formats and "norm" in most.formats
