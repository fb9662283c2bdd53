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

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import CalibrationWarning, ConversionError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    get_default_qconfig,
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
        (lambda x, y: torch.einsum("ij,jk,km->i", x, y, x), "sums m of one operand"),
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_converted_attention_holds_integers_only() -> None:
    model = Translator(nn).eval()
    quantized = convert_fx(prepared(model, _sentences()))
    assert not [name for name, p in quantized.named_parameters() if "proj" in name]
    assert quantized.encoder.layers[0].self_attn.q_proj.weight.dtype == torch.int8


@pytest.mark.slow
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

    message = r"`MultiheadAttention` at `attn` \(test_attention.py:\d+\) has no quantized form with"
    with pytest.raises(UnsupportedOperatorError, match=message):
        prepare_qat_fx(Model(), {"": default_qat_8bit_fake_quant_qconfig})


def test_weights_that_nobody_reads_are_not_computed() -> None:
    class Model(nn.Module):
        def __init__(self, is_read: bool) -> None:
            super().__init__()
            self.quant, self.attn, self.is_read = QuantStub(), nn.MultiheadAttention(8, 2), is_read

        def forward(self, x: Tensor) -> Any:
            x = self.quant(x)
            out, weights = self.attn(x, x, x)
            return (out, weights) if self.is_read else out

    x = torch.randn(3, 1, 8)
    for is_read in (True, False):
        qat = prepared(Model(is_read), (x,))
        assert qat.attn.weights_mean.activation_post_process.has_statistics is is_read


def _attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "advice"),
    [(dict(is_causal=True, attn_mask=torch.ones(5, 6)), "either"), (dict(scale=-1.0), "positive")],
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


