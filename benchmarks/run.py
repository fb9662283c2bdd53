"""`make bench`: ratios of float, ours and torch.ao, measured side by side in one run.

Every figure is a median of interleaved rounds on pinned threads; only ratios within a run mean anything. Limits are
printed beside the figures, never asserted: machines are noisy.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.models import MobileNetV2, ResNet18, ViTS
from benchmarks.peer import prepare_peer
from horizon_plugin_pytorch.fixed_point import integer_kernels
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.prepare import PrepareMethod
from horizon_plugin_pytorch.quantization.prepare import prepare as prepare_model
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter

MODELS = {"ResNet18": (ResNet18, "fc"), "MobileNetV2": (MobileNetV2, "classifier.1")}
FORMATS = {
    "int8": default_qat_8bit_fake_quant_qconfig,
    "int16": default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
}
STEP_LIMIT = {"ResNet18": 1.0, "MobileNetV2": 0.85}
PREPARE_LIMIT, MEMORY_LIMIT = 0.5, 1.2
PREPARE_BY_RUNNING_LIMIT = {"ResNet18": 0.4, "ViT-S": 1.0}
RUNNING_LIMIT = {"calibration": 1.25, "quantized": 1.6}


def build(name: str, seed: int = 0) -> nn.Module:
    """The float model, with batch-norm statistics as after training."""
    torch.manual_seed(seed)
    model = MODELS[name][0]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.3, 0.3)
    return model


def prepare(name: str, model: nn.Module, fmt: str = "int8") -> nn.Module:
    """Our prepared model, with a high-precision classifier."""
    last = MODELS[name][1]
    return prepare_qat_fx(model, {"": FORMATS[fmt], "module_name": [(last, default_qat_out_8bit_fake_quant_qconfig)]})


def interleaved(
    jobs: dict[str, Callable[[], Any]],
    rounds: int,
    label: str,
    clock: Callable[[], float] = time.perf_counter,
    follows_itself: bool = False,
) -> dict[str, float]:
    """Median over rounds of each job's time divided by the first job's time in the same round.

    Args:
        follows_itself: run each job twice and count the second: what the job before has left of caches and of free
            memory is then not counted.
    """
    first = next(iter(jobs))
    ratios: dict[str, list[float]] = {name: [] for name in jobs}
    seconds: list[float] = []
    for job in jobs.values():
        job()
    for _ in tqdm(range(rounds), desc=label, leave=False, disable=None):
        took = {}
        for name, job in jobs.items():
            if follows_itself:
                job()
            start = clock()
            job()
            took[name] = clock() - start
        seconds.append(took[first])
        for name in jobs:
            ratios[name].append(took[name] / took[first])
    return {"seconds": median(seconds), **{name: median(values) for name, values in ratios.items()}}


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """One step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def bench_training(name: str, batch: int, rounds: int) -> list[Any]:
    """QAT step over float step, ours and the peer's."""
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    model = build(name).train()
    ours = prepare(name, model).train()
    set_fake_quantize(ours, FakeQuantState.QAT)
    jobs = {"float": training_step(model, images, labels), "ours": training_step(ours, images, labels)}
    peer = prepare_peer(build(name), images)
    if peer is not None:
        jobs["torch.ao"] = training_step(peer.train(), images, labels)
    result = interleaved(jobs, rounds, f"{name} training")
    peer_text = f"{result['torch.ao']:.2f}" if "torch.ao" in result else "-"
    return [name, "QAT step / float step", f"{result['ours']:.2f}", f"<= {STEP_LIMIT[name]}", peer_text]


def bench_forward(name: str, fmt: str, batch: int, rounds: int) -> list[list[Any]]:
    """VALIDATION and quantized forward over float forward; `benchmarks.integers` has limits, for other images."""
    images = torch.randn(batch, 3, 224, 224)
    model = build(name).eval()
    prepared = prepare(name, model, fmt).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 accumulators of untrained nets
        set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
        prepared(images)
        set_fake_quantize(prepared, FakeQuantState.VALIDATION)
        quantized = convert_fx(prepared)
        jobs: dict[str, Callable[[], Any]] = {
            "float": lambda: model(images),
            "validation": lambda: prepared(images),
            "quantized": lambda: quantized(images),
        }
        peer = prepare_peer(build(name), images) if fmt == "int8" else None
        if peer is not None:
            peer(images)
            peer.eval()
            jobs["torch.ao"] = lambda: peer(images)
        result = interleaved(jobs, rounds, f"{name} {fmt} forward")
        mismatches = int((prepared(images) != quantized(images)).sum())
    assert mismatches == 0, f"{mismatches} values differ between VALIDATION and quantized"
    peer_text = f"{result['torch.ao']:.2f}" if "torch.ao" in result else "-"
    return [
        [name, f"VALIDATION / float forward, {fmt}", f"{result['validation']:.2f}", "-", peer_text],
        [name, f"quantized / float forward, {fmt}", f"{result['quantized']:.2f}", "-", "-"],
    ]


