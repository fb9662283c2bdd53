"""A small zoo: the ways in which people write models, at sizes that a test can afford."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


def shake_norms(model: nn.Module) -> nn.Module:
    """Give norms the statistics and weights of a trained model: fresh ones are all but the identity."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return model


class Residual(nn.Module):
    """A block with one ReLU for both places and ``out += identity``."""

    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class AddBlock(nn.Module):
    """A layer, the sum with a second input, and a ReLU, all of them modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.add, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), FloatFunctional(), nn.ReLU()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.relu(self.add.add(self.bn(self.conv(x)), y))


class ResNet(nn.Module):
    """Shared ReLU, residuals in place, global pooling by `mean`."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        self.layer1, self.layer2 = Residual(8, 8), Residual(8, 12, 2)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(self.quant(x))))
        return self.dequant(self.fc(x.mean([2, 3])))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; a FloatFunctional for the residual."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = channels * 4
        self.conv = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(True),
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = FloatFunctional() if stride == 1 and channels == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        return out if self.skip is None else self.skip.add(x, out)


class MobileNet(nn.Module):
    """ReLU6, depthwise convolutions, residuals that enter the add second."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
            InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2), InvertedResidual(12, 12, 1),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.quant(x))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.dequant(self.classifier(torch.flatten(x, 1)))


class UNet(nn.Module):
    """Down and up again: transposed convolution, bilinear resizing to a skip's size, `torch.cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 6, 2, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.fuse = nn.Conv2d(14, 8, 1)
        self.leave = nn.Conv2d(14, 2, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(self.quant(x))
        coarse = self.down(fine)
        x = self.up(self.bottom(coarse))
        x = self.fuse(torch.cat([x, coarse], dim=1))
        x = F.interpolate(x, size=fine.shape[2:], mode="bilinear", align_corners=False)
        return self.dequant(torch.sigmoid(self.leave(torch.cat((x, fine), 1))))


class Attention(nn.Module):
    """Self-attention as vision transformers write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = (q @ k.transpose(-2, -1)) * self.scale
        attention = attention.softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(b, n, c))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, a class token, positions that are cut to length, attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.2)
        self.position = nn.Parameter(torch.randn(1, 20, width) * 0.2)
        self.blocks = nn.Sequential(TransformerBlock(width, 2), TransformerBlock(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(self.quant(x)).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.position[:, : x.shape[1]]
        return self.dequant(self.head(self.norm(self.blocks(x))[:, 0]))


class Detector(nn.Module):
    """Two inputs, nested outputs: a dictionary with a tuple and a list; one head is integers."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_image, self.quant_prior = QuantStub(), QuantStub(scale=1 / 32)
        self.dequant_boxes, self.dequant_scores = DeQuantStub(), DeQuantStub()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)
        self.mix = FloatFunctional()

    def forward(self, image: Tensor, prior: Tensor) -> dict:
        features = self.mix.mul(self.body(self.quant_image(image)), self.quant_prior(prior))
        left, right = features.chunk(2, dim=1)
        return {
            "heads": (self.dequant_boxes(self.boxes(features)), self.dequant_scores(self.scores(features))),
            "features": [left - right],
        }


class SharedConv(nn.Module):
    """One convolution (and its batch norm) for three scales, as detection heads have it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.head, self.bn, self.relu = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.enter(self.quant(x))
        outputs = []
        for _ in range(3):
            outputs.append(self.dequant(self.relu(self.bn(self.head(x)))))
            x = self.pool(x)
        return outputs


class Surrounded(nn.Module):
    """Float code before the QuantStub and after the DeQuantStub."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.25]).reshape(1, 3, 1, 1))
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), horizon_nn.LayerNorm([8, 1, 1], dim=1)
        self.after = nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = (image - self.mean) / self.std
        integers = self.norm(F.relu(self.conv(self.quant(x))))
        x = F.relu(self.after(self.dequant(integers))) * 2.0
        return integers, torch.softmax(x.flatten(2).mean(-1), dim=-1)


IMAGE = (2, 3, 16, 16)
ZOO: dict[str, tuple[type[nn.Module], tuple[tuple[int, ...], ...]]] = {
    "resnet": (ResNet, ((2, 3, 32, 32),)),
    "mobilenet": (MobileNet, (IMAGE,)),
    "unet": (UNet, (IMAGE,)),
    "vit": (ViT, (IMAGE,)),
    "detector": (Detector, (IMAGE, (1, 8, 8, 8))),
    "shared-conv": (SharedConv, (IMAGE,)),
    "surrounded": (Surrounded, (IMAGE,)),
}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of the zoo in eval mode, and inputs for it; the same every time."""
    torch.manual_seed(0)
    cls, shapes = ZOO[name]
    model = shake_norms(cls()).eval()
    return model, tuple(torch.randn(shape) for shape in shapes)
