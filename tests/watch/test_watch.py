"""`Watch`: every operator call of every kind of model, and a model that does not notice."""

from __future__ import annotations

import copy
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.runtime.hooks import ALL
from horizon_plugin_pytorch.runtime.located import QUICK, FusedAway
from horizon_plugin_pytorch.watch import Flow, OperatorCall, Watch
from tests.routes import qconfig
from tests.watch import models
from tests.watch.models import ROUTES, STAGES, at_stage, data, net_of, stages


def calls_of(model: nn.Module, *inputs: Any) -> list[OperatorCall]:
    found: list[OperatorCall] = []
    with Watch(model, found.append):
        model(*inputs)
    return found


FLOAT = [
    "quant", "stem", "[relu]", "block.conv", "block.bn", "block.sum[add]", "block.relu",
    "[add]", "[cat]", "[slice]", "[add](1)", "[cat](1)", "[slice](1)", "shared", "shared(1)", "[mul]",
    "[mul](1)", "[reshape]", "[split]", "drop", "fc", "dequant", "dequant(1)",
]  # fmt: skip
BY_RUNNING = [
    "quant", "stem", "block.sum", "_generated_add_0[add]", "_generated_cat_0[cat]", "[slice]",
    "_generated_add_0[add](1)", "_generated_cat_0[cat](1)", "[slice](1)", "shared", "shared(1)",
    "_generated_mul_0[mul]", "_generated_mul_1[mul_scalar]", "[reshape]", "[split]", "drop", "fc", "dequant",
    "dequant(1)",
]  # fmt: skip
BY_TRACING = [
    "quant", "stem", "block.sum", "_generated_add_0[add]", "_generated_cat_0[cat]", "[slice]",
    "_generated_add_1[add]", "_generated_cat_1[cat]", "[slice](1)", "shared", "shared(1)",
    "_generated_mul_0[mul]", "_leaf_halved._generated_mul_halved_6[mul_scalar]", "_leaf_halved[reshape]", "[split]",
    "drop", "fc", "dequant", "dequant(1)",
]  # fmt: skip
EAGER_FLOAT = [
    "quant", "stem", "block.conv", "block.bn", "block.sum[add]", "block.relu", "shared", "shared(1)", "product[mul]",
    "[reshape]", "[split]", "drop", "fc", "dequant", "dequant(1)",
]  # fmt: skip
EAGER = [
    "quant", "stem", "block.sum", "shared", "shared(1)", "product[mul]", "[reshape]", "[split]", "drop", "fc",
    "dequant", "dequant(1)",
]  # fmt: skip
WANTED = {"jit": BY_RUNNING, "jit-strip": BY_RUNNING, "symbolic": BY_TRACING, "eager": EAGER}


@pytest.mark.parametrize("route", ROUTES)
def test_every_call_is_told_in_order(route: str) -> None:
    for stage, model in stages(route):
        found = calls_of(model, data())
        floats = EAGER_FLOAT if route == "eager" else FLOAT
        assert [call.name for call in found] == (floats if stage == "float" else WANTED[route]), stage
        assert [call.index for call in found] == list(range(len(found)))
        assert all(call.row is not None for call in found)


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_has_the_line_of_the_users_model(route: str) -> None:
    source = Path(models.__file__).read_text().split("\n")
    for stage, model in stages(route):
        for call in calls_of(model, data()):
            file, number = call.line.split(":")
            word = {"split": "chunk", "slice": "cat", "reshape": "flatten(1)" if route != "eager" else "reshape"}
            wanted = word.get(call.operator, call.method.removesuffix("_scalar") or call.path.rpartition(".")[2])
            text = source[int(number) - 1].replace("* self", "mul").replace("* 0.5", "mul").replace("+ x", "add")
            is_there = wanted in text or (call.function is not None and call.operator in text)
            assert file == "models.py" and is_there, (stage, call.name, text)


