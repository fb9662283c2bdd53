"""QAT under DistributedDataParallel in two real processes: what must be the same in both is, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.processes import run_workers

pytestmark = pytest.mark.processes

WORKER = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    FakeQuantState, calibrate, freeze_qat_module, get_default_qconfig, prepare, set_fake_quantize
)
from tests.fake_quant.test_training_switches import Net

set_march(March.BAYES)
torch.set_num_threads(1)
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, 3, 8, 8, generator=generator) * (1 + i)).chunk(2)[rank] * (1 + rank) for i in range(4)]


def train(scales, sync=False, mode=QATMode.FuseBN, freeze=None, calibrated=True, **arguments):
    torch.manual_seed(0)
    set_qat_mode(mode)
    shared = {"is_sync_quantize": sync}
    qconfig = get_default_qconfig(scales, scales, activation_qkwargs=shared, weight_qkwargs=shared)
    model = prepare(Net().eval(), (data[0],), qconfig_dict={"": qconfig}, out_dir=None)
    if calibrated:
        calibrate(model, data, progress=False)
    model.train()
    set_fake_quantize(model, FakeQuantState.QAT)
    if freeze is not None:
        freeze(model.backbone)
    state = {"before": {n: v.clone() for n, v in model.state_dict().items()}}
    parallel = DistributedDataParallel(model, **arguments)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    try:
        for batch in data:
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return {"error": str(error)}
    state["after"] = {n: v.clone() for n, v in model.state_dict().items()}
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    with torch.no_grad():
        state["result"] = model(torch.ones(1, 3, 8, 8))
    return state


def validation(backbone):
    set_fake_quantize(backbone, FakeQuantState.VALIDATION)


found = {}
for scales in ("fake_quant", "lsq", "pact"):
    for sync in (True, False):
        found[scales, sync] = train(scales, sync)
    found[scales, "bn"] = train(scales, True, QATMode.WithBN)
    found[scales, "frozen"] = train(scales, True, freeze=freeze_qat_module)
    found[scales, "validation"] = train(scales, True, freeze=validation, find_unused_parameters=True)
for scales in ("lsq", "pact"):
    found[scales, "fresh"] = train(scales, calibrated=False)
found["lsq", "refused"] = train("lsq", freeze=validation)
torch.save(found, f"{rank}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("training")
    for done in run_workers(folder, WORKER):
        assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def different(first: dict, second: dict) -> set[str]:
    return {name for name in first if not torch.equal(first[name], second[name])}


@pytest.mark.parametrize("scales", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("how", [True, "bn", "frozen", "validation"])
def test_processes_that_share_ranges_stay_the_same(states, scales, how) -> None:
    first, second = (state[scales, how] for state in states)
    local = {n for n in different(first["after"], second["after"]) if "running_" not in n}  # each has its statistics
    assert not local
    moved = different(first["before"], first["after"])
    assert "head.weight" in moved
    if scales != "pact":  # of its weights none is clipped
        assert {n for n in moved if n.startswith("head.") and n.endswith("scale")}
    if how == "bn":
        return
    assert torch.equal(first["result"], second["result"])
    of_backbone = {n for n in moved if n.startswith("backbone.")}
    if how == "frozen":
        assert not of_backbone
    if how == "validation":
        assert "backbone.0.weight" in of_backbone and not {n for n in of_backbone if n.endswith("scale")}


@pytest.mark.parametrize("scales", ["fake_quant", "lsq", "pact"])
def test_processes_that_do_not_share_ranges_share_what_is_trained(states, scales) -> None:
    first, second = (state[scales, False] for state in states)
    apart = different(first["after"], second["after"])
    assert not {n for n in apart if n.endswith((".weight", ".bias"))}
    has_own_scales = {n for n in apart if n.endswith("activation_post_process.scale")}
    assert bool(has_own_scales) == (scales == "fake_quant")
    moved = {"head.weight"} if scales == "pact" else {"head.weight", "head.weight_fake_quant.scale"}
    assert different(first["before"], first["after"]) >= moved


@pytest.mark.parametrize("scales", ["lsq", "pact"])
def test_trained_scales_begin_the_same_without_calibration(states, scales) -> None:
    """The first batch gives them, and the processes have different ones."""
    first, second = (state[scales, "fresh"] for state in states)
    assert not {n for n in different(first["after"], second["after"]) if not n.endswith(("min_val", "max_val"))}
    assert {float(v) for n, v in first["before"].items() if n.endswith("activation_post_process.scale")} == {1.0}
    assert not [n for n, v in first["after"].items() if n.endswith("scale") and 1.0 in v.tolist()]


def test_trained_scales_that_only_the_state_freezes_need_an_argument_of_ddp(states) -> None:
    for state in states:
        assert "find_unused_parameters=True" in state["lsq", "refused"]["error"]
