"""Rules about grids that reach far enough and are too coarse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, Noise, percent, reach_of
from horizon_plugin_pytorch.analysis.profile.document import Advice, Operator

LARGEST_INT8 = 10.0  # beyond it the guide does not recommend int8
_FEW = 8  # outliers are so many times larger than almost all values
_MOST = 0.999
_EXACT = 1e-3  # an error that nobody minds, as of whole numbers on a grid of whole numbers
_SHOWN = 5


def _coarse(evidence: Evidence) -> Iterator[tuple[Operator, Noise]]:
    """Operators whose own rounding costs more than the task allows, and that nobody has spoken of."""
    for operator in evidence.operators:
        noise = evidence.noise(operator)
        if noise is None or operator.index in evidence.claimed or not evidence.has_own_scale(operator):
            continue
        if evidence.is_poor(operator) and noise.error > evidence.task.error and not noise.mainly_clips:
            yield operator, noise


def wider(operators: list[Operator]) -> str:
    """A line that gives operators int16."""
    paths = ", ".join(f"{path!r}: qint16" for path in dict.fromkeys(operator.path for operator in operators))
    return f"ModuleNameTemplate({{{paths}}})"


def outliers(evidence: Evidence) -> Iterator[Advice]:
    """Almost all values are far inside of the grid."""
    noises: dict[int, Noise] = {}
    for operator, noise in _coarse(evidence):
        assert operator.first is not None
        is_filled = noise.largest * 2 > noise.end
        if operator.format == "qint8" and is_filled and reach_of(operator.first, _MOST) * _FEW <= noise.largest:
            noises[operator.index] = noise
    found = [evidence.operators[index] for index in noises]
    for root, members in evidence.grouped(found, evidence.is_input).items():
        operator, noise = evidence.operators[root], noises[root]
        assert operator.first is not None
        yield evidence.advice(
            "outliers", "warning", operator.path, members, wider([evidence.operators[i] for i in members]),
            noise.error, most=reach_of(operator.first, _MOST), largest=noise.largest, scale=operator.scale,
            error=percent(noise.error),
        )  # fmt: skip


def int8_wide_range(evidence: Evidence) -> Iterator[Advice]:
    """int8 for values beyond 10: where that is seen, and at inputs and outputs, whose units mean something."""
    coarse = {operator.index for operator, _ in _coarse(evidence)}
    for operator in evidence.operators:
        noise = evidence.noise(operator)
        is_wide = operator.format == "qint8" and noise is not None and min(noise.largest, noise.end) > LARGEST_INT8
        if not is_wide or noise is None or operator.index in evidence.claimed or not evidence.has_own_scale(operator):
            continue
        is_end = evidence.is_input(operator) or evidence.is_dequantized(operator)
        error = noise.error
        if operator.index in coarse or (is_end and error > _EXACT and (evidence.error(operator) or 0) > _EXACT):
            yield evidence.advice(
                "int8-wide-range", "warning" if operator.index in coarse else "hint", operator.path, [operator.index],
                wider([operator]), error, largest=noise.largest, scale=operator.scale, error=percent(error),
            )  # fmt: skip


def too_coarse(evidence: Evidence) -> Iterator[Advice]:
    """What is left of it: the task wants more than the format has."""
    found = sorted(_coarse(evidence), key=lambda pair: -pair[1].error)
    if found:
        operator, noise = found[0]
        operators = [one for one, _ in found]
        is_all = len(found) > _SHOWN
        yield evidence.advice(
            "too-coarse", "warning", operator.path, [one.index for one in operators],
            "" if operator.format != "qint8" else "ModuleNameTemplate({'': qint16})" if is_all else wider(operators),
            noise.error, count=len(found), scale=operator.scale, error=percent(noise.error),
            limit=percent(evidence.task.error), format=operator.format,
        )  # fmt: skip


def accumulated(evidence: Evidence) -> Iterator[Advice]:
    """Outputs that are poor although no operator is: the largest of many small errors."""
    poor = [operator for operator in evidence.document.outputs if evidence.is_poor(operator)]
    noises = [(one, noise) for one in evidence.operators if (noise := evidence.noise(one)) is not None]
    own = [pair for pair in noises if evidence.has_own_scale(pair[0]) and pair[0].format == "qint8"]
    if not poor or evidence.claimed or not own:
        return
    worst = sorted(own, key=lambda pair: -pair[1].error)
    error = max(evidence.error(operator) or 0.0 for operator in poor)
    chosen = _enough(worst, 1 - (evidence.task.error / error) ** 2)
    line = "ModuleNameTemplate({'': qint16})" if len(chosen) > _SHOWN else wider(chosen)
    yield evidence.advice(
        "accumulated-error", "hint", poor[0].path, [operator.index for operator in poor], line, error,
        error=percent(error), limit=percent(evidence.task.error), module=worst[0][0].path,
        own=percent(worst[0][1].error),
    )  # fmt: skip


def _enough(worst: list[tuple[Operator, Noise]], share: float) -> list[Operator]:
    """The first operators that have this share of the noise, as if all of it went through to the end alike."""
    noise = torch.tensor([noise.error**2 for _, noise in worst], dtype=torch.float64).cumsum(0)
    count = int((noise < share * noise[-1]).sum()) + 1
    return [operator for operator, _ in worst[:count]]
