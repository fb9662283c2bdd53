"""Which operators of a hybrid model run on the CPU, told by the stubs around them; the numbers are those of float."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.nn.softmax import SoftmaxBernoulli2
from horizon_plugin_pytorch.passes.hybrid import HybridConfig
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    default_calibration_qconfig_setter,
)
from tests.routes import as_numbers, calibrate, mismatches, qconfig

X = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SELU = "selu_input_dequant"
METHODS = pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
# The forward, and the stubs beside its own: before operators of the CPU, and after them where integers go on.
FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "moved between two": (lambda m, x: F.selu(F.selu(m.conv(x)).transpose(2, 3)), SELU),
    "moved for a layer": (lambda m, x: m.last(F.selu(x).transpose(2, 3)), f"{SELU} transpose_activation_post_process"),
    "shape": (lambda m, x: F.selu(x).reshape(x.shape[0], -1) * 2, f"{SELU} reshape_activation_post_process"),
    "stacked": (lambda m, x: torch.stack([F.selu(x), x]).sum(0), f"{SELU} selu_activation_post_process"),
    "pooled": (lambda m, x: m.last(F.max_pool2d(F.selu(x), 2)), f"{SELU} max_pool2d_activation_post_process"),
    "a part": (
        lambda m, x: m.last(F.selu(torch.cat([x, x], 1)).chunk(2, 1)[0]),
        f"{SELU} part_activation_post_process",
    ),
    "functional": (lambda m, x: m.ff.add(F.selu(x), x), f"{SELU} selu_activation_post_process"),
    "a mode without form": (lambda m, x: F.interpolate(x, scale_factor=2, mode="bicubic"), "interpolate_input_dequant"),
    "a module without form": (lambda m, x: m.up(m.conv(x)), "up_input_dequant"),
    "a mode with a form": (lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"), ""),
    "another type": (lambda m, x: F.softmax(x, 1, dtype=torch.float64).float(), "softmax_input_dequant"),
    "folded": (lambda m, x: m.bn(m.conv(x)), ""),
    "the real part": (
        lambda m, x: m.last(torch.fft.fft2(x).real),
        "fft_fft2_input_dequant part_activation_post_process",
    ),
    "moved by two modules for a layer": (
        lambda m, x: m.fc(m.flat(m.flatter(F.selu(x)))),
        f"{SELU} selu_activation_post_process",
    ),
    "moved by two modules between two": (lambda m, x: F.selu(m.flat(m.flatter(F.selu(x)))), SELU),
    "compared with a quantized one": (
        lambda m, x: torch.where(F.selu(x) > m.conv(x), x, m.last(x)),
        f"{SELU} gt_input_dequant gt_activation_post_process",
    ),
    "as another": (lambda m, x: F.selu(x).view_as(m.conv(x)), SELU),
    "a result by name": (
        lambda m, x: m.last(torch.linalg.qr(x).Q),
        "linalg_qr_input_dequant part_activation_post_process",
    ),
}
LISTED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, list], str]] = {
    "stubs": (lambda m, x: m.conv(x), {"module_type": [QuantStub, DeQuantStub]}, ""),
    "layer": (
        lambda m, x: m.bn(m.conv(x)),
        {"module_name": ["conv"]},
        "conv_activation_post_process conv_input_dequant",
    ),
    "norm": (lambda m, x: m.bn(m.conv(x)), {"module_type": [nn.BatchNorm2d]}, "bn_input_dequant"),
}


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.quant, self.dequant = body, QuantStub(), DeQuantStub()
        self.conv, self.last, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.ff, self.up = FloatFunctional(), nn.Upsample(scale_factor=2, mode="bicubic")
        self.flat, self.flatter, self.fc = nn.Flatten(), nn.Flatten(1), nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self, self.quant(x)))


def check(body: Callable[[Any, Tensor], Tensor], hybrid_dict: dict[str, list] | None, stubs: str, method: str) -> None:
    set_march(March.NASH_E)
    model = Net(body).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qat = prepare(
            model, (X,), qconfig_dict={"": qconfig()}, method=method, hybrid=True, hybrid_dict=hybrid_dict, out_dir=None
        )
    names = [name for name, _ in qat.named_children() if name.endswith(("_input_dequant", "_activation_post_process"))]
    names = [re.sub("getattr_1|getitem", "part", name) for name in names]  # routes write a result's name differently
    assert sorted(names) == sorted(stubs.split())
    calibrate(qat, (X,))
    found, wanted = qat(X), model(X)
    assert mismatches(as_numbers(found), as_numbers(convert(qat)(X))) == 0
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.in_turns("method", "name")
@METHODS
@pytest.mark.parametrize("name", FORWARDS)
def test_what_has_no_form_runs_on_the_cpu(name: str, method: str) -> None:
    body, stubs = FORWARDS[name]
    check(body, None, stubs, method)


@METHODS
@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_runs_on_the_cpu(name: str, method: str) -> None:
    check(*LISTED[name], method)


def test_a_sum_of_what_the_cpu_gives_begins_with_a_number() -> None:
    set_march(March.NASH_E)
    model = Net(lambda m, x: sum(F.selu(x).unbind(1))).eval()  # type: ignore[arg-type, return-value]
    qat = calibrate(prepare(model, (X,), qconfig_dict={"": qconfig()}, hybrid=True, out_dir=None), (X,))
    assert mismatches(as_numbers(qat(X)), as_numbers(convert(qat)(X))) == 0
    assert (qat(X) - model(X)).abs().max() < 0.05 * model(X).abs().max()


def _float_by(setters: tuple) -> set[str]:
    model = fx.symbolic_trace(nn.Sequential(OrderedDict(head=nn.Conv2d(3, 3, 1), header=nn.Conv2d(3, 3, 1))))
    config = HybridConfig(setters=setters)
    return {str(node.target) for node in model.graph.nodes if node.op == "call_module" and config.lists(model, node)}


def test_a_setter_that_leaves_a_module_float_means_no_other_whose_name_begins_alike() -> None:
    assert _float_by((ModuleNameQconfigSetter({"head": None}),)) == {"head"}


def test_a_setter_for_everything_comes_before_those_after_it() -> None:
    by_name = ModuleNameQconfigSetter({"head": None})
    assert _float_by((by_name, default_calibration_qconfig_setter)) == {"head"}
    assert _float_by((default_calibration_qconfig_setter, by_name)) == set()


class Beside(Net):
    """A layer before the quantized part, which meets it, and one behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.dequant(self.last(self.quant(x)) + F.selu(self.conv(x))))