@pytest.mark.in_turns("stage", "route", of=2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", ROUTES)
def test_the_model_does_not_notice(route: str, stage: str) -> None:
    model = at_stage(route, stage)
    seen = [_everything(copy.deepcopy(model), is_watched) for is_watched in (False, True)]
    assert seen[0].keys() == seen[1].keys()
    for name, plain in seen[0].items():
        watched = seen[1][name]
        assert torch.equal(plain, watched) if isinstance(plain, Tensor) else plain == watched, name


def _everything(model: nn.Module, is_watched: bool) -> dict[str, Any]:
    """All that two forwards, with backward passes, leave behind."""
    torch.manual_seed(5)
    found: dict[str, Any] = {}
    x = data(2).requires_grad_()
    before = _versions(model)
    for number in range(2):
        with Watch(model, _look) if is_watched else nullcontext():
            out = tensors_of(model(x))
        found |= {f"output {number} {i}": y.detach().clone() for i, y in enumerate(out)}
        if out[0].requires_grad:
            sum(y.square().sum() for y in out).backward()
    found |= {f"state {name}": value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {"gradient": x.grad} if x.grad is not None else {}
    after = _versions(model)
    found["writes"] = [b - a for a, b in zip(before, after, strict=True)]
    found["random numbers"] = torch.get_rng_state()
    found["hooks"] = [len(vars(m)[name]) for m in model.modules() for name in ALL]
    found["attributes"] = [sorted(vars(m).keys() - {QUICK}) for m in model.modules()]  # that is only to be faster
    return found


def _look(call: OperatorCall) -> None:
    """What a tool computes."""
    for x in (*call.inputs, *call.outputs):
        (x.dequantize() if isinstance(x, QTensor) else x).detach().abs().float().mean()


def _versions(model: nn.Module) -> list[int]:
    return [t._version for t in (*model.parameters(), *model.buffers())]


def test_it_leaves_nothing_behind() -> None:
    model = at_stage("jit", "qat")
    with pytest.raises(ZeroDivisionError), Watch(model, lambda call: 1 / 0):
        model(data())
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert not _get_current_function_mode_stack()
    assert [call.name for call in calls_of(model, data())] == BY_RUNNING


# -- memory


class Chain(nn.Module):
    """Operators of which each reads the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(9)))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layers(self.quant(x)))


@pytest.mark.in_turns("stage", "route", of=2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("route", ROUTES)
def test_no_tensor_lives_longer(route: str, stage: str) -> None:
    model = at_stage(route, stage, Chain()).eval()
    given: list[weakref.ref] = []
    alive: list[int] = []

    def note(call: OperatorCall) -> None:
        given.extend(weakref.ref(x) for x in call.outputs)
        alive.append(sum(ref() is not None for ref in given))

    with torch.no_grad(), Watch(model, note):
        out = model(data())
    assert len(alive) == 11 and max(alive) <= 3  # what the forward holds, what goes in and what comes out
    assert all(ref() is None or ref() is out for ref in given)


def test_what_a_consumer_keeps_stays() -> None:
    net, kept = nn.Sequential(nn.ReLU(), nn.ReLU()), []
    with Watch(net, lambda call: kept.append(call if call.path == "0" else call.released())):
        net(torch.ones(3))
    assert kept[0].output.tolist() == [1, 1, 1] and (kept[1].output, kept[1].args) == (None, ())


# -- all kinds of calls


class Strange(nn.Module):
    """Calls that are no calls of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv1d(2, 2, 1), nn.ReLU(inplace=True)
        self.hidden = [nn.Linear(3, 3)]
        self.lstm = nn.LSTM(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def helper(self, x: Tensor) -> Tensor:
        return x.T.contiguous()

    def forward(self, x: Tensor) -> Any:
        y = self.conv.forward(x)
        y = self.relu(y)
        y = self.hidden[0](y)
        y[0] = 0
        y += 1
        values, places = y.topk(2)
        (hidden, _), shape = self.lstm(y), y.shape
        self.count += 1
        return {"a": (values, places), "b": self.helper(hidden.sum(0)), "size": shape[0] * y.size(1)}


def test_functions_methods_writes_and_modules_that_are_no_children() -> None:
    net = Strange()
    found = calls_of(net, torch.ones(2, 3))
    assert [call.name for call in found] == [
        "[conv1d]", "relu", "", "[assign]", "[add]", "[topk]", "lstm", "[add](1)", "[sum]", "[reversed]", "[identity]",
    ]  # fmt: skip
    by_name = {call.name: call for call in found}
    assert len(by_name["[topk]"].outputs) == 2 and len(by_name["lstm"].outputs) == 3
    assert by_name[""].module is net.hidden[0] and by_name[""].operator == "linear"
    assert by_name["[assign]"].outputs[0] is by_name["[add]"].args[0]


@pytest.mark.parametrize("cls", [FloatFunctional, torch.nn.quantized.FloatFunctional])
def test_methods_of_a_float_functional_are_one_call(cls: type) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = cls()

        def forward(self, x: Tensor) -> Tensor:
            return self.f.cat([self.f.add_relu(x, y=x), self.f.mul_scalar(x, 2)], dim=0)

    found = calls_of(Net(), torch.ones(3))
    assert [(call.name, len(call.inputs)) for call in found] == [
        ("f[add_relu]", 2), ("f[mul_scalar](1)", 1), ("f[cat](2)", 2)
    ]  # fmt: skip
    assert found[2].args[1] == 0 and found[2].output.shape == (6,)


def test_nested_arguments_and_keywords() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Bilinear(2, 2, 1)

        def forward(self, batch: dict[str, Any]) -> Any:
            x, (y,) = batch["x"], batch["rest"]
            return torch.stack([self.up(input1=x, input2=y), self.up(x, y)], dim=0)

    net = Net()
    found = calls_of(net, {"x": torch.ones(1, 2), "rest": (torch.ones(1, 2),)})
    assert [(call.name, len(call.inputs)) for call in found] == [("up", 2), ("up(1)", 2), ("[stack]", 2)]
    assert found[0].kwargs.keys() == {"input1", "input2"}


def test_repetitions_count_from_the_beginning_of_each_forward() -> None:
    net = nn.Sequential(relu := nn.ReLU(), relu)
    found: list[OperatorCall] = []
    with Watch(net, found.append):
        net(torch.ones(1))
        net(torch.ones(1))
    assert [(call.index, call.repetition) for call in found] == [(0, 0), (1, 1)] * 2


def test_flow_follows_tensors_through_functions() -> None:
    net, flow, found = net_of("jit"), Flow(), []

    def note(call: OperatorCall) -> None:
        found.append((call.name, flow.producers(call.inputs)))
        flow.add(call)

    with Watch(net, note):
        net(data())
    names = [name for name, _ in found]
    taken = {name: [None if i is None else names[i] for i in producers] for name, producers in found}
    assert taken["quant"] == [None] and taken["block.sum[add]"] == ["block.bn", "[relu]"]
    assert taken["[cat]"] == ["block.relu", "[add]"] and taken["dequant(1)"] == ["[split]"]


# -- what is not told


def test_what_the_consumer_computes_and_other_models_are_not_told() -> None:
    net, other = nn.Sequential(nn.ReLU()), nn.Sequential(nn.Sigmoid())
    found: list[str] = []

    def note(call: OperatorCall) -> None:
        found.append(call.name)
        other(call.output.abs())

    with Watch(net, note):
        other(net(torch.ones(1)) + 1)
    assert found == ["0"]


def test_a_part_of_the_model_can_run_by_itself() -> None:
    net, found = net_of("jit"), []
    with Watch(net, lambda call: found.append(call.name)):
        net.block(torch.ones(1, 4, 2, 2))
    assert found == ["block.conv", "block.bn", "block.sum[add]", "block.relu"]


def test_calls_in_other_threads_are_not_told() -> None:
    net, found = nn.Sequential(nn.ReLU()), []
    with Watch(net, found.append):
        thread = threading.Thread(target=net, args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert not found


def test_two_watches_at_once() -> None:
    net, one, other = nn.Sequential(nn.ReLU(), nn.Flatten()), [], []
    with Watch(net, lambda call: one.append(call.name)), Watch(net, lambda call: other.append(call.name)):
        F.relu(net(torch.ones(1, 1)))
    assert one == other == ["0", "1"]


def test_after_an_interrupt_the_next_forward_is_told() -> None:
    net, found = at_stage("jit", "qat"), []

    def note(call: OperatorCall) -> None:
        found.append(call.name)
        if len(found) == 3:
            raise KeyboardInterrupt

    with Watch(net, note):
        with pytest.raises(KeyboardInterrupt):
            net(data())
        net(data())
    assert found[3:] == BY_RUNNING
    assert not _get_current_function_mode_stack()


def test_an_error_in_the_model_is_located() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    net = nn.Sequential(nn.ReLU(), nn.Sequential(Fails()))
    with Watch(net, lambda call: None) as watch:
        with pytest.raises(ValueError, match="no"):
            net(torch.ones(1))
        assert watch.failed_in == "1.0"
        net[0](torch.ones(1))
        assert watch.failed_in is None


def test_user_hooks_act_as_before() -> None:
    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    net[0].register_forward_hook(lambda module, args, out: out * 2)
    net[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    found = calls_of(net, torch.ones(1))
    assert [(call.name, float(call.inputs[0])) for call in found] == [("0", 1.0), ("[mul]", 1.0), ("1", 3.0)]


class _OneLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.layer, self.dequant = QuantStub(), nn.Linear(2, 2), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layer(self.quant(x)))


class _TwoLines(_OneLine):
    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.layer(x))


def test_graphs_with_equal_code_have_lines_of_their_own() -> None:
    """To Python their generated code is equal, though it stands for lines of different models."""
    set_march(March.NASH_M)
    parts = [prepare_qat_fx(part(), {"": qconfig()}) for part in (_OneLine, _TwoLines)]
    found: list[OperatorCall] = []
    both = nn.Sequential(*parts)
    with Watch(both, found.append):
        both(torch.ones(1, 2))
    lines = [int(call.line.rpartition(":")[2]) for call in found]
    assert [n - lines[0] for n in lines] == [0, 0, 0, 5, 6, 6]


@pytest.mark.slow
def test_integers_reach_the_consumer() -> None:
    for route in ROUTES:
        found = {call.name: call for call in calls_of(at_stage(route, "converted"), data())}
        assert isinstance(found["stem"].output, QTensor) and not isinstance(found["dequant"].output, QTensor)


@pytest.mark.parametrize("route", ROUTES)
def test_a_consumer_gets_true_answers_while_the_model_runs(route: str) -> None:
    seen = {}

    def look(call: OperatorCall) -> None:
        if call.path == "stem":
            module: Any = call.module
            is_float = isinstance(module, (nn.Conv2d, nn.Linear))
            seen["stem"] = str(call.output.dtype), str(module.weight.dtype), is_float

    model = at_stage(route, "converted")
    with Watch(model, look):
        model(data())
    assert seen["stem"] == ("qint8", str(model.stem.weight.dtype), False)


class InPlace(nn.Module):
    """Writes over what operators gave."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.again, self.act = nn.Conv2d(4, 4, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        y = self.act(self.again(x))
        y += x
        y.clamp_(-1, 1)
        F.relu(y, inplace=True)
        return self.dequant(y)


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("route", ["jit", "symbolic"])
def test_what_is_written_over_in_place_can_be_kept(route: str, stage: str) -> None:
    model = at_stage(route, stage, InPlace()).eval()
    kept: list[tuple[OperatorCall, list[Tensor]]] = []
    flow, producers = Flow(), {}

    def note(call: OperatorCall) -> None:
        kept.append((call, [x.dequantize().clone() if isinstance(x, QTensor) else x.clone() for x in call.outputs]))
        producers[call.name] = flow.producers(call.inputs)
        flow.add(call)

    with torch.no_grad(), Watch(model, note):
        model(data())
    # The ReLU that is fused into `conv` writes; what `act` gave is written over by the model, as in float.
    for call, (value,) in kept[:2]:
        assert torch.equal(call.output.dequantize(), value), call.name
    names = [call.name for call, _ in kept]
    last = next(i for i, name in enumerate(names) if name == "dequant")
    assert producers["again"] == [names.index("conv")] and producers["dequant"] == [last - 1]


def _with_parts_left() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(QuantStub(), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    x = torch.randn(1, 2, 8, 8)
    qconfigs = {"": get_default_qconfig()}
    model = prepare(net, (x,), qconfig_dict=qconfigs, method="jit-strip", out_dir=None).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    model(x)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model, x


def test_what_is_left_of_fused_modules_calls_hooks_of_others() -> None:
    model, x = _with_parts_left()
    left = [module for module in model.modules() if type(module) is FusedAway]
    assert len(left) == 2
    own, everywhere, calls = [], [], []
    one = left[0].register_forward_hook(lambda module, args, out: own.append(module))
    with torch.no_grad():
        with Watch(model, calls.append):
            model(x)
        one.remove()
        every = torch_module.register_module_forward_hook(lambda module, args, out: everywhere.append(module))
        try:
            with Watch(model, calls.append), Watch(model, calls.append):
                model(x)
        finally:
            every.remove()
    assert own == left[:1] and [module for module in everywhere if type(module) is FusedAway] == left
    assert [call.path for call in calls] == ["0", "1", "0", "0", "1", "1"]


def test_an_error_in_what_is_left_of_a_fused_module_has_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _with_parts_left()
    path = [path for path, module in model.named_modules() if type(module) is FusedAway][-1]

    def fail(self: FusedAway, x: Any) -> Any:
        if self is model.get_submodule(path):
            raise ValueError("no")
        return forward(self, x)

    forward = FusedAway.forward
    monkeypatch.setattr(FusedAway, "forward", fail)
    watch = Watch(model, lambda call: None)
    with watch, pytest.raises(ValueError, match="no"):
        model(x)
    assert watch.failed_in == path


def test_watches_inside_one_another_see_the_same() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.fc(x)).reshape(-1)

    net, outer, inner = Net(), [], []
    watches = [Watch(net, lambda call, names=names: names.append(call.name)) for names in (outer, inner)]
    with torch.no_grad(), watches[0], watches[1]:
        net(torch.ones(2, 4))
    assert outer == inner == ["fc", "[relu]", "[reshape]"]
