"""Two models compared operator by operator: where results begin to differ, and which operators are to blame."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.comparison import ComparedCall, Comparison, Devices
from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.tables import Table

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

    >>> import copy, tempfile, torch
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
    similarity = SimilarityFunction(similarity_func, _WHO)
    comparison = Comparison(model1, model2, inputs, devices, _WHO)
    rows: list[SimilarityRow] = []
    try:
        comparison.run(
            lambda call: rows.append(row_of(len(rows), call, similarity(call.first, call.second))), restart=rows.clear
        )
    finally:  # what was compared until an error, or an interrupt
        write_similarity(rows, similarity.name, out_dir)
    comparison.tell_not_comparable()
    tell_poor(rows, similarity, threshold)
    return [row.values for row in rows]


def row_of(index: int, call: ComparedCall, similarity: float) -> SimilarityRow:
    """The row of a pair of calls."""
    return SimilarityRow(
        index, call.name, call.type, similarity, call.scale, call.atol, call.error, call.same_input_error
    )


def tell_poor(rows: Sequence[SimilarityRow], similarity: SimilarityFunction, threshold: float | None) -> None:
    """Print the operators whose similarity is beyond a threshold; None is that of the metric."""
    limit = similarity.threshold if threshold is None else threshold
    poor = [] if limit is None else [row for row in rows if similarity.is_poor(row.similarity, limit)]
    if poor:
        side = "below" if similarity.higher_is_better else "above"
        print(f"Similarity ({similarity.name}) {side} {limit:g}:\n{_table(poor).text('psql')}")


def _table(rows: Sequence[SimilarityRow]) -> Table:
    return Table(_HEADERS, [row.cells for row in rows])


def write_similarity(rows: Sequence[SimilarityRow], metric: str, out_dir: str | os.PathLike | None) -> None:
    """Write the table, the table in the order of the errors, and the curve."""
    ordered = sorted(rows, key=lambda row: -1.0 if row.same_input_error is None else row.same_input_error, reverse=True)
    for name, some in ((SIMILARITY_FILE, rows), (ORDERED_FILE, ordered)):
        write_report(f"{_NOTE}{_table(some).text('psql')}\n", out_dir, name, _WHO)
    labels = [f"{row.index} {row.name}: {row.similarity:.7f}" for row in rows]
    curve = Curve(f"similarity ({metric})", [row.similarity for row in rows], labels)
    headers = [header.replace("\n", " ") for header in _HEADERS]
    drawn = chart([curve], "operators in the order of the forward")
    text = page("similarity", drawn, Table(headers, [row.cells for row in rows]).html())
    write_report(text, out_dir, PAGE_FILE, _WHO)


show_at("utils.quant_profiler", featuremap_similarity)
