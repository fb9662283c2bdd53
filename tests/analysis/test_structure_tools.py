"""`check_unfused_operations`, `get_module_called_count` and `check_qconfig` beyond the guides' scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CheckError, HorizonError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat import Linear
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, PrepareMethod, QuantStub, convert, fuse_modules, prepare
from horizon_plugin_pytorch.utils.quant_profiler import (
    check_qconfig,
    check_unfused_operations,
    get_module_called_count,
)
from tests.models import AddBlock
from tests.routes import calibrate, qconfig

METHODS = [m.value for m in PrepareMethod if m is not PrepareMethod.EAGER]
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.one, self.two, self.unused, self.head = AddBlock(), AddBlock(), nn.Tanh(), nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.quant(x * scale)
        return {"out": self.dequant(self.head(self.two(self.one(x, x), x)))}


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def test_fused_parts_are_not_reported(capsys: pytest.CaptureFixture) -> None:
    net = Net().eval()
    four = ["conv", "bn", "add", "relu"]
    assert check_unfused_operations(net, X, print_tabulate=False) == [
        [f"{block}.{name}" for name in four] for block in ("one", "two")
    ]
    assert capsys.readouterr().out == ""
    fuse_modules(net.one, four, inplace=True)
    fuse_modules(net.two, ["conv", "bn"], inplace=True)
    assert check_unfused_operations(net, X) == [["two.conv", "two.add", "two.relu"]]
    fuse_modules(net.two, ["conv", "add", "relu"], inplace=True)
    capsys.readouterr()
    assert check_unfused_operations(net, X) == []
    assert capsys.readouterr().out == "All fusable modules are fused in model!\n"


@pytest.mark.filterwarnings("error::horizon_plugin_pytorch.errors.QuantizationWarning")
def test_a_float_model_is_looked_at_without_a_word() -> None:
    assert get_module_called_count(Net().eval(), X, print_tabulate=False)["head"] == 1
    assert check_unfused_operations(Net().eval(), X, print_tabulate=False)


def test_a_chain_that_runs_twice_is_told_once() -> None:
    tower = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    found = check_unfused_operations(nn.Sequential(tower, tower).eval(), X, print_tabulate=False)
    assert found == [["0.0(shared)", "0.1(shared)"]]


def test_a_result_that_is_read_twice_cannot_be_fused() -> None:
    class Twice(AddBlock):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            y = self.conv(x)
            return self.relu(y) * y

    assert check_unfused_operations(Twice(), X) == []


def _model(stage: str) -> nn.Module:
    if stage == "float":
        return Net()
    method = stage.removesuffix("-converted")
    model = prepare(Net(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    return convert(calibrate(model, (X,))) if stage.endswith("converted") else model


@pytest.mark.parametrize("stage", ["float", *METHODS, "jit-strip-converted", "symbolic-converted"])
def test_calls_are_counted_at_every_stage(stage: str) -> None:
    model = _model(stage)
    before = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    found = get_module_called_count(model, (X,), print_tabulate=False)
    assert found["quant"] == found["dequant"] == found["head"] == 1
    assert found.get("unused", 0) == 0
    assert found["two.add"] == 1
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if name in before)


def test_calls_of_chosen_modules() -> None:
    net = Net()
    found = get_module_called_count(net, X, lambda m: isinstance(m, (AddBlock, nn.Linear, QuantStub)), False)
    assert found == {"quant": 1, "one": 1, "two": 1, "head": 1}
    found = get_module_called_count(net, X, lambda m: isinstance(m, FloatFunctional), False)
    assert found == {"one.add": 1, "two.add": 1}
    found = get_module_called_count(net, X, lambda m: True, False)  # the model itself is not among its modules
    assert found == {"quant": 1, "dequant": 1, "one": 1, "two": 1, "unused": 0, "head": 1}


@pytest.mark.parametrize("method", METHODS)
def test_operators_are_chosen_by_name_and_type(method: str, tmp_path: Path) -> None:
    model = prepare(Net(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    seen: list[tuple[type, int]] = []

    def look(module: nn.Module, given: Any, result: Any) -> None:
        seen.append((type(module), len(given)))

    check = check_qconfig(model, X, ("two.",), (Linear,), look, tmp_path)
    assert [row.name for row in check.out_qconfigs] == ["two.add", "head"]
    assert [row.name for row in check.weight_qconfigs] == ["two.add", "head"]
    assert [kind.__name__ for kind, _ in seen] == ["ConvAddReLU2d", "Linear"]
    assert "one.add" not in (tmp_path / "qconfig_info.txt").read_text()


def test_functions_of_the_user_see_rounded_values(tmp_path: Path) -> None:
    model = calibrate(prepare(Net(), (X,), qconfig_dict={"": qconfig()}, out_dir=None), (X,))
    errors = []

    def look(module: nn.Module, given: Any, result: Any) -> None:
        errors.append((result.dequantize() - result.int_repr() * result.q_scale()).abs().max())

    check_qconfig(model, X, ("quant", "one", "two"), custom_check_func=look, out_dir=tmp_path)
    assert len(errors) == 3 and max(errors) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_float_classes_mean_what_has_become_of_them(method: str, tmp_path: Path) -> None:
    model = prepare(Net(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    check = check_qconfig(model, X, types=(nn.Conv2d,), out_dir=tmp_path)
    assert [row.name for row in check.out_qconfigs] == ["one.add", "two.add"]
    with pytest.warns(QuantizationWarning, match="check_qconfig: `Net` has no module of 'there', GELU, so nothing"):
        check = check_qconfig(model, X, ("there",), (nn.GELU,), out_dir=tmp_path)
    assert check.out_qconfigs == ()


def test_weights_that_stay_in_float_are_listed(tmp_path: Path) -> None:
    model = prepare(
        Net(), (X,), qconfig_dict={"": qconfig()}, hybrid=True, hybrid_dict={"module_name": ["head"]}, out_dir=None
    )
    check = check_qconfig(model, X, out_dir=tmp_path)
    assert [(row.name, row.dtype, row.ch_axis) for row in check.weight_qconfigs] == [
        ("one.add", "qint8", 0), ("two.add", "qint8", 0), ("head", "torch.float32", "qconfig = None"),
    ]  # fmt: skip


def test_bad_input_is_said(tmp_path: Path) -> None:
    qat = prepare(Net(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)
    with pytest.raises(HorizonError, match="takes a calibration or QAT model"):
        check_qconfig(Net(), X)
    with pytest.raises(HorizonError, match="takes a float model, and `Net` is prepared"):
        check_unfused_operations(qat, X)
    with pytest.raises(TypeError, match="a tuple of names"):
        check_qconfig(qat, X, "two", out_dir=tmp_path)
    with pytest.raises(ZeroDivisionError):
        check_qconfig(qat, X, custom_check_func=lambda *_: 1 / 0, out_dir=tmp_path)
    for tool in (check_unfused_operations, get_module_called_count):
        with pytest.raises(CheckError, match="failed at `one.conv`"):
            tool(Net(), torch.ones(1, 5, 2, 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckError, match="could not write"):
        check_qconfig(qat, X, out_dir=tmp_path / "file" / "folder")
    assert not list(tmp_path.glob("qconfig*"))
