"""What a prepared model knows of itself besides its modules: its graph, its chip, why each module has its formats."""

from __future__ import annotations

from typing import Any

from torch import nn

_OWN = "_horizon_"


def keep_notes(model: nn.Module, **notes: Any) -> None:
    """Keep notes as attributes of a model; where the model has something of that name itself, under another name.

    >>> net = nn.Module()
    >>> net.graph = nn.Linear(1, 1)
    >>> keep_notes(net, graph="a graph", march="a chip")
    >>> type(net.graph).__name__, net.march, note_of(net, "graph")
    ('Linear', 'a chip', 'a graph')
    """
    for name, value in notes.items():
        is_kept = name in model.__dict__.get(_OWN, ())
        is_free = is_kept or not hasattr(model, name)
        model.__dict__[name if is_free else _OWN + name] = value
        if is_free:
            model.__dict__[_OWN] = (*model.__dict__.get(_OWN, ()), name)


def keep_hidden(model: nn.Module, name: str, value: Any) -> None:
    """Keep a note that users do not ask for, under a name that no model of theirs has."""
    model.__dict__[_OWN + name] = value


def hidden(model: nn.Module, name: str, kind: type | tuple[type, ...] = object) -> Any:
    """A hidden note of a model, if it is of this kind; pickles of before have it under its plain name.

    >>> net = nn.Module()
    >>> net.own_scales = "the user's"
    >>> hidden(net, "own_scales", dict) is None
    True
    >>> keep_hidden(net, "own_scales", {})
    >>> net.own_scales, hidden(net, "own_scales", dict)
    ("the user's", {})
    """
    value = model.__dict__.get(_OWN + name if _OWN + name in model.__dict__ else name)
    return value if isinstance(value, kind) else None


def note_of(model: nn.Module, name: str, otherwise: Any = None) -> Any:
    """A note of a model."""
    own = model.__dict__.get(_OWN + name)
    if own is not None:
        return own
    return model.__dict__.get(name, otherwise) if name in model.__dict__.get(_OWN, ()) else otherwise
