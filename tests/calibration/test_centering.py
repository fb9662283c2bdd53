"""Channels of layer norms move around zero; what the float model computes stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, center_norms, prepare
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter


class Block(nn.Module):
    """A block of a transformer; `form` is where its norms are, and what else reads them."""

    def __init__(self, form: str = "after") -> None:
        super().__init__()
        self.form = form
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)
        self.drop, self.add = nn.Dropout(0.5), FloatFunctional()
        self.plain = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "before":
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return self.head(self.norm2(x + self.down(F.gelu(self.up(x)))).roll(1, 1))
        x = self.norm1(x)
        x = self.norm2(x + self.attention(x, x, x, need_weights=False)[0])
        inner = self.drop(self.down(F.gelu(self.up(x))))
        if self.form == "functional":
            return self.add.add(x, inner)
        if self.form == "in place":
            x += inner
            return x
        if self.form == "no bias":
            return x + self.plain(x)
        if self.form == "read twice":
            return x + inner + inner.sum()
        if self.form == "padded":
            return self.head(F.pad(x, (0, 0, 0, 1))) + inner.sum()
        return x * 2 if self.form == "multiplied" else x + inner


def block(form: str) -> tuple[Block, list[Tensor]]:
    torch.manual_seed(0)
    net = Block(form).eval()
    with torch.no_grad():
        for norm in (net.norm1, net.norm2):  # two channels on one side of zero, as in trained transformers
            norm.bias[3], norm.bias[7] = 30.0, -20.0
        for layer in (net.up, net.head):
            layer.weight[:, [3, 7]] /= 20
        net.attention.in_proj_weight[:, [3, 7]] /= 20
    return net, [torch.randn(4, 6, 16) for _ in range(2)]


@pytest.mark.parametrize(
    ("form", "norms"),
    [
        ("before", [("norm1", ("attention",), ()), ("norm2", ("head",), ())]),
        ("after", [("norm1", ("attention",), ("attention",)), ("norm2", ("up",), ("down",))]),
        ("functional", [("norm1", ("attention",), ("attention",)), ("norm2", ("up",), ("down",))]),
        ("in place", [("norm1", ("attention",), ("attention",)), ("norm2", ("up",), ("down",))]),
        ("no bias", [("norm1", ("attention",), ("attention",))]),
        ("read twice", [("norm1", ("attention",), ("attention",))]),
        ("padded", [("norm1", ("attention",), ("attention",))]),
        ("multiplied", [("norm1", ("attention",), ("attention",))]),
    ],
)
def test_outputs_stay_and_channels_move_around_zero(form, norms):
    net, data = block(form)
    before = net(data[0])
    result = center_norms(net, data)
    assert [(n.norm, n.readers, n.added) for n in result.norms] == norms
    assert torch.allclose(net(data[0]), before, rtol=1e-4, atol=1e-4)
    assert all(n.before > 25 and n.after < 5 for n in result.norms)
    with torch.no_grad():
        moved = net.norm1(data[0] if form == "before" else torch.cat(data))
    assert moved.abs().max() < 5
    assert "norm1" in str(result)


def test_int8_keeps_more_of_it():
    set_march(March.NASH_M)
    net, data = block("before")
    centered = copy.deepcopy(net)
    center_norms(centered, data)
    errors = []
    wanted = net(data[0]).detach()
    for float_net in (net, centered):
        model = prepare(QuantWrapper(float_net), (data[0],), default_calibration_qconfig_setter, out_dir=None)
        calibrate(model, data, patience=0, progress=False)
        errors.append(float((model(data[0]).detach() - wanted).norm()))
    assert errors[1] < 0.8 * errors[0]


class Hidden(nn.Module):
    """What reads the norm's result is not seen in the graph: a module keeps it aside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), Keeping(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.norm(x))) + self.layer.kept[0].sum()


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [x]
        return super().forward(x)


def test_a_norm_that_something_else_reads_stays():
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x)) + self.norm.bias

    for net in (Reading(), Hidden()):
        assert center_norms(net.eval(), [torch.randn(2, 4)]).norms == []


def test_attention_that_two_norms_share_stays_without_being_tried(recwarn):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for norm in (self.norm1, self.norm2):
                y = norm(x)
                x = x + self.attention(y, y, y, need_weights=False)[0]
            return x

    assert center_norms(Shared().eval(), [torch.randn(2, 3, 4)]).norms == []
    assert [str(w.message) for w in recwarn if issubclass(w.category, CalibrationWarning)] == []


def test_numbers_that_leave_the_graph_are_found_by_trying():
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.layer(x) + max(x.tolist()[0])

    torch.manual_seed(0)
    net = Telling().eval()
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(CalibrationWarning, match="`norm` stays as it is"):
        assert center_norms(net, [torch.randn(8, 4) * 3]).norms == []
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_wrong_models_and_data():
    set_march(March.NASH_M)
    net, data = block("after")
    with pytest.raises(CalibrationError, match="NaN or infinity reaches `norm1`"):
        center_norms(net, [torch.full((1, 2, 16), torch.nan)])
    model = prepare(QuantWrapper(net), (data[0],), default_calibration_qconfig_setter, out_dir=None)
    with pytest.raises(QuantizationConfigError, match="give the float model"):
        center_norms(model, data)
