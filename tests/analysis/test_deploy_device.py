"""`check_deploy_device`: which operators run on the CPU, for every way to prepare, before and after conversion."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CheckError, HorizonError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, prepare, prepare_qat
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.quant_profiler import check_deploy_device
from tests.routes import calibrate, qconfig

X = torch.rand(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
METHODS = ["symbolic", "jit", "jit-strip"]


class Net(nn.Module):
    """A bit of everything: sizes, constants, parts, functions before, between and after the stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.drop, self.pool = QuantStub(), DeQuantStub(), nn.Dropout(), nn.MaxPool2d(2)
        self.conv, self.bn, self.relu, self.ff = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), FloatFunctional()
        self.left, self.last = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)
        self.bias = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(torch.exp(x))
        y = self.pool(self.drop(self.relu(self.bn(self.conv(x)))))
        y = self.left(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        low, high = y.chunk(2, 1)
        z = self.ff.cat([high, low], 1) + self.bias
        z = self.last(z.reshape(z.size(0), 4, -1, 4))
        return torch.sigmoid(self.dequant(z[:, 1:])).flatten(1)


EXPECTED = """
exp CPU function, conv BPU module, pool BPU module, permute BPU method, left_input_dequant CPU module,
left CPU module, permute_1 CPU method, chunk CPU method, getitem_activation_post_process CPU module,
getitem_1_activation_post_process CPU module, cat BPU method, _generated_add_0 BPU method, reshape BPU method,
last BPU module, getitem_2 BPU function, dequant CPU module, sigmoid CPU function, flatten CPU method
"""


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_E)


def prepared(method: str) -> nn.Module:
    return calibrate(
        prepare(
            Net().eval(), (X,), qconfig_dict={"": qconfig()}, method=method, hybrid=True,
            hybrid_dict={"module_name": ["left"]}, out_dir=None,
        ),
        (X,),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_route_gives_the_same_table(method: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = prepared(method)
    found = check_deploy_device(model, print_tabulate=False, out_dir=tmp_path)
    assert capsys.readouterr().out == ""
    shown = {f"{name} {' '.join(row)}" for name, row in found.items()}
    assert shown == {line.strip() for line in EXPECTED.replace("\n", " ").split(",")}
    text = (tmp_path / "deploy_device.txt").read_text()
    assert [line.split() for line in text.splitlines()[2:]] == [[name, *row] for name, row in found.items()]
    for same in (
        convert(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(convert(model)),
    ):
        assert check_deploy_device(same, True, tmp_path) == found
        assert capsys.readouterr().out == text


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.again, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.conv, self.left, self.last, self.ff = (*(nn.Conv2d(4, 4, 1) for _ in range(3)), FloatFunctional())
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.conv(self.quant(x)))
        y = self.again(F.selu(self.left(x)))
        return F.selu(self.dequant(self.last(self.ff.add(x, y)).transpose(2, 3)))


def test_eager_mode(tmp_path: Path) -> None:
    net = Eager().eval()
    net.qconfig, net.left.qconfig = qconfig(), None
    model = calibrate(prepare_qat(net, hybrid=True), (X,))
    for same in (model, convert(model)):
        before = {name: x.clone() for name, x in same.state_dict().items()}
        found = check_deploy_device(same, False, tmp_path, example_inputs=X)
        assert list(found.items()) == [
            ("conv", ("BPU", "module")), ("left", ("CPU", "module")), ("selu", ("CPU", "function")),
            ("add", ("BPU", "method")), ("last", ("BPU", "module")), ("transpose", ("BPU", "function")),
            ("dequant", ("CPU", "module")), ("selu_1", ("CPU", "function")),
        ]  # fmt: skip
        assert all(torch.equal(x, before[name]) for name, x in same.state_dict().items())
        with pytest.warns(QuantizationWarning, match="no graph .eager mode.*example_inputs"):
            found = check_deploy_device(same, False, tmp_path)
        assert found == {
            "conv": ("BPU", "module"), "left": ("CPU", "module"), "last": ("BPU", "module"),
            "dequant": ("CPU", "module"), "ff": ("BPU", "method"),
        }  # fmt: skip


@wrap()
def _wrapped(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * 2


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(_wrapped(self.conv(self.quant(x))))


@pytest.mark.slow
def test_functions_of_code_that_is_not_traced_are_listed(tmp_path: Path) -> None:
    model = calibrate(prepare(Wrapped(), (X,), qconfig_dict={"": qconfig()}, method="symbolic", out_dir=None), (X,))
    found = check_deploy_device(model, False, tmp_path)
    assert {row for name, row in found.items() if name not in ("dequant",)} == {("BPU", "module"), ("BPU", "method")}
    assert sum("_generated_" in name for name in found) == 2
    assert check_deploy_device(convert(model), False, tmp_path) == found


def test_mistakes_are_named(tmp_path: Path) -> None:
    model: Any = Net()
    with pytest.raises(HorizonError, match="`Net` is a float model"):
        check_deploy_device(model)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckError, match="could not write deploy_device.txt into"):
        check_deploy_device(prepared("symbolic"), False, file)
