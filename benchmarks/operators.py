"""Each operator's quantized form next to its float form, worst first; a part of `make bench`.

Ratios are medians of interleaved rounds on one thread; stubs are not in the time. *Peak* is how many activation-sized
tensors (of the input's size in float32) one quantized call adds to the process at its peak, its result included.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.run import _status, interleaved
from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qtensor import integer_qtensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)

LIMIT = 3.0
FORMATS = {
    "int8": default_qat_8bit_fake_quant_qconfig,
    "int16": default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
}
IMAGE = (1, 64, 112, 112)
TOKENS = (1, 1024, 256)
HEADS = (1, 8, 512, 64)
STEPS = (64, 32, 128)
VOLUME = (1, 32, 8, 56, 56)
BEV = (1, 256, 100, 100)


@dataclass(frozen=True)
class Job:
    """An operator, and the shapes that it is measured on."""

    name: str
    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)
    low: float = -2.0
    high: float = 2.0
    others: Callable[[], tuple[Tensor, ...]] = tuple

    def inputs(self) -> list[Tensor]:
        return [torch.rand(shape) * (self.high - self.low) + self.low for shape in self.shapes]


class Body(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Bench(nn.Module):
    """QuantStubs and the operator; the integers are its output."""

    def __init__(self, body: Any, count: int) -> None:
        super().__init__()
        for i in range(count):
            self.add_module(f"quant_{i}", QuantStub())
        self.body, self.count = body if isinstance(body, nn.Module) else Body(body), count

    def run(self, *args: Any) -> Any:
        stubs = [getattr(self, f"quant_{i}") for i in range(self.count)]
        return self.body(*(stub(x) for stub, x in zip(stubs, args, strict=False)), *args[self.count :])


_FORWARDS: list[Callable[..., Any]] = [
    lambda self, a: self.run(a),
    lambda self, a, b: self.run(a, b),
    lambda self, a, b, c: self.run(a, b, c),
    lambda self, a, b, c, d: self.run(a, b, c, d),
]
BENCHES = [type(f"Bench{n}", (Bench,), {"forward": forward}) for n, forward in enumerate(_FORWARDS, 1)]


def _pair(function: Callable[..., Any], shape: tuple[int, ...] = IMAGE) -> dict[str, Any]:
    return {"make": lambda: function, "shapes": (shape, shape)}


def _mask() -> tuple[Tensor, ...]:
    return (torch.rand(IMAGE) < 0.3,)


class Rois(nn.Module):
    """Features of boxes from two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.align = hnn.MultiScaleRoIAlign(7, [8, 16], 2)

    def forward(self, fine: Any, coarse: Any, boxes: Tensor) -> Any:
        return self.align([fine, coarse], [boxes])


def _boxes(count: int) -> Tensor:
    corners = torch.rand(count, 2) * 400
    return torch.cat((corners, corners + torch.rand(count, 2) * 400), 1)


class Deformable(nn.Module):
    """Deformable attention of 8 heads with 4 points on maps of these sizes."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.attention = hnn.MultiScaleDeformableAttention(256, 8, len(shapes), 4, batch_first=True)
        self.shapes = shapes
        for layer in (self.attention.sampling_offsets, self.attention.attention_weights):
            nn.init.uniform_(layer.weight, -0.1, 0.1)

    def forward(self, query: Any, value: Any, reference: Tensor) -> Any:
        return self.attention(query, value=value, reference_points=reference, spatial_shapes=self.shapes)


class Pool(nn.Module):
    """Six cameras of 59 depths and 16 x 44 features, half of their points in a view of 128 x 128."""

    def __init__(self) -> None:
        super().__init__()
        points, pixels = 6 * 59 * 16 * 44, 16 * 44
        depth = torch.randperm(points)[: points // 2]
        cell = torch.randint(128 * 128, depth.shape).sort()[0]
        lengths = torch.bincount(cell)[cell.unique()]
        self.pool = hnn.BevPoolV2()
        ranks = (depth, depth // (59 * pixels) * pixels + depth % pixels, cell, lengths.cumsum(0) - lengths, lengths)
        for index, rank in enumerate(ranks):
            self.register_buffer(f"rank_{index}", rank)

    def forward(self, depth: Any, feat: Any) -> Any:
        ranks = [getattr(self, f"rank_{index}") for index in range(5)]
        return self.pool(depth, feat, *ranks, (1, 1, 128, 128, 80))


def _attention(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax(query @ key.transpose(-1, -2) * 0.125, -1) @ value


def _fused_attention(query: Any, key: Any, value: Any) -> Any:
    """Float is one kernel of torch's, which never has all scores in memory."""
    return F.scaled_dot_product_attention(query, key, value)


