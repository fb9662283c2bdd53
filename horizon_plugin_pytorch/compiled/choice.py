"""Whether compiled passes are used in this process, and why not if they are not."""

from __future__ import annotations

import os
import threading

from horizon_plugin_pytorch.compiled.building import CannotBuildError, library
from horizon_plugin_pytorch.compiled.passes import Passes, disproof

VARIABLE = "HORIZON_COMPILED_PASSES"
_OFF = frozenset({"", "0", "off", "no", "false"})
_ON = frozenset({"1", "on", "yes", "true"})


class _Choice:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted: bool | None = None  # None: as the environment has it
        self._made: Passes | None = None
        self._is_tried = False
        self.trouble = ""  # why they cannot be used
        self.used: Passes | None = None
        self.is_decided = False

    def want(self, is_wanted: bool | None) -> None:
        with self._lock:
            self._is_wanted, self.is_decided, self.used = is_wanted, False, None

    @property
    def is_set(self) -> bool:
        return self._is_wanted is not None

    @property
    def is_wanted(self) -> bool:
        if self._is_wanted is not None:
            return self._is_wanted
        value = os.environ.get(VARIABLE, "")
        word = value.strip().lower()
        if word not in _OFF | _ON:
            raise ValueError(f"The environment variable {VARIABLE} is {value!r}: say 1 to compile passes, 0 not to.")
        return word in _ON

    def decide(self) -> Passes | None:
        """What is used from here on; a compiler runs at most once in a process."""
        with self._lock:
            if not self.is_decided:
                self.used = self._tried() if self.is_wanted else None
                self.is_decided = True
            return self.used

    def _tried(self) -> Passes | None:
        if not self._is_tried:
            try:
                made = Passes(library())
                wrong = disproof(made)
                self.trouble = f"a compiled pass gives other numbers than torch: {wrong}" if wrong else ""
                self._made = None if wrong else made
            except CannotBuildError as error:
                self.trouble = str(error)
            self._is_tried = True
        return self._made


_choice = _Choice()


def passes() -> Passes | None:
    """The compiled passes, or None where torch is to be used."""
    return _choice.used if _choice.is_decided else _choice.decide()


def use_compiled_passes(is_wanted: bool | None) -> None:
    """Turn compiled passes on, off, or back to what the environment variable says (None), in this process.

    When the first tensor needs them the system's C compiler makes them, in a second or so, and the result is kept in
    the user's cache folder. They are used only if they give torch's numbers: see `compiled_passes`.

    >>> use_compiled_passes(False)
    >>> compiled_passes()
    'off: turned off by use_compiled_passes'
    >>> use_compiled_passes(None)
    """
    _choice.want(is_wanted)


def are_passes_compiled() -> bool:
    """Are they used: wanted, made and tried? The first call in a process tries."""
    return passes() is not None


def compiled_passes() -> str:
    """Whether passes over memory are compiled in this process, and why not if they are not."""
    if passes() is not None:
        return "on: compiled on this machine, with the numbers of torch"
    if _choice.is_wanted:
        return f"off: {_choice.trouble}; torch's operators give the same numbers"
    if _choice.is_set:
        return "off: turned off by use_compiled_passes"
    return f"off: not asked for ({VARIABLE}=1 does)"
