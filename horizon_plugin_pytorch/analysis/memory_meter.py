"""How much memory a device has given out, measured by its allocator at moments that the caller marks."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, kineto_available, profile, record_function

from horizon_plugin_pytorch.errors import CheckError

_MARK = "horizon_plugin_pytorch memory mark "
_QUIET = "KINETO_LOG_LEVEL"  # the profiler says on stderr that it starts and stops, unless this is high
_CPU = 0  # as the profiler's traces number devices


@dataclass(frozen=True)
class Reading:
    """Bytes at a mark, and the most that there were since the mark before it."""

    allocated: int
    peak: int


class Meter(ABC):
    """Measures while it is active.

    >>> with (meter := CpuMeter(held=100)):
    ...     meter.mark()
    ...     x = torch.zeros(256)
    ...     meter.mark()
    >>> [reading.allocated for reading in meter.readings]
    [100, 1124]
    """

    readings: list[Reading]

    @abstractmethod
    def __enter__(self) -> Meter: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def mark(self) -> None:
        """Take a reading here; `readings` has it when the meter has ended."""


class CpuMeter(Meter):
    """Every block that torch's CPU allocator gives and takes back, also inside kernels, as torch's profiler sees them.

    Args:
        held: bytes that are in use when it begins, which the profiler does not know of.
    """

    def __init__(self, held: int = 0) -> None:
        self._held = held
        self._marks = 0
        self._profile: profile | None = None
        self.readings = []

    def __enter__(self) -> CpuMeter:
        if not kineto_available():
            raise CheckError("This build of torch has no profiler (kineto), which measures memory on CPU.")
        if torch.autograd._profiler_enabled():  # which a second one would end
            raise CheckError("torch's profiler, which measures memory on CPU, runs already: end that profile first.")
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quietly():
            self._profile.__enter__()
        return self

    def mark(self) -> None:
        with record_function(f"{_MARK}{self._marks}"):
            self._marks += 1

    def __exit__(self, *error: object) -> None:
        assert self._profile is not None
        with _quietly():
            self._profile.__exit__(None, None, None)
        if error[0] is None:
            self.readings = _readings(_trace_of(self._profile), self._held)
        self._profile = None


class CudaMeter(Meter):
    """Torch's caching allocator on a GPU: blocks are counted when they are asked for, not when a kernel runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.readings = []

    def __enter__(self) -> CudaMeter:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def mark(self) -> None:
        found = Reading(torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device))
        self.readings.append(found)
        torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *error: object) -> None:
        pass


@contextmanager
def _quietly() -> Iterator[None]:
    before = os.environ.get(_QUIET)
    os.environ.setdefault(_QUIET, "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_QUIET, None)


def _trace_of(measured: profile) -> list[dict[str, Any]]:
    """The events of a profile, from the file that it writes: in this form they are documented."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        measured.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return json.load(file)["traceEvents"]


def _readings(events: list[dict[str, Any]], held: int) -> list[Reading]:
    wanted = [e for e in events if e["name"] == "[memory]" or e["name"].startswith(_MARK)]
    found, allocated, peak = [], held, held
    for event in sorted(wanted, key=lambda e: e["ts"]):
        if event["name"] != "[memory]":
            found.append(Reading(allocated, peak))
            peak = allocated
        elif event["args"]["Device Type"] == _CPU:
            allocated += event["args"]["Bytes"]
            peak = max(peak, allocated)
    return found
