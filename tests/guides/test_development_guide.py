"""The scripts of the development guide: as printed; calls of tools that are not here are left out.

Where the pages lost line breaks or indentation, these are back; ``cuda`` is ``cpu``, and data are made before they are
read. What follows each script here is what the guide prints or says of its result.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
import torch.ao.quantization as tq
from torch import Tensor, nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.analysis.calls import record_calls
from horizon_plugin_pytorch.analysis.rows import check_recording
from horizon_plugin_pytorch.errors import CheckError, ConversionError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, get_march, set_march
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    PrepareMethod,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import run_onnx

SCRIPTS, PRINTED = (Path(__file__).parent / folder for folder in ("scripts", "printed"))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, march: str = "March.BAYES", **names: Any) -> SimpleNamespace:
    """What a script has defined."""
    source = (SCRIPTS / f"{name}.txt").read_text().replace("March.BAYES", march)
    exec(compile(source, f"{name}.py", "exec"), names)
    return SimpleNamespace(**{key: value for key, value in names.items() if not key.startswith("__")})


def printed(name: str) -> str:
    """What the guide prints."""
    return (PRINTED / f"{name}.txt").read_text()


def without_numbers(text: str) -> list[str]:
    """The lines of a module tree; statistics and scales of random data are not compared."""
    numbers = re.compile(r"\s*-?\d+\.\d*(?:e-?\d+)?")
    return [numbers.sub(" #", line).rstrip() for line in text.strip().splitlines()]


def types(model: nn.Module, *paths: str) -> list[str]:
    return [type(model.get_submodule(path)).__name__ for path in paths]


@pytest.mark.parametrize("march", ["March.BAYES", "March.BERNOULLI2"])
def test_hybrid(march: str) -> None:
    done = run("hybrid", march)
    tree, forward = str(done.qat_model).split("\n\n\n\n")
    assert without_numbers(tree) == without_numbers(printed("hybrid_tree"))
    assert forward.startswith(printed("hybrid_forward"))
    assert isinstance(done.qat_model.conv0, qat.Conv2d) and type(done.qat_model.conv3) is nn.Conv2d
    assert done.qat_model.conv4.activation_post_process is None
    assert float((done.quantize_res - done.float_res).abs().max()) < 0.1
    set_fake_quantize(done.qat_model.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert torch.equal(done.qat_model(done.data), done.quantize_res)
    exported = run_onnx(onnx.load("qat.onnx"), (done.data,))[0]
    assert float((exported - done.quantize_res).abs().max()) < 0.05


@pytest.mark.parametrize("march", ["March.BAYES", "March.BERNOULLI2"])
def test_model_of_the_profiler(march: str) -> None:
    done = run("model_profiler", march)
    written = {path.name for path in Path("horizon_quant_debug").iterdir()}
    assert written >= {
        "profiler.html", "profiler.json", "similarity.txt", "ordered_op_error_similarity.txt", "similarity.html",
        "statistic_qat.txt", "statistic_quantized.html", "weight_comparison.txt", "qconfig_info.txt",
    }  # fmt: skip
    assert types(done.qat_net, "convmod1.add", "convmod2.add", "convmod3.add") == ["ConvAddReLU2d"] * 3
    assert all(
        isinstance(done.qat_net.get_submodule(f"convmod1.{name}"), nn.Identity)
        for name in ("conv2d", "bn_mod", "relu_mod")
    )
    set_fake_quantize(done.qat_net.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert torch.equal(done.qat_net(done.data, done.data), done.quantized_net(done.data, done.data))


def test_unfused_operations(capsys: pytest.CaptureFixture) -> None:
    done = run("check_unfused_operations")
    assert capsys.readouterr().out == printed("check_unfused_operations")
    assert types(done.float_net, "convmod1.add", "convmod2.add") == ["ConvAddReLU2d", "FloatFunctional"]
    done.float_net.qconfig = default_qat_8bit_fake_quant_qconfig
    model = horizon.quantization.prepare_qat(done.float_net)
    found = check_recording(record_calls(model, (done.data0, done.data1))).unfused
    assert [[member.name for member in pattern] for pattern in found] == [
        ["convmod2.conv2d", "convmod2.bn_mod", "convmod2.add", "convmod2.relu_mod"],
        ["shared_conv(shared)", "bn1"],
        ["shared_conv(shared)", "bn2"],
    ]


def test_called_times(capsys: pytest.CaptureFixture) -> None:
    """The guide's table also has a module `unused`, which its model does not have."""
    done = run("get_module_called_count", horizon_nn=horizon.nn)
    assert capsys.readouterr().out == printed("get_module_called_count")
    set_march(March.BAYES)
    inputs = (done.data0, done.data1)
    model = prepare(done.float_net, inputs, qconfig_dict={"": default_qat_8bit_fake_quant_qconfig}, out_dir=None)
    found = {row.name: row.count for row in check_recording(record_calls(model, inputs)).called_times}
    once = ["quant_stubx", "quant_stuby", "mul_op", *(f"quantized_ops.{i}" for i in range(9)), "dequant_stub"]
    assert [name for name in once if found[name] != 1] == [] and found["cat_op"] == 2