JOBS = [
    Job("conv2d 3x3", lambda: nn.Conv2d(64, 64, 3, padding=1)),
    Job("conv2d 1x1", lambda: nn.Conv2d(64, 64, 1)),
    Job("conv2d depthwise", lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64)),
    Job("conv_transpose2d", lambda: nn.ConvTranspose2d(64, 32, 2, 2)),
    Job("conv_transpose2d 4x4", lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), ((1, 64, 56, 56),)),
    Job("conv1d", lambda: nn.Conv1d(256, 256, 3, padding=1), ((1, 256, 1024),)),
    Job("conv_transpose1d", lambda: nn.ConvTranspose1d(256, 128, 4, 2, 1), ((1, 256, 1024),)),
    Job("conv3d", lambda: nn.Conv3d(32, 32, 3, padding=1), (VOLUME,)),
    Job("conv3d depthwise", lambda: nn.Conv3d(32, 32, 3, padding=1, groups=32), (VOLUME,)),
    Job("conv_transpose3d", lambda: nn.ConvTranspose3d(32, 16, 2, 2), (VOLUME,)),
    Job("linear", lambda: nn.Linear(256, 256), (TOKENS,)),
    Job("batch_norm", lambda: nn.BatchNorm2d(64)),
    Job("add", **_pair(lambda x, y: x + y)),
    Job("sub", **_pair(lambda x, y: x - y)),
    Job("mul", **_pair(lambda x, y: x * y)),
    Job("cat", **_pair(lambda x, y: torch.cat([x, y], 1))),
    Job("stack", **_pair(lambda x, y: torch.stack([x, y], 1))),
    Job("maximum", **_pair(lambda x, y: torch.maximum(x, y))),
    Job("div", lambda: lambda x, y: x / y, (IMAGE, IMAGE), low=0.5),
    Job("where", lambda: lambda x, y, mask: torch.where(mask, x, y), (IMAGE, IMAGE), others=_mask),
    Job("masked_fill", lambda: lambda x, mask: x.masked_fill(mask, -1e9), others=_mask),
    Job("compare", **_pair(lambda x, y: x > y)),
    Job("compare number", lambda: lambda x: x > 0.3),
    Job("add number", lambda: lambda x: x + 0.5),
    Job("matmul", lambda: lambda x, y: x @ y.transpose(-1, -2), (HEADS, HEADS)),
    Job("einsum", lambda: lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), (HEADS, HEADS)),
    Job("attention by operators", lambda: _attention, (HEADS, HEADS, HEADS)),
    Job("scaled_dot_product_attention", lambda: _fused_attention, (HEADS, HEADS, HEADS)),
    Job("multi_head_attention", lambda: nn.MultiheadAttention(256, 8, batch_first=True), (TOKENS, TOKENS, TOKENS)),
    Job("lstm", lambda: nn.LSTM(128, 256), (STEPS,)),  # float is one kernel of torch's
    Job("gru", lambda: nn.GRU(128, 256), (STEPS,)),
    Job("sum", lambda: lambda x: x.sum(1)),
    Job("mean", lambda: lambda x: x.mean((2, 3), keepdim=True)),
    Job("norm", lambda: lambda x: torch.norm(x, dim=1)),
    Job("norm 1", lambda: lambda x: x.norm(1, -1)),
    Job("normalize", lambda: lambda x: F.normalize(x, dim=1)),
    Job("normalize last", lambda: lambda x: F.normalize(x, dim=-1), ((1, 4096, 256),)),
    Job("var", lambda: lambda x: x.var((2, 3))),
    Job("std", lambda: lambda x: x.std(1)),
    Job("var_mean", lambda: lambda x: torch.var_mean(x, (2, 3))),
    Job("cumsum", lambda: lambda x: x.cumsum(-1)),
    Job("max", lambda: lambda x: x.max(1)),
    Job("argmax", lambda: lambda x: x.argmax(1)),
    Job("amax", lambda: lambda x: x.amax((2, 3))),
    Job("topk", lambda: lambda x: x.topk(100, 1), ((1, 8400, 80),)),
    Job("topk flat", lambda: lambda x: x.flatten(1).topk(300, 1), ((1, 8400, 80),)),
    Job("sort", lambda: lambda x: x.sort(-1)),
    Job("gather", lambda: lambda x, i: x.gather(1, i), (TOKENS,), others=lambda: (torch.randint(1024, (1, 512, 256)),)),
    Job("index", lambda: lambda x: x[:, [3, 1, 2] * 20]),
    Job("slice", lambda: lambda x: x[:, ::2].clone()),
    Job("roll", lambda: lambda x: x.roll((3, 3), (2, 3))),
    Job("unfold", lambda: lambda x: F.unfold(x, 3, padding=1), ((1, 64, 56, 56),)),
    Job("tril", lambda: lambda x: x.tril()),
    Job("flip", lambda: lambda x: x.flip(-1)),
    Job("relu", nn.ReLU),
    Job("relu6", nn.ReLU6),
    Job("sigmoid", nn.Sigmoid),
    Job("silu", nn.SiLU),
    Job("gelu", nn.GELU),
    Job("tanh", nn.Tanh),
    Job("exp", hnn.Exp),
    Job("sqrt", hnn.Sqrt, low=0.1),
    Job("reciprocal", hnn.Reciprocal, low=0.1),
    Job("log", hnn.HardLog, low=0.1),
    Job("square", lambda: hnn.Pow(2)),
    Job("sin", hnn.Sin),
    Job("atan", hnn.Atan),
    Job("erf", hnn.Erf),
    Job("selu", hnn.Selu),
    Job("elu", nn.ELU),
    Job("softplus", nn.Softplus),
    Job("mish", nn.Mish),
    Job("leaky_relu", nn.LeakyReLU),
    Job("hardsigmoid", nn.Hardsigmoid),
    Job("hardswish", nn.Hardswish),
    Job("floor", hnn.Floor),
    Job("abs", lambda: torch.abs),
    Job("neg", lambda: lambda x: -x),
    Job("clamp", lambda: lambda x: x.clamp(-1, 1)),
    Job("hardtanh", nn.Hardtanh),
    Job("prelu", lambda: nn.PReLU(64)),
    Job("glu", lambda: nn.GLU(1)),
    Job("atan2", **_pair(lambda y, x: torch.atan2(y, x))),
    Job("softmax", lambda: nn.Softmax(-1), ((1, 8, 256, 256),)),
    Job("softmax large", lambda: nn.Softmax(-1), ((8, 8, 256, 256),)),
    Job("softmax channels", lambda: nn.Softmax(1)),
    Job("log_softmax", lambda: nn.LogSoftmax(-1), ((1, 8, 256, 256),)),
    Job("layer_norm", lambda: nn.LayerNorm(256), (TOKENS,)),
    Job("layer_norm large", lambda: nn.LayerNorm(256), ((8, 8, 256, 256),)),
    Job("layer_norm channels", lambda: hnn.LayerNorm([64, 1, 1], dim=1)),
    Job("group_norm", lambda: nn.GroupNorm(8, 64)),
    Job("instance_norm", lambda: nn.InstanceNorm2d(64, affine=True)),
    Job("rms_norm", lambda: nn.RMSNorm(256), (TOKENS,)),
    Job("channel_scale", lambda: hnn.ChannelScale2d(64)),
    Job("max_pool", lambda: nn.MaxPool2d(3, 2, 1)),
    Job("avg_pool", lambda: nn.AvgPool2d(2)),
    Job("avg_pool overlapping", lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
    Job("avg_pool 1d", lambda: nn.AvgPool1d(2), ((1, 256, 4096),)),
    Job("avg_pool 3d", lambda: nn.AvgPool3d(2), ((1, 32, 16, 56, 56),)),
    Job("adaptive_avg_pool", lambda: nn.AdaptiveAvgPool2d(7)),
    Job("adaptive_avg_pool one", lambda: nn.AdaptiveAvgPool2d(1)),
    Job("adaptive_avg_pool 3d", lambda: nn.AdaptiveAvgPool3d(4), ((1, 32, 16, 56, 56),)),
    Job("interpolate nearest", lambda: hnn.Interpolate(scale_factor=2, mode="nearest", recompute_scale_factor=True)),
    Job("interpolate bilinear", lambda: hnn.Interpolate(scale_factor=2, recompute_scale_factor=True)),
    Job("interpolate bilinear wide", lambda: hnn.Interpolate(scale_factor=2, recompute_scale_factor=True), (BEV,)),
    Job("grid_sample", hnn.GridSample, ((1, 64, 128, 128), (1, 128, 128, 2)), -1.0, 1.0),
    Job("grid_sample bev", hnn.GridSample, (BEV, (1, 100, 100, 2)), -1.0, 1.0),
    Job("grid_sample nearest", lambda: hnn.GridSample("nearest"), (BEV, (1, 100, 100, 2)), -1.0, 1.0),
    Job("warp", lambda: lambda x, flow: hnn.functional.warp(x, flow), ((1, 64, 128, 128), (1, 128, 128, 2))),
    Job("multi_scale_roi_align", Rois, (BEV, (1, 256, 50, 50)), others=lambda: (_boxes(100),)),
    Job("correlation", lambda: hnn.Correlation(1, 4, 1, 1, 4), ((1, 64, 56, 56),) * 2),
    Job(
        "deformable attention",
        lambda: Deformable([(64, 64), (32, 32), (16, 16), (8, 8)]),
        ((1, 300, 256), (1, 5440, 256)),
        others=lambda: (torch.rand(1, 300, 4, 2),),
    ),
    Job(
        "deformable attention bev",
        lambda: Deformable([(100, 100)]),
        ((1, 2500, 256), (1, 10000, 256)),
        others=lambda: (torch.rand(1, 2500, 1, 2),),
    ),
    Job(
        "point_pillars_scatter",
        lambda: hnn.PointPillarsScatter((1, 64, 256, 256)),
        ((20000, 64),),
        others=lambda: (torch.randint(256, (20000, 4)) * torch.tensor([0, 0, 1, 1]),),
    ),
    Job("bev_pool_v2", Pool, ((1, 6, 59, 16, 44), (1, 6, 16, 44, 80)), 0.0),
    Job("pad", lambda: lambda x: F.pad(x, (1, 1, 1, 1))),
    Job("permute", lambda: lambda x: x.permute(0, 2, 3, 1).contiguous()),
    Job("pixel_shuffle", lambda: nn.PixelShuffle(2)),
]


