"""Norms, softmax and pools: what a table of cases cannot say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import OperatorInputError, QuantizationConfigError, UnsupportedOperatorError
from horizon_plugin_pytorch.fixed_point import normalization
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized.softmax import exp_table
from horizon_plugin_pytorch.quantization import (
    FakeQuantize,
    FakeQuantState,
    QuantWrapper,
    check_model,
    convert_fx,
    set_fake_quantize,
)
from tests.operators.cases.base import Body, bench
from tests.routes import assert_one_arithmetic, prepared


def _integers(shape: tuple[int, ...], bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, generator=generator).float()


def test_layer_norm_has_the_parts_of_the_guides_in_int16() -> None:
    qat = prepared(bench(nn.LayerNorm(8)), (torch.randn(4, 8),))
    parts = {path: m.dtype for path, m in qat.body.named_modules() if isinstance(m, FakeQuantize)}
    names = ["var_mean.pre_mean", "var_mean.sub", "var_mean.mul", "var_mean.post_mean", "rsqrt", "mul", "weight_mul"]
    assert parts == {f"{name}.activation_post_process": "qint16" for name in names} | {
        "bias_add.activation_post_process": "qint8"
    }
    assert all(m.has_statistics for m in qat.body.modules() if isinstance(m, FakeQuantize))


def test_softmax_has_the_parts_of_the_guides_in_int16() -> None:
    qat = prepared(bench(nn.Softmax(-1)), (torch.randn(4, 8),))
    parts = {path: m.dtype for path, m in qat.body.named_modules() if isinstance(m, FakeQuantize)}
    assert list(parts) == [f"{n}.activation_post_process" for n in ("sub", "exp", "sum", "reciprocal", "mul")]
    assert list(parts.values()) == ["qint16"] * 4 + ["qint8"]
    assert float(qat.body.exp.activation_post_process.scale) == pytest.approx(2 / 65535)


def test_rsqrt_kwargs_reach_the_table() -> None:
    norm = nn.LayerNorm(8)
    norm.rsqrt_kwargs = {"auto_divide_strategy": "evenly"}  # type: ignore[assignment]
    assert prepared(bench(norm), (torch.randn(4, 8),)).body.rsqrt.division.auto_divide_strategy == "evenly"
    norm.rsqrt_kwargs = {"auto_divide_strategy": "by feeling"}  # type: ignore[assignment]
    with pytest.raises(QuantizationConfigError, match="by feeling"):
        prepared(bench(norm), (torch.randn(4, 8),))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 100.0])
def test_groups_of_equal_or_nearly_equal_values_stay_sane(eps: float, dtype: str, tmp_path: Any) -> None:
    norm = nn.LayerNorm(16, eps=eps)
    nn.init.uniform_(norm.bias, -1, 1)
    x = torch.randn(6, 16)
    qat = prepared(bench(norm), (x,), dtype)
    x[0], x[1], x[2] = 0.0, 1.5, -2.0
    x[3] = 1.0
    x[3, 0] += 1e-3
    quantized = assert_one_arithmetic(qat, (x,), tmp_path)
    out = quantized(x)[1]
    assert torch.isfinite(out).all()
    assert torch.allclose(out[:3], norm.bias.detach().expand(3, 16), atol=float(quantized(x)[0].scale))


@given(st.sampled_from([8, 16]), st.integers(1, 3000), st.booleans(), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_normalize_is_within_half_a_step_of_the_exact_value(bits: int, count: int, is_centred: bool, seed: int) -> None:
    q = _integers((3, count), bits, seed)
    high = (1 << (bits - 1)) - 1
    out_scale, eps = 8 / high, 0.25
    got = fp.normalize(q, [1], None, None, 1 / out_scale, eps, is_centred, bits, -high - 1, high)
    exact = q.double()
    deviation = exact - exact.mean(1, keepdim=True) if is_centred else exact
    real = deviation / (deviation.square().mean(1, keepdim=True) + eps).sqrt() / out_scale
    assert float((got - real.clamp(-high - 1, high)).abs().max()) < 0.51


@given(st.sampled_from([8, 16]), st.integers(1, 2000), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_sums_of_any_length_are_exact(bits: int, length: int, seed: int) -> None:
    q = _integers((2, 3, length), bits, seed)
    for dims in ([2], [1, 2], [0, 1]):
        assert torch.equal(normalization.exact_sums(q, dims, 1 << (bits - 1)), q.double().sum(dims, keepdim=True))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_tensor_that_is_cut_into_pieces_gives_what_each_row_gives(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = _integers((7, 9, 11), 8, 1)
    table = exp_table(torch.tensor([0.03]), qint8)
    hidden = _integers((7, 1, 11), 8, 2) > 60
    weight = torch.rand(11)
    logs = fp.choose_logarithm(2 / 65535)

    def results() -> list[Tensor]:
        return [
            fp.softmax(q, dim, None, table, 127.0, False, -128, 127),
            fp.softmax(q, dim, hidden, table, 127.0, False, -128, 127),
            fp.log_softmax(q, dim, table, logs, -0.5, 20.0, False, -128, 127),
            fp.normalize(q, [dim], weight, weight, 20.0, 0.1, True, 8, -128, 127),
        ]

    whole = results()
    monkeypatch.setattr(normalization, "_PIECE", 30)
    assert all(torch.equal(a, b) for a, b in zip(whole, results(), strict=True))
    assert float(whole[1][hidden.expand_as(q)].abs().max()) == 0


@pytest.mark.parametrize("piece", [30, 1 << 18])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_bytes_give_the_same_integers_in_bytes(dim: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with both ends of the range among them, of one value, and of views."""
    monkeypatch.setattr(normalization, "_PIECE", piece)
    q = _integers((7, 9, 11), 8, 1)
    q[0], q[:, 0], q[..., 0] = -128, 127, -128
    q[1], q[:, 1], q[..., 1] = 5, -128, 127
    table, weight = exp_table(torch.tensor([0.03]), qint8), torch.rand(11)
    small = q.to(torch.int8)
    for form in (small, small.mT.contiguous().mT, small.repeat(1, 1, 2)[..., :11]):
        for name, run in {
            "softmax": lambda x: fp.softmax(x, dim, None, table, 127.0, False, -128, 127),
            "softmax in float64": lambda x: fp.softmax(x, dim, None, table, 127.0, True, 0, 127),
            "steps": lambda x: fp.normalize(x, [dim], weight, weight, 20.0, 0.1, True, 8, -128, 127),
            "folded": lambda x: fp.normalize(x, [dim], None, None, 20.0, 0.0, True, 8, -128, 127),
            "mean of squares": lambda x: fp.normalize(x, [dim], weight, None, 20.0, 0.1, False, 8, -128, 127),
        }.items():
            found = run(form)
            assert found.dtype == torch.int8 and torch.equal(found.float(), run(q)), name


