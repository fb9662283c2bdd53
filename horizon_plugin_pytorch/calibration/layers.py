"""The layers of a prepared model one by one, with what reaches them: for algorithms that mend one after another."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from horizon_plugin_pytorch.calibration.batches import require_quantizers, run_batch, undone_after_an_error
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import QATModule, real
from horizon_plugin_pytorch.nn.qat.original import restore, rewrite
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.statistics.metrics import relative_error
from horizon_plugin_pytorch.watch import HeldRun, ModuleWatch, OperatorCall

Part = Literal["weight", "bias"]


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        layer: which layer.
        x: its input in the quantized model, as real values.
        bias: its bias as it is now.
        residual: what a fused sum adds there.
        wanted: what the float layer gives in the float model, before its activation.
        batch: the number of the batch that it is of.
    """

    layer: QATGemm
    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    wanted: Tensor
    batch: int = 0

    def output(self, weight: Tensor, shift: Tensor | None = None) -> Tensor:
        """What the layer gives in the quantized model with another weight and a moved bias, before its activation."""
        bias = shift if self.bias is None else self.bias if shift is None else self.bias + shift
        out = self.layer.product(self.x, weight, bias)
        return out if self.residual is None else out + self.residual

    def activated(self, out: Tensor) -> Tensor:
        """What the layer's activation makes of it."""
        return out if self.layer.limits == NO_LIMITS else out.clamp(*self.layer.limits)

    @property
    def has_rows(self) -> bool:
        """Does it hold several samples, along the first axis?"""
        is_batched = self.layer.weight.dim() == 2 or self.x.dim() == self.layer.weight.dim()
        return is_batched and self.x.dim() > 1 and len(self.x) > 1 and len(self.wanted) == len(self.x)

    def rows(self, chosen: slice) -> LayerCall:
        """Some of its samples."""
        residual = self.residual
        if residual is not None and residual.dim() == self.wanted.dim() and len(residual) == len(self.wanted):
            residual = residual[chosen]
        return replace(self, x=self.x[chosen], residual=residual, wanted=self.wanted[chosen])

    def squared_error(self, out: Tensor) -> Tensor:
        """The squared error after the layer's activation, as a share of what is wanted."""
        out, wanted = self.activated(out), self.activated(self.wanted)
        return (out - wanted).square().mean() / wanted.square().mean().clamp(min=1e-30)


def error_of_calls(calls: Sequence[LayerCall], output: Callable[[LayerCall], Tensor]) -> float:
    """The relative error (L2) over all calls."""
    return math.sqrt(sum(float(call.squared_error(output(call))) for call in calls) / len(calls))


@dataclass(frozen=True)
class LayerGroup:
    """The layers that have one tensor which is to be rewritten: most often one layer."""

    members: dict[str, QATGemm]

    @property
    def path(self) -> str:
        """Where they are."""
        return ", ".join(self.members)

    @property
    def layers(self) -> list[QATGemm]:
        """The layers."""
        return list(self.members.values())

    def holds(self, path: str) -> bool:
        """Is this one of the layers, or a part of one, as its batch norm is?"""
        return any(path == member or path.startswith(f"{member}.") for member in self.members)

    def rewrite(self, write: Callable[[QATGemm], None]) -> None:
        """Change what they share through one of them; they remember what they had."""
        rewrite(self.layers, lambda: write(self.layers[0]))


