"""Code that tracing does not enter is quantized like any other: its modules, its functions, whatever Python it is."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import (
    ExportError,
    QuantizationWarning,
    UnknownCallError,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    auto_calibrate,
    calibrate,
    convert_fx,
    explain,
    fuse_fx,
    get_default_qconfig,
    load_calib_state_dict,
    load_observer_params,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, assert_one_arithmetic, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
Code = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


class Parts(nn.Module):
    """What the code of the tests may use."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.ff, self.ff2, self.fc = FloatFunctional(), FloatFunctional(), nn.Linear(8, 8)
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.block = Block()
        self.norm, self.inner_dequant, self.inner_quant = nn.LayerNorm(8), DeQuantStub(), QuantStub()
        self.level = nn.Parameter(torch.randn(2, 4, 1, 1))
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.register_buffer("shift", torch.randn(8))
        self.head = nn.Softmax(1)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def doubled(self, x: Tensor) -> Tensor:
        return self.conv(x) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x * 0.5)


class Single(Parts):
    """One wrapped method between the stubs."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.body = code

    def doubled(self, x: Tensor) -> Tensor:
        assert isinstance(self, Single) and self.__class__ is Single
        return super().doubled(x) + 1

    @wrap()
    def inner(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.quant(x)))


def helper(net: Any, x: Tensor) -> Tensor:
    return net.ff.mul(x, x) - x


def in_place(s: Any, x: Tensor) -> Tensor:
    y = s.conv(x)
    y += x
    y.mul_(0.5)
    y[:, :1] = x[:, :1]
    return F.relu_(y)


def loop(s: Any, x: Tensor) -> Tensor:
    for layer in s.layers:
        x = F.relu(layer(x)) + x
    return x


def branch(s: Any, x: Tensor) -> Tensor:
    return s.conv(x) if x.shape[0] > 1 and x.dim() == 4 and isinstance(s.conv, nn.Conv2d) else x.flatten()


def several(s: Any, x: Tensor) -> Tensor:
    parts = list(x.chunk(2, 1))
    store = {"a": parts[0] * 2, "b": parts[1] + 1}
    return torch.cat(list(store.values()), 1)


def float_inside(s: Any, x: Tensor) -> Tensor:
    y = s.inner_dequant(s.conv(x))
    y = torch.special.erf(y) if y.dim() == 4 else y
    return s.inner_quant(y) + x


CODE: dict[str, Code] = {
    "modules": lambda s, x: s.ff.add(s.fc(x), x),
    "conv, bn and relu": lambda s, x: s.relu(s.bn(s.conv(x))),
    "functions": lambda s, x: torch.sigmoid(x) * x + 0.5,
    "methods of tensors": lambda s, x: x.mean(1, keepdim=True).sub(x).abs().clamp(0, 2),
    "cat and stack": lambda s, x: torch.cat([x, x * 2], 1).sum(1) + torch.stack([x, x]).mean((0, 2)),
    "matmul": lambda s, x: torch.matmul(x, x.transpose(2, 3)).softmax(-1),
    "resize and pool": lambda s, x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda s, x: F.grid_sample(x, torch.zeros(2, 2, 2, 2), align_corners=False),
    "layer norm": lambda s, x: s.norm(x) + F.layer_norm(x, (8,)),
    "parameter": lambda s, x: x * s.level.view(2, 4, 1, 1) + s.shift,
    "part of a parameter": lambda s, x: x + torch.split(s.level, 1)[1],
    "layer as a function": lambda s, x: F.linear(x, s.weight, s.shift),
    "weight of a layer": lambda s, x: F.conv2d(x, s.conv.weight, padding=1),
    "module of the user's": lambda s, x: s.block(x) + s.block(x * 0.5),
    "helper": lambda s, x: helper(s, x) + helper(s, x * 0.1),
    "in place": in_place,
    "loop": loop,
    "control flow": branch,
    "containers": several,
    "float inside": float_inside,
    "own positions": lambda s, x: x + torch.arange(8.0),
    "getattr by name": lambda s, x: getattr(s, "co" + "nv")(x),
    "mask": lambda s, x: torch.where(x > 0, x, x * 0.1),
    "casts": lambda s, x: (x.float() + 1).to(x.dtype).type_as(x),
    "nothing": lambda s, x: x,
    "maximum and pow": lambda s, x: torch.maximum(x, -x).pow(2) / 3,
    "the method of a base class": lambda s, x: s.doubled(x),
    "one module twice": lambda s, x: s.fc(s.fc(x)),
    "unused results": lambda s, x: x.max(1)[0] + x.topk(1, 1)[0].squeeze(1),
}


def near(net: nn.Module, qat: nn.Module, x: Tensor = X, limit: float = 0.1) -> None:
    with torch.no_grad():
        wanted, found = as_numbers(net(x)), as_numbers(qat(x))
    for a, b in zip(wanted, found, strict=True):
        assert float((a - b).norm() / a.norm().clamp_min(1e-6)) < limit


def train(qat: nn.Module, x: Tensor = X) -> list[nn.Parameter]:
    """A step of training; the parameters that have got a gradient."""
    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    parameters = list(qat.parameters())
    optimizer = torch.optim.SGD(parameters, 1e-3)
    sum(y.float().pow(2).mean() for y in pytree.tree_leaves(qat(x.clone().requires_grad_()))).backward()
    optimizer.step()
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return [p for p in parameters if p.grad is not None]


@pytest.mark.parametrize("name", CODE)
def test_wrapped_code_goes_all_the_way(name: str, tmp_path: Any) -> None:
    net = Single(CODE[name]).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(X)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    near(net, qat)
    train(qat)
    assert_one_arithmetic(qat, (X,), tmp_path, [(X * 0.5,)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE)
def test_a_checkpoint_fits_a_model_that_has_not_run(name: str) -> None:
    net = Single(CODE[name]).eval()
    first = prepare_qat_fx(net, {"": qconfig()})
    calibrate(first, [X], progress=False)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second = prepare_qat_fx(net, {"": qconfig()})
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        assert str(second.load_state_dict(state)) == "<All keys matched successfully>"
        assert second.state_dict().keys() == state.keys()
        third = prepare_qat_fx(net, {"": qconfig()})
        assert not load_calib_state_dict(third, state)
    converted = convert_fx(second)  # before it has ever run
    wanted = first(X)
    assert torch.equal(converted.eval()(X), wanted)
    for model in (second, third):
        model.eval()
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        assert torch.equal(model(X), wanted)
        assert model.state_dict().keys() == state.keys()
        assert torch.equal(convert_fx(model)(X), wanted)


@pytest.mark.parametrize("name", ["modules", "conv, bn and relu", "parameter", "module of the user's", "in place"])
def test_a_copy_is_a_model_of_its_own(name: str) -> None:
    qat = prepare_qat_fx(Single(CODE[name]).eval(), {"": qconfig()})
    calibrate(qat, [X], progress=False)
    wanted = qat(X)
    twin = copy.deepcopy(qat)
    assert torch.equal(twin(X), wanted)
    train(twin)
    assert torch.equal(qat(X), wanted)  # nothing of the copy's is the original's


@wrap()
def gate(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    return torch.sigmoid(x) * y * scale


@wrap
def run_layer(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + x


clipped = wrap(lambda x: x.clamp(-1, 1) * 2)


@wrap()
def nested(x: Tensor) -> Tensor:
    return gate(x, clipped(x)) + clipped(x * 0.5)


@wrap()
class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ff = nn.Linear(8, 8), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.ff.add(self.fc(x), x) * 0.5

    def boxes(self, x: Tensor) -> Tensor:
        return self.fc(x).exp()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    @wrap()
    def fold(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fold(x) + x)


class Whole(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(), Head()])
        self.decoder = Decoder()

    @wrap()
    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x * 2

    @wrap()
    def named(self, x: Tensor) -> dict[str, Any]:
        return {"sum": x + 1, "list": [x * 3, x.abs()], "size": x.shape[1]}

    @wrap()
    def real(self, x: Tensor) -> Tensor:
        return torch.special.erf(self.inner_dequant(self.conv(x)))

    @wrap()
    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.inner_dequant(x))

    @wrap()
    def sizes(self, x: Tensor) -> tuple[int, int]:
        return x.shape[2], x.shape[3]

    @wrap()
    def network(self, x: Tensor) -> Tensor:
        return self.inner_dequant(F.relu(self.conv(self.inner_quant(x)) + 1))

    @wrap()
    def entrance(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(self.inner_quant(x)))

    @wrap()
    def with_level(self, parts: Any, x: Tensor, flag: bool = True) -> Tensor:
        return x + parts[0] * parts[1] if flag else x


class Called(Whole):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.body = code

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def joined(s: Any, x: Tensor) -> Any:
    a, b = s.pair(s.quant(x))
    return s.dequant(F.relu(a + b)), s.dequant(torch.cat([a, b], 1))


def by_name(s: Any, x: Tensor) -> Any:
    out = s.named(s.quant(x))
    return s.dequant(out["sum"]), s.dequant(out["list"][0] + out["list"][1]), s.dequant(out["sum"].mean(1))


def by_size(s: Any, x: Tensor) -> Any:
    x = s.quant(x)
    h, w = s.sizes(x)[0], s.sizes(x)[1]
    return s.dequant(x.reshape(2, 4, h * w) + 1)


CALLS: dict[str, Code] = {
    "a function": lambda s, x: s.dequant(gate(s.quant(x), s.conv(s.quant(x)), scale=0.5)),
    "a lambda": lambda s, x: s.dequant(clipped(s.quant(x)) + s.quant(x)),
    "a function of a function": lambda s, x: s.dequant(nested(s.quant(x))),
    "a function that takes a module": lambda s, x: s.dequant(run_layer(s.fc, s.quant(x))),
    "a class": lambda s, x: s.dequant(s.decoder(s.quant(x))),
    "another method of a class": lambda s, x: s.dequant(s.decoder.boxes(s.quant(x))),
    "a method of a part": lambda s, x: s.dequant(s.heads[1](s.heads[0](s.quant(x)))),
    "a part called twice": lambda s, x: s.dequant(s.heads[0](s.heads[0](s.quant(x)))),
    "a function called twice": lambda s, x: s.dequant(clipped(clipped(s.quant(x)) * 0.3)),
    "two results": joined,
    "a dictionary": by_name,
    "sizes": by_size,
    "real numbers": lambda s, x: s.real(s.quant(x)) * 2 - 1,
    "a float module after a stub inside": lambda s, x: s.scores(s.conv(s.quant(x))),
    "stubs inside": lambda s, x: s.network(x) * 2,
    "a QuantStub inside": lambda s, x: s.dequant(s.conv(s.entrance(x)) + 1),
    "parts of a parameter": lambda s, x: s.dequant(s.with_level(torch.split(s.level, 1), s.quant(x))),
    "a module that traced code calls": lambda s, x: s.dequant(s.conv(s.pair(s.quant(x))[0])),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_code_is_called_in_every_way(name: str, is_fused: bool, tmp_path: Any) -> None:
    net = Called(CALLS[name]).eval()
    qat = prepare_qat_fx(fuse_fx(net) if is_fused else net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    train(qat)
    state = qat.state_dict()
    assert_one_arithmetic(qat, (X,), tmp_path, [(X * 0.5,)], has_float_code=True)
    fresh = prepare_qat_fx(fuse_fx(net) if is_fused else net, {"": qconfig()})
    fresh.load_state_dict(state)
    fresh.eval()
    set_fake_quantize(fresh, FakeQuantState.VALIDATION)
    for a, b in zip(as_numbers(qat(X)), as_numbers(fresh(X)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_every_call_in_the_graph_has_scales_of_its_own() -> None:
    qat = prepare_qat_fx(Called(CALLS["a function called twice"]).eval(), {"": qconfig()})
    calibrate(qat, [X], progress=False)
    scales = {n: float(m.scale) for n, m in qat.named_modules() if isinstance(m, FakeQuantize) and "lambda" in n}
    assert len(scales) == 2 and len(set(scales.values())) == 2


# -- when the modules are made


def test_a_call_that_never_ran_while_the_model_learnt_is_an_error() -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if x.shape[0] > 2 else x + 1

    qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with pytest.raises(UnknownCallError, match=r"`add` at `_leaf_inner` \(test_wrapped_code.py:\d+\).*example_inputs"):
        qat(X)
    calibrate(qat, [X], progress=False)
    more = torch.cat([X, X])
    for model in (qat, convert_fx(qat)):
        model(X)
        with pytest.raises(UnknownCallError, match="`sigmoid` at `_leaf_inner`.*CALIBRATION or QAT"):
            model(more)
    state = qat.state_dict()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(more)  # both branches now
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert torch.equal(convert_fx(qat)(more), qat(more)) and state.keys() < qat.state_dict().keys()


def test_names_do_not_depend_on_the_order_in_which_calls_are_met() -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) * 2 if x.shape[0] == 2 else torch.cat([x, x], 2) * 3

    models = [prepare_qat_fx(Single(code).eval(), {"": qconfig()}) for _ in range(2)]
    inputs = (X, torch.cat([X, X]) * 4)
    for model, order in zip(models, (inputs, inputs[::-1]), strict=True):
        calibrate(model, list(order), progress=False)
    first, second = models
    assert first.state_dict().keys() == second.state_dict().keys()
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(first(x), second(x)) for x in inputs)


def test_a_module_of_the_user_may_be_called_like_a_generated_one() -> None:
    class Net(Parts):
        def __init__(self) -> None:
            super().__init__()
            self._generated_add_0 = Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self._generated_add_0(self.quant(x)))

    torch.manual_seed(0)
    net, data = Net().eval(), torch.randn(1, 4, 6, 6)
    first, second = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(first, [data], progress=False)
    second.load_state_dict(first.state_dict())
    set_fake_quantize(second.eval(), FakeQuantState.VALIDATION)
    assert torch.equal(first(data), second(data))


def test_a_line_that_runs_with_other_settings_has_a_module_for_each() -> None:
    net = Single(lambda s, x: sum(torch.softmax(x, dim) for dim in (1, 2))).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    assert sum("_generated_softmax" in name and name.count(".") == 1 for name, _ in qat.named_modules()) == 2
    near(net, qat)
    assert torch.equal(convert_fx(qat)(X), qat(X))


@pytest.mark.parametrize("name", ["functions", "module of the user's", "float inside", "layer as a function"])
def test_with_example_inputs_everything_is_there_at_once(name: str) -> None:
    net = Single(CODE[name]).train()
    one = prepare_qat_fx(net, {"": qconfig()}, example_inputs=(X,))
    other = prepare(net, (X,), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC, out_dir=None)
    for model in (one, other):
        keys = list(model.state_dict())
        quantizers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantize)}
        seen = [n for n, m in quantizers.items() if m.has_statistics and not m.is_fixed and "weight_fake" not in n]
        assert model.training and not seen
        assert all(m.is_observing and m.is_quantizing for m in quantizers.values())
        calibrate(model, [X], progress=False)
        assert list(model.state_dict()) == keys
        near(net.eval(), model)
        net.train()


def test_a_trained_scale_that_comes_after_the_optimizer_is_told() -> None:
    lsq = get_default_qconfig(activation_fake_quant="lsq", weight_fake_quant="lsq")
    net = Single(CODE["functions"]).train()
    late = prepare_qat_fx(net, {"": lsq})
    set_fake_quantize(late, FakeQuantState.QAT)
    with pytest.warns(QuantizationWarning, match=r"`sigmoid` at `_leaf_inner`.*optimizer.*example_inputs"):
        late(X)
    early = prepare_qat_fx(net, {"": lsq}, example_inputs=(X,))
    set_fake_quantize(early, FakeQuantState.QAT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        early(X)
    assert len(list(early.parameters())) == len(list(late.parameters()))


# -- formats


def formats(model: nn.Module) -> dict[str, str]:
    return {n.removesuffix(".activation_post_process"): str(m.dtype) for n, m in model.named_modules()
            if isinstance(m, FakeQuantize) and n.endswith("activation_post_process")}  # fmt: skip


@pytest.mark.slow
def test_formats_reach_modules_and_functions_in_wrapped_code() -> None:
    net = Single(lambda s, x: torch.sigmoid(s.fc(x)) + x).eval()
    wide = prepare_qat_fx(net, {"": qconfig(), "module_name": [("fc", qconfig("qint16"))]}, example_inputs=X)
    found = formats(wide)
    assert found.pop("fc") == "qint16" and set(found.values()) == {"qint8"}
    name = next(n for n in found if "_generated_add" in n)
    named = prepare_qat_fx(net, {"": qconfig(), "module_name": {name: qconfig("qint16")}}, example_inputs=X)
    assert formats(named)[name] == "qint16"
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8, "fc": qint16, name: qint16})], save_dir=None)
    chosen = formats(prepare_qat_fx(net, qconfig_setter=setter, example_inputs=X))
    assert chosen["fc"] == chosen[name] == "qint16" and sorted(chosen.values()).count("qint8") == 2
    late = prepare_qat_fx(net, qconfig_setter=setter)
    calibrate(late, [X], progress=False)
    assert formats(late) == chosen
    assert torch.equal(convert_fx(late)(X), late(X))


def test_code_without_a_qconfig_refuses_quantized_tensors() -> None:
    net = Called(CALLS["a method of a part"]).eval()
    net.heads[1].qconfig = None
    qat = prepare_qat_fx(net, {"": qconfig()})
    with pytest.raises(NotImplementedError, match=r"`Conv2d` at `heads.1.conv` \(test_wrapped_code.py.*no qconfig"):
        qat(X)


def test_what_the_chip_does_not_have_is_refused_with_its_line() -> None:
    set_march(March.BERNOULLI2)
    for code in (lambda s, x: s.head(x), lambda s, x: x.softmax(1)):
        qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
        with pytest.raises(UnsupportedOperatorError, match=r"softmax.*test_wrapped_code.py:\d+.*supported on bayes"):
            calibrate(qat, [X], progress=False)
        with pytest.raises(UnsupportedOperatorError, match=r"softmax.*supported on bayes"):
            prepare_qat_fx(Single(code).eval(), {"": qconfig()}, example_inputs=X)


def test_values_that_code_reads_are_real_and_cannot_be_exported(tmp_path: Any) -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return s.conv(x) if float(x.max()) > 0 and bool(x.mean() < 10) and x[0, 0, 0, 0].item() < 9 else x

    net = Single(code).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    quantized = convert_fx(qat)
    assert torch.equal(quantized(X), qat(X))
    with pytest.raises(ExportError, match="reads a number out of a computed tensor"):
        export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx")


PASSED_BY: dict[str, Code] = {
    "torch.tensor": lambda s, x: x * torch.tensor(x.mean()),
    "torch.asarray": lambda s, x: x * torch.asarray(x.mean(), copy=True),
    "torch.Tensor.new_tensor": lambda s, x: x * s.shift.new_tensor(x.mean()),
    "torch.full": lambda s, x: x + torch.full((8,), fill_value=x.max()),
    "torch.full_like": lambda s, x: x + torch.full_like(x, x.max()),
    "torch.add": lambda s, x: x + torch.add(s.shift, s.shift, alpha=x.max()),
    "torch.arange": lambda s, x: x + torch.arange(0, x.max()).sum(),
    "torch.nn.functional.leaky_relu": lambda s, x: x + F.leaky_relu(s.shift, x.max()),
}


@pytest.mark.parametrize("name", PASSED_BY)
def test_a_tensor_that_torch_takes_for_a_number_is_refused_with_its_line(name: str) -> None:
    code = PASSED_BY[name]
    qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
    line = f"test_wrapped_code.py:{code.__code__.co_firstlineno}"
    with pytest.raises(UnsupportedOperatorError, match=f"`{name}` at `_leaf_inner` .{line}. takes a quantized tensor"):
        calibrate(qat, [X], progress=False)


def test_a_tensor_stays_one_and_numbers_are_real_where_torch_makes_tensors() -> None:
    said: list[str] = []

    def code(s: Any, x: Tensor) -> Tensor:
        said.append(f"{x.max():.1f}")
        return torch.as_tensor(x) * torch.tensor([x.max(), float(x.mean())])[0] + torch.full((8,), x.max().item())

    net = Single(code).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    assert torch.equal(convert_fx(qat)(X), qat(X))
    assert set(said) == {f"{X.max():.1f}"}


def test_weights_of_functions_are_loaded_once() -> None:
    net = Single(CODE["layer as a function"]).eval()
    first, second = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(first, [X], progress=False)
    second.load_state_dict(first.state_dict())
    second.weight.data.mul_(0.5)  # as an average of models does, before it has run
    wanted = second.weight.detach().clone()
    set_fake_quantize(second.eval(), FakeQuantState.VALIDATION)
    second(X)
    assert torch.equal(second.weight, wanted)


def test_threads_meet_calls_at_once() -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(qat, [X] * 8))
    assert all(torch.equal(results[0], one) for one in results)
    names = [name for name, _ in qat.named_modules() if name.rpartition(".")[2].startswith("_generated_")]
    assert len(names) == len({name.rstrip("_") for name in names}) == 5


# -- other verbs


class Plain(Parts):
    """Code that a file can have."""

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return F.relu(self.block(self.conv(x)) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


@pytest.mark.slow
def test_a_file_has_the_whole_model() -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    early = pickle.loads(pickle.dumps(qat))  # before any run
    for model in (qat, early):
        calibrate(model, [X], progress=False)
    assert torch.equal(qat(X), early(X))
    wanted = qat(X)
    for model in (qat, convert_fx(qat)):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(X), wanted)


def test_statistics_are_copied_to_a_model_that_has_not_run() -> None:
    net = Plain().eval()
    source, target = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(source, [X], progress=False)
    assert load_observer_params(source, target) == []
    target.eval()
    set_fake_quantize(target, FakeQuantState.VALIDATION)
    assert torch.equal(target(X), source(X))


def test_calibration_goes_on_in_a_model_that_has_not_run(tmp_path: Any) -> None:
    batches = [X * (i + 1) for i in range(4)]
    whole = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    calibrate(whole, batches, progress=False)

    def stop(model: nn.Module, batch: Tensor) -> None:
        if batch is batches[2]:
            raise KeyboardInterrupt
        model(batch)

    file = tmp_path / "state"
    broken = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    broken.load_state_dict(whole.state_dict())
    fresh = copy.deepcopy(prepare_qat_fx(Plain().eval(), {"": qconfig()}))
    for model in (broken, fresh):
        model.load_state_dict({k: v for k, v in whole.state_dict().items() if "_generated_" not in k}, strict=False)
    with pytest.raises(KeyboardInterrupt):
        calibrate(broken, batches, forward=stop, state_file=file, progress=False)
    assert calibrate(fresh, batches, state_file=file, progress=False).steps == 4
    scales = {n: m.scale for n, m in whole.named_modules() if isinstance(m, FakeQuantize)}
    found = {n: m.scale for n, m in fresh.named_modules() if isinstance(m, FakeQuantize)}
    assert scales.keys() == found.keys() and all(torch.equal(found[n], scale) for n, scale in scales.items())


def test_the_check_and_explain_list_what_is_in_wrapped_code(tmp_path: Any) -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()}, example_inputs=X)
    check_qat_model(qat, X, save_results=True, out_dir=tmp_path)
    text = (tmp_path / "model_check_result.txt").read_text()
    name = next(n for n, _ in qat.named_modules() if "_generated_add" in n)
    assert name in text and "block.conv" in text and "conv" in text
    assert name in str(explain(qat))


# -- lines that run several times


def levels_of_functions(s: Any, x: Tensor) -> Tensor:
    low, high = [F.interpolate(v * f, scale_factor=2.0, mode="bilinear") for v, f in ((x, 1.0), (x, 30.0))]
    return low + high


def levels_of_a_module(s: Any, x: Tensor) -> Tensor:
    low, high = [s.conv(v) for v in (x, s.ff.mul(x, 30.0))]
    return low + high


def levels_of_a_functional(s: Any, x: Tensor) -> Tensor:
    low, high = [s.ff.mul(v, v) for v in (x, s.ff2.mul(x, 6.0))]
    return low + high


@pytest.mark.parametrize("is_trained", [False, True], ids=["calibrated", "trained"])
@pytest.mark.parametrize("code", [levels_of_functions, levels_of_a_module, levels_of_a_functional])
def test_calls_of_one_line_in_a_loop_are_one_batch_of_a_loop_of_the_users(code: Code, is_trained: bool) -> None:
    net = Single(code).eval()
    if is_trained:  # every call is a batch where `prepare_qat_fx` trains, as the guides print it
        setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})])
        qat = prepare(net, X, setter, method=PrepareMethod.SYMBOLIC).eval()
    else:
        qat = prepare_qat_fx(net, {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.QAT if is_trained else FakeQuantState.CALIBRATION)
    for _ in range(5):
        qat(X)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    near(net, qat, limit=0.04)
    copied = copy.deepcopy(qat)
    set_fake_quantize(copied, FakeQuantState.CALIBRATION)
    copied(X * 0.01)  # a batch of its own, not the rest of the last one
    assert any(m._batch is not None and m._batch[3].max() < 1 for m in copied.modules() if isinstance(m, ObserverBase))


@pytest.mark.slow
def test_threads_run_a_loop_that_is_met_for_the_first_time() -> None:
    for _ in range(5):
        qat = prepare_qat_fx(Single(CODE["loop"]).eval(), {"": qconfig()})
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(qat, [X] * 16))
        assert all(torch.equal(results[0], one) for one in results)


class _Queries(nn.Module):
    """A head whose queries are made of parameters alone, in code that tracing does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.embed, self.norm, self.mlp = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.unused = nn.Linear(4, 4)

    @wrap()
    def add(self, x: Tensor, is_more: bool = False) -> Tensor:
        return self.unused(x) if is_more else x + self.mlp(self.norm(self.embed.weight))[:1]

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.add(self.quant(x)))


@pytest.mark.parametrize("run", [calibrate, auto_calibrate])
def test_layers_that_compute_on_parameters_alone_are_said_to_stay_float(run: Callable) -> None:
    torch.manual_seed(0)
    model = prepare(_Queries(), (X[0, 0, :, :4],), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC)
    result = run(model, [X[0, i, :, :4] for i in range(4)])
    assert not result.unseen and result.left_float == ["embed", "norm", "mlp.0", "unused"]
    assert "No finite value" not in str(result) and "Nothing with a scale reached: embed, norm, mlp.0" in str(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = convert_fx(model)
        assert torch.equal(quantized(X[0, 0, :, :4]), model(X[0, 0, :, :4]))
    kinds = {type(quantized.get_submodule(path)) for path in result.left_float}
    assert kinds == {nn.Embedding, nn.LayerNorm, nn.Linear}


def test_layers_that_compute_on_parameters_alone_do_not_keep_calibration_from_settling() -> None:
    torch.manual_seed(0)
    net = _Queries()
    del net.unused
    model = prepare(net, (X[0, 0, :, :4],), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC)
    assert calibrate(model, [X[0, 0, :, :4]] * 20, patience=3).has_settled
