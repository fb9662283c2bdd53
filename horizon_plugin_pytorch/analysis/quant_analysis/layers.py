"""Two runs compared layer by layer: the table of the guide, and advice on layers that stand out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.comparison import tell_unpaired
from horizon_plugin_pytorch.analysis.html_page import Curve
from horizon_plugin_pytorch.analysis.quant_analysis.op_infos import (
    OpInfo,
    OpInfoManager,
    Statistic,
    class_path,
    mod_name,
    type_of,
)
from horizon_plugin_pytorch.analysis.similarity_function import largest_difference
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.operators.table import ScaleRule
from horizon_plugin_pytorch.statistics.metrics import METRICS, metric_of
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.pairing import pair_calls

_STATISTICS = [f"{side}_model_{what}" for what in ("min", "max", "mean", "var") for side in ("base", "analy")]
HEADERS = (
    "mod_name", "base_op_type", "analy_op_type", "shape", "quant_dtype", "qscale", *METRICS, "Atol", "Rtol",
    *_STATISTICS, "max_atol_diff", "max_qscale_diff",
)  # fmt: skip
ADVICE_HEADERS = ("mod_name", "op_type", "shape", "quant_dtype", "qscale", "min", "max", "advice")
_LARGE = {"qint8": 10.0, "qint16": 10.0 * 256}  # the guide's limit for int8, and as many steps of int16
_COVERED = 1.02  # how far values may lie beyond the grid, as a share of its end
_FORMATS: dict[str, QuantDType] = {"qint8": qint8, "qint16": qint16}


@dataclass(frozen=True)
class LayerRow:
    """One operator in both models.

    Args:
        name: in the baseline.
        types: what it is in each model.
        metrics: by their names; empty for a member of a fused operator, whose result the other model does not have.
        atol, rtol: the largest difference, and that relative to the baseline.
        statistics: of the result in each model.
        has_scale: has the analysed model a scale here? What moves values, as `reshape` and dropout do, keeps that of
            its input.
    """

    name: str
    types: tuple[str, str]
    shape: tuple[int, ...]
    quant_dtype: str
    qscale: float | None
    metrics: Mapping[str, float]
    atol: float | None
    rtol: float | None
    statistics: tuple[Statistic | None, Statistic | None]
    has_scale: bool = True

    @property
    def cells(self) -> list[Any]:
        """As the table shows them."""
        numbers: list[float | None] = [self.metrics.get(name) for name in METRICS]
        numbers += [self.atol, self.rtol]
        for what in ("low", "high", "mean", "var"):
            numbers += [None if side is None else getattr(side, what) for side in self.statistics]
        steps = None if self.qscale is None or self.atol is None else self.atol / self.qscale
        shown = ["" if number is None else f"{number:.7f}" for number in (self.qscale, *numbers, self.atol, steps)]
        shape = str(torch.Size(self.shape))
        return [self.name, *self.types, shape, self.quant_dtype, *shown]


def compare_models(
    logs: tuple[CallLog, CallLog], managers: tuple[OpInfoManager, OpInfoManager], chosen: Chosen, who: str
) -> list[LayerRow]:
    """The rows of two models, in the order of the baseline.

    Args:
        logs: the calls of both runs.
        managers: what was written of them.
    """
    pairing = pair_calls(*logs)
    tell_unpaired(logs[0].model, logs[1].model, pairing, who)
    partners = {one.index: other for one, other in pairing.pairs}
    parts = {u.call.index for u in pairing.first_only if u.reason.startswith("a part of ")}
    rows = []
    for call in logs[0].calls:
        if not chosen.has(call.path, call.module):
            continue
        if call.index in partners:
            other = partners[call.index]
            infos = managers[0].infos[call.index], managers[1].infos[other.index]
            types = type_of(call), _type_at(logs[1].model, call, other)
            rows.append(_row(mod_name(call), infos, types, _has_own_scale(other), who))
        elif call.index in parts:
            info = managers[0].infos[call.index]
            rows.append(_part(call, info, _type_at(logs[1].model, call, None)))
    return rows


def partners_of(
    logs: tuple[CallLog, CallLog | None], analysis: OpInfoManager, places: Mapping[int, int]
) -> dict[int, OpInfo]:
    """For each call of the baseline, by its index, what the analysed model or graph gives in its place.

    Args:
        logs: the calls of both runs; None for a graph.
        places: of a graph, for each call of the model the index of what it gives there.
    """
    if logs[1] is None:
        return {index: analysis.infos[place] for index, place in places.items()}
    return {one.index: analysis.infos[other.index] for one, other in pair_calls(logs[0], logs[1]).pairs}


def compare_with_graph(
    log: CallLog, managers: tuple[OpInfoManager, OpInfoManager], places: Mapping[int, int], chosen: Chosen, who: str
) -> list[LayerRow]:
    """The rows of a model and of its integer graph.

    Args:
        places: for each call of the model, by its index, the index of what the graph gives there.
    """
    if not places:
        raise CheckError(f"{who}: `{type(log.model).__name__}` has no operator in common with the integer graph.")
    rows = []
    for call in log.calls:
        if call.index in places and chosen.has(call.path, call.module):
            infos = managers[0].infos[call.index], managers[1].infos[places[call.index]]
            rows.append(_row(mod_name(call), infos, (type_of(call), infos[1].op_type), _has_own_scale(call), who))
    return rows


def _type_at(model: nn.Module, call: OperatorCall, other: OperatorCall | None) -> str:
    """What the analysed model has in an operator's place: what fusion has left, or its partner."""
    if call.module is not None:
        try:
            there = model.get_submodule(call.path)
        except AttributeError:
            there = None
        if isinstance(there, nn.Identity) and not isinstance(call.module, nn.Identity):
            return class_path(nn.Identity)
        if other is None and there is not None:
            return class_path(type(there))
    return "" if other is None else type_of(other)


