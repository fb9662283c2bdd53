"""Colour: BT.601's anchor values, ranges, and the integer form that stands behind a camera."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch import functional
from horizon_plugin_pytorch.errors import ExportError, OperatorInputError
from horizon_plugin_pytorch.nn import BgrToYuv444
from horizon_plugin_pytorch.nn.functional import bgr_to_yuv444
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert_fx, prepare_qat_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import (
    OPTIMIZATION,
    as_numbers,
    assert_one_arithmetic,
    calibrate,
    mismatches,
    prepared,
    qconfig,
    run_onnx,
)

# 8-bit values of 100 % colour bars: studio swing as in ITU-R BT.601 / SMPTE 170M tables, full swing as in JFIF (where
# the 255.5 of a pure red's V or blue's U is limited to 255).
BARS = {
    "black": ((0, 0, 0), (16, 128, 128), (0, 128, 128)),
    "white": ((255, 255, 255), (235, 128, 128), (255, 128, 128)),
    "red": ((255, 0, 0), (81, 90, 240), (76, 85, 255)),
    "green": ((0, 255, 0), (145, 54, 34), (150, 44, 21)),
    "blue": ((0, 0, 255), (41, 240, 110), (29, 255, 107)),
    "yellow": ((255, 255, 0), (210, 16, 146), (226, 0, 149)),
    "cyan": ((0, 255, 255), (170, 166, 16), (179, 171, 0)),
    "magenta": ((255, 0, 255), (106, 202, 222), (105, 212, 235)),
}
RANGES = {"studio": ((16, 235), (16, 240)), "full": ((0, 255), (0, 255))}


def pixel(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, 3, 1, 1)


@pytest.mark.parametrize("name", BARS)
def test_colour_bars_have_their_published_values(name: str) -> None:
    rgb, studio, full = BARS[name]
    for swing, wanted in (("studio", studio), ("full", full)):
        assert functional.rgb2yuv(pixel(rgb), swing).flatten().tolist() == list(wanted)
        assert functional.bgr2yuv(pixel(rgb[::-1]), swing).flatten().tolist() == list(wanted)
        centered = [v - 128 for v in wanted]
        assert functional.rgb2centered_yuv(pixel(rgb), swing).flatten().tolist() == centered
        assert functional.bgr2centered_yuv(pixel(rgb[::-1]), swing).flatten().tolist() == centered
    assert functional.rgb2gray(pixel(rgb)).flatten().tolist() == [full[0]]
    assert functional.bgr2gray(pixel(rgb[::-1])).flatten().tolist() == [full[0]]
    assert functional.rgb2centered_gray(pixel(rgb)).item() == full[0] - 128
    assert functional.bgr2centered_gray(pixel(rgb[::-1])).item() == full[0] - 128
    assert bgr_to_yuv444(pixel(rgb[::-1])).flatten().tolist() == list(full)
    assert bgr_to_yuv444(pixel(rgb), channel_reversal=True).flatten().tolist() == list(full)
    assert BgrToYuv444(channel_reversal=True)(pixel(rgb)).flatten().tolist() == list(full)


@pytest.mark.parametrize("swing", RANGES)
def test_every_result_is_a_whole_number_within_its_range(swing: str) -> None:
    levels = torch.arange(0, 256, 5)
    images = torch.stack(torch.meshgrid(levels, levels, levels, indexing="ij")).reshape(1, 3, -1, 52)
    yuv = functional.rgb2yuv(images.float(), swing)
    (luma_low, luma_high), (low, high) = RANGES[swing]
    assert torch.equal(yuv, yuv.round())
    assert (int(yuv[:, 0].min()), int(yuv[:, 0].max())) == (luma_low, luma_high)
    assert (int(yuv[:, 1:].min()), int(yuv[:, 1:].max())) == (low, high)
    assert torch.equal(functional.rgb2yuv(images.to(torch.uint8), swing), yuv)  # also of bytes
    assert torch.equal(functional.rgb2yuv(images.double(), swing), yuv.double())
    assert torch.equal(functional.rgb2yuv(images[0].float(), swing), yuv[0])
    assert functional.rgb2yuv(images[:0], swing).shape == (0, *images.shape[1:])


@given(st.lists(st.integers(0, 255), min_size=3, max_size=3), st.sampled_from(list(RANGES)))
def test_a_pixel_is_rounded_once_from_the_exact_value(rgb: list[int], swing: str) -> None:
    r, g, b = (np.longdouble(v) for v in rgb)
    luma = (299 * r + 587 * g + 114 * b) / 1000
    y_size, size, offset = (219, 224, 16) if swing == "studio" else (255, 255, 0)
    exact = [offset + luma * y_size / 255, 128 + (b - luma) * size / 255 / 1.772, 128 + (r - luma) * size / 255 / 1.402]
    found = functional.rgb2yuv(pixel(rgb), swing).flatten().tolist()
    assert all(abs(f - float(e)) <= 0.5 + 1e-9 for f, e in zip(found, exact, strict=True))


def test_channels_swap() -> None:
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(functional.rgb2bgr(x)[:, 0], x[:, 2])
    assert torch.equal(functional.bgr2rgb(functional.rgb2bgr(x)), x)


def test_colour_functions_are_at_both_places() -> None:
    for name in functional.__all__:
        if "2" in name:
            assert getattr(horizon, name) is getattr(functional, name)


def test_wrong_images_are_refused() -> None:
    q = QTensor(torch.zeros(1, 3, 2, 2, dtype=torch.int8), 1.0, "qint8")
    for function in (functional.rgb2yuv, functional.bgr2gray, bgr_to_yuv444):
        with pytest.raises(OperatorInputError, match="before the QuantStub"):
            function(q)
        with pytest.raises(OperatorInputError, match=r"\[N, 3, H, W\], got \(1, 4, 2, 2\)"):
            function(torch.zeros(1, 4, 2, 2))
    with pytest.raises(ValueError, match="'studio' or 'full', got 'half'"):
        functional.rgb2yuv(torch.zeros(1, 3, 2, 2), "half")


class Camera(nn.Module):
    """Trained on RGB, normalised to about -1 ... 1."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = QuantStub(scale=1 / 128), nn.Conv2d(3, 4, 3), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.quant(x)))


