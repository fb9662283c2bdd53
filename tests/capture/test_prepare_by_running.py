"""Prepare by running: the model keeps its own forward, with whatever Python it is written in."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.graph_text import graph_text
from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, UnknownCallError
from horizon_plugin_pytorch.fx.jit_scheme import Tracer
from horizon_plugin_pytorch.nn import qat as nn_qat
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QuantStub,
    convert,
    get_fake_quantize,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from horizon_plugin_pytorch.workflow.prepare import FuseMode, PrepareMethod, prepare
from tests.routes import as_numbers, calibrate, mismatches, qconfig, run_onnx
from tests.workflow.test_networks import NETWORKS, _float, _inputs


class Stubs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.bn.running_var.uniform_(0.5, 2)


class Loops(Stubs):
    """Loops, conditions on sizes, and functions in them."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.quant(x)
        for _ in range(times):
            x = F.relu(self.bn(self.conv(x)) + x)
        if x.shape[-1] > 4:
            x = x.mean((2, 3))
        else:
            x = x.flatten(1)[:, :4]
        return self.dequant(self.fc(x))


class Boxes(NamedTuple):
    boxes: Tensor
    scores: Tensor


@dataclasses.dataclass
class Wrapped:
    value: Tensor
    name: str = ""


class Structures(Stubs):
    """Dictionaries, named tuples, dataclasses, keyword arguments, None and lists."""

    def forward(self, batch: dict[str, Any], *rest: Tensor, scale: float | None = None) -> dict[str, Any]:
        x = self.quant(batch["image"])
        y = self.conv(x)
        if scale is not None:
            y = y * scale
        parts = [self.quant(r) for r in rest]
        for part in parts:
            y = y + part
        wrapped = Wrapped(self.fc(y.mean((2, 3))))
        out = Boxes(self.dequant(y), self.dequant(wrapped.value.sigmoid()))
        return {"boxes": out, "size": x.shape[-1], "nothing": None, "mask": batch["mask"] & True}


class InTraining(Stubs):
    """A branch for training, and float code around."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = (x - x.mean()) / x.std()
        y = self.conv(self.quant(x))
        if self.training:
            return self.dequant(self.fc(y.amax((2, 3)))), self.dequant(self.aux(y * 0.5))
        out = self.dequant(self.fc(y.amax((2, 3))))
        return out.softmax(-1)[:, out[0].argmax()]


class Constants(Stubs):
    """Parameters and buffers as operands, also of a FloatFunctional; in-place operators; no_grad; a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.add = nn.Parameter(torch.randn(1, 4, 1, 1)), FloatFunctional()
        self.register_buffer("gain", torch.rand(4, 1, 1) + 0.5)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain

    def forward(self, x: Tensor) -> Tensor:
        y = self.add.add(self.conv(self.quant(x)), self.position)
        y = self.scaled(y) + self.scaled(y)
        with torch.no_grad():
            z = y.sigmoid()
        y = y.clone()
        y += z
        y.relu_()
        return self.dequant(y)


class Blocks(Stubs):
    """The same line in another block has another module."""

    seen: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        for index in range(2):
            with Tracer.dynamic_block(self, f"step{index}"):
                x = torch.sigmoid(x)
            self.seen.append(Tracer.is_tracing())
        return self.dequant(x)


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[type, tuple, dict]] = {
    "loops": (Loops, (X,), {}),
    "structures": (Structures, ({"image": X, "mask": X > 0}, X * 2, X * 0.3), {"scale": 0.5}),
    "training": (InTraining, (X,), {}),
    "constants": (Constants, (X,), {}),
    "blocks": (Blocks, (X,), {}),
}


