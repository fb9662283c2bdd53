"""The user's forward runs again in the prepared and in the converted model, and gets the answers it got in float."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    fuse_fx,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.runtime.located import FusedAway
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig, run_onnx


class Net(nn.Module):
    """Stubs around `body`, which a subclass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self.quant(x)))


X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))


def _prepared(cls: type[nn.Module], x: Tensor = X) -> nn.Module:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    model = cls().eval()
    wanted = model(x)
    qat = prepare(model, (x,), qconfig_dict={"": qconfig()}, out_dir=None)
    calibrate(qat, (x,))
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        assert torch.allclose(qat.eval()(x), wanted, atol=1e-5)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat


def _goes_all_the_way(qat: nn.Module, folder, x: Tensor = X) -> None:
    with torch.no_grad():
        trained, quantized = as_numbers(qat(x)), convert(qat)
        integers = as_numbers(quantized(x))
    assert mismatches(trained, integers) == 0
    assert mismatches(integers, run_onnx(export_quantized_onnx(quantized, (x,), folder / "model.onnx"), (x,))) == 0


class Asks(Net):
    """The forward reads settings of layers that are fused away, fused or converted, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.tag = ("stem", 3)

    def body(self, x: Tensor) -> Tensor:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        x = F.pad(x, (0, (kernel - stride) % 2, 0, 0))
        x = self.relu(self.bn(self.conv(x)))
        assert self.bn.num_features == x.shape[1] and self.bn.eps == 1e-5 and not self.relu.inplace
        return x.reshape(x.shape[0], self.conv.out_channels, -1) if self.conv.tag[0] == "stem" else x


class AsksBeforeAdd(Net):
    """A layer that is fused into the add behind it is read as well."""

    def body(self, x: Tensor) -> Tensor:
        return self.conv(x) + x[:, :, :: self.conv.stride[0], :: self.conv.stride[1]][..., 1:, 1:]


@pytest.mark.parametrize("cls", [Asks, AsksBeforeAdd])
def test_settings_of_replaced_modules_can_be_read(cls, tmp_path):
    qat = _prepared(cls)
    assert not [key for key in qat.state_dict() if "tag" in key or "stride" in key]
    for copied in (copy.deepcopy(qat), pickle.loads(pickle.dumps(qat))):
        assert torch.equal(copied(X), qat(X))
    _goes_all_the_way(qat, tmp_path)


class InLists(Net):
    """Modules are kept in a list, a tuple and a dict beside the tree, and called from there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.conv, self.bn]
        self._rest = {"act": (self.relu,)}

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self._rest["act"][0](x)


def test_modules_in_plain_containers_are_the_ones_in_the_tree(tmp_path):
    qat = _prepared(InLists)
    assert qat.layers[0] is qat.conv and qat._rest["act"][0] is qat.relu and type(qat.bn) is FusedAway
    quantized = convert(qat)
    assert quantized.layers[0] is quantized.conv is not qat.conv
    _goes_all_the_way(qat, tmp_path)


GLOBAL = torch.rand(4, 1, 1) + 0.5


class Kept(Net):
    """Tensors that are no buffers: in a list, a global, from numpy, and given the type of a quantized one."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = [torch.randn(1, 4, 1, 1), torch.tensor([[0.5]])]
        self.positions = torch.arange(4)

    def body(self, x: Tensor) -> Tensor:
        y = self.conv(x) * GLOBAL
        y = y + self.shifts[0].detach().type_as(y)
        y = y + self.shifts[1].expand_as(y)
        y = y + torch.from_numpy(np.linspace(-1, 1, 4, dtype=np.float32)).reshape(4, 1, 1)
        return y[:, self.positions]


def test_tensors_that_are_no_buffers_are_quantized_where_they_meet_the_model(tmp_path):
    qat = _prepared(Kept)
    before = qat(X)
    qat.shifts[0] += 1  # not frozen: the forward finds the tensor where it always does
    assert not torch.equal(qat(X), before)
    qat.shifts[0] -= 1
    _goes_all_the_way(qat, tmp_path)


def drop_path(x: Tensor, keep: float, training: bool) -> Tensor:
    if not training:
        return x
    mask = (keep + torch.rand((x.shape[0], 1, 1, 1), device=x.device)).floor_()
    return x.div(keep) * mask


class DropPath(nn.Module):
    """The other common way to write it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.5).div_(0.5)
        return x * mask


