"""Every public function of this package on every route: quantized, or refused with its name, the line and a remedy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horizon_plugin_pytorch.functional as functions
import horizon_plugin_pytorch.nn.functional as operators
from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import grid_sample
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.fx_helper import wrap

PLACES = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 3, 3]])
BOXES = torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 6.0, 5.0], [0.0, 0.0, 4.0, 4.5]])
X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[[Tensor], Any]


@dataclass
class Case:
    """How a function is called in the quantized part, on an image.

    Args:
        remedy: it computes in real numbers, and says this.
    """

    body: Body
    remedy: str = ""


def _boxes(x: Tensor) -> Tensor:
    return x.flatten(1)[:, :12].reshape(3, 4)


def _flat(x: Tensor) -> Tensor:
    return x.flatten()[:3]


FLOAT, BEFORE = "DeQuantStub", "QuantStub"
CASES: dict[str, Case] = {
    "point_pillars_scatter": Case(
        lambda x: operators.point_pillars_scatter(x[0].flatten(1).t()[:3], PLACES, (1, 4, 4, 4))
    ),
    "warp": Case(lambda x: operators.warp(x, torch.full((1, 8, 8, 2), 0.5))),
    "warp by channels": Case(lambda x: operators.warp(x, x[:, :2])),
    "autocasted_grid_sample_outer": Case(
        lambda x: grid_sample.autocasted_grid_sample_outer(x, torch.full((1, 4, 4, 2), 0.1))
    ),
    "roi_align": Case(lambda x: operators.roi_align(x, [BOXES], (2, 2), sampling_ratio=2)),
    "window_partition": Case(lambda x: operators.window_partition(x.permute(0, 2, 3, 1), 2)),
    "window_reverse": Case(
        lambda x: operators.window_reverse(operators.window_partition(x.permute(0, 2, 3, 1), 4), 4, 8, 8)
    ),
    "filter": Case(lambda x: operators.filter(x, threshold=-100.0)[0][3]),
    "rle": Case(lambda x: operators.rle(x * 0)[0]),
    "bgr2rgb": Case(lambda x: functions.bgr2rgb(x[:, :3])),
    "rgb2bgr": Case(lambda x: functions.rgb2bgr(x[:, :3])),
    "abs": Case(lambda x: functions.abs(x)),
    "argmax": Case(lambda x: functions.argmax(x, 1)),
    "sort": Case(lambda x: functions.sort(x, 1)[0]),
    "nms": Case(lambda x: operators.nms(_boxes(x), _flat(x), 0.5), FLOAT),
    "batched_nms": Case(lambda x: operators.batched_nms(_boxes(x), _flat(x), torch.zeros(3), 0.5), FLOAT),
    "nms_rotated": Case(lambda x: functions.nms_rotated(x.flatten(1)[:, :15].reshape(3, 5), _flat(x), 0.5), FLOAT),
    "nms3d": Case(lambda x: functions.nms3d(x.flatten(1)[:, :21].reshape(3, 7), _flat(x), 0.5), FLOAT),
    "box3d_iou": Case(lambda x: functions.box3d_iou(x.flatten(1)[:, :21].reshape(3, 7), torch.ones(2, 7)), FLOAT),
    "box3d_iou_bev": Case(
        lambda x: functions.box3d_iou_bev(x.flatten(1)[:, :21].reshape(3, 7), torch.ones(2, 7)), FLOAT
    ),
    "box3d_overlap_bev": Case(
        lambda x: functions.box3d_overlap_bev(x.flatten(1)[:, :21].reshape(3, 7), torch.ones(2, 7)), FLOAT
    ),
    "decode": Case(lambda x: operators.decode(BOXES, _flat(x), _boxes(x)), FLOAT),
    "get_top_n": Case(lambda x: operators.get_top_n(BOXES, _flat(x), _boxes(x), 2), FLOAT),
    "max_iou_match": Case(
        lambda x: operators.max_iou_match(_boxes(x), BOXES[None], torch.tensor([3]), 0.5, 0.3), FLOAT
    ),
    "ig_region_match": Case(
        lambda x: operators.ig_region_match(_boxes(x), torch.ones(1, 2, 5), torch.tensor([2]), 2, 0.5), FLOAT
    ),
    "point_pillars_preprocess": Case(
        lambda x: operators.point_pillars_preprocess([_boxes(x)], [0, 0, 0, 4, 4, 4], [1, 1, 4], 4, 4)[0], FLOAT
    ),
    "bgr_to_yuv444": Case(lambda x: operators.bgr_to_yuv444(x[:, :3]), BEFORE),
    "batched_nms_with_padding": Case(lambda x: functions.batched_nms_with_padding(_boxes(x), _flat(x)), "batched_nms"),
    **{
        name: Case(lambda x, name=name: getattr(functions, name)(x[:, :3]), BEFORE)
        for name in functions.__all__
        if "2" in name and "yuv2" not in name and name not in ("bgr2rgb", "rgb2bgr")
    },
    **{
        name: Case(lambda x, name=name: getattr(functions, name)(x[:, :3]), "converted model")
        for name in ("centered_yuv2bgr", "centered_yuv2rgb")
    },
}


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.quant, self.dequant, self.body = QuantStub(), DeQuantStub(), body

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(self.quant(x)))


class WrappedNet(Net):
    @wrap()
    def inner(self, x: Tensor) -> Any:
        return self.body(x)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.quant(x)))


def _prepare(net: nn.Module, method: PrepareMethod) -> nn.Module:
    return prepare(net, (X,), default_calibration_qconfig_setter, method=method, out_dir=None)


def _eager(net: nn.Module) -> nn.Module:
    net.qconfig = get_default_qconfig()
    return prepare_qat(net)


ROUTES: dict[str, Callable[[Body], nn.Module]] = {
    "symbolic": lambda body: _prepare(Net(body).eval(), PrepareMethod.SYMBOLIC),
    "jit": lambda body: _prepare(Net(body).eval(), PrepareMethod.JIT),
    "jit-strip": lambda body: _prepare(Net(body).eval(), PrepareMethod.JIT_STRIP),
    "wrapped": lambda body: prepare_qat_fx(WrappedNet(body).eval(), {"": get_default_qconfig()}),
    "eager": lambda body: _eager(Net(body).eval()),
}


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


def test_every_public_function_has_a_case() -> None:
    assert {*operators.__all__, *functions.__all__} <= CASES.keys()


@pytest.mark.in_turns("route", "name", of=2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CASES)
def test_a_function_is_quantized_or_refused(name: str, route: str) -> None:
    case = CASES[name]
    if name == "rle" and route == "eager":
        case = Case(lambda x: operators.rle(x)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.remedy:
            with pytest.raises((HorizonError, NotImplementedError), match=case.remedy) as raised:
                calibrate(ROUTES[route](case.body), [X], progress=False)
            if "Stub" in case.remedy:
                first = CASES[name].body.__code__.co_firstlineno
                line = int(re.search(r"test_own_functions\.py:(\d+)", str(raised.value))[1])
                assert first <= line <= first + 2, str(raised.value)
            return
        qat = ROUTES[route](case.body)
        calibrate(qat, [X], progress=False)
        with torch.no_grad():
            wanted, found, integers = Net(case.body)(X) if name != "rle" else None, qat(X), convert(qat)(X)
    assert torch.equal(found, integers)
    if wanted is not None and wanted.is_floating_point():
        assert float((found - wanted).norm() / wanted.norm()) < 0.1
    elif wanted is not None:
        assert float((found != wanted).float().mean()) < 0.1  # positions of nearly equal values
