"""Exact integers next to float: forwards in VALIDATION and converted, the first one after training, a long LSTM.

python -m benchmarks.integers                       every row, some minutes
python -m benchmarks.integers --only ResNet18

Ratios are medians of interleaved rounds in processor time, on one thread. "Without" is the converted model with integer
kernels turned off, in the same rounds. Limits are for CPUs with VNNI; without, a row should be below "without".
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.models import ViTS
from benchmarks.run import build, interleaved, prepare
from horizon_plugin_pytorch import fixed_point
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)


@dataclass(frozen=True)
class Row:
    """A model on images, and the limits of its forwards in VALIDATION and converted, over float's."""

    name: str
    format: str
    batch: int
    size: int
    validation: float | None
    converted: float | None


ROWS = (
    Row("ResNet18", "int8", 8, 128, 0.45, 0.40),
    Row("MobileNetV2", "int8", 8, 128, 0.60, 0.50),
    Row("MobileNetV2", "int8", 1, 128, 0.90, 0.70),
    Row("ResNet18", "int16", 8, 128, 0.90, 0.85),
    Row("MobileNetV2", "int16", 8, 128, 1.50, 1.40),
    Row("ViT-S", "int8", 2, 224, None, 0.60),
)
FIRST_LIMIT, LSTM_LIMIT = 0.150, 0.2  # seconds


class LongLSTM(nn.Module):
    """Two bidirectional layers over 400 steps of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.lstm = nn.LSTM(16, 32, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.quant(x))
        return self.dequant(out)


def models(name: str, fmt: str, images: Tensor) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The float model, the prepared one in VALIDATION and the converted one."""
    torch.manual_seed(0)
    if name in ("ViT-S", "LSTM"):
        model = (ViTS() if name == "ViT-S" else LongLSTM()).eval()
        prepared = prepare_qat_fx(model, {"": default_qat_8bit_fake_quant_qconfig}).eval()
    else:
        model = build(name).eval()
        prepared = prepare(name, model, fmt).eval()
    set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
    prepared(images)
    set_fake_quantize(prepared, FakeQuantState.VALIDATION)
    return model, prepared, convert_fx(prepared)


def without_kernels(model: nn.Module, images: Tensor) -> Any:
    """A forward on float32 sums."""
    fixed_point.use_integer_kernels(False)
    try:
        return model(images)
    finally:
        fixed_point.use_integer_kernels(None)


def bench_forward(row: Row, rounds: int) -> list[Any]:
    """Ratios of a row; the integers of all forwards are compared."""
    images = torch.randn(row.batch, 3, row.size, row.size)
    model, prepared, converted = models(row.name, row.format, images)
    jobs: dict[str, Callable[[], Any]] = {
        "float": lambda: model(images),
        "VALIDATION": lambda: prepared(images),
        "converted": lambda: converted(images),
        "without": lambda: without_kernels(converted, images),
    }
    for job in jobs.values():  # the second run of a layer finds what later ones use
        job()
    result = interleaved(jobs, rounds, f"{row.name} {row.format}", time.process_time)
    given = [jobs[kind]() for kind in ("VALIDATION", "converted", "without")]
    assert all(torch.equal(given[0], other) for other in given[1:]), "integers differ"
    label = f"{row.name} {row.format}, {row.batch} of {row.size} x {row.size}"
    ratios = [f"{result[kind]:.2f}" for kind in ("VALIDATION", "converted", "without")]
    limits = ["-" if limit is None else f"{limit:.2f}" for limit in (row.validation, row.converted)]
    return [label, *ratios, " / ".join(limits)]


def bench_first(rounds: int) -> list[Any]:
    """Processor seconds of the first VALIDATION forward after a change of weights, less those of a later one."""
    images = torch.randn(1, 3, 128, 128)
    _, prepared, _ = models("ResNet18", "int8", images)
    for _ in range(2):
        prepared(images)
    added = []
    for _ in range(rounds):
        for parameter in prepared.parameters():
            parameter.mul_(1.0001)
        took = []
        for _ in range(3):
            start = time.process_time()
            prepared(images)
            took.append(time.process_time() - start)
        added.append(took[0] - took[-1])
    label = "ResNet18 int8, first forward after a change of weights, seconds more"
    return [label, f"{median(added):.3f}", "-", "-", f"{FIRST_LIMIT:.3f}"]


def bench_lstm(rounds: int) -> list[Any]:
    """Processor seconds of a long LSTM."""
    sequence = torch.randn(400, 1, 16)
    model, prepared, converted = models("LSTM", "int8", sequence)
    jobs: dict[str, Callable[[], Any]] = {
        "float": lambda: model(sequence),
        "VALIDATION": lambda: prepared(sequence),
        "converted": lambda: converted(sequence),
    }
    result = interleaved(jobs, rounds, "LSTM", time.process_time)
    seconds = [f"{result['seconds'] * result[kind]:.3f}" for kind in ("VALIDATION", "converted")]
    return ["two-layer BiLSTM, 400 steps, seconds", *seconds, "-", f"{LSTM_LIMIT:.3f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="rows whose label has this word")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_march(March.BAYES)
    wanted = (options.only or "").lower()
    rows: list[list[Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 accumulators of untrained nets
        rows += [bench_forward(row, options.rounds) for row in ROWS if wanted in f"{row.name} {row.format}".lower()]
        if wanted in "resnet18 first":
            rows.append(bench_first(options.rounds))
        if wanted in "lstm bilstm":
            rows.append(bench_lstm(options.rounds))
    print(tabulate(rows, ["model", "VALIDATION", "converted", "without", "wanted, with VNNI"], disable_numparse=True))
    setting = f"{options.threads} thread(s), median of {options.rounds} rounds, over float where no seconds are named"
    print(f"\ntorch {torch.__version__}, {setting}; integer kernels {fixed_point.integer_kernels()}")


if __name__ == "__main__":
    main()
