"""Fusion in eager mode: the user says which modules belong together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import FusionError, require_module
from horizon_plugin_pytorch.nn.intrinsic import Entry, FusedModule
from horizon_plugin_pytorch.passes.fusion_rules import FusionRule, fuse, rule_for
from horizon_plugin_pytorch.passes.successors import keep_attributes, replace_references
from horizon_plugin_pytorch.runtime.hooks import AFTER, BEFORE, copy_hooks, keep
from horizon_plugin_pytorch.runtime.located import FUSED_INTO


def fuse_known_modules(
    mod_list: Sequence[nn.Module], is_qat: bool = False, additional_fuser_method_mapping: dict | None = None
) -> list[nn.Module]:
    """A list as long as `mod_list`: the fused module where the add (else the layer) was, Identity elsewhere.

    Args:
        mod_list: modules in order of data flow.
        is_qat: accepted for compatibility; batch normalisation is folded either way.
        additional_fuser_method_mapping: tuples of types to functions that fuse them.

    >>> [type(m).__name__ for m in fuse_known_modules([nn.Conv2d(1, 2, 1), nn.ReLU()])]
    ['ConvReLU2d', 'Identity']
    """
    types = tuple(type(m) for m in mod_list)
    custom = (additional_fuser_method_mapping or {}).get(types)
    out: list[nn.Module] = [nn.Identity() for _ in mod_list]
    for identity, module in zip(out, mod_list, strict=True):
        identity.train(module.training)
    if custom is not None:
        out[0] = custom(*mod_list)
        return out
    rule, fused = _fuse(mod_list)
    if rule.has_add and isinstance(fused, FusedModule):
        _enter(fused, out[0])
    for identity in out:
        identity.__dict__[FUSED_INTO] = [fused]
    out[rule.anchor] = fused
    return out


def _fuse(mod_list: Sequence[nn.Module]) -> tuple[FusionRule, nn.Module]:
    """The fused module, with the hooks and the qconfig of its members, and the rule that made it."""
    rule, fused = rule_for(mod_list), fuse(mod_list)
    assert rule is not None  # `fuse` raised otherwise
    explicit = [m.__dict__["qconfig"] for m in mod_list if "qconfig" in m.__dict__]
    if explicit:
        fused.qconfig = explicit[-1]
    _keep_hooks(mod_list, fused)
    return rule, fused


def _enter(fused: FusedModule, identity: nn.Module) -> None:
    """What passes through `identity`, where the layer was, is the layer's operand of the add."""
    entry = Entry()
    fused.enter_through(entry)
    keep(identity.register_forward_hook, entry)


def _keep_hooks(mod_list: Sequence[nn.Module], fused: nn.Module) -> None:
    copy_hooks(fused, mod_list[0], BEFORE)
    copy_hooks(fused, mod_list[-1], AFTER)


def _parent_and_name(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(parent)
        getattr(owner, name)
    except AttributeError:
        raise FusionError(f"fuse_modules: `{type(model).__name__}` has no module `{path}`.") from None
    return owner, name


def _groups(modules_to_fuse: Sequence[str] | Sequence[Sequence[str]]) -> Any:
    is_one = bool(modules_to_fuse) and isinstance(modules_to_fuse[0], str)
    return [modules_to_fuse] if is_one else modules_to_fuse


def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Sequence[str] | Sequence[Sequence[str]],
    inplace: bool = False,
    fuser_func: Callable[..., list[nn.Module]] = fuse_known_modules,
    fuse_custom_config_dict: dict[str, Any] | None = None,
) -> nn.Module:
    """Fuse named modules of a model.

    Args:
        modules_to_fuse: names in order of data flow, or a list of such lists.
        inplace: change `model` itself rather than a copy.
        fuser_func: what fuses a list of modules.
        fuse_custom_config_dict: ``{"additional_fuser_method_mapping": {...}}``.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    >>> type(fuse_modules(net, ["0", "1", "2"])[0]).__name__
    'ConvReLU2d'
    """
    require_module(model, "fuse_modules")
    if not inplace:
        model = copy.deepcopy(model)
    groups = _groups(modules_to_fuse)
    mapping = (fuse_custom_config_dict or {}).get("additional_fuser_method_mapping")
    for group in groups:
        places = [_parent_and_name(model, path) for path in group]
        modules = [getattr(owner, name) for owner, name in places]
        kwargs = {"additional_fuser_method_mapping": mapping} if mapping else {}
        try:
            fused = fuser_func(modules, **kwargs)
        except FusionError as error:
            raise FusionError(f"fuse_modules {list(group)} of `{type(model).__name__}`: {error}") from None
        for (owner, name), old, new in zip(places, modules, fused, strict=True):
            setattr(owner, name, keep_attributes(new, old))
        replace_references(model, zip(modules, fused, strict=True))
    return model


def fuse_conv_shared_modules(
    model: nn.Module, modules_to_fuse: Sequence[str] | Sequence[Sequence[str]], inplace: bool = False
) -> nn.Module:
    """Fuse a layer that several branches share, each with a batch normalisation of its own.

    The documents name this function and do not define it. Here it does what a detection head with one convolution for
    all levels and a batch normalisation for each needs: every branch gets a copy of the layer with its own batch
    normalisation (and add and ReLU) fused into it. The copy stands where the branch's batch normalisation was, or its
    add or ReLU where that comes first, since all branches still call the layer: it becomes Identity and hands its
    input on. So every use of the layer must be listed. With `QATMode.WithBN` the copies share the layer's weight.

    Args:
        modules_to_fuse: for each branch the names in order of data flow; the layer comes first in all that share it.
        inplace: change `model` itself rather than a copy.

    >>> class Head(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv, self.bn1, self.bn2 = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    ...     def forward(self, x, y):
    ...         return self.bn1(self.conv(x)), self.bn2(self.conv(y))
    >>> fused = fuse_conv_shared_modules(Head().eval(), [["conv", "bn1"], ["conv", "bn2"]])
    >>> [type(m).__name__ for m in fused.children()]
    ['Identity', 'Conv2d', 'Conv2d']
    """
    require_module(model, "fuse_conv_shared_modules")
    if not inplace:
        model = copy.deepcopy(model)
    groups = _groups(modules_to_fuse)
    places = {path: _parent_and_name(model, path) for group in groups for path in group}
    modules = {path: getattr(*place) for path, place in places.items()}  # as they are before any is replaced
    for group in groups:
        members = [copy.copy(modules[group[0]]), *(modules[path] for path in group[1:])]
        try:
            rule, fused = _fuse(members)
        except FusionError as error:
            raise FusionError(f"fuse_conv_shared_modules {list(group)} of `{type(model).__name__}`: {error}") from None
        for path in group:
            setattr(*places[path], nn.Identity().train(modules[path].training))
        anchor = rule.anchor if rule.has_add else 1
        setattr(*places[group[anchor]], fused)
        if rule.has_add and isinstance(fused, FusedModule):
            _enter(fused, getattr(*places[group[anchor - 1]]))
    return model


show_at("quantization.fuse_modules", fuse_known_modules, fuse_modules, fuse_conv_shared_modules)
