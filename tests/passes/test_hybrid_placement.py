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

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
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


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_has_no_form_runs_on_the_cpu(name: str, method: str) -> None:
    body, stubs = FORWARDS[name]
    check(body, None, stubs, method)


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
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
