"""The document behind `profiler.html`: plain numbers and names, the same in Python, in JSON and on the page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from horizon_plugin_pytorch.analysis.rows import CalledTimes

VERSION = 1


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width.

    Args:
        low, high: the ends of the first and of the last bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Values:
    """What a tensor held, over all batches.

    Args:
        low, high, mean, var: of the finite values; None where there is none.
        nan, inf: how many there were.
        channels, dead: how many channels (of the second axis) there are, and how many of them held nothing but zeros;
            None for tensors without that axis.
        ranges: the smallest and largest finite value of each of the first batches.
    """

    low: float | None
    high: float | None
    mean: float | None
    var: float | None
    nan: int = 0
    inf: int = 0
    histogram: Histogram | None = None
    channels: int | None = None
    dead: int | None = None
    ranges: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Operator:
    """A call of an operator, in both models.

    Args:
        index: its position in the document; `inputs` are positions of the operators whose results it takes.
        name: as the tables show it, ``layer1.0.conv1``, ``conv(1)``, ``add[add]``; `path` is the module's, or that of
            the module whose forward calls a function.
        type: the name of the class, or of the function.
        operator: its name in the operator table, ``conv2d``, ``cat``; that of the function if it is not there.
        line: ``model.py:41`` of the user's code; empty if it is not known.
        shape: of its first result.
        format: of its result in the second model: ``qint8``, ``qint16``, ``torch.float32``, ...
        reason: the rule that chose the format; empty if it is not known.
        scale: of the result, or the largest one of several channels; `scale_low` is the smallest. None without scales.
        grid: the real numbers at the ends of the grid; None without one.
        saturation: the share of the second model's values at either end of its grid that are beyond it in the first.
        at_end: the share of the second model's values at either end of its grid, wherever they are in the first.
        similarity: of the two results, by the document's `similarity_function`.
        sqnr: the ratio of the first result to the difference, in dB.
        atol, error: the largest difference, and the same in steps of the scale.
        same_input_error: the largest difference of the operator's two forms on the same inputs, in steps.
        first, second: what came out in the two models.
    """

    index: int
    name: str
    path: str
    type: str
    line: str = ""
    inputs: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    format: str = ""
    input_formats: tuple[str, ...] = ()
    reason: str = ""
    scale: float | None = None
    scale_low: float | None = None
    grid: tuple[float, float] | None = None
    saturation: float | None = None
    at_end: float | None = None
    similarity: float | None = None
    sqnr: float | None = None
    atol: float | None = None
    error: float | None = None
    same_input_error: float | None = None
    first: Values | None = None
    second: Values | None = None
    operator: str = ""


@dataclass(frozen=True)
class Weight:
    """A weight in both models, as `compare_weights` has it.

    Args:
        name: ``conv.weight``.
        operator: the index of the first operator that uses it; None if none does.
    """

    name: str
    operator: int | None
    format: str
    similarity: float | None
    atol: float | None
    scale: float | None = None
    scale_low: float | None = None
    first: Values | None = None
    second: Values | None = None


@dataclass(frozen=True)
class Advice:
    """What is probably wrong, why we think so, and what to try.

    Args:
        rule: the name of the rule, ``range-exceeds-calibration``.
        severity: ``error``, ``warning`` or ``hint``.
        place: the module, or ``input`` and the like for what concerns the whole model.
        operators: indices of the operators in question.
        evidence: the numbers behind it, one sentence.
        remedy: what to do, one sentence.
        configuration: a line of Python to try; empty if there is none.
        arguments: names and texts of the numbers in `evidence` and `remedy`, for other languages (`advice.texts`).
        explains: the error that it explains, as a share of what the operator gives; None if that is not known.
    """

    rule: str
    severity: str
    place: str
    operators: tuple[int, ...]
    evidence: str
    remedy: str
    configuration: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    explains: float | None = None


@dataclass(frozen=True)
class Metric:
    """The task's metric of both models, as the user gave it."""

    name: str
    first: float
    second: float
    higher_is_better: bool = True


@dataclass(frozen=True)
class Message:
    """What the check of formats says of a module."""

    name: str
    type: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class ModelCall:
    """A call in one of the models, to find it again in a file that was exported of it.

    Args:
        path: the module that is called; for a function, the module whose forward calls it.
        function: the name of the function; empty for a module.
        line: ``model.py:41`` of the user's code; empty if it is not known.
        operator: the index of the operator that it is, or is a part of; None if it was not compared.
    """

    path: str
    function: str = ""
    line: str = ""
    operator: int | None = None


