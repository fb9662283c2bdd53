"""The mode in which batch normalisation trains."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import quantization
from horizon_plugin_pytorch.nn import intrinsic
from horizon_plugin_pytorch.nn.qat import conv2d, conv_bn2d
from horizon_plugin_pytorch.nn.qat.gemm_bn import QATGemmBN
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    fuse_fx,
    fuse_modules,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.models import ZOO, shake_norms
from tests.routes import as_numbers, assert_one_arithmetic, calibrate, mismatches, qconfig

KEPT = [QATMode.WithBN, QATMode.WithBNReverseFold]


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    before = get_qat_mode()
    yield
    set_qat_mode(before)


@pytest.mark.parametrize(
    ("name", "value"), [("FuseBN", "fuse_bn"), ("WithBN", "with_bn"), ("WithBNReverseFold", "with_bn_reverse_fold")]
)
def test_modes_can_be_set_by_member_or_value(name: str, value: str) -> None:
    for spelling in (QATMode[name], value):
        set_qat_mode(spelling)
        assert get_qat_mode() is QATMode[name]
    assert pickle.loads(pickle.dumps(QATMode[name])) is QATMode[name]


def test_bn_is_folded_unless_asked_otherwise() -> None:
    assert get_qat_mode() is QATMode.FuseBN
    assert quantization.QATMode is QATMode
    assert quantization.set_qat_mode is set_qat_mode


@pytest.mark.parametrize("wrong", ["fuse", None, 1])
def test_an_unknown_mode_is_refused_with_the_choices(wrong) -> None:
    with pytest.raises(
        ValueError, match=r"unknown QAT mode.*QATMode\.FuseBN, QATMode\.WithBN, QATMode\.WithBNReverseFold"
    ):
        set_qat_mode(wrong)
    assert get_qat_mode() is QATMode.FuseBN


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d, (3, 4, 9)),
    "conv": (lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d, (3, 4, 6, 6)),
    "conv-depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d, (3, 4, 6, 6)),
    "conv-sync": (lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.SyncBatchNorm, (3, 4, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d, (2, 4, 4, 4, 4)),
    "conv-transpose1d": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1), nn.BatchNorm1d, (3, 4, 9)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), nn.BatchNorm2d, (3, 4, 6, 6)),
    "conv-transpose-groups": (
        lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d, (3, 4, 6, 6),
    ),
    "conv-transpose3d": (lambda: nn.ConvTranspose3d(4, 4, 3, padding=1), nn.BatchNorm3d, (2, 4, 4, 4, 4)),
    "linear": (lambda: nn.Linear(4, 4), nn.BatchNorm1d, (12, 4)),
}  # fmt: skip


class Block(nn.Module):
    """A layer, its batch normalisation, and what may follow."""

    def __init__(self, layer: str = "conv", has_add: bool = False, relu: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make_layer, make_bn, _ = LAYERS[layer]
        self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.layer, self.bn = make_layer(), make_bn(4)
        self.plus, self.relu = (FloatFunctional() if has_add else None), (None if relu is None else relu())

    @property
    def names(self) -> list[str]:
        return ["layer", "bn", *(["plus"] if self.plus else []), *(["relu"] if self.relu else [])]

    @property
    def place(self) -> str:
        return "plus" if self.plus is not None else "layer"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.quant(x), self.other(y)
        out = self.bn(self.layer(x))
        if self.plus is not None:
            out = self.plus.add(out, y)
        return self.dequant(out if self.relu is None else self.relu(out))


def _make(layer: str = "conv", *args: Any) -> tuple[Block, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = LAYERS[layer][2]
    return shake_norms(Block(layer, *args)).eval(), (torch.randn(shape), torch.randn(shape))  # type: ignore[return-value]


def _prepared(mode: QATMode, layer: str = "conv", *args: Any) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """The float model, its calibrated QAT form in VALIDATION and eval, and inputs."""
    set_qat_mode(mode)
    model, inputs = _make(layer, *args)
    return model, calibrate(prepare_qat_fx(model, {"": qconfig()}), inputs), inputs


def _train(qat: nn.Module, inputs: tuple[Tensor, ...], steps: int = 4, seed: int = 7) -> list[float]:
    """A few steps of training towards a target; the model is left in VALIDATION and eval."""
    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    optimizer = torch.optim.SGD(qat.parameters(), 0.02)
    generator = torch.Generator().manual_seed(seed)
    target, losses = torch.randn(qat(*inputs).shape, generator=generator), []
    for _ in range(steps):
        loss = (qat(*inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return losses


CHAINS = [(layer, False, None) for layer in LAYERS] + [(layer, True, nn.ReLU) for layer in LAYERS]
CHAINS += [("conv", False, nn.ReLU), ("conv", False, nn.ReLU6), ("conv", True, None), ("linear", True, nn.ReLU6)]


@pytest.mark.in_turns("mode", "layer", of=2)
@pytest.mark.parametrize(("layer", "has_add", "relu"), CHAINS)
@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_batch_norm_trains_and_folds_exactly(
    mode: QATMode, layer: str, has_add: bool, relu: Any, tmp_path: Any
) -> None:
    model, qat, inputs = _prepared(mode, layer, has_add, relu)
    module = qat.get_submodule(model.place)
    form = intrinsic.Form(True, has_add, relu)
    assert type(module).__name__ == form.name_of(type(model.layer)) and module.qat_mode is mode
    assert type(module.bn) is type(model.bn)
    losses = _train(qat, inputs)
    assert losses[-1] < losses[0]
    quantized = assert_one_arithmetic(qat, inputs, tmp_path, [tuple(8 * x for x in inputs)])
    assert type(quantized.get_submodule(model.place)).__name__ == form.without_bn.name_of(type(model.layer))
    with torch.no_grad():
        exact = qat(*inputs)
        set_fake_quantize(qat, FakeQuantState.QAT)  # eval: the folded layer in float, rounded
        step = float(module.activation_post_process.scale)
        assert float((qat(*inputs) - exact).abs().max()) <= 1.01 * step


@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_statistics_move_only_while_batch_norm_trains(mode: QATMode) -> None:
    _, qat, inputs = _prepared(mode)
    bn = qat.layer.bn

    def moves(state: FakeQuantState) -> bool:
        before, count = bn.running_mean.clone(), int(bn.num_batches_tracked)
        set_fake_quantize(qat, state)
        qat(*inputs)
        assert (int(bn.num_batches_tracked) != count) == (not torch.equal(before, bn.running_mean))
        return int(bn.num_batches_tracked) != count

    qat.train()
    assert moves(FakeQuantState.QAT) and moves(FakeQuantState.CALIBRATION) and not moves(FakeQuantState.VALIDATION)
    bn.eval()  # frozen, while the layer trains
    assert not moves(FakeQuantState.QAT)
    qat.eval()
    assert not any(moves(state) for state in FakeQuantState)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_calibration_computes_what_float_does(mode: QATMode, is_training: bool) -> None:
    model, qat, inputs = _prepared(mode, "conv", True, nn.ReLU)
    qat.train(is_training), model.train(is_training)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    assert torch.allclose(qat(*inputs), model(*inputs), atol=1e-5)
    assert torch.allclose(qat.plus.bn.running_var, model.bn.running_var)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_gradients_follow_float(mode: QATMode, layer: str) -> None:
    model, qat, inputs = _prepared(mode, layer)
    output = qat.layer.activation_post_process
    output.set_qparams(2 * output.scale)  # batch statistics give larger values than the running ones gave
    for state, is_training in (
        (FakeQuantState.QAT, True),
        (FakeQuantState.QAT, False),
        (FakeQuantState.VALIDATION, False),
    ):
        model.train(is_training), qat.train(is_training)
        set_fake_quantize(qat, state)
        found, wanted = _gradients(qat.layer, qat, inputs), _gradients(model, model, inputs)
        for name, gradient in found.items():
            assert torch.isfinite(gradient).all()
            if float(wanted[name].norm()) > 1e-4:  # a bias before batch statistics has none
                assert float(torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), 0)) > 0.98, (
                    name,
                    state,
                )


def _gradients(owner: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(*inputs)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    layer = getattr(owner, "layer", owner) if isinstance(owner, Block) else owner
    return {"weight": layer.weight.grad, "gamma": owner.bn.weight.grad, "beta": owner.bn.bias.grad}


class Detector(nn.Module):
    """Layers with batch norms, one of them called twice, and heads without."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.twice = QuantStub(), DeQuantStub(), nn.Conv2d(8, 8, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False),
            nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.norm, self.box = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.quant(x))
        y = torch.relu(self.norm(self.twice(y))) + torch.relu(self.norm(self.twice(-y)))
        return self.dequant(torch.exp(self.box(y) * 0.1))


