"""Networks as people write them, with stubs at the ends; torchvision is not needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a residual."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet18 with QuantStub and DeQuantStub."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks.append(nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)))
            inputs = outputs
        self.layer1, self.layer2, self.layer3, self.layer4 = blocks
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(self.quant(x)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.dequant(self.fc(torch.flatten(self.avgpool(x), 1)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a residual."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(ResNet18):
    """ResNet50 with QuantStub and DeQuantStub."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(num_classes)
        blocks = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            layer: list[nn.Module] = [Bottleneck(inputs, width, stride)]
            inputs = 4 * width
            layer += [Bottleneck(inputs, width, 1) for _ in range(count - 1)]
            blocks.append(nn.Sequential(*layer))
        self.layer1, self.layer2, self.layer3, self.layer4 = blocks
        self.fc = nn.Linear(inputs, num_classes)


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; a residual where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True), nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        ]  # fmt: skip
        self.conv = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


_SETTINGS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MobileNetV2(nn.Module):
    """MobileNetV2 with QuantStub and DeQuantStub."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)]
        inputs = 32
        for expand, outputs, count, stride in _SETTINGS:
            for index in range(count):
                layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expand))
                inputs = outputs
        layers += [nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.quant(x))
        return self.dequant(self.classifier(torch.flatten(self.pool(x), 1)))


class SelfAttention(nn.Module):
    """Attention of several heads, one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((query * self.scale) @ key.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), SelfAttention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViTS(nn.Module):
    """ViT-S with patches of 16 x 16, with QuantStub and DeQuantStub."""

    def __init__(self, num_classes: int = 1000, size: int = 224, width: int = 384, depth: int = 12) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.embed = nn.Conv2d(3, width, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, 6) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.quant(x)).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.dequant(self.head(self.norm(self.blocks(x))[:, 0]))


class Transposed(nn.Module):
    """A transposed convolution of stride 2 behind a ReLU, as decoders and generators have it."""

    def __init__(self, kernel: int, channels: int = 64) -> None:
        super().__init__()
        self.quant, self.dequant, self.relu = QuantStub(), DeQuantStub(), nn.ReLU()
        self.embed = nn.Conv2d(3, channels, 1)
        padding = (kernel - 1) // 2
        self.up = nn.ConvTranspose2d(channels, channels, kernel, 2, padding, output_padding=kernel % 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.up(self.relu(self.embed(self.quant(x)))))


class Neck(nn.Module):
    """A detector's neck: maps of three scales, joined with resized ones on the way up and halved on the way down."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 4, 1), nn.ReLU())
        self.down1, self.down2 = self._conv(channels, stride=2), self._conv(channels, stride=2)
        self.up1, self.up2 = self._conv(2 * channels), self._conv(2 * channels)
        self.back1, self.back2 = self._conv(channels, stride=2), self._conv(channels, stride=2)
        self.joined1, self.joined2 = self._conv(2 * channels), self._conv(2 * channels)
        self.larger = nn.Upsample(scale_factor=2.0, mode="nearest")

    @staticmethod
    def _conv(inputs: int, stride: int = 1) -> nn.Module:
        outputs = inputs if stride == 2 else inputs // 2
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.stem(self.quant(x))
        middle = self.down1(fine)
        coarse = self.down2(middle)
        middle = self.up1(torch.cat((self.larger(coarse), middle), 1))
        fine = self.up2(torch.cat((self.larger(middle), fine), 1))
        middle = self.joined1(torch.cat((self.back1(fine), middle), 1))
        coarse = self.joined2(torch.cat((self.back2(middle), coarse), 1))
        return self.dequant(fine), self.dequant(middle), self.dequant(coarse)


class SiLUNet(nn.Module):
    """Convolutions with a SiLU behind each, as in recent detectors."""

    def __init__(self, channels: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 4, 1), nn.SiLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(channels, channels, 3, 1, 1), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layers(self.quant(x)))
