"""What a layer had before methods rewrote it: the float model that they compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm

Tensors = dict[str, Any]


@dataclass(frozen=True)
class _Original:
    """Kept in the layer, not in its state dict; copies of the layer have it too.

    Args:
        tensors: those of `_tensors` that are another now.
        written: the digest of what was written. With any other, somebody else has changed the layer since (training,
            `load_state_dict`), and what it had before is no longer its float form.
    """

    tensors: Tensors
    written: bytes


def _tensors(layer: QATGemm) -> Tensors:
    bias = layer.moved_bias  # zeros are the same as none: parts of one packed bias get theirs together
    return {"weight": layer.weight.detach(), "bias": bias.detach() if bias is not None and bias.any() else None}


def _digest(layer: QATGemm) -> bytes:
    found = hashlib.sha256()
    for tensor in _tensors(layer).values():
        found.update(b"" if tensor is None else tensor.cpu().contiguous().numpy().data)
    return found.digest()


def original(layer: QATGemm) -> Tensors:
    """Weight and bias that methods have rewritten, by name, as they were before the first of them."""
    kept: _Original | None = layer.__dict__.get("_original")
    return kept.tensors if kept is not None and kept.written == _digest(layer) else {}


def rewrite(layers: Sequence[QATGemm], write: Callable[[], None]) -> None:
    """Change layers, which remember what they had."""
    before = [{name: t if t is None else t.clone() for name, t in _tensors(layer).items()} | original(layer)
              for layer in layers]  # fmt: skip
    write()
    for layer, tensors in zip(layers, before, strict=True):
        changed = {name: t for name, t in tensors.items() if not _is_same(t, _tensors(layer)[name])}
        layer.__dict__["_original"] = _Original(changed, _digest(layer))
        layer.forget_twin()


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one.to(other.device), other))


@torch.no_grad()
def restore(layers: Sequence[QATGemm]) -> None:
    """Give layers back what they had before methods rewrote them."""
    before = [original(layer) for layer in layers]  # all, before a write to one changes others that share its tensors
    for layer, tensors in zip(layers, before, strict=True):
        if "weight" in tensors:
            layer.weight.copy_(tensors["weight"])
        if "bias" in tensors and layer.moved_bias is not None:
            layer.moved_bias.copy_(torch.zeros(()) if tensors["bias"] is None else tensors["bias"])
        layer.forget_twin()
