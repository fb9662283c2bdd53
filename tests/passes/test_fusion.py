"""Fusion: every documented combination, where the fused module goes, and what must not be fused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import FusionError, OperatorInputError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import intrinsic
from horizon_plugin_pytorch.nn import qat as qat_nn
from horizon_plugin_pytorch.nn.qat import conv2d as qat_conv2d
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    fuse_conv_shared_modules,
    fuse_fx,
    fuse_known_modules,
    fuse_modules,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.models import shake_norms
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False), lambda: nn.BatchNorm2d(4), (2, 4, 6, 6)),
    "conv-groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), lambda: nn.BatchNorm2d(4), (2, 4, 6, 6)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), lambda: nn.BatchNorm2d(4), (2, 4, 6, 6)),
    "conv-transpose-groups": (
        lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2, bias=False), lambda: nn.BatchNorm2d(4), (2, 4, 6, 6),
    ),
    "linear": (lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), (6, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), lambda: nn.BatchNorm1d(4), (2, 4, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), lambda: nn.BatchNorm3d(4), (2, 4, 3, 4, 5)),
    "conv-transpose1d": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1), lambda: nn.BatchNorm1d(4), (2, 4, 9)),
    "conv-transpose3d": (
        lambda: nn.ConvTranspose3d(4, 4, 3, padding=1, groups=2), lambda: nn.BatchNorm3d(4), (2, 4, 3, 4, 5),
    ),
    "conv-sync": (lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.SyncBatchNorm(4), (2, 4, 6, 6)),
    "linear-sync": (lambda: nn.Linear(4, 4), lambda: nn.SyncBatchNorm(4), (6, 4)),
}  # fmt: skip
ADDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "functional": lambda op, a, b: op.add(a, b),
    "torch.add": lambda op, a, b: torch.add(a, b),
    "+": lambda op, a, b: a + b,
    "+=": lambda op, a, b: _iadd(a, b),
    "method": lambda op, a, b: a.add(b),
}
RELUS: dict[str, tuple[Callable[[], nn.Module] | None, Callable[[Any, Any], Any]]] = {
    "relu": (nn.ReLU, lambda op, x: op(x)),
    "relu-in-place": (lambda: nn.ReLU(inplace=True), lambda op, x: op(x)),
    "relu6": (nn.ReLU6, lambda op, x: op(x)),
    "F.relu": (None, lambda op, x: F.relu(x)),
    "F.relu-in-place": (None, lambda op, x: F.relu(x, inplace=True)),
    "torch.relu": (None, lambda op, x: torch.relu(x)),
    "F.relu6": (None, lambda op, x: F.relu6(x)),
    "method": (None, lambda op, x: x.relu()),
}


def _iadd(a: Any, b: Any) -> Any:
    a += b
    return a


class Chain(nn.Module):
    """A layer, and what may follow it."""

    def __init__(self, layer: str, has_bn: bool = False, add: str = "", operand: int = 1, relu: str = "") -> None:
        super().__init__()
        make_layer, make_bn, _ = LAYERS[layer]
        self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.layer = make_layer()
        self.bn = make_bn() if has_bn else None
        self.plus = FloatFunctional() if add == "functional" else None
        self.relu = RELUS[relu][0]() if relu and RELUS[relu][0] is not None else None
        self.settings = (add, operand, relu)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        add, operand, relu = self.settings
        x, y = self.quant(x), self.other(y)
        x = self.layer(x)
        if self.bn is not None:
            x = self.bn(x)
        if add:
            x = ADDS[add](self.plus, x, y) if operand == 1 else ADDS[add](self.plus, y, x)
        if relu:
            x = RELUS[relu][1](self.relu, x)
        return self.dequant(x)


def _make(layer: str, *args: Any) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = LAYERS[layer][2]
    return shake_norms(Chain(layer, *args)).eval(), (torch.randn(shape), torch.randn(shape))


def _name(layer: str, add: str, relu: str) -> str:
    activation = {"": None}.get(relu, nn.ReLU6 if relu.endswith("6") else nn.ReLU)
    return intrinsic.Form(False, bool(add), activation).name_of(type(LAYERS[layer][0]()))


# Every layer, with and without batch norm, in every order of add and ReLU; then every way to write add and ReLU.
COMBINATIONS = [
    (layer, has_bn, add, 1, relu)
    for layer, has_bn, add, relu in itertools.product(LAYERS, (False, True), ("", "+"), ("", "relu", "relu6"))
    if has_bn or add or relu
]
COMBINATIONS += [("conv", True, add, operand, "relu") for add in ADDS for operand in (1, 2)]
COMBINATIONS += [("conv", True, "", 1, relu) for relu in RELUS] + [
    ("linear", False, "functional", 2, relu) for relu in RELUS
]


@pytest.mark.parametrize(("layer", "has_bn", "add", "operand", "relu"), dict.fromkeys(COMBINATIONS))
def test_fx_fuses_every_documented_combination(layer: str, has_bn: bool, add: str, operand: int, relu: str) -> None:
    model, inputs = _make(layer, has_bn, add, operand, relu)
    place = "layer" if not add else "plus" if add == "functional" else "_generated_add_0"
    fused = fuse_fx(model)
    if add or relu:
        assert type(fused.get_submodule(place)).__name__ == _name(layer, add, relu)
    with torch.no_grad():
        wanted = model(*[x.clone() for x in inputs])
        assert torch.allclose(fused(*inputs), wanted, atol=1e-5)
    qat = prepare_qat_fx(model, {"": qconfig()})
    assert type(qat.get_submodule(place)).__name__ == _name(layer, add, relu)
    assert type(qat.get_submodule(place)).__module__.startswith("horizon_plugin_pytorch.nn.qat.")
    for path in {"layer", "bn", "plus", "relu"} - {place}:
        member = getattr(qat, path, None)
        assert member is None or isinstance(member, nn.Identity), path
    called = [str(n.target) for n in qat.graph.nodes if n.op == "call_module"]
    assert called == ["quant", *(["other"] if add else []), place, "dequant"]
    calibrate(qat, inputs)
    with torch.no_grad():
        step = float(qat.get_submodule(place).activation_post_process.scale)
        assert float((qat(*inputs) - wanted).abs().max()) < 4 * step


@pytest.mark.in_turns("dtype", "layer", "add", "relu")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize(
    ("layer", "add", "relu"), list(itertools.product(LAYERS, ("", "functional"), ("relu", "relu6")))
)
def test_fused_modules_have_one_arithmetic(layer: str, add: str, relu: str, dtype: str, tmp_path: Any) -> None:
    from tests.routes import assert_one_arithmetic

    model, inputs = _make(layer, True, add, 2, relu)
    loud = tuple(8 * x for x in inputs)
    assert_one_arithmetic(prepared(model, inputs, dtype), inputs, tmp_path, [loud])


def test_fusing_first_gives_the_same_prepared_model() -> None:
    model, inputs = _make("conv", True, "+", 1, "relu")
    once, twice = (prepare_qat_fx(m, {"": qconfig()}) for m in (model, fuse_fx(model)))
    assert once.graph.python_code("self").src == twice.graph.python_code("self").src
    calibrate(once, inputs), calibrate(twice, inputs)
    assert torch.equal(once(*inputs), twice(*inputs))


class Two(nn.Module):
    """For what must not be fused."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.quant, self.dequant, self.how = QuantStub(), DeQuantStub(), how
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.plus = nn.Conv2d(4, 4, 1), FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        if self.how == "shared conv":
            return self.dequant(self.bn(self.conv(x))), self.dequant(self.relu(self.conv(x)))
        if self.how == "shared bn":
            return self.dequant(self.bn(self.conv(x))), self.dequant(self.bn(self.conv2(x)))
        if self.how == "several users":
            y = self.conv(x)
            return self.dequant(self.relu(y)), self.dequant(y)
        if self.how == "bn has several users":
            y = self.bn(self.conv(x))
            return self.dequant(self.relu(y)), self.dequant(y)
        if self.how == "shared relu":
            return self.dequant(self.relu(self.conv(x))), self.dequant(self.relu(self.conv2(x)))
        if self.how == "both operands":
            return self.dequant(self.relu(self.plus.add(self.conv(x), self.conv2(x))))
        if self.how == "add of itself":
            y = self.conv(x)
            return self.dequant(self.plus.add(y, y))
        if self.how == "add of a number":
            return self.dequant(self.relu(self.conv(x) + 1.0))
        if self.how == "shared functional":
            return self.dequant(self.plus.add(self.plus.add(self.conv(x), x), x))
        return self.dequant(self.relu(self.bn(self.conv(x))))


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("shared conv", {"conv": qat_conv2d.Conv2d, "bn": qat_nn.BatchNorm2d, "relu": qat_nn.ReLU}),
        ("shared bn", {"conv": qat_conv2d.Conv2d, "conv2": qat_conv2d.Conv2d, "bn": qat_nn.BatchNorm2d}),
        ("several users", {"conv": qat_conv2d.Conv2d, "relu": qat_nn.ReLU}),
        ("bn has several users", {"conv": qat_conv2d.Conv2d, "bn": nn.Identity, "relu": qat_nn.ReLU}),
        ("shared relu", {"conv": qat_conv2d.ConvReLU2d, "conv2": qat_conv2d.ConvReLU2d, "relu": nn.Identity}),
        ("both operands", {"plus": qat_conv2d.ConvAddReLU2d, "conv": nn.Identity, "conv2": qat_conv2d.Conv2d}),
        ("add of itself", {"conv": qat_conv2d.Conv2d, "plus": qat_nn.FloatFunctional}),
        (
            "add of a number",
            {"conv": qat_conv2d.Conv2d, "_generated_add_0": qat_nn.FloatFunctional, "relu": qat_nn.ReLU},
        ),
        ("shared functional", {"conv": qat_conv2d.Conv2d, "plus": qat_nn.FloatFunctional}),
    ],
)
def test_fx_fuses_only_what_belongs_together(how: str, kept: dict[str, type], tmp_path: Any) -> None:
    from tests.routes import assert_one_arithmetic

    model = shake_norms(Two(how)).eval()
    x = torch.randn(2, 4, 5, 5)
    qat = prepare_qat_fx(model, {"": qconfig()})
    assert {path: qat.get_submodule(path).__class__ for path in kept} == kept
    assert_one_arithmetic(calibrate(qat, (x,)), (x,), tmp_path)


