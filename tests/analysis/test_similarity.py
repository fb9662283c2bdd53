"""`featuremap_similarity` beyond the guide's script."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import set_qat_mode
from horizon_plugin_pytorch.quantization import QuantWrapper, convert, fuse_modules, get_default_qconfig, prepare_qat_fx
from horizon_plugin_pytorch.utils.quant_profiler import featuremap_similarity
from tests.routes import calibrate, prepared, prepared_on
from tests.watch.models import ROUTES, data, stages

NAME, SIMILARITY, SCALE, ATOL, ERROR, SAME_INPUT = 1, 3, 4, 5, 6, 7


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    monkeypatch.chdir(tmp_path)


def compare(one: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list]:
    rows = featuremap_similarity(one, other, *args, **kwargs)
    assert [row[0] for row in rows] == list(range(len(rows)))
    return {row[NAME]: row for row in rows}


def state(model: nn.Module) -> dict[str, Any]:
    found = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return {**found, "modes": torch.tensor([module.training for module in model.modules()])}


@pytest.mark.filterwarnings("ignore:.*evaluated in the QAT state")
@pytest.mark.parametrize("qat_mode", ["fuse_bn", "with_bn"])
def test_scales_do_not_follow_what_is_shown(qat_mode: str) -> None:
    """A trained model in the QAT state, on data of another range: its quantized form has the same scales."""
    torch.manual_seed(0)
    set_qat_mode(qat_mode)
    net = QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    qat = prepare_qat_fx(net, {"": get_default_qconfig()}).train()
    set_qat_mode("fuse_bn")
    optimizer = torch.optim.SGD(qat.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        qat(torch.randn(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    before = state(qat)
    rows = compare(qat, convert(copy.deepcopy(qat).eval()), 3 * torch.randn(1, 3, 4, 4))
    assert list(rows) == ["quant", "module.0", "module.3", "dequant"] and rows["quant"][ATOL] == 0
    assert all(row[ERROR] <= 1 and row[SAME_INPUT] <= 1 for row in rows.values())
    assert all(torch.equal(x, before[name]) for name, x in state(qat).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*one scale must fit", "ignore:.*evaluated in the QAT state")
@pytest.mark.parametrize("route", ROUTES)
def test_stages(route: str) -> None:
    """All operators have a partner and an error of their own; nothing of the models changes."""
    models = dict(stages(route))
    before = {stage: state(model) for stage, model in models.items()}
    x = data()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "featuremap_similarity")
        exact = compare(models["validation"], models["converted"], x)
        trained = compare(models["qat"], models["converted"], x)
        quantized = compare(models["float"], models["converted"], x)
        turned = compare(models["converted"], models["float"], x)
        calibrated = compare(models["calibration"], models["qat"], x)
    assert all(row[SIMILARITY] == pytest.approx(1) and row[ATOL:] == [0, 0, 0] for row in exact.values())
    assert exact.keys() == trained.keys() == calibrated.keys()
    assert all(row[ERROR] <= 3 and row[SAME_INPUT] <= 1 for row in trained.values())
    assert quantized["quant"][ERROR] == quantized["quant"][SAME_INPUT] == pytest.approx(0.5, abs=0.01)
    assert "block.relu(I)" in quantized and "block.sum" in turned and "shared(1)" in quantized
    fused, again = quantized["block.relu(I)"], turned["block.sum"]
    assert fused[SIMILARITY:] == again[SIMILARITY:] and 0.4 < fused[SAME_INPUT] < 2  # of all that it is made of
    assert all(0.99 < row[SIMILARITY] < 1.0001 and row[SAME_INPUT] <= 2 for row in quantized.values())
    for stage, model in models.items():
        after = state(model)
        assert all(torch.equal(x, after[name]) for name, x in before[stage].items()), stage


def test_the_operator_that_is_to_blame() -> None:
    """A layer that computes something else is the only one with an error of its own; all after it differ."""
    net = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.randn(8, 4)
    one = prepared(net, (x,))
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.module[2].weight.neg_()
    rows = compare(one, other, x)
    assert [name for name, row in rows.items() if row[SAME_INPUT]] == ["module.2"]
    assert [name for name, row in rows.items() if row[ERROR]] == ["module.2", "module.3", "dequant"]
    lines = [line for line in Path("ordered_op_error_similarity.txt").read_text().splitlines() if "<class" in line]
    assert [line.split("|")[2].strip() for line in lines][:2] == ["module.2", "quant"]


def test_what_is_printed(capsys: pytest.CaptureFixture) -> None:
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    x = torch.eye(2)
    with torch.no_grad():
        one[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        other[0].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
        one[0].bias.zero_(), other[0].bias.zero_()
    wanted = {"Cosine": 1.0, "MSE": 0.5, "L1": 0.5, "SQNR": 0.0}
    for metric, value in wanted.items():
        assert compare(one, other, x, metric)["0"][SIMILARITY] == pytest.approx(value), metric
        out = capsys.readouterr().out
        assert ("Similarity (SQNR) below 20:" in out) == (metric == "SQNR") and bool(out) == (metric == "SQNR")
    compare(one, other, x, "MSE", threshold=0.4)
    assert "Similarity (MSE) above 0.4:" in capsys.readouterr().out
    assert compare(one, other, x, lambda x, y: (y - x).sum())["0"][SIMILARITY] == 2
    assert math.isnan(compare(one, other, x, lambda x, y: y - x)["0"][SIMILARITY])
    assert capsys.readouterr().out == ""
    row = compare(one, other, x)["0"]
    assert row[SCALE] is None and row[ATOL] == 1 and row[ERROR] is None and row[SAME_INPUT] is None


def test_identities() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.other, self.conv = nn.Identity(), nn.ReLU(), nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.other(self.same(x)))

    one, other = Net(), Net()
    other.other = nn.Identity()
    rows = compare(one, other, torch.randn(1, 1, 2, 2), threshold=-2)
    assert list(rows) == ["same(I vs I)", "other(I)", "conv"]
    fused = fuse_modules(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()).eval(), ["0", "1"])
    plain = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()).eval()
    plain[0].load_state_dict(fused[0].conv.state_dict())
    assert list(compare(plain, fused, torch.randn(1, 1, 2, 2))) == ["1(I)"]


def test_one_model_twice() -> None:
    net = QuantWrapper(nn.Linear(2, 2))
    with pytest.raises(CheckError, match="both models are one.*deepcopy"):
        featuremap_similarity(net, net, torch.ones(1, 2))
    with pytest.raises(CheckError, match="hold the same modules.*deepcopy"):
        featuremap_similarity(net, nn.Sequential(net.quant, net.module), torch.ones(1, 2))
    assert compare(net, net, torch.ones(1, 2), devices=("cpu", torch.device("cpu", 0)))["module"][ATOL] == 0


def test_different_models() -> None:
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(CheckError, match="no operator in common"):
        featuremap_similarity(nn.Sequential(nn.ReLU()), QuantWrapper(nn.ReLU()), x)
    with pytest.raises(CheckError, match=r"`0` gives \(1, 2, 4, 4\) in the first model and \(1, 5, 4, 4\)"):
        featuremap_similarity(nn.Sequential(nn.Conv2d(3, 2, 1)), nn.Sequential(nn.Conv2d(3, 5, 1)), x)
    with pytest.warns(QuantizationWarning, match="without a partner.*1: not in the other model"):
        featuremap_similarity(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU()), x)
    with pytest.raises(CheckError, match="featuremap_similarity: the model failed at `0`"):
        featuremap_similarity(nn.Sequential(nn.Conv2d(3, 2, 1)), nn.Sequential(nn.Conv2d(3, 2, 1)), x[:, :2])
    with pytest.raises(CheckError, match="featuremap_similarity: the device 'cuda:99' cannot be used here"):
        featuremap_similarity(nn.ReLU(), nn.ReLU(), x, devices="cuda:99")
    with pytest.raises(TypeError, match="a pair of devices"):
        featuremap_similarity(nn.ReLU(), nn.ReLU(), x, devices=("cpu",))
    with pytest.raises(QuantizationConfigError, match="no metric"):
        featuremap_similarity(nn.ReLU(), nn.ReLU(), x, "cosine")


def test_an_error_leaves_what_was_compared() -> None:
    calls = []

    def fails(x: Tensor, y: Tensor) -> float:
        calls.append(x)
        if len(calls) == 2:
            raise RuntimeError("mine")
        return 1.0

    nets = [nn.Sequential(nn.ReLU(), nn.Tanh()) for _ in range(2)]
    with pytest.raises(RuntimeError, match="mine"):
        featuremap_similarity(*nets, torch.randn(3), fails)
    assert "| 0       | 0 " in Path("similarity.txt").read_text()


@pytest.mark.slow
def test_features_are_let_go() -> None:
    alive, most = weakref.WeakSet[Tensor](), 0

    def count(x: Tensor, y: Tensor) -> float:
        nonlocal most
        gc.collect()
        most = max(most, len(alive))
        alive.update([x, y])
        return 1.0

    nets = [nn.Sequential(*(nn.Tanh() for _ in range(20))) for _ in range(2)]
    featuremap_similarity(*nets, torch.randn(3), count)
    assert most <= 6


def test_names_are_shown_and_not_run() -> None:
    nets = [nn.Sequential() for _ in range(2)]
    for net in nets:
        net.add_module("<script>alert(1)</script>", nn.ReLU())
    featuremap_similarity(*nets, torch.randn(4))
    page = Path("similarity.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "http" not in page


def test_how_often_models_run() -> None:
    """A QAT model and its integers make the same calls, and run once; others run once before, to pair the calls."""
    models = dict(stages("symbolic"))
    runs: dict[str, int] = dict.fromkeys(models, 0)

    def count(stage: str) -> Any:
        def hook(*_: Any) -> None:
            runs[stage] += 1

        return hook

    hooks = [models[stage].register_forward_pre_hook(count(stage)) for stage in ("float", "qat", "converted")]
    exact = compare(models["qat"], models["converted"], data())
    assert (runs["qat"], runs["converted"]) == (1, 1) and len(exact) > 5
    compare(models["float"], models["qat"], data())
    assert (runs["float"], runs["qat"]) == (2, 3)
    for hook in hooks:
        hook.remove()


class _Tail(nn.Module):
    """A model of which one stage has a function more."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.has_tail = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y.exp() if self.has_tail else y


def test_models_that_are_almost_alike() -> None:
    """What was told before the calls were found to differ is told once."""
    x = torch.randn(2, 4)
    net = _Tail()
    one = calibrate(prepared_on("JIT", net, (x,)), (x,))
    other = copy.deepcopy(one)
    other.has_tail = True
    with pytest.warns(QuantizationWarning, match=r"without a partner.*exp"):
        rows = compare(one, other, x)
    assert list(rows) == ["net.quant", "net.module.0", "net.dequant"]
