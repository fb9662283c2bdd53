"""Calibration that finds the observer of each operator by what it does to the model's outputs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.calibration.batches import (
    Process,
    place_of,
    require_quantizers,
    split_unseen,
    take_batches,
    undone_after_an_error,
    unseen_lines,
)
from horizon_plugin_pytorch.calibration.judge import Judge, operators_of
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    QuantizationConfigError,
    require_module,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.statistics.observer_names import make_like, range_methods
from horizon_plugin_pytorch.statistics.observer_v2 import CountingObserver, HistogramObserver
from horizon_plugin_pytorch.tables import Table

_JUDGED = 4  # batches on which candidates are compared; the result is checked on all
_SAME = 1e-3  # candidates whose ranges differ by less than this share are one
_OF_WEIGHTS = ("mse", "min_max")  # few on purpose: every candidate of every weight is tried on the whole model
_CONFIGURED, _CHOSEN, _TOGETHER = "as configured", "as chosen", "{} of all data"


@dataclass(frozen=True)
class AutoChoice:
    """What one tensor has in the model.

    Args:
        tensor: path of the operator, or of its weight's fake quantizer.
        observer: the candidate that its scale is of.
        scale: the largest of its scales.
        before: error of the model's outputs with the first candidate, all earlier operators being quantized.
        after: the same with `observer`.
    """

    tensor: str
    observer: str
    scale: float
    before: float
    after: float


@dataclass
class AutoCalibrationResult:
    """What `auto_calibrate` chose; printing it gives a table.

    Errors are ``|quantized - float| / |float|`` of the model's outputs (L2 norms).

    Args:
        choices: one for each tensor that had a choice, in the order in which the model runs.
        errors: the whole model's error on all batches: as chosen, as `calibrate` with each candidate leaves it, and
            with each candidate's range of all batches together instead of the mean of theirs.
        kept: which of `errors` the model was left with.
        unseen: modules that no batch reached.
        left_float: modules that only real numbers reached, in code that tracing does not enter: they need no scale.
    """

    choices: list[AutoChoice] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    kept: str = ""
    unseen: list[str] = field(default_factory=list)
    left_float: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [
            [c.tensor, c.observer, f"{c.scale:.6g}", f"{c.before:.4%}", f"{c.after:.4%}", _gain(c.before, c.after)]
            for c in self.choices
        ]
        headers = ["tensor", "observer", "scale", "error with the first", "error", "gain"]
        table = Table(headers, rows).text()
        notes = ["Errors are those of the outputs while this tensor and all before it are quantized, the rest float."]
        if self.kept != _CHOSEN:
            notes.append(f"Kept is {self.kept} everywhere, better for the whole model than the best for each tensor.")
        whole = [[name, f"{error:.4%}", "kept" if name == self.kept else ""] for name, error in self.errors.items()]
        second = Table(["whole model", "error", ""], whole).text()
        return "\n".join([table, *notes, "", second, *unseen_lines(self.unseen, self.left_float)])


def _gain(before: float, after: float) -> str:
    return f"{1 - after / before:.1%}" if before > 0 and math.isfinite(before) else ""


@torch.no_grad()
def auto_calibrate(
    calib_model: nn.Module,
    batches: Iterable[Any],
    num_batches: int = 10,
    batch_process_func: Process | None = None,
    observer_list: Sequence[str] = ("percentile", "mse", "kl", "min_max"),
    percentile_list: Sequence[float] | None = None,
) -> AutoCalibrationResult:
    """Calibrate a prepared model, choosing the observer of each operator by the error of the model's outputs.

    In one pass over the data all candidates observe what every tensor holds. Then, operator by operator in the order in
    which they run, weight and output are quantized, with all earlier operators quantized and the later ones float, and
    the candidate is kept with which the model's outputs (what its DeQuantStubs give) are closest to float. Where more
    than 16 operators follow, the run ends after these, and what the last of them give is compared. In the end the whole
    model is compared with what `calibrate` gives with each candidate, on all batches, and the best of all is kept: on
    these batches the result is never worse than choosing one observer by hand.

    The model is left in eval mode and in the VALIDATION state. Scales that are fixed or frozen stay as they are. After
    an error the model is as it was.

    Args:
        calib_model: from `prepare`, `prepare_qat_fx` or `prepare_qat`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader.
        num_batches: how many to use; they are kept meanwhile.
        batch_process_func: makes the model's inputs of what a DataLoader gives.
        observer_list: candidates: "percentile", "mse", "kl", "mix", "min_max".
        percentile_list: candidates of "percentile", in percent; 99.99 if not given.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), {"": get_default_qconfig()})
    >>> result = auto_calibrate(net, [torch.randn(1, 1, 8, 8) for _ in range(3)])
    >>> result.errors[result.kept] == min(result.errors.values())
    True
    """
    require_module(calib_model, "auto_calibrate")
    quantizers = require_quantizers(calib_model, "auto_calibrate")
    candidates = _candidates(observer_list, percentile_list)
    data = take_batches(calib_model, batches, num_batches, batch_process_func, "auto_calibrate")
    with undone_after_an_error(calib_model):
        calib_model.eval()
        tensors = [_Tensor(path, quantizer, candidates) for path, quantizer in quantizers.items()]
        judge = Judge(calib_model, data)
        with judge.watching(), _recording(tensors, judge):
            set_fake_quantize(calib_model, FakeQuantState.CALIBRATION)
            judge.run_float(tensors)
        seen = sorted((t for t in tensors if t.positions), key=lambda t: t.order)
        result = AutoCalibrationResult()
        result.unseen, result.left_float = split_unseen(calib_model, [t.path for t in tensors if not t.is_seen])
        for tensor in seen:
            tensor.find_ranges(candidates)
        set_fake_quantize(calib_model, FakeQuantState._FLOAT)
        with judge.comparing():
            _choose(calib_model, seen, judge)
            set_fake_quantize(calib_model, FakeQuantState.VALIDATION)
            _keep_best(seen, judge, candidates, result)
        for tensor in seen:
            tensor.hand_over_counts()
        result.choices = [tensor.choice() for tensor in seen if tensor.errors]
    return result


auto_calibration = auto_calibrate


@dataclass(frozen=True)
class _Candidate:
    """A way of finding a scale."""

    name: str
    kind: str
    observer: type[ObserverBase]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def sees_all_data(self) -> bool:
        """Is its range that of all batches together, rather than the mean of theirs?"""
        return issubclass(self.observer, CountingObserver)


def _candidates(observers: Sequence[str], percentiles: Sequence[float] | None) -> list[_Candidate]:
    observers, known = _listed(observers), range_methods()
    unknown = [str(name) for name in observers if name not in known]
    if unknown or not observers:
        raise QuantizationConfigError(
            f"auto_calibrate: observer_list holds some of {', '.join(known)}, got {', '.join(unknown) or 'none'}."
        )
    shares = _percentiles(percentiles, observers)
    found = []
    for name in dict.fromkeys(observers):
        if name == "percentile" and shares:
            found += [_Candidate(f"percentile {p:g}", name, known[name], {"percentile": p}) for p in shares]
        else:
            found.append(_Candidate(name, name, known[name]))
    return found


def _percentiles(given: Any, observers: Sequence[str]) -> list[float]:
    """The percentiles, each once."""
    shares = [] if given is None else _listed(given)
    is_number = [isinstance(p, (int, float)) and not isinstance(p, bool) and 0 < p <= 100 for p in shares]
    if not all(is_number):
        raise QuantizationConfigError(
            f"auto_calibrate: percentile_list holds percentages in (0, 100], such as [99.9, 99.99], got {given}."
        )
    if shares and "percentile" not in observers:
        raise QuantizationConfigError(
            f"auto_calibrate: percentile_list={given} has no use without 'percentile' in observer_list."
        )
    if any(p <= 1 for p in shares):
        warn(
            f"auto_calibrate: percentile_list={given} is in percent: {min(shares):g} keeps {min(shares):g} % of the "
            f"values. For a share of one write it times 100: {min(shares) * 100:g}.",
            CalibrationWarning,
        )
    return list(dict.fromkeys(shares))


def _listed(value: Any) -> list[Any]:
    """A list, also of one thing."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


