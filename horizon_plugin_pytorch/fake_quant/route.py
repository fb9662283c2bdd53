"""The training route of a model, for whoever writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_WRITTEN = ContextVar("is_written", default=False)


def is_written() -> bool:
    """Is the training route of a model being written down?"""
    return _IS_WRITTEN.get()


@contextmanager
def written_route() -> Iterator[None]:
    """Let prepared models compute as in training in here, and stay as they are.

    Nothing is observed. Models in the VALIDATION state do not run on integers: they round real values, with the same
    scales, and each rounding is one operator, ``horizon::fake_quantize``.
    """
    token = _IS_WRITTEN.set(True)
    try:
        yield
    finally:
        _IS_WRITTEN.reset(token)
