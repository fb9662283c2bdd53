"""Normalisation and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.march import March
from tests.operators.cases.base import cases, module


def _batch_norm() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bn = nn.BatchNorm2d(6)
        nn.init.uniform_(bn.weight, -1.5, 1.5)
        nn.init.uniform_(bn.bias, -1.0, 1.0)
        bn.running_mean.uniform_(-1, 1)
        bn.running_var.uniform_(0.2, 2)
        return bn.eval()

    return make


def _affine(make_norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A norm whose weight and bias are not those of the beginning."""

    def make() -> nn.Module:
        norm: Any = make_norm()
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if getattr(norm, "bias", None) is not None:
            nn.init.uniform_(norm.bias, -0.5, 0.5)
        return norm

    return make


class FunctionalNorm(nn.Module):
    """A norm written as a function of parameters."""

    def __init__(self, function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.gain, self.shift = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.rand(shape) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.gain, self.shift)


def _tracked(make_norm: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A norm with running statistics, as after training."""

    def make() -> nn.Module:
        norm: Any = _affine(make_norm)()
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.2, 2)
        return norm.eval()

    return make


class TrackedFunction(nn.Module):
    """`F.instance_norm` with statistics of the model."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(6) - 0.5)
        self.register_buffer("variance", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, self.mean, self.variance, use_input_stats=False)


NORMS = cases(
    ("batch-norm", _batch_norm()),
    ("layer-norm", _affine(lambda: nn.LayerNorm(24)), dict(shapes=((2, 5, 24),))),
    ("layer-norm-2-axes", _affine(lambda: nn.LayerNorm((7, 9)))),
    ("layer-norm-plain", _affine(lambda: nn.LayerNorm(9, elementwise_affine=False))),
    ("layer-norm-no-bias", _affine(lambda: nn.LayerNorm(9, bias=False))),
    ("layer-norm-large-group", _affine(lambda: nn.LayerNorm((32, 40))), dict(shapes=((2, 32, 40),))),
    ("layer-norm-vector", _affine(lambda: nn.LayerNorm(40)), dict(shapes=((40,),))),
    ("layer-norm-dim", _affine(lambda: horizon_nn.LayerNorm([6, 1, 1], dim=1))),
    ("layer-norm-dim-positional", _affine(lambda: horizon_nn.LayerNorm([6, 1, 1], 1e-6, True, None, None, 1))),
    ("layer-norm-ours", _affine(lambda: horizon_nn.LayerNorm(9))),
    ("functional-layer-norm", module(FunctionalNorm, lambda x, w, b: F.layer_norm(x, (9,), w, b), (9,))),
    ("functional-layer-norm-plain", lambda x: F.layer_norm(x, (7, 9), eps=0.1)),
    ("group-norm", _affine(lambda: nn.GroupNorm(3, 6))),
    ("group-norm-ours", _affine(lambda: horizon_nn.GroupNorm(2, 6))),
    ("group-norm-plain", module(nn.GroupNorm, 6, 6, affine=False)),
    ("group-norm-sequence", _affine(lambda: nn.GroupNorm(2, 8)), dict(shapes=((2, 8, 30),))),
    ("functional-group-norm", module(FunctionalNorm, lambda x, w, b: F.group_norm(x, 3, w, b), (6,))),
    ("functional-group-norm-plain", lambda x: F.group_norm(x, num_groups=2)),
    ("instance-norm", module(nn.InstanceNorm2d, 6)),
    ("instance-norm-affine", _affine(lambda: nn.InstanceNorm2d(6, affine=True))),
    ("instance-norm-1d", _affine(lambda: nn.InstanceNorm1d(5, affine=True)), dict(shapes=((2, 5, 24),))),
    ("instance-norm-1d-single", module(nn.InstanceNorm1d, 5), dict(shapes=((5, 24),))),
    ("instance-norm-3d", _affine(lambda: nn.InstanceNorm3d(3, affine=True)), dict(shapes=((2, 3, 2, 4, 5),))),
    ("instance-norm-tracked", _tracked(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True))),
    ("instance-norm-tracked-plain", _tracked(lambda: nn.InstanceNorm2d(6, track_running_stats=True))),
    (
        "instance-norm-tracked-single",
        _tracked(lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True)),
        dict(shapes=((5, 24),)),
    ),
    ("functional-instance-norm", lambda x: F.instance_norm(x)),
    (
        "functional-instance-norm-affine",
        module(FunctionalNorm, lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=1e-3), (6,)),
    ),
    ("functional-instance-norm-tracked", module(TrackedFunction)),
    ("rms-norm", _affine(lambda: nn.RMSNorm(9))),
    ("rms-norm-2-axes", _affine(lambda: nn.RMSNorm((7, 9), eps=1e-3))),
    ("rms-norm-plain", module(nn.RMSNorm, 9, elementwise_affine=False)),
    ("rms-norm-ours", _affine(lambda: horizon_nn.RMSNorm(9))),
    ("functional-rms-norm", module(FunctionalNorm, lambda x, w, b: F.rms_norm(x, (9,), w, 1e-6), (9,))),
    ("channel-scale", _affine(lambda: horizon_nn.ChannelScale2d(6))),
)

