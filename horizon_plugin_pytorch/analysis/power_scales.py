"""Which scales of a model are powers of two, as `ConsistencyStrategy` asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from horizon_plugin_pytorch.errors import listed
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize


@dataclass(frozen=True)
class PowerScales:
    """The scales of a model that was prepared with a consistency level.

    Args:
        level: 1 for activations, 2 for weights too.
        activations, weights: how many are made powers of two, and how many there are.
        others: those that are fixed to other numbers, with their operators.
    """

    level: int
    activations: tuple[int, int]
    weights: tuple[int, int]
    others: tuple[tuple[str, float], ...] = ()

    @property
    def text(self) -> str:
        """What the check says.

        >>> PowerScales(1, (2, 3), (0, 1), (("quant", 0.01),)).text
        'Consistency level 1: the scales of 2 of 3 activations and 0 of 1 weights are powers of two. Fixed to other \
numbers: quant (0.01). Where you gave one, give a power of two; parts of operators (the exp of softmax) keep theirs.'
        """
        (one, all_of), (other, all_weights) = self.activations, self.weights
        text = (
            f"Consistency level {self.level}: the scales of {one} of {all_of} activations and {other} of {all_weights} "
            "weights are powers of two."
        )
        if self.others:
            names = listed(f"{name} ({scale:.7g})" for name, scale in self.others)
            text += (
                f" Fixed to other numbers: {names}. Where you gave one, give a power of two; parts of operators (the "
                "exp of softmax) keep theirs."
            )
        return text


def power_scales(operators: Mapping[str, nn.Module]) -> PowerScales | None:
    """What is so of the operators of a model; None if none of their scales is made a power of two."""
    found: dict[bool, list[tuple[str, FakeQuantize]]] = {False: [], True: []}
    seen: set[int] = set()
    for path, module in operators.items():
        for name, part in module.named_modules(prefix=path):
            if isinstance(part, FakeQuantize) and id(part) not in seen:
                seen.add(id(part))
                is_weight = name.endswith("weight_fake_quant")
                owner = name.removesuffix(".weight_fake_quant").removesuffix(".activation_post_process")
                found[is_weight].append((owner, part))
    powers = {kind: [_is_made(part) for _, part in parts] for kind, parts in found.items()}
    if not any(powers[False]) and not any(powers[True]):
        return None
    fixed = [(name, float(part.scale.max())) for name, part in found[False] if part.is_fixed]
    others = tuple((name, scale) for name, scale in fixed if not math.log2(scale).is_integer())
    activations, weights = ((sum(powers[kind]), len(powers[kind])) for kind in (False, True))
    return PowerScales(2 if weights[0] else 1, activations, weights, others)


def _is_made(quantizer: FakeQuantize) -> bool:
    is_given = quantizer.is_fixed and all(math.log2(scale).is_integer() for scale in quantizer.scale.tolist())
    return is_given or bool(quantizer.activation_post_process.pow_quantization)
