"""``python -m benchmarks.onnx_files``: exported files next to the float file, in stock ONNX Runtime on one thread.

Processor time of one image, medians of interleaved rounds; only ratios within a run mean anything. Every file is first
compared with its model: an exact one must give the same numbers, bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import io
import time
import warnings
from typing import Any

import onnxruntime as ort
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.run import FORMATS, MODELS, build, interleaved, prepare
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, convert_fx, set_fake_quantize
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx

LIMITS = {  # on processors with VNNI
    "ResNet18": {"int8": 0.9, "int8, fast": 0.4, "int16": 1.7},
    "MobileNetV2": {"int8": 1.1, "int8, fast": 0.8, "int16": 3.0},
}
SIZE_LIMITS = {"int8": 1 / 3, "int8, fast": 1 / 3, "int16": 1.0}


def files(name: str, images: Tensor) -> dict[str, tuple[bytes, Tensor]]:
    """The float file and those of integers, each with what its model gives."""
    model = build(name).eval()
    found = {"float": (_written(export_to_onnx, model, images, opset_version=17), model(images))}
    for fmt in FORMATS:
        qat = prepare(name, model, fmt).eval()
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        qat(images)
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        quantized = convert_fx(qat)
        found[fmt] = (_written(export_quantized_onnx, quantized, images), quantized(images))
        if fmt == "int8":
            file = io.BytesIO()
            print(f"{name}, fast:", export_quantized_onnx(quantized, images, file, input_names=["image"], fast=True))
            found["int8, fast"] = (file.getvalue(), quantized(images))
    return found


def _written(export: Any, model: Any, images: Tensor, **settings: Any) -> bytes:
    file = io.BytesIO()
    export(model, images, file, input_names=["image"], **settings)
    return file.getvalue()


def session(file: bytes, threads: int = 1, profile: str = "") -> ort.InferenceSession:
    """ONNX Runtime as it comes, but for the threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def bench_files(name: str, rounds: int, threads: int, profile: str) -> list[list[Any]]:
    """One row for each file: its time and its size, over those of the float file."""
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    written, jobs = files(name, images), {}
    feed = {"image": images.numpy()}
    for kind, (file, wanted) in written.items():
        runner = session(file, threads, profile and f"{profile}-{name}-{kind}")
        given = torch.from_numpy(runner.run(None, feed)[0])
        assert kind in ("float", "int8, fast") or torch.equal(given, wanted), (
            f"{name} {kind}: the file differs from its model"
        )
        jobs[kind] = functools.partial(runner.run, None, feed)
    result = interleaved(jobs, rounds, name, time.process_time, follows_itself=True)
    size = len(written["float"][0])
    return [
        [
            name, kind, f"{result[kind] * result['seconds'] * 1e3:.1f} ms", f"{result[kind]:.2f}",
            f"<= {LIMITS[name][kind]}" if kind in LIMITS[name] else "-", f"{len(file) / size:.2f}",
            f"<= {SIZE_LIMITS[kind]:.2f}" if kind in SIZE_LIMITS else "-",
        ]
        for kind, (file, _) in written.items()
    ]  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", choices=list(MODELS), help="only this one")
    parser.add_argument("--profile", default="", help="prefix of files for ONNX Runtime's profiles")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # int16 accumulators of untrained nets
    torch.set_num_threads(options.threads)
    set_march(March.BAYES)
    rows = []
    for name in [options.model] if options.model else MODELS:
        rows += bench_files(name, options.rounds, options.threads, options.profile)
    headers = ["model", "file", "one image", "/ float", "wanted, with VNNI", "size / float", "wanted"]
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print(f"\nONNX Runtime {ort.__version__}, {options.threads} thread(s), median of {options.rounds} rounds")


if __name__ == "__main__":
    main()
