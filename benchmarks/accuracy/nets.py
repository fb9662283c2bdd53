"""Five small networks for images of 28 x 28, as people write them, with stubs at the ends."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.algorithms import RepBlock
from benchmarks.models import BasicBlock, InvertedResidual
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub

CLASSES = 10


class _Net(nn.Module):
    """Stubs around `features` and `classifier`; a pixel is exactly an int8 number times 1/128."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.classifier(self.features(self.quant(x))))


def _stem(outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(1, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _pool() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(1)]


class ResNet(_Net):
    """Residual blocks of two 3x3 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2)]
        self.features = nn.Sequential(*_stem(16), *blocks, *_pool())
        self.classifier = nn.Linear(64, CLASSES)


class MobileNetV2(_Net):
    """Inverted residuals: expand, depthwise, project, with ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((12, 16, 1, 1), (16, 24, 2, 4), (24, 24, 1, 4), (24, 40, 2, 4), (40, 40, 1, 4))
        head = [nn.Conv2d(40, 160, 1, bias=False), nn.BatchNorm2d(160), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*_stem(12), *[InvertedResidual(*size) for size in sizes], *head, *_pool())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(160, CLASSES))


class RepVGG(_Net):
    """Blocks of a 3x3, a 1x1 convolution and the identity, which are one convolution in deployment."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2), (48, 48, 1))
        self.features = nn.Sequential(*[RepBlock(*size) for size in sizes], *_pool())
        self.classifier = nn.Linear(48, CLASSES)

    def merged(self) -> RepVGG:
        """The network as it is deployed; this one is used up."""
        self.features = nn.Sequential(*[m.merged() if isinstance(m, RepBlock) else m for m in self.features])
        return self


class Attention(nn.Module):
    """Attention of several heads among the tokens of each group, with an optional mask that is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.factor = heads, (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        groups, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(groups, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * self.factor) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask.repeat(groups // len(mask), 1, 1).unsqueeze(1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(groups, tokens, width))


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class ViTBlock(nn.Module):
    """Attention among all tokens, then a small perceptron for each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), _mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(_Net):
    """49 patches of 4 x 4 pixels, a position for each, and their mean at the end."""

    def __init__(self, width: int = 48, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 49, width))
        self.blocks = nn.Sequential(*[ViTBlock(width, heads) for _ in range(depth)])
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.norm(self.blocks(x)).mean(1)


class SwinBlock(nn.Module):
    """Attention in windows, which every second block moves by half a window."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), _mlp(width)
        self.window, self.shift = window, shift
        self.register_buffer("mask", self._mask(side) if shift else None)

    def _mask(self, side: int) -> Tensor:
        """What was moved in from the other edge is not looked at."""
        part = torch.zeros(side)
        part[-self.window : -self.shift], part[-self.shift :] = 1, 2
        parts = self._windows((3 * part[:, None] + part).reshape(1, side, side, 1)).squeeze(-1)
        return -8.0 * (parts[:, None] != parts[:, :, None]).float()

    def _windows(self, x: Tensor) -> Tensor:
        count, side, _, width = x.shape
        n, w = side // self.window, self.window
        return x.reshape(count, n, w, n, w, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, width)

    def forward(self, x: Tensor) -> Tensor:
        count, side, _, width = x.shape
        n, w = side // self.window, self.window
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attention(self._windows(y), self.mask)
        y = y.reshape(count, n, n, w, w, width).permute(0, 1, 3, 2, 4, 5).reshape(count, side, side, width)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Four neighbours become one token of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(_Net):
    """Windows of 4 x 4 in a grid of 8 x 8, then one window of merged patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(1, width, 4, 4, 2), nn.LayerNorm(width)
        self.blocks = nn.Sequential(
            SwinBlock(width, 2, 8, 4, 0), SwinBlock(width, 2, 8, 4, 2), PatchMerging(width),
            SwinBlock(2 * width, 4, 4, 4, 0), SwinBlock(2 * width, 4, 4, 4, 0),
        )  # fmt: skip
        self.norm, self.classifier = nn.LayerNorm(2 * width), nn.Linear(2 * width, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(self.patches(x).permute(0, 2, 3, 1)))
        return self.norm(x).mean((1, 2))


NETS: dict[str, type[_Net]] = {net.__name__: net for net in (MobileNetV2, ResNet, RepVGG, Swin, ViT)}
