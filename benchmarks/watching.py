"""``python -m benchmarks.watching``: what it costs to watch a forward, and to pair the calls of two models.

Processor time of a ResNet18, watched by a consumer that keeps nothing, over the same forward alone; medians of
interleaved rounds on one thread.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.run import MODELS, build, interleaved
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    convert,
    default_qat_8bit_fake_quant_qconfig,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.watch import CallLog, OperatorCall, Watch, pair_calls

LIMIT = 1.1


def stages(name: str, images: Tensor) -> Iterator[tuple[str, nn.Module]]:
    """The model as it goes from float to integers, by both routes."""
    net = build(name).eval()
    yield "float", net
    for method in ("jit-strip", "symbolic"):
        qconfigs = {"": default_qat_8bit_fake_quant_qconfig}
        qat = prepare(net, (images,), qconfig_dict=qconfigs, method=method, out_dir=None).eval()
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        yield f"CALIBRATION, {method}", copy.deepcopy(qat)
        qat(images)
        for state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
            model = copy.deepcopy(qat)
            set_fake_quantize(model, state)
            yield f"{state.name}, {method}", model
        yield f"converted, {method}", convert(model)


def bench_forward(title: str, model: nn.Module, images: Tensor, rounds: int) -> list[Any]:
    """A watched forward over one that is not."""
    count = 0

    def forget(call: OperatorCall) -> None:
        nonlocal count
        count = call.index + 1

    def watched() -> None:
        with Watch(model, forget):
            model(images)

    jobs = {"alone": lambda: model(images), "watched": watched}
    result = interleaved(jobs, rounds, title, time.process_time)
    seconds = result["seconds"]
    cost = (result["watched"] - 1) * seconds / max(count, 1) * 1e6
    return [title, count, f"{seconds * 1e3:.1f} ms", f"{cost:.0f} us", f"{result['watched']:.3f}", f"<= {LIMIT}"]


def bench_pairing(first: nn.Module, second: nn.Module, images: Tensor) -> str:
    """How long it takes to pair the calls of two models."""
    logs = [CallLog.of(model, images) for model in (first, second)]
    start = time.process_time()
    pairing = pair_calls(*logs)
    took = time.process_time() - start
    alone = len(pairing.first_only), len(pairing.second_only)
    return f"{len(pairing.pairs)} pairs, {alone[0]} and {alone[1]} calls without a partner: {took * 1e3:.1f} ms"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--model", default="ResNet18", choices=list(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_march(March.NASH_E)
    images = torch.randn(options.batch, 3, options.size, options.size)
    models = dict(stages(options.model, images))
    rows = [bench_forward(title, model, images, options.rounds) for title, model in models.items()]
    headers = [options.model, "calls", "forward", "cost of a call", "watched / alone", "limit"]
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print("float and converted:", bench_pairing(models["float"], models["converted, jit-strip"], images))


if __name__ == "__main__":
    main()
