"""Models that went through `torch.ao.quantization`: what it fused is taken, its qconfigs and QAT models are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.quantization as tq
from torch import Tensor, nn
from torch.ao.quantization import quantize_fx

from horizon_plugin_pytorch.errors import ConversionError, FusionError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.nn import intrinsic, qat
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    PrepareMethod,
    calibrate,
    convert,
    convert_fx,
    fuse_known_modules,
    fuse_modules,
    get_default_qconfig,
    prepare,
    prepare_qat,
)
from horizon_plugin_pytorch.quantization.quantization_mappings import get_qat_module_mappings
from horizon_plugin_pytorch.workflow.mappings import get_quantized_module_mappings

METHODS = list(PrepareMethod)
INT8 = get_default_qconfig()
X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
GROUPS = [["conv", "bn", "relu"], ["conv2", "relu2"]]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    """Written for torch: its stubs, its FloatFunctional."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = tq.QuantStub(), tq.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(4, 4, 1), nn.ReLU()
        self.add = torch.ao.nn.quantized.FloatFunctional()
        self.bn3, self.relu3 = nn.BatchNorm2d(4), nn.ReLU()
        nn.init.uniform_(self.bn.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.add.add(self.relu2(self.conv2(x)), x)
        return self.dequant(self.relu3(self.bn3(x)))


FUSERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.ao": lambda net: tq.fuse_modules(net.eval(), GROUPS),
    "the old name": lambda net: torch.quantization.fuse_modules(net.eval(), GROUPS),
    "for training": lambda net: tq.fuse_modules_qat(net.train(), GROUPS),
    "with our function": lambda net: tq.fuse_modules(net.eval(), GROUPS, fuser_func=fuse_known_modules),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FUSERS)
def test_what_torch_fused_is_one_operator(method: PrepareMethod, name: str) -> None:
    net = FUSERS[name](Net())
    net.qconfig = INT8
    model = prepare(net, (X,), method=method, out_dir=None)
    assert type(model.conv) is qat.ConvReLU2d and type(model.conv2) is qat.ConvReLU2d
    assert isinstance(model.bn, nn.Identity) and isinstance(model.relu, nn.Identity)
    calibrate(model, [X], progress=False)
    with torch.no_grad():
        out, wanted = model(X), net.eval()(X)
        assert torch.equal((convert_fx if method is PrepareMethod.SYMBOLIC else convert)(model)(X), out)
    assert float((out - wanted).norm() / wanted.norm()) < 0.05


def test_batch_normalisation_goes_on_training_with_bn() -> None:
    net = FUSERS["for training"](Net())
    net.qconfig = INT8
    set_qat_mode(QATMode.WithBN)
    try:
        model = prepare_qat(net)
    finally:
        set_qat_mode(QATMode.FuseBN)
    assert type(model.conv) is qat.ConvBNReLU2d


@pytest.mark.parametrize(
    ("module", "fused"),
    [
        (nni.ConvReLU1d(nn.Conv1d(2, 2, 1), nn.ReLU()), "ConvReLU1d"),
        (nni.ConvReLU3d(nn.Conv3d(2, 2, 1), nn.ReLU()), "ConvReLU3d"),
        (nni.LinearReLU(nn.Linear(2, 2), nn.ReLU()), "LinearReLU"),
        (nni.ConvBn2d(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), "Conv2d"),
        (nni.LinearBn1d(nn.Linear(2, 2), nn.BatchNorm1d(2)), "Linear"),
        (nni.ConvAdd2d(nn.Conv2d(2, 2, 1), torch.add), "ConvAdd2d"),
        (nni.ConvAddReLU2d(nn.Conv2d(2, 2, 1), torch.add, nn.ReLU()), "ConvAddReLU2d"),
    ],
)
def test_each_of_the_fused_classes(module: nn.Module, fused: str) -> None:
    net = nn.ModuleDict({"fused": module, "quant": tq.QuantStub()}).eval()
    net.qconfig = INT8
    assert type(prepare_qat(net)["fused"]).__name__ == fused


def test_attributes_and_hooks_stay() -> None:
    net = FUSERS["torch.ao"](Net())
    net.qconfig, net.conv2.qconfig = INT8, get_default_qconfig(activation_qkwargs={"dtype": "qint16"})
    met: list[Any] = []
    net.conv.register_forward_hook(lambda module, args, out: met.append(type(module)))
    model = prepare_qat(net)
    model(X)
    assert met == [qat.ConvReLU2d]
    assert model.conv2.activation_post_process.dtype == "qint16"


def test_chains_that_the_chip_does_not_fuse_are_named() -> None:
    net = tq.fuse_modules(Net().eval(), [["bn3", "relu3"]])
    net.qconfig = INT8
    with pytest.warns(QuantizationWarning, match="`bn3` \\(BNReLU2d\\), which the chip does not fuse"):
        model = prepare_qat(net)
    assert [type(m).__name__ for m in model.bn3] == ["BatchNorm2d", "ReLU"]


