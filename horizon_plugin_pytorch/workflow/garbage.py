"""Python's garbage collector while a model is prepared."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """No garbage is collected in here.

    A prepared model is made of some hundred thousand objects, and they stay: that many new ones make Python look
    through all objects of the process, torch's included, once or twice, which takes as long as a forward.

    >>> with collected_later():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
