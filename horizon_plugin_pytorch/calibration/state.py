"""The file that an interrupted calibration goes on from."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horizon_plugin_pytorch.calibration.batches import place_of
from horizon_plugin_pytorch.calibration.fingerprint import Description, digest, first_difference
from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.statistics.processes import is_distributed, processes, rank

_VERSION = 4


@dataclass
class CalibrationState:
    """What was learned from whole batches.

    Args:
        steps: how many there were.
        observers: statistics of each observer, by the path of its fake quantizer.
        settings: what these observers are, as text.
        past: the scales after each of the last batches, to know whether they have settled.
        model: what the model was (`describe`).
        batches: for each batch a number that stands for the data of each process (`digest`).
    """

    steps: int = 0
    observers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    past: list[Tensor] = field(default_factory=list)
    model: Description = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(
        cls, quantizers: Mapping[str, FakeQuantize], model: Description, batches: list[list[int]], past: list[Tensor]
    ) -> CalibrationState:
        """The state as it is now."""
        observers = {name: q.activation_post_process for name, q in quantizers.items() if not q.is_fixed}
        return cls(
            len(batches),
            {name: {k: v.clone() for k, v in o.statistics().items()} for name, o in observers.items()},
            {name: o.settings() for name, o in observers.items()},
            list(past),
            model,
            list(batches),
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write it; it is the same in every process, so one does."""
        if rank():
            return
        buffer = io.BytesIO()
        torch.save({"version": _VERSION, **vars(self)}, buffer)
        try:
            write_atomically(buffer.getvalue(), os.fspath(path))
        except OSError as error:
            raise CalibrationError(
                f"calibrate: state_file={os.fspath(path)!r} cannot be written: {error}. Give a path in a folder that "
                "can be written to, or none."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device) -> CalibrationState | None:
        """Read it, if it is there; the first process does for all."""
        content = _read(path, device)
        if content is None:
            return None
        try:
            found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            version = found.pop("version")
            state = cls(**found) if version == _VERSION else None
        except Exception as error:
            raise _refusal(path, "is not a state that calibrate wrote") from error
        if state is None:
            raise _refusal(path, f"is of version {version!r}, and this one is {_VERSION}")
        if not state._is_whole():
            raise _refusal(path, "is damaged")
        return state

    def _is_whole(self) -> bool:
        """Has everything the type that it should have?"""
        return (
            isinstance(self.steps, int)
            and self.steps >= 0
            and isinstance(self.observers, dict)
            and isinstance(self.settings, dict)
            and self.settings.keys() == self.observers.keys()
            and isinstance(self.past, list)
            and all(isinstance(scales, Tensor) and scales.dim() == 1 for scales in self.past)
            and isinstance(self.model, dict)
            and isinstance(self.batches, list)
            and len(self.batches) == self.steps
            and all(isinstance(batch, list) and all(isinstance(b, int) for b in batch) for batch in self.batches)
            and all(
                isinstance(o, dict) and all(isinstance(v, Tensor) for v in o.values()) for o in self.observers.values()
            )
        )

    def check(
        self,
        quantizers: Mapping[str, FakeQuantize],
        model: Description,
        path: str | os.PathLike,
        most: int | None,
    ) -> None:
        """Insist that it is of this model, these observers and as many processes.

        Args:
            model: what the model is.
            most: how many batches there may be.

        Raises:
            CalibrationError: it is not.
        """
        if most is not None and self.steps > most:
            raise _refusal(path, f"has seen {self.steps} batches, more than steps={most}")
        mine = {name: q.activation_post_process for name, q in quantizers.items() if not q.is_fixed}
        different = sorted(map(str, mine.keys() ^ self.observers.keys()))
        if different:
            raise _refusal(path, f"is of another model (different: {', '.join(map(place_of, different[:5]))})")
        for name, observer in mine.items():
            if self.settings[name] != observer.settings():
                both = f"{self.settings[name]} at `{place_of(name)}`, where the model has {observer.settings()}"
                raise _refusal(path, f"was written with {both}")
        other = first_difference(self.model, model)
        if other is not None and not other.startswith("the weights"):
            was, is_now = self.model.get(other, "not there"), model.get(other, "not there")
            raise _refusal(path, f"is of another model: {other} was {was}, and is {is_now}")
        if other is not None:
            raise _refusal(path, f"is of other weights: {other.removeprefix('the weights ')} has changed since")
        if any(len(batch) != processes() for batch in self.batches):
            then = len(self.batches[0])
            raise _refusal(
                path, f"was written by {then} processes, each with its data, and now there are {processes()}"
            )

    def restore(self, quantizers: Mapping[str, FakeQuantize], path: str | os.PathLike) -> None:
        """Let the observers go on from it; if it does not fit, all stay as they are."""
        undo = []
        try:
            for name, quantizer in quantizers.items():
                if quantizer.is_fixed:
                    continue
                undo.append(quantizer.snapshot())
                observer = quantizer.activation_post_process
                observer.restore(self.observers[name])
                if observer.has_statistics:
                    quantizer.refresh_scale()
        except Exception as error:
            for back in undo:
                back()
            raise _refusal(path, f"does not fit the observer of `{place_of(name)}` ({error})") from error


