"""The file that an interrupted calibration goes on from."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.quantization.batches import place_of
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.processes import is_distributed, rank

_VERSION = 3


@dataclass
class CalibrationState:
    """What was learned from whole batches.

    Args:
        steps: how many there were.
        observers: statistics of each observer, by the path of its fake quantizer.
        settings: what these observers are, as text.
        past: the scales after each of the last batches, to know whether they have settled.
    """

    steps: int = 0
    observers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    past: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, quantizers: Mapping[str, FakeQuantize], steps: int, past: list[Tensor]) -> CalibrationState:
        """The state as it is now."""
        observers = {name: q.activation_post_process for name, q in quantizers.items() if not q.is_fixed}
        return cls(
            steps,
            {name: {k: v.clone() for k, v in o.statistics().items()} for name, o in observers.items()},
            {name: o.settings() for name, o in observers.items()},
            list(past),
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
            and all(
                isinstance(o, dict) and all(isinstance(v, Tensor) for v in o.values()) for o in self.observers.values()
            )
        )

    def check(self, quantizers: Mapping[str, FakeQuantize], path: str | os.PathLike, most: int | None) -> None:
        """Insist that it is of this model and these observers.

        Args:
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


def _refusal(path: str | os.PathLike, why: str) -> CalibrationError:
    return CalibrationError(f"calibrate: state_file={os.fspath(path)!r} {why}. Remove it to begin anew.")


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