def test_int16_weights_are_flagged() -> None:
    """The tables of `qconfig_info.txt`; the guide shows them for a model that is fused by hand, and only in part."""
    run("check_qconfig")
    text = Path("qconfig_info.txt").read_text()
    layers = ("convmod1.add", "convmod2.add", "convmod3.add", "shared_conv", "shared_conv(1)")
    outs = [line.split("|")[1].strip() for line in text.partition("Weight qconfig")[0].splitlines() if "<class" in line]
    assert outs == [*layers[:4], "bn1", "shared_conv(1)", "bn2", "sub[sub]", "relu"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    for name in layers:
        kind = "Conv2d" if name.startswith("shared") else "ConvAddReLU2d"
        cls = f"<class 'horizon_plugin_pytorch.nn.qat.conv2d.{kind}'>"
        assert [name, cls, "qint16 weight!!!"] in rows
        assert [name, cls, "qint16", "0"] in [row[:4] for row in rows]
    functional = "<class 'horizon_plugin_pytorch.nn.qat.functional_modules.FloatFunctional'>"
    message = "input dtype ['qint8', 'qint8'] is not same with out dtype qint16"
    assert ["sub[sub]", functional, message] in rows
    assert ["sub[sub]", functional, "Fixed scale 3.0517578125e-05"] in rows


def test_formats_of_a_model_that_is_fused_by_hand() -> None:
    """The guide's file: of its model with stubs, whose first and last part are fused. Remedies follow the tables."""
    done = run("check_qconfig")

    class WithStubs(done.TestFuseNet):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(3)
            self.quantx, self.quanty, self.dequant = tq.QuantStub(), tq.QuantStub(), tq.DeQuantStub()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.dequant(super().forward(self.quantx(x), self.quanty(y)))

    net = WithStubs()
    for part in (net.convmod1, net.convmod3):
        horizon.quantization.fuse_modules(part, ["conv2d", "bn_mod", "add", "relu_mod"], inplace=True)
    weight = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0, "dtype": "qint16"}
    net.qconfig = horizon.quantization.get_default_qconfig(weight_qkwargs=weight)
    net.sub.qconfig = done.sub_qconfig
    done.check_qconfig(horizon.quantization.prepare_qat(net), (done.data0, done.data1))
    assert Path("qconfig_info.txt").read_text().startswith(printed("check_qconfig"))


@pytest.mark.slow
def test_export_of_every_stage() -> None:
    done = run("export_to_onnx")
    inputs = done.data, done.data
    with torch.no_grad():
        expected = done.quantized_net(*inputs)
        found = run_onnx(onnx.load("quantized_test.onnx"), inputs)[0]
        assert torch.equal(found, expected)
        for name in ("float_test.onnx", "qat_test.onnx"):  # the guide: to look at; here they run
            assert float((run_onnx(onnx.load(name), inputs)[0] - done.float_net(*inputs)).abs().max()) < 0.01


