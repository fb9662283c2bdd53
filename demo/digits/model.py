"""A small MobileNetV2."""

from __future__ import annotations

from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution and its batch normalisation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]


class InvertedResidual(nn.Module):
    """Expand, convolve each channel, project; the input is added where the shape stays the same."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.conv = nn.Sequential(
            *conv_bn(inputs, hidden, 1), nn.ReLU6(inplace=True),
            *conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True),
            *conv_bn(hidden, outputs, 1),
        )  # fmt: skip
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class DigitNet(nn.Module):
    """A MobileNetV2 for images of 28 x 28, with the stubs that say where integers begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub(scale=1 / 128)  # the fixed scale of centred images
        self.dequant = DeQuantStub()
        self.features = nn.Sequential(
            *conv_bn(1, 16, 3, stride=2), nn.ReLU6(inplace=True),
            InvertedResidual(16, 24, stride=1, expand=3),
            InvertedResidual(24, 24, stride=1, expand=3),
            InvertedResidual(24, 40, stride=2, expand=3),
            InvertedResidual(40, 40, stride=1, expand=3),
            InvertedResidual(40, 40, stride=1, expand=3),
            *conv_bn(40, 160, 1), nn.ReLU6(inplace=True),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(160, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.features(self.quant(x)))
        return self.dequant(self.classifier(self.dropout(x.flatten(1))))
