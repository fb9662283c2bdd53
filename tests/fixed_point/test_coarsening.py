"""Dead channels: weights of almost nothing with an ordinary bias, as pruned and pretrained networks have them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import AccumulatorWarning
from horizon_plugin_pytorch.fixed_point import coarsen
from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
from tests.routes import prepared


def _with_dead_channels(layer: nn.Module, axis: int) -> nn.Module:
    """Output channels 1 and 2 read almost nothing."""
    with torch.no_grad():
        layer.weight.transpose(0, axis)[1:3] *= 1e-9
        layer.bias[1], layer.bias[2] = 1.0, -0.7
    return layer


LAYERS = {
    "conv": (lambda: _with_dead_channels(nn.Conv2d(4, 4, 3), 0), (2, 4, 6, 6), 1),
    "depthwise": (lambda: _with_dead_channels(nn.Conv2d(4, 4, 3, groups=4), 0), (2, 4, 6, 6), 1),
    "transposed": (lambda: _with_dead_channels(nn.ConvTranspose2d(4, 4, 3), 1), (2, 4, 6, 6), 1),
    "linear": (lambda: _with_dead_channels(nn.Linear(4, 4), 0), (2, 4), 1),
}


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_dead_channel_gives_its_bias(kind: str, dtype: str) -> None:
    make, shape, axis = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulatorWarning)
        qat = prepared(QuantWrapper(layer), (x,), dtype)
        out = qat(x)
    step = float(qat.module.activation_post_process.scale)
    dead = torch.tensor([1, 2])
    error = (out - layer(x)).index_select(axis, dead).abs().max()
    assert error <= 0.51 * step


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = _with_dead_channels(nn.Conv2d(4, 4, 1), 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x


def test_a_dead_channel_passes_its_residual() -> None:
    net, x = _Residual(), torch.randn(2, 4, 6, 6)
    qat = prepared(QuantWrapper(net), (x,))
    step = float(qat.module.get_submodule("_generated_add_0").activation_post_process.scale)
    step += float(qat.quant.activation_post_process.scale)  # the input was rounded, too
    assert (qat(x) - net(x))[:, 1:3].abs().max() <= 0.51 * step


def test_ordinary_channels_keep_their_grid() -> None:
    weight, scale = torch.randint(-128, 128, (8, 4, 3, 3)).float(), torch.full((8,), 1e-4, dtype=torch.float64)
    coarse, coarse_scale = coarsen(
        weight, torch.randn(8), scale, torch.tensor([0.05]), output_axis=0, groups=1, input_size=128, output_steps=255
    )
    assert torch.equal(coarse, weight)
    assert torch.equal(coarse_scale, scale)


def test_a_live_channel_with_a_large_bias_keeps_its_weights() -> None:
    # The bias passes 2**23 steps, but the weights still move the output by many steps.
    weight, scale = torch.full((1, 4096), 127.0), torch.tensor([1e-7], dtype=torch.float64)
    coarse, _ = coarsen(
        weight, torch.ones(1), scale, torch.tensor([0.05]), output_axis=0, groups=1, input_size=128, output_steps=255
    )
    assert torch.equal(coarse, weight)


@pytest.mark.parametrize(("output_axis", "groups"), [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_only_the_channel_in_need_changes(output_axis: int, groups: int) -> None:
    layer = (nn.ConvTranspose2d if output_axis else nn.Conv2d)(4, 6, 3, groups=groups)
    weight = torch.randint(1, 128, layer.weight.shape).float()
    scale = torch.full((6,), 1e-4, dtype=torch.float64)
    scale[4] = 1e-14
    coarse, _ = coarsen(
        weight, torch.ones(6), scale, torch.tensor([0.05]), output_axis=output_axis, groups=groups, input_size=128,
        output_steps=255,
    )  # fmt: skip
    x = torch.ones(1, 4, 5, 5)
    run = nn.functional.conv_transpose2d if output_axis else nn.functional.conv2d
    before, after = run(x, weight, groups=groups), run(x, coarse, groups=groups)
    assert not after[:, 4].any()
    others = torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(before[:, others], after[:, others])


@pytest.mark.parametrize(
    ("step", "weight", "scale"),
    [
        (2048.0, 1.0, 64.0),
        (1024.0, 1.0, 64.0),  # an input of 128 loses 128 of the accumulator: an eighth of a step
        (1023.0, 65.0, 1.0),
        (512.0, 65.0, 1.0),
    ],
)
def test_a_grid_becomes_coarser_where_no_output_moves_by_more_than_an_eighth(
    step: float, weight: float, scale: float
) -> None:
    """The bias of 2**24 asks for a grid of 64: 65 becomes 64 there."""
    given = torch.tensor([[65.0]]), torch.tensor([2.0**24]), torch.tensor([1.0], dtype=torch.float64)
    found = coarsen(*given, torch.tensor([step]), output_axis=0, groups=1, input_size=128, output_steps=255)
    assert (found[0].item(), found[1].item()) == (weight, scale)