@dataclass(frozen=True)
class Document:
    """All that is known of two models.

    Args:
        title: what the page is called.
        mode: ``FvsQ``, ``QvsQ`` or ``CvsQ``.
        first, second: what the models are, ``float``, ``calibration``, ``qat`` or ``quantized``.
        batches: how many were seen.
        inputs: a digest of the numbers in them, to see whether two documents are about the same inputs.
        unfused: members of each pattern that could be fused, by name.
        task: whose thresholds judge the errors: ``classification``, ``detection``, ...; empty for the general ones.
        is_complete: False while it is being written, or when an error or an interrupt ended the run.
        notes: what was left out, and why.
        returned: the operators that give what the model returns, by index; empty if that is not known.
        first_calls, second_calls: all calls of each model, in their order.
    """

    title: str
    mode: str
    first: str
    second: str
    march: str = ""
    package_version: str = ""
    similarity_function: str = "Cosine"
    threshold: float | None = None
    task: str = ""
    metric: Metric | None = None
    operators: tuple[Operator, ...] = ()
    weights: tuple[Weight, ...] = ()
    called: tuple[CalledTimes, ...] = ()
    unfused: tuple[tuple[str, ...], ...] = ()
    messages: tuple[Message, ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    batches: int = 0
    inputs: str = ""
    is_complete: bool = True
    returned: tuple[int, ...] = ()
    first_calls: tuple[ModelCall, ...] = ()
    second_calls: tuple[ModelCall, ...] = ()
    version: int = field(default=VERSION)

    @property
    def outputs(self) -> list[Operator]:
        """The operators that give what the model returns; if that is not known, those whose results no other one takes.

        >>> conv, relu = Operator(0, "conv", "conv", "Conv2d"), Operator(1, "relu", "relu", "ReLU", inputs=(0,))
        >>> [operator.name for operator in Document("net", "FvsQ", "float", "qat", operators=(conv, relu)).outputs]
        ['relu']
        """
        returned = [operator for operator in self.operators if operator.index in self.returned]
        if returned:
            return returned
        taken = {index for operator in self.operators for index in operator.inputs}
        return [operator for operator in self.operators if operator.index not in taken]

    @property
    def keys(self) -> list[str]:
        """A name for each operator that no other one has, as in links to the page: ``conv``, ``conv#2``.

        >>> same = tuple(Operator(index, "add", "", "add") for index in range(2))
        >>> Document("net", "FvsQ", "float", "qat", operators=same).keys
        ['add', 'add#2']
        """
        found: dict[str, None] = {}
        last: dict[str, int] = {}
        for operator in self.operators:
            key, number = operator.name, last.get(operator.name, 1)
            while key in found:
                number += 1
                key = f"{operator.name}#{number}"
            found[key], last[operator.name] = None, number
        return list(found)

    def to_json(self) -> str:
        """As JSON; NaN and infinities, which JSON does not have, are ``"nan"``, ``"inf"`` and ``"-inf"``.

        >>> Document("net", "FvsQ", "float", "qat").to_json()[:34]
        '{"title": "net", "mode": "FvsQ", "'
        """
        return json.dumps(_plain(self), ensure_ascii=False, allow_nan=False)


def read_document(text: str) -> Document:
    """A document from its JSON.

    Raises:
        ValueError: when it is not one, or of a version that is not known.

    >>> net = Document("net", "FvsQ", "float", "qat", operators=(Operator(0, "conv", "conv", "Conv2d", sqnr=math.inf),))
    >>> read_document(net.to_json()) == net
    True
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is no document of version {VERSION}")
        document: Document = _read(Document, found)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"This is not a profile that this version wrote: {error}.") from error
    return document


_MEMBERS: dict[str, Any] = {
    "operators": Operator, "weights": Weight, "called": CalledTimes, "messages": Message, "advice": Advice,
    "metric": Metric, "first": Values, "second": Values, "histogram": Histogram, "first_calls": ModelCall,
    "second_calls": ModelCall,
}  # fmt: skip
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXTS = frozenset(
    "title mode march package_version similarity_function task name path type line format reason rule severity place "
    "evidence remedy configuration arguments text operator function".split()
)


def _read(kind: Any, found: dict[str, Any]) -> Any:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(found) - known):
        raise ValueError(f"`{unknown[0]}` is not known")
    return kind(**{name: _value(name, value) for name, value in found.items()})


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _read(_MEMBERS[name], value)
    if name == "counts":
        return tuple(value)
    if isinstance(value, list):
        return tuple(_value(name, item) for item in value)
    if isinstance(value, str) and name not in _TEXTS:
        return _SPECIAL.get(value, value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):  # thousands of numbers, all of them whole
        return {"low": _plain(value.low), "high": _plain(value.high), "counts": list(value.counts)}
    if is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
