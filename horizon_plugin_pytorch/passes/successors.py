"""What a module that takes another's place owes to the user's code, which goes on reading and calling the old one."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from horizon_plugin_pytorch.capture.kept_functions import OwnFunction
from horizon_plugin_pytorch.capture.plain_state import is_of_users
from horizon_plugin_pytorch.runtime.hooks import ALL
from horizon_plugin_pytorch.writing import module_writes

_INTERNAL = frozenset(vars(nn.Module()))  # what torch keeps of a module
_SETTINGS = frozenset({bool, int, float, str, type(None)})  # what refers to nothing


def keep_attributes(new: nn.Module, old: nn.Module) -> nn.Module:
    """Let `new` answer what `old` answers: its public attributes that are neither tensors nor modules, and its class.

    They are ordinary entries of the instance, so copies and pickles have them, and the state_dict has not.

    >>> keep_attributes(nn.Identity(), nn.Conv2d(1, 2, 3, stride=2)).stride
    (2, 2)
    """
    for name, value in vars(old).items():
        is_internal = name.startswith("_") or name == "qconfig" or isinstance(value, (Tensor, nn.Module))
        if not is_internal and not hasattr(new, name):
            new.__dict__[name] = value
    new.__dict__["written_as"] = vars(old).get("written_as", type(old))
    if module_writes(old) or getattr(old, "writes_input", False):
        new.__dict__["writes_input"] = True
    return new


def replace_references(root: nn.Module, replaced: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Put the new modules also where the model keeps the old ones outside of its tree: in lists, objects, functions.

    Handles of hooks that the model keeps remove them from the new modules.

    Args:
        replaced: pairs of the old module and the new.
    """
    pairs = [(old, new) for old, new in replaced if old is not new]
    if not pairs:
        return
    references = _References(pairs)
    for module in root.modules():
        is_ours = type(module).__module__.startswith("horizon_plugin_pytorch.")  # which knows whom it came of
        for name, value in vars(module).items():
            if type(value) in _SETTINGS:
                continue
            if name not in _INTERNAL and not (is_ours and isinstance(value, nn.Module)):
                module.__dict__[name] = references.current(value)
            elif name in ALL and value:
                for hook in value.values():
                    references.current(getattr(hook, "__self__", None))


class _References:
    """What takes the place of references to modules that were replaced.

    Args:
        pairs: of the old module and the new.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        pairs = list(pairs)
        self._modules = {id(old): new for old, new in pairs}
        self._hooks = {id(vars(old)[kind]): vars(new)[kind] for old, new in pairs for kind in ALL}
        self._seen: dict[int, Any] = {}

    def current(self, value: Any) -> Any:
        """A value with the new modules: the same object where it can be written to."""
        if type(value) in _SETTINGS:
            return value
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if type(value) is tuple:
            items = tuple(map(self.current, value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if isinstance(value, MethodType) and id(value.__self__) in self._modules:
            return getattr(self._modules[id(value.__self__)], value.__name__, value)
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._write(value)
        return value

    def _write(self, value: Any) -> None:
        if isinstance(value, (list, deque)):
            for index, item in enumerate(value):
                if (new := self.current(item)) is not item:
                    value[index] = new
        elif isinstance(value, OwnFunction):
            value.replace(self._modules)
        elif isinstance(value, functools.partial):
            args, keywords = self.current(value.args), {k: self.current(v) for k, v in value.keywords.items()}
            value.__setstate__((self.current(value.func), args, keywords, value.__dict__))  # type: ignore[attr-defined]
        elif isinstance(value, RemovableHandle):
            self._write_handle(value)
        elif isinstance(value, (dict, SimpleNamespace)) or is_of_users(type(value)):
            own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            for key, item in list(own.items()):
                if (new := self.current(item)) is not item:
                    own[key] = new

    def _write_handle(self, handle: Any) -> None:
        """torch's handles know the dictionaries of a module that a hook is in."""
        current = lambda ref: weakref.ref(self._hooks[id(ref())]) if id(ref()) in self._hooks else ref  # noqa: E731
        handle.hooks_dict_ref = current(handle.hooks_dict_ref)
        handle.extra_dict_ref = tuple(map(current, handle.extra_dict_ref))