@pytest.mark.parametrize("swing", RANGES)
@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize("opset", [13, 17, 20])
def test_a_camera_behind_a_converted_model(swing: str, order: str, opset: int, tmp_path: Any) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 16, 16)).float()  # in the order that the model was trained on
    rgb = images if order == "rgb" else images.flip(1)
    x = (images - 128) / 128
    quantized = convert_fx(calibrate(prepare_qat_fx(Camera().eval(), {"": qconfig()}), (x,)))
    wanted = quantized(x)
    convert = functional.centered_yuv2rgb if order == "rgb" else functional.centered_yuv2bgr
    for node in list(quantized.graph.nodes):  # the documented deployment
        if node.target == "quant":
            with quantized.graph.inserting_after(node):
                new = quantized.graph.call_function(convert, (node,), {"swing": swing})
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    quantized.quant.scale.fill_(1.0)
    quantized.recompile()
    yuv = functional.rgb2centered_yuv(rgb, swing)
    found = quantized(yuv)
    assert float((found - wanted).abs().max()) < 0.1 * float(wanted.abs().max())  # 8-bit YUV has fewer colours
    model = export_quantized_onnx(quantized, yuv, tmp_path / "camera.onnx", opset_version=opset)
    random = torch.randint(-128, 128, yuv.shape).float()
    for batch in (yuv, random):
        for optimization in OPTIMIZATION:
            assert mismatches(run_onnx(model, (batch,), optimization), as_numbers(quantized(batch))) == 0


def _qtensor(integers: Tensor) -> QTensor:
    return QTensor(integers.to(torch.int8), 1.0, "qint8")


@given(
    st.lists(st.integers(-128, 127), min_size=3, max_size=3),
    st.sampled_from(list(RANGES)),
    st.tuples(*[st.floats(0, 255)] * 3),
    st.tuples(*[st.floats(0.5, 300)] * 3),
    st.floats(0.004, 0.1),
)
def test_camera_values_are_rounded_once(yuv: list[int], swing: str, mean: Any, std: Any, scale: float) -> None:
    y, u, v = (float(c) for c in yuv)
    luma, size = (y + 112.0, 224.0) if swing == "studio" else (y + 128.0, 255.0)
    luma *= 255 / (219 if swing == "studio" else 255)
    red, blue = luma + 1.402 * v * 255 / size, luma + 1.772 * u * 255 / size
    green = (luma - 0.299 * red - 0.114 * blue) / 0.587
    out = functional.centered_yuv2rgb(_qtensor(torch.tensor(yuv).reshape(1, 3, 1, 1)), swing, mean, std, scale)
    found = out.int_repr().flatten().tolist()
    assert out.dtype == "qint8" and float(out.scale) == pytest.approx(scale)
    for channel, m, s, q in zip((red, green, blue), mean, std, found, strict=True):
        exact = (min(max(channel, 0.0), 255.0) - m) / s / scale
        # Multipliers of 23 bits in all lose at most a 2**-13th of the whole range of sums; 0.5 is the rounding itself.
        slack = 0.5 + (4 * 255 + m) / s / scale / 2**13
        assert abs(q - min(max(exact, -128.0), 127.0)) <= slack