class StochasticDepth(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(4, 4, 3, padding=1), DropPath()

    def body(self, x: Tensor) -> Tensor:
        x = x + drop_path(self.conv(x), 0.5, self.training)
        return x + self.drop(torch.sigmoid(x))


def test_stochastic_depth_trains_on_real_values_and_is_not_deployed(tmp_path):
    x = X.repeat(8, 1, 1, 1)
    qat = _prepared(StochasticDepth, x)
    assert not [name for name, _ in qat.named_modules() if "mul" in name or "div" in name or "_quant_" in name]
    set_fake_quantize(qat, FakeQuantState.QAT)
    qat.train()
    torch.manual_seed(0)
    out = qat(x)
    out.square().mean().backward()
    assert qat.conv.weight.grad.abs().sum() > 0
    seen: list[Tensor] = []
    qat.drop.register_forward_hook(lambda module, args, out: seen.append(out.dequantize() / args[0].dequantize()))
    qat(x)
    factors = seen[0].nan_to_num(0).flatten(1)
    assert set(factors.round(decimals=4).unique().tolist()) == {0.0, 2.0}  # whole samples, in real numbers
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    _goes_all_the_way(qat, tmp_path, x)


class Standardised(Net):
    """The weight is normalised in every forward, so it is a result and no parameter."""

    def body(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.relu(self.bn(F.conv2d(x, weight, self.conv.bias, self.conv.stride)))


def test_a_weight_that_is_computed_of_parameters_is_quantized_in_every_forward(tmp_path):
    qat = _prepared(Standardised)
    before = qat(X)
    with torch.no_grad():
        qat.conv.weight[:, 0] *= 3
    assert not torch.equal(qat(X), before)
    set_fake_quantize(qat, FakeQuantState.QAT)
    qat.train()(X).square().mean().backward()
    assert qat.conv.weight.grad.abs().sum() > 0
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    copy.deepcopy(qat)
    _goes_all_the_way(qat, tmp_path)
    with torch.no_grad():
        qat.conv.weight[:, 0] *= 3
        quantized = convert(pickle.loads(pickle.dumps(qat)))  # without a run in between
        assert torch.equal(quantized(X), qat(X))


class Filters(Net):
    """The weight comes from the data."""

    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((0, 2), keepdim=True).reshape(4, -1)[:, :4].reshape(4, 4, 1, 1)
        return self.dequant(F.conv2d(self.quant(x), weight))


def test_a_weight_that_is_computed_of_data_is_refused():
    set_march(March.NASH_E)
    with pytest.raises(UnsupportedOperatorError, match="its weight is computed"):
        prepare(Filters(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)


class ComputedBias(Net):
    """The bias is a product of two parameters."""

    def __init__(self, is_added: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4, 1, 1)), nn.Parameter(torch.randn(4))
        self.gain, self.is_added = nn.Parameter(torch.rand(4)), is_added

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.quant(x), self.bias * self.gain
        if self.is_added:
            return self.dequant(F.conv2d(x, self.weight) + bias.reshape(1, -1, 1, 1))
        return self.dequant(F.conv2d(x, self.weight, bias))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_bias_that_is_computed_is_refused_with_what_to_write_instead(method):
    set_march(March.NASH_E)
    with pytest.raises(UnsupportedOperatorError, match=r"its bias is computed .* add it to the layer's result"):
        prepare(ComputedBias(False), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    net = ComputedBias(True).eval()
    qat = prepare(net, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    calibrate(qat, (X,))
    with torch.no_grad():
        assert float((qat.eval()(X) - net(X)).norm() / net(X).norm()) < 0.05


class Noisy(Net):
    """Random numbers in eval mode, before the quantized part, or in train mode alone."""

    def __init__(self, is_always: bool) -> None:
        super().__init__()
        self.is_always = is_always

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        if self.is_always or self.training:
            x = x + torch.rand(x.shape[-1]) * 0.1
        return self.dequant(x * 2.0)


def test_random_numbers_in_eval_mode_are_told(tmp_path, recwarn):
    set_march(March.NASH_E)
    for is_always in (True, False):
        recwarn.clear()
        qat = prepare(Noisy(is_always).eval(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)
        calibrate(qat, (X,))
        export_quantized_onnx(convert(qat), (X,), tmp_path / "noisy.onnx")
        told = [str(w.message) for w in recwarn.list if "random" in str(w.message)]
        if is_always:
            first, second = told
            assert "draws random numbers in eval mode, too (test_users_forward.py:" in first
            assert "draws random numbers in the top module (test_users_forward.py:" in second
        else:
            assert not told


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize(
    "normed",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm],
)
def test_normalised_weights_are_folded_into_the_layer(normed, method):
    set_march(March.NASH_E)
    layers = (QuantStub(), normed(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4), nn.ReLU(), DeQuantStub())
    model = nn.Sequential(*layers).eval()
    names = list(dict(model.named_parameters()))
    with torch.no_grad():  # the older ways of torch keep a result, which could not be copied
        wanted = model(X)
    qat = prepare(model, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None).eval()
    assert list(dict(model.named_parameters())) == names  # the caller's model is as it was
    assert type(qat.get_submodule("1")).__name__ == "ConvReLU2d" and repr(qat.get_submodule("2")) == "Identity()"
    assert isinstance(qat.get_submodule("1").weight, nn.Parameter)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    assert torch.allclose(qat(X), wanted, atol=1e-5)
    copy.deepcopy(qat)


class ReadsWeight(Net):
    """The weight of a layer with batch normalisation is used again."""

    def body(self, x: Tensor) -> Tensor:
        return F.conv2d(self.relu(self.bn(self.conv(x))), self.conv.weight)


def test_a_weight_that_is_read_again_is_not_changed_by_folding():
    qat = _prepared(ReadsWeight)  # compares with float
    assert type(qat.bn) is not FusedAway


class Layers(Net):
    """The forward asks what its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.SiLU())


class AsksKind(Layers):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert not isinstance(layer, nn.Identity)
            if isinstance(layer, nn.Conv2d):
                x = F.pad(x, (1, 1, 1, 1))
            x = layer(x)
            if isinstance(layer, (nn.ReLU, nn.BatchNorm2d)):
                x = x * 0.5
        return x


class AsksName(Layers):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if layer.__class__.__name__ == "ReLU" or layer.__class__ is nn.SiLU:
                x = x + 1
        return x


@pytest.mark.parametrize("cls", [AsksKind, AsksName])
def test_a_forward_that_asks_what_a_layer_is_gets_the_answer_of_float(cls, tmp_path):
    qat = _prepared(cls)
    _goes_all_the_way(qat, tmp_path)
    assert not isinstance(qat.layers[2], nn.ReLU)  # nobody else does
    copy.deepcopy(qat)
    assert type(pickle.loads(pickle.dumps(qat)).layers[1]) is FusedAway


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x)) + x


class Loops(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = self[-1](self[0](x))
        for i in range(len(self)):
            y = self[i](y)
        for layer in self:
            y = layer(y)
        return torch.cat([x, y], 1)[:, :4]


class Lists(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.children():
            y = layer(y)
        for _, layer in self.named_children():
            y = layer(y)
        for name in self._modules:
            y = self._modules[name](y)
        return y * len([m for m in self.modules() if isinstance(m, nn.Conv2d)])


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        y = [branch(x) for branch in self.values()]
        assert list(self) == list(self.keys()) == [name for name, _ in self.items()] == ["a", "b"]
        return y[0] * y[1]


def _layers() -> tuple[nn.Module, ...]:
    return nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Residual(*_layers()),
        lambda: Loops(*_layers()),
        lambda: Lists(*_layers()),
        lambda: Branches({"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}),
    ],
)
def test_a_forward_that_lists_its_children_meets_only_its_own(make, tmp_path):
    class Listing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.block = make()

        def body(self, x: Tensor) -> Tensor:
            return self.conv(self.block(x))

    qat = _prepared(Listing)
    generated = [name for name, _ in qat.block.named_children() if name.startswith("_generated_")]
    assert generated and any(key.startswith(f"block.{generated[0]}.") for key in qat.state_dict())
    _goes_all_the_way(qat, tmp_path)
    again = copy.deepcopy(qat)
    assert torch.equal(again(X), qat(X)) and all(not m.training for m in again.modules())


def test_frozen_layers_stay_frozen_after_folding():
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            for p in (*self.conv.parameters(), *self.bn.parameters()):
                p.requires_grad_(False)

        def body(self, x: Tensor) -> Tensor:
            return self.relu(self.bn(self.conv(x)))

    assert not any(p.requires_grad for p in _prepared(Frozen).parameters())


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.conv.register_forward_hook(lambda module, args, out: self.seen.append(out))

    def body(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


@pytest.mark.slow
def test_hooks_of_the_user_see_what_they_saw_in_float():
    model = Hooked().eval()
    set_march(March.NASH_E)
    qat = prepare(model, (X,), qconfig_dict={"": qconfig()}, out_dir=None).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    model.seen.clear()
    qat.seen.clear()
    with torch.no_grad():
        model(X), qat(X)
    (in_float,), (in_qat,) = model.seen, qat.seen  # a hook that holds the model holds the prepared one after prepare
    assert in_float.min() < 0 and torch.allclose(in_qat.dequantize(), in_float, atol=1e-5)


class AsksType(Layers):
    """What cannot be answered as in float: nothing stands between `type` and the object."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if type(layer) is nn.ReLU:
                x = x * 0.5
        return x


class AsksTypeToo(AsksType):
    def body(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x.flip(1) if type(self.conv) is nn.Conv2d else x


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (AsksType, r"`mul` in the top module \(test_users_forward.py:\d+\) ran in float and does not run now"),
        (AsksTypeToo, r"its outputs differ by \d+.\d% although nothing is rounded"),
    ],
)
def test_a_forward_that_takes_another_path_is_found_by_prepare(cls, what):
    set_march(March.NASH_E)
    torch.manual_seed(0)
    with pytest.warns(QuantizationWarning, match=what):
        prepare(cls(), (X,), qconfig_dict={"": qconfig()}, out_dir=None)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(4, 4, 1), "block"

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.seq, self.blocks = nn.Sequential(_Block(), nn.ReLU()), nn.ModuleList([_Block()])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.blocks[0](self.seq(self.quant(x))))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def test_containers_unused_modules_attributes_and_methods_survive() -> None:
    qat = prepared(_Container(), (X,))
    for stage in (qat, copy.deepcopy(qat), convert_fx(qat)):
        assert isinstance(stage.seq, nn.Sequential) and isinstance(stage.blocks, nn.ModuleList)
        assert stage.seq[0].name == "block" and type(stage.unused) is nn.Linear
        assert "unused.weight" in stage.state_dict()
        torch.testing.assert_close(stage.loss(X), stage(X).square().mean())


def test_constants_and_private_attributes_of_the_model_are_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub()
            self._k, self._n = torch.full((1,), 3.0), 7

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(self.quant(x))) * torch.tensor(2.0) + self._k

        @staticmethod
        def halved(x: Tensor) -> Tensor:
            return x / 2

        @property
        def number(self) -> int:
            return self._n

    model = Net()
    qat = prepared(model, (X,), "qint16")
    for stage in (qat, copy.deepcopy(qat), convert_fx(qat)):
        assert (stage(X) - model(X)).abs().max() < 0.05
        assert stage.number == 7 and float(stage.halved(torch.tensor(4.0))) == 2


class _Drops(nn.Module):
    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.drop = QuantStub(), DeQuantStub(), drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.quant(self.drop(x, self.training)), self.training)
        return self.drop(self.dequant(x), self.training)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x, training: F.dropout(x, 0.5, training),
        lambda x, training: F.dropout2d(x, training=training),
        lambda x, training: F.alpha_dropout(x, 0.5, training),
        lambda x, training: torch.dropout(x, 0.5, train=training),
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_dropout_follows_train_and_eval_of_a_model_prepared_in_train_mode(drop: Any, is_fused: bool) -> None:
    model = _Drops(drop).train()
    qat = prepare_qat_fx(fuse_fx(model) if is_fused else model, {"": default_qat_8bit_fake_quant_qconfig})
    set_fake_quantize(qat, FakeQuantState.QAT)
    assert not torch.equal(qat(X), qat(X))
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        out = qat(X)
        assert torch.equal(out, qat(X)) and torch.equal(out, convert_fx(qat)(X))
    assert (out - X).abs().mean() < 0.2
