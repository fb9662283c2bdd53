"""``python -m benchmarks.debug_tools``: what it costs to compare two models, in time and in memory.

Time: `featuremap_similarity` of a QAT and a quantized ResNet18 over a float forward, processor time, medians of
interleaved rounds on one thread; and `model_profiler`, which runs all tools.

Memory: how much more a process takes at its peak while a ResNet50 runs on images of 512 x 960, alone in float and in
the tools; each is measured in a process of its own, so that nothing is left of what ran before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.models import ResNet50
from benchmarks.run import interleaved
from benchmarks.watching import stages
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.quant_profiler import featuremap_similarity, model_profiler

TIME_LIMIT, MEMORY_LIMIT = 6.0, 3.0
TOOLS = ("similarity", "profiler", "profiler, from float")


def quietly(job: Callable[[], Any]) -> Callable[[], None]:
    """A tool without what it prints."""

    def run() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            job()

    return run


def tools(
    net: nn.Module, qat: nn.Module, quantized: nn.Module, images: Tensor, folder: str
) -> dict[str, Callable[[], None]]:
    """The tools that are measured."""
    return {
        "similarity": quietly(lambda: featuremap_similarity(qat, quantized, images, out_dir=folder)),
        "profiler": quietly(lambda: model_profiler(qat, quantized, images, "QvsQ", folder)),
        "profiler, from float": quietly(lambda: model_profiler(net, qat, images, "FvsQ", folder)),
    }


def bench_time(rounds: int, size: int) -> list[list[Any]]:
    """Tools over a float forward of a ResNet18."""
    images = torch.randn(1, 3, size, size)
    models = dict(stages("ResNet18", images))
    qat, quantized = models["QAT, symbolic"], models["converted, symbolic"]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            "float": lambda: models["float"](images),
            "QAT": lambda: qat(images),
            "quantized": lambda: quantized(images),
            **tools(models["float"], qat, quantized, images, folder),
        }
        found = interleaved(jobs, rounds, "time", time.process_time)
    limits = {"similarity": f"<= {TIME_LIMIT:g}"}
    return [[name, f"{found[name]:.2f}", limits.get(name, "")] for name in jobs]


@torch.no_grad()
def measure(what: str, height: int, width: int) -> None:
    """Print by how many bytes the process grows while something runs."""
    torch.set_num_threads(1)
    set_march(March.NASH_E)
    net = ResNet50().eval()
    small, images = torch.randn(1, 3, 64, 64), torch.randn(1, 3, height, width)
    qat = prepare_qat_fx(net, {"": default_qat_8bit_fake_quant_qconfig}).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(small)
    set_fake_quantize(qat, FakeQuantState.QAT)
    quantized = convert_fx(qat)
    with tempfile.TemporaryDirectory() as folder:
        jobs = tools(net, qat, quantized, small, folder)
        jobs.get(what, lambda: net(small))()  # what is made once
        job = tools(net, qat, quantized, images, folder).get(what, lambda: net(images))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = _peak()
        job()
        print(_peak() - before)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def bench_memory(height: int, width: int) -> list[list[Any]]:
    """Tools over a float forward of a ResNet50."""
    # Freed memory goes back to the system at once, so that it is not taken for memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {}
    for what in ("float", *TOOLS):
        code = f"from benchmarks.debug_tools import measure; measure({json.dumps(what)}, {height}, {width})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks[what] = int(done.stdout.split()[-1])
    limit = f"<= {MEMORY_LIMIT:g}"
    return [
        [name, f"{peak / 2**20:.0f} MiB", f"{peak / peaks['float']:.2f}", limit if name in TOOLS else ""]
        for name, peak in peaks.items()
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=224, help="of the images of the ResNet18")
    parser.add_argument("--only", choices=("time", "memory"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_march(March.NASH_E)
    if options.only != "memory":
        print(
            tabulate(bench_time(options.rounds, options.size), ["ResNet18", "/ float", "limit"], disable_numparse=True)
        )
    if options.only != "time":
        headers = ["ResNet50, 512 x 960", "peak", "/ float", "limit"]
        print(tabulate(bench_memory(512, 960), headers, disable_numparse=True))


if __name__ == "__main__":
    main()
