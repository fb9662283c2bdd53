"""What a model can say about its own code to `prepare`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.runtime.call_site import block, is_recording


@contextmanager
def dynamic_block(module: Any = None, name: str = "dynamic_block") -> Iterator[None]:
    """Mark code whose number of runs varies: put it inside the loop, around one run of its body.

    The block is recorded once, however often it runs, and what is in it is fused only with what is in it. Functions in
    it have modules of their own, children of ``<module>.<name>``; the same line in a block of another name has others,
    with scales of their own.

    Args:
        module: the module whose forward is running.
        name: the block's name.
    """
    with block(name):
        yield


class _IsTracing:
    """True while `prepare` runs the model to record it; as a value, and called."""

    def __call__(self) -> bool:
        return is_recording()

    def __bool__(self) -> bool:
        return is_recording()


class Tracer:
    """Names that models use while they are prepared.

    >>> Tracer.is_tracing()
    False
    """

    dynamic_block = staticmethod(dynamic_block)
    is_tracing = _IsTracing()


show_at("fx.jit_scheme", dynamic_block, Tracer)