QCONFIGS = {
    "qat": tq.get_default_qat_qconfig(),
    "static": tq.get_default_qconfig(),
    "dynamic": tq.default_dynamic_qconfig,
    "own": tq.QConfig(activation=tq.default_fake_quant, weight=tq.default_weight_fake_quant),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", QCONFIGS)
def test_qconfigs_of_torch_are_refused_with_a_remedy(method: PrepareMethod, name: str) -> None:
    net = Net().eval()
    net.conv.qconfig = QCONFIGS[name]
    with pytest.raises(QuantizationConfigError, match="attribute of conv.*get_default_qconfig"):
        prepare(net, (X,), method=method, out_dir=None)


@pytest.mark.parametrize("method", METHODS)
def test_models_that_torch_prepared_are_refused(method: PrepareMethod) -> None:
    net = Net().train()
    net.qconfig = tq.get_default_qat_qconfig()
    trained = tq.prepare_qat(net)
    for model in (trained, tq.convert(copy.deepcopy(trained).eval())):
        with pytest.raises(TypeError, match="torch's own quantization prepared or converted this one"):
            prepare(model.eval(), (X,), method=method, out_dir=None)


class _Stubs(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (tq.QuantStub, tq.DeQuantStub)) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_inside", [True, False])
def test_the_qconfig_of_a_graph_module_counts(method: PrepareMethod, is_inside: bool) -> None:
    """torch copies a GraphModule without its attributes."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv, self.dequant = tq.QuantStub(), nn.Conv2d(3, 3, 1), tq.DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(self.quant(x)))

    net = Small().eval()
    traced = torch.fx.GraphModule(net, _Stubs().trace(net))
    traced.qconfig = INT8
    model = prepare(nn.Sequential(traced) if is_inside else traced, (X,), method=method, out_dir=None)
    assert type(model.get_submodule("0.conv" if is_inside else "conv")) is qat.Conv2d


PREPARES_OF_TORCH: dict[str, Callable[[nn.Module], nn.Module]] = {
    "prepare_qat": lambda net: tq.prepare_qat(net.train()),
    "prepare_qat with our classes": lambda net: tq.prepare_qat(net.train(), get_qat_module_mappings()),
    "prepare": lambda net: tq.prepare(net.eval()),
    "prepare_fx": lambda net: quantize_fx.prepare_fx(net.eval(), tq.QConfigMapping().set_global(INT8), (X,)),
}


@pytest.mark.parametrize("name", PREPARES_OF_TORCH)
def test_torch_does_not_prepare_with_our_qconfig(name: str) -> None:
    net = Net()
    net.qconfig = INT8
    with pytest.raises(QuantizationConfigError, match="Call `prepare`.* of `horizon_plugin_pytorch.quantization`"):
        PREPARES_OF_TORCH[name](net)


def test_torch_may_still_propagate_our_qconfig() -> None:
    net = Net().eval()
    net.up = nn.ConvTranspose2d(4, 4, 1)
    net.qconfig = tq.QConfig(activation=INT8.activation, weight=INT8.weight)
    tq.propagate_qconfig_(net)
    assert type(prepare_qat(net).conv) is qat.Conv2d


@pytest.mark.parametrize("mapping", [None, get_quantized_module_mappings()])
def test_torch_does_not_convert_our_model_to_itself(mapping: dict[type, type] | None) -> None:
    net = Net().eval()
    net.qconfig = INT8
    model = prepare_qat(net)
    model(X)
    with pytest.raises(ConversionError, match="torch's own `convert`.*`horizon_plugin_pytorch.quantization`"):
        tq.convert(model, mapping)
    convert(model)(X)  # which torch's attempt on a copy has not touched
    del model.conv.qconfig  # as anybody else may


def test_chains_that_torch_cannot_fuse_are_not_left_unfused() -> None:
    class Adding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bn2, self.sum, self.relu4 = nn.BatchNorm2d(4), FloatFunctional(), nn.ReLU()

    chain = ["conv2", "bn2", "sum", "relu4"]
    with pytest.raises(AssertionError, match="FloatFunctional"):
        tq.fuse_modules(Adding().eval(), chain)
    with pytest.raises(AssertionError, match="Fusion only for eval"):
        tq.fuse_modules(Adding().train(), GROUPS)
    for net in (Adding().train(), Adding().eval()):
        assert type(tq.fuse_modules(net, chain, fuser_func=fuse_known_modules).sum) is intrinsic.ConvAddReLU2d


def test_a_prepared_model_is_not_fused() -> None:
    net = Net().eval()
    net.qconfig = INT8
    with pytest.raises(FusionError, match="prepared already: fuse the float model"):
        fuse_modules(prepare_qat(net), ["conv", "bn", "relu"])
