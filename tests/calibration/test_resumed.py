"""Runs of a traced model that begin in the middle give what whole runs give."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.resumed import ResumableGraph, Snapshot
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)


class Writing(nn.Module):
    """Writes in place to what a view shows, reads a buffer, calls a method, has an argument that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(3.0))
        self.act = nn.ReLU()

    def forward(self, x: Tensor, factor: float = 2.0) -> dict[str, Tensor]:
        x = x * factor
        part = x[:2]
        kept = self.act(x)
        x += self.shift
        return {"part": part.clone().neg(), "sums": x.sum() + kept}


def snapshots(model: nn.Module, *inputs: Tensor) -> list[Snapshot]:
    """One before each node."""
    graph, found = ResumableGraph.of(model), []
    assert graph is not None
    with graph.run_from(None, before=lambda take: found.append(take())):
        model(*inputs)
    return found


def test_every_node_can_be_the_first_and_a_run_spoils_no_snapshot() -> None:
    model = fx.symbolic_trace(Writing())
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    wanted = model(x.clone())
    found = snapshots(model, x.clone())
    assert len(found) > 6
    graph = ResumableGraph(model)
    for snapshot in found * 2:
        with graph.run_from(snapshot):
            out = model(torch.zeros(4))
        assert {name: value.tolist() for name, value in out.items()} == {k: v.tolist() for k, v in wanted.items()}
    assert "forward" not in model.__dict__
    assert model(torch.zeros(4))["sums"].tolist() == [12.0] * 4


def test_a_snapshot_keeps_only_what_is_needed() -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    found = snapshots(fx.symbolic_trace(nn.Sequential(*layers)), torch.randn(2, 4))
    assert [len(snapshot.values) for snapshot in found] == [1] * 7


def test_integers_are_the_same_from_the_middle() -> None:
    torch.manual_seed(0)
    net = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)))
    model, x = prepare_qat_fx(net.eval(), {"": get_default_qconfig()}), torch.randn(8, 4)
    calibrate(model, [x], progress=False)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    wanted, graph = model(x), ResumableGraph.of(model)
    assert graph is not None
    for snapshot in snapshots(model, x):
        with graph.run_from(snapshot):
            assert torch.equal(model(x), wanted)


def test_a_model_with_its_own_forward_has_none() -> None:
    assert ResumableGraph.of(nn.ReLU()) is None
