"""Forwards that were written for float tensors only: what they ask, they are answered as in float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, prepare
from tests.routes import calibrate, qconfig
from tests.zoo.stages import STAGES, walk


class Foreign(nn.Module):
    """A model whose forward is `function`, between stubs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.asked = function, []
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv1d(4, 4, 1)
        self.beside = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.table = nn.Embedding(16, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.register_buffer("frequencies", torch.rand(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.dequant(self.function(self, self.fc(self.quant(x))))]


def _cast_if_needed(m: Any, x: Any) -> Any:
    wanted = m.conv.weight.dtype
    if x.dtype != wanted:
        raise AssertionError(f"{x.dtype} is not {wanted}")
    return m.conv(x)


def _masked(m: Any, x: Any) -> Any:
    mask = torch.ones(4, 8, dtype=torch.bool).tril()
    return x + (~mask).to(x.dtype) * 0.5


def _heads(x: Any, heads: int) -> Any:
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _attention(m: Any, x: Any) -> Any:
    dropout = 0.5 if m.training else 0.0
    y = F.scaled_dot_product_attention(_heads(x, 4), _heads(x[..., :4], 2), _heads(x[..., 4:], 2), enable_gqa=True,
                                       dropout_p=dropout)  # fmt: skip
    return y.transpose(1, 2).flatten(2)


def _rotated(m: Any, x: Any) -> Any:
    positions = torch.arange(x.shape[1])[None]
    angles = positions[..., None].float() * torch.cat([m.frequencies, m.frequencies])
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angles.cos().to(x.dtype) + half * angles.sin().to(dtype=x.dtype)


def _with_gradient(m: Any, x: Any) -> Any:
    if m.training:
        x.requires_grad = True
    return m.conv(x)


ASKING = {
    "finfo": lambda m, x: x.clamp(min=torch.finfo(x.dtype).min),
    "mask of the dtype": _masked,
    "numbers of the dtype": lambda m, x: x + torch.arange(8, dtype=x.dtype) * 0.1,
    "type_as": lambda m, x: x + m.weight[:4].type_as(x),
    "expand_as": lambda m, x: x + m.bias.expand_as(x),
    "ones_like": lambda m, x: x + torch.ones_like(x) * 0.5,
    "full_like": lambda m, x: x * torch.full_like(input=x, fill_value=0.3),
    "new_ones": lambda m, x: x + x.new_ones(4, 8).cumsum(0),
    "new_tensor": lambda m, x: x * x.new_tensor([0.5, 2.0]).repeat(4),
    "counting": lambda m, x: x + torch.ones_like(x, dtype=torch.long).cumsum(1) * 0.1,
    "booleans like it": lambda m, x: x.masked_fill(torch.zeros_like(x, dtype=torch.bool), 1.0) + 0.5,
    "rotary": _rotated,
    "network beside": lambda m, x: x + m.beside(m.frequencies),
    "cast to a weight's dtype": lambda m, x: m.conv(x.to(m.conv.weight.dtype)),
    "cast by keyword": lambda m, x: m.conv(x.to(dtype=m.conv.weight.dtype, device=m.conv.weight.device)),
    "cast to a weight": lambda m, x: m.conv(x.to(m.conv.weight)),
    "cast to a table's dtype": lambda m, x: x + m.table(torch.arange(4)).to(m.table.weight.dtype),
    "condition on a weight's dtype": _cast_if_needed,
    "float": lambda m, x: x.float() + 1.0,
    "float32": lambda m, x: x.to(torch.float32).type_as(x) + 1.0,
    "comparison of dtypes": lambda m, x: x + 1 if x.dtype == torch.float32 else None,
    "table looked up by a function": lambda m, x: x + F.embedding(torch.arange(4), m.table.weight),
    "gradient of an input": _with_gradient,
    "a list that starts empty": lambda m, x: torch.cat([torch.tensor([], dtype=x.dtype), x, x], dim=-2),
    "addmm with parameters": lambda m, x: torch.addmm(m.bias, x.reshape(-1, 8), m.weight).view(x.shape),
    "grouped queries and dropout": _attention,
}


@pytest.mark.parametrize("name", ASKING)
def test_a_forward_is_answered_as_in_float(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    result = walk(Foreign(ASKING[name]).eval(), (torch.randn(2, 4, 8),), tmp_path, "qint16")
    assert len(result.passed) == len(STAGES), result.trace
    assert result.distance < 5e-3


def test_the_format_is_told_outside_of_the_forward() -> None:
    x, seen = torch.randn(2, 4, 8), []
    model = Foreign(lambda m, x: seen.append(x) or x)
    qat = calibrate(prepare(model, (x,), qconfig_dict={"": qconfig()}, out_dir=None), (x,))
    for net in (qat, convert(qat)):
        seen.clear()
        net(x)
        assert seen[0].dtype is qint8


def test_a_cast_that_changes_the_type_stays_refused() -> None:
    x = torch.randn(2, 4, 8)
    model = Foreign(lambda m, x: x.to(torch.float64))
    qat = prepare(model, (x,), qconfig_dict={"": qconfig()}, out_dir=None)
    with pytest.raises(NotImplementedError, match="float64"):
        qat(x)


def test_integers_stay_the_stored_weight_for_everybody_else() -> None:
    x = torch.randn(2, 4, 8)
    model = Foreign(lambda m, x: m.conv(x))
    quantized = convert(calibrate(prepare(model, (x,), qconfig_dict={"": qconfig()}, out_dir=None), (x,)))
    assert quantized.conv.weight.dtype == torch.int8 and quantized.state_dict()["conv.weight"].dtype == torch.int8
