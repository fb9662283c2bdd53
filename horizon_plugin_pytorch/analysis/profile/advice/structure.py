"""Rules about how operators are connected: operands, shared modules, functions, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, largest_of, percent, power_of
from horizon_plugin_pytorch.analysis.profile.advice.resolution import wider
from horizon_plugin_pytorch.analysis.profile.document import Advice, Operator
from horizon_plugin_pytorch.analysis.rows import JOINS, SUMS, SharedRange, vanishes

_UNEQUAL = 8  # three bits
_AMPLIFIED = 3  # so many times the error before: the function is to blame


def unequal_operands(evidence: Evidence) -> Iterator[Advice]:
    """What is joined with far larger values has no steps left."""
    for operator in evidence.operators:
        if operator.operator not in JOINS or operator.scale is None or not operator.format.startswith("qint"):
            continue
        operands = [one for one in evidence.sources(operator) if one.first is not None and power_of(one.first) > 0]
        if len(operands) < 2:
            continue
        small, large = (pick(operands, key=lambda one: largest_of(one.first)) for pick in (min, max))
        assert small.first is not None
        reach = largest_of(small.first)
        error = operator.scale / math.sqrt(12 * power_of(small.first))
        is_lost = vanishes(reach, operator.scale)
        if operator.operator in SUMS and (not is_lost or not small.first.var):
            continue  # in a sum small numbers may count for little; a constant such as 1e-6 does
        if largest_of(large.first) <= _UNEQUAL * reach or not (is_lost or error > evidence.task.error):
            continue
        is_seen = evidence.is_poor_behind(operator)
        yield evidence.advice(
            "unequal-operands", "warning" if is_seen else "hint", operator.path, [operator.index],
            wider([operator]) if operator.format == "qint8" else "",
            min(error, 1.0) if is_seen else evidence.error(operator),
            operand=small.name, other=large.name, small=reach, large=largest_of(large.first), scale=operator.scale,
            steps=math.floor(reach / operator.scale + 0.5),
        )  # fmt: skip


def shared_modules(evidence: Evidence) -> Iterator[Advice]:
    """One scale for calls with values of different sizes."""
    for path, calls in evidence.calls():
        seen = [call for call in calls if call.first is not None and call.scale is not None and largest_of(call.first)]
        if len(seen) < 2 or len({call.scale for call in seen}) > 1 or not evidence.has_own_scale(seen[0]):
            continue
        smallest = min(seen, key=lambda call: largest_of(call.first))
        noise = evidence.noise(smallest)
        ratio = max(largest_of(call.first) for call in seen) / largest_of(smallest.first)
        ends = tuple((call.first.low or 0.0, call.first.high or 0.0) for call in seen if call.first is not None)
        shared = SharedRange(path, type(evidence.module(smallest)), ends, ratio)
        if noise is None or not shared.would_help or not evidence.is_poor(smallest):
            continue
        if noise.rounding_error > evidence.task.error:
            yield evidence.advice(
                "shared-module", "warning", path, [call.index for call in seen], shared.setting,
                min(noise.rounding_error, 1.0), count=len(seen), ranges=shared.sizes, bits=f"{shared.lost_bits:.1f}",
                error=percent(noise.rounding_error),
            )  # fmt: skip


def amplified(evidence: Evidence) -> Iterator[Advice]:
    """Small errors that an operator makes large: a steep function, or a layer that reads small channels."""
    for operator in evidence.operators:
        if not evidence.is_poor(operator) or operator.index in evidence.claimed:
            continue
        sources = evidence.sources(operator)
        before = max((evidence.error(source) or 0.0 for source in sources), default=0.0)
        error, noise = evidence.error(operator) or 0.0, evidence.noise(operator)
        own = 0.0 if noise is None else noise.error
        choosers = [one for source in sources if (one := _chooser(evidence, source)) is not None]
        if not choosers or not 0 < before * _AMPLIFIED < error or own > error / 2:
            continue
        if any(one.index in evidence.claimed for one in choosers):
            continue  # which explains it
        is_steep = evidence.is_function(operator)
        narrow = [one for one in choosers if one.format == "qint8"]
        coarsest = max(narrow or choosers, key=lambda one: one.scale or 0.0)
        numbers = {
            "before": percent(before), "operator": operator.operator or operator.type, "error": percent(error),
            "producer": coarsest.path, "format": coarsest.format, "scale": coarsest.scale,
        }  # fmt: skip
        if is_steep:
            chain = [one for chooser in choosers for one in _chain(evidence, chooser)]
            changed = [one for one in (*chain, operator) if one.format == "qint8"]
            rule = "steep-table"
        else:
            changed = [one for chooser in narrow for one in _joined(evidence, chooser)]
            rule = "uneven-channels"
            numbers["own"] = percent(own)
        yield evidence.advice(
            rule, "warning", operator.path if is_steep else coarsest.path,
            [operator.index, *(one.index for one in choosers)], wider(changed) if changed else "", min(error, 1.0),
            **numbers,
        )  # fmt: skip


def _joined(evidence: Evidence, operator: Operator) -> list[Operator]:
    """An operator, and what it joins that is about as coarse; and what that joins."""
    found = [operator]
    for joining in found:
        for source in evidence.sources(joining) if joining.operator in JOINS else ():
            chooser = _chooser(evidence, source)
            if chooser is None or chooser.format != "qint8" or chooser in found:
                continue
            if (chooser.scale or 0.0) * 4 > (joining.scale or 0.0):
                found.append(chooser)
    return found


def _chain(evidence: Evidence, operator: Operator | None) -> Iterator[Operator]:
    """An operator and those before it that it only changes number by number: their steps are seen in its result."""
    while operator is not None:
        yield operator
        row, sources = evidence.row(operator), evidence.sources(operator)
        if row is None or row.has_real_output or len(sources) != 1:
            return
        operator = _chooser(evidence, sources[0])


def _chooser(evidence: Evidence, operator: Operator) -> Operator | None:
    """Who chose the scale of a result."""
    while not evidence.has_own_scale(operator):
        sources = evidence.sources(operator)
        if not sources:
            return None
        operator = sources[0]
    return operator


def outputs(evidence: Evidence) -> Iterator[Advice]:
    """Outputs whose accumulator could leave as it is."""
    for path, calls in evidence.calls():
        found = [call for call in calls if _is_rounded_output(evidence, call)]
        if not found:
            continue
        operator = found[0]
        is_shared = any(not evidence.is_dequantized(call) for call in calls)
        between = list(dict.fromkeys(name for call in found for name in evidence.functions_behind(call)))
        rule = "shared-output" if is_shared else "output-before-functions" if between else "low-precision-output"
        error = max(0.0 if noise is None else noise.error for noise in map(evidence.noise, found))
        numbers = {"between": ", ".join(f"`{name}`" for name in between)} if rule == "output-before-functions" else {}
        yield evidence.advice(
            rule, "warning" if any(map(evidence.is_poor, found)) else "hint", path, [call.index for call in found],
            f"ModuleNameTemplate({{{path!r}: torch.float32}})" if rule == "low-precision-output" else "",
            error, format=operator.format, scale=operator.scale, error=percent(error), **numbers,
        )  # fmt: skip


def _is_rounded_output(evidence: Evidence, operator: Operator) -> bool:
    """Does a layer hand integers to a DeQuantStub, where it could hand out its accumulator?"""
    row = evidence.row(operator)
    if row is None or not row.has_real_output or operator.scale is None or not operator.format.startswith("qint"):
        return False
    return evidence.is_dequantized(operator)
