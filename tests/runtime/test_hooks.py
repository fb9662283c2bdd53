"""Hooks of the user's act in the prepared and in the converted model, or a warning says which do not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert,
    fuse_fx,
    fuse_modules,
    get_default_qconfig,
    get_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.runtime.hooks import KeptHook, is_any_everywhere, keep
from horizon_plugin_pytorch.watch import Watch
from tests.routes import calibrate, qconfig

X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
METHODS = ("symbolic", "jit")
LEAVES = ("block.conv", "block.bn", "block.relu", "last", "act", "quant", "dequant")
SEEN: list[str] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.block = QuantStub(), DeQuantStub(), Block()
        self.last, self.act = nn.Conv2d(4, 4, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.act(self.last(self.block(self.quant(x), flag=True))))


def look_before(module: nn.Module, args: tuple) -> None:
    SEEN.append("before")


def look_before_by_name(module: nn.Module, args: tuple, kwargs: dict) -> None:
    SEEN.append("before")


def look(module: nn.Module, args: tuple, out: Any) -> None:
    SEEN.append("after")


def look_by_name(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
    SEEN.append("after")


def double_before(module: nn.Module, args: tuple) -> Any:
    SEEN.append("before")
    return (args[0] * 2.0, *args[1:])


def double_before_by_name(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    SEEN.append("before")
    return (args[0] * 2.0, *args[1:]), kwargs


def double(module: nn.Module, args: tuple, out: Any) -> Any:
    SEEN.append("after")
    return out * 2.0


def double_by_name(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> Any:
    SEEN.append("after")
    return out * 2.0


def add_one(module: nn.Module, args: tuple, out: Any) -> Any:
    return out + 1.0


def look_back(module: nn.Module, *gradients: Any) -> None:
    SEEN.append("backward")


LOOKING: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda m: m.register_forward_pre_hook(look_before),
    "before, with kwargs": lambda m: m.register_forward_pre_hook(look_before_by_name, with_kwargs=True),
    "after": lambda m: m.register_forward_hook(look),
    "after, with kwargs": lambda m: m.register_forward_hook(look_by_name, with_kwargs=True),
    "after, always": lambda m: m.register_forward_hook(look, always_call=True),
}
CHANGING: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda m: m.register_forward_pre_hook(double_before),
    "before, with kwargs": lambda m: m.register_forward_pre_hook(double_before_by_name, with_kwargs=True),
    "after": lambda m: m.register_forward_hook(double),
    "after, with kwargs": lambda m: m.register_forward_hook(double_by_name, with_kwargs=True),
    "after, always": lambda m: m.register_forward_hook(double, always_call=True),
    "after, in order": lambda m: (m.register_forward_hook(double), m.register_forward_hook(add_one, prepend=True)),
}


def _net(register: Callable[[nn.Module], Any], place: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net().eval()
    register(net.get_submodule(place))
    return net


def _prepared(net: nn.Module, method: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return calibrate(prepare(net, (X,), qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None), (X,))


def _run(model: nn.Module) -> tuple[Tensor, list[str]]:
    SEEN.clear()
    with torch.no_grad():
        out = model(X)
    return out, list(SEEN)


def _act_everywhere(net: nn.Module, method: str, is_counted: bool = True) -> None:
    wanted, seen = _run(net)
    qat = _prepared(net, method)
    out, _ = _run(qat)
    assert float((out - wanted).norm() / wanted.norm()) < 0.01
    for model in (qat, convert(qat), pickle.loads(pickle.dumps(qat))):
        other, found = _run(model)
        assert torch.equal(other, out)
        assert found == seen or not is_counted


@pytest.mark.in_turns("kind", "place", "method", of=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LOOKING)
@pytest.mark.parametrize("place", ["", *LEAVES])
def test_a_hook_that_looks_is_called(kind: str, place: str, method: str) -> None:
    _act_everywhere(_net(LOOKING[kind], place), method)


@pytest.mark.in_turns("kind", "place", of=2)
@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("place", ["", "block", *LEAVES])
def test_a_hook_that_changes_values_acts_by_running(kind: str, place: str) -> None:
    _act_everywhere(_net(CHANGING[kind], place), "jit")


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("place", ["", "block"])
def test_a_hook_that_changes_values_acts_by_tracing(kind: str, place: str) -> None:
    _act_everywhere(_net(CHANGING[kind], place), "symbolic", is_counted=place == "")


def test_by_tracing_a_layers_hook_that_computes_with_quantized_values_is_an_error_with_its_line() -> None:
    with pytest.raises(NotImplementedError, match=r"`torch.Tensor.mul` \(test_hooks.py:\d+\)"):
        _prepared(_net(CHANGING["after"], "last"), "symbolic")


@pytest.mark.parametrize("kind", LOOKING)
def test_by_tracing_a_hook_that_is_not_called_is_told(kind: str) -> None:
    net = _net(LOOKING[kind], "block")
    with pytest.warns(QuantizationWarning, match=r"hooks `look\w*` \(test_hooks.py:\d+\) of `block`.*JIT_STRIP"):
        prepare(net, (X,), qconfig_dict={"": qconfig()}, method="symbolic", out_dir=None)
    _act_everywhere(net, "jit")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["", "block", *(p for p in LEAVES if p != "quant")])
def test_backward_hooks_are_called(place: str, method: str) -> None:
    net = _net(
        lambda m: (m.register_full_backward_hook(look_back), m.register_full_backward_pre_hook(look_back)), place
    )
    if (place, method) == ("block", "symbolic"):
        with pytest.warns(QuantizationWarning, match="hooks `look_back` .* of `block`"):
            prepare(net, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
        return
    qat = _prepared(net, method)
    plain = copy.deepcopy(qat)
    for hooks in (plain.get_submodule(place)._backward_hooks, plain.get_submodule(place)._backward_pre_hooks):
        hooks.clear()
    for state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
        gradients = []
        for model in (qat, plain):
            set_fake_quantize(model, state)
            model.zero_grad()
            SEEN.clear()
            model(X).square().sum().backward()
            assert ["backward"] * 2 * (model is qat) == SEEN
            gradients.append(model.last.weight.grad)
        assert torch.equal(*gradients)


def _note_saving(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
    state[f"{prefix}extra"] = torch.ones(1)


def _note_before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    SEEN.append("save")


def _note_before_loading(module: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    state.pop(f"{prefix}extra")


def _note_loading(module: nn.Module, keys: Any) -> None:
    SEEN.append("load")


def _state_hooks(module: nn.Module) -> None:
    module.register_state_dict_post_hook(_note_saving)
    module.register_state_dict_pre_hook(_note_before_saving)
    module.register_load_state_dict_pre_hook(_note_before_loading)
    module.register_load_state_dict_post_hook(_note_loading)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["", "block", *LEAVES])
def test_hooks_of_state_dicts_are_called(place: str, method: str) -> None:
    qat = _prepared(_net(_state_hooks, place), method)
    for model in (qat, convert(qat), copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        SEEN.clear()
        state = model.state_dict()
        assert SEEN == ["save"]
        assert f"{place}.extra".removeprefix(".") in state
        model.load_state_dict(state)
        assert SEEN.count("load") == 1


def test_hooks_stay_in_eager_mode() -> None:
    net = _net(CHANGING["after, with kwargs"], "dequant")
    net.block.conv.register_forward_pre_hook(look_before_by_name, with_kwargs=True)
    net.block.relu.register_forward_hook(look_by_name, with_kwargs=True)
    wanted, _ = _run(net)
    fuse_modules(net, ["block.conv", "block.bn", "block.relu"], inplace=True)
    net.qconfig = qconfig("qint16")
    qat = calibrate(prepare_qat(net), (X,))
    for model in (qat, convert(qat)):
        out, seen = _run(model)
        assert float((out - wanted).norm() / wanted.norm()) < 0.01
        assert seen == ["before", "after", "after"]


def test_hooks_stay_with_fuse_fx() -> None:
    net = _net(CHANGING["before"], "")
    fused = fuse_fx(net)
    assert torch.allclose(_run(fused)[0], _run(net)[0], atol=1e-5)
    _act_everywhere(fused, "symbolic")


def test_a_float16_module_calls_its_hooks_once() -> None:
    set_march(March.NASH_P)
    net = _net(lambda m: (m.register_forward_hook(look), m.register_forward_pre_hook(look_before)), "act")
    half = {"": get_qconfig(), "module_name": [("act", get_qconfig(out_dtype=torch.float16))]}
    for method in METHODS:
        qat = calibrate(prepare(net, (X,), qconfig_dict=half, method=method, out_dir=None), (X,))
        for model in (qat, convert(qat)):
            assert _run(model)[1] == ["before", "after"]


def test_hooks_of_all_modules_see_prepared_ones() -> None:
    handle = register_module_forward_hook(lambda module, args, out: SEEN.append(type(module).__name__))
    try:
        for method in METHODS:
            qat = _prepared(Net().eval(), method)
            assert {"ConvReLU2d", "Conv2d", "Net"} <= set(_run(qat)[1])
    finally:
        handle.remove()


def test_nothing_is_left_of_who_watched_or_recorded() -> None:
    """torch goes its long way through every module as long as a mark of a hook is there."""
    net = _prepared(Net().eval(), "symbolic")
    with Watch(net, lambda call: None):
        net(X)
    record_program(convert(calibrate(net, (X,))), (X,))
    assert not torch_module._has_any_global_hook()


def test_a_mark_that_a_hook_left_behind_is_no_hook() -> None:
    register_module_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True).remove()
    assert torch_module._has_any_global_hook() and not is_any_everywhere()
    torch_module._global_forward_hooks_with_kwargs.clear()


def test_a_hook_of_a_process_that_had_more_hooks_is_not_overwritten() -> None:
    """torch numbers hooks anew in each process, and a loaded module brings the numbers of the process that saved it."""
    relu = nn.ReLU()
    keep(relu.register_forward_hook, print)
    [(number, hook)] = relu._forward_hooks.items()
    assert isinstance(hook, KeptHook) and hook.number == number
    saved = pickle.dumps(relu)
    RemovableHandle.next_id = number  # as in a process that has registered fewer
    loaded = pickle.loads(saved)
    loaded.register_forward_hook(print)
    assert len(loaded._forward_hooks) == 2


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(input=self.quant(x)))


def _note_named(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    SEEN.append((len(args), sorted(kwargs)))
    return args, {"input": kwargs["input"].clone()}


def _note_named_after(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> None:
    SEEN.append((len(args), sorted(kwargs), kwargs["input"].shape))


def _prepared_named(net: nn.Module, method: Any) -> nn.Module:
    if method == "eager":
        net.qconfig = qconfig()
        return prepare_qat(net)
    return prepare(net, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT, PrepareMethod.JIT_STRIP, "eager"])
def test_a_hook_finds_by_name_what_the_forward_names(method: Any) -> None:
    set_march(March.NASH_M)
    net = _Named().eval()
    net.conv.register_forward_pre_hook(_note_named, with_kwargs=True)
    net.conv.register_forward_hook(_note_named_after, with_kwargs=True)
    wanted, seen = _run(net)
    qat = calibrate(_prepared_named(net, method), (X,))
    for model in (qat, copy.deepcopy(qat), pickle.loads(pickle.dumps(qat)), convert(qat)):
        out, told = _run(model)
        assert told == seen and torch.allclose(out, wanted, atol=0.05)


def test_a_tools_hook_that_gets_by_position_what_the_forward_names_is_told() -> None:
    set_march(March.NASH_M)
    qat = _prepared_named(_Named().eval(), PrepareMethod.JIT)
    qat.conv.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    with pytest.warns(QuantizationWarning, match=r"(?s)`conv` \(test_hooks.py:\d+\) has hooks.*`input` by name"):
        calibrate(qat, (X,))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_computes_on_quantized_tensors_is_refused_with_what_it_is(kind: str) -> None:
    def doubled(module: nn.Module, args: tuple, *out: Tensor) -> Any:
        return out[0] * 2 if out else (args[0] * 2,)

    set_march(March.BAYES)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(3, 3, 1)))
    getattr(model.module[0], kind)(doubled)
    qat = prepare_qat_fx(model, {"": get_default_qconfig()})
    with pytest.raises(
        NotImplementedError,
        match=r"`torch.Tensor.mul` \(test_hooks.py:\d+\) is called by a hook of `Conv2d` at `module.0` .*JIT_STRIP",
    ):
        qat(torch.randn(1, 3, 4, 4))
