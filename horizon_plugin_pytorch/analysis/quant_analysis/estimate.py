"""Sensitivity of all fake quantizers at once, by gradients: see `analysis.tuning.probe`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded
from horizon_plugin_pytorch.analysis.quant_analysis.sensitivity import Measured, OutputComparison
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.analysis.tuning.outputs import outside_inference, require_gradients
from horizon_plugin_pytorch.analysis.tuning.probe import probe_each
from horizon_plugin_pytorch.analysis.tuning.sites import WEIGHT, RoundingModel
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real

METRIC = "MSE"  # what the gradients estimate
_LEAST, _MOST = 2, 16  # backwards for each output
_SHARE = 0.095  # of the runs that measuring takes
_OF_WHOLE = 0.75  # of a run is what a measurement takes, as what is before the quantizer does not run again
_BEFORE, _BACKWARD = 6.0, 1.1  # what comes before the backwards and what each of them takes, in runs
REMEDY = "Measure them, without use_sensitivity_v2."


@outside_inference()
def estimate(
    baseline: Subject,
    analysis: ModelSubject,
    batch: Any,
    outputs: Sequence[str] | None,
    post: PostProcess,
    who: str,
    is_asked: bool = True,
    draws: int | None = None,
    seed: int = 0,
) -> Measured:
    """The mean squared error that each quantizer alone gives each output, in one forward and a few backwards of each.

    What gradients cannot see, the weights of operators that are no layers, is measured.

    Args:
        outputs: their names; None is all.
        is_asked: has the user named them? Else those that have no gradient are left out: positions and counts, and with
            a warning what a post_process computes outside of torch.
        draws: backwards for each output; None is what `draws_for` says.

    Raises:
        CheckError: an output that the user has named has no gradient.
        QuantizationConfigError: the model was made under `torch.inference_mode`.
    """
    require_gradients(analysis.model, who)
    comparison = OutputComparison(baseline, batch, post, [OutputMetric(METRIC, None, who)], who)
    wanted = comparison.wanted
    is_asked = is_asked and outputs is not None
    missing = [name for name in outputs or () if name not in wanted]
    if missing:
        raise CheckError(f"{who}: the baseline gives no output {missing[0]!r} on this batch.")
    every = wanted if outputs is None else outputs
    names = [name for name in every if is_asked or wanted[name].is_floating_point()]
    if not names:
        return {}

    def run(model: nn.Module) -> dict[str, Tensor]:
        with comparison.selections.taking() if len(comparison.selections) else nullcontext():
            out = analysis.run(batch)
            given = located([out if post is None else post(out)])
        tensors = {"-".join(map(str, path)): x for path, x in given}
        found = {name: real(tensors[name]) for name in names if name in tensors}
        why = {name: _refusal(found.get(name), wanted[name]) for name in names}
        refused = [f"{name} ({reason})" for name, reason in why.items() if reason]
        if refused and is_asked:
            raise CheckError(f"{who}: outputs cannot be estimated: {listed(refused)}. {REMEDY}")
        if refused:
            warn(f"{who}: outputs are left out: {listed(refused)}. {REMEDY}", QuantizationWarning)
        return {name: x for name, x in found.items() if not why[name]}

    samples = max(x.shape[0] if x.dim() else 1 for x in wanted.values())
    with PartlyRounded(analysis, batch, who) as runs:
        found: Measured = {one.site: (one, {}) for one in runs.roundings}
        unseen = [one for one in runs.roundings if one.site.kind == WEIGHT and not isinstance(one.module, QATGemm)]
        for one in unseen:
            values = comparison.values(partial(runs.run, [one.quantizer]))
            found[one.site][1].update({name: values[name] for name in names if name in values})
        seen = [one for one in runs.roundings if one not in unseen]

        def count(outputs: int) -> int:
            return draws or draws_for(len(runs.roundings), outputs)

        model = RoundingModel(analysis.model, {one.site: (one.path,) for one in seen})
        for name, errors in tqdm(probe_each(model, run, samples, count, seed), who, len(names), disable=None):
            for one in seen:
                found[one.site][1][name] = {METRIC: errors.get(one.site, 0.0)}
    return found


def draws_for(quantizers: int, outputs: int) -> int:
    """How many backwards to take for each output: as many as stay within a tenth of measuring, and at least two.

    It does not depend on what the clock says, so that the same call gives the same numbers.

    >>> draws_for(110, 1), draws_for(240, 1), draws_for(240, 4), draws_for(2000, 1)
    (2, 10, 2, 16)
    """
    left = _SHARE * _OF_WHOLE * quantizers - _BEFORE
    return min(_MOST, max(_LEAST, int(left / (_BACKWARD * max(outputs, 1)))))


def _refusal(x: Tensor | None, wanted: Tensor) -> str:
    """Why an output cannot be estimated; empty if it can."""
    if x is None or x.shape != wanted.shape:
        found = "none" if x is None else tuple(x.shape)
        return f"its shape is {tuple(wanted.shape)} in the baseline and {found} in the other model"
    return "" if x.requires_grad else "it has no gradient; does post_process leave torch?"
