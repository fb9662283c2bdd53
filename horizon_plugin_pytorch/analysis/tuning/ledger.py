"""What a long measurement has found so far, in a file: a run that is interrupted goes on where it was."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from horizon_plugin_pytorch.errors import CalibrationWarning, warn
from horizon_plugin_pytorch.files import write_atomically

Value = TypeVar("Value")
_VERSION = 1


class Ledger:
    """Results by name. Each is computed once; the file has all of them after every step.

    Args:
        path: the file; None keeps them in memory.
        key: what they depend on: a file with another key is not used.
        resume: read the file if it is there?
        seconds: between two writings, where steps are short; `save` writes what is not written yet.

    >>> ledger = Ledger(None, "")
    >>> ledger.get("sum", lambda: 1 + 1), ledger.get("sum", lambda: 1 / 0)
    (2, 2)
    """

    def __init__(self, path: str | os.PathLike | None, key: str, resume: bool = True, seconds: float = 0.0) -> None:
        self.path, self.key, self.resume = None if path is None else Path(path), key, resume
        self._seconds, self._saved = seconds, time.monotonic()
        self.values: dict[str, Any] = self._read() if resume else {}
        self.known = len(self.values)  # from an earlier run
        self._unread = set(self.values)  # of these, what nobody has asked for yet

    def _read(self) -> dict[str, Any]:
        if self.path is None or not self.path.is_file():
            return {}
        try:
            kept = torch.load(self.path, weights_only=True)
            version, key, values = kept["version"], kept["key"], dict(kept["values"])
        except Exception as error:  # a torn file makes torch.load raise whatever comes of its bytes
            warn(f"`{self.path}` cannot be read ({error}): everything is measured again.", CalibrationWarning)
            return {}
        if (version, key) != (_VERSION, self.key):
            self._tell_other()
            return {}
        return values

    def _tell_other(self) -> None:
        warn(
            f"`{self.path}` is of another model, other data or other settings: everything is measured again. A loader "
            "that shuffles gives other data in every run.",
            CalibrationWarning,
        )

    def require(self, name: str, value: Any) -> None:
        """What all results depend on, too, and is known only now: where the file has another value it is not used.

        >>> ledger = Ledger(None, "")
        >>> ledger.require("graph", 1), ledger.values
        (None, {'graph': 1})
        """
        if self.values.get(name, value) != value and self._unread:
            self._tell_other()
            self.values = {known: found for known, found in self.values.items() if known not in self._unread}
            self.known, self._unread = 0, set()
        self._unread.discard(name)
        self.values[name] = value

    def get(self, name: str, compute: Callable[[], Value]) -> Value:
        """A result, computed if it is not known."""
        if name not in self.values:
            self.values[name] = compute()
            if time.monotonic() - self._saved >= self._seconds:
                self.save()
        self._unread.discard(name)
        return self.values[name]

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            buffer = io.BytesIO()
            torch.save({"version": _VERSION, "key": self.key, "values": self.values}, buffer)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(buffer.getvalue(), self.path)
        self._saved = time.monotonic()

    def forget(self) -> None:
        """All is done: nothing is known any more, and the file is gone."""
        self.values = {}
        if self.path is not None:
            self.path.unlink(missing_ok=True)
