"""What reads a norm decides whether it is rewritten: the float function stays, and the result says why a norm does."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning
from horizon_plugin_pytorch.quantization import center_norms, equalize, smooth_norms

C = 8
REWRITES = (center_norms, smooth_norms)


class Net(nn.Module):
    """A norm with large channels on one side of zero, and what reads it by `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.norm = form, nn.LayerNorm(C)
        self.whole, self.value, self.gate = nn.Linear(C, 5), nn.Linear(C // 2, 5), nn.Linear(C // 2, 5)
        self.one, self.twice, self.coarse = nn.Linear(C, 1), nn.Linear(C, 2 * C), nn.Linear(C, 5).bfloat16()
        self.attention = nn.MultiheadAttention(C, 2, batch_first=True)
        with torch.no_grad():
            self.norm.bias.copy_(torch.randn(C) * 20)
            self.norm.weight.mul_(1 + 5 * torch.rand(C))

    def forward(self, x: Tensor):
        y = self.norm(x)
        if self.form == "parts of the channels":
            value, gate = y.chunk(2, -1)
            return self.value(value) * self.gate(gate)
        if self.form == "one channel added":
            return self.whole(y + self.one(x))
        if self.form == "other channels added":
            return self.whole(y + self.twice(x[:, :2]).reshape(y.shape))
        if self.form == "bfloat16":
            return self.coarse(y.to(torch.bfloat16)).float()
        if self.form == "shared attention":
            return self.attention(y, y, y)[0] + self.attention(x, x, x)[0]
        if self.form == "given back":
            return self.whole(y), y
        if self.form == "nothing":
            return None if self.whole(y) is None else 0
        return self.whole(y) * float("nan") if self.form == "NaN" else self.whole(y)


def tensors(x) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.CalibrationWarning")
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("parts of the channels", "`gate` .Linear. in the top module .test_norm_readers.*not all channels"),
        ("one channel added", "`add`.*reads its result"),
        ("other channels added", "`add`.*reads its result"),
        ("shared attention", "`attention`.*(is shared|called more than once)"),
        ("given back", "leaves the model"),
    ],
)
def test_what_cannot_be_made_up_for_stays_and_the_result_says_why(rewrite, form, why):
    net, x = Net(form).eval(), torch.randn(3, 4, C)
    before = copy.deepcopy(net.state_dict())
    result = rewrite(net, [x])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert re.search(why, result.left["norm"])
    assert "`norm` stays as it is: " in str(result)


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("shapes", [[(C,)], [(3, 4, C), (0, 4, C)], [(2, C), (5, 1, C)]])
def test_batches_without_samples_and_single_samples(rewrite, shapes):
    net, data = Net("plain").eval(), [torch.randn(shape) for shape in shapes]
    before = [net(x) for x in data]
    result = rewrite(net, data)
    assert len(getattr(result, "norms", None) or result.pairs) == 1 and "norm" not in result.left
    for x, y in zip(data, before, strict=True):
        torch.testing.assert_close(net(x), y, rtol=1e-4, atol=1e-4)


def test_batches_without_samples_in_equalize():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    data = [torch.randn(0, 2, 4, 4), torch.randn(2, 2, 4, 4), torch.randn(2, 4, 4)]
    before = net(data[1])
    assert len(equalize(net, data).pairs) == 1
    torch.testing.assert_close(net(data[1]), before)
    assert equalize(net, data[:1]).pairs == []


def test_a_norm_in_another_precision_than_its_reader():
    net, x = Net("bfloat16").eval(), torch.randn(3, 4, C)
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(CalibrationWarning, match="too coarse"):
        assert center_norms(net, [x]).norms == []
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    y = net(x)
    assert len(smooth_norms(net, [x]).pairs) == 1
    assert (net(x) - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("rewrite", REWRITES)
def test_models_of_inference_mode_and_with_compiled_parts(rewrite):
    with torch.inference_mode():
        net = Net("plain").eval()
    net.requires_grad_(False)
    x = torch.randn(3, 4, C)
    before = net(x)
    result = rewrite(net, [x])
    assert len(getattr(result, "norms", None) or result.pairs) == 1
    torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)
    net = nn.Sequential(Net("plain"), torch.jit.trace(nn.Linear(5, 5), torch.ones(1, 5))).eval()
    before = net(x)
    rewrite(net, [x])
    torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("form", ["nothing", "NaN"])
def test_what_cannot_be_checked_is_not_changed(rewrite, form):
    net = Net(form).eval()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(CalibrationError, match="cannot be seen whether it computes the same"):
        rewrite(net, [torch.randn(3, 4, C)])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_of_torch_are_looked_into(norm_first):
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True, norm_first=norm_first).eval()
    with torch.no_grad():
        for norm in (net.norm1, net.norm2):
            norm.bias.copy_(torch.randn(C) * 20)
        net.linear1.weight[0] *= 30
    x = torch.randn(3, 4, C)
    before = net(x)
    centered, smoothed, equalized = center_norms(net, [x]), smooth_norms(net, [x]), equalize(net, [x])
    assert [norm.norm for norm in centered.norms] == (["norm1", "norm2"] if norm_first else ["norm1"])
    assert [pair.first for pair in smoothed.pairs] == (["norm1", "norm2"] if norm_first else [])
    assert [(pair.first, pair.second) for pair in equalized.pairs] == [("linear1", "linear2")]
    assert norm_first or "leaves the model" in centered.left["norm2"]
    assert type(net) is nn.TransformerEncoderLayer and type(net.activation) is not nn.ReLU
    torch.testing.assert_close(net(x), before, rtol=1e-3, atol=1e-3)


def test_norms_that_no_batch_reaches_are_named():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    for rewrite in REWRITES:
        assert rewrite(Unused().eval(), [torch.randn(2, C)]).left == {"norm": "no batch reaches it"}
