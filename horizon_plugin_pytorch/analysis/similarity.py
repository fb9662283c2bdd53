"""Two models compared operator by operator: where results begin to differ, and which operators are to blame."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.same_input import NotComparable, real_of, same_input_error
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction, largest_difference
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun, undisturbed_evaluation
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, require_module, warn
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.in_step import run_in_step
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.pairing import Pairing, Unpaired, pair_calls

SIMILARITY_FILE, ORDERED_FILE, PAGE_FILE = "similarity.txt", "ordered_op_error_similarity.txt", "similarity.html"
_WHO = "featuremap_similarity"
_HEADERS = (
    "Index", "Module Name", "Module Type", "Similarity", "qscale", "Acc Error\n(float atol)",
    "Acc Error\n(N out_qscale)", "Op Error with Same\nInput (N out_qscale)",
)  # fmt: skip
_RULE = "---------------------------------------------------------------"
_NOTE = f"""{_RULE}
Note:
* Suffix '(I)' means this layer is Identity in one model
* Suffix '(I vs I)' means this layer is Identity in both models
* Suffix '(i)'(i >= 1) means this op is shared i times
{_RULE}
"""
Devices = torch.device | str | Sequence[torch.device | str] | None


@dataclass(frozen=True)
class SimilarityRow:
    """An operator of two models.

    Args:
        scale: of its result in the quantized model; None without one, and for one scale per channel.
        atol: the largest difference of the results.
        error: the same in steps of the scale; None where there is no scale and the results differ.
        same_input_error: the largest difference, in steps, of the operator's two forms on the same inputs.
    """

    index: int
    name: str
    type: str
    similarity: float
    scale: float | None
    atol: float
    error: float | None
    same_input_error: float | None

    @property
    def values(self) -> list[Any]:
        """As `featuremap_similarity` returns them."""
        return [
            self.index, self.name, self.type, self.similarity, self.scale, self.atol, self.error, self.same_input_error
        ]  # fmt: skip

    @property
    def cells(self) -> list[str]:
        """As the guide prints them."""
        errors = ["" if error is None else f"{error:g}" for error in (self.error, self.same_input_error)]
        scale = "" if self.scale is None else f"{self.scale:.7f}"
        return [str(self.index), self.name, self.type, f"{self.similarity:.7f}", scale, f"{self.atol:.7f}", *errors]


def featuremap_similarity(
    model1: nn.Module,
    model2: nn.Module,
    inputs: Any,
    similarity_func: str | Callable[[Tensor, Tensor], Any] = "Cosine",
    threshold: float | None = None,
    devices: Devices = None,
    out_dir: str | os.PathLike | None = None,
) -> list[list[Any]]:
    """Compare the results of each operator of two models, and the error of each operator by itself.

    Both run at the same time in eval mode, and each pair of results is let go when it has been compared. The table is
    written to ``similarity.txt``, in the order of the largest errors with the same input to
    ``ordered_op_error_similarity.txt``, and as a curve to ``similarity.html``. Operators whose similarity is beyond the
    threshold are printed.

    Args:
        model1, model2: float, fused, calibration, QAT or quantized; the better one first, as in (float, qat) and (qat,
            quantized). They are not changed.
        inputs: the arguments of both models, as `prepare` takes them.
        similarity_func: Cosine, MSE, L1, KL, SQNR, or a function of two tensors that gives a number.
        threshold: below it for Cosine and SQNR, above it for others, an operator is printed. None is 0.99 for Cosine,
            20 for SQNR, 1 for MSE and L1, 0.1 for KL; with a function of your own nothing is printed.
        devices: one for both models, or a pair; None leaves models and inputs where they are. What is elsewhere is
            copied.
        out_dir: the folder of the files; None is the current one.

    Returns:
        For each operator ``[index, module name, module type, similarity, scale of the result, largest difference, the
        same in steps of the scale, and that with the same input]``; None where there is no scale, or the two forms
        cannot take the same input.

    Raises:
        CheckError: both are one model, they have nothing in common, or one of them fails on these inputs.

    >>> import tempfile
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net, x = QuantWrapper(nn.ReLU()).eval(), torch.linspace(-1, 1, 8)
    >>> qat = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()}).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = featuremap_similarity(net, qat, x, out_dir=folder)
    >>> [(row[1], row[3] > 0.999, row[6]) for row in rows]
    [('quant', True, 0.5), ('module', True, 0.5), ('dequant', True, 0.5)]
    """
    for model in (model1, model2):
        require_module(model, _WHO)
    similarity = SimilarityFunction(similarity_func, _WHO)
    first, second = _pair_of(devices)
    if model1 is model2 and first != second:
        model2 = copy.deepcopy(model1)
    _require_two_models(model1, model2)
    runs = WatchedRun(model1, inputs, first, _WHO), WatchedRun(model2, inputs, second, _WHO)
    logs = tuple(_log(run) for run in runs)
    pairing = pair_calls(*logs)
    _tell_unpaired(model1, model2, pairing)
    comparison = _Comparison(runs, pairing, similarity)
    try:
        comparison.run()
    finally:  # what was compared until an error, or an interrupt
        _write(comparison.rows, similarity.name, out_dir)
    comparison.tell_not_comparable()
    limit = similarity.threshold if threshold is None else threshold
    poor = [] if limit is None else [row for row in comparison.rows if similarity.is_poor(row.similarity, limit)]
    if poor:
        side = "below" if similarity.higher_is_better else "above"
        print(f"Similarity ({similarity.name}) {side} {limit:g}:\n{_table(poor).text('psql')}")
    return [row.values for row in comparison.rows]


class _Comparison:
    """Compares pairs of calls as they come."""

    def __init__(self, runs: tuple[WatchedRun, WatchedRun], pairing: Pairing, similarity: SimilarityFunction) -> None:
        self._runs, self._pairing, self._similarity = runs, pairing, similarity
        self._parts = _parts_of(pairing.first_only), _parts_of(pairing.second_only)
        self._not_comparable: dict[str, list[str]] = {}
        self.rows: list[SimilarityRow] = []

    def run(self) -> None:
        """Run both models in step."""
        first, second = self._runs
        by_model = {id(run.model): run for run in self._runs}
        with ExitStack() as stack:
            for run in self._runs:
                stack.enter_context(undisturbed_evaluation(run.model))
            self._bar = stack.enter_context(tqdm(total=len(self._pairing.pairs), desc=_WHO, disable=None))
            run_in_step(first.model, second.model, self._pairing, self._compare, lambda model: by_model[id(model)]())

    def tell_not_comparable(self) -> None:
        """Say of which operators the error with the same input is not known."""
        for reason, names in self._not_comparable.items():
            warn(
                f"{_WHO}: the error with the same input is not known for {listed(names)}: {reason}. Its cell is empty.",
                QuantizationWarning,
            )

    def _compare(self, one: OperatorCall, other: OperatorCall) -> None:
        self._bar.update()
        name = self._name(one, other)
        shapes = [tuple(x.shape) for x in one.outputs], [tuple(x.shape) for x in other.outputs]
        if shapes[0] != shapes[1]:
            raise CheckError(
                f"{_WHO}: `{name}` gives {listed(map(str, shapes[0]))} in the first model and "
                f"{listed(map(str, shapes[1]))} in the second. Give two models that were made of one float model."
            )
        values = _joined(one.outputs), _joined(other.outputs)
        values = values[0], values[1].to(values[0].device)
        scale = _scale_of(one, other)
        atol = largest_difference(*values)
        self.rows.append(
            SimilarityRow(
                len(self.rows),
                name,
                _type(one if one.module is not None else other),
                self._similarity(*values),
                _only_scale(other.outputs, one.outputs),
                atol,
                _steps(atol, scale),
                self._same_input(name, one, other, scale),
            )
        )

    def _same_input(self, name: str, one: OperatorCall, other: OperatorCall, scale: float | None) -> float | None:
        parts = self._parts[0].get(other.name, []), self._parts[1].get(one.name, [])
        try:
            return _steps(same_input_error(one, other, parts), scale)
        except NotComparable as reason:
            self._not_comparable.setdefault(str(reason), []).append(name)
        except Exception as error:  # an operator refuses what it never gets in its own model
            self._not_comparable.setdefault(f"{type(error).__name__}: {error}".rstrip("."), []).append(name)
        return None

    def _name(self, one: OperatorCall, other: OperatorCall) -> str:
        call = one if one.module is not None or other.module is None else other
        if call.module is None:
            return call.name
        are_same = [_is_identity(run.model, call.path) for run in self._runs]
        suffix = "(I vs I)" if all(are_same) else "(I)" if any(are_same) else ""
        return f"{call.path}{f'({call.repetition})' if call.repetition else ''}{suffix}"


def _pair_of(devices: Devices) -> tuple[Any, Any]:
    if devices is None or isinstance(devices, (str, torch.device)):
        return devices, devices
    if len(devices) != 2:
        raise TypeError(f"{_WHO}: devices is a device for both models, or a pair of devices; got {devices!r}.")
    return devices[0], devices[1]


def _require_two_models(model1: nn.Module, model2: nn.Module) -> None:
    """Insist on models that can differ: preparation and conversion may work in place."""
    mine = {id(m) for m in model1.modules()}
    leaves = [m for m in model2.modules() if not m._modules and not isinstance(m, nn.Identity)]
    if model1 is model2 or (leaves and all(id(m) in mine for m in leaves)):
        raise CheckError(
            f"{_WHO}: both models are one, or hold the same modules, so all results would be equal. Preparation and "
            "conversion may change the model that they are given: keep `copy.deepcopy(model)` from before, and compare "
            "with that."
        )


def _log(run: WatchedRun) -> CallLog:
    log = CallLog(run.model)
    run.watch(log)
    return log


def _tell_unpaired(model1: nn.Module, model2: nn.Module, pairing: Pairing) -> None:
    if not pairing.pairs:
        raise CheckError(
            f"{_WHO}: `{type(model1).__name__}` and `{type(model2).__name__}` have no operator in common. Give two "
            "models that were made of one float model."
        )
    unpaired = [u for u in (*pairing.first_only, *pairing.second_only) if not u.reason.startswith(_EXPECTED)]
    if unpaired:
        warn(
            f"{_WHO}: calls without a partner in the other model are not compared: {listed(map(str, unpaired))}. "
            "If there are many, the models were not made of one float model.",
            QuantizationWarning,
        )


_EXPECTED = ("a part of ", "the stub of a constant")


def _parts_of(unpaired: Sequence[Unpaired]) -> dict[str, list[OperatorCall]]:
    """Members of fused operators, by the name of the operator in the other model."""
    found: dict[str, list[OperatorCall]] = {}
    for one in unpaired:
        if one.reason.startswith("a part of `"):
            found.setdefault(one.reason.split("`")[1], []).append(one.call)
    return found


def _is_identity(model: nn.Module, path: str) -> bool:
    try:
        return isinstance(model.get_submodule(path), nn.Identity)
    except AttributeError:
        return False


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The real numbers of all results of an operator."""
    if len(tensors) == 1:
        return real_of(tensors[0])
    return torch.cat([real_of(x).flatten().double() for x in tensors])


