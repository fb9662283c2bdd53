"""How a command ends."""

from __future__ import annotations

from horizon_plugin_pytorch.errors import HorizonError

FINE = 0
BROKEN = 1  # a limit of the threshold file
NOT_DONE = 2  # wrong usage, or a model that cannot be loaded or run
DEFECT = 3  # of this package
INTERRUPTED = 130  # as shells have it


class UsageError(HorizonError):
    """What the user typed cannot be done; the message says what can."""


class UserCodeError(HorizonError):
    """Code of the user's raised an error, which is the cause of this one."""
