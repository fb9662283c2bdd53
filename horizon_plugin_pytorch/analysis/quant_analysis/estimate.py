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
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real

METRIC = "MSE"  # what the gradients estimate
_DRAWS = 3  # backward passes for each output


def estimate(
    baseline: Subject, analysis: ModelSubject, batch: Any, outputs: Sequence[str] | None, post: PostProcess, who: str
) -> Measured:
    """The mean squared error that each quantizer alone gives each output, in one forward and a few backwards of each.

    What gradients cannot see, the weights of operators that are no layers, is measured.
    """
    comparison = OutputComparison(baseline, batch, post, [OutputMetric(METRIC, None, who)], who)
    wanted = comparison.wanted
    names = [name for name, x in wanted.items() if x.is_floating_point()] if outputs is None else list(outputs)
    missing = [name for name in names if name not in wanted]
    if missing or not names:
        what = f"output {missing[0]!r}" if missing else "output of real numbers"
        raise CheckError(f"{who}: the baseline gives no {what} on this batch.")
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
        return {name: _with_gradient(name, tensors, wanted[name], who) for name in names}

    model = RoundingModel(analysis.model, {one.site: (one.path,) for one in seen})
    samples = max(x.shape[0] if x.dim() else 1 for x in wanted.values())
    with analysis.quiet():
        for name, errors in tqdm(probe_each(model, run, samples, _DRAWS), who, len(names), disable=None):
            for one in seen:
                value = errors.get(one.site)
                found[one.site][1][name] = {METRIC: 0.0 if value is None else value.error}
    return found


def _with_gradient(name: str, tensors: dict[str, Any], wanted: Tensor, who: str) -> Tensor:
    x = real(tensors[name]) if name in tensors else None
    if x is None or x.shape != wanted.shape:
        shape = "none" if x is None else tuple(x.shape)
        raise CheckError(
            f"{who}: output {name} has the shape {tuple(wanted.shape)} in the baseline and {shape} in the analysed "
            "model: it cannot be compared."
        )
    if not x.requires_grad:
        raise CheckError(
            f"{who}: output {name} has no gradient, so it cannot be estimated: does post_process leave torch? Measure "
            "it, without use_sensitivity_v2, or name the others with outputs=."
        )
    return x