class _Tensor:
    """A quantized tensor: what candidates observe, and the ranges to choose from."""

    def __init__(self, path: str, quantizer: FakeQuantize, candidates: Sequence[_Candidate]) -> None:
        self.path, self.quantizer = path, quantizer
        self.observer = quantizer.activation_post_process
        self.order = -1
        self.positions: dict[int, int] = {}  # by batch, how many operators had ended when it was first seen
        self.ranges: dict[str, tuple[Tensor, Tensor]] = {}
        self.errors: dict[str, list[float]] = {}  # of the candidates that were tried: on one batch, on two, ...
        self.is_free = not (quantizer.is_fixed or (quantizer.has_statistics and not self.observer.averaging_constant))
        self.is_weight = self.observer.is_per_channel or path.endswith("weight_fake_quant")
        self._plain: dict[str, ObserverBase] = {}
        self._counts: HistogramObserver | None = None
        if self.is_free:
            self._add_observers(candidates)
        self.first = self.chosen = next(iter(self._plain), "")
        self._same: dict[str, str] = {}  # of a candidate, the one that was tried in its place

    def _add_observers(self, candidates: Sequence[_Candidate]) -> None:
        if self.is_weight:  # `calibrate` with another observer for activations leaves it as configured
            own = self._plain[_CONFIGURED] = copy.deepcopy(self.observer)
            own.begin_calibration()
            candidates = [c for c in candidates if c.kind in _OF_WEIGHTS]
        else:
            self._counts = make_like(HistogramObserver, self.observer, method="min_max")
        self._plain |= {c.name: make_like(c.observer, self.observer, **c.settings) for c in candidates}
        for observer in self._plain.values():
            observer.batches = 0  # all batches count the same

    @property
    def is_seen(self) -> bool:
        """Has any finite value reached it?"""
        return bool(self.positions) and (not self.is_free or self._plain[self.first].has_statistics)

    def hand_over_counts(self) -> None:
        """Let an observer that counts have what was seen here, and not what it saw before."""
        if self.is_free and isinstance(self.observer, CountingObserver):
            source: Any = self._plain[_CONFIGURED] if self._counts is None else self._counts
            self.observer.sketch = source.sketch

    def hold(self) -> None:
        """A batch begins: as in `calibrate`, the calls in it count together."""
        for observer in self._plain.values():
            observer.hold()

    def observe(self, x: Tensor, limits: tuple[float, float]) -> None:
        """Let all candidates see a tensor."""
        for observer in self._plain.values():
            observer.observe(x, *limits)
        if self._counts is not None:
            self._counts.observe(x, *limits)

    def release(self) -> None:
        """The batch is over: all candidates take it in, and the tensor has the range of the first."""
        for observer in self._plain.values():
            observer.release()
        if self.is_free and self._plain[self.first].has_statistics:
            self.set_range(_ends(self._plain[self.first]))

    def set_range(self, ends: tuple[Tensor, Tensor]) -> None:
        """Take a range and its scale."""
        self.observer.set_range(*(end.detach().clone() for end in ends))
        self.quantizer.refresh_scale()

    def find_ranges(self, candidates: Sequence[_Candidate]) -> None:
        """Ranges by the candidates' names: those of `calibrate`, and those of all batches together."""
        if not self.is_free or not self._plain[self.first].has_statistics:
            return
        self.ranges = {name: _ends(observer) for name, observer in self._plain.items()}
        if self._counts is None:
            return
        for candidate in candidates:
            observer: Any = self._plain[candidate.name]
            value = torch.full_like(observer.max_val, observer.choose(self._counts.sketch))
            self.ranges[_TOGETHER.format(candidate.name)] = (-value, value)

    def distinct(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The ranges without those that are nearly the same as an earlier one."""
        kept: dict[str, tuple[Tensor, Tensor]] = {}
        for name, ends in self.ranges.items():
            self._same[name] = next((other for other in kept if _is_same(ends, kept[other])), name)
            kept.setdefault(self._same[name], ends)
        return kept

    def choice(self) -> AutoChoice:
        """What it has; the errors are those of as many batches as both were tried on."""
        before, after = self.errors[self.first], self.errors[self._same[self.chosen]]
        last = min(len(before), len(after)) - 1
        scale = float(self.quantizer.scale.max())
        return AutoChoice(place_of(self.path), self.chosen, scale, before[last], after[last])


def _ends(observer: ObserverBase) -> tuple[Tensor, Tensor]:
    return observer.min_val, observer.max_val


def _is_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    one, other = (torch.maximum(low.abs(), high.abs()) for low, high in (a, b))
    return bool(((one - other).abs() <= _SAME * other).all())


@contextmanager
def _recording(tensors: Sequence[_Tensor], judge: Judge) -> Iterator[None]:
    """Fake quantizers report to their `_Tensor` instead of to their observer."""
    count = itertools.count()

    def report_to(tensor: _Tensor) -> Callable[..., None]:
        def observe(x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> None:
            if not tensor.positions:
                tensor.order = next(count)
            tensor.positions.setdefault(judge.batch, judge.ended)
            tensor.observe(x, limits)

        return observe

    for tensor in tensors:
        tensor.quantizer.__dict__["observe"] = report_to(tensor)
    try:
        yield
    finally:
        for tensor in tensors:
            del tensor.quantizer.__dict__["observe"]


def _choose(model: nn.Module, tensors: Sequence[_Tensor], judge: Judge) -> None:
    """Quantize operator by operator, each with the ranges that serve the outputs best."""
    step = math.ceil(len(judge.batches) / _JUDGED)
    among = range(0, len(judge.batches), step)
    owners = {id(part): id(operator) for operator in operators_of(model) for part in operator.modules()}
    operators: dict[int, list[_Tensor]] = {}
    for tensor in tensors:
        operators.setdefault(owners.get(id(tensor.quantizer), id(tensor.quantizer)), []).append(tensor)
    for members in tqdm(operators.values(), desc="auto_calibrate", disable=None):
        for tensor in members:
            tensor.quantizer.set_state(FakeQuantState.VALIDATION)
        positions = {i: min(t.positions[i] for t in members if i in t.positions) for i in among if _is_met(members, i)}
        reached = list(positions)
        for tensor in members:
            ranges = tensor.distinct()
            if len(ranges) < 2 or not reached:
                continue
            errors = judge.errors([_setting(tensor, ends) for ends in ranges.values()], reached, positions)
            tensor.errors = dict(zip(ranges, errors, strict=True))
            tensor.chosen = min(ranges, key=lambda name: (-len(tensor.errors[name]), tensor.errors[name][-1]))
            tensor.set_range(ranges[tensor.chosen])


def _is_met(members: Sequence[_Tensor], batch: int) -> bool:
    return any(batch in tensor.positions for tensor in members)


def _setting(tensor: _Tensor, ends: tuple[Tensor, Tensor]) -> Callable[[], None]:
    return lambda: tensor.set_range(ends)


def _keep_best(
    tensors: Sequence[_Tensor], judge: Judge, candidates: Sequence[_Candidate], result: AutoCalibrationResult
) -> None:
    """Compare the whole model as chosen with one candidate for all activations, and leave the best."""
    free = [tensor for tensor in tensors if tensor.ranges]

    def setting(names: Sequence[str]) -> Callable[[], None]:
        def change() -> None:
            for tensor, name in zip(free, names, strict=True):
                tensor.set_range(tensor.ranges[name])
                tensor.chosen = name

        return change

    names = [candidate.name for candidate in candidates]
    names += [_TOGETHER.format(c.name) for c in candidates if not c.sees_all_data and len(judge.batches) > 1]
    ways = {_CHOSEN: [t.chosen for t in free]}
    ways |= {name: [t.first if t.is_weight else name for t in free] for name in names}
    errors = judge.errors([setting(chosen) for chosen in ways.values()], range(len(judge.batches)))
    result.errors = {name: of_batches[-1] for name, of_batches in zip(ways, errors, strict=True)}
    result.kept = min(result.errors, key=result.errors.__getitem__)
    setting(ways[result.kept])()


show_at("quantization.auto_calibration", AutoChoice, AutoCalibrationResult, auto_calibrate)