class _Stream:
    """The run of a model on one batch, which stands before a call of a layer until it is asked to go on.

    Layers are changed while it stands, so one run serves all of them.

    Args:
        batch: what to run the model on; nobody else has its tensors.

    Attributes:
        passed: the layers that it has called.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.passed: set[str] = set()
        self._model, self._batch = model, batch
        self._wanted: Container[str] = ()
        self._at: tuple | None = None
        self._run = HeldRun(self._work)

    def next_call(self, paths: Container[str]) -> tuple | None:
        """Go on to the next call of one of some layers: its path, input and residual; None if there is none."""
        self._wanted, self._at = paths, None
        self._run.go_on()
        return self._at

    def stop(self) -> None:
        """End it where it stands."""
        self._at = None
        self._run.stop()

    def _work(self) -> None:
        _HERE.stream = self
        run_batch(self._model, self._batch)

    def meet(self, path: str, x: Any, residual: Any) -> None:
        """A layer is about to be called."""
        if path in self._wanted:
            self._at = path, real(x), real(residual)
            self._run.pause()
        self.passed.add(path)


class _Here(threading.local):
    stream: _Stream | None = None  # that runs in this thread


_HERE = _Here()


class LayerWalk:
    """The layers of a calibrated model with integer weights, in the order in which they run, with their calls.

    A layer's calls are those of the model as it is when its turn comes: a layer sees what was changed before it. The
    float model is that before any method rewrote weights or biases.

    Both models run once on each batch, as streams that stand at the layer whose turn it is; so the cost grows with the
    number of layers and not with its square. A stream begins anew only where it has called a layer that was changed
    afterwards: one that is called several times, or in another order than in other batches.

    Args:
        model: calibrated; it is put into eval mode and the VALIDATION state.
        batches: what to run it on.
        caller: whom messages name.
        part: what is to be rewritten; layers that share it are one.
        exclude: prefixes of paths to leave out.

    Attributes:
        left_out: layers that cannot be treated, and why.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], caller: str, part: Part, exclude: Sequence[str] = ()
    ) -> None:
        require_quantizers(model, caller)
        self.left_out: dict[str, str] = {}
        self._model, self._caller, self._part = model, caller, part
        self._batches = pytree.tree_map(_writable, list(batches))
        self._streams: dict[tuple[bool, int], _Stream] = {}  # by model (is it the quantized one?) and batch
        self._counts: list[Counter[str]] = []  # by batch, of layers that run alike in both models
        self._not_finite: dict[int, str] = {}  # by batch, the first layer that had such values
        layers = self._find_layers(exclude)
        with undone_after_an_error(model):
            model.eval()
            self._float = copy.deepcopy(model)
            restore([m for m in self._float.modules() if isinstance(m, QATGemm)])
            set_fake_quantize(self._float, FakeQuantState._FLOAT)
            set_fake_quantize(model, FakeQuantState.VALIDATION)
            self._groups = self._joined(layers, self._reached(layers))

    def __iter__(self) -> Iterator[tuple[LayerGroup, list[LayerCall]]]:
        members = [path for group in self._groups for path in group.members]
        with ExitStack() as stack:
            for model in (self._model, self._float):
                layers = {path: model.get_submodule(path) for path in members}
                stack.enter_context(ModuleWatch(layers, before=_meet, in_all_threads=True))
            stack.callback(self._drop_streams)
            for group in tqdm(self._groups, desc=self._caller, disable=None):
                calls = self._calls(group)
                if calls:
                    yield group, calls
                    del calls
                    self._drop_streams(group.members)
        if self._not_finite:
            batches = ", ".join(map(str, self._not_finite))
            warn(
                f"{self._caller}: values are not finite in batches {batches}, first at "
                f"`{next(iter(self._not_finite.values()))}`; these calls are left out. Look for NaN in the data.",
                CalibrationWarning,
            )

    def _drop_streams(self, changed: Iterable[str] | None = None) -> None:
        """End the runs that have called layers which are others now, or all. What the float model gave stays right."""
        for key, stream in list(self._streams.items()):
            if changed is None or not stream.passed.isdisjoint(changed):
                self._streams.pop(key).stop()

    def _next_calls(self, model: nn.Module, number: int, paths: Collection[str], count: int) -> list[tuple]:
        """The calls of layers in a batch, as many as they are, or fewer if the model makes fewer."""
        key = model is self._model, number
        stream = self._streams.get(key)
        if stream is None or not stream.passed.isdisjoint(paths):
            if stream is not None:
                stream.stop()
            stream = self._streams[key] = _Stream(model, own_tensors(self._batches[number]))
        found: list[tuple] = []
        while len(found) < count:
            call = stream.next_call(paths)
            if call is None:
                break
            found.append(call)
        return found

    def _find_layers(self, exclude: Sequence[str]) -> dict[str, QATGemm]:
        modules = dict(self._model.named_modules())
        for prefix in exclude:
            if not any(path.startswith(prefix) for path in modules):
                raise QuantizationConfigError(
                    f"{self._caller}: exclude_prefix has {prefix!r}, and no module's path begins so; it has to begin "
                    "as in `model.named_modules()`."
                )
        found: dict[str, QATGemm] = {}
        for path, module in modules.items():
            is_layer = isinstance(module, QATGemm) and isinstance(module.weight_fake_quant, FakeQuantize)
            if is_layer and not path.startswith(tuple(exclude)):
                found[path] = module
        if not found:
            raise QuantizationConfigError(f"{self._caller}: the model has no layer with integer weights to work on.")
        if any(layer.weight.is_inference() for layer in found.values()):
            raise QuantizationConfigError(
                f"{self._caller}: the model was made under torch.inference_mode(), and its weights cannot be written; "
                "make it outside."
            )
        return found

    @torch.no_grad()
    def _reached(self, layers: dict[str, QATGemm]) -> list[str]:
        """Run all batches and count the calls of the layers; those that can be treated, in the order of calls."""
        order: list[str] = []
        computed: set[str] = set()
        exact_ever: set[str] = set()
        # Before they run: VALIDATION looks at weights that nobody has looked at.
        fresh = {path for path, layer in layers.items() if not layer.weight_fake_quant.has_statistics}
        for batch in self._batches:
            calls = _run(self._float, layers, batch, lambda path, x, residual, weight: (path, weight is not None))
            exact = Counter(_run(self._model, layers, batch, lambda path, *_: path))
            counts = Counter(path for path, _ in calls)
            _merge(order, counts)
            computed.update(path for path, is_computed in calls if is_computed)
            exact_ever.update(exact)
            self._counts.append(Counter({path: n for path, n in counts.items() if exact[path] == n}))
        for path in layers:
            if path not in order:
                self.left_out[path] = _UNREACHED
            elif path in computed:
                self.left_out[path] = "the model computes its weight"
            elif path not in exact_ever:  # as in recurrent modules
                self.left_out[path] = "it runs only as a part of the module around it"
            elif not any(path in counts for counts in self._counts):
                self.left_out[path] = _OTHERWISE
            elif path in fresh:
                raise CalibrationError(f"{self._caller}: `{path}` has no scale; calibrate the model before.")
        return [path for path in order if path not in self.left_out]

    def _joined(self, layers: dict[str, QATGemm], reached: Sequence[str]) -> list[LayerGroup]:
        """One group for all layers that share what is to be rewritten, where the first of them runs."""
        groups: dict[tuple, LayerGroup] = {}
        for path in reached:
            groups.setdefault(self._key(layers[path]), LayerGroup({})).members[path] = layers[path]
        for path in [path for path, reason in self.left_out.items() if reason == _UNREACHED]:
            if self._key(layers[path]) in groups:  # it changes with the others
                groups[self._key(layers[path])].members[path] = layers[path]
                del self.left_out[path]
        for path, module in self._model.named_modules():
            if not _computes(module):
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                group = groups.get(_key_of(tensor))
                if group is not None and not group.holds(path):
                    del groups[_key_of(tensor)]
                    for member in group.members:
                        self.left_out[member] = f"its {self._part} is also that of `{path}`"
        return list(groups.values())

    def _key(self, layer: QATGemm) -> tuple:
        tensor = layer.weight if self._part == "weight" else layer.moved_bias
        if tensor is not None:
            return _key_of(tensor)
        # Without a bias, modules with one dictionary of parameters (`own_scales`) get one together.
        return id(layer.bias_place[0]._parameters), _key_of(layer.weight)

    @torch.no_grad()
    def output_error(self) -> float:
        """The relative error (L2) of the model's outputs over all batches, as it is now; outputs count alike."""
        errors = [
            relative_error(out, wanted)
            for batch in self._batches
            for out, wanted in zip(*(_outputs(model, batch) for model in (self._model, self._float)), strict=False)
        ]
        finite = [error for error in errors if math.isfinite(error)]
        return math.sqrt(sum(error**2 for error in finite) / max(len(finite), 1))

    def float_weight(self, group: LayerGroup) -> Tensor:
        """The weight that layers deploy, as it is in the float model."""
        layer = self._float.get_submodule(next(iter(group.members)))
        assert isinstance(layer, QATGemm)
        return layer.deployed()[0].detach()

    @torch.no_grad()
    def _calls(self, group: LayerGroup) -> list[LayerCall]:
        """All calls that can be compared; if there is none, the layers are left out."""
        floats = {path: self._float.get_submodule(path) for path in group.members}
        deployed: dict[str, Any] = {path: layer.deployed() for path, layer in floats.items()}  # type: ignore[operator]
        biases = {path: layer.deployed()[1] for path, layer in group.members.items()}
        found = []
        reason = _OTHERWISE
        for number in range(len(self._batches)):
            count = sum(self._counts[number][path] for path in group.members)
            if not count:
                continue
            here, there = (
                self._next_calls(model, number, group.members, count) for model in (self._model, self._float)
            )
            if [(path, x.shape) for path, x, _ in here] != [(path, x.shape) for path, x, _ in there]:
                continue
            for (path, x, residual), (_, float_x, float_residual) in zip(here, there, strict=True):
                layer, (weight, bias, _) = group.members[path], deployed[path]
                wanted = layer.product(float_x, weight, bias)
                wanted = wanted if float_residual is None else wanted + float_residual
                if not wanted.numel():
                    reason = "all its calls are empty"
                elif not all(t is None or bool(t.isfinite().all()) for t in (x, residual, wanted)):
                    reason = "its values are not finite"
                    self._not_finite.setdefault(number, path)
                else:
                    found.append(LayerCall(layer, x, biases[path], residual, wanted, number))
        if not found:
            self.left_out.update(dict.fromkeys(group.members, reason))
        return found


