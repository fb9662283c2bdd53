"""A float model in every mixture of formats, with what is known of each: values, errors, sensitivities."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_profiler.tuning.answer import templates
from horizon_plugin_profiler.tuning.judge import Judge
from horizon_plugin_profiler.tuning.survey import Survey
from horizon_plugin_pytorch.analysis.tuning.followers import leaders_of
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, run
from horizon_plugin_pytorch.analysis.tuning.probe import Estimate, measure, probe
from horizon_plugin_pytorch.analysis.tuning.ranges import find_scales
from horizon_plugin_pytorch.analysis.tuning.sites import (
    ACTIVATION,
    WEIGHT,
    MixedModel,
    RoundingModel,
    Site,
    quantizers_of,
)
from horizon_plugin_pytorch.calibration.calibrate import calibrate
from horizon_plugin_pytorch.calibration.fingerprint import describe, digest
from horizon_plugin_pytorch.config.qconfig_setter import QconfigSetter
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import (
    AccumulatorWarning,
    QuantizationConfigError,
    QuantizationWarning,
    TableWarning,
)
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.qconfig import get_qconfig
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.workflow.prepare import prepare

HALF = {"weight": torch.float16, "output": torch.float16}
_SKETCH = 4096  # numbers that stand for an error of the outputs: products of two errors are kept, on average


@dataclass
class Data:
    """Batches to calibrate with, and the first of them, to measure with."""

    calibration: list[Any]
    measured: list[Any]


@dataclass
class Bench:
    """One model on the bench.

    Args:
        model: in float.
        prepared: what to tell `prepare`.
        fixed: largest magnitudes by operator, which fix scales.
        int8_gemms: stays int8 what layers and products of matrices multiply?
        half: operators that are float16 in all mixtures.
        searched: on so many samples, ranges are searched by `search_scales`; None leaves those of calibration.
    """

    model: nn.Module
    data: Data
    judge: Judge
    ledger: Ledger
    bar: tqdm
    prepared: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    int8_gemms: bool = False
    half: frozenset[str] = frozenset()
    searched: int | None = None
    survey: Survey = field(default_factory=Survey)
    forwards: float = 0.0

    def __post_init__(self) -> None:
        self.seen: set[str] = set()  # what this run has asked for: it counts once, whether it was computed or read
        self.mixed = MixedModel(self._calibrated(qint8), self._calibrated(qint16))
        # What prepare puts between formats cannot be named in a setter: it follows what is around it.
        self.sites = [site for site in self.mixed.sites if site.operator in self.survey.names]
        followers = [site for site in self.mixed.sites if site.operator not in self.survey.names]
        if followers:
            self.mixed.leaders = leaders_of(self.mixed.model, self.data.measured[0], followers, self.sites)
        self._number = {site: i for i, site in enumerate(self.sites)}
        self._prefix = ",".join(sorted(self.half))
        with self.mixed.in_float() as model:
            self.wanted = Wanted.of(run(model, self.data.measured))
        self._count(1)

    def _calibrated(self, dtype: Any) -> nn.Module:
        """The model with one format wherever the chip has it, calibrated."""
        weight = qint8 if self.int8_gemms else dtype
        rules = {"": {"weight": weight, "output": dtype}, **dict.fromkeys(sorted(self.half), HALF)}
        setter = QconfigSetter(get_qconfig(), templates(rules, self.fixed, self.int8_gemms), save_dir=None)
        with quiet():  # formats that a chip does not have are corrected, and none is kept
            model = prepare(self.model, self.data.calibration[0], (self.survey, setter), out_dir=None, **self.prepared)
        quantizers = quantizers_of(model)
        if not quantizers:
            raise QuantizationConfigError(
                "tune: nothing of the model is quantized. Give it a QuantStub where its inputs enter, and a qconfig "
                "that is not None."
            )
        self.ledger.require(f"{dtype} {','.join(sorted(self.half))}", f"{digest(describe(model)):016x}")
        with quiet():

            def scales() -> dict[str, Tensor]:
                calibrate(model, self.data.calibration, patience=0, progress=False)
                return {path: q.scale.detach().clone() for path, q in quantizers.items() if q.has_statistics}

            def searched() -> dict[str, Tensor]:
                _with_scales(model, self.ledger.get(f"plain {name}", scales))
                self._search(model, narrow)
                return {path: q.scale.detach().clone() for path, q in quantizers.items() if q.has_statistics}

            half = ",".join(sorted(self.half))
            name, narrow = f"{dtype} {half}", self.ledger.values.get(f"scales {qint8} {half}", {})
            known = self.ledger.get(f"scales {name}", scales if self.searched is None else searched)
            return _with_scales(model, known)

    def _search(self, model: nn.Module, known: Mapping[str, Tensor]) -> None:
        """Find the ranges of int8 results, but for those that another mixture has already: they are the same."""
        if self.searched is None:
            return
        for path, quantizer in quantizers_of(model).items():
            if path in known and quantizer.dtype == qint8 and not quantizer.is_fixed:
                quantizer.set_qparams(known[path])
        with RoundingModel(model, {}).in_float():
            wanted = Wanted.of(run(model, self.data.measured))
        find_scales(model, self.data.measured, wanted, {path.rpartition(".")[0] for path in known})

    def with_setter(self, setter: Any, raised: Collection[Site]) -> nn.Module | None:
        """The model prepared with a setter, with the scales that a mixture has; None if other scales are fixed.

        Where prepare puts QuantStubs between formats it is calibrated.
        """
        if self.mixed.has_stubs_between:  # which have other names in every mixture
            return self.prepared_with(setter)
        model = prepare(self.model, self.data.calibration[0], setter, out_dir=None, **self.prepared)
        mixture = quantizers_of(self.mixed.raise_to(raised))
        fixed = [
            {path: q.scale.tolist() for path, q in found.items() if q.is_fixed}
            for found in (mixture, quantizers_of(model))
        ]
        if fixed[0] != fixed[1]:
            return None
        return _with_scales(model, {path: q.scale for path, q in mixture.items() if q.has_statistics})

    def gives_the_same(self, setter: Any, raised: Collection[Site]) -> bool:
        """Does the model that is prepared anew with a setter give the very numbers of a mixture, with its scales?"""
        with quiet():
            expected = run(self.mixed.raise_to(raised), self.data.measured)
            model = self.with_setter(setter, raised)
            found = None if model is None else run(model, self.data.measured)
        return found is not None and all(
            torch.equal(x, y)
            for one, other in zip(found, expected, strict=True)
            for x, y in zip(one, other, strict=True)
        )

    def prepared_with(self, setter: Any) -> nn.Module:
        """The model prepared with a setter and calibrated."""
        model = prepare(self.model, self.data.calibration[0], setter, out_dir=None, **self.prepared)
        calibrate(model, self.data.calibration, patience=0, progress=False)
        self._search(model, {})
        return _with_scales(model, {})

    def value_of(self, model: nn.Module, what: str) -> float:
        """What a model is judged by; it counts, and is not kept."""
        self._count(1)
        if self.judge.evaluate is None:
            return self.judge.compared(run(model, self.data.measured), self.wanted)
        return self.judge.value(model, what)

    def int8_value(self, model: nn.Module, what: str) -> float:
        """What another float model, that computes the same, is judged by in int8, with the ranges of calibration."""

        def compute() -> float:
            rules = {"": {"weight": qint8, "output": qint8}}
            setter = QconfigSetter(get_qconfig(), templates(rules, self.fixed, self.int8_gemms), save_dir=None)
            with quiet():
                prepared = prepare(model, self.data.calibration[0], setter, out_dir=None, **self.prepared)
                calibrate(prepared, self.data.calibration, patience=0, progress=False)
                return self.value_of(_with_scales(prepared, {}), what)

        if f"int8 {what}" in self.ledger.values:
            self._count(1)
        return self.ledger.get(f"int8 {what}", compute)

    def _count(self, forwards: float) -> None:
        self.forwards += forwards
        self.bar.update(forwards)

    def key(self, raised: Collection[Site]) -> str:
        """A name for a mixture."""
        return f"{self._prefix}|{','.join(map(str, sorted(self._number[site] for site in raised)))}"

    def _outputs(self, raised: Collection[Site]) -> tuple[float, float]:
        """The squared relative error of a mixture, and how it compares."""
        key = self.key(raised)

        def compute() -> tuple[float, float]:
            with quiet():
                outputs = run(self.mixed.raise_to(raised), self.data.measured)
            value = self.judge.compared(outputs, self.wanted) if self.judge.evaluate is None else 0.0
            return self.wanted.error(outputs), value

        if f"outputs {key}" not in self.seen:
            self.seen.add(f"outputs {key}")
            found = self.ledger.get(f"outputs {key}", compute)
            self._count(1)
            return found
        return self.ledger.get(f"outputs {key}", compute)

    def error(self, raised: Collection[Site]) -> float:
        """The squared relative error of the outputs of a mixture."""
        return self._outputs(raised)[0]

    def known_error(self, raised: Collection[Site]) -> float | None:
        """The same, if it was measured."""
        found = self.ledger.values.get(f"outputs {self.key(raised)}")
        return None if found is None else found[0]

    def real_errors(self) -> dict[frozenset[Site], float]:
        """The errors of all mixtures whose outputs this run has compared."""
        found = {}
        for name in sorted(self.seen):
            kind, _, key = name.partition(" ")
            if kind == "outputs" and key.startswith(f"{self._prefix}|"):
                numbers = key.rpartition("|")[2].split(",")
                found[frozenset(self.sites[int(n)] for n in numbers if n)] = self.ledger.values[name][0]
        return found

    def value(self, raised: Collection[Site], what: str) -> float:
        """What a mixture is judged by."""
        if self.judge.evaluate is None:
            return self._outputs(raised)[1]
        name = f"value {self.key(raised)}"

        def compute() -> float:
            with quiet():
                return self.judge.value(self.mixed.raise_to(raised), what)

        if name not in self.seen:
            self.seen.add(name)
            self._count(1)
        return self.ledger.get(name, compute)

    def estimated(self, raised: Collection[Site], draws: int, seed: int) -> dict[Site, Estimate]:
        """The probe's estimate of the error of each site alone, with these raised."""

        def compute() -> dict[str, list[float]]:
            self.mixed.raise_to(raised)
            with self._plain():
                found = probe(self.mixed, self.data.measured, self.wanted, draws, seed)
            return {str(self._number[site]): list(value) for site, value in found.items() if site in self._number}

        found = self.ledger.get(f"probe {self.key(raised)}", compute)
        self._count(PROBE + 2 * draws)
        return {self.sites[int(number)]: Estimate(*values) for number, values in found.items()}

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """In here int8 results have the ranges of calibration, which clip little.

        A range that was searched for is small for a tensor alone. What it clips, others clip as well, and such errors
        do not add up as those of rounding do: which results need int16 is seen before.
        """
        if self.searched is None:
            yield
            return
        half = ",".join(sorted(self.half))
        plain, chosen = (self.ledger.values[f"{kind} {qint8} {half}"] for kind in ("plain", "scales"))
        self.mixed.set_narrow(plain)
        try:
            yield
        finally:
            self.mixed.set_narrow(chosen)

    def measured(self, site: Site) -> tuple[float, Tensor]:
        """The documented sensitivity of a site in int8, as an error and as a short form of the vector."""

        def compute() -> tuple[float, Tensor]:
            self.mixed.raise_to(())
            with self._plain():
                vector = measure(self.mixed, site, self.data.measured, self.wanted)
            return float(vector.double().square().sum()), sketch(vector)

        found = self.ledger.get(f"site {self._prefix}|{self._number[site]}", compute)
        self._count(1)
        return found[0], found[1]

    def formats(self, raised: Collection[Site]) -> dict[str, dict[str, Any]]:
        """A mixture as `ModuleNameTemplate` takes it, in the order of the model."""
        found: dict[str, dict[str, Any]] = {}
        for site in sorted(raised, key=self._number.__getitem__):
            found.setdefault(site.operator, {})[_PART[site.kind]] = qint16
        found.update({path: dict(HALF) for path in sorted(self.half)})
        return found


def _with_scales(model: nn.Module, scales: Mapping[str, Tensor]) -> nn.Module:
    """A prepared model with scales, ready to be judged."""
    for path, quantizer in quantizers_of(model).items():
        if path in scales and not quantizer.is_fixed:
            quantizer.set_qparams(scales[path])
    set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
    return model


PROBE = 2  # forwards of a probe without its backwards: one, and one of the layers alone
_PART = {ACTIVATION: "output", WEIGHT: "weight"}


def sketch(vector: Tensor) -> Tensor:
    """A shorter vector whose products with others made so are, on average, those of the whole vectors."""
    if vector.numel() <= _SKETCH:
        return vector.float()
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(_SKETCH)
    for part in vector.float().cpu().split(_SKETCH):
        signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8).float().mul_(2).sub_(1)
        total[: part.numel()] += part * signs
    return total


@contextmanager
def quiet() -> Iterator[None]:
    """Our own warnings of mixtures that are only tried are not for the user."""
    with warnings.catch_warnings():
        for category in (QuantizationWarning, AccumulatorWarning, TableWarning):
            warnings.simplefilter("ignore", category)
        yield
