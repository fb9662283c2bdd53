"""Rules about grids that do not fit the values: they end too early, or are far too wide."""

from __future__ import annotations

from collections.abc import Iterator

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, Noise, percent
from horizon_plugin_pytorch.analysis.profile.document import Advice, Operator

_RECALIBRATE = "calibrate(model, batches)"
_WIDE = 4  # so many times the values: two bits and more are not used


def _least_scale(operator: Operator, largest: float) -> float:
    """The smallest scale with which an operator's grid reaches so far."""
    return largest / (1 << (15 if operator.format == "qint16" else 7))


def _fixed(evidence: Evidence, operator: Operator, largest: float) -> str:
    """A line that gives an operator a fixed range."""
    if evidence.is_input(operator):
        return f"QuantStub(scale={_least_scale(operator, largest):.4g})"
    return f"ModuleNameTemplate({{{operator.path!r}: {{'dtype': {operator.format}, 'threshold': {largest:.4g}}}}})"


def clipped(evidence: Evidence) -> Iterator[Advice]:
    """Values beyond the ends of a grid: by a scale that was given, by other inputs, or by other data inside."""
    noises: dict[int, Noise] = {}
    for operator in evidence.operators:
        noise = evidence.noise(operator)
        if noise is None or not evidence.is_poor(operator):
            continue
        if (
            noise.mainly_clips
            and noise.clipping_error > evidence.task.error
            and _clips_itself(evidence, operator, noise)
        ):
            noises[operator.index] = noise
    found = [evidence.operators[index] for index in noises]

    def is_alike(one: Operator, other: Operator) -> bool:
        ratios = [noises[x.index].largest / noises[x.index].end for x in (one, other)]
        return not evidence.has_own_scale(one) or max(ratios) < 1.5 * min(ratios)

    for root, members in evidence.grouped(found, evidence.is_input, is_alike).items():
        operator, noise = evidence.operators[root], noises[root]
        if root in evidence.claimed:
            continue  # by batches that differ
        yield _clipped(evidence, operator, noise, members)


def _clips_itself(evidence: Evidence, operator: Operator, noise: Noise) -> bool:
    """Is it the grid that ends, rather than inputs that are too coarse to reach what lies beyond?"""
    if not evidence.is_function(operator):
        return True
    if operator.same_input_error is None or operator.scale is None:
        return False
    return operator.same_input_error * operator.scale > (noise.largest - noise.end) / 4


def _clipped(evidence: Evidence, operator: Operator, noise: Noise, members: list[int]) -> Advice:
    numbers = {
        "largest": noise.largest, "end": noise.end, "share": percent(noise.share),
        "error": percent(noise.clipping_error),
    }  # fmt: skip
    quantizer = evidence.quantizer(operator)
    configuration = _RECALIBRATE
    if quantizer is not None and quantizer.is_fixed:
        rule, configuration = "fixed-scale-too-small", _fixed(evidence, operator, noise.largest)
        numbers |= {"scale": operator.scale, "least": _least_scale(operator, noise.largest)}
    elif evidence.is_input(operator):
        rule, numbers["others"] = "input-exceeds-calibration", len(members) - 1
    else:
        rule = "range-exceeds-calibration"
    return evidence.advice(rule, "error", operator.path, members, configuration, noise.clipping_error, **numbers)


def uneven_ratio(evidence: Evidence, operator: Operator) -> float:
    """How many times the range that was taken the widest batch of calibration needed; 0 if nothing comes of it."""
    quantizer = evidence.quantizer(operator)
    if quantizer is None or quantizer.is_fixed:
        return 0.0
    observer, noise = quantizer.activation_post_process, evidence.noise(operator)
    is_far = observer.uneven > observer.clipped_from
    if noise is None or not evidence.is_poor(operator) or not noise.mainly_clips:
        return observer.uneven if is_far else 0.0
    has_met_these = observer.uneven > 1.1 and observer.uneven * noise.end > 0.9 * noise.largest
    return observer.uneven if is_far or (has_met_these and noise.clipping_error > evidence.task.error) else 0.0


def uneven_batches(evidence: Evidence) -> Iterator[Advice]:
    """The mean of the ranges of batches is narrower than the widest."""
    found = [operator for operator in evidence.operators if uneven_ratio(evidence, operator)]
    for root, members in evidence.grouped(found, evidence.is_input).items():
        operator = evidence.operators[root]
        quantizer, noise = evidence.quantizer(operator), evidence.noise(operator)
        assert quantizer is not None
        end = quantizer.quant_max * float(quantizer.scale.max())
        yield evidence.advice(
            "uneven-batches", "warning", operator.path, members,
            "QconfigSetter(reference_qconfig=get_qconfig(observer=HistogramObserver))",
            None if noise is None else noise.clipping_error,
            ratio=f"{uneven_ratio(evidence, operator):.1f}", end=end,
        )  # fmt: skip


def too_wide(evidence: Evidence) -> Iterator[Advice]:
    """Values that use a few steps of a grid only, which ends far away from them."""
    noises: dict[int, Noise] = {}
    shared = {path for path, calls in evidence.calls() if len(calls) > 1}
    for operator in evidence.operators:
        noise = evidence.noise(operator)
        if noise is None or not evidence.is_poor(operator) or operator.path in shared:
            continue
        if noise.rounding_error > evidence.task.error and noise.end > _WIDE * noise.largest:
            noises[operator.index] = noise
    found = [evidence.operators[index] for index in noises]
    for root, members in evidence.grouped(found, evidence.is_input).items():
        operator, noise = evidence.operators[root], noises[root]
        steps = max(round(2 * noise.largest / operator.scale), 1) if operator.scale else 1
        numbers = {"largest": noise.largest, "end": noise.end, "steps": steps, "error": percent(noise.rounding_error)}
        quantizer = evidence.quantizer(operator)
        configuration = _RECALIBRATE
        rule = "input-below-calibration" if evidence.is_input(operator) else "range-below-calibration"
        if quantizer is not None and not quantizer.has_statistics:
            continue  # never calibrated
        if quantizer is not None and quantizer.is_fixed:
            rule, configuration = "fixed-scale-too-large", _fixed(evidence, operator, noise.largest)
            numbers |= {"scale": operator.scale, "least": _least_scale(operator, noise.largest)}
        yield evidence.advice(rule, "error", operator.path, members, configuration, noise.rounding_error, **numbers)