def _tensors(tree: Any) -> list[Tensor]:
    from torch.utils import _pytree as pytree

    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _make(name: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    cls, args, kwargs = MODELS[name]
    return cls().eval(), args, kwargs


def _prepared(name: str) -> tuple[nn.Module, nn.Module, tuple, dict]:
    model, args, kwargs = _make(name)
    qat = prepare(model, args, qconfig_dict={"": qconfig()}, example_kw_inputs=kwargs, out_dir=None)
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        found, wanted = qat(*args, **kwargs), model(*args, **kwargs)
    for a, b in zip(_tensors(found), _tensors(wanted), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return model, qat, args, kwargs


@pytest.mark.parametrize("name", MODELS)
def test_calibration_is_float_and_validation_is_what_conversion_gives(name: str) -> None:
    model, qat, args, kwargs = _prepared(name)
    assert type(qat) is type(model)
    with torch.no_grad():
        found, wanted = qat(*args, **kwargs), convert(qat)(*args, **kwargs)
    assert mismatches(as_numbers(found), as_numbers(wanted)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_training_reaches_the_parameters(name: str) -> None:
    _, qat, args, kwargs = _prepared(name)
    set_fake_quantize(qat, FakeQuantState.QAT)
    out = qat.train()(*args, **kwargs)
    sum(x.square().sum() for x in _tensors(out) if x.is_floating_point() and x.requires_grad).backward()
    grads = [p for p in qat.parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)]
    assert len(grads) > 0


@pytest.mark.parametrize("name", MODELS)
def test_two_prepares_agree_and_copies_run(name: str) -> None:
    _, qat, args, kwargs = _prepared(name)
    model, _, _ = _make(name)
    other = prepare(model, args, qconfig_dict={"": qconfig()}, example_kw_inputs=kwargs, out_dir=None).eval()
    assert str(other.graph) == str(qat.graph)
    report = other.load_state_dict(qat.state_dict())
    assert not report.missing_keys and not report.unexpected_keys
    set_fake_quantize(other, FakeQuantState.VALIDATION)
    with torch.no_grad():
        wanted = as_numbers(qat(*args, **kwargs))
        for copied in (other, copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
            assert mismatches(as_numbers(copied(*args, **kwargs)), wanted) == 0


def test_a_loop_may_run_any_number_of_times() -> None:
    _, qat, _, _ = _prepared("loops")
    quantized = convert(qat)
    with torch.no_grad():
        for times in (0, 1, 5):
            assert torch.equal(qat(X, times), quantized(X, times))


def test_code_that_did_not_run_is_named() -> None:
    _, qat, _, _ = _prepared("loops")
    assert "_generated_add_0" in dict(qat.named_modules())
    small = X[:, :, :4, :4]
    with torch.no_grad():
        qat(small)  # only moves values: flatten and slice need no scale
    model, args, _ = _make("structures")
    narrow = prepare(model, args, qconfig_dict={"": qconfig()}, out_dir=None).eval()
    with pytest.raises(UnknownCallError, match=r"`mul` .*test_prepare_by_running.py:\d+.*prepare"):
        narrow(*args, scale=0.5)


def test_dynamic_blocks_have_modules_of_their_own() -> None:
    Blocks.seen.clear()
    _, qat, _, _ = _prepared("blocks")
    assert True in Blocks.seen and Blocks.seen[-1] is False
    names = [name for name, _ in qat.named_modules() if name.endswith("_generated_sigmoid_0")]
    assert names == ["step0._generated_sigmoid_0", "step1._generated_sigmoid_0"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_running_and_tracing_give_the_same_numbers(name: str, tmp_path: Any) -> None:
    inputs = _inputs(name)
    by_running = calibrate(prepare(_float(name), inputs, qconfig_dict={"": qconfig()}, out_dir=None), inputs)
    traced = calibrate(prepare_qat_fx(_float(name), {"": qconfig()}), inputs)
    with torch.no_grad():
        found = as_numbers(by_running(*inputs))
        assert mismatches(found, as_numbers(traced(*inputs))) == 0
        quantized = convert(by_running)
        assert mismatches(found, as_numbers(quantized(*inputs))) == 0
    file = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx")
    assert mismatches(found, run_onnx(file, inputs)) == 0


class Plain(Stubs):
    """A model that every method can take."""

    def __init__(self) -> None:
        super().__init__()
        self.op, self.relu = FloatFunctional(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.op.add(self.relu(self.conv(x)), x))


@pytest.mark.parametrize("method", ["jit-strip", "jit", "symbolic", PrepareMethod.SYMBOLIC])
def test_methods_and_setters_give_the_same_numbers(method: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Plain().eval()
    qat = prepare(model, X, default_calibration_qconfig_setter, method, out_dir=tmp_path)
    assert (tmp_path / "fx_graph.txt").read_text().startswith("opcode")
    assert "Each layer out qconfig:" in (tmp_path / "model_check_result.txt").read_text()
    by_running = prepare(model, (X,), default_calibration_qconfig_setter, out_dir=None)
    with torch.no_grad():
        assert torch.equal(calibrate(qat, (X,))(X), calibrate(by_running, (X,))(X))


def test_eager_is_the_same_where_the_user_fuses() -> None:
    torch.manual_seed(0)
    model = Plain().eval()
    by_running = prepare(model, (X,), qconfig_dict={"": qconfig()}, fuse_mode=FuseMode.NoFuse, out_dir=None)
    model.qconfig = qconfig()
    eager = prepare(model, method="eager", out_dir=None)
    assert type(by_running.conv).__name__ == type(eager.conv).__name__ == "Conv2d"
    with torch.no_grad():
        assert torch.equal(calibrate(eager, (X,))(X), calibrate(by_running, (X,))(X))


def test_arguments_that_a_method_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="jit-strip"):
        prepare(Plain(), X, method="onnx")
    with pytest.raises(ValueError, match="example_inputs"):
        prepare(Plain())
    with pytest.raises(QuantizationConfigError, match="EAGER reads the modules' own"):
        prepare(Plain(), method="eager", qconfig_dict={"": qconfig()})
    with pytest.raises(QuantizationConfigError, match="EAGER fuses nothing by itself"):
        prepare(Plain(), X, method="eager", fuse_mode=FuseMode.NoFuse)


class ReadAgain(Stubs):
    """What went through a stub is used beside it as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(self.quant(x))
        return self.dequant(y), self.dequant(self.fc(y.mean((2, 3)))), x.sum()


def test_a_stub_does_not_change_the_tensor_it_takes() -> None:
    x = torch.randn(2, 4, 6, 6)
    net = prepare(ReadAgain(), (x,), default_calibration_qconfig_setter, out_dir=None)
    text = graph_text(net.graph)
    assert "(_generated_mean_0, conv)" in text and "(input_0,)" in text.partition("sum")[2]
    assert type(net.fc) is nn_qat.Linear


class Dropping(Stubs):
    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(F.dropout(self.quant(x), 0.5, self.training)))


def test_functional_dropout_follows_the_mode_as_in_a_traced_model() -> None:
    torch.manual_seed(0)
    model = Dropping().train()
    models = (
        prepare(model, (X,), qconfig_dict={"": qconfig()}, out_dir=None),
        prepare_qat_fx(model, {"": qconfig()}),
    )
    for mode in (True, False):
        found = []
        for qat in models:
            torch.manual_seed(1)
            found.append(qat.train(mode)(X))
        assert torch.equal(*found)
    assert torch.equal(models[0](X), found[0])  # nothing is dropped in eval


def test_a_model_without_stubs_is_told_so() -> None:
    with pytest.warns(QuantizationWarning, match="`Sequential` has no QuantStub"):
        prepare(nn.Sequential(nn.Conv2d(4, 4, 1)), (X,), qconfig_dict={"": qconfig()}, out_dir=None)


class Counting(nn.Module):
    """Counts its forwards in a list that copies share, and keeps some of what it computes there, if asked."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(2, 2, 1), DeQuantStub()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        _FORWARDS.append(self.training)
        y = self.conv(self.quant(x))
        out = self.dequant(y).flatten(1)[:, :3]  # a view of a view
        if self.keeps:
            _KEPT.append({"inner": y, "output": out}[self.keeps])
        return out


_FORWARDS: list[bool] = []
_KEPT: list[Tensor] = []


@pytest.mark.parametrize(("keeps", "forwards"), [("", 2), ("inner", 3), ("output", 3)])
def test_a_model_is_recorded_twice_in_eval_mode_only_if_it_keeps_tensors(keeps: str, forwards: int) -> None:
    _FORWARDS.clear()
    record(Counting(keeps), (torch.randn(1, 2, 4, 4),))
    _KEPT.clear()
    assert list(_FORWARDS) == [False] * (forwards - 1) + [True]


class AsksForTheType(Counting):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if type(self.conv) is nn.Conv2d else out + 1


@pytest.mark.parametrize(
    ("is_written", "cls", "count"),
    [(False, AsksForTheType, 1), (True, AsksForTheType, 1), (False, Counting, 0), (True, Counting, 0)],
)
def test_one_run_of_the_prepared_model_is_for_the_check_and_for_the_comparison(
    is_written: bool, cls: type[Counting], count: int, tmp_path: Any
) -> None:
    _FORWARDS.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepare(
            cls(""),
            (torch.randn(1, 2, 4, 4),),
            qconfig_dict={"": qconfig()},
            out_dir=tmp_path if is_written else None,
        )
    assert list(_FORWARDS) == [False, True, False]
    differences = [str(one.message) for one in told if "does not do what the float model does" in str(one.message)]
    assert len(differences) == count and all("although nothing is rounded" in text for text in differences)


def test_the_comparison_is_made_where_files_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(QuantizationWarning, match="could not write"), pytest.warns(match="nothing is rounded"):
        prepare(
            AsksForTheType(""),
            (torch.randn(1, 2, 4, 4),),
            qconfig_dict={"": qconfig()},
            out_dir=tmp_path / "file" / "folder",
        )


def test_the_comparison_with_float_leaves_no_trace_in_the_quantizers() -> None:
    net = prepare(Counting(""), (torch.randn(1, 2, 4, 4),), qconfig_dict={"": qconfig()}, out_dir=None)
    quantizers = [m for m in net.modules() if isinstance(m, FakeQuantize)]
    assert quantizers
    for quantizer in quantizers:
        assert get_fake_quantize(quantizer) is FakeQuantState.QAT
        assert not quantizer.has_statistics