def test_softmax_of_a_group_without_positions_is_zero() -> None:
    q = _integers((2, 5), 8, 1)
    table = exp_table(torch.tensor([0.03]), qint8)
    hidden = torch.tensor([[True] * 5, [False] * 5])
    got = fp.softmax(q, 1, hidden, table, 127.0, False, -128, 127)
    assert got[0].tolist() == [0.0] * 5 and got[1].sum() > 100


@pytest.mark.parametrize("module", [nn.LayerNorm(5), nn.Softmax(1), nn.LogSoftmax(1), nn.RMSNorm(5)], ids=repr)
def test_an_empty_batch_gives_an_empty_result(module: nn.Module) -> None:
    qat = prepared(bench(module), (torch.randn(3, 5),))
    assert qat(torch.zeros(0, 5))[1].shape == convert_fx(qat)(torch.zeros(0, 5))[1].shape == (0, 5)


@pytest.mark.parametrize("size", [1, 2, 2000])
def test_softmax_of_equal_scores_is_one_over_their_number(size: int) -> None:
    qat = prepared(bench(nn.Softmax(-1)), (torch.ones(3, size),), "qint16")
    assert torch.allclose(convert_fx(qat)(torch.ones(3, size))[1], torch.full((3, size), 1 / size), rtol=1e-3)


def test_a_wrong_shape_is_explained_with_the_place() -> None:
    qat = prepared(bench(nn.LayerNorm(8)), (torch.randn(4, 8),))
    with pytest.raises(OperatorInputError, match=r"`LayerNorm` at `body`.*\[8\]"):
        qat(torch.randn(4, 9))
    qat = prepared(bench(nn.GroupNorm(2, 4)), (torch.randn(2, 4, 3),))
    with pytest.raises(OperatorInputError, match=r"`GroupNorm` at `body`.*multiple of 2"):
        qat(torch.randn(2, 5, 3))


