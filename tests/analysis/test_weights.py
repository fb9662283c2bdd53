"""`compare_weights` beyond the guide's script."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode, set_qat_mode
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, QuantWrapper, convert, convert_fx, prepare
from horizon_plugin_pytorch.quantization.quantize_fx import fuse_fx
from horizon_plugin_pytorch.utils.quant_profiler import compare_weights
from tests.routes import calibrate, prepared, qconfig
from tests.watch.models import Eager

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    monkeypatch.chdir(tmp_path)


def moved(model: nn.Module) -> nn.Module:
    """With statistics of batch norms that change weights when they are folded."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    return model.eval()


def qat_of(net: nn.Module, method: str = "jit-strip") -> nn.Module:
    qat = prepare(copy.deepcopy(net), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    return calibrate(qat, (X,))


@pytest.mark.filterwarnings("ignore:.*one scale must fit")
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_fused_float_against_qat_and_integers(method: str) -> None:
    net = moved(Eager())
    qat = qat_of(net, method)
    integers = convert(copy.deepcopy(qat))
    before = {name: x.clone() for name, x in qat.state_dict().items() if isinstance(x, Tensor)}
    fused = fuse_fx(copy.deepcopy(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = compare_weights(fused, qat)
        rounded = compare_weights(fused, integers, "SQNR")
    assert list(weights) == list(rounded) == ["stem.weight", "block.sum.weight", "fc.weight"]
    for name, pair in weights.items():
        torch.testing.assert_close(pair["float"], pair["quantized"])
        error = (rounded[name]["quantized"] - pair["float"]).abs().max()
        assert 0 < float(error) < 0.01 * float(pair["float"].abs().max())
    assert all(torch.equal(x, before[name]) for name, x in qat.state_dict().items() if name in before)


@pytest.mark.filterwarnings("ignore:.*one scale must fit")
def test_an_unfused_float_model_is_told() -> None:
    net = moved(Eager())
    with pytest.warns(QuantizationWarning, match=r"block\.sum.* no partner.*fuse_fx"):
        assert "block.sum.weight" not in compare_weights(net, qat_of(net))
    folded = moved(QuantWrapper(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    with pytest.warns(QuantizationWarning, match=r"folded into module\.0 in one model only.*fuse_fx"):
        compare_weights(folded, qat_of(folded))


@pytest.mark.filterwarnings("ignore:.*module.1 have no partner")  # the batch norm of the unfused model
def test_batch_norms_that_stay() -> None:
    """With `QATMode.WithBN` the trained weight is the float model's; the integers have the batch norm in them."""
    net = moved(QuantWrapper(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    fused = fuse_fx(copy.deepcopy(net))
    mode = get_qat_mode()
    set_qat_mode(QATMode.WithBN)
    try:
        qat = qat_of(net)
    finally:
        set_qat_mode(mode)
    for float_model in (net, fused):
        pair = compare_weights(float_model, qat)["module.0.weight"]
        torch.testing.assert_close(pair["float"], pair["quantized"])
    pair = compare_weights(fused, convert(qat))["module.0.weight"]
    torch.testing.assert_close(pair["float"], pair["quantized"], rtol=0, atol=0.01)


def test_one_model_twice() -> None:
    net = QuantWrapper(nn.Linear(4, 2))
    with pytest.raises(CheckError, match="both arguments are one model.*deepcopy"):
        compare_weights(net, net)
    shared = copy.deepcopy(net)
    shared.module.weight = net.module.weight
    with pytest.warns(QuantizationWarning, match=r"same memory for module\.weight.*deepcopy"):
        compare_weights(net, shared)
    with pytest.raises(CheckError, match="no weight in common"):
        compare_weights(net, nn.Sequential(nn.Linear(4, 2)))
    with pytest.warns(QuantizationWarning, match=r"0\.weight differ in shape"):
        compare_weights(
            nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(4, 3), nn.Linear(2, 2))
        )


def test_functions_of_similarity(capsys: pytest.CaptureFixture) -> None:
    net = nn.Linear(2, 1)
    other = copy.deepcopy(net)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 4.0]]))
        other.weight.copy_(torch.tensor([[4.0, 3.0]]))
    wanted: list[tuple[Any, str]] = [
        ("Cosine", "0.96"),
        ("MSE", "1.0"),
        ("L1", "1.0"),
        (lambda x, y: (x - y).sum(), "0"),
    ]
    for func, value in wanted:
        compare_weights(net, other, func)
        assert f"| weight        | {float(value):.7f}" in capsys.readouterr().out
    with pytest.raises(QuantizationConfigError, match="no metric 'cosine'"):
        compare_weights(net, other, "cosine")
    with pytest.raises(TypeError, match="similarity_func"):
        compare_weights(net, other, 3)  # type: ignore[arg-type]


def test_logs_of_tensorboard(tmp_path: Path) -> None:
    """Where tensorboard is not installed, the table is written and the error says what to install."""
    net = nn.Linear(2, 1)
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(CheckError, match="pip install tensorboard"):
            compare_weights(net, copy.deepcopy(net), with_tensorboard=True)
        assert (tmp_path / "weight_comparison.txt").exists()
    else:
        compare_weights(net, copy.deepcopy(net), with_tensorboard=True, tensorboard_dir=tmp_path / "log")
        assert list((tmp_path / "log").iterdir())


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.part = getattr(nn, kind)(4, 8, **({} if kind.endswith("Cell") else {"bidirectional": True}))

    def forward(self, x: Tensor) -> Tensor:
        out = self.part(self.quant(x))
        return self.dequant(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("kind", ["LSTM", "GRUCell"])
def test_recurrent_weights(kind: str) -> None:
    """Parameters of the module in float and QAT, layers of its steps in integers."""
    net, x = _Recurrent(kind).eval(), torch.randn(*((2,) if kind.endswith("Cell") else (3, 2)), 4)
    qat = prepared(net, (x,))
    quantized = convert_fx(copy.deepcopy(qat))
    steps = {"LSTM": {"l0": "_l0", "l0_reverse": "_l0_reverse"}, "GRUCell": {"step": ""}}[kind]
    wanted = {f"part.{s}.{p}.weight": f"weight_{p}{suffix}" for s, suffix in steps.items() for p in ("ih", "hh")}
    for pair in ((net, qat), (net, quantized), (qat, quantized)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "compare_weights")
            found = compare_weights(*pair)
        assert list(found) == list(wanted)
        for name, parameter in wanted.items():
            assert torch.equal(found[name]["float"], getattr(net.part, parameter))
            assert torch.allclose(found[name]["float"], found[name]["quantized"], atol=0.01)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.attention(x, x, x)[0])


def test_packed_weights_of_attention() -> None:
    """Thirds of one parameter in float and QAT, layers of their own in integers."""
    net, x = _Attention().eval(), torch.randn(2, 4, 8)
    qat = prepared(net, (x,))
    quantized = convert_fx(copy.deepcopy(qat))
    names = [f"attention.{name}_proj.weight" for name in ("q", "k", "v", "out")]
    for pair in ((net, qat), (net, quantized), (qat, quantized)):
        found = compare_weights(*pair)
        assert list(found) == names
        for number, name in enumerate(names[:3]):
            assert torch.equal(found[name]["float"], net.attention.in_proj_weight.chunk(3)[number])
            assert torch.allclose(found[name]["float"], found[name]["quantized"], atol=0.01)


def test_a_batch_norm_on_its_own_needs_no_partner() -> None:
    """Converted it has other numbers than a weight, and there is nothing that a user could do."""
    qat = qat_of(moved(QuantWrapper(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(compare_weights(qat, convert(copy.deepcopy(qat)))) == {"module.2.weight"}
