"""Pairing: the calls of two models that compute the same tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, prepare
from horizon_plugin_pytorch.watch import CallLog, pair_calls
from tests.routes import qconfig
from tests.watch.models import ROUTES, at_stage, data, net_of, stages

FLOAT_PAIRS = [
    ("quant", "quant"), ("[relu]", "stem"), ("block.relu", "block.sum"), ("[add]", "add 0"), ("[cat]", "cat 0"),
    ("[slice]", "[slice]"), ("[add](1)", "add 1"), ("[cat](1)", "cat 1"), ("[slice](1)", "[slice](1)"),
    ("shared", "shared"), ("shared(1)", "shared(1)"), ("[mul]", "mul 0"), ("[mul](1)", "mul 1"),
    ("[reshape]", "[reshape]"), ("[split]", "[split]"), ("drop", "drop"), ("fc", "fc"), ("dequant", "dequant"),
    ("dequant(1)", "dequant(1)"),
]  # fmt: skip
NAMES = {
    "jit": {"add 0": "_generated_add_0[add]", "add 1": "_generated_add_0[add](1)", "cat 0": "_generated_cat_0[cat]",
            "cat 1": "_generated_cat_0[cat](1)", "mul 0": "_generated_mul_0[mul]",
            "mul 1": "_generated_mul_1[mul_scalar]"},
    "symbolic": {"add 0": "_generated_add_0[add]", "add 1": "_generated_add_1[add]", "cat 0": "_generated_cat_0[cat]",
                 "cat 1": "_generated_cat_1[cat]", "mul 0": "_generated_mul_0[mul]",
                 "mul 1": "_leaf_halved._generated_mul_halved_6[mul_scalar]", "[reshape]": "_leaf_halved[reshape]"},
}  # fmt: skip


def names(pairing: Any) -> list[tuple[str, str]]:
    return [(one.name, other.name) for one, other in pairing.pairs]


def log(model: nn.Module, *inputs: Any) -> CallLog:
    return CallLog.of(model, *(inputs or (data(),)))


@pytest.mark.parametrize("stage", ["calibration", "qat", "validation", "converted"])
@pytest.mark.parametrize("route", ["jit", "symbolic"])
def test_float_and_prepared(route: str, stage: str) -> None:
    wanted = [(one, NAMES[route].get(other, other)) for one, other in FLOAT_PAIRS]
    float_net, other = net_of(route), at_stage(route, stage)
    pairing = pair_calls(log(float_net), log(other))
    assert names(pairing) == wanted
    assert {str(u) for u in pairing.first_only} == {
        "stem: a part of `stem`, which is fused", "block.conv: a part of `block.sum`, which is fused",
        "block.bn: a part of `block.sum`, which is fused", "block.sum[add]: a part of `block.sum`, which is fused",
    }  # fmt: skip
    assert not pairing.second_only
    swapped = pair_calls(log(other), log(float_net))
    assert sorted(names(swapped)) == sorted((b, a) for a, b in wanted)
    assert not swapped.first_only and len(swapped.second_only) == 4


def test_eager() -> None:
    pairing = pair_calls(log(net_of("eager")), log(at_stage("eager", "converted")))
    assert [pair for pair in names(pairing) if pair[0] != pair[1]] == [("block.relu", "block.sum")]
    assert len(pairing.first_only) == 3 and not pairing.second_only


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_stages_formats_and_checkpoints_pair_one_to_one(route: str) -> None:
    logs = {stage: log(model) for stage, model in stages(route)}
    logs["qint16"] = log(at_stage(route, "validation", dtype="qint16"))
    logs["pickled"] = log(pickle.loads(pickle.dumps(at_stage(route, "converted"))))
    for one, other in [("calibration", "qat"), ("qat", "converted"), ("qint16", "converted"), ("pickled", "qat")]:
        pairing = pair_calls(logs[one], logs[other])
        assert not pairing.first_only and not pairing.second_only
        assert all(a == b for a, b in names(pairing))
    assert names(pair_calls(logs["float"], logs["pickled"])) == names(pair_calls(logs["float"], logs["converted"]))


@pytest.mark.slow
def test_routes_pair_with_each_other() -> None:
    pairing = pair_calls(log(at_stage("jit", "qat")), log(at_stage("symbolic", "converted")))
    wanted = [(NAMES["jit"].get(b, b), NAMES["symbolic"].get(b, b)) for _, b in FLOAT_PAIRS]
    assert names(pairing) == wanted and not pairing.first_only and not pairing.second_only


class SharedReLU(nn.Module):
    """One ReLU after two layers, and by itself; two functions on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.one, self.other = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.relu, self.alone = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        a = self.one(x)
        b = self.other(x)
        y = self.relu(b) + self.relu(a)
        z = self.alone(y)
        y = self.relu(z) * z
        return self.dequant(F.relu(self.one_more(y)) + F.relu(self.last(z)))

    def one_more(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 1)

    def last(self, x: Tensor) -> Tensor:
        return x * 2 + x * 3


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_shared_activation_goes_with_the_layer_it_follows(method: str) -> None:
    net = SharedReLU().eval()
    qat = prepare(net, (data(),), qconfig_dict={"": qconfig()}, method=method, out_dir=None).eval()
    pairing = pair_calls(log(net), log(qat))
    found = dict(names(pairing))
    assert found["relu"] == "other" and found["relu(1)"] == "one" and found["relu(2)"].startswith("relu")
    assert {u.call.name for u in pairing.first_only} == {"one", "other"}
    # A model that keeps its forward calls the ReLU once more.
    parts = ["relu: a part of `other`, which is fused", "relu(1): a part of `one`, which is fused"]
    assert [str(u) for u in pairing.second_only] == (parts if method == "jit-strip" else [])
    assert found["[mul](1)"] == "_generated_mul_1[mul_scalar]" and found["[mul](2)"] == "_generated_mul_2[mul_scalar]"


