"""Sensitivity of all fake quantizers at once, by gradients: see `analysis.tuning.probe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded, Site
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.sensitivity import OutputComparison, Values
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.analysis.tuning import sites as formats
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted
from horizon_plugin_pytorch.analysis.tuning.probe import probe
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real

METRIC = "MSE"  # what the gradients estimate
_DRAWS = 3  # backward passes for each output


def estimate(
    baseline: Subject, analysis: ModelSubject, batch: Any, outputs: Sequence[str] | None, post: PostProcess, who: str
) -> dict[tuple[str, str], tuple[Site, Values]]:
    """The mean squared error that each quantizer alone gives each output, in a few runs in all.

    What gradients cannot see, the weights of operators that are no layers, is measured.
    """
    metric = OutputMetric(METRIC, None, who)
    comparison = OutputComparison(baseline, batch, post, [metric], who)
    names = [name for name, x in comparison.wanted.items() if x.is_floating_point()] if outputs is None else outputs
    with PartlyRounded(analysis, batch, who) as runs:
        found: dict[tuple[str, str], tuple[Site, Values]] = {site.key: (site, {}) for site in runs.sites}
        unseen = [site for site in runs.sites if site.kind == "weight" and not isinstance(site.module, QATGemm)]
        for site in unseen:
            values = comparison.values(lambda site=site: runs.run([site.quantizer]))  # type: ignore[misc]
            found[site.key][1].update({name: values[name] for name in names if name in values})
        sites = [site for site in runs.sites if site not in unseen]
    with analysis.quiet():
        for name in names:
            if name not in comparison.wanted:
                raise CheckError(f"{who}: the baseline gives no output {name!r} on this batch.")
            model = _OneFormat(analysis, sites, name, post, comparison.selections)
            wanted = comparison.wanted[name]
            errors = probe(model, [(batch,)], Wanted(((wanted,),), (wanted.numel() ** -0.5,)), _DRAWS)
            for site in sites:
                value = errors.get(formats.Site(*site.key))
                found[site.key][1][name] = {METRIC: 0.0 if value is None else value.error}
    return found


class _OneFormat(formats.MixedModel):
    """A model with the formats that it has, for the probe: all of its sites, and one output."""

    def __init__(
        self, subject: ModelSubject, sites: Sequence[Site], output: str, post: PostProcess, selections: Selections
    ) -> None:
        self.model = _Output(subject, output, post, selections)
        paths = {quantizer: path for path, quantizer in formats.quantizers_of(subject.model).items()}
        self._narrow = self._wide = {path: quantizer for quantizer, path in paths.items()}
        self.quantizers = {formats.Site(*site.key): (paths[site.quantizer],) for site in sites}
        self.raised = frozenset()


class _Output(nn.Module):
    """One output of a model, as a function of a batch."""

    def __init__(self, subject: ModelSubject, output: str, post: PostProcess, selections: Selections) -> None:
        super().__init__()
        self.inner = subject.model
        self._subject, self._output, self._post, self._selections = subject, output, post, selections

    def get_submodule(self, target: str) -> nn.Module:
        """The model's, by its own paths."""
        return self.inner.get_submodule(target)

    def forward(self, batch: Any) -> Tensor:
        """The output that is asked for, with its gradient."""
        with self._selections.taking():
            out = self._subject.run(batch)
            out = out if self._post is None else self._post(out)
        found = {"-".join(map(str, path)): x for path, x in located([out])}
        x = real(found[self._output])
        if torch.is_grad_enabled() and not x.requires_grad:
            raise CheckError(
                f"output {self._output} has no gradient, so it cannot be estimated: does post_process leave torch? "
                "Measure it, without use_sensitivity_v2."
            )
        return x
