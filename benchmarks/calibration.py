"""Calibration and trained scales next to a float forward and to peers; a part of `make bench`.

The peers are torch.ao, and ModelOpt and AIMET where they are installed; these two choose scales when calibration ends,
which is not counted.

Ratios are medians of interleaved rounds on one thread, in processor time, so that other load counts less: a calibration
batch over the float forward of the same images, and an LSQ step over an STE step. Each is run twice and the second time
counts, as in a calibration, where a batch follows another of the same model. The second table has the time that each
observer takes for a million values. With `HORIZON_COMPILED_PASSES=1` passes are compiled; the last line says so.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from benchmarks.peer import calibration_peers, peer_observers
from benchmarks.run import build, interleaved, training_step
from horizon_plugin_pytorch.compiled import compiled_passes
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    calibrate,
    default_qat_8bit_lsq_quant_qconfig,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.statistics.observer_names import range_methods

OBSERVERS = range_methods() | {"histogram": HistogramObserver}
LIMITS = {
    "ResNet18": dict.fromkeys(OBSERVERS, 1.2) | {"min_max": 1.05, "percentile": 1.15},
    "MobileNetV2": dict.fromkeys(OBSERVERS, 1.4) | {"min_max": 1.1, "percentile": 1.3},
}
STEP_LIMIT = 1.05
SHAPE = (4, 64, 64, 64)  # about a million values, as an image network has them: a ReLU leaves half of them 0


def bench_calibration(name: str, batch: int, rounds: int) -> list[list[Any]]:
    """Calibration batch over float forward, for each observer."""
    images = torch.randn(batch, 3, 224, 224)
    model = build(name).eval()
    jobs: dict[str, Callable[[], Any]] = {"float": lambda: model(images)}
    for observer in OBSERVERS:
        prepared = prepare_qat_fx(model, {"": get_default_qconfig(activation_observer=observer)}).eval()
        set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
        jobs[observer] = lambda prepared=prepared: prepared(images)
    for peer, calibrated in calibration_peers(build(name), images).items():
        jobs[peer] = lambda calibrated=calibrated: calibrated(images)
    with torch.no_grad():
        result = interleaved(jobs, rounds, f"{name} calibration", time.process_time, follows_itself=True)
    return [
        [name, f"calibration batch / float forward, {job}", f"{result[job]:.2f}", _wanted(LIMITS[name].get(job))]
        for job in list(jobs)[1:]
    ]


def bench_learned(name: str, batch: int, rounds: int) -> list[list[Any]]:
    """A training step with trained scales over one with observed scales."""
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    jobs = {}
    for kind, qconfig in (("STE", get_default_qconfig()), ("LSQ", default_qat_8bit_lsq_quant_qconfig)):
        prepared = prepare_qat_fx(build(name), {"": qconfig})
        calibrate(prepared, [images], progress=False)
        prepared.train()
        set_fake_quantize(prepared, FakeQuantState.QAT)
        jobs[kind] = training_step(prepared, images, labels)
    result = interleaved(jobs, rounds, f"{name} LSQ", time.process_time, follows_itself=True)
    return [[name, "LSQ step / STE step", f"{result['LSQ']:.2f}", _wanted(STEP_LIMIT)]]


def bench_observers(rounds: int) -> list[list[Any]]:
    """Milliseconds for a million values, per tensor and as weights with a scale for each of 256 channels."""
    x = torch.randn(SHAPE).relu_()
    weight = torch.randn(256, 256, 4, 4)
    observers: dict[str, tuple[nn.Module, nn.Module | None]] = {}
    for name, cls in OBSERVERS.items():
        by_channel = FakeQuantize(cls, qscheme=torch.per_channel_symmetric, ch_axis=0, channel_len=256)
        observers[name] = (FakeQuantize(cls), by_channel)
    for name, peer in peer_observers().items():
        observers[f"torch.ao {name}"] = (peer, None)
    took: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for name, (whole, by_channel) in observers.items():
            took.setdefault((name, False), []).append(_milliseconds(whole, x))
            if by_channel is not None:
                weight.add_(0)  # observers remember weights that did not change
                took.setdefault((name, True), []).append(_milliseconds(by_channel, weight))
    million = 1e6 / x.numel()
    rows = []
    for name in observers:
        weights = f"{median(took[name, True]) * million:.1f}" if (name, True) in took else "-"
        rows.append([name, f"{median(took[name, False]) * million:.2f}", weights])
    rows.append(["a copy", f"{_copying(x, rounds) * million:.2f}", "-"])
    return rows


def _milliseconds(module: nn.Module, x: torch.Tensor) -> float:
    observe = module.observe if isinstance(module, FakeQuantize) else module
    start = time.process_time()
    observe(x)
    return 1e3 * (time.process_time() - start)


def _copying(x: torch.Tensor, rounds: int) -> float:
    took = []
    for _ in range(rounds):
        start = time.process_time()
        x.clone()
        took.append(1e3 * (time.process_time() - start))
    return median(took)


def _wanted(limit: float | None) -> str:
    return "-" if limit is None else f"<= {limit}"


def main() -> None:
    """Run all benchmarks and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["calibration", "learned", "observers"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    set_march(March.BAYES)
    rows: list[list[Any]] = []
    if options.only in (None, "calibration"):
        for name in LIMITS:
            rows += bench_calibration(name, options.batch, options.rounds)
    if options.only in (None, "learned"):
        for name in ("ResNet18", "MobileNetV2"):
            rows += bench_learned(name, options.batch, options.rounds)
    if rows:
        print(tabulate(rows, headers=["model", "what", "measured", "wanted"], disable_numparse=True), "\n")
    if options.only in (None, "observers"):
        headers = ["observer", "ms per million values", "ms per million weights, 256 scales"]
        print(tabulate(bench_observers(3 * options.rounds), headers=headers, disable_numparse=True), "\n")
    setting = f"{options.threads} thread(s), batch {options.batch}, median of {options.rounds} rounds"
    print(f"torch {torch.__version__}, {setting}; compiled passes {compiled_passes()}")


if __name__ == "__main__":
    main()