def _prepared(
    model: nn.Module,
    qconfigs: dict[str, Any],
    method: str,
    listed: dict[str, list] | None = None,
    march: March = March.NASH_E,
) -> Any:
    set_march(march)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare(
            model.eval(), (X,), qconfig_dict=qconfigs, method=method, hybrid=True, hybrid_dict=listed, out_dir=None
        )


@METHODS
def test_the_quantized_part_may_begin_at_an_operator_of_the_cpu(method: str) -> None:
    model = Beside(lambda m, x: x)
    qat = _prepared(model, {"": qconfig()}, method, {"module_name": ["conv"]})
    stubs = [name for name, _ in qat.named_children() if name.endswith(("_input_dequant", "_activation_post_process"))]
    assert stubs == ["selu_activation_post_process"]  # selu is behind that beginning, and runs on the CPU too
    assert type(qat.conv) is nn.Conv2d
    calibrate(qat, (X,))
    assert (qat(X) - model(X)).abs().max() < 0.05 * model(X).abs().max()


def test_a_layer_without_a_qconfig_outside_the_quantized_part_is_no_beginning() -> None:
    with pytest.raises(HorizonError, match="QuantStub"):
        _prepared(Beside(lambda m, x: x), {"": qconfig(), "module_name": [("conv", None)]}, "jit-strip")


@METHODS
def test_what_reads_real_numbers_stays_float_behind_the_cpu_too(method: str) -> None:
    model = Net(lambda m, x: m.last(m.soft(x)))
    model.soft = SoftmaxBernoulli2(dim=1)  # gives real numbers on the chip
    qat = _prepared(model, {"": qconfig()}, method, {"module_name": ["soft"]}, March.BERNOULLI2)
    assert type(qat.last) is nn.Conv2d and not hasattr(qat, "soft_activation_post_process")


@METHODS
def test_what_is_listed_outside_the_quantized_part_is_left_alone(method: str) -> None:
    class Behind(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.dequant(self.last(self.quant(x))))

    qat = _prepared(Behind(lambda m, x: x), {"": qconfig()}, method, {"module_name": ["bn"]})
    assert type(qat.bn) is nn.BatchNorm2d and not qat.bn._forward_pre_hooks


@METHODS
def test_stubs_without_a_qconfig_are_no_operators_of_the_cpu(method: str) -> None:
    qconfigs = {"": None, "module_name": [("conv", qconfig()), ("last", qconfig())]}
    qat = _prepared(Net(lambda m, x: m.last(m.conv(x))), qconfigs, method)
    assert not [name for name, _ in qat.named_children() if name.startswith("quant_")]