def test_memory(capsys: pytest.CaptureFixture) -> None:
    tool = horizon.utils.quant_profiler.show_cuda_memory_consumption
    run(
        "show_cuda_memory_consumption",
        MobilenetV1=_Resnet18, data=torch.randn(1, 3, 8, 8), torch=torch, show_cuda_memory_consumption=tool,
    )  # fmt: skip
    assert "layer3.1.conv_cell2.conv" in Path("mem_info.html").read_text()
    assert capsys.readouterr().out.startswith("Peak: ")


@pytest.mark.slow
def test_similarity_example() -> None:
    """Note, headers, names and types of the guide's table, and those of its numbers that its inputs determine."""
    done = run("featuremap_similarity")
    text, expected = Path("similarity.txt").read_text(), printed("featuremap_similarity")
    assert text.splitlines()[:6] == expected.splitlines()[:6]
    found, wanted = _cells(text), _cells(expected)
    assert found[:2] == wanted[:2]
    names = [row[:2] for row in _without_softmax(wanted[3:])]
    assert [row[:2] for row in _without_softmax(found[3:])] == names
    assert found[3:5] == wanted[3:5] and found[-1][3:] == wanted[-1][3:]
    assert [int(row[0]) for row in found[3:]] == list(range(len(found) - 3))
    ordered = _cells(Path("ordered_op_error_similarity.txt").read_text())[3:]
    errors = [float(row[7]) for row in ordered]
    assert errors == sorted(errors, reverse=True) and sorted(ordered) == sorted(found[3:]) and max(errors) <= 2
    assert Path("similarity.html").exists()
    set_fake_quantize(done.qat_net.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert torch.equal(done.qat_net(done.data, done.data), done.bpu_net(done.data, done.data))


def test_similarity_example_on_the_other_chip() -> None:
    """The guide offers BERNOULLI2 too, whose table has no softmax: it is refused, and runs on the CPU if asked to."""
    with pytest.raises(UnsupportedOperatorError, match="Softmax.*quantized_ops.2.*bernoulli2"):
        run("featuremap_similarity", "March.BERNOULLI2")


_PARTS = ("quantized_ops.2.", "quantized_ops.2 ")  # softmax is one operator here


def _without_softmax(rows: list[list[str]]) -> list[list[str]]:
    """Rows of the guide's network without index; its `mul_op`, which nobody reads, is not in a traced model."""
    kept = [row[1:] for row in rows if not f"{row[1]} ".startswith(_PARTS)]
    return [row for row in kept if not row[0].startswith("mul_op")]


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_statistics() -> None:
    """Headers, names and attributes; the guide's numbers are of other data, and of the quantized model.

    It calls the inputs of the second `cat` of two by another rule than those of the first.
    """
    is_there = importlib.util.find_spec("tensorboard") is not None  # the script wants histograms
    with nullcontext() if is_there else pytest.raises(CheckError, match="pip install tensorboard"):
        run("profile_featuremap")
    text, expected = Path("statistic.txt").read_text(), printed("profile_featuremap")
    title = "Statistics with quant range in descending order..."
    assert title in text.splitlines() and title in expected.splitlines()
    found, wanted = (_cells(part.partition(title)[0]) for part in (text, expected))
    assert found[0] == wanted[0]
    names = [[row[0], row[2]] for row in _without_softmax(wanted[2:])]
    other = {"input-0": "input-0-0", "input-1": "input-0-1"}
    names = [[name, other.get(attr, attr) if name == "cat_op[cat](1)" else attr] for name, attr in names]
    assert [[row[0], row[2]] for row in _without_softmax(found[2:])] == names
    first = ["1.0000000", "1.4700000", "1.2350000", "0.0196000", "", "torch.float32"]
    assert found[2][4:] == first and found[3][8:] == ["0.0115294", "qint8"]
    ordered = _cells(text.partition(title)[2])[2:]
    sizes = [max(abs(float(row[4])), abs(float(row[5]))) for row in ordered]
    assert sorted(ordered) == sorted(found[2:]) and sizes == sorted(sizes, reverse=True)


class _Cell(nn.Module):
    """A convolution of the network whose definition the guide leaves out; its names are those of the guide's table."""

    def __init__(self, ins: int, outs: int, has_add: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU()
        if has_add:
            self.skip_add = horizon.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.bn(self.conv(x))
        return self.relu(x if y is None else self.skip_add.add(x, y))


class _Pair(nn.Module):
    def __init__(self, width: int, has_shortcut: bool) -> None:
        super().__init__()
        self.conv_cell1 = _Cell(width, width)
        if has_shortcut:
            self.shortcut = _Cell(width, width)
        self.conv_cell2 = _Cell(width, width, has_shortcut)
        self.has_shortcut = has_shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_cell1(x)
        return self.conv_cell2(y, self.shortcut(x)) if self.has_shortcut else self.conv_cell2(y)


class _Resnet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = tq.QuantStub(), tq.DeQuantStub()
        self.conv1 = _Cell(3, 4)
        self.layer1, self.layer2, self.layer3 = (nn.Sequential(_Pair(4, True), _Pair(4, False)) for _ in range(3))
        self.conv2, self.pool, self.fc = _Cell(4, 4), _Cell(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(self.quant(x)))))
        return self.dequant(self.fc(self.pool(self.conv2(x)).mean((2, 3))))