def test_gradients_of_int16_networks_are_those_of_float_with_the_same_batch_norms() -> None:
    """Folded batch norms do not train: in train mode too, the gradient is that of a float model which froze them."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 16, 16), Detector()
    with torch.no_grad():
        for _ in range(60):  # statistics of the data, so that ranges are those of training too
            model(x)
    found: dict[Any, dict[str, Tensor]] = {}
    for mode in (QATMode.FuseBN, QATMode.WithBN):
        set_qat_mode(mode)
        qat = calibrate(prepare_qat_fx(model, {"": qconfig("qint16")}), (x,))
        set_fake_quantize(qat, FakeQuantState.QAT)
        qat.train()
        found[mode] = _all_gradients(qat, x)
    trained = _all_gradients(model.train(), x)
    for norm in (model.body[1], model.body[4]):
        norm.eval()
    frozen = _all_gradients(model, x)

    def likeness(one: dict[str, Tensor], other: dict[str, Tensor], name: str, factor: Any = 1.0) -> float:
        return float(torch.cosine_similarity((one[name] * factor).flatten(), other[name].flatten(), 0))

    for i in (0, 3):
        name, norm = f"body.{i}.weight", model.body[i + 1]
        folded = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().reshape(-1, 1, 1, 1)
        as_frozen = likeness(found[QATMode.FuseBN], frozen, name, folded)
        assert as_frozen > 0.99 and as_frozen > likeness(found[QATMode.FuseBN], trained, name, folded)
        assert likeness(found[QATMode.WithBN], trained, name) > 0.98
    for name in ("twice.weight", "norm.weight", "norm.bias", "box.weight", "box.bias"):
        assert likeness(found[QATMode.FuseBN], frozen, name) > 0.99, name
        assert likeness(found[QATMode.WithBN], trained, name) > 0.98, name


def _all_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x)
    (out - torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scheme", [torch.per_channel_symmetric, torch.per_tensor_symmetric])
def test_with_bn_deploys_the_integers_that_were_trained(scheme: torch.qscheme) -> None:
    set_qat_mode(QATMode.WithBN)
    model, inputs = _make()
    config = get_default_qconfig(weight_qkwargs={"qscheme": scheme})
    qat = calibrate(prepare_qat_fx(model, {"": config}), inputs)
    module = qat.layer
    trained = torch.div(module.weight, module.weight_fake_quant.scale.reshape(-1, 1, 1, 1)).round()
    sign = torch.sign(module.bn.weight).reshape(-1, 1, 1, 1)
    difference = (module.twin().weight - trained * sign).abs()
    assert float(difference.max()) <= 1 and float((difference > 0).float().mean()) < 0.05  # the largest is on an edge


@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_a_channel_without_gain_stays_finite_and_can_grow(mode: QATMode, tmp_path: Any) -> None:
    set_qat_mode(mode)
    model, inputs = _make()
    with torch.no_grad():
        model.bn.weight[1] = 0.0
    qat = calibrate(prepare_qat_fx(model, {"": qconfig()}), inputs)
    _train(qat, inputs)
    assert float(qat.layer.bn.weight[1].abs()) > 0
    assert all(torch.isfinite(p).all() for p in qat.parameters())
    assert_one_arithmetic(qat, inputs, tmp_path)


@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_a_change_of_batch_norm_reaches_the_integers(mode: QATMode) -> None:
    _, qat, inputs = _prepared(mode)
    before = qat(*inputs)
    assert qat.layer.twin() is qat.layer.twin()
    for tensor in (qat.layer.bn.weight, qat.layer.bn.running_mean, qat.layer.bn.running_var):
        with torch.no_grad():
            tensor.mul_(1.5)
        after = qat(*inputs)
        assert not torch.equal(before, after)
        before = after


@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_eager_and_fx_arrive_at_the_same_integers(mode: QATMode) -> None:
    model, by_graph, inputs = _prepared(mode, "conv", True, nn.ReLU)
    fused: Any = fuse_modules(model, model.names)
    assert type(fused.plus) is intrinsic.ConvBNAddReLU2d and torch.allclose(fused(*inputs), model(*inputs), atol=1e-5)
    fused.qconfig = qconfig()
    qat: Any = calibrate(prepare_qat(fused), inputs)
    assert type(qat.plus) is conv_bn2d.ConvBNAddReLU2d
    assert torch.equal(qat(*inputs), by_graph(*inputs))
    _train(qat, inputs), _train(by_graph, inputs)
    assert torch.equal(qat(*inputs), by_graph(*inputs))
    assert mismatches(as_numbers(qat(*inputs)), as_numbers(convert(qat)(*inputs))) == 0


@pytest.mark.parametrize("later", list(QATMode), ids=lambda m: m.name)
@pytest.mark.parametrize("first", list(QATMode), ids=lambda m: m.name)
@pytest.mark.parametrize("is_eager", [False, True])
def test_the_mode_may_change_between_fusion_and_prepare(first: QATMode, later: QATMode, is_eager: bool) -> None:
    set_qat_mode(first)
    model, inputs = _make("conv", True, nn.ReLU)
    fused: Any = fuse_modules(model, model.names) if is_eager else fuse_fx(model)
    assert torch.allclose(fused(*inputs), model(*inputs), atol=1e-5)
    set_qat_mode(later)
    fused.qconfig = qconfig()
    qat: Any = prepare_qat(fused) if is_eager else prepare_qat_fx(fused)
    keeps = first is not QATMode.FuseBN and later is not QATMode.FuseBN
    assert type(qat.plus) is (conv_bn2d.ConvBNAddReLU2d if keeps else conv2d.ConvAddReLU2d)
    calibrate(qat, inputs)
    wanted, step = model(*inputs), float(qat.plus.activation_post_process.scale)
    assert float((qat(*inputs) - wanted).abs().max()) < 4 * step


def test_checkpoints_have_the_names_of_layer_and_batch_norm() -> None:
    _, qat, inputs = _prepared(QATMode.WithBN)
    own = {key.removeprefix("layer.") for key in qat.state_dict() if key.startswith("layer.")}
    assert {"weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"} <= own
    assert {key.split(".")[0] for key in own} == {"weight", "bn", "weight_fake_quant", "activation_post_process"}
    _train(qat, inputs)
    _, other, _ = _prepared(QATMode.WithBN)
    other.load_state_dict(qat.state_dict())
    assert torch.equal(other(*inputs), qat(*inputs))
    assert torch.equal(pickle.loads(pickle.dumps(qat.layer)).bn.running_var, qat.layer.bn.running_var)
    assert torch.equal(copy.deepcopy(qat)(*inputs), qat(*inputs))


def test_modules_that_keep_batch_norm_are_where_the_guides_print_them() -> None:
    for name in ("ConvBN2d", "ConvBNReLU2d", "ConvBNReLU62d", "ConvBNAdd2d", "ConvBNAddReLU2d", "ConvBNAddReLU62d"):
        cls = getattr(conv_bn2d, name)
        assert cls.__module__ == "horizon_plugin_pytorch.nn.qat.conv_bn2d" and cls.__qualname__ == name
        assert issubclass(cls, QATGemmBN) and pickle.loads(pickle.dumps(cls)) is cls
    for name, float_class in intrinsic.FUSED_CLASSES.items():
        assert pickle.loads(pickle.dumps(float_class)) is getattr(intrinsic, name)


@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_a_batch_norm_after_a_linear_layer_wants_rows(mode: QATMode) -> None:
    _, qat, _ = _prepared(mode, "linear")
    with pytest.raises(RuntimeError, match="2-d inputs only"):
        qat(torch.randn(2, 4, 4), torch.randn(2, 4, 4))


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "unet", "detector"])  # those with layers before batch norms
@pytest.mark.parametrize("mode", KEPT, ids=lambda m: m.name)
def test_whole_models_train_with_batch_norm(mode: QATMode, name: str, tmp_path: Any) -> None:
    set_qat_mode(mode)
    make, shapes = ZOO[name]
    inputs = tuple(torch.randn(shape) for shape in shapes)
    model = shake_norms(make())
    qat = prepare_qat_fx(model, {"": get_default_qconfig()}).train()
    layers = [m for m in qat.modules() if isinstance(m, QATGemmBN)]
    assert layers
    before = [m.bn.running_mean.clone() for m in layers]
    for _ in range(2):
        qat(*inputs)
    assert all(not torch.equal(m.bn.running_mean, b) for m, b in zip(layers, before, strict=True))
    set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    assert_one_arithmetic(qat, inputs, tmp_path, has_float_code=True)