class Repeated(nn.Module):
    """A block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv, self.relu = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1), nn.ReLU()

    def block(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x)) + x

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.block(self.block(self.quant(x))))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("own_scales", [False, True])
def test_calls_with_scales_of_their_own(method: str, own_scales: bool) -> None:
    net = Repeated().eval()
    qat = prepare(
        net, (data(),), qconfig_dict={"": qconfig()}, method=method, own_scales=own_scales, out_dir=None
    ).eval()
    pairing = pair_calls(log(net), log(qat))
    firsts = [one for one, _ in names(pairing)]
    assert firsts == (
        ["quant", "relu", "[add]", "relu(1)", "[add](1)", "dequant"] if own_scales else [
            "quant", "conv", "relu", "[add]", "conv(1)", "relu(1)", "[add](1)", "dequant"]
    )  # fmt: skip
    assert not pairing.second_only


def test_fused_and_unfused() -> None:
    net = net_of("jit")
    whole, single = (
        prepare(net.eval(), (data(),), qconfig_dict={"": qconfig()}, fuse_mode=mode, out_dir=None).eval()
        for mode in ("BNAddReLU", "NoFuse")
    )
    pairing = pair_calls(log(single), log(whole))
    found = {b: a for a, b in names(pairing)}
    assert found["block.sum"] == "block.relu" and found["stem"].startswith("_generated_relu")
    assert not pairing.second_only


def test_an_operator_that_is_several_in_the_other_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.attention(x, x, x, need_weights=False)[0])

    net, x = Net().eval(), torch.randn(1, 3, 4)
    qat = prepare(net, (x,), qconfig_dict={"": qconfig()}, out_dir=None).eval()
    pairing = pair_calls(log(net, x), log(qat, x))
    assert ("dequant", "dequant") in names(pairing) and "attention" in {one for one, _ in names(pairing)}


def test_what_has_no_partner_is_named() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.ReLU(), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if self.training else self.b(x).abs()

    net = Branches()
    pairing = pair_calls(log(net, torch.ones(1)), log(copy.deepcopy(net).eval(), torch.ones(1)))
    assert not pairing.pairs
    assert [str(u) for u in pairing.first_only] == ["a: not called in the other model"]
    assert [str(u) for u in pairing.second_only] == [
        "b: not called in the other model",
        "[abs]: not in the other model",
    ]
