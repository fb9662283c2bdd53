"""The float model that a verb is given: what it must be, and how passes want it."""

from __future__ import annotations

import torch
from torch import nn

from horizon_plugin_pytorch.capture.plain_model import plain_modules, require_shapes
from horizon_plugin_pytorch.capture.plain_weights import plain_weights
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.transformer import plain_transformers
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.passes.torch_fused import own_fused


def as_written(model: nn.Module, is_eager: bool = False) -> nn.Module:
    """Take out of a model, in place, what hides its modules and weights: compilers, parametrizations, torch's fast
    paths and fused modules.

    Args:
        is_eager: does nobody look at chains of torch's fused modules again? Then they are named.
    """
    return own_fused(plain_weights(plain_transformers(plain_modules(model))), is_eager)


def require_float(model: nn.Module, what: str) -> None:
    """A model is prepared once, and has weights by then, and a forward in Python."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{what} takes a float model in Python, and this one is TorchScript, whose code cannot be changed. Give "
            "the model that was scripted or traced."
        )
    require_shapes(model, what)
    for path, module in model.named_modules():
        if isinstance(module, (QATModule, QuantizedModule)):
            raise TypeError(
                f"{what} takes a float model, and this one is already prepared or converted: `{path}` is "
                f"{type(module).__module__}.{type(module).__name__}. Keep the float model, and prepare that."
            )
        if _is_prepared_by_torch(type(module)):
            raise TypeError(
                f"{what} takes a float model, and torch's own quantization prepared or converted this one: `{path}` is "
                f"{type(module).__module__}.{type(module).__name__}. Give the model as it was before; what torch's "
                "`fuse_modules` gives can be taken."
            )
        row = row_of_module(type(module)) if "forward" in vars(module) else None
        if row is not None and row.qat is not None:
            raise UnsupportedOperatorError(
                f"{what}: `{path}` is a {type(module).__name__} whose `forward` was replaced by an attribute of the "
                "object. Its quantized form would compute what the class does, and not what was put there. Derive a "
                "class with this forward, or take it off (`del module.forward`) before the model is prepared."
            )


_TORCH_STAGES = (
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
)


def _is_prepared_by_torch(cls: type) -> bool:
    is_staged = cls.__module__.startswith((*_TORCH_STAGES, "torch.ao.quantization.fake_quantize"))
    return is_staged and row_of_module(cls) is None and "FloatFunctional" not in cls.__name__
