"""Sequences of operators as files, run by ONNX Runtime in every way and compared with the converted model."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.export.onnx_export import build_onnx
from horizon_plugin_pytorch.quantization import QuantStub, convert_fx
from tests.routes import as_numbers, prepared

LEVELS = {
    name.removeprefix("ORT_").lower(): getattr(ort.GraphOptimizationLevel, name)
    for name in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
}
THREADS = (1, 2)
_CLOSE = 1e-5  # what float code is promised


@dataclass(frozen=True)
class Difference:
    """Numbers that a session gave differently."""

    name: str
    level: str
    threads: int
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name}: {self.count} of {self.total} numbers differ ({self.level}, {self.threads} thread(s))"


class Several(nn.Module):
    """Sequences side by side, each with inputs of its own: one file and one session serve them all."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(item.module() for item in items)
        self.counts = []
        quants = []
        for item in items:
            floats, plain = item.inputs()
            quants.append(nn.ModuleList(QuantStub() for _ in floats))
            self.counts.append((len(floats), len(plain)))
        self.quants = nn.ModuleList(quants)

    def run(self, *inputs: Tensor) -> list[Any]:
        """The results of all."""
        rest, found = list(inputs), []
        for body, quants, (floats, plain) in zip(self.bodies, self.quants, self.counts, strict=True):
            quantized = [quant(x) for quant, x in zip(quants, rest[:floats], strict=True)]
            found.append(body(quantized, rest[floats : floats + plain]))
            rest = rest[floats + plain :]
        return found


def model_of(items: Sequence[Any]) -> nn.Module:
    """The float model; symbolic trace wants the arguments by name."""
    count = sum(len(part) for item in items for part in item.inputs())
    names = ", ".join(f"x{i}" for i in range(count))
    forward = eval(f"lambda self, {names}: self.run({names})")
    return type("Sequences", (Several,), {"forward": forward})(items).eval()


def _batch(items: Sequence[Any], seed: int, size: float) -> list[Tensor]:
    found: list[Tensor] = []
    for item in items:
        floats, plain = item.inputs(seed)
        found += [*(size * x for x in floats), *plain]
    return found


def open_session(file: bytes, level: str, threads: int) -> ort.InferenceSession:
    """ONNX Runtime at an optimisation level."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def written(items: Sequence[Any], dtype: str) -> tuple[nn.Module, onnx.ModelProto]:
    """The converted model and its file."""
    inputs = _batch(items, 1, 1.0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        quantized = convert_fx(prepared(model_of(items), inputs, dtype))
        return quantized, build_onnx(quantized, tuple(inputs))


def differences(items: Sequence[Any], dtype: str) -> list[Difference]:
    """What differs, of all sequences, between the converted model and the file at every level."""
    quantized, model = written(items, dtype)
    file = model.SerializeToString()
    batches = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for inputs in (_batch(items, 1, 1.0), _batch(items, 2, 3.0)):
            batches.append((inputs, quantized(*inputs)))
    found = []
    for level in LEVELS:
        for threads in THREADS:
            session = open_session(file, level, threads)
            for batch, wanted in batches:
                feed = {i.name: batch[_index(i.name)].numpy() for i in session.get_inputs()}
                given = iter(session.run(None, feed))
                for item, result in zip(items, wanted, strict=True):
                    for x in as_numbers(result):
                        y = torch.from_numpy(np.asarray(next(given)))
                        same = x.dtype == y.dtype and x.shape == y.shape
                        count = _differing(x, y, getattr(item, "is_float_code", False)) if same else x.numel()
                        if count or not same:
                            found.append(Difference(item.name, level, threads, count, x.numel()))
    return found


def _differing(x: Tensor, y: Tensor, is_float_code: bool) -> int:
    """How many numbers differ; those that float code computes, whose last bits are each runtime's own, by more."""
    unequal = (x != y) & ~((x != x) & (y != y))
    if is_float_code and x.is_floating_point():
        unequal &= ~torch.isclose(x, y, rtol=_CLOSE, atol=_CLOSE)
    return int(unequal.sum())


def _index(name: str) -> int:
    return 0 if name == "input" else int(name.rpartition("_")[2])


@dataclass
class Outcome:
    """What became of some sequences: how many were compared, what differed, what was refused, what broke."""

    compared: int
    differences: list[Difference]
    refused: list[tuple[str, str]]
    broken: list[tuple[str, str]]

    @classmethod
    def empty(cls) -> Outcome:
        """That of no sequences."""
        return cls(0, [], [], [])

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.compared + other.compared, self.differences + other.differences, self.refused + other.refused,
            self.broken + other.broken,
        )  # fmt: skip


def outcome(items: Sequence[Any], dtype: str) -> Outcome:
    """Compare sequences; where some of them cannot be written, the others by themselves."""
    try:
        return Outcome(len(items), differences(items, dtype), [], [])
    except Exception as error:  # whatever it is, it is one sequence's
        if len(items) == 1:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, (HorizonError, NotImplementedError)):
                return Outcome(0, [], [(items[0].name, text)], [])
            return Outcome(0, [], [], [(items[0].name, text + "\n" + traceback.format_exc()[-1500:])])
    return outcome(items[: len(items) // 2], dtype) + outcome(items[len(items) // 2 :], dtype)
