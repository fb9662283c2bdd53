"""`tune`: the fewest operators in int16 (or float16) that keep a model's accuracy."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_profiler.tuning.answer import Bounds, Trial, TuningResult
from horizon_plugin_profiler.tuning.bench import Bench, Data, quiet
from horizon_plugin_profiler.tuning.budget import Budget
from horizon_plugin_profiler.tuning.judge import Evaluate, Judge
from horizon_plugin_profiler.tuning.learning import learn
from horizon_plugin_profiler.tuning.request import (
    allows_both_int16,
    check_request,
    check_seed,
    measured_on,
    on_march,
    prepare_arguments,
    thresholds,
)
from horizon_plugin_profiler.tuning.rungs import REWRITES, Learning, rewritten
from horizon_plugin_profiler.tuning.survey import Survey
from horizon_plugin_pytorch.analysis.check import RESULT_FILE, inspect_model
from horizon_plugin_pytorch.analysis.tuning.costs import Cost, cost_of
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.analysis.tuning.outputs import outside_inference
from horizon_plugin_pytorch.analysis.tuning.search import Additive, Search, compatible, gram_order, lowest_ratio
from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, WEIGHT, Site
from horizon_plugin_pytorch.calibration.batches import take_batches
from horizon_plugin_pytorch.calibration.fingerprint import describe, digest
from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    CheckError,
    QuantizationConfigError,
    require_module,
    warn,
)
from horizon_plugin_pytorch.march import March, get_march, require_march
from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy, QATMode, get_qat_mode
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.workflow.float_model import require_float

STATE = "tuning.pt"
_DRAWS = 3  # vectors of signs of a probe
_REMEASURED, _KEPT = 0.3, 12  # the share of the sites that is measured exactly, while so many forwards are left
_SHARE, _LEAST = 0.6, 30  # forwards for each operator, and for a small model
_LEFT = 0.5  # the share of the error of int8 from which int16 is said to leave too much
_ROUNDS, _MOST = 5, 0.9  # of float16: how often more is tried, and which share of what int16 leaves is taken each time


def tune(
    model: nn.Module,
    calibration_data: Iterable[Any],
    *,
    evaluate: Evaluate | None = None,
    target: float | None = None,
    max_loss: float | None = None,
    higher_is_better: bool = True,
    metric: str = "Cosine",
    int16_share: float | None = None,
    int16_operations: float | None = None,
    march: March | str | None = None,
    steps: int | None = None,
    samples: int = 16,
    both_int16: bool | None = None,
    float16: bool = True,
    int8_gemms: bool = False,
    equalize: bool = False,
    center: bool = False,
    smooth: bool = False,
    search_scales: bool = False,
    adaround: bool = False,
    train_steps: int = 0,
    own_scales: bool | Iterable[str] = False,
    fixed_scales: Mapping[str, float] | None = None,
    prepare_args: Mapping[str, Any] | None = None,
    out_dir: str | os.PathLike | None = "tuning",
    resume: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> TuningResult:
    """Find the fewest operators that need more than int8 for a model to stay as good as it must be.

    It follows the guide: the structure is checked, all-int16 gives the upper bound, all-int8 the lower one; then the
    operators that matter are found by a probe (a few backwards instead of a forward each), the first of them are
    measured, and the smallest set that meets the target is searched for, in the formats that the chip has. Where int16
    is not enough, operators become float16 first. `model` is not changed. The same arguments give the same answer.

    Args:
        model: in float, as `prepare` takes it.
        calibration_data: batches, as `calibrate` takes them; all are kept in memory.
        evaluate: takes a model and gives a number; called on the float model and on mixtures, in eval mode. What it
            does to them is undone, and random numbers begin anew in each call. None judges by how far the outputs are
            from those in float.
        target: the value to reach: of `evaluate`, or of `metric` (0.99 for Cosine).
        max_loss: instead of it, how much worse than the float model the value of `evaluate` may be.
        higher_is_better: of the value of `evaluate`.
        metric: Cosine, MSE, L1, KL or SQNR; of several outputs the worst counts.
        int16_share: instead of a target, the largest share of operators that may be raised: the best value for it.
        int16_operations: the same, as a share of the multiply-accumulates that may have an int16 operand.
        march: the chip; None takes the one that is set.
        steps: how many batches to take; None takes all.
        samples: how many of the first samples to measure on, at least.
        both_int16: may input and weight of a layer both be int16? None: on nash-h and nash-p; J6E and J6M take it from
            OE 3.5 on.
        float16: may operators become float16, on nash, if int16 is not enough?
        int8_gemms: keep int8 for weights and for what layers and products of matrices multiply, as
            `get_int8_gemm_setter` does: only other results may be raised, and none becomes float16. A QuantStub makes
            int8 where a layer reads what is raised.
        equalize, center, smooth: rewrite a copy of the model first, by `equalize`, `center_norms` and `smooth_norms`:
            the answer is for that copy, `result.float_model`. The report has all-int8 before each of them.
        search_scales: choose the ranges of int8 results by what they do to the outputs, on the samples that are
            measured on, with `search_scales`: call it after `calibrate` with the answer, too. It takes a forward or two
            for each range that promises something, which count as calibration.
        adaround: at last learn how to round the weights of the answer, with `weight_reconstruction`.
        train_steps: at last train the answer for so many batches, towards the outputs of the float model, with its
            scales as they are; no labels are needed. This and AdaRound learn from the batches that nothing is measured
            on, or from all where `evaluate` judges. Each is a row of the report, and is kept only where it helps: the
            result is `result.prepared_model`, and as ``tuned_model.pt`` in `out_dir`.
        own_scales: as for `prepare`: calls of shared modules get scales of their own. Tell `prepare` the same:
            ``prepare(model, inputs, result.setter(), **result.prepare_args)``.
        fixed_scales: largest magnitudes of operators whose range is known, by path: they fix the scale, in the setter
            of the answer, too.
        prepare_args: what else to tell `prepare`, such as ``{"method": "symbolic"}``.
        out_dir: where ``tuned_formats.py``, the report, its page, the check and the state of the run go; None writes
            none.
        resume: go on from the state of an earlier run with the same model, data and settings.
        progress: show a bar with the time that is left.

    >>> import torch
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper
    >>> net = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))).eval()
    >>> data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(0))]
    >>> result = tune(net, data, target=0.9, march="nash-m", out_dir=None, progress=False)
    >>> result.is_met, result.formats
    (True, {})
    """
    require_module(model, "tune")
    require_float(model, "tune")
    judge = Judge.of(evaluate, metric, higher_is_better)
    check_request(judge, target, max_loss, int16_share, int16_operations)
    if int8_gemms and int16_operations is not None:
        raise QuantizationConfigError("tune: with int8_gemms no multiply-accumulate is of int16; give int16_share.")
    arguments = prepare_arguments(prepare_args, own_scales)
    fixed = thresholds(fixed_scales)
    check_seed(seed)
    with on_march(march), outside_inference(), undisturbed(model):
        model.eval()
        batches = take_batches(model, calibration_data, steps, None, "tune")
        if steps is not None and len(batches) < steps:
            warn(f"tune: the data end after {len(batches)} of {steps} batches.", CalibrationWarning)
        asked = {"equalize": equalize, "center_norms": center, "smooth_norms": smooth}
        rewrites = [name for name in REWRITES if asked[name]]
        copies, left = rewritten(model, batches, rewrites)
        versions = [model, *copies]
        measured = measured_on(batches, samples)
        learned = batches[len(measured) :] if evaluate is None else batches
        learning = Learning.of(adaround, train_steps, learned)
        settings: list[Any] = [judge.metric, evaluate, arguments, fixed, int8_gemms]
        settings += [search_scales] if search_scales else []
        settings += [rewrites, describe(model)] if rewrites else []
        about = [describe(versions[-1]), batches, len(measured), _surroundings(settings), seed, _DRAWS]
        key, level = f"{digest(about):016x}", ConsistencyStrategy.get_consistency_level()
        ledger = Ledger(None if out_dir is None else Path(out_dir) / STATE, key, resume)
        with tqdm(desc="tune", disable=not progress, unit="forward") as bar:
            bench = Bench(
                versions[-1].eval(), Data(batches, measured), judge, ledger, bar,
                arguments, fixed, int8_gemms, searched=samples if search_scales else None,
            )  # fmt: skip
            bar.total = _allowed(bench)
            tuning = _Tuning(
                bench, judge, target, max_loss, allows_both_int16(both_int16), float16 and not int8_gemms, seed, out_dir
            )
            tuning.rewrites = dict(zip(rewrites, versions[:-1], strict=True))
            tuning.learning = learning
            if rewrites:
                told = " and ".join(f"`{name}(model, batches)`" for name in rewrites)
                tuning.notes.append(f"The answer is for the model after {told}, which is `result.float_model`.")
            for name, reasons in left.items():
                told = "; ".join(f"`{path}` ({why})" for path, why in reasons.items())
                tuning.notes += [f"{name} leaves as they are: {told}."] if told else []
            if level:
                tuning.notes.append(f"Call `ConsistencyStrategy.set_consistency_level({level})` before `prepare`.")
            if search_scales:
                tuning.notes.append(f"After `calibrate` call `search_scales(model, batches, samples={samples})`.")
            return tuning.run(int16_share, int16_operations)


def _surroundings(settings: list[Any]) -> list[Any]:
    """Settings of a call, between those of the process that models are prepared with."""
    level, mode = ConsistencyStrategy.get_consistency_level(), get_qat_mode()
    others = [f"consistency level {level}"] if level else []
    others += [str(mode)] if mode != QATMode.FuseBN else []
    return [str(require_march("tune")), *settings, *others]


def _allowed(bench: Bench) -> int:
    """How many forwards a run may take."""
    return max(_LEAST, int(_SHARE * bench.survey.operators))


class _Tuning:
    """One call of `tune`, on a bench."""

    def __init__(
        self,
        bench: Bench,
        judge: Judge,
        target: float | None,
        max_loss: float | None,
        dual: bool,
        float16: bool,
        seed: int,
        out_dir: str | os.PathLike | None,
    ) -> None:
        self.bench, self.judge, self.dual, self.float16, self.seed = bench, judge, dual, float16, seed
        self.out_dir = out_dir
        self.plain = bench  # without float16
        self.half_reasons: dict[str, str] = {}
        self.steps: list[Trial] = []
        self.notes: list[str] = []
        self.rewrites: dict[str, nn.Module] = {}  # the model before each of them
        self.learning = Learning()
        self.asked: set[str] = set()
        self.float_value = 1.0 if judge.metric == "Cosine" else math.inf if judge.metric == "SQNR" else 0.0
        if judge.evaluate is not None:
            with quiet():
                self.float_value = bench.ledger.get("float", lambda: judge.float_value(bench.model))
        self.target = target
        if max_loss is not None:
            self.target = self.float_value - max_loss if judge.higher_is_better else self.float_value + max_loss

    # -- mixtures

    def try_(self, raised: Collection[Site], what: str) -> float:
        """The value of a mixture, noted as a step."""
        value = self.bench.value(raised, what)
        key = self.bench.key(raised)
        if key not in self.asked:
            self.asked.add(key)
            count = len(self.bench.formats(raised))
            met = None if self.target is None else self.judge.is_met(value, self.target)
            share = count / max(self.bench.survey.operators, 1)
            self.steps.append(Trial(what, count, share, value, self.bench.known_error(raised), met))
        return value

    def meets(self, raised: Collection[Site], what: str) -> bool:
        """Does a mixture meet the target?"""
        assert self.target is not None
        return self.judge.is_met(self.try_(raised, what), self.target)

    def conflicts(self, one: Site, other: Site) -> bool:
        """Would a layer have an int16 input and an int16 weight, on a chip that does not multiply these?"""
        if self.dual or {one.kind, other.kind} != {ACTIVATION, WEIGHT}:
            return False
        weight, activation = (one, other) if one.kind == WEIGHT else (other, one)
        return activation.operator in self.bench.survey.producers.get(weight.operator, ())

    # -- steps of the guide

    def check(self) -> None:
        """Look at the structure."""
        bench = self.bench
        try:
            with quiet():
                found = inspect_model(bench.mixed.raise_to(()), bench.data.measured[0], self.out_dir)
        except (CheckError, OSError) as error:
            self.notes.append(f"The check of the structure did not finish: {error}")
            return
        scaled = bench.survey.names  # a DeQuantStub may serve all outputs
        several = [row.name for row in found.called_times if row.count > 1 and row.name in scaled]
        if found.unfused:
            self.notes.append(f"{len(found.unfused)} groups of modules could be fused and are not: see {RESULT_FILE}.")
        if several:
            self.notes.append(
                f"Called more than once, with one scale for all calls: {', '.join(several[:8])}. If accuracy is not "
                "enough, own_scales=True gives each call its own."
            )

    def sensitivities(self) -> tuple[Additive[Site], dict[Site, Tensor]]:
        """Errors of all sites alone: the probe's, and for the largest of them measured ones with their vectors."""
        bench = self.bench
        bench.bar.set_description("tune: probe")
        found = bench.estimated((), _DRAWS, self.seed)
        errors = {site: estimate.error for site, estimate in found.items()}
        left = {site: estimate.wide for site, estimate in found.items()}
        unseen = [site for site in bench.sites if site not in errors]
        ranked = sorted(errors, key=lambda site: -errors[site])
        bench.bar.set_description("tune: sensitivity")
        vectors: dict[Site, Tensor] = {}
        room = max(int(_allowed(bench) - bench.forwards) - _KEPT, 1)
        count = min(math.ceil(_REMEASURED * len(bench.sites)), room)
        for site in unseen + ranked[: max(1, count - len(unseen))]:
            narrow, wide = bench.mixed.steps(site)
            share = left[site] / errors[site] if errors.get(site) else (wide / narrow) ** 2
            errors[site], vectors[site] = bench.measured(site)
            left[site] = errors[site] * min(share, 1.0)
        in_order = {site: errors[site] for site in bench.sites}
        return Additive(in_order, {site: left[site] for site in bench.sites}), vectors

    def run(self, share: float | None, operations: float | None) -> TuningResult:
        """The whole call."""
        bench = self.bench
        bench.bar.set_description("tune: int8 and int16")
        self.check()
        if bench.judge.evaluate is None:
            self.notes += [
                f"Output {number} holds {value:g} many times, as masks write it, and beside it nothing else shows in "
                "a comparison of outputs. Mask with -inf, which is left out, or judge by `evaluate`."
                for number, value in bench.wanted.fills().items()
            ]
        activations = [site for site in bench.sites if site.kind == ACTIVATION]
        self.before_rewriting()
        errors = [bench.error(())]
        narrow = self.try_((), "all int8")
        errors.append(bench.error(activations))
        wide = self.try_(activations, "all int16, weights int8")
        if errors[1] > _LEFT * errors[0] and not self._is_enough(narrow) and not self._is_enough(wide):
            self.notes.append(
                f"All int16 leaves {errors[1] / errors[0]:.0%} of the error of all int8, so it is not the steps of "
                "results that are too large. Look at the sensitivity of weights, which are int8 in both, and whether "
                "calibration covers the data: more batches, batches that are alike, another observer, `fixed_scales`."
            )
        if self._is_enough(narrow):
            return self.answer((), {}, None, True)
        additive, vectors = self.sensitivities()
        if self.target is None:
            by_gram = gram_order(bench.sites, vectors, additive.errors)
            by_sum, by_gram = (compatible(order, self.conflicts) for order in (additive.order(), by_gram))
            return self.within(additive, by_sum, by_gram, share, operations)
        if self.meets(self.widest(additive), ""):
            return self.search(additive, vectors)
        return self.raise_further(additive)

    def _is_enough(self, value: float) -> bool:
        return self.target is not None and self.judge.is_met(value, self.target)

    def before_rewriting(self) -> None:
        """Rows for int8 before each function that rewrites the model, and before ranges are searched."""
        models = dict(self.rewrites)
        if self.bench.searched is not None:
            models["search_scales"] = self.bench.model
        for name, model in models.items():
            what = f"all int8 before {name}"
            value = self.bench.int8_value(model, what)
            met = None if self.target is None else self.judge.is_met(value, self.target)
            self.steps.append(Trial(what, 0, 0.0, value, None, met, is_mixture=False))

    def search(self, additive: Additive[Site], vectors: Mapping[Site, Tensor]) -> TuningResult:
        """The fewest sites, where the widest mixture is known to meet the target."""
        by_gram = gram_order(self.bench.sites, vectors, additive.errors)
        orders = [compatible(order, self.conflicts) for order in (additive.order(), by_gram)]
        if not self.meets(orders[0], ""):
            orders = [[s for s in order if s.kind == ACTIVATION] for order in (additive.order(), by_gram)]
        return self.smallest(additive, *orders)

    def smallest(self, additive: Additive[Site], by_sum: list[Site], by_gram: list[Site]) -> TuningResult:
        """The fewest sites that meet the target."""
        bench = self.bench
        bench.bar.set_description("tune: search")
        tries = max(8, int(_allowed(bench) - bench.forwards) - 2)
        stage = ["the {} most sensitive results and weights"]

        def meets(raised: frozenset[Site]) -> bool:
            besides = f"{len(bench.half)} in float16, " if bench.half else ""
            return self.meets(raised, besides + stage[0].format(len(raised)))

        search: Search[Site] = Search(meets, tries)
        search.asked[frozenset(by_sum)] = True
        first = search.shortest(by_sum, len(by_sum), self._guess(additive, by_sum))
        chosen = by_sum[:first]
        stage[0] = "the {} most sensitive together, by their products"
        if first > 1 and search.left > 3 and search.ask(by_gram[: first - 1]):
            chosen = by_gram[: search.shortest(by_gram, first - 1)]
        stage[0] = "{}: one left out, or one for two"
        chosen = search.refine(chosen, [site for site in by_sum if site not in chosen], additive.gain)
        return self.answer(chosen, additive.errors, additive, True)

    def _guess(self, additive: Additive[Site], order: list[Site]) -> int:
        """Where to look first: where the error has fallen as far as the value has to rise, if both go together."""
        assert self.target is not None
        if self.judge.evaluate is None and self.judge.metric == "Cosine":
            found = additive.fewest(2 * (1 - self.target))
            return len(order) // 2 if found is None else found
        return max(1, len(order) // 8)

    def within(
        self,
        additive: Additive[Site],
        by_sum: list[Site],
        by_gram: list[Site],
        share: float | None,
        operations: float | None,
    ) -> TuningResult:
        """The best mixture for a budget, and what smaller ones give."""
        self.bench.bar.set_description("tune: budget")
        budget = Budget.of(self.bench, share, operations)
        candidates: dict[str, list[Site]] = {}
        for part in (0.25, 0.5, 0.75, 1.0):
            solved = set(compatible(additive.best_within(budget.costs, part * budget.limit), self.conflicts))
            candidates[f"{part:.0%} of the budget, by the sum"] = [site for site in by_sum if site in solved]
        candidates["the budget, by sensitivity together"] = budget.fill(by_gram)
        candidates["the budget, by sensitivity"] = budget.fill(by_sum)
        best: list[Site] = []
        for what, raised in candidates.items():
            value = self.try_(raised, what)
            if self.judge.better(value, self.try_(best, "all int8")):
                best = raised
        return self.answer(best, additive.errors, additive, True)

    def raise_further(self, additive: Additive[Site]) -> TuningResult:
        """int16 is not enough: float16 for what rounds worst in int16 and for who reads it, then int16 for the rest."""
        self.notes.append("int16 is not enough for this target.")
        best = self.bench, self.widest(additive), additive
        for _ in range(_ROUNDS if self.float16 else 0):
            half = self.worst(additive)
            if not half - self.bench.half:
                break
            self.bench = replace(self.bench, half=self.bench.half | half, survey=Survey(), forwards=self.bench.forwards)
            additive, vectors = self.sensitivities()
            raised = self.widest(additive)
            if self.judge.better(self.bench.value(raised, ""), best[0].value(best[1], "")):
                best = self.bench, raised, additive
            if self.meets(raised, ""):
                told = ", ".join(sorted(self.bench.half))
                self.notes.append(f"In float16, as int16 does not do for it: {told}.")
                return self.search(additive, vectors)
        self.bench, raised, additive = best
        return self.answer(raised, additive.errors, additive, False)

    def widest(self, additive: Additive[Site]) -> list[Site]:
        """Of the two widest mixtures, weights included and results alone, the better one."""
        whole = compatible(additive.order(), self.conflicts)
        results = [site for site in self.bench.sites if site.kind == ACTIVATION]
        rest = f"{len(self.bench.half)} in float16, the others int16" if self.bench.half else "all int16"
        told = "weights too" if self.dual else "of input and weight of a layer what helps more"
        of_whole, of_results = self.try_(whole, f"{rest}, {told}"), self.try_(results, f"{rest}, weights int8")
        return whole if self.judge.better(of_whole, of_results) else results

    def worst(self, additive: Additive[Site]) -> frozenset[str]:
        """The operators that have most of what int16 leaves, and those that read their results, if float16 has them."""
        survey, left = self.bench.survey, additive.left
        total = sum(left.values())
        chosen: set[str] = set()
        for site in sorted(left, key=lambda s: -left[s]):
            if total <= 0 or sum(left[s] for s in left if s.operator in chosen) >= _MOST * total:
                break
            what, share = "result" if site.kind == ACTIVATION else "weight", left[site] / total
            self.half_reasons.setdefault(site.operator, f"its {what} alone has {share:.1%} of what int16 leaves")
            takers = survey.takers.get(site.operator, ()) if site.kind == ACTIVATION else ()
            for taker in takers:
                self.half_reasons.setdefault(taker, f"it reads `{site.operator}`, which is float16")
            chosen |= {site.operator, *takers}
        return frozenset(chosen & survey.has_float16 - self.bench.fixed.keys())

    # -- the answer

    def answer(
        self, chosen: Collection[Site], errors: Mapping[Site, float], additive: Additive[Site] | None, is_met: bool
    ) -> TuningResult:
        """All that is known, and the files."""
        bench = self.bench
        raised = frozenset(chosen)
        bench.bar.set_description("tune: answer")
        value = self.bench.value(raised, "the answer")
        order = [] if additive is None else additive.order()
        total = sum(errors.values()) or 1.0
        reasons = {path: self.half_reasons.get(path, "") for path in bench.half}
        for site in sorted(raised, key=lambda s: -errors[s]):
            what, alone = "result" if site.kind == ACTIVATION else "weight", errors[site] / total
            told = f"rank {order.index(site) + 1} of {len(order)}: its {what} alone gives {alone:.1%} of the error"
            told += "" if additive is None else f", {additive.left[site] / total:.1%} in int16"
            reasons[site.operator] = "; ".join(filter(None, [reasons.get(site.operator, ""), told]))
        result = TuningResult(
            bench.formats(raised), reasons, self.judge.name, value, self.float_value, self.target, is_met,
            bench.survey.operators, str(get_march()), type(bench.model).__name__, self.steps, None,
            [[s.operator, s.kind, bench.survey.names.get(s.operator, ""), errors[s], "qint8"] for s in order],
            [] if additive is None else [additive.error(order[:count]) for count in range(len(order) + 1)],
            notes=self.notes, float_model=bench.model, thresholds=dict(bench.fixed), prepare_args=dict(bench.prepared),
            int8_gemms=bench.int8_gemms, searched=bench.searched, rewrites=list(self.rewrites),
            higher_is_better=self.judge.higher_is_better,
        )  # fmt: skip
        with quiet():
            result.costs = {"int8": self._cost(self.plain, ()), "the answer": self._cost(bench, raised)}
        if additive is not None and is_met and self.target is not None:
            result.bounds = self.bounds(additive, raised)
        result.forwards = bench.forwards
        result.is_verified = bench.gives_the_same(result.setter(), raised)
        if not result.is_verified:
            result.notes.append(
                "The model that is prepared with this setter gives other numbers than the mixture that was measured: "
                "evaluate it before you rely on the value above."
            )
        if self.learning.rungs:
            learn(result, self.bench, raised, self.learning, self.out_dir)
        if self.out_dir is not None:
            result.write(self.out_dir)
        return result

    def _cost(self, bench: Bench, raised: Collection[Site]) -> Cost:
        return cost_of(bench.mixed.raise_to(raised), bench.data.measured[0])

    def bounds(self, additive: Additive[Site], chosen: frozenset[Site]) -> Bounds:
        """How few could do."""
        bench = self.bench
        met, real = [bench.error(chosen)], bench.real_errors()
        assert self.target is not None
        for raised, error in real.items():
            if bench.key(raised) in self.asked and self.judge.is_met(bench.value(raised, ""), self.target):
                met.append(error)
        rho = lowest_ratio(additive, real)
        error = max(met)
        half = len(bench.half)
        return Bounds(len(chosen), additive.fewest(error), additive.fewest(error, rho), rho, error, half)
