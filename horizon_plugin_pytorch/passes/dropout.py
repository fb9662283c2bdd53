"""Dropout functions become modules, so that they follow `train()` and `eval()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from horizon_plugin_pytorch.runtime.node_notes import inherit, notes

# The module of each function, and whether the function drops where its caller does not say.
_MODULES: dict[Callable, tuple[type[nn.Module], bool]] = {
    F.dropout: (nn.Dropout, True),
    F.dropout1d: (nn.Dropout1d, True),
    F.dropout2d: (nn.Dropout2d, True),
    F.dropout3d: (nn.Dropout3d, True),
    F.alpha_dropout: (nn.AlphaDropout, False),
    F.feature_alpha_dropout: (nn.FeatureAlphaDropout, False),
    torch.dropout: (nn.Dropout, True),
    torch.alpha_dropout: (nn.AlphaDropout, True),
    torch.feature_alpha_dropout: (nn.FeatureAlphaDropout, True),
}
_ARGUMENTS = ("input", "p", "training", "inplace")


def follow_training(model: fx.GraphModule) -> fx.GraphModule:
    """Replace the dropout functions that drop values.

    Tracing reads ``self.training`` once: in ``F.dropout(x, p, self.training)`` of a model in train mode it is True for
    ever, and evaluation would be random.
    """
    taken, counters = {name for name, _ in model.named_modules()}, Counter[str]()
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.target not in _MODULES:
            continue
        cls, drops = _MODULES[node.target]
        call: dict[str, Any] = {"p": 0.5, **dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
        is_known = isinstance(call["p"], (int, float))
        if not is_known or call.get("training", call.get("train", drops)) is not True:
            continue
        path = _free_path(taken, notes(node).scope, counters)
        taken.add(path)
        model.add_submodule(path, cls(call["p"], bool(call.get("inplace", False))).train(model.training))
        with model.graph.inserting_before(node):
            new = model.graph.call_module(path, (call["input"],))
        inherit(new, node, "replace dropout")
        node.replace_all_uses_with(new)
        model.graph.erase_node(node)
    model.recompile()
    return model


def _free_path(taken: set[str], scope: str, counters: Counter[str]) -> str:
    prefix = f"{scope}._generated_dropout_" if scope else "_generated_dropout_"
    while f"{prefix}{counters[scope]}" in taken:
        counters[scope] += 1
    return f"{prefix}{counters[scope]}"
