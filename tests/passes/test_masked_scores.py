"""Masks of attention scores, added or filled in: scores keep their steps, and hidden positions count as nothing."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, convert, set_fake_quantize
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import (
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import calibrate, run_onnx
from tests.tiers import in_soak

INT8, INT16 = default_calibration_qconfig_setter, calibration_8bit_weight_16bit_act_qconfig_setter
X = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(0))
HALF_STEPS = "ignore:matmul:UserWarning"  # int16 products, which these tests are not about


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


class Attention(nn.Module):
    """Scores of 4 sequences, a mask, a softmax."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], number: float = -1e4) -> None:
        super().__init__()
        self.quant, self.dequant, self.mask_quant, self.op = QuantStub(), DeQuantStub(), QuantStub(), FloatFunctional()
        self.way, self.softmax, self.number = way, nn.Softmax(-1), max(number, -1e9)
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mask", torch.triu(torch.full((16, 16), number), 1))
        self.register_buffer("padding", torch.zeros(16).masked_fill(torch.arange(16) == 11, number))
        self.bias = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.way(self, torch.matmul(x, x.transpose(-1, -2)) * 0.35))


def _windows(m: Any, scores: Tensor) -> Tensor:
    """As networks with shifted windows write it."""
    scores = (scores + m.bias).view(2, 2, 16, 16) + m.mask.unsqueeze(0)
    return m.softmax(scores.view(-1, 16, 16))


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a buffer": lambda m, scores: m.softmax(scores + m.mask),
    "a stub": lambda m, scores: torch.softmax(scores + m.mask_quant(m.mask), -1),
    "FloatFunctional": lambda m, scores: m.softmax(m.op.add(m.mask, scores)),
    "a difference": lambda m, scores: (scores - -m.mask).softmax(dim=2),
    "windows": _windows,
    "two masks, one after the other": lambda m, scores: m.softmax(scores + m.mask_quant(m.padding) + m.mask),
    "computed of booleans": lambda m, scores: m.softmax(
        scores + (1.0 - m.mask_quant((m.mask == 0).float())) * m.number
    ),
    "two masks, together": lambda m, scores: m.softmax(scores + (m.mask_quant(m.padding) + m.mask)),
    "added to the product": lambda m, scores: m.softmax(torch.baddbmm(m.mask, scores, scores, alpha=0.1)),
    "filled in": lambda m, scores: m.softmax(scores.masked_fill(m.mask < 0, float(m.mask.min()))),
    "chosen": lambda m, scores: m.softmax(torch.where(m.mask == 0, scores, m.mask.min())),
    "added to a layer": lambda m, scores: m.softmax(m.layer(scores) + m.mask),
    "added to a layer, in another shape": lambda m, scores: torch.softmax(
        (m.layer(scores) + m.mask_quant(m.mask)[None]).view(2, 2, 16, 16), -1, dtype=torch.float32
    ).flatten(0, 1),
    "before dropout": lambda m, scores: torch.dropout(scores + m.mask, 0.1, False).softmax(-1),
}


def _error(net: nn.Module, setter: Any, method: str) -> tuple[float, nn.Module]:
    model = calibrate(prepare(net, (X,), setter, method, out_dir=None), (X,))
    with torch.no_grad():
        wanted, found = net(X), model(X)
        assert torch.equal(found, convert(model)(X))
    assert float(found.triu(1).abs().max()) == 0  # hidden positions get nothing
    return float((found - wanted).norm() / wanted.norm()), model


@pytest.mark.in_turns("number", "way", of=2)
@pytest.mark.filterwarnings(HALF_STEPS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [-1e4, -math.inf, *in_soak(-100.0, -1e9)])
def test_scores_keep_their_steps(number: float, way: str) -> None:
    net = Attention(WAYS[way], number).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*mask", QuantizationWarning)
        assert _error(net, INT16, "symbolic")[0] < (4e-3 if "layer" in way else 1e-3)  # of its int8 weights
    assert _error(net, INT8, "jit-strip")[0] < 0.11  # of the scores themselves: their range is 16 or 32 wider