@pytest.mark.slow
def test_weights(capsys: pytest.CaptureFixture) -> None:
    """Names, similarities and looks of the table; the differences are those of other weights."""
    names = {"Resnet18": _Resnet18, "device": torch.device("cpu"), "data": torch.randn(2, 3, 8, 8)}
    done = run("compare_weights", **names)
    out, expected = capsys.readouterr().out, printed("compare_weights")
    assert Path("weight_comparison.txt").read_text() == out
    assert out.splitlines()[:3] == expected.splitlines()[:3] and out.splitlines()[-1] == expected.splitlines()[-1]
    found, wanted = ([line.split("|")[1:3] for line in text.splitlines()[3:-1]] for text in (out, expected))
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert {value.strip() for _, value in found} == {"1.0000000"}
    bpu = convert_fx(copy.deepcopy(done.qat_net).eval())
    weights = done.compare_weights(done.float_net, bpu)
    steps = bpu.fc.weight_scale.reshape(-1, 1)
    error = (weights["fc.weight"]["float"] - weights["fc.weight"]["quantized"]).abs() / steps
    assert 0 < float(error.max()) <= 0.5001


@pytest.mark.slow
@pytest.mark.parametrize("march", ["March.BAYES", "March.BERNOULLI2"])
def test_step_wise_quantization(march: str) -> None:
    done = run("step_wise_quantization", march)  # with the guide's own assertions
    done.model.set_qconfig()
    model = horizon.quantization.prepare_qat(done.model, hybrid=True)  # the guide's other way, in eager mode
    assert type(model.conv1) is nn.Conv2d and isinstance(model.conv2, qat.Conv2d)
    model(done.data)
    refused = horizon.quantization.prepare_qat(done.model)
    with pytest.raises(NotImplementedError, match="`Conv2d` at `conv1`.*not implemented for QTensor"):
        refused(done.data)
    check_step_wise(done.model, done.data)


