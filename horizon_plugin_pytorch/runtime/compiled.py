"""Models that compute with scales, met by `torch.compile` and `make_fx`.

It cannot trace tensors whose type is a format of integers. A model whose call is ours stays out of the compiled code
(`run_uncompiled`); where the user's forward calls modules of ours, these refuse (`refuse_compiled`).

While code is traced, `is_dynamo_compiling()` is True, and what `torch.compiler.disable` makes is called,
not traced. So nothing of the compiler is imported before somebody uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horizon_plugin_pytorch.errors import TraceError

_REASON = "it computes with scales, and torch.compile cannot trace tensors that have one"


def run_uncompiled(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a call as it is written, also in code that is being compiled."""
    if is_dynamo_compiling():
        return torch.compiler.disable(call, reason=_REASON)(*args, **kwargs)
    return call(*args, **kwargs)


def refuse_compiled(name: str, place: str) -> None:
    """The error of a call in code that is being compiled.

    Args:
        name: the module's class.
        place: ``at `path` (file:line)``.

    Raises:
        TraceError: always.
    """
    torch.compiler.disable(_refuse, reason=_REASON)(name, place)


def is_proxied() -> bool:
    """Is `make_fx` writing down what runs? It knows tensors by identity, which those with a scale do not keep.

    What torch's own `export` is told is said where tensors get their scale.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None and not torch.compiler.is_exporting()


def refuse_proxied(name: str, place: str) -> None:
    """The error of a call that `make_fx` would write down.

    Args:
        name: the module's class.
        place: ``at `path` (file:line)``.

    Raises:
        TraceError: always.
    """
    raise TraceError(
        f"`{name}` {place} cannot be traced by `make_fx`: it computes with scales, and the graph would keep the "
        "numbers of this input. `torch.export.export` takes converted models, and `record_program` gives their graph."
    )


def _refuse(name: str, place: str) -> None:
    raise TraceError(
        f"`{name}` {place} cannot be compiled: {_REASON}. Keep the model out, `model = torch.compiler.disable(model)`, "
        "and compile the float code around it; or prepare it with PrepareMethod.SYMBOLIC, then it stays out by itself."
    )
