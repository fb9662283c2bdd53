"""Exact integers next to float: forwards in VALIDATION and converted, the first one after training, a long LSTM.

    python -m benchmarks.integers                                  every row, some minutes
    python -m benchmarks.integers --only ResNet18                  rows whose label has this
    HORIZON_COMPILED_PASSES=1 python -m benchmarks.integers        "with compiled passes"

Ratios are medians of interleaved rounds in processor time, on one thread. "Without" is the converted model with integer
kernels turned off, in the same rounds. Limits are for CPUs with VNNI, of rows that have one; without VNNI, a row should
be below "without".
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.models import Neck, SiLUNet, Transposed, ViTS
from benchmarks.run import FORMATS, MODELS, build, interleaved, prepare
from horizon_plugin_pytorch import fixed_point
from horizon_plugin_pytorch.compiled import compiled_passes
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
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
    validation: float | None = None
    converted: float | None = None

    @property
    def label(self) -> str:
        """As the table names it."""
        return f"{self.name} {self.format}, {self.batch} of {self.size} x {self.size}"


ROWS = (
    Row("ResNet18", "int8", 8, 128, 0.45, 0.40),
    Row("ResNet18", "int8", 1, 128),
    Row("MobileNetV2", "int8", 8, 224),
    Row("MobileNetV2", "int8", 8, 128, 0.60, 0.50),
    Row("MobileNetV2", "int8", 1, 128, 0.90, 0.70),
    Row("ResNet18", "int16", 8, 128, 0.90, 0.85),
    Row("MobileNetV2", "int16", 8, 128, 1.50, 1.40),
    Row("ViT-S", "int8", 2, 224, None, 0.60),
    Row("transposed 4x4", "int8", 8, 32),
    Row("transposed 3x3", "int8", 8, 32),
    Row("transposed 2x2", "int8", 8, 32),
    Row("neck", "int8", 2, 256),
    Row("SiLU", "int8", 2, 128),
)
FIRST = "ResNet18 int8, first forward after a change of weights, seconds more"
LSTM = "BiLSTM of two layers, 400 steps, seconds"
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


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "ViT-S": ViTS,
    "LSTM": LongLSTM,
    "transposed 4x4": lambda: Transposed(4),
    "transposed 3x3": lambda: Transposed(3),
    "transposed 2x2": lambda: Transposed(2),
    "neck": Neck,
    "SiLU": SiLUNet,
}


def models(name: str, fmt: str, images: Tensor) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The float model, the prepared one in VALIDATION and the converted one."""
    torch.manual_seed(0)
    if name in MODELS:  # of which the last layer has a format of its own
        model = build(name).eval()
        prepared = prepare(name, model, fmt).eval()
    else:
        model = OTHERS[name]().eval()
        prepared = prepare_qat_fx(model, {"": FORMATS[fmt]}).eval()
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
    given = [tree_leaves(jobs[kind]()) for kind in ("VALIDATION", "converted", "without")]
    assert all(map(torch.equal, given[0] * 2, given[1] + given[2])), "integers differ"
    ratios = [f"{result[kind]:.2f}" for kind in ("VALIDATION", "converted", "without")]
    limits = ["-" if limit is None else f"{limit:.2f}" for limit in (row.validation, row.converted)]
    return [row.label, *ratios, " / ".join(limits) if set(limits) != {"-"} else "-"]


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
    return [FIRST, f"{median(added):.3f}", "-", "-", f"{FIRST_LIMIT:.3f}"]


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
    return [LSTM, *seconds, "-", f"{LSTM_LIMIT:.3f}"]


def benches() -> dict[str, Callable[[int], list[Any]]]:
    """What fills each row, by its label."""
    forwards = {row.label: functools.partial(bench_forward, row) for row in ROWS}
    return {**forwards, FIRST: bench_first, LSTM: bench_lstm}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose label has this, in small or capital letters")
    options = parser.parse_args()
    chosen = {label: bench for label, bench in benches().items() if options.only.lower() in label.lower()}
    if not chosen:
        parser.error("\n  ".join((f"no row has {options.only!r} in its label; there are", *benches())))
    torch.set_num_threads(options.threads)
    set_march(March.BAYES)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 accumulators of untrained nets
        rows = [bench(options.rounds) for bench in chosen.values()]
    print(tabulate(rows, ["model", "VALIDATION", "converted", "without", "wanted, with VNNI"], disable_numparse=True))
    setting = f"{options.threads} thread(s), median of {options.rounds} rounds, over float where no seconds are named"
    print(f"\ntorch {torch.__version__}, {setting}; integer kernels {fixed_point.integer_kernels()}")
    print(f"compiled passes {compiled_passes()}")


if __name__ == "__main__":
    main()