# The entries of the exp table have 15 bits, and the largest result 15 bits as well: half a step of the one is up to a
# step of the other, where the result has 16 bits.
SOFTMAX = cases(
    ("softmax", module(nn.Softmax, dim=1)),
    ("softmax-last", module(nn.Softmax, -1), dict(shapes=((2, 3, 5, 16),), low=-6.0, high=6.0)),
    ("softmax-long", module(nn.Softmax, -1), dict(shapes=((2, 1200),), low=-3.0, high=3.0)),
    ("softmax-vector", module(nn.Softmax, 0), dict(shapes=((12,),))),
    ("torch-softmax", lambda x: torch.softmax(x, -1)),
    ("special-softmax", lambda x: torch.special.softmax(x, 1)),
    ("functional-softmax", lambda x: F.softmax(x, dim=2)),
    ("method-softmax", lambda x: x.softmax(dim=1)),
    ("softmax-ours", module(horizon_nn.Softmax, dim=1)),
    ("softmax-no-dim", lambda x: F.softmax(x, dim=None)),
    ("softmax2d", nn.Softmax2d),
    ("softmin", module(nn.Softmin, -1)),
    ("functional-softmin", lambda x: F.softmin(x, 1)),
    steps16=1.3,
)
LOG_SOFTMAX = cases(
    ("log-softmax", module(nn.LogSoftmax, dim=1)),
    ("log-softmax-last", module(nn.LogSoftmax, -1), dict(shapes=((2, 3, 5, 16),), low=-6.0, high=6.0)),
    ("log-softmax-long", module(nn.LogSoftmax, -1), dict(shapes=((2, 1200),), low=-3.0, high=3.0)),
    ("torch-log-softmax", lambda x: torch.log_softmax(x, -1)),
    ("special-log-softmax", lambda x: torch.special.log_softmax(x, 1)),
    ("functional-log-softmax", lambda x: F.log_softmax(x, dim=2)),
    ("method-log-softmax", lambda x: x.log_softmax(dim=1)),
    steps16=0.75,  # likewise: half a step of the logarithm is up to a quarter of the result's
)
# exp(x) in 8 bits is up to half a step of 2 % of the largest off.
BERNOULLI2 = cases(
    ("softmax-bernoulli2", module(horizon_nn.SoftmaxBernoulli2, dim=1)),
    ("softmax-bernoulli2-max", module(horizon_nn.SoftmaxBernoulli2, max_value_only=True)),
    march=March.BERNOULLI2,
    formats=("qint8",),
    picks=(),
    differing=0.02,
)

