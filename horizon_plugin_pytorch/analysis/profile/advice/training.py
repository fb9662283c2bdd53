"""Rules about what training has made of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, percent
from horizon_plugin_pytorch.analysis.profile.document import Advice
from horizon_plugin_pytorch.analysis.watched_run import undisturbed_evaluation
from horizon_plugin_pytorch.analysis.weights import paired_weights
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.statistics.metrics import relative_error

_DEAD_SHARE, _DEAD_LEAST = 0.5, 4
_FAR = 0.5
_NOISE = 0.01
_SENSITIVE = 10  # so many times the noise


def dead_channels(evidence: Evidence) -> Iterator[Advice]:
    """Channels of feature maps that never hold anything."""
    found = []
    if any(evidence.is_input(evidence.operators[index]) for index in evidence.claimed):
        return  # other inputs may use them
    for operator in evidence.operators:
        values = operator.first
        if values is None or not values.channels or not values.dead or len(operator.shape) not in (2, 4, 5):
            continue
        if values.dead < values.channels and values.dead >= max(_DEAD_LEAST, _DEAD_SHARE * values.channels):
            found.append(operator)
    for root, members in evidence.grouped(found, lambda operator: False).items():
        operator = evidence.operators[root]
        assert operator.first is not None
        yield evidence.advice(
            "dead-channels", "hint", operator.path, members, dead=operator.first.dead,
            channels=operator.first.channels, batches=evidence.document.batches,
        )  # fmt: skip


def weights_far(evidence: Evidence) -> Iterator[Advice]:
    """Weights that training on the grid has moved far from float, where the results are others too."""
    if evidence.document.first != "float":
        return
    try:
        pairs = list(paired_weights(evidence.first, evidence.second, tells=False))
    except CheckError:
        return  # nothing in common
    poor = {operator.path for operator in evidence.operators if evidence.is_poor(operator)}
    users = {w.name: evidence.operators[w.operator].path for w in evidence.document.weights if w.operator is not None}
    errors = {pair.name: relative_error(_directions(pair.second), _directions(pair.first)) for pair in pairs}
    far = {pair.name: errors[pair.name] for pair in pairs if users.get(pair.name) in poor and errors[pair.name] > _FAR}
    if far:
        worst = max(far, key=far.__getitem__)
        yield evidence.advice(
            "weights-far", "warning", worst.rpartition(".")[0], (), "", None, count=len(far), total=len(pairs),
            limit=percent(_FAR), weight=worst, error=percent(far[worst]),
        )  # fmt: skip


def _directions(weight: Tensor) -> Tensor:
    """The rows of a weight, each of length 1: a batch norm that is folded, or not, changes their lengths alone."""
    rows = weight.flatten(1) if weight.dim() > 1 else weight.unsqueeze(1)
    return torch.nn.functional.normalize(rows.float(), dim=1)


def not_finite(evidence: Evidence) -> Iterator[Advice]:
    """Where NaN begin, and infinities that the first model does not have: there they may be masks."""
    for which, name in (("first", evidence.document.first), ("second", evidence.document.second)):
        bad = []
        for operator in evidence.operators:
            values = getattr(operator, which)
            has_new = values is not None and values.inf and not (operator.first is not None and operator.first.inf)
            if values is not None and (values.nan or has_new):
                bad.append(operator)
        for root, members in evidence.grouped(bad, lambda operator: True).items():
            values = getattr(evidence.operators[root], which)
            yield evidence.advice(
                "not-finite", "error", evidence.operators[root].path or evidence.operators[root].name, members,
                which=name, nan=values.nan, inf=values.inf,
            )  # fmt: skip
        if bad:
            return


@torch.no_grad()
def sensitive(evidence: Evidence) -> Iterator[Advice]:
    """Outputs that are poor although no operator is: does the float model do the same with a little noise?"""
    if evidence.claimed or not evidence.inputs or evidence.document.first != "float":
        return
    if not any(evidence.is_poor(operator) for operator in evidence.document.outputs):
        return
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        if not x.is_floating_point() or isinstance(x, QTensor) or not x.numel():
            return x.clone()
        noise = torch.randn(x.shape, generator=generator).to(x)
        return x + noise * x.square().mean().sqrt() * _NOISE

    args, kwargs = arguments_of(evidence.first, evidence.inputs[0], None)
    with undisturbed_evaluation(evidence.first):
        clean, disturbed = (
            evidence.first(*a, **k)
            for a, k in (map_tensors(change, (args, kwargs)) for change in (lambda x: x.clone(), noisy))
        )
    pairs = zip(tensors_of(disturbed), tensors_of(clean), strict=True)
    error = max((relative_error(x, y) for x, y in pairs if y.is_floating_point()), default=0.0)
    if error > _SENSITIVE * _NOISE:
        yield evidence.advice(
            "sensitive-model", "warning", "model", [operator.index for operator in evidence.document.outputs],
            "ModuleNameTemplate({'': qint16})", error, noise=percent(_NOISE), error=percent(error),
        )  # fmt: skip