class ComputedWeight(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), x[0] * 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (ComputedWeight(), ("layer_norm", "weight", "parameter")),
        (Body(lambda x: F.softmax(x, 1, dtype=torch.float64)), ("softmax", "dtype")),
        (Body(lambda x: F.max_pool1d(x, 2, return_indices=True)[0]), ("return_indices",)),
        (Body(lambda x: F.lp_pool1d(x, 2, 2)), ("lp_pool1d", "average or max pooling")),
        (Body(lambda x: F.local_response_norm(x, 2)), ("local_response_norm", "layer normalisation")),
        (nn.LocalResponseNorm(2), ("LocalResponseNorm", "bayes")),
        (nn.LPPool1d(2, 2), ("LPPool1d", "bayes")),
        (horizon_nn.SoftmaxBernoulli2(1), ("SoftmaxBernoulli2", "bernoulli2")),
    ],
    ids=repr,
)
def test_what_has_no_form_is_refused_with_a_remedy(body: nn.Module, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        prepared(bench(body), (torch.randn(2, 4, 8),))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_softmax_bernoulli2_works_over_channels_only() -> None:
    with pytest.raises(ValueError, match="dim must be 1"):
        horizon_nn.SoftmaxBernoulli2(dim=2)


def test_softmax_bernoulli2_ignores_the_format_of_its_qconfig() -> None:
    set_march(March.BERNOULLI2)
    with pytest.warns(UserWarning, match="int16"):
        qat = prepared(bench(horizon_nn.SoftmaxBernoulli2(), picks=()), (torch.randn(1, 4, 3, 3),), "qint16")
    assert qat.body.activation_post_process.dtype == "qint8"


def test_the_functional_form_trains_the_parameter_of_the_model() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(8))
            self.register_buffer("shift", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (8,), self.gain, self.shift)

    qat = prepared(bench(Norm()), (torch.randn(4, 8),))
    assert qat.body._generated_layer_norm_0.weight is qat.body.gain
    assert len(list(qat.parameters())) == 1
    qat(torch.randn(4, 8))[1].sum().backward()
    assert qat.body.gain.grad is not None and torch.isfinite(qat.body.gain.grad).all()


def test_instance_norm_moves_its_statistics_while_training_only() -> None:
    norm = nn.InstanceNorm2d(3, track_running_stats=True)
    x = torch.randn(2, 3, 4, 4) + 5
    qat = prepared(bench(norm), (x,)).train()
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    qat(x)
    assert torch.equal(qat.body.running_mean, before)
    set_fake_quantize(qat, FakeQuantState.QAT)
    qat(x)
    assert float(qat.body.running_mean.min()) > 0.1


def test_check_model_knows_the_limits_of_layer_norm_and_pools(capsys: pytest.CaptureFixture) -> None:
    x = torch.randn(1, 1, 128, 129)
    model = bench(nn.Sequential(nn.LayerNorm((128, 129)), nn.AvgPool2d(2, padding=1)))
    assert check_model(convert_fx(prepared(model, (x,))), (x,)) == 1
    found = capsys.readouterr().out
    assert "normalized_shape H * W < 16384" in " ".join(found.split()) and "HW <= 16384" in " ".join(found.split())
    set_march(March.BERNOULLI2)
    x = torch.randn(1, 2, 20, 20)
    model = bench(nn.Sequential(nn.AvgPool2d(8, 1), nn.MaxPool2d(2)))
    assert check_model(convert_fx(prepared(model, (x,))), (x,)) == 1
    assert "1 <= kernel_size <= 7" in capsys.readouterr().out


def test_statistics_do_not_move_in_validation() -> None:
    x = torch.randn(2, 4, 6, 6)
    qat = prepared(QuantWrapper(nn.BatchNorm2d(4)), (x,))
    qat.train()
    x.requires_grad_()
    assert torch.equal(qat(x), qat(x))


@pytest.mark.parametrize(
    "function", [lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.rms_norm(x, (x.shape[-1],))], ids=["layer", "rms"]
)
def test_a_shape_that_tracing_does_not_know_is_refused_with_what_to_write(function: Any) -> None:
    message = r"\(test_norms.py:\d+\).* normalized_shape is computed of sizes.*write the numbers"
    with pytest.raises(UnsupportedOperatorError, match=message):
        prepared(bench(Body(function)), (torch.randn(4, 8),))