def check_step_wise(model: Any, data: Tensor) -> None:
    """The guide's assertions on every method: by a qconfig of None, and by name where there is a graph."""
    model.set_qconfig()
    named = copy.deepcopy(model)
    del named.conv1.qconfig
    for method in PrepareMethod:
        is_graph = method is not PrepareMethod.EAGER
        ways: list[tuple[nn.Module, dict | None]] = [(model, None)]
        ways += [(named, {"module_name": ["conv1"]})] if is_graph else []
        for net, listed in ways:
            prepared = prepare(net, (data,), method=method, hybrid=True, hybrid_dict=listed, out_dir=None)
            assert type(prepared.conv1) is nn.Conv2d
            assert isinstance(prepared.conv0, qat.Conv2d) and isinstance(prepared.conv2, qat.Conv2d)
            prepared(data).mean().backward()
            assert all(x.grad is not None for x in prepared.parameters())
            set_fake_quantize(prepared.eval(), FakeQuantState.VALIDATION)
            if is_graph:
                assert torch.equal(prepared(data), horizon.quantization.convert(prepared)(data))
            else:  # the guide: insert a QuantStub by hand
                with pytest.raises(ConversionError, match="`conv2`.*Put a QuantStub"):
                    prepared(data)
    check_stub_after_float(model, data)


def check_stub_after_float(model: Any, data: Tensor) -> None:
    """The guide's remedy in eager mode: with a QuantStub after the float layer the model is whole, and converts."""
    model = copy.deepcopy(model)
    float_layer = model.conv1
    model.conv1 = nn.Sequential(OrderedDict(conv=float_layer, quant=tq.QuantStub()))
    model.set_qconfig()
    model.conv1.qconfig, model.conv1.quant.qconfig = None, model.qconfig
    for way in ("prepare_qat", "prepare"):
        if way == "prepare":
            hybrid = prepare(model, (data,), method=PrepareMethod.EAGER, hybrid=True, out_dir=None)
        else:
            hybrid = horizon.quantization.prepare_qat(model, hybrid=True)
        assert type(hybrid.conv1.conv) is nn.Conv2d and isinstance(hybrid.conv1.quant, qat.QuantStub)
        hybrid(data).mean().backward()
        set_fake_quantize(hybrid.eval(), FakeQuantState.VALIDATION)
        with torch.no_grad():
            assert torch.equal(hybrid(data), horizon.quantization.convert(hybrid)(data))


@pytest.mark.parametrize("march", ["March.BAYES", "March.BERNOULLI2"])
def test_preserve_qat_mode(march: str) -> None:
    # With the guide's own assertion; `float_net` is a name of its page.
    done = run("preserve_qat_mode", march, float_net=nn.Sequential(OrderedDict(convmod1=nn.Conv2d(1, 1, 1))))
    assert done.float_net.convmod1.preserve_qat_mode is True
    assert isinstance(done.quant_model.convmod1.add, qat.ConvAddReLU2d)
    assert not isinstance(done.quant_model.convmod2.add, qat.ConvAddReLU2d)


@pytest.mark.parametrize("march", ["March.BAYES", "March.BERNOULLI2"])
def test_devices_of_a_hybrid_model(march: str, capsys: pytest.CaptureFixture) -> None:
    done = run("check_deploy_device", march)
    table = printed("check_deploy_device")
    assert capsys.readouterr().out == 2 * table  # of the QAT model and of the converted one
    assert Path("deploy_device.txt").read_text() == table
    qconfigs = {
        "": default_qat_8bit_fake_quant_qconfig,
        "module_name": [("conv4", default_qat_out_8bit_fake_quant_qconfig)],
    }
    listed = {"module_name": ["conv1.conv", "conv3"], "module_type": [done._SeluModule]}
    for method in ("jit", "jit-strip"):  # the same by running
        model = prepare(
            done.model, (done.infer_data,), method=method, qconfig_dict=qconfigs, hybrid=True, hybrid_dict=listed,
            out_dir=None,
        )  # fmt: skip
        done.check_deploy_device(model)
        assert capsys.readouterr().out == table
    with torch.no_grad():
        assert done.quantize_model(done.infer_data).shape == done.infer_data.shape


