"""A process that fails while several calibrate: the others say so, and what is written is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from horizon_plugin_pytorch.quantization import calibrate
from tests.calibration.test_calibrate import batches, net
from tests.processes import run_workers

pytestmark = pytest.mark.processes

WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, calibrate, set_fake_quantize
from tests.calibration.test_calibrate import batches, net

set_march(March.BAYES)
torch.set_num_threads(1)
rank, place, how, observer = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
told = Path("told")


def wait():  # until the other has given up
    while not told.exists():
        time.sleep(0.05)


def data():
    for i, batch in enumerate(batches(5)):
        if rank and i == 3 and how == "dies":
            os._exit(3)
        if rank and i == 3 and how == "data":
            raise ValueError("a broken image")
        if i == 3 and how == "stuck":
            if rank:
                wait()
            # From here on only: until now the other may take its time on a busy machine.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        yield batch.chunk(2)[rank]


model, seen = net(observer), []


def fail(*args):
    seen.append(1)
    if len(seen) == 4 and rank and how == "forward":
        os._exit(3)  # some observers have seen this batch, others have not
    if len(seen) == 4 and rank and how == "model":
        raise ValueError("a broken image")


model.module.second.register_forward_pre_hook(fail)
try:
    if how == "manual":
        for module in model.modules():
            if hasattr(module, "is_sync_quantize"):
                module.is_sync_quantize = True
        set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
        for i, batch in enumerate(batches(5)):
            if rank and i == 3:
                os._exit(3)
            model(batch.chunk(2)[rank])
    else:
        found = calibrate(model, data(), patience=0, state_file=f"state.{rank}").scales
        torch.save(found, f"scales.{rank}")
except Exception:
    if rank == 0:
        told.touch()
    elif how in ("data", "model"):
        wait()  # the others must know without this process ending
    raise
dist.destroy_process_group()
"""


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"worker.py", "told"}


@pytest.mark.parametrize(
    ("how", "observer", "message"),
    [
        ("dies", "min_max", "CalibrationError: calibrate: process 0 of 2 lost another process at batch 3: "),
        ("forward", "histogram", "CalibrationError: calibrate: process 0 of 2 lost another process at batch 3: "),
        ("data", "mse", "CalibrationError: calibrate: the data of process 1 failed at batch 3; its output has"),
        ("model", "kl", "CalibrationError: calibrate: the model of process 1 failed at batch 3; its output has"),
        ("stuck", "min_max", "CalibrationError: calibrate: process 0 of 2 lost another process at batch 3: "),
    ],
)
def test_the_others_say_so_and_a_new_run_goes_on(how, observer, message, tmp_path) -> None:
    survivor, lost = run_workers(tmp_path, WORKER, how, observer)
    assert survivor.returncode == 1 and message in survivor.stderr, survivor.stderr[-3000:]
    assert lost.returncode == {"dies": 3, "forward": 3}.get(how, 1), lost.stderr[-3000:]
    assert ("ValueError: a broken image" in lost.stderr) == (how in ("data", "model"))
    assert left(tmp_path) == {"state.0"}
    assert torch.load(tmp_path / "state.0", weights_only=True)["steps"] == 3
    for done in run_workers(tmp_path, WORKER, "lives", observer):
        assert done.returncode == 0, done.stderr[-3000:]
    assert left(tmp_path) == {"scales.0", "scales.1"}
    first, second = (torch.load(tmp_path / f"scales.{rank}", weights_only=True) for rank in range(2))
    whole = calibrate(net(observer), batches(5), patience=0).scales
    for name, scale in whole.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], scale, rtol=2e-3, atol=0)


def test_calibration_by_hand_names_the_module_and_the_process(tmp_path) -> None:
    survivor, lost = run_workers(tmp_path, WORKER, "manual", "percentile")
    assert lost.returncode == 3 and survivor.returncode == 1
    assert "CalibrationError: `quant`: process 0 of 2 lost another process: " in survivor.stderr, survivor.stderr[
        -3000:
    ]
    assert not left(tmp_path)
