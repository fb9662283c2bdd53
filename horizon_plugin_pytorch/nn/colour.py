"""Colour spaces of images: BGR and RGB, gray, and YUV444 as ITU-R BT.601 defines it.

Images are ``[N, 3, H, W]`` (or ``[3, H, W]``) with values 0 to 255. *Full* swing uses 0 to 255 for Y, U and V;
*studio* swing 16 to 235 for Y and 16 to 240 for U and V. A *centered* result has 128 subtracted. Results are whole
numbers, rounded half to even and limited to their range, in floating point: what a camera would deliver, so no gradient
passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor
from horizon_plugin_pytorch.runtime.leaf import leaf

# BT.601: Y = 0.299 R + 0.587 G + 0.114 B, U = (B - Y) / 1.772, V = (R - Y) / 1.402. As fractions of whole numbers, sums
# of whole pixels are exact and each result is rounded once, the same on every machine.
_NUMERATORS = ((299, 587, 114), (-299, -587, 886), (701, -587, -114))
_DENOMINATORS = (1000, 1772, 1402)
# swing: sizes of Y, U and V in 255ths, the offset of Y, and the smallest and largest values.
_SWINGS: dict[str, tuple[tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int]]] = {
    "studio": ((219, 224, 224), 16, (16, 16, 16), (235, 240, 240)),
    "full": ((255, 255, 255), 0, (0, 0, 0), (255, 255, 255)),
}
_CENTER = 128


def _swing(swing: str) -> tuple[tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int]]:
    if swing not in _SWINGS:
        raise ValueError(f"swing must be 'studio' or 'full', got {swing!r}.")
    return _SWINGS[swing]


def _image(x: Any, what: str) -> Tensor:
    """Check an image; float64 values with the channel axis third from the end."""
    if isinstance(x, QTensor):
        raise OperatorInputError(
            f"`{what}`{calling_line()} computes in float and got a QTensor: {_BEFORE}. In a converted model, "
            "`centered_yuv2rgb` and `centered_yuv2bgr` turn a camera's YUV into what the model was trained on."
        )
    return _three_channels(x, what).detach().double()


def _three_channels(x: Any, what: str) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[-3] != 3 or x.is_complex():
        found = f"{tuple(x.shape)} ({x.dtype})" if isinstance(x, Tensor) else type(x).__name__
        raise OperatorInputError(f"`{what}` takes images of shape [N, 3, H, W], got {found}.")
    return x


def _mix(x: Tensor, rows: Sequence[Sequence[int]], is_bgr: bool) -> Tensor:
    """Sums of the channels R, G and B with these weights."""
    weights = torch.tensor(rows, dtype=torch.float64, device=x.device)
    return torch.einsum("oc,...chw->...ohw", weights.flip(1) if is_bgr else weights, x)


def _result(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype if like.is_floating_point() else torch.float32)


def _to_gray(x: Tensor, is_bgr: bool, center: int, what: str) -> Tensor:
    luma = _mix(_image(x, what), _NUMERATORS[:1], is_bgr).div_(_DENOMINATORS[0])
    return _result(luma.round_().clamp_(0, 255).sub_(center), x)


def _to_yuv(x: Tensor, is_bgr: bool, swing: str, center: int, what: str) -> Tensor:
    sizes, offset, low, high = _swing(swing)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=x.device).reshape(3, 1, 1)

    rows = [[n * size for n in row] for row, size in zip(_NUMERATORS, sizes, strict=True)]
    yuv = _mix(_image(x, what), rows, is_bgr).div_(column([255 * d for d in _DENOMINATORS]))
    yuv = yuv.add_(column((offset, _CENTER, _CENTER))).round_()
    yuv = torch.minimum(torch.maximum(yuv, column(low)), column(high))
    return _result(yuv.sub_(center), x)


@leaf
def rgb2gray(input: Tensor) -> Tensor:
    """Gray, 0 to 255, of an RGB image; ``[N, 1, H, W]``.

    >>> rgb2gray(torch.tensor([255.0, 0, 0]).reshape(1, 3, 1, 1)).flatten()
    tensor([76.])
    """
    return _to_gray(input, False, 0, "rgb2gray")


@leaf
def bgr2gray(input: Tensor) -> Tensor:
    """Gray, 0 to 255, of a BGR image; ``[N, 1, H, W]``."""
    return _to_gray(input, True, 0, "bgr2gray")


@leaf
def rgb2centered_gray(input: Tensor) -> Tensor:
    """Gray, -128 to 127, of an RGB image; ``[N, 1, H, W]``."""
    return _to_gray(input, False, _CENTER, "rgb2centered_gray")


@leaf
def bgr2centered_gray(input: Tensor) -> Tensor:
    """Gray, -128 to 127, of a BGR image; ``[N, 1, H, W]``."""
    return _to_gray(input, True, _CENTER, "bgr2centered_gray")


@leaf
def rgb2bgr(input: Tensor) -> Tensor:
    """The channels in the other order."""
    return _three_channels(input, "rgb2bgr").flip(-3)


@leaf
def bgr2rgb(input: Tensor) -> Tensor:
    """The channels in the other order."""
    return _three_channels(input, "bgr2rgb").flip(-3)


@leaf
def rgb2yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """YUV444 (BT.601) of an RGB image.

    Args:
        input: 0 to 255.
        swing: ``"studio"`` (Y 16 to 235, U and V 16 to 240) or ``"full"`` (0 to 255).

    >>> rgb2yuv(torch.tensor([255.0, 0, 0]).reshape(1, 3, 1, 1)).flatten()
    tensor([ 81.,  90., 240.])
    """
    return _to_yuv(input, False, swing, 0, "rgb2yuv")


@leaf
def bgr2yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """YUV444 (BT.601) of a BGR image; see `rgb2yuv`."""
    return _to_yuv(input, True, swing, 0, "bgr2yuv")


@leaf
def rgb2centered_yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """YUV444 (BT.601) of an RGB image, less 128: what the BPU's camera inputs deliver.

    Args:
        input: 0 to 255.
        swing: ``"studio"`` (Y -112 to 107, U and V -112 to 112) or ``"full"`` (-128 to 127).
    """
    return _to_yuv(input, False, swing, _CENTER, "rgb2centered_yuv")


@leaf
def bgr2centered_yuv(input: Tensor, swing: str = "studio") -> Tensor:
    """YUV444 (BT.601) of a BGR image, less 128; see `rgb2centered_yuv`."""
    return _to_yuv(input, True, swing, _CENTER, "bgr2centered_yuv")


@leaf
def centered_yuv2rgb(
    input: QTensor,
    swing: str = "studio",
    mean: Sequence[float] | Tensor = (128.0,),
    std: Sequence[float] | Tensor = (128.0,),
    q_scale: float = 1 / 128.0,
) -> QTensor:
    """A camera's centered YUV444 as the quantized, normalised RGB that a model was trained on, in one integer step.

    For a converted model only: put it behind the Quantize of the input, and set that one's scale to 1
    (``model.quant.scale.fill_(1.0)``), since the camera's integers are the values.

    Args:
        input: integers -128 to 127 of scale 1.
        swing: the camera's swing, ``"studio"`` or ``"full"``.
        mean, std: of the normalisation ``(rgb - mean) / std`` in training; one number, or one for each channel.
        q_scale: the scale of the model's QuantStub.

    Returns:
        `qint8` integers of scale `q_scale`.
    """
    return _from_centered_yuv(input, swing, mean, std, q_scale, False)


@leaf
def centered_yuv2bgr(
    input: QTensor,
    swing: str = "studio",
    mean: Sequence[float] | Tensor = (128.0,),
    std: Sequence[float] | Tensor = (128.0,),
    q_scale: float = 1 / 128.0,
) -> QTensor:
    """As `centered_yuv2rgb`, for a model that was trained on BGR."""
    return _from_centered_yuv(input, swing, mean, std, q_scale, True)


def _three(values: Any, name: str) -> tuple[float, float, float]:
    listed = [float(v) for v in torch.as_tensor(values, dtype=torch.float64).reshape(-1)]
    if len(listed) not in (1, 3):
        raise ValueError(f"{name} must be one number, or one for each of 3 channels, got {len(listed)}.")
    return tuple(listed * (3 // len(listed)))  # type: ignore[return-value]


def _from_centered_yuv(input: Any, swing: str, mean: Any, std: Any, q_scale: float, is_bgr: bool) -> QTensor:
    what = "centered_yuv2bgr" if is_bgr else "centered_yuv2rgb"
    if not isinstance(input, QTensor) or not input.is_integer or input.dtype != qint8:
        found = f"a {input.dtype} QTensor in training" if isinstance(input, QTensor) else type(input).__name__
        raise OperatorInputError(
            f"`{what}` takes the qint8 integers of a converted model, got {found}. Put it behind the Quantize of a "
            "model that `convert_fx` gave; before training, use `rgb2centered_yuv` on the images instead."
        )
    if input.dim() != 4 or input.shape[1] != 3:
        raise OperatorInputError(f"`{what}` takes images of shape [N, 3, H, W], got {tuple(input.shape)}.")
    if input.scale.numel() != 1 or float(input.scale) != 1.0:
        raise OperatorInputError(
            f"`{what}`: the input's scale must be 1, since a camera's integers are the values themselves; it is "
            f"{input.scale.flatten().tolist()}. Call `model.quant.scale.fill_(1.0)` on the Quantize before it."
        )
    plan = _plan(swing, _three(mean, "mean"), _three(std, "std"), float(q_scale), is_bgr)
    matrix, offset, low, high = (t.to(input.device) for t in plan)
    grid = fp.mix_channels(input.plain(), matrix, offset, low, high)
    return integer_qtensor(grid, torch.tensor([float(q_scale)], dtype=torch.float32, device=input.device), qint8)


@functools.lru_cache(maxsize=64)
def _plan(
    swing: str, mean: tuple[float, ...], std: tuple[float, ...], q_scale: float, is_bgr: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, offsets and limits of each output channel, for `fixed_point.mix_channels`."""
    sizes, offset, _, _ = _swing(swing)
    if min(std) <= 0 or q_scale <= 0:
        raise ValueError(f"std and q_scale must be positive, got {std} and {q_scale}.")
    forward = torch.tensor(_NUMERATORS, dtype=torch.float64) / torch.tensor(_DENOMINATORS).double().reshape(3, 1)
    forward *= torch.tensor(sizes, dtype=torch.float64).reshape(3, 1) / 255
    to_rgb = torch.linalg.inv(forward)
    black = to_rgb @ torch.tensor([_CENTER - offset, 0.0, 0.0], dtype=torch.float64)  # the RGB of a centered (0, 0, 0)
    if is_bgr:
        to_rgb, black = to_rgb.flip(0), black.flip(0)
    means, steps = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64) * q_scale
    limits = [((bound - means) / steps).add_(0.5).floor_().clamp_(qint8.min, qint8.max) for bound in (0.0, 255.0)]
    matrix, bias = fp.choose_mix(to_rgb / steps.reshape(3, 1), (black - means) / steps, 1 << (qint8.bits - 1))
    return matrix, bias, limits[0].float(), limits[1].float()


_BEFORE = "call it before the QuantStub"
for _function in (
    rgb2gray, bgr2gray, rgb2centered_gray, bgr2centered_gray, rgb2yuv, bgr2yuv, rgb2centered_yuv, bgr2centered_yuv,
):  # fmt: skip
    _function.__horizon_float__ = _BEFORE  # type: ignore[attr-defined]
