"""Tables that say how sensitive the operators of a model are."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.config.graph_view import GraphView
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, listed, warn


@dataclass(frozen=True)
class Sensitivity:
    """One row of a sensitivity table."""

    rank: int
    name: str
    kind: str
    metric: Any


def most_sensitive(
    table: Sequence[Any], topk: int | None, ratio: float | None, kinds: Sequence[str]
) -> list[Sensitivity]:
    """The first rows of a sensitivity table, of these kinds (``activation``, ``weight``).

    Args:
        table: rows ``(op_name, sensitive_type, op_type, metric, quant_dtype, ...)`` or, of activations alone,
            ``(op_name, metric)``, the most sensitive first, as ``torch.load`` gives them; or the path of that file.
        topk, ratio: how many rows, or which share of them.

    >>> table = [["conv", "weight", "", 2.0, ""], ["add[add]", "activation", "", 1.0, ""]]
    >>> most_sensitive(table, 1, None, ["activation"])
    [Sensitivity(rank=2, name='add', kind='activation', metric=1.0)]
    """
    if (topk is None) == (ratio is None):
        raise QuantizationConfigError("say how many operators of the sensitivity table: either topk=... or ratio=...")
    if topk is not None and (isinstance(topk, bool) or not isinstance(topk, int) or topk < 0):
        raise QuantizationConfigError(f"topk must be a whole number, got {topk!r}.")
    if ratio is not None and not (isinstance(ratio, (int, float)) and 0 <= ratio <= 1):
        raise QuantizationConfigError(f"ratio must lie between 0 and 1, got {ratio!r}.")
    if isinstance(table, (str, os.PathLike)):
        table = _load_table(table)
    if isinstance(table, (Mapping, Tensor)) or not isinstance(table, Iterable):
        raise QuantizationConfigError(f"{_TABLE}; got {type(table).__name__}.")
    rows: list[Sensitivity] = []
    for row in table:
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) < 2:
            raise QuantizationConfigError(f"{_TABLE}; got the row {row!r}.")
        if row[0] != "op_name":  # a heading
            # The tables mark the method of a FloatFunctional and repeated calls: ``sub[sub]``, ``conv(1)``.
            name = re.sub(r"(\[\w+\]|\(\d+\))+$", "", str(row[0]))
            kind, metric = ("activation", row[1]) if len(row) == 2 else (str(row[1]), row[3 if len(row) > 3 else 2])
            if kind not in ("activation", "weight"):
                raise QuantizationConfigError(
                    f"the sensitivity table has the type {kind!r} for {name!r}; it is activation or weight."
                )
            rows.append(Sensitivity(len(rows) + 1, name, kind, metric))
    chosen = [row for row in rows if row.kind in kinds]
    return chosen[: topk if topk is not None else math.ceil(float(ratio or 0) * len(chosen))]


_TABLE = (
    "a sensitivity table is a list of rows (op_name, sensitive_type, op_type, metric, quant_dtype) or (op_name, "
    "metric), as `torch.load` gives it, or the path of that file"
)


def _load_table(path: str | os.PathLike) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # of whatever the bytes mean to torch
        raise QuantizationConfigError(
            f"{os.fspath(path)!r} cannot be read with `torch.load(..., weights_only=True)`: {_TABLE}."
        ) from error


def warn_unknown(view: GraphView, rows: Sequence[Sensitivity], what: str) -> None:
    """Name operators of a table that the model does not have.

    Raises:
        QuantizationConfigError: if the model has none of them.
    """
    unknown = list(dict.fromkeys(row.name for row in rows if view.named(row.name) is None))
    if unknown and len(unknown) == len({row.name for row in rows}):
        paths = [path for operator in view for path in operator.members]
        raise QuantizationConfigError(
            f"{what}: no operator of the sensitivity table is in the quantized part of the model. The table names "
            f"{', '.join(map(repr, unknown[:3]))}, the model has {', '.join(map(repr, paths[:3]))}. Was it made with "
            "another model, or with the model inside another one?"
        )
    if unknown:
        warn(
            f"{what}: the sensitivity table names {listed(map(repr, unknown))}, which the quantized part of the model "
            "does not have. Was it made with another model?",
            QuantizationWarning,
        )


show_at("quantization.qconfig_template", Sensitivity)
