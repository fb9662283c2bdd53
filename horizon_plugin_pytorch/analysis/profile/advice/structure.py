"""Rules about how operators are connected: operands, shared modules, functions, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from horizon_plugin_pytorch.analysis.profile.advice.evidence import Evidence, largest_of, percent, power_of
from horizon_plugin_pytorch.analysis.profile.advice.resolution import wider
from horizon_plugin_pytorch.analysis.profile.document import Advice, Operator
from horizon_plugin_pytorch.analysis.rows import JOINS, SUMS, SharedRange, vanishes
from horizon_plugin_pytorch.nn import qat, quantized
from horizon_plugin_pytorch.operators.table import Trait

_AMPLIFIED = 3  # so many times the error before: the function is to blame
_TABLES = (qat.SegmentLUT, quantized.SegmentLUT)


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
        if largest_of(large.first) <= 2 * reach or not (is_lost or error > evidence.task.error):
            continue
        yield evidence.advice(
            "unequal-operands", "warning", operator.path, [operator.index],
            wider([operator]) if operator.format == "qint8" else "", min(error, 1.0),
            operand=small.name, other=large.name, small=reach, large=largest_of(large.first), scale=operator.scale,
            steps=f"{math.floor(reach / operator.scale + 0.5)}",
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
                "shared-module", "warning", path, [call.index for call in seen], shared.setting, noise.rounding_error,
                count=len(seen), ranges=shared.sizes, bits=f"{shared.lost_bits:.1f}",
                error=percent(noise.rounding_error),
            )  # fmt: skip


def steep_tables(evidence: Evidence) -> Iterator[Advice]:
    """A function that turns small errors into large ones."""
    for operator in evidence.operators:
        row = evidence.row(operator)
        is_table = isinstance(evidence.module(operator), _TABLES)
        is_quotient = row is not None and bool(row.traits & (Trait.QUOTIENT | Trait.LOGARITHM))
        if not (is_table or is_quotient) or not evidence.is_poor(operator) or operator.index in evidence.claimed:
            continue
        before = max((evidence.error(source) or 0.0 for source in evidence.sources(operator)), default=0.0)
        error = evidence.error(operator) or 0.0
        producers = [found for source in evidence.sources(operator) if (found := _chooser(evidence, source))]
        if not producers or not 0 < before * _AMPLIFIED < error:
            continue
        coarsest = max(producers, key=lambda one: one.scale or 0.0)
        yield evidence.advice(
            "steep-table", "warning", operator.path, [operator.index],
            wider([one for one in producers if one.format == "qint8"] + [operator])
            if any(one.format == "qint8" for one in producers) else "",
            min(error, 1.0), before=percent(before), operator=row.name if row is not None else operator.type,
            error=percent(error), producer=coarsest.path, format=coarsest.format, scale=coarsest.scale,
        )  # fmt: skip


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
    for operator in evidence.operators:
        row = evidence.row(operator)
        if row is None or not row.has_real_output or operator.scale is None or not operator.format.startswith("qint"):
            continue
        if not evidence.is_output(operator):
            continue
        calls = next((calls for path, calls in evidence.calls() if path == operator.path), [operator])
        is_shared = any(not evidence.is_output(call) for call in calls)
        between = evidence.functions_behind(operator)
        rule = "shared-output" if is_shared else "output-before-functions" if between else "low-precision-output"
        noise = evidence.noise(operator)
        error = 0.0 if noise is None else math.sqrt(noise.rounding_error**2 + noise.clipping_error**2)
        numbers = {"between": ", ".join(f"`{name}`" for name in between)} if rule == "output-before-functions" else {}
        yield evidence.advice(
            rule, "warning" if evidence.is_poor(operator) else "hint", operator.path, [operator.index],
            f"ModuleNameTemplate({{{operator.path!r}: torch.float32}})" if rule == "low-precision-output" else "",
            error, format=operator.format, scale=operator.scale, error=percent(error), **numbers,
        )  # fmt: skip
