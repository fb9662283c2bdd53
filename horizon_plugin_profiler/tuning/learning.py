"""The answer of `tune` once it has learned: each rung is measured, and taken back where it does not help."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from horizon_plugin_profiler.tuning.answer import Trial, TuningResult
from horizon_plugin_profiler.tuning.bench import Bench, quiet
from horizon_plugin_profiler.tuning.rungs import Learning, Rung, state_of
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.analysis.tuning.sites import Site
from horizon_plugin_pytorch.calibration.fingerprint import describe, digest
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize

LEARNED = "tuning_learned.pt"


def learn(
    result: TuningResult,
    bench: Bench,
    raised: Collection[Site],
    learning: Learning,
    out_dir: str | os.PathLike | None,
) -> None:
    """AdaRound and training of the answer, as far as they are asked for; the result has what came of them.

    Args:
        raised: the mixture that is the answer.
        out_dir: where what was learned is kept, so that the next call does not learn it again.
    """
    judge, target = bench.judge, result.target
    known = Ledger(
        None if out_dir is None else Path(out_dir) / LEARNED,
        f"{bench.ledger.key} {bench.key(raised)} {learning.key}",
        bench.ledger.resume,
    )
    with quiet():
        model = bench.with_setter(result.setter(), raised)
        if model is None:
            model = bench.prepared_with(result.setter())
        value = result.value if result.is_verified else bench.value_of(model, "the answer")
    known.require("model", f"{digest(describe(model)):016x}")
    for name, climb in learning.rungs.items():
        bench.bar.set_description(f"tune: {name}")
        before = state_of(model)

        def climbed(climb: Rung = climb, name: str = name) -> tuple[dict[str, Tensor], float]:
            with quiet():
                climb(model, bench.model)
                return state_of(model), bench.value_of(model, f"the answer after {name}")

        try:
            state, found = known.get(" then ".join([*result.learned, name]), climbed)
        except QuantizationConfigError as error:
            model.load_state_dict(before)
            set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
            result.notes.append(f"{name} is left out: {error}")
            continue
        met = None if target is None else judge.is_met(found, target)
        what, count = f"the answer after {name}", len(result.formats)
        result.steps.append(Trial(what, count, result.share, found, None, met, is_mixture=False))
        is_kept = judge.better(found, value)
        model.load_state_dict(state if is_kept else before)
        if is_kept:
            value = found
            result.learned.append(name)
        else:
            result.notes.append(f"{name} does not help ({found:.6g} after {value:.6g}), and is left out.")
    result.value, result.prepared_model = value, model
    if target is not None:
        result.is_met = judge.is_met(value, target)
    if result.learned:
        which = "that nothing is measured on" if judge.evaluate is None else "of calibration"
        result.notes.append(f"{' and '.join(result.learned)} learned from {len(learning.batches)} batches {which}.")
