"""`check_qat_model`: the tables of the guides, each message, and a model that stays as it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.calls import record_calls
from horizon_plugin_pytorch.analysis.check import inspect_model
from horizon_plugin_pytorch.analysis.report import render
from horizon_plugin_pytorch.analysis.rows import ModelCheck, check_recording
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import CheckError, HorizonError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.fx.jit_scheme import Tracer
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    FixedScaleObserver,
    QConfig,
    QuantStub,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_32bit_out_fake_quant_qconfig,
    fuse_modules,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast
from horizon_plugin_pytorch.quantization.prepare import prepare as prepare_by_running
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import ModuleNameQconfigSetter, default_qat_qconfig_setter
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from tests.models import make
from tests.workflow.test_networks import NETWORKS, _float, _inputs

QAT = default_qat_8bit_fake_quant_qconfig
HIGH = default_qat_8bit_weight_32bit_out_fake_quant_qconfig
IMAGE = torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4)


def _eager(model: nn.Module, inputs: Any, qconfig: Any = QAT) -> nn.Module:
    model.qconfig = qconfig
    return prepare_qat(model)


def _fx(model: nn.Module, inputs: Any, qconfig: Any = QAT, **names: Any) -> nn.Module:
    return prepare_qat_fx(model, {"": qconfig, "module_name": names})


def _jit(model: nn.Module, inputs: Any, qconfig: Any = QAT, **names: Any) -> nn.Module:
    return prepare_by_running(model, inputs, qconfig_dict={"": qconfig, "module_name": names}, out_dir=None)


GRAPH_METHODS = pytest.mark.parametrize("prepare", [_fx, _jit], ids=["fx", "jit"])
METHODS = pytest.mark.parametrize("prepare", [_eager, _fx, _jit], ids=["eager", "fx", "jit"])


def _check(model: nn.Module, *inputs: Tensor) -> ModelCheck:
    return check_recording(record_calls(model, inputs))


class Stubbed(nn.Module):
    """Modules between two stubs; `run` is the forward in between."""

    def __init__(self, run: Callable[[Any, Any], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.run(self, self.quant(x)))


class ConvReLU(nn.Module):
    """The model of the tuning guide's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.relu(self.conv(self.quant(x))))


# The first table and the two of qconfigs are those of tuning-guide.md, letter by letter.
CONV_RELU = """\
Fusable modules are listed below:
name    type
------  -----------------------------------------------------
conv    <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>
relu    <class 'horizon_plugin_pytorch.nn.qat.relu.ReLU'>

All modules in the model run exactly once.

input dtype statistics:
+-----------------------------------------------------------+-----------------+---------+----------+
| module type                                               |   torch.float32 |   qint8 |   qint16 |
|-----------------------------------------------------------+-----------------+---------+----------|
| <class 'horizon_plugin_pytorch.nn.qat.stubs.QuantStub'>   |               1 |       0 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>     |               0 |       1 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.relu.ReLU'>         |               0 |       1 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.stubs.DeQuantStub'> |               0 |       1 |        0 |
| total                                                     |               1 |       3 |        0 |
+-----------------------------------------------------------+-----------------+---------+----------+

output dtype statistics:
+-----------------------------------------------------------+-----------------+---------+----------+
| module type                                               |   torch.float32 |   qint8 |   qint16 |
|-----------------------------------------------------------+-----------------+---------+----------|
| <class 'horizon_plugin_pytorch.nn.qat.stubs.QuantStub'>   |               0 |       1 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>     |               0 |       1 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.relu.ReLU'>         |               0 |       1 |        0 |
| <class 'horizon_plugin_pytorch.nn.qat.stubs.DeQuantStub'> |               1 |       0 |        0 |
| total                                                     |               1 |       3 |        0 |
+-----------------------------------------------------------+-----------------+---------+----------+

Each layer out qconfig:
+---------------+-----------------------------------------------------------+---------------+---------------+----------------+-----------------------------+
| Module Name   | Module Type                                               | Input dtype   | out dtype     | ch_axis        | observer                    |
|---------------+-----------------------------------------------------------+---------------+---------------+----------------+-----------------------------|
| quant         | <class 'horizon_plugin_pytorch.nn.qat.stubs.QuantStub'>   | torch.float32 | qint8         | -1             | MovingAverageMinMaxObserver |
| conv          | <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>     | qint8         | qint8         | -1             | MovingAverageMinMaxObserver |
| relu          | <class 'horizon_plugin_pytorch.nn.qat.relu.ReLU'>         | qint8         | qint8         | qconfig = None |                             |
| dequant       | <class 'horizon_plugin_pytorch.nn.qat.stubs.DeQuantStub'> | qint8         | torch.float32 | qconfig = None |                             |
+---------------+-----------------------------------------------------------+---------------+---------------+----------------+-----------------------------+

Weight qconfig:
+---------------+-------------------------------------------------------+----------------+-----------+---------------------------------------+
| Module Name   | Module Type                                           | weight dtype   |   ch_axis | observer                              |
|---------------+-------------------------------------------------------+----------------+-----------+---------------------------------------|
| conv          | <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'> | qint8          |         0 | MovingAveragePerChannelMinMaxObserver |
+---------------+-------------------------------------------------------+----------------+-----------+---------------------------------------+

Please check if these OPs qconfigs are expected..
+---------------+---------------+-------+
| Module Name   | Module Type   | Msg   |
|---------------+---------------+-------|
+---------------+---------------+-------+
"""  # noqa: E501 - as the guide prints it


