"""Networks as people write them, from every field that the chips serve: float to integers to ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.functional import window_partition, window_reverse
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, set_fake_quantize
from tests.routes import assert_one_arithmetic, prepared

pytestmark = pytest.mark.slow


class Stubs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()


class SwinBlock(nn.Module):
    """Shifted windows with a relative position bias."""

    def __init__(self, dim: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.bias = nn.Parameter(torch.randn(1, heads, window**2, window**2) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        _, h, w, c = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = window_partition(y, self.window).reshape(-1, self.window**2, c)
        q, k, v = (
            self.qkv(y).reshape(-1, self.window**2, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attention = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.bias
        y = self.proj((attention.softmax(-1) @ v).transpose(1, 2).reshape(-1, self.window**2, c))
        y = window_reverse(y.reshape(-1, self.window, self.window, c), self.window, h, w)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(Stubs):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList([SwinBlock(16, 2, 4, shift) for shift in (0, 2)])
        self.merge, self.head = nn.Linear(64, 24, bias=False), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.quant(x)).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.dequant(self.head(self.merge(torch.cat(parts, -1)).mean((1, 2))))


class Detr(Stubs):
    """Queries that attend to image features, and boxes by sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 4, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1)
        )
        self.position = nn.Parameter(torch.randn(1, 16, 4, 4))
        self.queries = nn.Embedding(6, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True, dropout=0.0, norm_first=True)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)
        self.register_buffer("ids", torch.arange(6).unsqueeze(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(self.quant(x)) + self.position
        memory = self.encoder(features.flatten(2).transpose(1, 2))
        out = self.decoder(self.queries(self.ids).expand(x.shape[0], -1, -1), memory)
        return self.dequant(self.classes(out)), self.dequant(self.boxes(out).sigmoid())


class Bev(Stubs):
    """Camera features sampled into a grid seen from above, then fused and decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.cameras, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.fuse = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.offsets, self.heat = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 3, 1)
        self.register_buffer("grid", torch.rand(3, 8, 8, 2) * 2 - 1)
        self.quant_grid = QuantStub()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.cameras(self.quant(images))
        seen = F.grid_sample(features, self.quant_grid(self.grid), align_corners=False)
        bev = self.fuse(seen.amax(0, keepdim=True))
        heat = self.heat(self.up(bev)).sigmoid()
        is_peak = heat == F.max_pool2d(heat, 3, 1, 1)
        peaks = torch.where(is_peak, heat, torch.zeros_like(heat))
        values, positions = peaks.flatten(1).topk(5)
        picked = self.offsets(bev).flatten(2).gather(2, (positions % 64).unsqueeze(1).expand(-1, 2, -1))
        return self.dequant(values), positions, self.dequant(picked)


class Motion(Stubs):
    """A recurrent encoder, velocities and headings of agents."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.head = nn.GRU(4, 8, batch_first=True), nn.LSTM(8, 8), nn.Linear(8, 3)
        self.scale = hnn.ChannelScale2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(self.quant(x))
        y, (h, _) = self.lstm(y.transpose(0, 1))
        out = self.head(h[-1]).clamp(-0.4, 0.4)
        speed = torch.sqrt((out[:, :2] * out[:, :2]).sum(-1, keepdim=True) + 0.01)
        return self.dequant(out[:, :2] / speed), self.dequant(self.scale(y.permute(1, 2, 0).unsqueeze(-1)))


class Volume(Stubs):
    """Three axes, group norm, skips, and a class for each voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.LeakyReLU(0.1))
        self.deep = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4), nn.Hardswish())
        self.head = nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.down(self.quant(x))
        deep = F.interpolate(self.deep(skip), scale_factor=2)
        y = self.head(torch.cat([skip, deep], 1))
        return y.argmax(1), self.dequant(y)


class Pillars(Stubs):
    """Point features scattered into an image."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.scatter, self.conv = hnn.PointPillarsScatter((1, 8, 8, 8)), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        canvas = self.scatter(self.points(self.quant(x)), coords)
        return self.dequant(self.conv(F.pad(canvas, (1, 1, 1, 1), mode="replicate")))


class Matching(Stubs):
    """Two towers, normalised, compared by cosine; correlation of feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8), nn.ELU()), QuantStub()
        self.correlation, self.project = hnn.Correlation(max_displacement=1, pad_size=1), nn.Linear(8, 6)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.tower(torch.cat([self.quant(a), self.other(b)])).chunk(2)
        x, y = (F.normalize(self.project(F.adaptive_avg_pool2d(t, 1).flatten(1)), dim=-1) for t in (a, b))
        return self.dequant(x @ y.t()), self.dequant(self.correlation(a, b))


def _coords() -> Tensor:
    cells = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:10]
    return torch.stack([torch.zeros(10, dtype=torch.long), torch.zeros(10, dtype=torch.long), cells // 8, cells % 8], 1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "swin": (Swin, lambda: (torch.randn(1, 3, 32, 32),)),
    "detr": (Detr, lambda: (torch.randn(2, 3, 32, 32),)),
    "bev": (Bev, lambda: (torch.randn(3, 3, 16, 24),)),
    "motion": (Motion, lambda: (torch.randn(3, 5, 4),)),
    "volume": (Volume, lambda: (torch.randn(1, 1, 4, 6, 8),)),
    "pillars": (Pillars, lambda: (torch.randn(10, 4), _coords())),
    "matching": (Matching, lambda: (torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16))),
}


def _inputs(name: str) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return NETWORKS[name][1]()


def _float(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name][0]().eval()


@pytest.mark.in_turns("march", "dtype", "name")
@pytest.mark.parametrize("march", [March.BAYES, March.NASH_E])
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")
def test_all_routes_give_the_same_integers(name: str, dtype: str, march: March, tmp_path: Any) -> None:
    set_march(march)
    inputs = _inputs(name)
    assert_one_arithmetic(prepared(_float(name), inputs, dtype), inputs, tmp_path)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")
def test_int16_is_close_to_float(name: str) -> None:
    inputs = _inputs(name)
    model = _float(name)
    qat = prepared(model, inputs, "qint16")
    with torch.no_grad():
        for found, wanted in zip(qat(*inputs), model(*inputs), strict=True):
            if wanted.is_floating_point():
                assert float((found - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")
def test_training_reaches_every_parameter(name: str) -> None:
    inputs = _inputs(name)
    qat = prepared(_float(name), inputs)
    set_fake_quantize(qat, FakeQuantState.QAT)
    out = qat.train()(*inputs)
    leaves = [x for x in ((out,) if isinstance(out, Tensor) else out) if x.is_floating_point()]
    sum(x.square().sum() for x in leaves).backward()
    for path, parameter in qat.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), path