def measure(job: Job, fmt: str, rounds: int) -> dict[str, Any]:
    """Quantized over float, milliseconds of float, and activation-sized tensors at the peak."""
    torch.manual_seed(0)
    inputs, others = job.inputs(), job.others()
    args = (*inputs, *others)
    model = BENCHES[len(args) - 1](job.make(), len(inputs)).eval()
    prepared = prepare_qat_fx(model, {"": FORMATS[fmt]}).eval()
    set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
    prepared(*args)
    quantized = convert_fx(prepared)
    stubs = [getattr(quantized, f"quant_{i}") for i in range(len(inputs))]
    integers = [stub(x) for stub, x in zip(stubs, inputs, strict=True)]
    fresh = [integer_qtensor(q.plain(), q.scale, q.dtype) for q in integers]
    jobs: dict[str, Callable[[], Any]] = {
        "float": lambda: model.body(*args),
        "quantized": lambda: quantized(*fresh, *others),
    }
    result = interleaved(jobs, rounds, f"{job.name} {fmt}")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    quantized(*fresh, *others)
    peak = (_status("VmHWM") - before) / max(4 * x.numel() for x in inputs)
    return {
        "operator": job.name, "format": fmt, "shape": "x".join(map(str, job.shapes[0])),
        "float ms": 1000 * result["seconds"], "quantized / float": result["quantized"], "peak": peak,
    }  # fmt: skip


def run(rounds: int, only: str = "") -> list[dict[str, Any]]:
    """All operators in all formats, worst first."""
    set_march(March.BAYES)
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 accumulators in the worst case
        for job in JOBS:
            if only in job.name:
                found += [measure(job, fmt, rounds) for fmt in FORMATS]
    return sorted(found, key=lambda row: -row["quantized / float"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(options.rounds, options.only)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    above = [row for row in rows if row["quantized / float"] > LIMIT]
    print(f"\n{len(rows)} measured, {len(above)} above {LIMIT} times float")


if __name__ == "__main__":
    main()
