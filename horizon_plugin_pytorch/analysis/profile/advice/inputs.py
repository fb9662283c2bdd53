"""Rules about what enters the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, largest_of, percent
from horizon_plugin_pytorch.analysis.profile.advice.resolution import LARGEST_INT8, wider
from horizon_plugin_pytorch.analysis.profile.document import Advice
from horizon_plugin_pytorch.analysis.rows import is_factor, is_image

_FIXED = "QuantStub(scale=1 / 128)"


def images(evidence: Evidence) -> Iterator[Advice]:
    """Images that are not centred: raw bytes, or values from 0 to 1."""
    for operator in evidence.operators:
        values = operator.first
        if not evidence.is_input(operator) or not is_image(operator.shape) or values is None:
            continue
        if values.low is None or values.high is None or values.low < 0 or values.high <= 0:
            continue
        if is_factor(one.operator for one in evidence.consumers[operator.index]):
            continue
        noise = evidence.noise(operator)
        error = None if noise is None else noise.rounding_error
        ends = {"low": values.low, "high": values.high}
        if values.high > LARGEST_INT8:
            yield evidence.advice(
                "input-not-normalised", "warning", operator.path, [operator.index], _FIXED, error,
                **ends, mean=values.mean,
            )  # fmt: skip
        else:
            yield evidence.advice("asymmetric-input", "hint", operator.path, [operator.index], _FIXED, error, **ends)


def off_centre(evidence: Evidence) -> Iterator[Advice]:
    """Values that vary little around a number far from 0: the grid is spent on the way there."""
    errors: dict[int, float] = {}
    for operator in evidence.operators:
        values, noise = operator.first, evidence.noise(operator)
        if (
            values is None
            or noise is None
            or operator.index in evidence.claimed
            or not evidence.has_own_scale(operator)
        ):
            continue
        deviation = math.sqrt(values.var or 0.0)
        if not deviation or values.mean is None or abs(values.mean) < 3 * deviation:
            continue
        if math.sqrt(noise.rounding) / deviation > evidence.task.error and evidence.is_poor_behind(operator):
            errors[operator.index] = math.sqrt(noise.rounding) / deviation
    found = [evidence.operators[index] for index in errors]
    for root, members in evidence.grouped(found, evidence.is_input).items():
        operator = evidence.operators[root]
        assert operator.first is not None
        narrow = [evidence.operators[i] for i in members if evidence.operators[i].format == "qint8"]
        yield evidence.advice(
            "off-centre", "warning", operator.path, members, wider(narrow) if narrow else "", min(errors[root], 1.0),
            mean=operator.first.mean, deviation=math.sqrt(operator.first.var or 0.0), scale=operator.scale,
            error=percent(errors[root]), largest=largest_of(operator.first),
        )  # fmt: skip