_UNREACHED = "no batch reaches it"
_OTHERWISE = "the quantized model calls it otherwise than the float model"


def skipped_lines(skipped: dict[str, str]) -> str:
    """What a table says of layers that were left out, beginning with a new line."""
    return "".join(f"\nleft out: {path}: {reason}" for path, reason in skipped.items())


def _run(model: nn.Module, paths: Iterable[str], batch: Any, keep: Callable[..., Any]) -> list[Any]:
    """Run a batch and give what `keep` makes of path, x, residual and weight of each call of some layers."""
    found: list[Any] = []
    layers = {path: model.get_submodule(path) for path in paths}
    with ModuleWatch(layers, before=lambda call: found.append(keep(call.path, *_arguments(call)))):
        run_batch(model, own_tensors(batch))
    return found


def _meet(call: OperatorCall) -> None:
    """Tell the stream that runs here, if one does, of a call."""
    stream = _HERE.stream
    if stream is not None:
        x, residual, _ = _arguments(call)
        stream.meet(call.path, x, residual)


def _arguments(call: OperatorCall) -> list[Any]:
    given = {"residual": None, "weight": None, **dict(zip(_ARGUMENTS, call.args, strict=False)), **call.kwargs}
    return [given[name] for name in _ARGUMENTS]


_ARGUMENTS = ("x", "residual", "weight")  # of `QATGemm.forward`


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The float tensors among the outputs."""
    found = [real(x) for x in tensors_in(run_batch(model, own_tensors(batch)))]
    return [x for x in found if x.is_floating_point()]


def _merge(order: list[str], called: Iterable[str]) -> None:
    """Put the layers of a batch where they run among those of earlier batches."""
    position = 0
    for path in called:
        if path in order:
            position = order.index(path)
        else:
            order.insert(position, path)
        position += 1


def _key_of(tensor: Tensor) -> tuple:
    """The same for tensors that are one; a packed parameter makes its parts anew each time they are asked for."""
    return tensor.data_ptr(), tensor.shape


def _computes(module: nn.Module) -> bool:
    """Is it an operator? Modules of the user only keep tensors."""
    return isinstance(module, QATModule) or type(module).__module__.startswith("torch.nn.")


def _writable(x: Any) -> Any:
    """A tensor that learning can keep; those made in inference mode are none."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x
