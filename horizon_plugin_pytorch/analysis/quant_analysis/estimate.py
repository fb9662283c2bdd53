"""Sensitivity of all fake quantizers at once, by gradients: see `analysis.tuning.probe`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded
from horizon_plugin_pytorch.analysis.quant_analysis.sensitivity import Measured, OutputComparison
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.analysis.tuning.probe import probe_each
from horizon_plugin_pytorch.analysis.tuning.sites import WEIGHT, RoundingModel
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real

METRIC = "MSE"  # what the gradients estimate
REMEDY = "Measure them, without use_sensitivity_v2."


def estimate(
    baseline: Subject,
    analysis: ModelSubject,
    batch: Any,
    outputs: Sequence[str] | None,
    post: PostProcess,
    who: str,
    is_asked: bool = True,
) -> Measured:
    """The mean squared error that each quantizer alone gives each output, in one forward and a few backwards of each.

    What gradients cannot see, the weights of operators that are no layers, is measured.

    Args:
        outputs: their names; None is all.
        is_asked: has the user named them? Else those that have no gradient are left out: positions and counts, and with
            a warning what a post_process computes outside of torch.

    Raises:
        CheckError: an output that the user has named has no gradient.
    """
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
    with PartlyRounded(analysis, batch, who) as runs:
        found: Measured = {one.site: (one, {}) for one in runs.roundings}
        unseen = [one for one in runs.roundings if one.site.kind == WEIGHT and not isinstance(one.module, QATGemm)]
        for one in unseen:
            values = comparison.values(partial(runs.run, [one.quantizer]))
            found[one.site][1].update({name: values[name] for name in names if name in values})
        seen = [one for one in runs.roundings if one not in unseen]

    def run(model: nn.Module) -> dict[str, Tensor]:
        with comparison.selections.taking():
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

    model = RoundingModel(analysis.model, {one.site: (one.path,) for one in seen})
    samples = max(x.shape[0] if x.dim() else 1 for x in wanted.values())
    with analysis.quiet():
        estimates = probe_each(model, run, samples, _draws(len(seen), len(names)))
        for name, errors in tqdm(estimates, who, len(names), disable=None):
            for one in seen:
                value = errors.get(one.site)
                found[one.site][1][name] = {METRIC: 0.0 if value is None else value.error}
    return found


def _draws(sites: int, outputs: int) -> int:
    """Backward passes for each output: at least three, and more where all still takes a tenth of measuring or less.

    In forwards, a measurement of a site takes about 0.65, as what is before it does not run; a backward pass takes 1.3,
    and the rest five.

    >>> _draws(100, 1), _draws(300, 2), _draws(2000, 1)
    (3, 5, 8)
    """
    return min(8, max(3, int((0.065 * sites - 5) / (1.3 * outputs))))


def _refusal(x: Tensor | None, wanted: Tensor) -> str:
    """Why an output cannot be estimated; empty if it can."""
    if x is None or x.shape != wanted.shape:
        found = "none" if x is None else tuple(x.shape)
        return f"its shape is {tuple(wanted.shape)} in the baseline and {found} in the other model"
    return "" if x.requires_grad else "it has no gradient; does post_process leave torch?"