ROWS, VOLUMES = ((2, 5, 24),), ((2, 3, 4, 5, 6),)
POOLS = cases(
    ("max-pool", module(nn.MaxPool2d, 2), dict(is_smooth=False)),
    ("max-pool-padding", module(nn.MaxPool2d, 3, 2, 1), dict(is_smooth=False)),
    ("max-pool-ceil", module(nn.MaxPool2d, 2, 2, ceil_mode=True), dict(is_smooth=False)),
    (
        "max-pool-ceil-padding",
        module(nn.MaxPool2d, 3, 2, 1, ceil_mode=True),
        dict(is_smooth=False, shapes=((1, 3, 8, 6),)),
    ),
    ("max-pool-dilation", module(nn.MaxPool2d, (2, 3), 1, (1, 1), 2), dict(is_smooth=False)),
    ("functional-max-pool", lambda x: F.max_pool2d(x, 3, 2), dict(is_smooth=False)),
    ("functional-max-pool-named", lambda x: F.max_pool2d(x, kernel_size=2, ceil_mode=True), dict(is_smooth=False)),
    ("avg-pool", module(nn.AvgPool2d, 2)),
    ("avg-pool-overlap", module(nn.AvgPool2d, 3, 1)),
    ("avg-pool-padding", module(nn.AvgPool2d, 3, 2, 1)),
    ("avg-pool-exclude-padding", module(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
    ("avg-pool-ceil", module(nn.AvgPool2d, (2, 4), (2, 3), ceil_mode=True)),
    ("avg-pool-ceil-padding", module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    ("avg-pool-ceil-include-padding", module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True), dict(shapes=((1, 3, 8, 6),))),
    ("avg-pool-divisor", module(nn.AvgPool2d, 2, divisor_override=3)),
    ("functional-avg-pool", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    ("adaptive-one", module(nn.AdaptiveAvgPool2d, 1)),
    ("adaptive-uneven", module(nn.AdaptiveAvgPool2d, (3, 4))),
    ("adaptive-larger", module(nn.AdaptiveAvgPool2d, (9, 4))),
    ("adaptive-none", module(nn.AdaptiveAvgPool2d, (None, 3))),
    ("functional-adaptive", lambda x: F.adaptive_avg_pool2d(x, (2, 2))),
    ("functional-adaptive-one", lambda x: F.adaptive_avg_pool2d(x, 1)),
    ("avg-pool-single", module(nn.AvgPool2d, 2), dict(shapes=((3, 6, 8),))),
    ("avg-pool-1d", module(nn.AvgPool1d, 3, 2, 1), dict(shapes=ROWS)),
    ("avg-pool-1d-ceil", module(nn.AvgPool1d, 4, 3, ceil_mode=True, count_include_pad=False), dict(shapes=ROWS)),
    ("avg-pool-1d-single", module(nn.AvgPool1d, 2), dict(shapes=((5, 24),))),
    ("functional-avg-pool-1d", lambda x: F.avg_pool1d(x, 2), dict(shapes=ROWS)),
    ("torch-avg-pool-1d", lambda x: torch.avg_pool1d(x, 3, stride=1), dict(shapes=ROWS)),
    ("avg-pool-3d", module(nn.AvgPool3d, 2), dict(shapes=VOLUMES)),
    ("avg-pool-3d-padding", module(nn.AvgPool3d, 3, 2, 1, count_include_pad=False), dict(shapes=VOLUMES)),
    ("avg-pool-3d-divisor", module(nn.AvgPool3d, (1, 2, 3), divisor_override=5), dict(shapes=VOLUMES)),
    ("functional-avg-pool-3d", lambda x: F.avg_pool3d(x, 2, 1), dict(shapes=VOLUMES)),
    ("adaptive-1d", module(nn.AdaptiveAvgPool1d, 5), dict(shapes=ROWS)),
    ("functional-adaptive-1d", lambda x: F.adaptive_avg_pool1d(x, 1), dict(shapes=ROWS)),
    ("adaptive-3d", module(nn.AdaptiveAvgPool3d, (3, None, 4)), dict(shapes=VOLUMES)),
    ("functional-adaptive-3d", lambda x: F.adaptive_avg_pool3d(x, 1), dict(shapes=VOLUMES)),
    ("max-pool-1d", module(nn.MaxPool1d, 3, 2, 1), dict(shapes=ROWS, is_smooth=False)),
    ("functional-max-pool-1d", lambda x: F.max_pool1d(x, 2, ceil_mode=True), dict(shapes=ROWS, is_smooth=False)),
    ("torch-max-pool-1d", lambda x: torch.max_pool1d(x, 2), dict(shapes=ROWS, is_smooth=False)),
    ("torch-max-pool", lambda x: torch.max_pool2d(x, 2), dict(is_smooth=False)),
    ("max-pool-3d", module(nn.MaxPool3d, 2, 1, 1), dict(shapes=VOLUMES, is_smooth=False)),
    ("max-pool-3d-dilation", module(nn.MaxPool3d, 2, 2, 0, 2, ceil_mode=True), dict(shapes=VOLUMES, is_smooth=False)),
    ("functional-max-pool-3d", lambda x: F.max_pool3d(x, (1, 2, 3)), dict(shapes=VOLUMES, is_smooth=False)),
    ("adaptive-max-one", module(nn.AdaptiveMaxPool2d, 1), dict(is_smooth=False)),
    ("adaptive-max-uneven", module(nn.AdaptiveMaxPool2d, (3, 4)), dict(is_smooth=False)),
    ("adaptive-max-larger", module(nn.AdaptiveMaxPool2d, (9, None)), dict(is_smooth=False)),
    ("functional-adaptive-max", lambda x: F.adaptive_max_pool2d(x, 2), dict(is_smooth=False)),
    ("adaptive-max-1d", module(nn.AdaptiveMaxPool1d, 5), dict(shapes=ROWS, is_smooth=False)),
    ("functional-adaptive-max-1d", lambda x: F.adaptive_max_pool1d(x, 1), dict(shapes=ROWS, is_smooth=False)),
    ("adaptive-max-3d", module(nn.AdaptiveMaxPool3d, (2, 3, 2)), dict(shapes=VOLUMES, is_smooth=False)),
    ("functional-adaptive-max-3d", lambda x: F.adaptive_max_pool3d(x, 2), dict(shapes=VOLUMES, is_smooth=False)),
    steps16=0.52,  # multipliers have 20 bits
)


CASES = [*NORMS, *SOFTMAX, *LOG_SOFTMAX, *BERNOULLI2, *POOLS]