def test_batch_norm_that_does_not_fit_is_not_folded() -> None:
    class Odd(Two):
        def __init__(self) -> None:
            super().__init__("plain")
            self.bn = nn.BatchNorm2d(4, track_running_stats=False)

    fused = fuse_fx(Odd().eval())
    assert type(fused.conv) is nn.Conv2d and isinstance(fused.bn, nn.BatchNorm2d)


@pytest.mark.parametrize("path", ["conv", "bn", "relu"])
def test_an_explicit_none_is_not_fused(path: str) -> None:
    model = shake_norms(Two("plain")).eval()
    model.get_submodule(path).qconfig = None
    fused = fuse_fx(model)
    assert type(fused.get_submodule(path)) is type(model.get_submodule(path))


def test_float_parts_are_not_fused_by_prepare() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv, self.tail, self.relu = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.tail(self.dequant(self.conv(self.quant(x)))))

    qat = prepare_qat_fx(Tail(), {"": qconfig()})
    assert type(qat.tail) is nn.Conv2d and type(qat.relu) is nn.ReLU and type(qat.conv) is qat_conv2d.Conv2d


class Eager(nn.Module):
    """A block as eager mode wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.add, self.relu = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            FloatFunctional(),
            nn.ReLU(),
        )
        self.tail, self.tail_relu = nn.Conv2d(4, 2, 1), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        out = self.relu(self.add.add(self.bn(self.conv(x)), x))
        return self.dequant(self.tail_relu(self.tail(out)))


def test_eager_fusion_places_and_runs() -> None:
    torch.manual_seed(0)
    model, x = shake_norms(Eager()).eval(), torch.randn(2, 4, 6, 6)
    fused = fuse_modules(model, [["conv", "bn", "add", "relu"], ["tail", "tail_relu"]])
    kinds = [type(getattr(fused, n)) for n in ("conv", "bn", "add", "relu", "tail", "tail_relu")]
    assert kinds == [nn.Identity, nn.Identity, intrinsic.ConvAddReLU2d, nn.Identity, intrinsic.ConvReLU62d, nn.Identity]
    assert type(model.conv) is nn.Conv2d and type(model.bn) is nn.BatchNorm2d  # a copy was fused
    assert torch.allclose(fused(x), model(x), atol=1e-5)
    fused.qconfig = qconfig()
    qat = calibrate(prepare_qat(fused), (x,))
    assert type(qat.add) is qat_conv2d.ConvAddReLU2d and type(qat.tail) is qat_conv2d.ConvReLU62d
    assert mismatches(as_numbers(qat(x)), as_numbers(convert(qat)(x))) == 0
    by_graph = prepared(model, (x,))
    assert torch.equal(by_graph(x), qat(x))  # eager and fx arrive at the same integers


def test_eager_fusion_in_place() -> None:
    model = Eager().eval()
    assert fuse_modules(model, ["conv", "bn", "add"], inplace=True) is model
    assert type(model.add) is intrinsic.ConvAdd2d and type(model.relu) is nn.ReLU


def test_eager_fusion_in_training_mode_folds_the_statistics() -> None:
    model, x = shake_norms(Eager()).train(), torch.randn(2, 4, 6, 6)
    fused = fuse_modules(model, ["conv", "bn"])
    assert fused.conv.training
    assert torch.allclose(fused.eval().conv(x), copy.deepcopy(model).eval().bn(model.conv(x)), atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "roles", ["bn", "relu", "bn relu", "add", "add relu", "bn add", "bn add relu", "relu6", "bn add relu6"]
)
def test_known_modules(layer: str, roles: str) -> None:
    make_layer, make_bn, _ = LAYERS[layer]
    make = {"bn": make_bn, "relu": nn.ReLU, "relu6": nn.ReLU6, "add": FloatFunctional}
    modules = [make_layer(), *(make[r]() for r in roles.split())]
    fused = fuse_known_modules([m.eval() for m in modules])
    place = 1 + roles.split().index("add") if "add" in roles else 0
    assert len(fused) == len(modules)
    assert [type(m) is nn.Identity for m in fused] == [i != place for i in range(len(fused))]
    if roles != "bn":
        assert type(fused[place]).__name__ == _name(
            layer, "+" if "add" in roles else "", roles.split()[-1] if "relu" in roles else ""
        )


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([nn.ReLU(), nn.Conv2d(1, 1, 1)], ("ReLU, Conv2d", "first")),
        ([nn.Conv2d(1, 1, 1), nn.Sigmoid()], ("Conv2d, Sigmoid",)),
        ([nn.Conv2d(1, 2, 1), nn.BatchNorm2d(3)], ("BatchNorm2d", "features")),
        ([nn.Linear(1, 2), nn.BatchNorm2d(2)], ("BatchNorm1d",)),
        ([nn.Conv2d(1, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)], ("order",)),
        ([nn.Conv2d(1, 2, 1)], ("Conv2d",)),
    ],
)
def test_what_cannot_be_fused_says_why(modules: list[nn.Module], words: tuple[str, ...]) -> None:
    with pytest.raises(FusionError) as error:
        fuse_known_modules(modules)
    assert all(word in str(error.value) for word in words)


def test_fuse_modules_names_what_it_cannot_find() -> None:
    with pytest.raises(FusionError, match=r"Eager.*`conv.missing`"):
        fuse_modules(Eager(), ["conv.missing", "bn"])
    with pytest.raises(FusionError, match=r"\['conv', 'relu', 'bn'\] of `Eager`"):
        fuse_modules(Eager(), ["conv", "relu", "bn"])


def test_a_custom_fuser_is_used() -> None:
    mapping = {(nn.Conv2d, nn.Sigmoid): lambda conv, sigmoid: nn.Sequential(conv, sigmoid)}
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sigmoid())
    fused = fuse_modules(net, ["0", "1"], fuse_custom_config_dict={"additional_fuser_method_mapping": mapping})
    assert type(fused[0]) is nn.Sequential and type(fused[1]) is nn.Identity


class Shared(nn.Module):
    """A head: one convolution for two levels, a batch normalisation for each, a ReLU for both."""

    def __init__(self, has_add: bool = False) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU()
        self.bns = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.adds = nn.ModuleList([FloatFunctional(), FloatFunctional()]) if has_add else None

    @property
    def names(self) -> list[list[str]]:
        middle = [[f"bns.{i}", *([f"adds.{i}"] if self.adds else [])] for i in range(2)]
        return [["conv", *names, "relu"] for names in middle]

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.quant(x)
        out = []
        for i, bn in enumerate(self.bns):
            y = bn(self.conv(x))
            out.append(self.dequant(self.relu(y if self.adds is None else self.adds[i].add(x, y))))
        return out


@pytest.mark.parametrize("mode", list(QATMode), ids=lambda m: m.name)
@pytest.mark.parametrize("has_add", [False, True])
def test_a_shared_layer_is_fused_with_the_batch_norm_of_each_branch(has_add: bool, mode: QATMode) -> None:
    torch.manual_seed(0)
    model, x = shake_norms(Shared(has_add)).eval(), torch.randn(2, 4, 6, 6)
    set_qat_mode(mode)
    try:
        fused = fuse_conv_shared_modules(model, model.names, inplace=False)
        fused.qconfig = qconfig()
        qat = calibrate(prepare_qat(fused), (x,))
    finally:
        set_qat_mode(QATMode.FuseBN)
    assert type(fused.conv) is type(fused.relu) is nn.Identity and type(model.conv) is nn.Conv2d
    form = intrinsic.Form(mode is not QATMode.FuseBN, has_add, nn.ReLU)
    for branch in fused.adds if has_add else fused.bns:
        assert type(branch).__name__ == form.name_of(nn.Conv2d)
    for found, wanted in zip(fused(x), model(x), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert mismatches(as_numbers(qat(x)), as_numbers(convert(qat)(x))) == 0
    weights = {id(m.weight) for m in qat.modules() if isinstance(m, qat_conv2d.Conv2d)}
    assert len(weights) == (2 if mode is QATMode.FuseBN else 1)


def test_sharing_says_what_it_cannot_fuse() -> None:
    with pytest.raises(FusionError, match=r"fuse_conv_shared_modules \['conv', 'relu', 'bns.0'\] of `Shared`"):
        fuse_conv_shared_modules(Shared(), [["conv", "relu", "bns.0"]])
    with pytest.raises(FusionError, match="no module `bns.7`"):
        fuse_conv_shared_modules(Shared(), ["conv", "bns.7"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_training", [False, True])
def test_torch_fuse_modules_takes_our_fuser(is_training: bool) -> None:
    torch.manual_seed(0)
    model, x = shake_norms(Eager()).eval(), torch.randn(2, 4, 6, 6)
    ours = fuse_modules(model, [["conv", "bn", "add", "relu"], ["tail", "tail_relu"]], fuser_func=fuse_known_modules)
    model.train(is_training)
    returned = torch.quantization.fuse_modules(
        model, [["conv", "bn", "add", "relu"], ["tail", "tail_relu"]], inplace=True, fuser_func=fuse_known_modules
    )
    assert returned is model and type(model.add) is intrinsic.ConvAddReLU2d and type(model.bn) is nn.Identity
    assert torch.equal(model.eval()(x), ours(x))


def test_pickled_fused_modules_come_back() -> None:
    import pickle

    fused = fuse_known_modules([nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2), nn.ReLU6()])[0]
    again = pickle.loads(pickle.dumps(fused))
    assert type(again) is type(fused) is intrinsic.ConvReLU63d
    x = torch.randn(1, 1, 2, 2, 2)
    assert torch.equal(again(x), fused(x))


class _EagerAdd(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.quant, self.conv, self.add, self.dequant = (
            QuantStub(),
            nn.Conv2d(4, 4, 1),
            FloatFunctional(),
            DeQuantStub(),
        )
        self.scale, self.is_first = FloatFunctional(), is_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.conv(self.scale.mul_scalar(x, 2.0))
        return self.dequant(self.add.add(y, x) if self.is_first else self.add.add(x, y))


@pytest.mark.parametrize("is_first", [True, False])
def test_eager_fusion_finds_the_layers_operand(is_first: bool) -> None:
    x = torch.randn(2, 4, 6, 6)
    set_march(March.BAYES)
    model = _EagerAdd(is_first)
    fused = fuse_modules(model, ["conv", "add"])
    torch.testing.assert_close(fused(x), model(x))
    fused.qconfig = default_qat_8bit_weight_16bit_act_fake_quant_qconfig
    qat = prepare_qat(copy.deepcopy(fused))
    qat(x)
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    quantized = convert(qat)
    assert torch.equal(quantized(x), qat(x))
    assert (qat(x) - model(x)).abs().max() < 0.05


def test_folding_a_batch_norm_of_features_insists_on_two_axes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(fuse_fx(model)(x), model(x))
    with pytest.raises(RuntimeError, match=r"BatchNorm1d is folded.*not for 3-d ones"):
        fuse_fx(model)(torch.randn(2, 4, 4))
    qat = prepared(QuantWrapper(model), (x,))
    for stage in (qat, convert_fx(qat)):
        with pytest.raises(OperatorInputError, match=r"`Linear` at `module.0`.*not for 3-d ones"):
            stage(torch.randn(2, 4, 4))


def test_a_residual_with_more_axes_than_the_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.other, self.linear = QuantStub(), QuantStub(), nn.Linear(6, 7)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linear(self.quant(x)) + self.other(y)

    inputs = (torch.randn(5, 6), torch.randn(3, 5, 7))
    for dtype in ("qint8", "qint16"):
        qat = prepared(Net(), inputs, dtype)
        assert torch.equal(qat(*inputs).int_repr(), convert_fx(qat)(*inputs).int_repr())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(64, 130, 3), nn.ConvTranspose2d(258, 64, 3, groups=2)], ids=["conv", "transposed"]
)
def test_large_weights_are_folded_as_small_ones_are(layer: Any, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer, bn = copy.deepcopy(layer).to(memory_format=memory_format), nn.BatchNorm2d(layer.out_channels)
    assert layer.weight.numel() > 2**16
    nn.init.uniform_(bn.running_var, 0.5, 2.0)
    wanted, _ = intrinsic.fold(layer, bn)  # with gradients, in one piece
    found = intrinsic.fold_bn(layer, bn).weight
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