class StateFile:
    """The file of one calibration; without a path, nothing is read or written.

    Args:
        model: what the model is.
    """

    def __init__(
        self,
        path: str | os.PathLike | None,
        quantizers: Mapping[str, FakeQuantize],
        model: Description,
        device: torch.device,
    ) -> None:
        self._path, self._quantizers, self._model, self._device = path, quantizers, model, device
        self._state = CalibrationState()  # after the last whole batch

    @property
    def is_wanted(self) -> bool:
        """Is there a path?"""
        return self._path is not None

    @property
    def steps(self) -> int:
        """How many batches an interrupted run has seen, and this one since."""
        return self._state.steps

    def read(self, most: int | None) -> None:
        """Read the file, if it is there, and refuse what is not of this model.

        Args:
            most: how many batches there may be.
        """
        found = None if self._path is None else CalibrationState.load(self._path, self._device)
        if self._path is not None and found is not None:
            found.check(self._quantizers, self._model, self._path, most)
            self._state = found

    def skip(self, batches: Iterator[Any]) -> None:
        """Go past the batches that were seen, and refuse others.

        Raises:
            CalibrationError: these are not the data of that run.
        """
        assert self._path is not None or not self.steps
        for step, digests in enumerate(self._state.batches):
            batch = next(batches, _END)
            if batch is _END:
                raise CalibrationError(
                    f"calibrate: state_file is of a run that has seen {self.steps} batches, and the data have {step}. "
                    "Give the data of that run, or remove the file to begin anew."
                )
            if digest(batch) != digests[rank()]:
                raise _refusal(
                    self._path or "",
                    f"has seen other data: batch {step} is not the one of that run. Give the same batches in the same "
                    "order (shuffle=False or a seeded generator, and no random augmentation), and it goes on from "
                    "there",
                    "Or remove it",
                )

    def begin(self) -> list[Tensor]:
        """Let the observers go on from the file; gives the scales after its last batches."""
        if self._path is None:
            return []
        if self.steps:
            self._state.restore(self._quantizers, self._path)
        else:
            self._state = CalibrationState.of(self._quantizers, self._model, [], [])
        self._state.save(self._path)  # rather now than after many batches: can it be written?
        return [scales.to(self._device) for scales in self._state.past]

    def add(self, digests: list[int], past: list[Tensor], interval: int) -> None:
        """Remember the state after one more batch, and write it every so many."""
        if self._path is None:
            return
        self._state = CalibrationState.of(self._quantizers, self._model, [*self._state.batches, digests], past)
        if self.steps % interval == 0:
            self._state.save(self._path)

    @contextmanager
    def kept_after_an_error(self) -> Iterator[None]:
        """Write the state after the last whole batch if a run ends before its time."""
        try:
            yield
        except BaseException:
            if self._path is not None and self.steps:
                self._state.save(self._path)
            raise

    def remove(self) -> None:
        """The run is over."""
        if self._path is not None and os.path.exists(self._path) and rank() == 0:
            os.unlink(self._path)


_END = object()


def _refusal(path: str | os.PathLike, why: str, remedy: str = "Remove it") -> CalibrationError:
    return CalibrationError(f"calibrate: state_file={os.fspath(path)!r} {why}. {remedy} to begin anew.")


def _read(path: str | os.PathLike, device: torch.device) -> bytes | None:
    """What the file has, the same in every process; None if there is no file."""
    found: list[Any] = [None, None]  # content, and what went wrong
    if rank() == 0 and os.path.exists(path):
        try:
            with open(path, "rb") as file:
                found[0] = file.read()
        except OSError as error:
            found[1] = str(error)
    if is_distributed():
        dist.broadcast_object_list(found, device=device)
    if found[1] is not None:
        raise CalibrationError(
            f"calibrate: state_file={os.fspath(path)!r} cannot be read: {found[1]}. Give the path of a file, or none."
        )
    return found[0]