def bench_prepare(rounds: int) -> list[Any]:
    """Seconds to prepare ResNet18, first call in a fresh process included in the median's rounds."""
    model = build("ResNet18")
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        prepare("ResNet18", model)
        took.append(time.perf_counter() - start)
    seconds = f"{median(took):.2f} ({took[0]:.2f})"
    return ["ResNet18", "prepare, seconds (first call)", seconds, f"<= {PREPARE_LIMIT}", "-"]


def bench_prepare_by_running(rounds: int) -> list[list[Any]]:
    """Seconds of processor time to prepare by running and to write the check, and those divided by a forward's."""
    rows = []
    image = torch.randn(1, 3, 224, 224)
    for name, model in (("ResNet18", ResNet18().eval()), ("ViT-S", ViTS().eval())):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            jobs: dict[str, Callable[[], Any]] = {
                "forward": functools.partial(model, image),
                "prepare": functools.partial(
                    prepare_model, model, (image,), default_calibration_qconfig_setter, out_dir=folder
                ),
            }
            result = interleaved(jobs, rounds, f"{name} prepare by running", time.process_time)
        seconds = f"{result['seconds'] * result['prepare']:.2f} ({result['prepare']:.1f})"
        limit = f"<= {PREPARE_BY_RUNNING_LIMIT[name]}"
        rows.append([name, "prepare by running, processor seconds (forwards)", seconds, limit, "-"])
    return rows


class Attention(nn.Module):
    """Attention with a feed-forward layer: many small functions, which cost most where the model keeps its forward."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((query @ key.transpose(-2, -1)) * 0.25).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


def bench_running(rounds: int) -> list[list[Any]]:
    """A model that keeps its forward over one that is traced, on one small image."""
    tokens = torch.randn(1, 16, 64)
    model = QuantWrapper(nn.Sequential(*(Attention() for _ in range(6)))).eval()
    jobs: dict[str, dict[str, Callable[[], Any]]] = {"calibration": {}, "quantized": {}}
    with torch.no_grad():
        for method in (PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP):
            qconfig = {"": default_qat_8bit_fake_quant_qconfig}
            prepared = prepare_model(model, (tokens,), qconfig_dict=qconfig, method=method, out_dir=None).eval()
            set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
            prepared(tokens)
            jobs["calibration"][method.name] = functools.partial(prepared, tokens)
            jobs["quantized"][method.name] = functools.partial(convert(prepared), tokens)
        results = {what: interleaved(pair, 5 * rounds, f"{what}, by running") for what, pair in jobs.items()}
    return [
        ["attention", f"{what}, JIT_STRIP / SYMBOLIC", f"{result['JIT_STRIP']:.2f}", f"<= {RUNNING_LIMIT[what]}", "-"]
        for what, result in results.items()
    ]


def peak_memory(name: str, kind: str, batch: int) -> float:
    """Bytes that a training step adds to the process at its peak; run in a process of its own."""
    torch.set_num_threads(1)
    set_march(March.BAYES)
    model = build(name).train()
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    if kind == "ours":
        prepared = prepare(name, model).train()
        model = copy.deepcopy(prepared)
        del prepared
    elif kind == "torch.ao":
        model = prepare_peer(model, images) or model
    step = training_step(model, images, labels)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = _status("VmRSS")
    step()
    step()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    """A size that the kernel keeps of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def bench_memory(name: str, batch: int) -> list[Any]:
    """Peak memory of a training step over float's, each in its own process."""
    added = {}
    for kind in ("float", "ours", "torch.ao"):
        command = [sys.executable, "-m", "benchmarks.run", "--memory", name, kind, str(batch)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        added[kind] = json.loads(out.stdout.strip().splitlines()[-1])
    return [
        name, "peak memory of a QAT step / float step", f"{added['ours'] / added['float']:.2f}", f"<= {MEMORY_LIMIT}",
        f"{added['torch.ao'] / added['float']:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Run all benchmarks and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs=3, metavar=("MODEL", "KIND", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(peak_memory(options.memory[0], options.memory[1], int(options.memory[2]))))
        return
    torch.set_num_threads(options.threads)
    set_march(March.BAYES)
    rows = [bench_prepare(5), *bench_prepare_by_running(5), *bench_running(options.rounds)]
    for name in MODELS:
        rows.append(bench_training(name, options.batch, options.rounds))
        for fmt in FORMATS:
            rows += bench_forward(name, fmt, options.batch, options.rounds)
        rows.append(bench_memory(name, 2 * options.batch))
    print(tabulate(rows, headers=["model", "what", "ours", "wanted", "torch.ao"], disable_numparse=True))
    setting = f"{options.threads} thread(s), batch {options.batch}, median of {options.rounds} rounds"
    print(f"\ntorch {torch.__version__}, {setting}; integer kernels {integer_kernels()}")


if __name__ == "__main__":
    main()
