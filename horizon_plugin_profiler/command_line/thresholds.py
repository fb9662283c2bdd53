"""The threshold file: limits that a build must keep."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_plugin_profiler.command_line.outcomes import UsageError
from horizon_plugin_pytorch.analysis.profile.document import Document, Metric, Operator
from horizon_plugin_pytorch.statistics.metrics import METRICS, metric_of

_AT_LEAST, _AT_MOST = ("sqnr",), ("atol", "error", "same_input_error", "saturation")
_OPERATOR = ("similarity", *_AT_LEAST, *_AT_MOST)
_METRIC = ("second", "loss")
_COUNTS = ("unfused", "unused", "messages", "mistakes")
_SECTIONS = ("outputs", "operators", "metric", "drop", "check", "memory")
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Broken:
    """A limit that was not kept.

    Args:
        name: the operator, or what else was measured.
        quantity: what was measured of it: ``similarity``.
        value: None where it could not be measured.
        bound: ``at least`` or ``at most``.
        rule: where the limit is in the file: ``operators."backbone.*"``.

    >>> print(Broken("backbone.conv", "similarity", 0.912, "at least", 0.95, 'operators."backbone.*"'))
    backbone.conv: similarity is 0.912, must be at least 0.95 (operators."backbone.*")
    """

    name: str
    quantity: str
    value: float | None
    bound: str
    limit: float
    rule: str

    def __str__(self) -> str:
        found = "not known" if self.value is None else f"{self.value:.7g}"
        return f"{self.name}: {self.quantity} is {found}, must be {self.bound} {self.limit:.7g} ({self.rule})"


@dataclass(frozen=True)
class Thresholds:
    """The limits of a file; a section that is not there limits nothing."""

    sections: Mapping[str, Any]

    def of_document(self, document: Document) -> list[Broken]:
        """What one profile does not keep.

        Raises:
            UsageError: a pattern fits no operator, so that the limit would guard nothing; or the run was not finished.
        """
        if self.sections and not document.is_complete:
            raise UsageError(f"The run of `{document.title}` did not finish: limits cannot be judged by a part of it.")
        return [*_of_operators(self.sections, document, ""), *self._of_metric(document.metric)]

    def of_pair(self, before: Document, after: Document) -> list[Broken]:
        """What a profile does not keep, and by how much it may be worse than another one."""
        allowed = self.sections.get("drop", {})
        return [*self.of_document(after), *_of_operators(allowed, worsening(before, after), "drop.")] + [
            *_of_metric_drop(allowed.get("metric"), before.metric, after.metric)
        ]

    def of_counts(self, **counts: int) -> list[Broken]:
        """What the check does not keep."""
        section = self.sections.get("check", {})
        return [
            Broken("check", name, counts[name], "at most", limit, "check")
            for name, limit in section.items()
            if name in counts and not counts[name] <= limit
        ]

    def of_memory(self, name: str, peak: int) -> list[Broken]:
        """Is the highest peak too high?"""
        limit = self.sections.get("memory", {}).get("peak")
        return [] if limit is None or peak <= limit else [Broken(name, "peak", peak, "at most", limit, "memory")]

    def _of_metric(self, metric: Metric | None) -> Iterator[Broken]:
        for name, limit in self.sections.get("metric", {}).items():
            is_loss = name == "loss"
            title = "metric" if metric is None else metric.name
            value = None if metric is None else _loss(metric) if is_loss else metric.second
            is_at_most = is_loss or not (metric is None or metric.higher_is_better)
            if not _is_kept(value, limit, is_at_most):
                yield Broken(title, name, value, "at most" if is_at_most else "at least", limit, "metric")


def read_thresholds(path: str, *wanted: str) -> Thresholds:
    """Read a threshold file: TOML, or JSON if its name ends so.

    Args:
        wanted: sections, of which it must have one; those of other commands may be there, too.

    Raises:
        UsageError: it cannot be read, has names that nobody knows, or no limit that would be looked at.
    """
    try:
        with open(path, "rb") as file:
            found = json.load(file) if path.endswith(".json") else tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # of both formats
        raise UsageError(f"{path} is no threshold file: {error}.") from error
    limits = thresholds_of(found, path)
    if wanted and not any(limits.sections.get(name) for name in wanted):
        raise UsageError(f"{path} limits nothing that this command measures: it reads {', '.join(wanted)}.")
    return limits


def thresholds_of(found: Any, path: str = "the threshold file") -> Thresholds:
    """Limits from plain values.

    >>> limits = thresholds_of({"operators": {"backbone.*": {"similarity": 0.95}}})
    >>> thresholds_of({"operator": {}})
    Traceback (most recent call last):
    horizon_plugin_profiler.command_line.outcomes.UsageError: the threshold file: `operator` is not known: ...
    """
    _known(found, _SECTIONS, path, "")
    _check_operators(found, path, "")
    _check_numbers(found.get("metric", {}), _METRIC, path, "metric")
    _check_numbers(found.get("check", {}), _COUNTS, path, "check")
    drop = found.get("drop", {})
    _known(drop, ("outputs", "operators", "metric"), path, "drop.")
    _check_operators(drop, path, "drop.")
    if "metric" in drop:
        _check_numbers({"metric": drop["metric"]}, ("metric",), path, "drop")
    memory = found.get("memory", {})
    _known(memory, ("peak",), path, "memory.")
    if "peak" in memory:
        found = {**found, "memory": {"peak": bytes_of(memory["peak"], path)}}
    return Thresholds(found)


def bytes_of(size: Any, where: str) -> int:
    """A number of bytes.

    >>> bytes_of("1.5 GiB", "--limit"), bytes_of(100, "--limit")
    (1610612736, 100)
    """
    parsed = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    try:
        assert parsed is not None
        return int(float(parsed[1]) * _UNITS[parsed[2].lower()])
    except (AssertionError, KeyError, ValueError):
        raise UsageError(
            f"{where}: {size!r} is no size of memory: write 512 MiB, 2 GiB or a number of bytes."
        ) from None


def matches(pattern: str, *names: str) -> bool:
    """Does a name fit a pattern, in which ``*`` is any text and ``?`` any character?

    >>> matches("add[*]", "add[add]"), matches("layer?.conv", "layer12.conv")
    (True, False)
    """
    code = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)
    return any(re.fullmatch(code, name, re.DOTALL) for name in names)


def _of_operators(sections: Mapping[str, Any], document: Document, prefix: str) -> Iterator[Broken]:
    rules = [(f'{prefix}operators."{p}"', p, limits) for p, limits in sections.get("operators", {}).items()]
    for rule, pattern, limits in rules:
        chosen = [operator for operator in document.operators if matches(pattern, operator.name, operator.path)]
        if not chosen:
            raise UsageError(f"{rule}: no operator of `{document.title}` has such a name, so the limit guards nothing.")
        yield from _exceeding(chosen, limits, rule, document, is_drop=bool(prefix))
    if "outputs" in sections:
        yield from _exceeding(document.outputs, sections["outputs"], f"{prefix}outputs", document, is_drop=bool(prefix))


def _exceeding(
    operators: Sequence[Operator], limits: Mapping[str, float], rule: str, document: Document, is_drop: bool
) -> Iterator[Broken]:
    for quantity, limit in limits.items():
        is_at_most = is_drop or not _is_higher_better(quantity, document.similarity_function)
        bound = "at most" if is_at_most else "at least"
        title = f"loss of {quantity}" if is_drop else quantity
        measured = [(operator, getattr(operator, quantity)) for operator in operators]
        if all(value is None for _, value in measured):  # nothing of it was measured, which is not fine
            yield from (Broken(operator.name, title, None, bound, limit, rule) for operator in operators[:1])
        for operator, value in measured:
            if value is not None and not _is_kept(value, limit, is_at_most):
                yield Broken(operator.name, title, value, bound, limit, rule)


def _is_kept(value: float | None, limit: float, is_at_most: bool) -> bool:
    """NaN, and what is not known, keep no limit."""
    return value is not None and (value <= limit if is_at_most else value >= limit)


def _is_higher_better(quantity: str, function: str) -> bool:
    if quantity == "similarity":
        return function not in METRICS or metric_of(function).higher_is_better
    return quantity in _AT_LEAST


def worsening(before: Document, after: Document) -> Document:
    """The operators that both profiles have, with differences in place of values: how much worse the later one is."""
    known = {operator.name: operator for operator in before.operators}
    found = []
    for operator in after.operators:
        if operator.name in known:
            values = {name: _worse(name, known[operator.name], operator, after) for name in _OPERATOR}
            found.append(
                Operator(operator.index, operator.name, operator.path, operator.type, inputs=operator.inputs, **values)
            )
    return Document(after.title, after.mode, after.first, after.second, operators=tuple(found), returned=after.returned)


def _worse(quantity: str, before: Operator, after: Operator, document: Document) -> Any:
    old, new = getattr(before, quantity), getattr(after, quantity)
    if old is None or new is None:
        return None
    if old == new:  # of infinities as well
        return 0.0
    return old - new if _is_higher_better(quantity, document.similarity_function) else new - old


def _loss(metric: Metric) -> float:
    return metric.first - metric.second if metric.higher_is_better else metric.second - metric.first


def _of_metric_drop(limit: float | None, before: Metric | None, after: Metric | None) -> Iterator[Broken]:
    if limit is None:
        return
    value = None
    if before is not None and after is not None:
        value = before.second - after.second if after.higher_is_better else after.second - before.second
    if not _is_kept(value, limit, is_at_most=True):
        title = "metric" if after is None else after.name
        yield Broken(title, "loss against the first run", value, "at most", limit, "drop.metric")


def _check_operators(sections: Mapping[str, Any], path: str, prefix: str) -> None:
    operators = sections.get("operators", {})
    if not isinstance(operators, Mapping):
        raise UsageError(f'{path}: write the limits of operators as [{prefix}operators."name"].')
    for pattern, limits in operators.items():
        _check_numbers(limits, _OPERATOR, path, f'{prefix}operators."{pattern}"')
    _check_numbers(sections.get("outputs", {}), _OPERATOR, path, f"{prefix}outputs")


def _check_numbers(section: Any, names: Sequence[str], path: str, where: str) -> None:
    _known(section, names, path, f"{where}.")
    for name, limit in section.items():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
            raise UsageError(f"{path}: {where}.{name} is {limit!r}, and must be a number.")


def _known(section: Any, names: Sequence[str], path: str, prefix: str) -> None:
    if not isinstance(section, Mapping):
        raise UsageError(f"{path}: `{prefix.rstrip('.') or 'it'}` holds no names with limits.")
    for name in section:
        if name not in names:
            raise UsageError(f"{path}: `{prefix}{name}` is not known: there are {', '.join(names)}.")
