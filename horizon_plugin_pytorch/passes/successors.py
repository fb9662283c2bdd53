"""What a module that takes another's place owes to the user's code, which goes on reading and calling the old one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.capture.kept_functions import OwnFunction

_INTERNAL = frozenset(vars(nn.Module()))  # what torch keeps of a module


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
    if getattr(old, "inplace", False) is True or getattr(old, "writes_input", False):
        new.__dict__["writes_input"] = True
    return new


def replace_references(root: nn.Module, replaced: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Put the new modules also where the model keeps the old ones outside of its tree: in plain lists and functions.

    Args:
        replaced: pairs of the old module and the new.
    """
    pairs = [(old, new) for old, new in replaced if old is not new]
    successors = {id(old): new for old, new in pairs}
    if not successors:
        return

    def current(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return successors.get(id(value), value)
        if type(value) is list:
            value[:] = map(current, value)
        elif type(value) is dict:
            value.update({k: current(v) for k, v in value.items()})
        elif type(value) is tuple:
            return tuple(map(current, value))
        elif isinstance(value, OwnFunction):
            value.replace(successors)
        return value

    for module in root.modules():
        for name, value in vars(module).items():
            if name not in _INTERNAL and type(value) in (list, dict, tuple, OwnFunction):
                module.__dict__[name] = current(value)
