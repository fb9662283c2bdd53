"""BGR or RGB images to YUV444, as a camera delivers them."""

from __future__ import annotations

from torch import Tensor, nn

from horizon_plugin_pytorch.nn.colour import bgr2yuv, rgb2yuv
from horizon_plugin_pytorch.runtime.leaf import own_leaf


@own_leaf
def bgr_to_yuv444(input: Tensor, channel_reversal: bool = False) -> Tensor:
    """YUV444 of a BGR image: BT.601, full swing, whole numbers 0 to 255.

    The guides give no range. Full swing is what the BPU's camera inputs have; `bgr2yuv` has both.

    Args:
        input: ``[N, 3, H, W]``, 0 to 255.
        channel_reversal: the image is RGB.

    >>> import torch
    >>> bgr_to_yuv444(torch.full((1, 3, 1, 1), 255.0)).flatten()
    tensor([255., 128., 128.])
    """
    return (rgb2yuv if channel_reversal else bgr2yuv)(input, "full")


vars(bgr_to_yuv444)["__horizon_float__"] = "call it before the QuantStub"


class BgrToYuv444(nn.Module):
    """`bgr_to_yuv444` as a module; it belongs before the QuantStub.

    Args:
        channel_reversal: images are RGB.
    """

    def __init__(self, channel_reversal: bool = False) -> None:
        super().__init__()
        self.channel_reversal = channel_reversal

    def forward(self, input: Tensor) -> Tensor:
        return bgr_to_yuv444(input, self.channel_reversal)

    def extra_repr(self) -> str:
        return f"channel_reversal={self.channel_reversal}"
