"""What own scales leave alone: names that only begin alike, calls in float, modules without a scale, small tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.graph_text import graph_of
from horizon_plugin_pytorch.config.choice import Choice
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.passes.own_scales import OwnScales, _share_equal, add_names, own_scales_of, split_aliases
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, convert_fx
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    default_calibration_qconfig_setter,
)
from tests.routes import calibrate

METHODS = ("jit-strip", "symbolic")
LEVELS = [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(k)) * s for k, s in enumerate((0.1, 1, 5))]


class Stubs(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        for name, part in parts.items():
            self.add_module(name, part)


def _prepare(model: nn.Module, own_scales: Any = True, method: str = "jit-strip") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare(
            model.eval(), tuple(LEVELS), default_calibration_qconfig_setter, method, own_scales=own_scales, out_dir=None
        )


def _copies(model: nn.Module) -> set[str]:
    """The copies that were made, without what is inside them."""
    paths = [path for path, _ in model.named_modules() if "_call_" in path]
    return {path for path in paths if "_call_" not in path.rpartition(".")[0]}


# -- names


@pytest.mark.parametrize(
    ("names", "covered"),
    [
        (False, ()),
        (True, ("", "head", "head.conv", "header", "header.conv")),
        ((), ()),
        (("",), ("", "head", "head.conv", "header", "header.conv")),
        (("head",), ("head", "head.conv")),
        (("head.conv",), ("head.conv",)),
        (("head", "header.conv"), ("head", "head.conv", "header.conv")),
    ],
)
def test_a_name_covers_a_module_and_what_is_inside(names: Any, covered: tuple[str, ...]) -> None:
    own = OwnScales(names)
    assert tuple(p for p in ("", "head", "head.conv", "header", "header.conv") if own.covers(p)) == covered


@pytest.mark.parametrize(("given", "names"), [("head", ("head",)), (iter(["head"]), ("head",)), (True, True), ([], ())])
def test_what_a_user_may_name(given: Any, names: Any) -> None:
    assert OwnScales.of(given, Stubs(head=nn.ReLU()), "prepare").names == names


def test_a_line_of_the_model_has_the_name_of_its_module() -> None:
    with pytest.raises(QuantizationConfigError, match="name the module whose forward has that line, 'head'"):
        OwnScales.of(["head._generated_add_0"], Stubs(head=nn.ReLU()), "prepare")


@pytest.mark.parametrize(
    ("before", "after"), [(True, True), (False, ("b", "a")), (("a",), ("a", "b")), (("b", "c"), ("b", "c", "a"))]
)
def test_names_are_added_once_and_all_stays_all(before: Any, after: Any) -> None:
    own = OwnScales(before)
    add_names(own, ["b", "a"])
    assert own.names == after
    nothing = OwnScales(False)
    add_names(nothing, [])
    assert nothing.names is False


def test_choices_go_to_copies_that_have_none_of_their_own() -> None:
    own = OwnScales(True, copies={"head_call_1": "head", "head_call_2": "head", "tail_call_1": "tail"})
    first, named, copied, other = (Choice(None) for _ in range(4))
    choices = {"head": first, "head_call_1": copied, "head_call_2": named, "tail_call_1": other}
    own.spread(choices, named=["head_call_2"])
    assert choices == {"head": first, "head_call_1": first, "head_call_2": named, "tail_call_1": other}
    assert choices["head_call_1"] is first and choices["head_call_2"] is named and choices["tail_call_1"] is other


def test_a_copy_of_a_copy_goes_back_to_the_first() -> None:
    own = OwnScales(True, copies={"a_call_1": "a", "a_call_1.b_call_1": "a_call_1.b"}, relocated={"add": "a_call_1.b"})
    assert own.original("a_call_1.b_call_1.weight") == "a.b.weight"
    assert own.original("add.weight") == "add.weight" and own.owner("add.weight") == "a.b.weight"
    assert own.original("a_call_11") == "a_call_11"
    assert own.has_calls("a") and own.has_calls("a_call_1") and not own.has_calls("add")


class TakenName(Stubs):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [self.dequant(self.head(self.quant(x))) for x in (a, b, c)] + [self.head_call_1]


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_takes_no_name_of_the_model(method: str) -> None:
    model = TakenName(head=nn.Conv2d(4, 4, 1))
    model.head_call_1 = 3
    own = _prepare(model, ["head"], method)
    assert _copies(own) == {"head_call_1_", "head_call_2"} and own(*LEVELS)[-1] == 3


def test_a_sequential_would_run_the_copies() -> None:
    relu = nn.Sigmoid()
    model = nn.Sequential(QuantStub(), relu, relu, DeQuantStub())
    own = OwnScales(True)
    split_aliases(model, own)
    assert own.aliases == {"2": "1"}  # two names are two modules, and need no copy

    class Twice(nn.Sequential):
        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            return self[2](self[1](self[1](self[0](x))))

    with pytest.raises(QuantizationConfigError, match="`1` is called several times, and the model itself is a Seq"):
        _prepare(Twice(QuantStub(), nn.Sigmoid(), DeQuantStub()))


# -- what has no scale, or none of its own


class Pieces(Stubs):
    """A shared head in the quantized part; a shared layer, a shared pooling and a loop of functions in float too."""

    def __init__(self) -> None:
        super().__init__(
            head=nn.Conv2d(4, 4, 1), header=nn.Conv2d(4, 4, 1), pool=nn.MaxPool2d(2), stem=nn.Conv2d(4, 4, 1)
        )

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        outs = []
        for x in (a, b, c):
            y = self.header(self.head(self.quant(self.stem(x).tanh())))
            outs.append(self.dequant(self.pool(y * y)).tanh())
        return outs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("own_scales", "copies"),
    [
        (["head"], {"head_call_1", "head_call_2"}),
        (["header"], {"header_call_1", "header_call_2"}),
        (["pool", "stem", "dequant"], set()),
    ],
)
def test_only_what_is_named_and_has_a_scale_is_copied(own_scales: Any, copies: set[str], method: str) -> None:
    own = _prepare(Pieces(), own_scales, method)
    assert _copies(own) == copies
    calibrate(own, LEVELS)


def test_functions_in_float_are_no_calls_with_scales() -> None:
    copies = _copies(_prepare(Pieces(), True))
    assert {f"{name}_call_{n}" for name in ("quant", "head", "header", "_generated_mul_0") for n in (1, 2)} == copies


def test_a_module_that_is_called_once_in_float_and_once_on_integers_has_one_scale() -> None:
    class Both(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.act(a), self.dequant(self.act(self.quant(b))), c]

    assert _copies(_prepare(Both(act=nn.Sigmoid()))) == set()


@pytest.mark.parametrize("method", METHODS)
def test_names_of_a_module_without_a_scale_stay_one_module(method: str) -> None:
    class Names(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            parts = zip(self.parts, (a, b, c), strict=True)
            return [self.dequant(part(self.act(self.quant(x)))) for part, x in parts]

    model = Names(parts=nn.ModuleList([nn.Flatten(2)] * 3), act=nn.Sigmoid())
    own = OwnScales(True)
    split_aliases(model, own)
    assert own.aliases == {} and model.parts[0] is model.parts[2]
    calibrate(_prepare(model, True, method), LEVELS)


def test_names_are_split_only_where_they_are_covered() -> None:
    conv = nn.Conv2d(4, 4, 1)
    model = Stubs(one=nn.ModuleList([conv, conv]), two=nn.ModuleList([conv]), none=nn.Identity())
    model.none = None  # a part that is left out
    own = OwnScales(("two",))
    split_aliases(model, own)
    assert own.aliases == {"two.0": "one.0"}
    assert model.one[0] is model.one[1] is conv and model.two[0] is not conv
    assert model.two[0].weight is conv.weight


def test_a_module_that_is_registered_inside_of_itself_is_one() -> None:
    model = Stubs(head=nn.Conv2d(4, 4, 1))
    model.head.itself = model.head
    own = OwnScales(True)
    split_aliases(model, own)
    assert own.aliases == {} and model.head.itself is model.head


# -- which call is which


def test_calls_in_another_order_in_training_are_refused_with_the_line() -> None:
    class Reversed(Stubs):
        def first(self, x: Tensor) -> Tensor:
            return self.dequant(self.head(x))

        def second(self, x: Tensor) -> Tensor:
            return self.dequant(self.head(x.relu()))

        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            x = self.quant(a)
            calls = [self.second, self.first] if self.training else [self.first, self.second]
            return [call(x) for call in calls]

    with pytest.raises(QuantizationConfigError, match=r"`head` come in another order in training.*_guards.py:\d+"):
        _prepare(Reversed(head=nn.Conv2d(4, 4, 1)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("uses_both", [True, False])
def test_no_node_is_left_that_nobody_reads(uses_both: bool, method: str) -> None:
    class Functional(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.dequant(self.add.add(self.quant(x), self.quant(x))) for x in (a, b, c)]

    own: Any = _prepare(Functional(add=FloatFunctional()), ["add"] if uses_both else True, method)
    graph = graph_of(own)
    assert graph is not None and all(node.users for node in graph.nodes if node.op == "get_attr")
    assert {"add_call_1", "add_call_2"} <= _copies(own)


# -- tensors


@pytest.mark.parametrize(
    ("ours", "theirs", "is_shared"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), True),
        (torch.ones(3), torch.ones(3), False),  # scales and biases belong to the call
        (torch.tensor(1.0), torch.tensor(1.0), False),
        (torch.ones(2, 3), torch.zeros(2, 3), False),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int8), False),
        (torch.ones(2, 3), torch.ones(1, 3), False),
        (torch.ones(2, 3), None, False),
        (None, torch.ones(2, 3), False),
    ],
)
def test_equal_weights_are_kept_once(ours: Tensor | None, theirs: Tensor | None, is_shared: bool) -> None:
    module, owner = nn.Module(), nn.Module()
    module.register_buffer("weight", ours)
    owner.register_buffer("weight", theirs)
    _share_equal(owner, module)
    assert (module.weight is theirs) == is_shared
    assert is_shared or module.weight is ours


@pytest.mark.parametrize("method", METHODS)
def test_calls_of_equal_ranges_keep_scales_of_their_own(method: str) -> None:
    class Equal(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.dequant(self.head(self.quant(a))) for _ in range(3)]

    own = calibrate(_prepare(Equal(head=nn.Conv2d(4, 4, 1)), True, method), LEVELS)
    own.load_state_dict(own.state_dict(), strict=True)
    quantized = convert_fx(own) if isinstance(own, torch.fx.GraphModule) else convert(own)
    state = quantized.state_dict()
    copied, first = (
        {key.split(".", 1)[1] for key in state if key.startswith(path)} for path in ("head_call_2.", "head.")
    )
    assert first - copied == {"weight"}
    quantized.load_state_dict(state, strict=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_dict_before_calibration_loads(method: str) -> None:
    own = _prepare(Pieces(), True, method)
    own.load_state_dict(own.state_dict(), strict=True)


# -- names of one module


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("name", ["a", "b"])
def test_either_name_of_a_module_asks_for_two(name: str) -> None:
    model, own = Twice(), OwnScales((name,))
    split_aliases(model, own)
    assert own.aliases == {"b": "a"} and model.a is not model.b and model.a.weight is model.b.weight


def test_names_of_a_traced_model_stay_names_of_one_module() -> None:
    model, own = fx.symbolic_trace(Twice()), OwnScales(True)
    model.add_module("b", model.a)
    split_aliases(model, own)
    assert not own.aliases and model.a is model.b


# -- what is not called several times with a scale


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_functions_outside_the_quantized_part_are_no_use_of_a_name() -> None:
    class Post(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.post(self.dequant(self.head(self.quant(x)))) for x in (a, b, c)]

    model = Post(head=nn.Conv2d(4, 4, 1), post=Outside()).eval()
    with pytest.warns(QuantizationWarning, match="own_scales names 'post'"):
        prepare(model, tuple(LEVELS), default_calibration_qconfig_setter, own_scales=["head", "post"], out_dir=None)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_that_each_call_of_another_calls_once_is_not_redirected() -> None:
    class Outer(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.dequant(self.outer(self.quant(x))) for x in (a, b, c)]

    own = own_scales_of(_prepare(Outer(outer=Wrapped()), ["outer"]))
    assert own is not None and set(own.calls) == {"outer"}


def test_a_layer_that_is_left_float_runs_as_it_is() -> None:
    class Left(Stubs):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [self.dequant(self.left(self.head(self.quant(x)))) for x in (a, b, c)]

    model = Left(head=nn.Conv2d(4, 4, 1), left=nn.Conv2d(4, 4, 1))
    setters = (ModuleNameQconfigSetter({"left": None}), default_calibration_qconfig_setter)
    own = prepare(model.eval(), tuple(LEVELS), setters, own_scales=True, hybrid=True, out_dir=None)
    assert type(own.left) is nn.Conv2d and "forward" not in vars(own.left)