def _only_scale(*results: Sequence[Tensor]) -> float | None:
    """The scale of the first result that has one scale."""
    for outputs in results:
        for x in outputs:
            if isinstance(x, QTensor) and x.scale.numel() == 1:
                return float(x.scale)
    return None


def _scale_of(one: OperatorCall, other: OperatorCall) -> float | None:
    """What errors are counted in: the result's scale; of what becomes float, the input's."""
    return _only_scale(other.outputs, one.outputs, other.inputs, one.inputs)


def _steps(atol: float, scale: float | None) -> float | None:
    """A difference in steps of a scale: whole steps where both lie on one grid."""
    if atol == 0:
        return 0
    if scale is None or not math.isfinite(atol):
        return None if scale is None else math.inf
    steps = atol / scale
    return round(steps) if abs(steps - round(steps)) < 1e-3 else round(steps, 3)


def _type(call: OperatorCall) -> str:
    return f"<function '{call.operator}'>" if call.module is None else str(type(call.module))


def _table(rows: Sequence[SimilarityRow]) -> Table:
    return Table(_HEADERS, [row.cells for row in rows])


def _write(rows: Sequence[SimilarityRow], metric: str, out_dir: str | os.PathLike | None) -> None:
    ordered = sorted(rows, key=lambda row: -1.0 if row.same_input_error is None else row.same_input_error, reverse=True)
    for name, some in ((SIMILARITY_FILE, rows), (ORDERED_FILE, ordered)):
        write_report(f"{_NOTE}{_table(some).text('psql')}\n", out_dir, name, _WHO)
    labels = [f"{row.index} {row.name}: {row.similarity:.7f}" for row in rows]
    curve = Curve(f"similarity ({metric})", [row.similarity for row in rows], labels)
    headers = [header.replace("\n", " ") for header in _HEADERS]
    write_report(
        page("similarity", chart([curve]), Table(headers, [row.cells for row in rows]).html()), out_dir, PAGE_FILE, _WHO
    )


show_at("utils.quant_profiler", featuremap_similarity)