def test_the_defaults_give_back_the_grays() -> None:
    gray = torch.arange(256.0).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    out = functional.centered_yuv2rgb(_qtensor(functional.rgb2centered_yuv(gray, "full")), "full")
    assert torch.equal(out.int_repr().float(), gray - 128)
    tuple_form = functional.centered_yuv2rgb(
        _qtensor(functional.rgb2centered_yuv(gray, "full")), "full", torch.tensor([128.0] * 3), [128.0] * 3
    )
    assert torch.equal(tuple_form.int_repr(), out.int_repr())


def test_a_camera_needs_a_scale_of_one_and_integers() -> None:
    good = torch.zeros(1, 3, 2, 2, dtype=torch.int8)
    with pytest.raises(OperatorInputError, match=r"scale must be 1.*0.0078125.*scale.fill_\(1.0\)"):
        functional.centered_yuv2rgb(QTensor(good, 1 / 128, "qint8"))
    with pytest.raises(OperatorInputError, match="qint8 integers of a converted model, got Tensor"):
        functional.centered_yuv2rgb(good.float())
    with pytest.raises(OperatorInputError, match="qint16"):
        functional.centered_yuv2bgr(QTensor(good.to(torch.int16), 1.0, "qint16"))
    with pytest.raises(OperatorInputError, match=r"got \(1, 1, 2, 2\)"):
        functional.centered_yuv2bgr(_qtensor(good[:, :1]))
    with pytest.raises(ValueError, match="std and q_scale must be positive"):
        functional.centered_yuv2bgr(_qtensor(good), std=(0.0,))
    with pytest.raises(ValueError, match="mean must be one number"):
        functional.centered_yuv2bgr(_qtensor(good), mean=(0.0, 1.0))


def test_colour_stays_out_of_the_graph() -> None:
    class Net(Camera):
        def __init__(self) -> None:
            super().__init__()
            self.yuv = BgrToYuv444()

        def forward(self, x: Tensor) -> Tensor:
            a = self.yuv(x) - 128
            b = horizon.bgr2centered_yuv(x, swing="full")
            return super().forward((a + b) / 256)

    x = torch.randint(0, 256, (1, 3, 8, 8)).float()
    qat = calibrate(prepare_qat_fx(Net().eval(), {"": qconfig()}), (x,))
    assert {str(n.target) for n in qat.graph.nodes if n.op == "call_module"} == {"yuv", "quant", "conv", "dequant"}
    assert torch.equal(convert_fx(qat)(x), qat(x))


class BehindColour(nn.Module):
    def __init__(self, colour: Any, channels: int) -> None:
        super().__init__()
        self.colour, self.quant, self.dequant = colour, QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.quant(self.colour(x))))


@pytest.mark.parametrize("name", [
    "bgr2gray", "rgb2gray", "bgr2centered_gray", "rgb2centered_gray", "bgr2rgb", "rgb2bgr", "bgr2yuv", "rgb2yuv",
    "bgr2centered_yuv", "rgb2centered_yuv", "bgr_to_yuv444",
])  # fmt: skip
def test_conversion_before_the_quant_stub_is_exported(name: str, tmp_path: Any) -> None:
    colour = bgr_to_yuv444 if name == "bgr_to_yuv444" else getattr(horizon, name)
    x = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    model = BehindColour(colour, 1 if name.endswith("gray") else 3)
    assert_one_arithmetic(prepared(model, [x]), [x], tmp_path)


def test_rounding_before_the_quant_stub_is_exported(tmp_path: Any) -> None:
    x = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 4
    assert_one_arithmetic(prepared(BehindColour(lambda x: torch.ceil(x) + x.round(), 3), [x]), [x], tmp_path)
    quantized = convert_fx(prepared(BehindColour(lambda x: x.round(decimals=1), 3), [x]))
    with pytest.raises(ExportError, match="decimals"):
        export_quantized_onnx(quantized, (x,), tmp_path / "model.onnx")
