"""Parts of a model without a qconfig run in float; a quantized tensor that reaches one is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking.stack import running_functions
from horizon_plugin_pytorch.errors import at
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.located import Successor
from horizon_plugin_pytorch.runtime.real_tensor import unmarked


def has_quantized(tree: Any) -> bool:
    """Is one of the tensors quantized?"""
    return any(isinstance(x, QTensor) for x in tensors_in(tree))


def refused(what: str, where: str) -> NotImplementedError:
    """The documented error of a float operator that gets a quantized tensor."""
    return NotImplementedError(
        f"`{what}` {where} is not implemented for QTensor: it has no qconfig, so it is computed in float, and a "
        "quantized tensor reaches it. Put a DeQuantStub before it and a QuantStub after it; or prepare with "
        "hybrid=True and name it, or the module around it, in hybrid_dict['module_name'] (hybrid=True alone in eager "
        "mode); or give it a qconfig."
    )


class KeptFloat:
    """A hook of a module among quantized ones that is not quantized itself.

    Args:
        path: the module.
        line: where the model calls it, if that is known.
        is_known: is it an operator without a qconfig? Other modules may know what to do with quantized tensors.
    """

    def __init__(self, path: str, line: str = "", is_known: bool = True) -> None:
        self.path, self.line, self.is_known = path, line, is_known

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before the forward: ordinary tensors."""
        if self.is_known and has_quantized((args, kwargs)):
            raise refused(type(module).__name__, at(self.path, self.line))
        return unmarked((args, kwargs))


def keep_float(modules: Iterable[tuple[str, nn.Module]], lines: dict[str, str] | None = None) -> None:
    """Let modules that are not quantized take ordinary tensors only, and operators without a qconfig say so.

    Args:
        modules: paths and modules; those that are quantized, or keep the scales of what they get, are left alone.
        lines: where the model calls them.
    """
    for path, module in modules:
        row = row_of_module(type(module))
        if isinstance(module, Successor) or (row is not None and (row.qat is None or row.is_quant)):
            continue
        hook = KeptFloat(path, (lines or {}).get(path, ""), row is not None and row.needs_qconfig)
        keep(module.register_forward_pre_hook, hook.before, with_kwargs=True)


def running_functional() -> nn.Module | None:
    """The FloatFunctional whose method runs now."""
    for running in running_functions():
        if isinstance(running.owner, nn.Module) and not isinstance(running.owner, Successor):
            row = row_of_module(type(running.owner))
            if row is not None and row.is_functional:
                return running.owner
    return None
