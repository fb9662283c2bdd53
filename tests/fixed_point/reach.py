"""What the tests of integer kernels let a machine be, what they need of it, and how often they run on kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.kernels import Kernels, PackedConv, PackedLinear, Reach, disproof

needs_kernels = pytest.mark.skipif(
    bool(disproof(Kernels(), Reach.SEVEN_BITS)), reason="the kernels of this machine are not exact, or torch has none"
)


# For inputs of all bytes, and products of matrices.
needs_all_bytes = pytest.mark.skipif(
    bool(disproof(Kernels())), reason="the kernels of this machine are not exact for all inputs, or torch has none"
)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Layers run on float32 in here, and on integer kernels behind it."""
    fp.use_integer_kernels(False)
    try:
        yield
    finally:
        fp.use_integer_kernels(True)


def pretend(monkeypatch: pytest.MonkeyPatch, reach: Reach) -> None:
    """Let the proofs of inputs beyond `reach` have failed."""
    order = [Reach.BYTES, Reach.SEVEN_BITS, Reach.NOTHING]
    beyond = order[: order.index(reach)]
    monkeypatch.setattr(kernels, "_choice", kernels._Choice())
    monkeypatch.setattr(kernels._choice, "_found", {(disproof, x): "wrong on purpose" for x in beyond})


def with_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the proof of all inputs have succeeded: for operands with which it does on any machine."""
    monkeypatch.setattr(kernels, "_choice", kernels._Choice())
    monkeypatch.setattr(kernels._choice, "_found", {(disproof, Reach.BYTES): ""})
    fp.use_integer_kernels(True)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often kernels run from here on, by kind; those of proofs do not count."""
    kernels.proved_reach(), kernels.are_kernels_rounding(), kernels.has_linear()
    calls: Counter[str] = Counter()

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_run(*args: Any) -> Any:
            calls[name] += 1
            return run(*args)

        return count_and_run

    monkeypatch.setattr(PackedConv, "__call__", counted("sums", PackedConv.__call__))
    monkeypatch.setattr(PackedConv, "rounded", counted("rounded", PackedConv.rounded))
    monkeypatch.setattr(PackedLinear, "__call__", counted("rows", PackedLinear.__call__))
    monkeypatch.setattr(PackedLinear, "rounded", counted("rounded rows", PackedLinear.rounded))
    monkeypatch.setattr(kernels, "multiply", counted("products", kernels.multiply))
    return calls
