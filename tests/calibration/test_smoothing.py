"""Large channels of layer norms go into the weights that read them; what the float model computes stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, prepare, smooth_norms
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter


class Block(nn.Module):
    """A block of a transformer; `form` is where its norms are, and what else reads them."""

    def __init__(self, form: str = "before") -> None:
        super().__init__()
        self.form = form
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def attend(self, x: Tensor) -> Tensor:
        if self.form == "module":
            return self.attention(x, x, x, need_weights=False)[0]
        split = (layer(x).view(*x.shape[:-1], 2, 8).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*split).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "after":
            x = self.norm1(x + self.attend(x))
            return self.norm2(x + self.down(F.gelu(self.up(x))))
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x).roll(1, 1))))


def block(form: str) -> tuple[Block, list[Tensor]]:
    torch.manual_seed(0)
    net = Block(form).eval()
    with torch.no_grad():
        for norm in (net.norm1, net.norm2):  # two channels that are far larger, as in trained transformers
            norm.weight[3] *= 40
            norm.bias[7] = 60.0
        for weight in (net.query.weight, net.key.weight, net.value.weight, net.up.weight, net.attention.in_proj_weight):
            weight[:, 3] /= 40
            weight[:, 7] /= 60
    return net, [torch.randn(4, 6, 16) for _ in range(2)]


@pytest.mark.parametrize(
    ("form", "pairs"),
    [
        ("before", [("norm1", "query"), ("norm2", "up")]),
        ("module", [("norm1", "attention"), ("norm2", "up")]),
        ("after", []),  # their results are added, too
    ],
)
def test_outputs_stay_and_channels_become_alike(form, pairs):
    net, data = block(form)
    before = net(data[0])
    result = smooth_norms(net, data)
    assert [(pair.first, pair.second) for pair in result.pairs] == pairs
    assert torch.allclose(net(data[0]), before, rtol=1e-4, atol=1e-4)
    assert all(pair.after < pair.before / 2 for pair in result.pairs)


@pytest.mark.parametrize(("read", "count"), [("dtype", 1), ("shape", 1), ("T", 0)])
def test_questions_for_a_shape_read_no_channel_and_other_attributes_do(read, count):
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.flat, self.fc = nn.LayerNorm(16), nn.Flatten(0, -2), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            asked = getattr(x, read)
            out = self.fc(self.flat(x))
            return out + asked[3].sum() if read == "T" else out.to(asked) if read == "dtype" else out * asked[0]

    torch.manual_seed(0)
    net = Asking().eval()
    assert len(smooth_norms(net, [torch.randn(6, 16)]).pairs) == count


def test_int8_keeps_more_of_it():
    set_march(March.NASH_M)
    net, data = block("before")
    smoothed = copy.deepcopy(net)
    smooth_norms(smoothed, data)
    errors = []
    wanted = net(data[0]).detach()
    for float_net in (net, smoothed):
        model = prepare(QuantWrapper(float_net), (data[0],), default_calibration_qconfig_setter, out_dir=None)
        calibrate(model, data, patience=0, progress=False)
        errors.append(float((model(data[0]).detach() - wanted).norm()))
    assert errors[1] < 0.5 * errors[0]


def test_a_norm_whose_weight_somebody_else_reads_stays():
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x)) + self.norm.weight

    assert smooth_norms(Reading().eval(), [torch.randn(2, 4)]).pairs == []


def test_wrong_arguments():
    with pytest.raises(QuantizationConfigError, match="between 0 and 1"):
        smooth_norms(nn.LayerNorm(2), [torch.ones(1, 2)], strength=2)
