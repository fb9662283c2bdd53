"""Documents for the tests of the page: a residual network whose numbers are drawn, with faults at known places."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from horizon_plugin_pytorch.analysis.profile.document import (
    Advice,
    Document,
    Histogram,
    Message,
    Metric,
    Operator,
    Values,
    Weight,
)
from horizon_plugin_pytorch.analysis.rows import CalledTimes

SCRIPT = "<script>alert(1)</script>"


def values(numbers: np.ndarray, bins: int = 128) -> Values:
    counts, edges = np.histogram(numbers, bins)
    return Values(
        float(numbers.min()),
        float(numbers.max()),
        float(numbers.mean()),
        float(numbers.var()),
        histogram=Histogram(float(edges[0]), float(edges[-1]), tuple(map(int, counts))),
    )


class _Writer:
    """Appends operators, with an error that grows along the network and jumps where `coarse` says."""

    def __init__(self, seed: int, coarse: frozenset[str], bins: int) -> None:
        self.random = np.random.default_rng(seed)
        self.coarse, self.bins = coarse, bins
        self.operators: list[Operator] = []
        self.weights: list[Weight] = []

    def add(self, name: str, kind: str, *inputs: int, path: str | None = None, has_weight: bool = False) -> int:
        index = len(self.operators)
        power = max((10 ** (-(self.operators[i].sqnr or 0) / 10) for i in inputs), default=1e-5)
        power += (2e-2 if name in self.coarse else 2e-5) * self.random.uniform(0.5, 1.5)
        numbers = self.random.normal(0, 1 + 2 * self.random.random(), 4000)
        if "relu" in name or "act" in name:
            numbers = np.maximum(numbers, 0)
        largest = float(np.abs(numbers).max()) * (0.55 if name in self.coarse else 1.0)
        scale = largest / 127
        rounded = np.clip(np.round(numbers / scale), -128, 127) * scale
        is_float = kind in ("DeQuantStub",)
        noise = math.sqrt(power)
        self.operators.append(
            Operator(
                index, name, path or name, kind, line=f"model.py:{40 + index % 200}", inputs=inputs,
                shape=(1, 64, 56, 56), format="torch.float32" if is_float else "qint8",
                input_formats=tuple(self.operators[i].format for i in inputs),
                reason="" if is_float else "template default: int8",
                scale=None if is_float else scale, grid=None if is_float else (-128 * scale, 127 * scale),
                saturation=None if is_float else float((np.abs(numbers) > largest * 1.01).mean()),
                similarity=1 / math.sqrt(1 + power), sqnr=-10 * math.log10(power), atol=6 * noise,
                error=None if is_float else 6 * noise / scale,
                same_input_error=0.5 if not is_float else None,
                first=values(numbers, self.bins), second=values(rounded, self.bins),
            )
        )  # fmt: skip
        if has_weight:
            weight = self.random.normal(0, 0.05, 2000)
            self.weights.append(
                Weight(
                    f"{name}.weight", index, "qint8", 0.99997, 0.0004, 0.0008, 0.0003,
                    values(weight, self.bins // 2 or 1), values(weight.round(3), self.bins // 2 or 1),
                )
            )  # fmt: skip
        return index


def residual_network(
    stages: tuple[int, ...] = (3, 4, 6, 3),
    seed: int = 0,
    coarse: tuple[str, ...] = ("layer3.1.conv2",),
    bins: int = 128,
) -> Document:
    """A network in the form of ResNet50; the operators of `coarse` add much error, and saturate."""
    write = _Writer(seed, frozenset(coarse), bins)
    at = write.add("quant", "QuantStub")
    at = write.add("conv1", "ConvReLU2d", at, has_weight=True)
    at = write.add("maxpool", "MaxPool2d", at)
    for stage, blocks in enumerate(stages, 1):
        for block in range(blocks):
            path, start = f"layer{stage}.{block}", at
            for number in (1, 2, 3):
                at = write.add(f"{path}.conv{number}", "ConvReLU2d" if number < 3 else "Conv2d", at, has_weight=True)
            if block == 0:
                start = write.add(f"{path}.downsample.0", "Conv2d", start, has_weight=True)
            at = write.add(f"{path}[add]", "add", at, start, path=path)
            at = write.add(f"{path}.relu", "ReLU", at)
    at = write.add("avgpool", "AdaptiveAvgPool2d", at)
    at = write.add("fc", "Linear", at, has_weight=True)
    write.add("dequant", "DeQuantStub", at)
    index = {operator.name: operator.index for operator in write.operators}
    advice = tuple(
        Advice(
            "range-exceeds-calibration", "error", name, (index[name],), "Values reach 9.8 and the grid ends at 5.4.",
            "Calibrate with data like these.", f'qconfig_dict = {{"module_name": [("{name}", int16)]}}',
            arguments=(("largest", "9.8"), ("end", "5.4"), ("share", "1.2 %"), ("error", "14 %")),
        )
        for name in coarse
        if name in index
    )  # fmt: skip
    return Document(
        "ResNet50", "FvsQ", "float", "qat", march="bayes", package_version="2.5.0", threshold=0.99,
        operators=tuple(write.operators), weights=tuple(write.weights),
        called=(
            *(CalledTimes(o.path, 1) for o in write.operators),
            CalledTimes("layer1.0.relu", 3), CalledTimes("aux.head", 0),
        ),
        unfused=(("layer2.0.conv1", "layer2.0.bn1"),),
        messages=(Message("fc", "Linear", "output is int8, not in high precision", "set the output to qint32"),),
        advice=(*advice,
                Advice("low-precision-output", "hint", "fc", (index["fc"],), "It leaves as qint8.",
                       "Give it a high precision output.")),
        notes=("aux.head was not called",),
    )  # fmt: skip


def hostile() -> Document:
    """Names that would run, break out of a tag, an attribute or a script, or look like a number."""
    names = [
        SCRIPT,
        '"><img src=x onerror=alert(1)>',
        "a&b=c#d%20e",
        "inf",
        "nan",
        "名前",
        "</script>",
        "{{data}}",
        "constructor",
        "__proto__",
    ]
    operators = tuple(
        Operator(at, name, name, name, line=name, inputs=(at - 1,) if at else (), format=name, reason=name,
                 similarity=math.nan if at == 3 else 0.999, sqnr=math.inf if at == 4 else 30.0,
                 first=Values(None, None, None, None, nan=4))
        for at, name in enumerate(names)
    )  # fmt: skip
    advice = Advice(SCRIPT, SCRIPT, SCRIPT, (0,), SCRIPT, SCRIPT, SCRIPT)
    return Document(
        SCRIPT, SCRIPT, SCRIPT, SCRIPT, SCRIPT, SCRIPT, operators=operators, advice=(advice,), notes=(SCRIPT,),
        unfused=((SCRIPT, SCRIPT),), messages=(Message(SCRIPT, SCRIPT, SCRIPT, SCRIPT),),
        called=(CalledTimes(SCRIPT, 2),),
        weights=(Weight(SCRIPT, 0, SCRIPT, None, None),),
    )  # fmt: skip


def with_metric(document: Document, first: float, second: float) -> Document:
    return dataclasses.replace(document, metric=Metric("top-1", first, second))