class Small(nn.Module):
    """In place of the guide's network."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = tq.QuantStub(), tq.DeQuantStub()
        self.conv, self.bn, self.relu, self.classifier = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 5, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.classifier(self.relu(self.bn(self.conv(self.quant(x)))))).flatten(1)


class _Meter:
    def __init__(self, value: float) -> None:
        self.avg = value


def test_calibrate_then_train() -> None:
    """The steps of calibration, then the script of quantization-aware training, with the functions it calls."""
    set_march(March.BAYES)
    data = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(3)]
    model = Small()
    float_model = copy.deepcopy(model)
    model.qconfig = horizon.quantization.get_default_qconfig(activation_observer="mse")
    calib_model = prepare_qat_fx(model)
    calib_model.eval()
    horizon.quantization.set_fake_quantize(calib_model, horizon.quantization.FakeQuantState.CALIBRATION)
    for image, _ in data:
        calib_model(image)
    calib_model.eval()
    horizon.quantization.set_fake_quantize(calib_model, horizon.quantization.FakeQuantState.VALIDATION)
    scale = float(calib_model.quant.activation_post_process.scale)

    def train_one_epoch(net: Any, loss: Any, optimizer: Any, scheduler: Any, loader: Any, device: Any) -> None:
        for image, label in loader:
            optimizer.zero_grad()
            loss(net(image), label).backward()
            optimizer.step()

    def evaluate(net: Any, loader: Any, device: Any) -> tuple[_Meter, _Meter]:
        with torch.no_grad():
            hits = [float((net(image).argmax(1) == label).float().mean()) for image, label in loader]
        return _Meter(sum(hits) / len(hits)), _Meter(1.0)

    done = run(
        "training",
        torch=torch, nn=nn, prepare_qat_fx=prepare_qat_fx, convert_fx=convert_fx, set_fake_quantize=set_fake_quantize,
        FakeQuantState=FakeQuantState, float_model=float_model, calib_model=calib_model, device=torch.device("cpu"),
        epoch_num=2, train_one_epoch=train_one_epoch, evaluate=evaluate, train_data_loader=data, eval_data_loader=data,
    )  # fmt: skip
    assert done.qat_model.classifier.activation_post_process is None
    assert float(done.qat_model.quant.activation_post_process.scale) == pytest.approx(scale, rel=0.5)
    with torch.no_grad():
        assert torch.equal(done.quantized_model(data[0][0]), done.qat_model(data[0][0]))


def test_common_mistakes() -> None:
    """The chip by its other spelling, and the output in high precision, named before the rest."""
    horizon.march.set_march(horizon.march.March.Bernoulli2)
    assert get_march() is March.BERNOULLI2
    horizon.march.set_march(horizon.march.March.Bayes)
    assert get_march() is March.BAYES
    model = prepare_qat_fx(
        Small(),
        {
            "module_name": {"classifier": default_qat_out_8bit_fake_quant_qconfig},
            "": default_qat_8bit_fake_quant_qconfig,
        },
    )
    assert model.classifier.activation_post_process is None and model.conv.activation_post_process is not None


def _rows(table: str) -> dict[str, str]:
    return dict(line.split() for line in table.splitlines() if line.endswith(("True", "False")))


@pytest.mark.slow
def test_script_profile(capsys: pytest.CaptureFixture[str]) -> None:
    run("script_profile")
    out, expected = capsys.readouterr().out, printed("script_profile")
    # The guide's table has no row of the sum, which that of `compare_script_models` has for the same model.
    assert _rows(out) == {**_rows(expected), "_hz_add": "True"}
    assert out.splitlines()[-1].startswith(expected.splitlines()[-1].removesuffix("."))
    saved = torch.load("horizon_script_result.pt", weights_only=True)
    assert list(saved) == list(_rows(out))
    assert saved["_hz_cat_1"].shape == (1, 30, 5, 5) and saved["arg0"].abs().max() <= 128


@pytest.mark.slow
def test_compare_script_models(capsys: pytest.CaptureFixture[str]) -> None:
    run("compare_script_models")
    out, expected = capsys.readouterr().out, printed("compare_script_models")
    assert _rows(out) == _rows(expected)
    assert out.splitlines()[-1] == expected.splitlines()[-1]