def test_the_file_is_the_tuning_guides(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    check = check_qat_model(_eager(ConvReLU(), IMAGE), IMAGE, out_dir=tmp_path / "new")
    text = (tmp_path / "new" / "model_check_result.txt").read_text()
    assert text == render(check)
    # Our own column of reasons comes last in its table; without it, the file is the guide's to the letter.
    assert _without_reasons(text) == CONV_RELU
    assert capsys.readouterr().out == ""
    check_qat_model(_eager(ConvReLU(), IMAGE), IMAGE, save_results=False, out_dir=tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def _without_reasons(text: str) -> str:
    lines = text.split("\n")
    header = next(i for i, line in enumerate(lines) if "| reason " in line)
    width = lines[header].index("| reason")
    begin, end = header - 1, next(i for i in range(header, len(lines)) if not lines[i])
    table = [line[:width] + line[0] for line in lines[begin:end]]  # a line ends as it begins
    return "\n".join([*lines[:begin], *table, *lines[end:]])


@GRAPH_METHODS
def test_what_prepare_fused_is_not_fusable(prepare: Any) -> None:
    text = render(_check(prepare(ConvReLU(), (IMAGE,)), IMAGE))
    assert text.startswith("All fusable modules are fused in model!\n\nAll modules in the model run exactly once.\n\n")


def test_call_counts_are_the_tuning_guides() -> None:
    model = Stubbed(lambda self, x: self.conv(self.conv(x)), conv=nn.Conv2d(3, 3, 1))
    expected = """
        Each module called times:
        name       called times
        -------  --------------
        conv                  2
        quant                 1
        dequant               1
        """
    assert textwrap.dedent(expected).strip() in render(_check(_fx(model, IMAGE), IMAGE))


class Conv2dModule(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(channels, channels, 1)
        self.add = FloatFunctional()
        self.bn_mod = nn.BatchNorm2d(channels)
        self.relu_mod = nn.ReLU()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.relu_mod(self.add.add(self.bn_mod(self.conv2d(x)), y))

    def fuse_model(self) -> None:
        fuse_modules(self, ["conv2d", "bn_mod", "add", "relu_mod"], inplace=True)


class TestFuseNet(nn.Module):
    """The model that the development guide prints tables of."""

    __test__ = False

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.quantx, self.quanty = QuantStub(), QuantStub()
        self.convmod1 = Conv2dModule(channels)
        self.convmod2 = Conv2dModule(channels)
        self.convmod3 = Conv2dModule(channels)
        self.shared_conv = nn.Conv2d(channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.sub = FloatFunctional()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.quantx(x), self.quanty(y)
        x = self.convmod1(x, y)
        x = self.convmod2(y, x)
        x = self.convmod3(x, y)
        x = self.bn1(self.shared_conv(x))
        y = self.bn2(self.shared_conv(y))
        return self.relu(self.sub.sub(x, y))


def _fuse_net() -> nn.Module:
    net = TestFuseNet(3).eval()
    net.convmod1.fuse_model()
    net.convmod3.fuse_model()
    net.qconfig = get_default_qconfig(weight_qkwargs={"dtype": qint16})
    net.sub.qconfig = get_default_qconfig(
        activation_qkwargs={"observer": FixedScaleObserver, "scale": 1 / 2**15, "dtype": qint16}
    )
    set_march(March.NASH_M)
    return prepare_qat(net)


def test_patterns_are_the_development_guides() -> None:
    check = _check(_fuse_net(), IMAGE, IMAGE)
    assert [[member.name for member in pattern] for pattern in check.unfused] == [
        ["convmod2.conv2d", "convmod2.bn_mod", "convmod2.add", "convmod2.relu_mod"],
        ["shared_conv(shared)", "bn1"],
        ["shared_conv(shared)", "bn2"],
    ]


# development-guide.md, without the column `observer` that later versions have
OUT_QCONFIGS = """\
| quantx            | QuantStub       | torch.float32      | qint8  | -1             |
| quanty            | QuantStub       | torch.float32      | qint8  | -1             |
| convmod1.add      | ConvAddReLU2d   | ['qint8', 'qint8'] | qint8  | -1             |
| convmod2.conv2d   | Conv2d          | qint8              | qint8  | -1             |
| convmod2.bn_mod   | BatchNorm2d     | qint8              | qint8  | -1             |
| convmod2.add[add] | FloatFunctional | ['qint8', 'qint8'] | qint8  | -1             |
| convmod2.relu_mod | ReLU            | qint8              | qint8  | qconfig = None |
| convmod3.add      | ConvAddReLU2d   | ['qint8', 'qint8'] | qint8  | -1             |
| shared_conv       | Conv2d          | qint8              | qint8  | -1             |
| bn1               | BatchNorm2d     | qint8              | qint8  | -1             |
| shared_conv(1)    | Conv2d          | qint8              | qint8  | -1             |
| bn2               | BatchNorm2d     | qint8              | qint8  | -1             |
| sub[sub]          | FloatFunctional | ['qint8', 'qint8'] | qint16 | -1             |
| relu              | ReLU            | qint16             | qint16 | qconfig = None |
"""


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    cells[1] = cells[1].removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
    return cells


def _section(text: str, title: str) -> list[list[str]]:
    """The rows of a table."""
    lines = text.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()
    return [_cells(line) for line in lines if line.startswith("|") and "---" not in line][1:]


def test_formats_and_messages_are_the_development_guides() -> None:
    text = render(_check(_fuse_net(), IMAGE, IMAGE))
    assert [r[:5] for r in _section(text, "Each layer out qconfig:")] == [_cells(x) for x in OUT_QCONFIGS.splitlines()]
    layers = [("convmod1.add", "ConvAddReLU2d"), ("convmod2.conv2d", "Conv2d"), ("convmod3.add", "ConvAddReLU2d"),
              ("shared_conv", "Conv2d"), ("shared_conv(1)", "Conv2d")]  # fmt: skip
    assert [r[:4] for r in _section(text, "Weight qconfig:")] == [[n, t, "qint16", "0"] for n, t in layers]
    assert _section(text, "Please check if these OPs qconfigs are expected..") == [
        *([name, type, "qint16 weight!!!"] for name, type in layers),
        ["sub[sub]", "FloatFunctional", "input dtype ['qint8', 'qint8'] is not same with out dtype qint16"],
        ["sub[sub]", "FloatFunctional", "Fixed scale 3.0517578125e-05"],
    ]


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "unet", "vit", "detector", "surrounded"])
def test_a_models_own_forward_gives_the_same_text_as_its_graph(name: str) -> None:
    model, inputs = make(name)
    assert render(_check(_jit(model, inputs), *inputs)) == render(_check(_fx(model, inputs), *inputs))


# "matching" has a line that runs twice: one module by running, and one for each time by tracing.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "matching"])
def test_networks_give_the_same_text_and_the_same_keys(name: str) -> None:
    set_march(March.NASH_M)
    inputs = _inputs(name)
    qats = [
        prepare_by_running(_float(name), inputs, default_qat_qconfig_setter, method, out_dir=None)
        for method in ("jit-strip", "jit", "symbolic")
    ]
    assert len({render(_check(qat, *inputs)) for qat in qats}) == 1
    assert len({tuple(sorted(qat.state_dict())) for qat in qats}) == 1


# -- fusion


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor


def _conv_bn_shared(self: Any, x: Any) -> Any:
    return self.add.add(self.bn(self.conv(x)), self.conv(x))


@pytest.mark.parametrize(
    ("run", "modules", "expected"),
    [
        (lambda self, x: self.relu(self.bn(self.conv(x))),
         {"conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm2d(3), "relu": nn.ReLU6()}, [["conv", "bn", "relu"]]),
        (lambda self, x: self.relu(self.add.add(x, self.conv(x))),
         {"conv": nn.Conv2d(3, 3, 1), "add": FloatFunctional(), "relu": nn.ReLU()}, [["conv", "add", "relu"]]),
        (_conv_bn_shared, {"conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm2d(3), "add": FloatFunctional()},
         [["conv(shared)", "bn", "add"]]),
        # The layer's result is wanted elsewhere too: by a module, by a function, as an output.
        (lambda self, x: self.add.add(self.relu(y := self.conv(x)), y),
         {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU(), "add": FloatFunctional()}, []),
        (lambda self, x: (self.relu(y := self.conv(x)), y.flatten()),
         {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU()}, []),
        (lambda self, x: (self.relu(y := self.conv(x)), y),
         {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU()}, []),
        (lambda self, x: Pair(self.relu(y := self.conv(x)), y),
         {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU()}, []),
        # What lies between keeps them apart.
        (lambda self, x: self.relu(self.conv(x).flatten(1)), {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU()}, []),
        (lambda self, x: self.mul.mul(self.conv(x), x), {"conv": nn.Conv2d(3, 3, 1), "mul": FloatFunctional()}, []),
        (lambda self, x: self.add.add(y := self.conv(x), y),
         {"conv": nn.Conv2d(3, 3, 1), "add": FloatFunctional()}, []),
        (lambda self, x: self.bn(self.conv(x).flatten(2)),
         {"conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm1d(3)}, []),
        (lambda self, x: self.relu(self.relu(self.conv(x))),
         {"conv": nn.Conv2d(3, 3, 1), "relu": nn.ReLU()}, [["conv", "relu(shared)"]]),
    ],
)  # fmt: skip
def test_patterns_follow_the_rules_of_fusion(run: Any, modules: dict[str, nn.Module], expected: list) -> None:
    check = _check(_eager(Stubbed(run, **copy.deepcopy(modules)).eval(), IMAGE), IMAGE)
    assert [[member.name for member in pattern] for pattern in check.unfused] == expected


def test_a_half_fused_layer_can_take_more() -> None:
    model = Stubbed(
        lambda self, x: self.relu(self.add.add(self.conv(x), x)),
        conv=nn.Conv2d(3, 3, 1), add=FloatFunctional(), relu=nn.ReLU(),
    )  # fmt: skip
    fuse_modules(model, ["conv", "add"], inplace=True)
    check = _check(_eager(model, IMAGE), IMAGE)
    assert [[str(m.type.__name__) for m in pattern] for pattern in check.unfused] == [["ConvAdd2d", "ReLU"]]


# -- messages


def _texts(rows: Any) -> list[tuple[str, str]]:
    return [(row.name, row.text) for row in rows]


@GRAPH_METHODS
def test_high_precision_is_told(prepare: Any) -> None:
    model = Stubbed(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 3, 1))
    check = _check(prepare(model, (IMAGE,), conv=HIGH), IMAGE)
    assert _texts(check.messages) == [("conv", "output activation is not quantized")]
    row = next(row for row in check.out_qconfigs if row.name == "conv")
    assert (row.input_dtypes, row.out_dtypes, row.ch_axis) == (("qint8",), ("torch.float32",), "activation = None")
    assert check.mistakes == ()


@METHODS
@pytest.mark.parametrize(("run", "once"), [
    (lambda self, x: self.conv(x), ": give"),
    (lambda self, x: self.conv(x).flatten(1), " once `flatten` is behind the DeQuantStub: give"),
    (lambda self, x: self.conv(x)[:, :1].permute(0, 2, 3, 1), " once `getitem`, `permute` is behind"),
])  # fmt: skip
def test_an_output_that_could_be_of_high_precision(prepare: Any, run: Any, once: str) -> None:
    (row,) = _check(prepare(Stubbed(run, conv=nn.Conv2d(3, 3, 1)), (IMAGE,)), IMAGE).mistakes
    expected = f"output of the model in qint8, and high precision is possible{once}"
    assert row.name == "conv" and row.text.startswith(expected)


@GRAPH_METHODS
def test_an_output_that_cannot_be_of_high_precision_is_left_alone(prepare: Any) -> None:
    inside = Stubbed(lambda self, x: (y := self.conv(x), y.sigmoid()), conv=nn.Conv2d(3, 3, 1))
    assert _check(prepare(inside, (IMAGE,)), IMAGE).mistakes == ()
    added = Stubbed(lambda self, x: x + x.sigmoid())
    assert _check(prepare(added, (IMAGE,)), IMAGE).mistakes == ()


def test_fixed_scales_are_told() -> None:
    model = Stubbed(lambda self, x: self.pool(x), pool=nn.AvgPool2d(2))
    model.quant = QuantStub(scale=1 / 128)
    assert _texts(_check(_fx(model, IMAGE), IMAGE).messages) == [("quant", "Fixed scale 0.0078125")]


class Around(nn.Module):
    """Work before the stub and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.inside = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inside(self.quant(self.before(x)))).softmax(-1)


def test_a_qconfig_before_the_stub_is_a_mistake() -> None:
    check = _check(_eager(Around(), None), torch.randn(2, 4))
    (row,) = check.mistakes
    assert row.name == "before" and row.text.startswith("has a qconfig and sees float tensors only")
    assert [(r.name, r.input, r.weight) for r in check.compute_types] == [("before", "float32", "int8")]
    assert "\nbefore float32*int8\n" in render(check)


@GRAPH_METHODS
def test_what_prepare_leaves_float_is_none(prepare: Any) -> None:
    check = _check(prepare(Around(), (torch.randn(2, 4),)), torch.randn(2, 4))
    assert check.mistakes == () and check.compute_types == ()


def test_a_float_operand_of_a_quantized_operator() -> None:
    model = Stubbed(lambda self, x: self.add.add(x, torch.ones(4)), add=FloatFunctional())
    failure = str(_check(_eager(model, None), torch.randn(2, 4)).failure)
    assert "after `quant`" in failure and "`FloatFunctional` at `add` (test_check_qat_model.py:" in failure
    assert "got a float tensor of shape (4,) instead of integers with a scale. Put a QuantStub" in failure


def test_an_operator_after_a_high_precision_output() -> None:
    model = Stubbed(lambda self, x: self.act(self.fc(x)), fc=nn.Linear(4, 4), act=nn.Sigmoid())
    model.fc.qconfig = HIGH
    (row,) = _check(_eager(model, None), torch.randn(2, 4)).mistakes
    assert row.name == "act" and row.text.startswith("float input: fc has a high-precision output")


@METHODS
def test_a_shared_layer_that_is_an_output_in_one_of_its_calls(prepare: Any) -> None:
    """Whichever qconfig it has, the advice is not to give it the other one."""

    def check(qconfig: Any) -> list[tuple[str, str]]:
        run = lambda self, x: self.head(self.act(self.head(x)))  # noqa: E731
        model = Stubbed(run, head=nn.Linear(4, 4), act=nn.Sigmoid())
        model.head.qconfig = qconfig
        return _texts(_check(prepare(model, (torch.randn(2, 4),)), torch.randn(2, 4)).mistakes)

    ((name, text),) = check(QAT)
    assert name == "head(1)" and "as other calls of this module are not outputs" in text
    ((name, text),) = check(HIGH)
    assert name == "act" and "right for its calls that are outputs" in text
    assert all("qconfig" not in said and "layer of its own" in said for _, said in (*check(QAT), *check(HIGH)))


@METHODS
def test_a_float_functional_that_is_called_twice(prepare: Any) -> None:
    model = Stubbed(lambda self, x: self.add.add(self.add.add(x, x), x), add=FloatFunctional())
    check = _check(prepare(model, (torch.randn(2, 4),)), torch.randn(2, 4))
    assert _texts(check.mistakes) == [
        (
            "add[add]",
            "a FloatFunctional has one scale and is called 2 times; define one for each, or use own_scales",
        )
    ]
    assert [row.name for row in check.out_qconfigs] == ["quant", "add[add]", "add[add](1)", "dequant"]


class Repeated(nn.Module):
    """A line that runs twice, with or without a scale for each time."""

    def __init__(self, has_blocks: bool) -> None:
        super().__init__()
        self.quant, self.dequant, self.has_blocks = QuantStub(), DeQuantStub(), has_blocks

    def forward(self, batch: dict[str, Any], *, factor: float = 1.0) -> dict[str, Tensor]:
        x = self.quant(batch["x"])
        for index in range(2):
            with Tracer.dynamic_block(self, f"step{index}") if self.has_blocks else contextlib.nullcontext():
                x = x + x * factor
        return {"x": self.dequant(x)}


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_line_that_runs_twice(has_blocks: bool) -> None:
    args, kwargs = ({"x": torch.randn(2, 4)},), {"factor": 0.5}
    qat = prepare_by_running(Repeated(has_blocks), args, qconfig_dict={"": QAT}, example_kw_inputs=kwargs, out_dir=None)
    check = inspect_model(qat, args, kwargs=kwargs)
    names = [row.name for row in check.mistakes]
    assert names == ([] if has_blocks else ["_generated_mul_0[mul]", "_generated_add_0[add]"])
    assert all("this line runs 2 times with one scale; own_scales gives" in row.text for row in check.mistakes)
    assert sum(row.count for row in check.called_times) == 6


@METHODS
def test_a_module_that_never_runs(prepare: Any) -> None:
    model = Stubbed(lambda self, x: self.pool(x), unused=nn.Conv2d(3, 3, 1), pool=nn.AvgPool2d(2))
    check = _check(prepare(model, (IMAGE,)), IMAGE)
    assert [row.name for row in check.mistakes] == ["unused"]
    assert "is never called, neither in eval nor in training mode" in check.mistakes[0].text
    assert (check.called_times[0].name, check.called_times[0].count) == ("unused", 0)


class NeedsTargets(Stubbed):
    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.pool(self.quant(x))
        if self.training:
            assert target is not None, "no targets"
            x = self.aux(x)
        return self.dequant(x)


@pytest.mark.parametrize("prepare", [_eager, _jit], ids=["eager", "jit"])
def test_a_training_mode_that_needs_more_inputs(prepare: Any) -> None:
    model = NeedsTargets(print, pool=nn.AvgPool2d(2), aux=nn.Conv2d(3, 3, 1))
    (row,) = _check(prepare(model, (IMAGE,)), IMAGE).mistakes
    expected = (
        r"is never called in eval mode \(in training mode the model failed in the top module .*: no targets\): remove"
    )
    assert row.name == "aux" and re.match(expected, row.text)


@pytest.mark.parametrize(
    ("image", "is_told"),
    [
        (torch.rand(1, 3, 16, 20) * 255, True),
        (torch.rand(1, 16, 16, 1), True),
        (torch.rand(1, 3, 16, 16) - 0.5, False),
        (torch.rand(1, 8, 16, 16), False),  # features
        (torch.rand(1, 3, 4, 4), False),
        (torch.rand(2, 3), False),
        (torch.zeros(1, 3, 16, 16), False),
    ],
)
def test_an_image_that_is_not_centred(image: Tensor, is_told: bool) -> None:
    check = _check(_fx(Stubbed(lambda self, x: x.sigmoid()), None), image)
    assert [row.name for row in check.mistakes] == ["quant"] * is_told


def test_an_output_without_a_dequant_stub() -> None:
    model = Stubbed(lambda self, x: self.pool(x), pool=nn.AvgPool2d(2))
    model.dequant = nn.Identity()
    (row,) = _check(_eager(model, IMAGE), IMAGE).mistakes
    assert row.name == "pool" and row.text.startswith("the model hands out a quantized tensor: put a DeQuantStub")
    assert _check(_eager(Stubbed(model.run, pool=nn.AvgPool2d(2)), IMAGE), IMAGE).mistakes == ()


@pytest.mark.parametrize(("factor", "is_told"), [(1.0, False), (100.0, True)])
def test_a_fixed_scale_that_clips(factor: float, is_told: bool) -> None:
    model = Stubbed(lambda self, x: self.pool(x), pool=nn.AvgPool2d(2))
    model.quant = QuantStub(scale=1 / 128)
    rows = _check(_fx(model, IMAGE), IMAGE * factor).mistakes
    expected = (
        "values reach 100 and the fixed scale 0.007812 ends at 1: what lies beyond is clipped; "
        "use a scale of at least 0.7812"
    )
    assert [row.name for row in rows] == ["quant"] * is_told and all(row.text.startswith(expected) for row in rows)


@GRAPH_METHODS
@pytest.mark.parametrize(
    ("factor", "format", "is_told"), [(1e-4, qint8, True), (1e-4, qint16, False), (0.1, qint8, False)]
)
def test_an_operand_of_which_nothing_is_left(prepare: Any, factor: float, format: Any, is_told: bool) -> None:
    model = Stubbed(lambda self, x: torch.cat([x, self.small(x) * factor], 1), small=nn.AvgPool2d(1))
    check = _check(prepare(model, (IMAGE,), _formats(format, qint8)), IMAGE)
    rows = [row for row in check.mistakes if row.name == "_generated_cat_0[cat]"]
    assert len(rows) == is_told
    if is_told:
        start, end = (
            "`_generated_mul_0[mul]` reaches 0.0001 and the result 1: one step in qint8 is 0.00784",
            "use qint16",
        )
        assert rows[0].text.startswith(start) and rows[0].text.endswith(end)


def _formats(activation: Any, weight: Any) -> Any:
    return get_default_qconfig(activation_qkwargs={"dtype": activation}, weight_qkwargs={"dtype": weight})


@pytest.mark.parametrize(("weight", "is_told"), [(qint16, True), (qint8, False)])
def test_int16_times_int16(weight: Any, is_told: bool) -> None:
    set_march(March.NASH_M)
    model = Stubbed(lambda self, x: self.pool(self.conv(x)), conv=nn.Conv2d(3, 3, 1), pool=nn.AvgPool2d(2))
    rows = [row for row in _check(_fx(model, IMAGE, _formats(qint16, weight)), IMAGE).mistakes if row.name == "conv"]
    assert [row.text.partition(",")[0] for row in rows] == ["input and weight are both qint16"] * is_told


@pytest.mark.filterwarnings("ignore:int16 on bernoulli2")
@pytest.mark.parametrize(("march", "is_told"), [(March.BERNOULLI2, True), (March.NASH_M, False)])
def test_a_format_that_the_chip_does_not_have(march: March, is_told: bool) -> None:
    set_march(march)
    model = Stubbed(lambda self, x: self.pool(self.conv(x)), conv=nn.Conv2d(3, 3, 1), pool=nn.AvgPool2d(2))
    rows = _check(_fx(model, IMAGE, _formats(qint16, qint8)), IMAGE).mistakes
    told = [row.text for row in rows if row.name == "conv"]
    expected = (
        "qint16 input, and the published tables give conv2d qint8 on bernoulli2: set such a format for the module"
    )
    assert [text[: len(expected)] for text in told] == [expected] * is_told


def test_a_fixed_input_scale() -> None:
    set_march(March.NASH_M)
    model = Stubbed(lambda self, x: self.pool(self.conv(x)), conv=nn.Conv2d(3, 3, 1), pool=nn.AvgPool2d(2))
    rule = ModuleNameTemplate({"": qint8, "conv": {"dtype": {"input": qint8}, "threshold": {"input": 2.0}}})
    qat = prepare_qat_fx(model, qconfig_setter=QconfigSetter(get_qconfig(), [rule]))
    assert _texts(_check(qat, IMAGE).messages) == [
        ("quant", "Fixed scale 0.015625"), ("conv", "Fixed input scale 0.015625"),
    ]  # fmt: skip


def test_each_kind_of_message_says_what_to_do(capsys: pytest.CaptureFixture) -> None:
    model = Stubbed(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 3, 1))
    model.quant = QuantStub(scale=1 / 128)
    check_qat_model(_fx(model, IMAGE, conv=HIGH), IMAGE, save_results=False)
    printed = capsys.readouterr().out
    assert "\n* Fixed scale: check that the scale covers the known range" in printed
    assert "\n* output activation is not quantized: right for an output of the model" in printed
    check = _check(_fuse_net(), IMAGE, IMAGE)
    assert check.messages and all(row.remedy for row in check.messages)


@pytest.mark.parametrize("method", ["jit-strip", "jit", "symbolic"])
def test_reasons_are_the_last_column(method: str, tmp_path: Path) -> None:
    set_march(March.NASH_M)
    model = Stubbed(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 3, 1))
    qat = prepare_by_running(model, (IMAGE,), default_qat_qconfig_setter, method, out_dir=tmp_path)
    text = (tmp_path / "model_check_result.txt").read_text()
    rows = {row[0]: row[-1] for row in _section(text, "Each layer out qconfig:")}
    assert rows == {path: reason_of(qat, path) for path in ("quant", "conv", "dequant")} and all(rows.values())
    assert text.partition("| observer ")[2].splitlines()[0].split("|")[1].strip() == "reason"


class TwoInTwoOut(nn.Module):
    """A dictionary in, with two stubs; nested results out, through several stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_a, self.quant_b = QuantStub(), QuantStub()
        self.conv, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
        self.dequants = nn.ModuleList([DeQuantStub(), DeQuantStub()])

    def forward(self, batch: dict[str, Tensor]) -> Any:
        x = self.conv(self.quant_a(batch["a"])) + self.quant_b(batch["b"])
        return {"map": self.dequants[0](x), "heads": [(self.dequants[1](self.head(x)), None)]}


def test_graph_methods_agree_on_structures(tmp_path: Path) -> None:
    set_march(March.NASH_M)
    texts = set()
    for method in ("jit-strip", "jit", "symbolic"):
        batch = {"a": IMAGE, "b": IMAGE}
        prepare_by_running(TwoInTwoOut(), (batch,), default_qat_qconfig_setter, method, out_dir=tmp_path / method)
        texts.add((tmp_path / method / "model_check_result.txt").read_text())
    assert len(texts) == 1 and "dequants.1" in texts.pop()


@METHODS
def test_where_own_scales_would_help(prepare: Any) -> None:
    model = Stubbed(lambda self, x: self.fc(self.fc(x)), fc=nn.Linear(4, 4, bias=False))
    nn.init.eye_(model.fc.weight)
    x = torch.eye(4)
    (row,) = _check(prepare(model, (x,)), x).shared_ranges
    assert (row.ranges, row.ratio, row.would_help) == (((0.0, 1.0), (0.0, 1.0)), 1.0, False)
    with torch.no_grad():
        model.fc.weight.mul_(8)
    check = _check(prepare(model, (x,)), x)
    (row,) = check.shared_ranges
    assert (row.ranges, row.ratio, row.lost_bits, row.would_help) == (((0.0, 8.0), (0.0, 64.0)), 8.0, 3.0, True)
    assert _section(render(check), "Ranges of modules called several times:") == [
        ["fc", "Linear", "[0, 8], [0, 64]", "8", row.message]
    ]
    assert row.message == "called 2 times, ranges 8 / 64: own_scales=['fc'] would give the smallest 3.0 more bits"


def test_float16_is_seen_though_it_is_emulated() -> None:
    half = QConfig(activation=FakeCast.with_args(dtype=torch.float16), weight=FakeCast.with_args(dtype=torch.float16))
    model = Stubbed(
        lambda self, x: self.conv(self.add.add(x.flatten(3), x)), conv=nn.Conv2d(3, 3, 1), add=FloatFunctional()
    )
    set_march(March.NASH_P)
    check = _check(_fx(model, IMAGE, conv=half, add=half), IMAGE)
    rows = {row.name: (row.input_dtypes, row.out_dtypes, row.observer) for row in check.out_qconfigs}
    assert rows["add[add]"] == (("qint8", "qint8"), ("torch.float16",), "FakeCast")
    assert rows["conv"] == (("torch.float16",), ("torch.float16",), "FakeCast")
    assert "|   torch.float16 |" in render(check)


# -- the model stays as it was


@METHODS
def test_the_model_is_not_changed(prepare: Any) -> None:
    model = Stubbed(
        lambda self, x: self.drop(self.bn(self.conv(x))), conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3),
        drop=nn.Dropout(),
    )  # fmt: skip
    qat = prepare(model, (IMAGE,)).train()
    qat(IMAGE)
    set_fake_quantize(qat.quant, FakeQuantState.CALIBRATION)
    qat.drop.eval()
    modes = [m.training for m in qat.modules()]
    state = copy.deepcopy(qat.state_dict())
    random = torch.get_rng_state()
    _check(qat, IMAGE * 100)
    assert [m.training for m in qat.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, qat.state_dict()[key]) for key, value in state.items())
    with torch.no_grad():
        again = copy.deepcopy(qat)
        _check(qat, IMAGE)
        assert torch.equal(qat(IMAGE), again(IMAGE))


def test_an_input_that_comes_back_carries_nothing() -> None:
    x = torch.randn(2, 4)
    qat = _eager(Stubbed(lambda self, y: (y, self.dequant(x)), unused=nn.Linear(1, 1)), None)
    record_calls(qat, x)
    assert vars(x) == {}


def test_an_error_in_the_model_leaves_nothing_behind(tmp_path: Path) -> None:
    qat = _fx(ConvReLU(), IMAGE)
    before = copy.deepcopy(qat.state_dict())
    with pytest.raises(CheckError, match=r"The check did not finish: the model failed at `conv`, after `quant`"):
        inspect_model(qat, torch.randn(1, 5, 4, 4), tmp_path)
    text = (tmp_path / "model_check_result.txt").read_text()
    assert text.startswith("The check did not finish: the model failed at `conv`") and "\n| quant " in text
    assert "never called" not in text
    assert qat.training and all(torch.equal(value, qat.state_dict()[key]) for key, value in before.items())
    assert _check(qat, IMAGE) == _check(qat, IMAGE)


class FailsInTheMiddle(Stubbed):
    """Its own code refuses wide images in eval mode, once it is prepared."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        if isinstance(x, QTensor):
            raise ValueError("no such plan")
        return self.dequant(x)


@pytest.mark.parametrize("method", ["jit-strip", "jit"])
def test_prepare_survives_the_check(method: str, tmp_path: Path) -> None:
    model = FailsInTheMiddle(print, conv=nn.Conv2d(3, 3, 1))
    with pytest.warns(QuantizationWarning, match=r"in the top module \(test_check_qat_model.py:\d+\), after `conv`"):
        qat = prepare_by_running(model, (IMAGE,), method=method, qconfig_dict={"": QAT}, out_dir=tmp_path)
    assert type(qat.conv).__module__ == "horizon_plugin_pytorch.nn.qat.conv2d"
    assert "ValueError: no such plan" in (tmp_path / "model_check_result.txt").read_text()


def test_an_error_that_the_model_catches_is_none() -> None:
    def run(self: Any, x: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            return self.conv(x)
        return self.pool(x)

    check = _check(_eager(Stubbed(run, conv=nn.Conv2d(5, 3, 1), pool=nn.AvgPool2d(2)), IMAGE), IMAGE)
    assert [(row.name, row.count) for row in check.called_times] == [
        ("conv", 0),
        ("pool", 1),
        ("quant", 1),
        ("dequant", 1),
    ]
    assert check.failure == ""


class Stateful(Stubbed):
    """A model that remembers, counts and rolls dice in its forward."""

    def __init__(self) -> None:
        super().__init__(print, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3), aux=nn.Conv2d(3, 1, 1))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("memory", torch.zeros(3, 4, 4))
        self.history: list[int] = []
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.memory = x[0] * torch.rand(1)
        self.history.append(len(self.history))
        self.count += 1
        self.last = random.random()
        x = self.bn(self.conv(self.quant(nn.functional.dropout(x, 0.5, True))))
        return self.dequant(x) if not self.training else (self.dequant(x), self.dequant(self.aux(x)))


@pytest.mark.parametrize("prepare", [_eager, _jit], ids=["eager", "jit"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_keeps_state_keeps_it(prepare: Any, training: bool) -> None:
    qat = prepare(Stateful(), (IMAGE,))
    qat(IMAGE)
    qat.train(training)
    if training:
        qat.bn.eval()  # a frozen one
    before, modes = copy.deepcopy(qat.state_dict()), [m.training for m in qat.modules()]
    own = {name: copy.copy(getattr(qat, name, None)) for name in ("history", "count", "last")}
    dice = (torch.get_rng_state(), random.getstate())
    check = _check(qat, IMAGE * 100)
    assert [row.name for row in check.mistakes if "training mode only" in row.text] == ["aux"]
    assert all(torch.equal(value, qat.state_dict()[key]) for key, value in before.items())
    assert {name: getattr(qat, name, None) for name in own} == own
    assert [m.training for m in qat.modules()] == modes
    assert torch.equal(torch.get_rng_state(), dice[0]) and random.getstate() == dice[1]


def test_only_prepared_models_are_taken() -> None:
    with pytest.raises(HorizonError, match="`ConvReLU` has no QAT modules"):
        check_qat_model(ConvReLU(), IMAGE)
    qat = _fx(ConvReLU(), IMAGE)
    qat(IMAGE)
    with pytest.raises(HorizonError, match="check_model"):
        check_qat_model(convert_fx(qat), IMAGE)


class Unread(nn.Module):
    """A layer whose result goes nowhere, one in float16, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.unread, self.narrow, self.last = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.numbers = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        self.unread(x)
        return self.dequant(self.last(self.narrow(x)))


def test_what_nobody_reads_and_what_nobody_can_call() -> None:
    set_march(March.NASH_M)
    half = get_qconfig(weight_dtype=torch.float16, out_dtype=torch.float16)
    setter = (ModuleNameQconfigSetter({"narrow": half}), default_qat_qconfig_setter)
    check = inspect_model(prepare_by_running(Unread(), (IMAGE,), setter, out_dir=None), (IMAGE,))
    assert [(row.name, row.text.partition(":")[0]) for row in check.mistakes] == [
        ("unread", "its result is never read")
    ]
    assert [row.name for row in check.messages] == ["last"]  # the only high-precision output
    assert {row.name: row.dtype for row in check.weight_qconfigs} == {
        "unread": "qint8", "narrow": "torch.float16", "last": "qint8",
    }  # fmt: skip


def test_own_scales_of_a_line_are_those_of_the_module_around_it() -> None:
    with pytest.raises(QuantizationConfigError, match="name the module whose forward has that line, 'part'"):
        prepare_by_running(Unread(), (IMAGE,), qconfig_dict={"": QAT}, own_scales=["part._generated_add_0"])


class Written(nn.Module):
    """An operator's result is written to before the next one takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[0] = 7.0
        return self.second(y)


def test_ranges_of_inputs_are_those_of_the_call() -> None:
    calls = record_calls(Written(), (torch.tensor([1.0, 2.0]),)).calls
    assert (calls[0].outputs[0].high, calls[1].inputs[0].high) == (2.0, 7.0)
    assert calls[1].inputs[0].producer == 0


def test_the_check_does_not_run_parts_that_only_observe() -> None:
    net: Any = _jit(Stubbed(lambda self, x: self.softmax(x), softmax=nn.Softmax(-1)), IMAGE)
    met: list[nn.Module] = []
    net.softmax.exp.register_forward_hook(lambda module, args, out: met.append(module))
    calls = record_calls(net, IMAGE).calls
    assert [call.path for call in calls] == ["quant", "softmax", "dequant"] and not met
    net(IMAGE)
    assert met


def test_a_check_leaves_small_buffers_of_all_shapes_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes: list[tuple[int, ...]] = [(), (3,), (0,), (2, 2), (1,)]
            for i, shape in enumerate(shapes):
                self.register_buffer(f"seen{i}", torch.full(shape, float(i)))
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for i in (0, 2, 3):
                getattr(self, f"seen{i}").add_(1)
            return self.relu(x)

    net = Counting()
    before = {name: x.clone() for name, x in net.named_buffers()}
    record_calls(net, IMAGE)
    assert all(torch.equal(x, before[name]) and x.shape == before[name].shape for name, x in net.named_buffers())
