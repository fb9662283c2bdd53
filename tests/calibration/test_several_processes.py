"""The example, also under real `torchrun`: calibration over two processes, then QAT under DistributedDataParallel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import run_workers

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "several_processes.py"


def under_torchrun(folder: Path, *arguments: str) -> tuple[str, list[dict]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
        "--out", str(folder / "state"), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, _states(folder, 2)


# What torchrun does, at the cost of two forks: it tells the processes where to find each other.
LAUNCHER = f"""
import functools, runpy, sys
import torch.distributed as dist
rank, place, count, *arguments = sys.argv[1:]
dist.init_process_group = functools.partial(
    dist.init_process_group, init_method=place, rank=int(rank), world_size=int(count)
)
sys.argv = ["{EXAMPLE}", "--out", "state", *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *arguments: str, processes: int = 2) -> list[dict]:
    for done in run_workers(folder, LAUNCHER, str(processes), *arguments, count=processes):
        assert done.returncode == 0, done.stderr[-3000:]
    return _states(folder, processes)


def _states(folder: Path, count: int) -> list[dict]:
    return [torch.load(folder / f"state.{rank}", weights_only=True) for rank in range(count)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("one"), processes=1)[0]


def different(first: dict, second: dict, suffix: str) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if name.endswith(suffix) and not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("scales", ["fake_quant", "lsq"])
def test_two_processes_agree_on_scales_and_weights(scales, tmp_path, alone) -> None:
    if scales == "lsq":
        text, (first, second) = under_torchrun(tmp_path, "--scales", scales)
        assert "2 processes" in text and "trained on the integer grid" in text
    else:
        first, second = run(tmp_path)
    for stage in ("calibrated", "trained"):
        assert not different(first[stage], second[stage], "scale"), stage
    assert not different(first["trained"], second["trained"], "weight")
    for name, scale in alone["calibrated"].items():  # rounding of float training apart, those of one process
        torch.testing.assert_close(first["calibrated"][name], scale, rtol=0.3, atol=0)
    moved = different({n: first["trained"][n] for n in first["calibrated"]}, first["calibrated"], "scale")
    assert len(moved) > 2
    for name in first["calibrated"]:
        assert bool((first["trained"][name] > 0).all() & first["trained"][name].isfinite().all())


def test_processes_that_do_not_share_ranges_see_their_own_within_a_step(tmp_path) -> None:
    """Weights stay together all the same; the range of each step begins with that of process 0 (DDP's buffers)."""
    first, second = run(tmp_path, "--alone")
    assert not different(first["calibrated"], second["calibrated"], "scale")
    assert not different(first["trained"], second["trained"], ".weight")
    assert different(first["trained"], second["trained"], "activation_post_process.scale")
