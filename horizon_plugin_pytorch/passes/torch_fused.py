"""Modules that torch's own `fuse_modules` made become ours, where this package would fuse the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn
from horizon_plugin_pytorch.nn.intrinsic import fused_class
from horizon_plugin_pytorch.passes.fusion_rules import fuse, layer_class, rule_for
from horizon_plugin_pytorch.passes.swap import map_modules

_TORCH = "torch.ao.nn.intrinsic.modules."  # known by name: `torch.ao` is leaving torch and is never imported here


def own_fused(model: nn.Module, is_eager: bool = False) -> nn.Module:
    """Put our fused modules in place of torch's; what the chip does not fuse stays a chain.

    Args:
        is_eager: does nobody look at the chains again? Then they are named.
    """
    chains: list[str] = []

    def change(path: str, module: nn.Module) -> nn.Module | None:
        if not type(module).__module__.startswith(_TORCH):
            return None
        fused = _fused(module)
        if fused is None:
            chains.append(f"`{path}` ({type(module).__name__})")
            return None
        qconfigs = [vars(m)["qconfig"] for m in (*module.children(), module) if "qconfig" in vars(m)]
        if qconfigs:
            fused.qconfig = qconfigs[-1]
        return fused.train(module.training)

    model = map_modules(model, change)
    if chains and is_eager:
        shown = listed(chains)
        warn(
            f"torch's fuse_modules made {shown}, which the chip does not fuse: the members are quantized one after the "
            "other, each with a scale of its own. Leave these out of fuse_modules.",
            QuantizationWarning,
        )
    return model


def _fused(module: nn.Module) -> nn.Module | None:
    """Our form of one of torch's fused modules; None if there is none."""
    members = list(module.children())
    add = getattr(module, "add", None)
    layer = layer_class(members[0]) if members else None
    if add is not None and layer is not None:
        cls: Any = fused_class(layer, True, type(members[1]) if len(members) > 1 else None)
        return cls(*members) if cls is not None and add in (torch.add, torch.ops.aten.add) else None
    return fuse(members) if rule_for(members) is not None else None
