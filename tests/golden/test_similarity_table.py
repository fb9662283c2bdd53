"""The scales that the development guide prints under "Similarity Comparison"."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import FakeQuantState, set_fake_quantize
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.quantization.quantize_fx import prepare_qat_fx
from tests.routes import assert_one_arithmetic

# development-guide.md, "Similarity Comparison", column qscale, in the order of the table.
PUBLISHED = [
    ("quant_stubx", "0.0115294"),
    ("quant_stuby", "0.0115294"),
    ("mul_op", "0.0168156"),
    ("cat_op", "0.0167490"),
    ("cat_op(1)", "0.0167490"),
    ("quantized_ops.0", "0.0167490"),
    ("quantized_ops.1", "0.0070079"),
    ("quantized_ops.2.sub", "0.0000041"),
    ("quantized_ops.2.exp", "0.0000305"),
    ("quantized_ops.2.sum", "0.0002541"),
    ("quantized_ops.2.reciprocal", "0.0000037"),
    ("quantized_ops.2.mul", "0.0009545"),
    ("quantized_ops.3", "0.0005042"),
    ("quantized_ops.4", "0.0005042"),
    ("quantized_ops.5", "0.0005042"),
    ("quantized_ops.6", "0.0005022"),
    ("quantized_ops.7", "0.0005022"),
    ("quantized_ops.8", "0.0005022"),
]


class Net(nn.Module):
    """The guide's net, wired as its statistics table shows it."""

    def __init__(self) -> None:
        super().__init__()
        # torch.quantization's stubs, as the guide imports them; the alias outlives torch.ao only as long as torch does
        stubs = pytest.importorskip("torch.ao.quantization", reason="torch has dropped its stubs")
        self.quant_stubx, self.quant_stuby = stubs.QuantStub(), stubs.QuantStub()
        self.mul_op, self.cat_op = FloatFunctional(), FloatFunctional()
        self.quantized_ops = nn.Sequential(
            nn.ReLU(),
            nn.Sigmoid(),
            nn.Softmax(),
            nn.SiLU(),
            horizon_nn.Interpolate(scale_factor=2, recompute_scale_factor=True),
            horizon_nn.Interpolate(scale_factor=2.3, recompute_scale_factor=True),
            nn.AvgPool2d(kernel_size=4),
            nn.Upsample(scale_factor=1.3, mode="bilinear"),
            nn.UpsamplingBilinear2d(scale_factor=0.7),
        )
        self.dequant_stub = stubs.DeQuantStub()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.quant_stubx(x), self.quant_stuby(y)
        z = self.mul_op.mul(x, y)
        x = self.cat_op.cat((x, z), dim=1)
        x = self.cat_op.cat((x, y), dim=1)
        return self.dequant_stub(self.quantized_ops(x))


def _data() -> tuple[Tensor, Tensor]:
    data = torch.arange(1 * 3 * 4 * 4) / 100 + 1
    return data.reshape(1, 3, 4, 4), data.reshape(1, 3, 4, 4)


def _scales(model: nn.Module) -> dict[str, list[str]]:
    """What each module gives on the next run: the printed scale of every output, in order of calls."""
    seen: dict[str, list[str]] = {}

    def keep(path: str) -> object:
        def hook(module: nn.Module, args: tuple, out: object) -> None:
            if isinstance(out, QTensor):
                seen.setdefault(path, []).append(f"{float(out.scale):.7f}")

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(keep(path))  # type: ignore[arg-type]
        if hasattr(module, "mul") and hasattr(module, "cat"):  # a FloatFunctional is not called itself
            module.activation_post_process.register_forward_hook(keep(path))
    model(*_data())
    return seen


def test_the_published_scales_come_out_of_one_observed_forward() -> None:
    qat = prepare_qat_fx(Net(), {"": default_qat_8bit_fake_quant_qconfig})
    qat(*_data())
    set_fake_quantize(qat, FakeQuantState._FLOAT)  # look at the scales without moving them
    seen = _scales(qat)
    found = []
    for name, _ in PUBLISHED:
        path, index = (name[:-3], 1) if name.endswith("(1)") else (name, 0)
        found.append((name, seen[path][index]))
    assert found == PUBLISHED


@pytest.mark.slow
def test_the_published_net_has_one_arithmetic(tmp_path) -> None:
    qat = prepare_qat_fx(Net(), {"": default_qat_8bit_fake_quant_qconfig})
    qat(*_data())
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert_one_arithmetic(qat, _data(), tmp_path)
