"""A tool in a package of another name learns what a model holds, and the model's own code what it held in float."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking import as_tool
from horizon_plugin_pytorch.dtype import qint8, qint32
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    convert,
    convert_fx,
    get_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import calibrate, qconfig

TOOL = '''
import functools

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def look(module, tensors):
    """What a module is, and what it holds and gives."""
    weight = getattr(module, "weight", None)
    return {
        "class": module.__class__,
        "is_conv": isinstance(module, nn.Conv2d),
        "weight": None if weight is None else weight.dtype,
        "dtypes": [x.dtype for x in tensors if isinstance(x, torch.Tensor)],
    }


class Profiler:
    """Looks at one module of a model from its hooks, and walks the model from there."""

    def __init__(self, model, path):
        self.model, self.seen, self.walked, self.before = model, [], [], []
        module = model.get_submodule(path)
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(functools.partial(self.end, "conv"))
        module.register_forward_hook(torch.no_grad()(self.walk))

    def begin(self, module, args):
        self.before.append(look(module, args))

    def end(self, name, module, args, out):
        self.seen.append(look(module, [out]))

    def walk(self, module, args, out):
        self.walked.append([(name, m.__class__, isinstance(m, nn.Conv2d)) for name, m in self.model.named_modules()])
        self.walked.append([(name, p.dtype) for name, p in self.model.named_parameters()])
        self.walked.append([name for name, _ in self.model.named_children()])


class Debugger:
    """Looks at everything in a model, and computes with the tensors that it meets."""

    def __init__(self, model):
        self.seen = []
        self.handles = [m.register_forward_hook(self.hook) for m in model.modules()]

    def hook(self, module, args, out):
        names = [n for n, _ in module.named_modules()]
        self.seen.append((module.__class__, repr(module), names, list(module.state_dict())))
        for x in torch.utils._pytree.tree_leaves((args, out)):
            if isinstance(x, torch.Tensor):
                self.seen.append((x.dtype, x.shape, x.device))
                self.compute(x)

    def compute(self, x):
        try:
            real = x.dequantize() if hasattr(x, "q_scale") else x
        except Exception:
            return  # a result that a fused operator does not compute
        self.seen.append(float((real.detach().float() * 2).abs().max()))
        try:
            self.seen.append(x * 2)
        except NotImplementedError as error:
            self.seen.append(str(error))


class Mode(TorchFunctionMode):
    """Sees functions on tensors."""

    def __init__(self, says):
        super().__init__()
        self.says, self.seen = says, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with self.says():
            self.seen |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **kwargs or {})
'''


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Any]:
    package = tmp_path / "my_company_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "profiler.py").write_text(TOOL)
    sys.path.insert(0, str(tmp_path))
    try:
        yield importlib.import_module("my_company_tools.profiler")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("my_company_tools.profiler", None)
        sys.modules.pop("my_company_tools", None)


TOLD: list[tuple[Any, ...]] = []  # what the models' own code was told


class Net(nn.Module):
    """Its forward asks what the tool asks."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()
        self.after = nn.Conv2d(3, 3, 1)

    def look(self, x: Tensor) -> None:
        names = [name for name, _ in self.named_children() if "conv" in name or "_generated" in name]
        is_conv = isinstance(self.conv, nn.Conv2d)
        TOLD.append((x.dtype, self.conv.weight.dtype, is_conv, self.conv.__class__, tuple(names)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        x = self.relu(self.conv(x))
        self.look(x)
        return self.dequant(self.after(x * x if self.has_functions else x))

    has_functions = True


class Eager(Net):
    has_functions = False


class Wrapped(Net):
    """Tracing does not enter the code that asks."""

    @wrap()
    def body(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        self.look(x)
        return x * x

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.after(self.body(self.quant(x))))


X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
IN_FLOAT = (torch.float32, torch.float32, True, nn.Conv2d, ("conv",))


def _by_running(model: nn.Module) -> nn.Module:
    return prepare(model, (X,), qconfig_dict={"": qconfig()}, method=PrepareMethod.JIT_STRIP, out_dir=None)


def _by_tracing(model: nn.Module) -> nn.Module:
    return prepare_qat_fx(model, {"": qconfig()})


def _eager(model: nn.Module) -> nn.Module:
    model.qconfig = qconfig()
    return prepare_qat(model)


ROUTES = {
    "running": (Net, _by_running, convert),
    "tracing": (Wrapped, _by_tracing, convert_fx),
    "eager": (Eager, _eager, convert),
}
STAGES = ["calibration", "qat", "validation", "integer"]


def _model(route: str, stage: str) -> nn.Module:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    cls, prepared, converted = ROUTES[route]
    model = calibrate(prepared(cls().eval()), (X,))
    if stage == "integer":
        model = converted(model).eval()
    else:
        set_fake_quantize(model, FakeQuantState[stage.upper()])
    TOLD.clear()
    return model


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", ROUTES)
def test_hooks_of_a_tool_learn_what_there_is_and_the_forward_what_there_was(route, stage, tools) -> None:
    model = _model(route, stage)
    conv = type(model.conv)
    weight = model.conv.weight.dtype
    wanted = [(name, m.__class__) for name, m in model.named_modules()]
    names = [name for name, _ in model.named_children()]
    dtypes = [(name, p.dtype) for name, p in model.named_parameters()]
    with torch.no_grad():
        before = model(X)
        told = list(TOLD)
        tool = tools.Profiler(model, "conv")
        assert torch.equal(model(X), before)
    assert told * 2 == TOLD  # what the forward learns does not depend on the tool
    assert told or route == "tracing"
    if route != "eager":
        assert set(told) == {IN_FLOAT}
    assert conv.__module__.startswith("horizon_plugin_pytorch.nn.")
    (seen,), (entered,) = tool.seen, tool.before
    assert seen["class"] is entered["class"] is conv and seen["weight"] is entered["weight"] is weight
    assert seen["is_conv"] is issubclass(conv, nn.Conv2d) and (weight is torch.int8) is (stage == "integer")
    assert entered["dtypes"] == [qint8] and seen["dtypes"][0] in (qint8, qint32)
    walked, parameters, children = tool.walked
    assert [(name, cls) for name, cls, _ in walked] == wanted
    assert parameters == dtypes and children == names


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", ["running", "eager"])
def test_a_hook_that_the_float_model_had_is_the_models_own(route: str, stage: str, tools: Any) -> None:
    found: list[Any] = []

    def own(module: nn.Module, args: tuple, out: Tensor) -> None:
        found.append((out.dtype, module.__class__, module.weight.dtype))

    cls, prepared, converted = ROUTES[route]
    model = cls().eval()
    model.conv.register_forward_hook(own)
    model.conv.register_forward_hook(as_tool()(own))
    set_march(March.NASH_E)
    model = calibrate(prepared(model), (X,))
    set_fake_quantize(model, FakeQuantState[stage.upper()] if stage != "integer" else FakeQuantState.VALIDATION)
    model = converted(model).eval() if stage == "integer" else model
    found.clear()
    tool = tools.Profiler(model, "conv")
    with torch.no_grad():
        model(X)
    first, second = found
    assert first[2] is torch.float32
    if route == "running":  # in eager mode the user's code always meets tensors and modules as they are
        assert first[:2] == (torch.float32, nn.Conv2d)
    seen = tool.seen[0]
    assert second == (*seen["dtypes"], seen["class"], seen["weight"]) and second[1] is type(model.conv)


def test_a_tool_does_not_make_a_weight_one_that_the_forward_reads(tools: Any) -> None:
    model = _model("eager", "validation")
    model.after.register_forward_hook(lambda module, args, out: module.weight)
    tools.Profiler(model, "after")
    with torch.no_grad():
        model(X)
    assert model.conv.read_tensors == ("weight",) and model.after.read_tensors == ()


@pytest.mark.parametrize("stage", STAGES)
def test_a_mode_says_that_it_is_a_tool(stage: str, tools: Any) -> None:
    model = _model("running", stage)
    with torch.no_grad(), tools.Mode(contextlib.nullcontext) as silent:
        model(X)
    told = list(TOLD)
    with torch.no_grad(), as_tool(), tools.Mode(as_tool) as tool:
        model(X)
    assert qint8 not in silent.seen and qint8 in tool.seen
    assert set(TOLD) == set(told) == {IN_FLOAT}  # also where a tool runs the model


def test_a_module_that_a_tool_calls_answers_its_own_forward_as_in_float(tools: Any) -> None:
    model = nn.Sequential()
    model.first, model.second = Net(), Net()
    set_march(March.NASH_E)
    model = calibrate(_by_running(model.eval()), (X,))
    TOLD.clear()

    def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
        handle.remove()
        with as_tool():
            module.first(X)

    handle = model.register_forward_hook(hook)
    with torch.no_grad():
        model(X)
    assert len(TOLD) == 3 and set(TOLD) == {IN_FLOAT}


def test_what_was_the_models_own_before_saving_is_so_after_loading() -> None:
    model = Net().eval()
    model.conv.register_forward_hook(remember)
    set_march(March.NASH_E)
    model = convert(calibrate(_by_running(model), (X,)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    REMEMBERED.clear()
    with torch.no_grad():
        model(X), loaded(X), copy.deepcopy(loaded)(X)
    assert [torch.float32] * 3 == REMEMBERED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


class Residual(nn.Module):
    """By running, members of fused operators give what only the next member may read."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.blocks, self.gain = nn.Sequential(Block(), Block()), nn.Parameter(torch.rand(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant((self.blocks(self.quant(x)) * self.gain).softmax(1))


def _half(model: nn.Module) -> nn.Module:
    return prepare(model, (X,), qconfig_dict={"": get_qconfig(out_dtype=torch.float16)}, out_dir=None)


def _hybrid(model: nn.Module) -> nn.Module:
    names = {"module_name": ["blocks.1"]}
    return prepare(model, (X,), qconfig_dict={"": qconfig()}, hybrid=True, hybrid_dict=names, out_dir=None)


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [_by_running, _by_tracing, _half, _hybrid])
def test_a_tool_may_look_at_all_modules_and_compute_with_what_they_give(prepared: Any, tools: Any) -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    model = calibrate(prepared(Residual().eval()), (X,))
    for stage in STAGES:
        if stage == "integer":
            model = (convert_fx if prepared is _by_tracing else convert)(model)
        else:
            set_fake_quantize(model, FakeQuantState[stage.upper()])
        with torch.no_grad():
            before, names = model(X), [name for name, _ in model.named_modules()]
            tool = tools.Debugger(model)
            assert torch.equal(model(X), before)
        assert len(tool.seen) > 30 and names == [name for name, _ in model.named_modules()]
        for handle in tool.handles:
            handle.remove()


def test_what_a_tool_computes_in_wrapped_code_makes_no_modules(tools: Any) -> None:
    model = _model("tracing", "validation")
    names = list(model.state_dict())
    tool = tools.Debugger(model.conv)
    with torch.no_grad():
        model(X)
    assert list(model.state_dict()) == names
    said = [x for x in tool.seen if isinstance(x, str)]
    assert said and all("not implemented for QTensor" in x and "read `x.dequantize()`" in x for x in said)
    assert not any("JIT_STRIP" in x for x in said)  # prepare does not look into what is registered after it


REMEMBERED: list[Any] = []


def remember(module: nn.Module, args: tuple, out: Tensor) -> None:
    REMEMBERED.append(out.dtype)
