"""What a model can say about its own code to `prepare`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_plugin_pytorch.fx.call_site import current_scope, entered, is_recording


@contextmanager
def dynamic_block(module: Any = None, name: str = "dynamic_block") -> Iterator[None]:
    """Give the functions called inside modules of their own, under a stable name.

    A line that runs several times has one module for all its runs, however often that is; a block is needed only where
    the same line should have another scale in another place.

    Args:
        module: the module whose forward is running.
        name: the block's name; modules made for it are children of ``<module>.<name>``.
    """
    scope = current_scope()
    with entered(f"{scope}.{name}" if scope else name):
        yield


class Tracer:
    """Names that models use while they are prepared."""

    dynamic_block = staticmethod(dynamic_block)

    @staticmethod
    def is_tracing() -> bool:
        """Is `prepare` running the model to record it?"""
        return is_recording()