@pytest.mark.slow
def test_a_constant_mask_is_no_quantized_tensor() -> None:
    qat = prepare_qat_fx(Translator(nn).eval(), {"": default_qat_8bit_fake_quant_qconfig})
    assert not [name for name, _ in qat.named_modules() if "_generated_quant" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        convert_fx(calibrate(qat, _sentences()))


class Tagger(nn.Module):
    """Words to classes: embedding, recurrent layers, a linear head. There is no QuantStub: words have no scale."""

    def __init__(self, recurrent: Any, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.rnn = recurrent(8, 6, batch_first=True, bidirectional=True, **options)
        self.head, self.dequant = nn.Linear(12, 3), DeQuantStub()

    def forward(self, words: Tensor) -> Tensor:
        out, _ = self.rnn(self.words(words))
        return self.dequant(self.head(out))


@pytest.mark.parametrize("recurrent", [nn.LSTM, horizon_nn.GRU], ids=["lstm", "gru"])
@pytest.mark.slow
def test_a_sequence_tagger_goes_all_the_way(recurrent: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Tagger(recurrent, num_layers=2, dropout=0.1).eval()
    words = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qat = prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig})
        calibrate(qat, (words,))
    with torch.no_grad():
        assert float(torch.cosine_similarity(qat(words).flatten(), wanted.flatten(), 0)) > 0.99
    assert qat.state_dict().keys() >= model.state_dict().keys()
    _train_a_step(qat, (words,))
    quantized = assert_one_arithmetic(qat, (words,), tmp_path, [(words.flip(1),)])
    assert not dict(quantized.named_parameters())


class Stateful(nn.Module):
    """A recurrent module whose first state is a parameter, or zeros made on the way."""

    def __init__(self, is_learned: bool) -> None:
        super().__init__()
        self.quant, self.dequant, self.lstm = QuantStub(), DeQuantStub(), nn.LSTM(6, 5)
        self.first = nn.Parameter(torch.randn(2, 1, 1, 5) / 4) if is_learned else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            zeros = torch.zeros(1, x.shape[1], 5)
            state: Any = (zeros, zeros)
        else:
            state = (self.first[0].expand(-1, x.shape[1], -1), self.first[1].expand(-1, x.shape[1], -1))
        return self.dequant(self.lstm(self.quant(x), state)[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_learned", [True, False])
def test_a_first_state_of_real_numbers_is_put_on_the_grid(is_learned: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Stateful(is_learned).eval(), torch.randn(5, 2, 6)
    qat = prepared(model, (x,), "qint16")
    assert torch.allclose(qat(x), model(x), atol=0.01)
    assert_one_arithmetic(qat, (x,), tmp_path)
    for state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
        set_fake_quantize(qat, state)
        gradients = []
        for net in (model, qat):
            net.zero_grad()
            net(x).square().sum().backward()
            gradients.append({name: p.grad for name, p in net.named_parameters()})
        for name, wanted in gradients[0].items():
            assert float(torch.cosine_similarity(gradients[1][name].flatten(), wanted.flatten(), 0)) > 0.98, name


@pytest.mark.parametrize("constant", [0.0, 0.01])
def test_all_steps_of_a_sequence_set_one_scale(constant: float) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.rnn = QuantStub(), nn.RNN(1, 1, bias=False, nonlinearity="relu")

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.quant(x))[0]

    model = Model()
    model.rnn.weight_ih_l0.data.fill_(1.0)
    model.rnn.weight_hh_l0.data.fill_(1.0)
    x = torch.ones(8, 1, 1)  # outputs are 1, 2, ... 8
    qconfig = get_default_qconfig(activation_qkwargs={"averaging_constant": constant})
    for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT):
        qat = prepare_qat_fx(model, {"": qconfig})
        set_fake_quantize(qat, state)
        out = qat(x)
        assert float(out.scale) == pytest.approx(8 / 127.5, rel=0.04)  # the weight is 127 / 127.5
        assert torch.allclose(out.dequantize().flatten(), torch.arange(1.0, 9.0), atol=0.3)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.LSTM(6, 5, proj_size=3), UnsupportedOperatorError, "proj_size.*Linear after"),
        (nn.Bilinear(6, 6, 5), UnsupportedOperatorError, "Bilinear.*has no quantized form"),
        (Body(lambda x, y: torch.cdist(x, y)), UnsupportedOperatorError, "cdist.*has no quantized form"),
        (Body(lambda x, y: F.embedding(x, y)), NotImplementedError, "plain integers as indices"),
    ],
    ids=["proj-size", "bilinear", "cdist", "indices-with-a-scale"],
)
def test_what_has_no_form_says_so(module: nn.Module, error: Any, message: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.module = QuantStub(), module

        def forward(self, x: Tensor) -> Any:
            x = self.quant(x)
            return self.module(x) if isinstance(module, nn.LSTM) else self.module(x, x)

    with pytest.raises(error, match=message):
        prepare_qat_fx(Model(), {"": default_qat_8bit_fake_quant_qconfig})(torch.randn(4, 6))


def test_a_recurrent_module_wants_a_quantized_tensor() -> None:
    qat = prepared(bench(nn.LSTM(6, 5), 1, picks=(0,)), (torch.randn(4, 2, 6),))
    with pytest.raises(ConversionError, match="LSTM at `body`.*QuantStub"):
        qat.body(torch.randn(4, 2, 6))
    with pytest.raises(ConversionError, match="a PackedSequence.*padded tensors"):
        qat.body(nn.utils.rnn.pack_sequence([torch.randn(4, 6)]))


class Words(nn.Module):
    """Where an embedding's rows go decides whether they are quantized."""

    def __init__(self, call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.table, self.quant, self.other = nn.Embedding(9, 4, **options), QuantStub(), QuantStub()
        self.dequant, self.call = DeQuantStub(), call

    def forward(self, words: Tensor, x: Tensor) -> Any:
        return self.call(self, words, x)


@pytest.mark.parametrize(
    ("call", "is_quantized"),
    [
        (lambda m, words, x: m.dequant(m.quant(x) + m.table(words)), True),
        (lambda m, words, x: m.dequant(m.quant(x) + m.table(words) * 2.0), True),
        (lambda m, words, x: m.dequant(m.quant(x) + m.other(m.table(words))), False),
        (lambda m, words, x: (m.dequant(m.quant(x) * 1.5), m.dequant(m.table(words))), True),
        (lambda m, words, x: (m.dequant(m.quant(x) * 1.5), m.table(words)), False),
        (lambda m, words, x: m.dequant(m.table(torch.argmax(m.quant(x), -1)) + m.quant(x)), True),
    ],
    ids=["sum", "after-a-product", "own-stub", "dequant", "float", "of-positions"],
)
def test_an_embedding_is_quantized_where_it_meets_the_quantized_part(
    call: Callable[..., Any], is_quantized: bool, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    inputs = (torch.randint(0, 9, (5,)), torch.randn(5, 4))
    qat = prepared(Words(call).eval(), inputs)
    assert (type(qat.table).__module__ == "horizon_plugin_pytorch.nn.qat.embedding") is is_quantized
    assert_one_arithmetic(qat, inputs, tmp_path)


def test_an_embedding_that_changes_its_table_says_so() -> None:
    model = Words(lambda m, words, x: m.quant(x) + m.table(words), max_norm=1.0)
    message = r"`Embedding` at `table` \(test_attention.py:\d+\) has no quantized form with max_norm"
    with pytest.raises(UnsupportedOperatorError, match=message):
        prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 5, 6), (1, 1, 6)], ids=["no-batch", "one-step"])
def test_small_batches(shape: tuple[int, ...]) -> None:
    for module in (nn.LSTM(6, 5, batch_first=True), nn.GRU(6, 5, batch_first=True)):
        qat = prepared(bench(module, 1, picks=(0,)), (torch.randn(2, 5, 6),))
        assert qat(torch.randn(shape))[1].shape == (*shape[:2], 5)
    attention = prepared(
        bench(nn.MultiheadAttention(6, 2, batch_first=True), 3, picks=(0,)), (torch.randn(2, 5, 6),) * 3
    )
    assert attention(*[torch.randn(shape)] * 3)[1].shape == shape


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 300, 16), (2, 3, 16, 200)),
        ((2, 300, 16), (16, 600)),
        ((600, 16), (3, 16, 200)),
        ((1, 3, 300, 16), (2, 1, 16, 200)),
        ((2000, 16), (16, 300)),
    ],
    ids=str,
)
def test_large_products_are_the_integers_of_their_definition(
    left: tuple[int, ...], right: tuple[int, ...], bits: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    high = 1 << (bits - 1)
    a, b = (torch.randint(-high, high, shape, generator=generator) for shape in (left, right))
    bound = 16 * float(high) ** 2
    factor = fp.choose_factor(torch.tensor([300.0 / bound]), -high, high - 1, bound)
    found = fp.matmul(a.float(), b.float(), factor, fp.is_beyond_float32(bound), -high, high - 1, False)
    multiplier, shift = fp.multiplier_and_shift(factor.double())
    wanted = (a @ b * multiplier + (1 << (shift - 1))) >> shift
    assert torch.equal(found.long(), wanted.clamp(-high, high - 1))