@pytest.mark.parametrize("number", [-1e4, -math.inf])
def test_the_file_has_the_same_integers(number: float, tmp_path: Any) -> None:
    model = _error(Attention(WAYS["a buffer"], number).eval(), INT8, "symbolic")[1]
    quantized = convert(model)
    with torch.no_grad():
        assert torch.equal(run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "masked.onnx"), (X,))[0],
                           quantized(X))  # fmt: skip


@pytest.mark.filterwarnings(HALF_STEPS)
@pytest.mark.parametrize("number", [-1e4, -math.inf])
def test_training_goes_on_within_the_range(number: float) -> None:
    net = Attention(WAYS["windows"], number)
    model = _error(net.eval(), INT16, "symbolic")[1]
    before = {name: p.clone() for name, p in model.state_dict().items() if name.endswith("scale")}
    set_fake_quantize(model, FakeQuantState.QAT)
    model.train()
    for _ in range(3):
        out = model(X)
    out.square().sum().backward()
    net(X).square().sum().backward()
    assert torch.nn.functional.cosine_similarity(model.bias.grad.flatten(), net.bias.grad.flatten(), 0) > 0.999
    for name, scale in before.items():
        assert torch.allclose(model.state_dict()[name], scale, rtol=0.05), name


def test_rows_in_which_everything_is_hidden_do_not_count() -> None:
    net = Attention(WAYS["a buffer"]).eval()
    net.mask[0] = -1e4
    model = calibrate(prepare(net, (X,), INT16, out_dir=None), (X,))
    with torch.no_grad():
        assert float((model(X) - net(X))[:, 1:].abs().max()) < 1e-3


@pytest.mark.filterwarnings(HALF_STEPS)
def test_what_something_else_reads_keeps_its_range() -> None:
    """The mask is a number there, not infinity; and it is told what that costs."""

    def way(m: Any, scores: Tensor) -> Tensor:
        scores = scores + m.mask
        return m.softmax(scores) + scores

    net = Attention(way).eval()
    with pytest.warns(QuantizationWarning, match=r"a mask of -10000 is added to.*masked_fill"):
        model = calibrate(prepare(net, (X,), INT16, out_dir=None), (X,))
    with torch.no_grad():
        assert torch.allclose(model(X), net(X), atol=0.5)


class Eager(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.softmax(self.op.add(self.quant(x), self.mask_quant(self.mask))))


@pytest.mark.parametrize("setter", [INT8, INT16])
def test_a_model_without_a_graph_is_told_once_what_a_mask_takes(setter: Any) -> None:
    x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    model = prepare(Eager(WAYS["a buffer"]).eval(), (x,), setter, "eager", out_dir=None)
    with pytest.warns(QuantizationWarning, match=r"`op`.*a mask of -10000 is added to.*masked_fill") as record:
        calibrate(calibrate(model, (x,)), (x,))
    assert len([w for w in record if "a mask of" in str(w.message)]) == 1


@pytest.mark.filterwarnings(HALF_STEPS)
@pytest.mark.parametrize("number", [-1e4, -1e9, -math.inf])
def test_numbers_that_share_a_scale_with_a_mask_are_told(number: float) -> None:
    net = Attention(lambda m, scores: m.softmax(scores + (m.bias + m.mask)), number).eval()
    with pytest.warns(QuantizationWarning, match=r"a mask of -10000 has numbers of up to .* the mask last"):
        calibrate(prepare(net, (X,), INT16, out_dir=None), (X,))


@pytest.mark.parametrize("way", ["offset", "outlier", "ordinary"])
def test_other_sums_are_not_taken_for_masks(way: str) -> None:
    offsets = {"offset": torch.full((16, 16), -1e3), "outlier": torch.zeros(16, 16), "ordinary": torch.randn(16, 16)}
    offsets["outlier"][3, 3] = -60.0
    net = Attention(lambda m, scores: scores + m.mask).eval()
    net.mask = offsets[way]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*a mask of")
        calibrate(prepare(net, (X,), INT8, out_dir=None), (X,))


def test_copies_keep_the_axis() -> None:
    model = prepare(Attention(WAYS["a buffer"]).eval(), (X,), INT8, out_dir=None)
    assert copy.deepcopy(model)._generated_add_0.softmax_axis == -1
