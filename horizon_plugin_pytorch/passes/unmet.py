"""Scales of calls in wrapped code that a model has loaded and not met: they wait for the call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from horizon_plugin_pytorch.passes.generated import GENERATED
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.runtime.wrapped import is_passed

_UNMET = "unmet_calls"  # of a model: for each path the state of the module that is to be made there
State = dict[str, dict[str, Any]]


def has_code(model: nn.Module) -> bool:
    """Has a prepared model code in its quantized part that tracing did not enter?"""
    return any(isinstance(m, LeafCode) and m.handler is not None for m in model.modules())


def unmet_keys(model: nn.Module, keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """The keys of a state dict that belong to calls which a model has not met: the module's path, and its own key."""
    found: dict[str, tuple[str, str]] = {}
    modules = dict(model.named_modules()) if has_code(model) else {}
    for key in keys if modules else ():
        parts = key.split(".")
        for index, part in enumerate(parts):
            scope, path = ".".join(parts[:index]), ".".join(parts[: index + 1])
            if part.startswith(GENERATED) and path not in modules:  # a module of the user's may be called so
                if _may_grow(modules.get(scope)):
                    found[key] = path, ".".join(parts[index + 1 :])
                break
    return found


def _may_grow(module: nn.Module | None) -> bool:
    """Can a call that is met add a module there?"""
    if isinstance(module, LeafCode):
        return module.handler is not None
    return module is not None and is_passed(module)


def keep_unmet(model: nn.Module) -> None:
    """Let a prepared model keep what a checkpoint has for calls that it has not met, and save it again."""
    model.register_load_state_dict_pre_hook(_take_aside)
    model.register_state_dict_post_hook(_put_back)


def _take_aside(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    own = {key[len(prefix) :]: key for key in state_dict if key.startswith(prefix)}
    for key, (path, name) in unmet_keys(model, own).items():
        model.__dict__.setdefault(_UNMET, {}).setdefault(path, {})[name] = state_dict.pop(own[key])


def _put_back(model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    unmet: State = model.__dict__.get(_UNMET, {})
    for path, state in unmet.items():
        for name, value in state.items():
            state_dict.setdefault(f"{prefix}{path}.{name}", value)


def keep_state_of(model: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Keep the state that modules of another model have for calls which this one has not met; paths of those."""
    state = other.state_dict() if has_code(model) else {}
    kept: dict[str, None] = {}
    for key, (path, name) in unmet_keys(model, state.keys()).items():
        model.__dict__.setdefault(_UNMET, {}).setdefault(path, {})[name] = state[key].detach().clone()
        kept[f"{path}."] = None
    return tuple(kept)


def take_unmet(model: nn.Module, path: str, module: nn.Module | None) -> bool:
    """Load what waits for the module at a path into it; False if nothing does.

    Args:
        module: None only asks.
    """
    unmet: State = model.__dict__.get(_UNMET, {})
    if path not in unmet:
        return False
    if module is not None:
        state, shared = unmet.pop(path), _shared(model, path, module)
        module.load_state_dict({name: value for name, value in state.items() if name not in shared}, strict=False)
    return True


def _shared(model: nn.Module, path: str, module: nn.Module) -> set[str]:
    """Tensors that a module has of another, as in `F.linear(x, self.weight)`: that one has loaded its own."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    others = {id(value) for name, value in tensors if not name.startswith(f"{path}.")}
    return {name for name, value in (*module.named_parameters(), *module.named_buffers()) if id(value) in others}
