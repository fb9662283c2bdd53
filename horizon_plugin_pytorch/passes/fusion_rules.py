"""What the BPU fuses: declared once, for fx and eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from horizon_plugin_pytorch.errors import FusionError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.nn.intrinsic import LAYER_NAMES, fold_bn, fused_class
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode
from horizon_plugin_pytorch.runtime.located import PRESERVED


class Role(Enum):
    """A module's part in a fusion."""

    LAYER = "layer"
    BN = "bn"
    ADD = "add"
    RELU = "relu"


@dataclass(frozen=True)
class FusionRule:
    """A sequence of roles, in order of data flow, that becomes one module."""

    name: str
    roles: tuple[Role, ...]

    @property
    def has_add(self) -> bool:
        """Does it take a second tensor?"""
        return Role.ADD in self.roles

    @property
    def anchor(self) -> int:
        """Index of the member whose name the fused module takes: the add if there is one, else the layer."""
        return self.roles.index(Role.ADD) if self.has_add else 0


# Longest first: a longer match is preferred to a shorter one.
FUSION_RULES = (
    FusionRule("layer-bn-add-relu", (Role.LAYER, Role.BN, Role.ADD, Role.RELU)),
    FusionRule("layer-bn-add", (Role.LAYER, Role.BN, Role.ADD)),
    FusionRule("layer-add-relu", (Role.LAYER, Role.ADD, Role.RELU)),
    FusionRule("layer-add", (Role.LAYER, Role.ADD)),
    FusionRule("layer-bn-relu", (Role.LAYER, Role.BN, Role.RELU)),
    FusionRule("layer-relu", (Role.LAYER, Role.RELU)),
    FusionRule("layer-bn", (Role.LAYER, Role.BN)),
)
_BY_ROLES = {rule.roles: rule for rule in FUSION_RULES}

_BATCH_NORMS: dict[type, tuple[type, ...]] = {
    nn.Conv1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.Conv3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.ConvTranspose1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.ConvTranspose2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.ConvTranspose3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.Linear: (nn.BatchNorm1d, nn.SyncBatchNorm),
}


def layer_class(module: nn.Module) -> type[nn.Module] | None:
    """The torch layer that takes part in fusion, if the module is one.

    A subclass that changes forward is not, nor is a layer whose weight the model computes at every call.
    """
    if getattr(module, "is_weight_computed", False):
        return None
    for cls in LAYER_NAMES:
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return cls
    return None


def role_of(module: nn.Module) -> Role | None:
    """The module's part in a fusion, None if it has none."""
    if layer_class(module) is not None:
        return Role.LAYER
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return Role.BN
    if type(module) in (nn.ReLU, nn.ReLU6):
        return Role.RELU
    row = row_of_module(type(module))
    return Role.ADD if row is not None and row.is_functional else None


def rule_for(modules: Sequence[nn.Module]) -> FusionRule | None:
    """The rule that a sequence of modules follows."""
    roles = tuple(role_of(m) for m in modules)
    return _BY_ROLES.get(roles) if None not in roles else None  # type: ignore[arg-type]


def can_fold(layer: nn.Module, bn: nn.Module) -> bool:
    """Does this batch normalisation follow this layer in a way that folding understands?"""
    cls = layer_class(layer)
    return cls is not None and fits_layer(cls, layer, bn)


def fits_layer(cls: type[nn.Module], layer: nn.Module, bn: nn.Module) -> bool:
    """Can this batch normalisation be folded into a layer of that torch class, or into the QAT form of one?"""
    if not isinstance(bn, _BATCH_NORMS[cls]) or bn.running_var is None:
        return False
    channels = layer.out_features if cls is nn.Linear else layer.out_channels
    return bn.num_features == channels


def fuse(modules: Sequence[nn.Module]) -> nn.Module:
    """The fused module for a sequence that follows a rule.

    >>> fuse([nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()]).__class__.__name__
    'ConvReLU2d'
    """
    rule = rule_for(modules)
    if rule is None:
        prepared = [type(m).__name__ for m in modules if isinstance(m, (QATModule, QuantizedModule))]
        if prepared:
            raise FusionError(
                f"cannot fuse {', '.join(prepared)} of a model that is prepared already: fuse the float model, and "
                "prepare that."
            )
        raise FusionError(
            f"cannot fuse {', '.join(type(m).__name__ for m in modules)}: a layer (Conv, ConvTranspose, Linear) comes "
            "first, then any of batch norm, FloatFunctional (add) and ReLU or ReLU6, in this order."
        )
    members = dict(zip(rule.roles, modules, strict=True))
    fused = _fused(rule, members)
    if any(PRESERVED in module.__dict__ for module in modules):
        # The guide: what is said of the layer counts, and not what is said of the others.
        own = fused.__dict__[PRESERVED] = members[Role.LAYER].__dict__.get(PRESERVED)
        _tell_preserved(own, members)
    return fused


def _tell_preserved(own: bool | None, members: dict[Role, nn.Module]) -> None:
    """Warn of what is said of members other than the layer."""
    others = [type(m).__name__ for role, m in members.items() if role is not Role.LAYER and m.__dict__.get(PRESERVED)]
    if others and not own:
        warn(
            f"`preserve_qat_mode` of {listed(others)} has no effect: fused modules follow what is said of their "
            f"layer. Set it on the {type(members[Role.LAYER]).__name__}.",
            QuantizationWarning,
        )


def _fused(rule: FusionRule, members: dict[Role, nn.Module]) -> nn.Module:
    layer = members[Role.LAYER]
    cls = layer_class(layer)
    assert cls is not None
    relu: Any = members.get(Role.RELU)
    relu_class = None if relu is None else type(relu)
    if Role.BN in members:
        bn = members[Role.BN]
        if not can_fold(layer, bn):
            raise FusionError(
                f"cannot fold {bn} into {layer}: expected {' or '.join(c.__name__ for c in _BATCH_NORMS[cls])} with "
                "running statistics and as many features as the layer has outputs."
            )
        if get_qat_mode() is not QATMode.FuseBN:
            normed: Any = fused_class(cls, rule.has_add, relu_class, has_bn=True)
            assert normed is not None
            return normed(layer, bn, relu)
        layer = fold_bn(layer, bn)
    if not rule.has_add and relu is None:
        return layer
    fused = fused_class(cls, rule.has_add, relu_class)
    assert fused is not None
    return fused(layer, relu)
