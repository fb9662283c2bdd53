"""The fake quantizers of a prepared model, and runs in which only some of them round."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject
from horizon_plugin_pytorch.analysis.same_input import real_of
from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, WEIGHT, Site
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.route import written_route
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.nn.qat.attention import Attention
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import current_forward
from horizon_plugin_pytorch.watch.module_watch import ModuleWatch
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.undisturbed import undisturbed

_MOST_KEPT = 1 << 30  # bytes of results that are kept to run only what is behind a quantizer


@dataclass(frozen=True, eq=False)
class Rounding:
    """What rounds at a site of a prepared model.

    Args:
        module: the operator.
        path: of the quantizer.
        operations: of the operator in one run, or of the part of attention or a norm that rounds here: two for each
            product that is summed, one for each other number.
        share: of the operations of all that round.
    """

    site: Site
    module: nn.Module
    quantizer: FakeQuantize
    path: str
    operations: int = 0
    share: float = 0.0


class PartlyRounded:
    """Runs of a prepared model in which only some of its fake quantizers round, on the training route.

    What runs before the first of them gives what it gives without any rounding: it is run once, and its results are
    kept, as far as memory allows. A model that keeps something of a run for the next one begins each with what it had.

    Args:
        batch: the inputs of all runs.

    Attributes:
        roundings: all places where the model rounds in this run, in its order.
    """

    def __init__(self, subject: ModelSubject, batch: Any, who: str) -> None:
        self._subject, self._batch, self._who = subject, batch, who
        self._model = subject.model
        self._quantizers = [m for m in self._model.modules() if isinstance(m, FakeQuantize)]
        self._kept: list[tuple[str, Any]] | None = None
        self._has_kept = False  # or tried to
        self._is_stateless = True  # does a run give the same as the one before?
        self._stack = ExitStack()
        self.roundings: list[Rounding] = []
        self._first: dict[FakeQuantize, int] = {}  # how many kept calls are before the operator of a quantizer

    def __enter__(self) -> PartlyRounded:
        self._stack.enter_context(self._subject.quiet())
        self._stack.enter_context(written_route())
        try:
            for quantizer in self._quantizers:
                quantizer.set_state(FakeQuantState.VALIDATION)
            self._switch(())
            self._find_roundings()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._kept = None
        self._stack.close()

    def run(self, quantizers: Iterable[FakeQuantize]) -> Any:
        """What the model gives if only these round."""
        rounding = list(quantizers)
        if not self._has_kept:
            self._switch(())
            with undisturbed(self._model):
                self._keep_results()
        self._switch(rounding)
        if not self._is_stateless:
            with undisturbed(self._model):
                return self._subject.run(self._batch)
        count = min((self._first.get(q, 0) for q in rounding), default=0) if self._kept else 0
        if not count:
            return self._subject.run(self._batch)
        with self._giving(count):
            return self._subject.run(self._batch)

    def _switch(self, rounding: Iterable[FakeQuantize]) -> None:
        chosen = set(rounding)
        for quantizer in self._quantizers:
            quantizer.enable_fake_quant(quantizer in chosen)

    def _find_roundings(self) -> None:
        """One run in which none rounds: which could, in which order, and what their operators compute."""
        called: Counter[nn.Module] = Counter()  # and how many numbers each of them was given

        def note(quantizer: nn.Module, args: Any, out: Any) -> None:
            called[quantizer] += sum(x.numel() for x in tensors_of(out))

        hooks = [q.register_forward_hook(note) for q in self._quantizers]
        operations, inside = Counter[str](), Counter[str]()

        def add(call: OperatorCall) -> None:
            if call.module is not None:
                operations[call.path] += _operations(call)

        parts = {p: m for p, m in self._model.named_modules() if isinstance(m, (QATGemm, Attention))}
        try:
            with ModuleWatch(parts, after=lambda call: inside.update(_operations_inside(call))):
                self._log = self._subject.watch(self._batch, add)
        finally:
            for hook in hooks:
                hook.remove()
        ran = {call.path for call in self._log.calls if call.module is not None}
        for path, module in self._model.named_modules():
            for name, quantizer in module._modules.items():
                if not isinstance(quantizer, FakeQuantize):
                    continue
                is_weight, whole = name == "weight_fake_quant", _operator_of(path, ran)
                if quantizer in called or (is_weight and whole is not None):
                    site, place = Site(path, WEIGHT if is_weight else ACTIVATION), f"{path}.{name}".lstrip(".")
                    of_part = inside[path] or called[quantizer] or operations[whole or path]
                    count = operations[path] if path in ran else of_part
                    self.roundings.append(Rounding(site, module, quantizer, place, count))
        if not self.roundings:
            raise CheckError(
                f"{self._who}: `{type(self._model).__name__}` rounds nowhere in this run. Give a prepared and "
                "calibrated model."
            )
        total = sum({one.site.operator: one.operations for one in self.roundings}.values()) or 1
        self.roundings = [replace(one, share=one.operations / total) for one in self.roundings]
        places: dict[str, int] = {}
        for call in self._log.calls:
            places.setdefault(call.path, call.index)
        starts = {one.site: places.get(_operator_of(one.site.operator, ran) or "", 0) for one in self.roundings}
        self.roundings.sort(key=lambda one: starts[one.site])
        forwards = [call.index for call in self._log.calls if _is_forward(call)]  # in their order
        for one in self.roundings:
            before = bisect_left(forwards, starts[one.site])
            self._first[one.quantizer] = min(before, self._first.get(one.quantizer, before))  # several may share it

    def _keep_results(self) -> None:
        """Run without any rounding, and keep what each module gives, if the model gives the same with what is kept."""
        self._has_kept = True
        wanted = [call.path for call in self._log.calls if _is_forward(call)]
        kept: list[tuple[str, Any]] = []
        size = 0

        def keep(call: OperatorCall, run: Any) -> Any:
            nonlocal size
            out = run()
            size += sum(x.numel() * x.element_size() for x in tensors_of(out))
            if size <= _MOST_KEPT:
                kept.append((call.path, _copied(out)))
            else:
                kept.clear()
            return out

        with ModuleWatch({path: self._model.get_submodule(path) for path in dict.fromkeys(wanted)}, around=keep):
            out = self._subject.run(self._batch)
        self._is_stateless = _are_equal(out, self._subject.run(self._batch))
        if not self._is_stateless or size > _MOST_KEPT or [path for path, _ in kept] != wanted:
            return
        self._kept = kept
        try:
            with self._giving(len(kept)):
                again = self._subject.run(self._batch)
            is_same = _are_equal(out, again)
        except Exception:  # what the model does beside its modules needs their own results: it runs as a whole
            is_same = False
        if not is_same:
            self._kept = None

    @contextmanager
    def _giving(self, count: int) -> Iterator[None]:
        """The first calls of modules give what was kept."""
        assert self._kept is not None
        kept, number = self._kept, 0

        def give(call: OperatorCall, run: Any) -> Any:
            nonlocal number
            number += 1
            if number > count:
                return run()
            path, out = kept[number - 1]
            if path != call.path:
                raise CheckError(
                    f"{self._who}: `{call.path}` runs where `{path}` ran before on the same inputs. Does the forward "
                    "draw random numbers or count its calls?"
                )
            out = _copied(out)
            for x in tensors_of(out):
                if isinstance(x, QTensor):
                    x._belong(current_forward())  # an earlier forward made it, on the same batch
            return out

        paths = dict.fromkeys(path for path, _ in kept)
        with ModuleWatch({path: self._model.get_submodule(path) for path in paths}, around=give):
            yield


def _copied(tree: Any) -> Any:
    """Tensors that no write to the given ones reaches."""

    def one(x: Tensor) -> Tensor:
        return x.like(x.plain().clone(), x.grid) if isinstance(x, QTensor) else x.clone()

    return map_tensors(one, tree)


def _are_equal(one: Any, other: Any) -> bool:
    pairs = [[real_of(x) for x in tensors_of(out)] for out in (one, other)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(x.shape == y.shape and bool(((x == y) | (x != x) & (y != y)).all()) for x, y in zip(*pairs, strict=True))


def _is_forward(call: OperatorCall) -> bool:
    """Is it a call of a module's forward, which may be left out if its result is known?"""
    return call.module is not None and not call.method and bool(call.path)


def _operator_of(path: str, ran: set[str]) -> str | None:
    """The operator that a module is, or is a part of."""
    while path and path not in ran:
        path = path.rpartition(".")[0]
    return path if path in ran else None


def _operations(call: OperatorCall) -> int:
    count = sum(x.numel() for x in call.outputs)
    weight = getattr(call.module, "weight", None) if hasattr(call.module, "weight_fake_quant") else None
    if weight is not None and weight.dim() > 1:
        is_transposed = "Transpose" in type(call.module).__name__
        walked = call.inputs[0].numel() if is_transposed else count
        return 2 * walked * weight[0].numel()
    if call.operator == "matmul" and call.inputs and call.inputs[0].dim():
        return 2 * count * call.inputs[0].shape[-1]
    return count


def _operations_inside(call: OperatorCall) -> dict[str, int]:
    """What layers inside of other operators compute, and the two products of attention, by the paths of their parts."""
    if isinstance(call.module, QATGemm):
        return {call.path: _operations(call)}
    query, key, value = (x.shape for x in call.inputs[:3])
    scores = query.numel() // query[-1] * key[-2]
    return {f"{call.path}.matmul": 2 * scores * query[-1], f"{call.path}.weighted_sum": 2 * scores * value[-1]}