def _part(call: OperatorCall, info: OpInfo, there: str) -> LayerRow:
    base = _outputs(info)[0] if _outputs(info) else None
    return LayerRow(
        mod_name(call),
        (info.op_type, there),
        () if base is None else base.shape,
        "",
        None,
        {},
        None,
        None,
        (base, None),
    )


def _outputs(info: OpInfo) -> list[Statistic]:
    return [statistic for statistic in info.statistics if statistic.attr.startswith("output")]


def _has_own_scale(call: OperatorCall) -> bool:
    if call.method or call.row is None:  # of a FloatFunctional; or nobody knows
        return bool(call.method) or call.module is not None
    return call.row.scale_rule in (ScaleRule.OWN, ScaleRule.FIXED)


def _row(name: str, infos: tuple[OpInfo, OpInfo], types: tuple[str, str], has_scale: bool, who: str) -> LayerRow:
    found = infos[0].load(), infos[1].load()
    one, other = (_joined(contents["output"]) for contents in found)
    if one.shape != other.shape:
        raise CheckError(
            f"{who}: `{name}` gives {tuple(one.shape)} in the baseline and {tuple(other.shape)} in the analysed model. "
            "Give two models that were made of one float model."
        )
    metrics = {}
    for metric in METRICS:
        running = metric_of(metric)
        running.update(other, one)
        metrics[metric] = running.result()
    outputs = [_outputs(info) for info in infos]
    first = next((x for x in (*outputs[1], *outputs[0]) if x.scale is not None), None)
    sides = [Statistic.of("output", one), Statistic.of("output", other)]
    scale = None if first is None else first.scale
    shape = outputs[1][0].shape if outputs[1] else ()
    atol = largest_difference(one, other)
    return LayerRow(
        name, types, shape, str(found[1]["quant_dtype"]), scale, metrics, atol, _relative(one, other),
        (sides[0], sides[1]), has_scale,
    )  # fmt: skip


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([x.flatten().double() for x in tensors]) if tensors else torch.empty(0)


def _relative(wanted: Tensor, found: Tensor) -> float:
    """The largest difference relative to what is wanted, where that is not zero or both are."""
    wanted, found = wanted.double(), found.double()
    difference = (wanted - found).abs()
    share = torch.where(difference == 0, 0.0, difference / wanted.abs())
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max()) if share.numel() else 0.0


def layer_table(rows: Sequence[LayerRow]) -> Table:
    """The table that is written."""
    return Table(["", *HEADERS], [[str(number), *row.cells] for number, row in enumerate(rows)])


def layer_curve(rows: Sequence[LayerRow]) -> Curve:
    """The cosine from layer to layer: where errors begin to grow."""
    known = [row for row in rows if "Cosine" in row.metrics]
    values = [row.metrics["Cosine"] for row in known]
    return Curve("Cosine", values, [f"{row.name}: {value:.7f}" for row, value in zip(known, values, strict=True)])


def abnormal_layers(rows: Sequence[LayerRow]) -> Table:
    """Layers whose numbers and scales do not fit, and what to do about each.

    A range is large for its format by the guide: beyond 10 for int8, and as many steps for int16. A scale does not
    cover the range if the baseline's values lie beyond its grid. What has no scale of its own has no row: the one of
    its input says it.
    """
    found = []
    for row in rows:
        base, format = row.statistics[0], _FORMATS.get(row.quant_dtype)
        if not row.has_scale:
            continue
        if format is None or row.qscale is None or base is None or base.low is None or base.high is None:
            continue
        advice = []
        largest, total = max(abs(base.low), abs(base.high)), base.high - base.low
        if largest > _LARGE[row.quant_dtype]:
            advice.append(f"Total data range {total:.7g} maybe too large for quantization.")
        is_low, is_high = (
            base.low < format.min * row.qscale * _COVERED,
            base.high > format.max * row.qscale * _COVERED,
        )
        if is_low or is_high:
            advice.append("Current scale does not cover the data range.")
            advice.append(f"Set fixed scale {largest / -format.min:.7g}.")
        if advice:
            shape = str(torch.Size(row.shape))
            numbers = [f"{x:.7f}" for x in (row.qscale, base.low, base.high)]
            found.append([row.name, row.types[1], shape, row.quant_dtype, *numbers, " ".join(advice)])
    return Table(ADVICE_HEADERS, found)
