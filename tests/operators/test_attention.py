"""What the table's cases cannot say of products, attention, recurrent cells and embeddings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import CalibrationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.operators.cases.base import Body, bench
from tests.routes import assert_one_arithmetic, calibrate, prepared


@pytest.fixture(autouse=True)
def _on_bayes() -> None:
    set_march(March.BAYES)


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda x, y: torch.einsum("ii,ij->ij", x, y), "diagonal"),
        (lambda x, y: torch.einsum("ij,jk->k", x, y), "sums i of one operand"),
        (lambda x, y: torch.einsum("ij,jk,kl->il", x, y, x), "two operands"),
        (lambda x, y: torch.einsum("ij->ji", x) + y, "permute"),
        (lambda x, y: torch.addmm(x, x, y, alpha=-1.0), "x \\+ a @ b"),
    ],
)
def test_products_without_a_form_say_what_to_write(call: Callable[..., Any], advice: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=advice):
        prepare_qat_fx(bench(Body(call), 2), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_a_product_whose_sum_counts_for_nothing(dtype: str, tmp_path: Any) -> None:
    model = bench(Body(lambda x, a, b: torch.baddbmm(x, a, b, beta=0, alpha=0.125)), 3)
    inputs = (torch.randn(3, 5, 4), torch.randn(3, 5, 8), torch.randn(3, 8, 4))
    qat = prepared(model, inputs, dtype)
    assert_one_arithmetic(qat, inputs, tmp_path)
    found = qat(*inputs)[1]
    assert torch.allclose(found, 0.125 * inputs[1] @ inputs[2], atol=0.03)


class Translator(nn.Module):
    """A small encoder-decoder: two embeddings' worth of features in, classes out."""

    def __init__(self, layers: Any, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        options = dict(d_model=16, nhead=4, dim_feedforward=24, batch_first=batch_first, norm_first=norm_first)
        self.source, self.target, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.encoder = layers.TransformerEncoder(layers.TransformerEncoderLayer(**options), 2, nn.LayerNorm(16))
        self.decoder = layers.TransformerDecoder(
            layers.TransformerDecoderLayer(activation="gelu", **options), 1, nn.LayerNorm(16)
        )
        self.head = nn.Linear(16, 5)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        memory = self.encoder(self.source(source), src_key_padding_mask=padding)
        out = self.decoder(self.target(target), memory, tgt_mask=self.causal, memory_key_padding_mask=padding)
        return self.dequant(self.head(out))


def _sentences(batch_first: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    source, target = torch.randn(2, 7, 16, generator=generator), torch.randn(2, 6, 16, generator=generator)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    if not batch_first:
        source, target = source.transpose(0, 1).contiguous(), target.transpose(0, 1).contiguous()
    return source, target, padding


@pytest.mark.parametrize("layers", [nn, horizon_nn], ids=["torch", "horizon"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "time-first"])
def test_a_transformer_goes_all_the_way(layers: Any, batch_first: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Translator(layers, batch_first, norm_first=batch_first).eval()
    inputs = _sentences(batch_first)
    with torch.no_grad():
        wanted = model(*inputs)
    qat = prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig})
    calibrate(qat, inputs)
    with torch.no_grad():
        assert float(torch.cosine_similarity(qat(*inputs).flatten(), wanted.flatten(), 0)) > 0.99
    _train_a_step(qat, inputs)
    assert_one_arithmetic(qat, inputs, tmp_path)


def _train_a_step(qat: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One step in the QAT state: every parameter gets a gradient and moves."""
    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    optimizer = torch.optim.SGD(qat.parameters(), 0.01)
    before = {name: p.detach().clone() for name, p in qat.named_parameters()}
    out = qat(*inputs)
    (out - torch.ones_like(out)).square().sum().backward()
    optimizer.step()
    still = [name for name, p in qat.named_parameters() if torch.equal(p, before[name])]
    assert not still
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)


def test_parameters_keep_their_names_and_values() -> None:
    torch.manual_seed(0)
    model, other = Translator(nn), Translator(horizon_nn)
    other.load_state_dict(model.state_dict())
    assert torch.allclose(model.eval()(*_sentences()), other.eval()(*_sentences()), atol=1e-5)
    qat = prepare_qat_fx(other, {"": default_qat_8bit_fake_quant_qconfig})
    found = dict(qat.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, found[name]) for name, p in model.named_parameters())
    trained = {name: p + 1 for name, p in model.state_dict().items()}
    qat.load_state_dict(trained, strict=False)
    assert torch.equal(
        qat.encoder.layers[0].self_attn.q_proj.weight, trained["encoder.layers.0.self_attn.in_proj_weight"][:16]
    )


def test_a_converted_attention_holds_integers_only() -> None:
    model = Translator(nn).eval()
    quantized = convert_fx(prepared(model, _sentences()))
    assert not [name for name, p in quantized.named_parameters() if "proj" in name]
    assert quantized.encoder.layers[0].self_attn.q_proj.weight.dtype == torch.int8


def test_eager_mode_takes_transformer_layers() -> None:
    torch.manual_seed(0)
    model = Translator(nn, batch_first=True).eval()
    inputs = _sentences()
    wanted = model(*inputs)
    model.qconfig = default_qat_8bit_fake_quant_qconfig
    qat = prepare_qat(model)
    calibrate(qat, inputs)
    integers = convert(qat)
    with torch.no_grad():
        assert torch.equal(qat(*inputs), integers(*inputs))
        assert float(torch.cosine_similarity(qat(*inputs).flatten(), wanted.flatten(), 0)) > 0.99


@pytest.mark.parametrize(
    "options", [dict(add_bias_kv=True), dict(add_zero_attn=True), dict(kdim=6), dict(vdim=6)], ids=str
)
def test_attention_without_a_form_says_so(options: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.attn = QuantStub(), nn.MultiheadAttention(8, 2, **options)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.attn(x, x, x)[0]

    with pytest.raises(UnsupportedOperatorError, match="`MultiheadAttention` at `attn` has no quantized form with"):
        prepare_qat_fx(Model(), {"": default_qat_8bit_fake_quant_qconfig})


def _attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "advice"), [(dict(enable_gqa=True), "repeat key and value"), (dict(scale=-1.0), "positive")]
)
def test_attention_functions_without_a_form_say_what_to_write(options: dict[str, Any], advice: str) -> None:
    model = bench(Body(lambda q, k, v: _attend(q, k, v, **options)), 3)
    with pytest.raises(UnsupportedOperatorError, match=advice):
        prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize("value", [-math.inf, -1e9, -10000.0, torch.finfo(torch.float32).min])
def test_a_float_mask_hides_as_a_bool_mask_does(value: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    shown = torch.rand(5, 6) < 0.6
    shown[:, 0] = True
    mask = torch.zeros(5, 6).masked_fill(~shown, value)
    by_bool = prepared(bench(Body(lambda q, k, v, m: _attend(q, k, v, attn_mask=m)), 3, 4), (q, k, v, shown))
    by_float = prepared(bench(Body(lambda q, k, v, m: _attend(q, k, v, attn_mask=m)), 3, 4), (q, k, v, mask))
    assert torch.equal(by_bool(q, k, v, shown)[1], by_float(q, k, v, mask)[1])


def test_a_hidden_key_counts_for_nothing_and_a_row_without_keys_is_zero() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    shown = torch.ones(5, 6, dtype=torch.bool)
    shown[:, 3:], shown[4] = False, False
    qat = prepared(bench(Body(lambda q, k, v, m: _attend(q, k, v, attn_mask=m)), 3, 4), (q, k, v, shown))
    out = qat(q, k, v, shown)[1]
    k[:, :, 3:], v[:, :, 3:] = -k[:, :, 3:], -v[:, :, 3:]
    assert torch.equal(out, qat(q, k, v, shown)[1])
    assert torch.equal(out[:, :, 4], torch.zeros(1, 2, 8))


def test_a_constant_mask_is_no_quantized_tensor() -> None:
    qat = prepare_qat_fx(Translator(nn).eval(), {"": default_qat_8bit_fake_quant_qconfig})
    assert not [name for name, _ in qat.named_modules() if "_generated_quant" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        convert_fx(calibrate(qat, _sentences()))
