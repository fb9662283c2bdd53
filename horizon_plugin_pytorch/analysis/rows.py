"""What there is to say about a prepared model, as rows; `report` gives them their looks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.calls import CallRow, Recording, SeenTensor
from horizon_plugin_pytorch.analysis.power_scales import PowerScales, power_scales
from horizon_plugin_pytorch.analysis.unfused import Member, unfused_patterns
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.intrinsic.fused import FusedModule
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.stubs import DeQuantStub, QuantStub
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.operators.table import row_named, row_of_module
from horizon_plugin_pytorch.passes.fusion_rules import layer_class
from horizon_plugin_pytorch.watch.operator_call import is_generated

NO_QCONFIG = "qconfig = None"
SUMS = ("add", "sub")
JOINS = ("cat", "stack", *SUMS)  # what they take gets one scale
_SMALLEST_IMAGE = 16  # pixels a side; smaller inputs are features or tables


@dataclass(frozen=True)
class CalledTimes:
    """How often a module was called."""

    name: str
    count: int


@dataclass(frozen=True)
class DtypeCount:
    """How many tensors of each format the modules of a type take, or give."""

    type: type
    counts: dict[str, int]


@dataclass(frozen=True)
class OutQConfig:
    """Formats of one call, what observes its output, and the rules that chose them (see `explain`)."""

    name: str
    type: type
    input_dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    ch_axis: str
    observer: str
    reason: str = ""


@dataclass(frozen=True)
class WeightQConfig:
    """The weight's format of one call; a layer that stays in float has `NO_QCONFIG` in place of an axis."""

    name: str
    type: type
    dtype: str
    ch_axis: int | str
    observer: str


@dataclass(frozen=True)
class Message:
    """Something to look at.

    Args:
        remedy: what to do next, where the text does not say it.
    """

    name: str
    type: type
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class ComputeType:
    """A layer whose operands are of unequal kinds: real numbers times integers."""

    name: str
    input: str
    weight: str


@dataclass(frozen=True)
class SharedRange:
    """The ranges that the calls of one module take with one scale.

    Args:
        ranges: smallest and largest output value of each call.
        ratio: largest magnitude of all calls over that of the call with the smallest.
    """

    name: str
    type: type
    ranges: tuple[tuple[float, float], ...]
    ratio: float

    @property
    def lost_bits(self) -> float:
        """How many bits the smallest call does not use."""
        return math.log2(self.ratio) if math.isfinite(self.ratio) else math.inf

    @property
    def would_help(self) -> bool:
        """Would own scales for each call help? A bit or more is wasted otherwise."""
        return self.ratio >= 2

    @property
    def message(self) -> str:
        """What own scales would do, and how to get them."""
        if not self.would_help:
            return "not needed"
        gain = "a scale" if math.isinf(self.lost_bits) else f"{self.lost_bits:.1f} more bits"
        return f"called {len(self.ranges)} times, ranges {self.sizes}: {self.setting} would give the smallest {gain}"

    @property
    def sizes(self) -> str:
        """The largest magnitudes of the calls."""
        return " / ".join(f"{max(-low, high):.3g}" for low, high in self.ranges)

    @property
    def setting(self) -> str:
        """The argument of `prepare` that gives each call scales of its own."""
        scope = self.name.rpartition(".")[0]
        module = scope if is_generated(self.name) else self.name  # a function goes by the module that calls it
        return f"own_scales=[{module!r}]" if module else "own_scales=True"


@dataclass(frozen=True)
class ModelCheck:
    """All rows of a check, in the order of `model_check_result.txt`.

    Args:
        failure: where and why the model could not run to its end; the rows are those of the calls before. Empty if it
            could.
        powers: of a model that was prepared with a consistency level, its scales.
    """

    unfused: tuple[tuple[Member, ...], ...]
    called_times: tuple[CalledTimes, ...]
    input_dtypes: tuple[DtypeCount, ...]
    output_dtypes: tuple[DtypeCount, ...]
    out_qconfigs: tuple[OutQConfig, ...]
    weight_qconfigs: tuple[WeightQConfig, ...]
    messages: tuple[Message, ...]
    compute_types: tuple[ComputeType, ...]
    mistakes: tuple[Message, ...]
    shared_ranges: tuple[SharedRange, ...]
    failure: str = ""
    powers: PowerScales | None = None


def check_recording(recording: Recording) -> ModelCheck:
    """Every row for a recorded run."""
    return ModelCheck(
        unfused=tuple(unfused_patterns(recording)),
        called_times=tuple(called_times(recording)),
        input_dtypes=tuple(dtype_statistics(recording.calls, lambda call: call.inputs)),
        output_dtypes=tuple(dtype_statistics(recording.calls, lambda call: call.outputs)),
        out_qconfigs=tuple(out_qconfig(call, recording.reasons.get(call.path, "")) for call in recording.calls),
        weight_qconfigs=tuple(weight_qconfigs(recording.calls)),
        messages=tuple(messages(recording)),
        compute_types=tuple(compute_types(recording.calls)),
        mistakes=tuple(mistakes(recording)),
        shared_ranges=tuple(shared_ranges(recording)),
        failure="" if recording.failure is None else str(recording.failure),
        powers=power_scales(recording.operators),
    )


# -- calls


def called_times(recording: Recording) -> Iterator[CalledTimes]:
    """How often each operator of the model was called, in the order of definition."""
    for path, count in recording.counts.items():
        yield CalledTimes(path, count)


def shared_ranges(recording: Recording) -> Iterator[SharedRange]:
    """Modules with a scale of their own that were called several times, and the ranges of their outputs."""
    by_path: dict[str, list[CallRow]] = defaultdict(list)
    for call in recording.calls:
        if isinstance(call.quantizer, FakeQuantize):
            by_path[call.path].append(call)
    for path, calls in by_path.items():
        seen = [call.outputs[0] for call in calls if call.outputs and call.outputs[0].low is not None]
        if len(seen) < 2:
            continue
        smallest, largest = min(x.largest for x in seen), max(x.largest for x in seen)
        ratio = 1.0 if largest == 0 else math.inf if smallest == 0 else largest / smallest
        yield SharedRange(path, type(calls[0].module), tuple((x.low or 0.0, x.high or 0.0) for x in seen), ratio)


# -- formats


def dtype_statistics(
    calls: Sequence[CallRow], tensors: Callable[[CallRow], Iterable[SeenTensor]]
) -> Iterator[DtypeCount]:
    """How many tensors of each format go into the modules of each type, or come out of them."""
    found: dict[type, Counter[str]] = {}
    for call in calls:
        found.setdefault(type(call.module), Counter()).update(x.dtype for x in tensors(call))
    for cls, counts in found.items():
        yield DtypeCount(cls, dict(counts))


def _dtypes(tensors: Iterable[SeenTensor]) -> tuple[str, ...]:
    return tuple(x.dtype for x in tensors)


def out_qconfig(call: CallRow, reason: str = "") -> OutQConfig:
    """Formats of a call, and the observer of its output."""
    quantizer = call.quantizer
    if isinstance(quantizer, FakeQuantize):
        axis, observer = str(quantizer.ch_axis), type(quantizer.activation_post_process).__name__
    elif isinstance(quantizer, FakeCast):
        axis, observer = str(quantizer.ch_axis), type(quantizer).__name__
    elif getattr(call.module, "qconfig", None) is None:
        axis, observer = NO_QCONFIG, ""
    elif any(x.is_quantized for x in call.outputs):  # an operator made of others, the last of which observes
        axis, observer = "-1", ""
    else:
        axis, observer = "activation = None", ""
    dtypes = _dtypes(call.inputs), _dtypes(call.outputs)
    return OutQConfig(call.name, type(call.module), *dtypes, axis, observer, reason)


def _weight_quantizer(module: nn.Module) -> Any:
    found = module._weight_cast if isinstance(module, Float16) else getattr(module, "weight_fake_quant", None)
    return found if isinstance(found, (FakeQuantize, FakeCast)) else None


def weight_qconfigs(calls: Iterable[CallRow]) -> Iterator[WeightQConfig]:
    """Formats of the weights, a row for each call."""
    for call in calls:
        quantizer = _weight_quantizer(call.module)
        if quantizer is not None and getattr(call.module, "weight", None) is not None:
            observer = getattr(quantizer, "activation_post_process", quantizer)
            yield WeightQConfig(
                call.name, type(call.module), str(quantizer.dtype), quantizer.ch_axis, type(observer).__name__
            )
        elif isinstance(call.module, FusedModule) or layer_class(call.module) is not None:  # it stays in float
            yield WeightQConfig(call.name, type(call.module), str(call.module.weight.dtype), NO_QCONFIG, "")


def shown(dtypes: Sequence[str]) -> str:
    """Formats as tables show them: one as it is, several as a list."""
    return dtypes[0] if len(dtypes) == 1 else str(list(dtypes)) if dtypes else ""


_WIDE_WEIGHT = "check that its input is not qint16 as well, and that the chip has such weights; otherwise make it qint8"
_FIXED_WEIGHT = "check that the scale covers the largest weight: 128 times the scale in qint8, 32768 times in qint16"
_OTHER_FORMAT = "if the change of format is not meant, give this module the format of what comes before it"
_NO_OUTPUT_FORMAT = "right for an output of the model (high precision); otherwise give it a qconfig with an activation"
_FIXED = "check that the scale covers the known range: 128 times the scale in qint8, 32768 times in qint16"
_FIXED_INPUT = "an input has the scale of the module that gives it: check that module's fixed scale"


def messages(recording: Recording) -> Iterator[Message]:
    """Formats that may be intended, and deserve a look."""
    for call in recording.calls:
        if isinstance(call.module, DeQuantStub):
            continue

        def say(text: str, remedy: str, call: CallRow = call) -> Message:
            return Message(call.name, type(call.module), text, remedy)

        weight, quantizer = _weight_quantizer(call.module), call.quantizer
        if isinstance(weight, FakeQuantize) and weight.dtype != qint8:
            yield say(f"{weight.dtype} weight!!!", _WIDE_WEIGHT)
        if isinstance(weight, FakeQuantize) and weight.is_fixed:
            yield say(f"Fixed weight scale {_scale(weight)}", _FIXED_WEIGHT)
        before = {x.dtype for x in call.inputs if x.is_integer}
        after = [x.dtype for x in call.outputs if x.is_integer]
        if before and after and not before.issuperset(after[:1]):
            dtypes = shown(_dtypes(call.inputs))
            yield say(f"input dtype {dtypes} is not same with out dtype {after[0]}", _OTHER_FORMAT)
        is_real = bool(call.outputs) and all(x.is_float for x in call.outputs)
        has_qconfig = getattr(call.module, "qconfig", None) is not None
        if quantizer is None and has_qconfig and is_real and not _unread(recording, call):
            yield say("output activation is not quantized", _NO_OUTPUT_FORMAT)
        for scale in dict.fromkeys(_input_scales(call.module)):
            yield say(f"Fixed input scale {scale}", _FIXED_INPUT)
        if isinstance(quantizer, FakeQuantize) and quantizer.is_fixed:
            yield say(f"Fixed scale {_scale(quantizer)}", _FIXED)


def _input_scales(module: nn.Module) -> Iterator[float]:
    """The fixed scales that a module's qconfig asks of its inputs."""
    parts = getattr(getattr(module, "qconfig", None), "input", None)
    for part in parts if isinstance(parts, tuple) else (parts,):
        scale = getattr(part, "kwargs", {}).get("scale")
        if scale is not None:
            yield float(scale)


def _scale(quantizer: FakeQuantize) -> Any:
    scale = quantizer.scale.tolist()
    return scale[0] if len(scale) == 1 else scale


def compute_types(calls: Iterable[CallRow]) -> Iterator[ComputeType]:
    """Layers that multiply real numbers by integers."""
    for call in calls:
        weight = _weight_quantizer(call.module)
        if isinstance(weight, FakeQuantize) and call.inputs and call.inputs[0].is_float and not _is_dynamic(call):
            input = call.inputs[0].dtype.removeprefix("torch.")
            yield ComputeType(call.name, input, str(weight.dtype).removeprefix("q"))


def _is_dynamic(call: CallRow) -> bool:
    """Does a layer quantize its input itself?"""
    return isinstance(call.module, QATGemm) and call.module.dynamic is not None


# -- what the guide on common mistakes warns of


def mistakes(recording: Recording) -> Iterator[Message]:
    """Common mistakes, in the order of the calls; at last the modules that never ran."""
    counts = recording.counts
    for call in recording.calls:
        texts = [
            _low_precision(recording, call), _not_dequantized(recording, call), _float_input(recording, call),
            _unread(recording, call), _off_centre(recording, call), _clipped(call), _vanishing(recording, call),
            _format(recording, call), _dual_int16(call),
        ]  # fmt: skip
        if isinstance(call.module, FloatFunctional) and counts[call.path] > 1 and not call.repetition:
            texts.append(_called_again(call.path, counts[call.path]))
        for text in texts:
            if text:
                yield Message(call.name, type(call.module), text)
    if recording.failure is not None:  # nobody knows what would have run
        return
    for path, count in counts.items():
        if count == 0:
            text = _TRAINING_ONLY if path in recording.training_only else _never_called(recording)
            yield Message(path, type(recording.operators[path]), text)


_TRAINING_ONLY = (
    "is called in training mode only, and not deployed: nothing to do for a loss or an auxiliary head, but what lies "
    "behind a DeQuantStub needs no qconfig"
)


def _never_called(recording: Recording) -> str:
    if recording.training_failure is None:
        modes = "is never called, neither in eval nor in training mode"
    else:
        why = str(recording.training_failure).splitlines()[0].rstrip(".")
        modes = f"is never called in eval mode (in training mode {why})"
    return f"{modes}: remove it, or give example inputs that reach it"


def _called_again(path: str, count: int) -> str:
    if is_generated(path):
        return f"this line runs {count} times with one scale; own_scales gives each time its own"
    return f"a FloatFunctional has one scale and is called {count} times; define one for each, or use own_scales"


def _can_be_real(call: CallRow) -> bool:
    """Can the accumulator of this operator leave as float?"""
    row = row_named(getattr(call.module, "operator", ""))
    return row is not None and row.has_real_output and call.method in ("", "matmul")


def _is_nothing(module: nn.Module) -> bool:
    row = row_of_module(type(module))
    return row is not None and row.does_nothing


def _is_output(recording: Recording, call: CallRow) -> bool:
    """Does a result go to DeQuantStubs only, perhaps through a Dropout?"""
    consumers = recording.consumers(call)
    return bool(consumers) and all(
        _is_output(recording, c)
        if _is_nothing(c.module)
        else isinstance(c.module, DeQuantStub) and not c.module.is_before_cpu
        for c in consumers
    )


def _is_shared_output(recording: Recording, call: CallRow) -> bool:
    """Is a module an output in some of its calls, and inside the model in others? One qconfig serves neither well."""
    ends = {_is_output(recording, c) for c in recording.calls if c.path == call.path and recording.consumers(c)}
    return len(ends) == 2


_OWN_LAYER = "give that call a layer of its own, which may share the weight"


def _low_precision(recording: Recording, call: CallRow) -> str:
    is_output = _is_output(recording, call)
    if not is_output or not isinstance(call.quantizer, FakeQuantize) or not _can_be_real(call):
        return ""
    if _is_shared_output(recording, call):
        return (
            f"output of the model in {call.quantizer.dtype}, as other calls of this module are not outputs and need "
            f"that format: where the precision of the output matters, {_OWN_LAYER}"
        )
    between = [f"`{name.strip('_')}`" for name in recording.functions.get(call.index, ())]
    once = f" once {', '.join(between)} is behind the DeQuantStub" if between else ""
    return (
        f"output of the model in {call.quantizer.dtype}, and high precision is possible{once}: give this module a "
        "qconfig without activation, such as default_qat_8bit_weight_32bit_out_fake_quant_qconfig"
    )


def _unread(recording: Recording, call: CallRow) -> str:
    """A high-precision result that goes nowhere; results with a scale have lines of their own in the tables."""
    if recording.failure is not None or not _is_high_precision(call) or not call.outputs:
        return ""
    is_read = recording.uses.get(call.index) or call.index in recording.results or recording.consumers(call)
    return "" if is_read else "its result is never read: remove the call, or use the result"


def _not_dequantized(recording: Recording, call: CallRow) -> str:
    if call.index not in recording.results or not any(x.is_quantized for x in call.outputs):
        return ""
    return (
        "the model hands out a quantized tensor: put a DeQuantStub after it, one for each output of the deployed model"
    )


def _float_input(recording: Recording, call: CallRow) -> str:
    module = call.module
    if isinstance(module, (QuantStub, DeQuantStub)) or getattr(module, "qconfig", None) is None:
        return ""
    floats = [x for x in call.inputs if x.dtype == "torch.float32"]
    if not floats or isinstance(call.quantizer, FakeCast) or _is_dynamic(call):
        return ""
    if isinstance(module, QATModule) and not module.takes_real:
        sources = dict.fromkeys(recording.calls[x.origin] for x in floats if x.origin is not None)
        real = [c.name for c in sources if _is_high_precision(c)]
        if any(_is_shared_output(recording, c) for c in sources if _is_high_precision(c)):
            return (
                f"float input: {', '.join(real)} has a high-precision output, which is right for its calls that are "
                f"outputs of the model; for this one, {_OWN_LAYER}"
            )
        if real:
            return f"float input: {', '.join(real)} has a high-precision output; give it an activation in its qconfig"
        if any(x.is_quantized for x in call.inputs):
            return "float input of a quantized operator: put a QuantStub where this tensor enters"
    if any(x.is_quantized for x in (*call.inputs, *(() if isinstance(module, QATModule) else call.outputs))):
        return ""
    return (
        "has a qconfig and sees float tensors only: if this is pre- or post-processing or a loss, set qconfig = None; "
        "if it is to be quantized, put a QuantStub before it"
    )


def _is_high_precision(call: CallRow) -> bool:
    return isinstance(call.module, QATModule) and call.quantizer is None and _can_be_real(call)


def is_image(shape: tuple[int, ...]) -> bool:
    """Can a tensor of this shape be an image?"""
    if len(shape) != 4:
        return False
    _, a, b, c = shape
    return (a in (1, 3) and min(b, c) >= _SMALLEST_IMAGE) or (c in (1, 3) and min(a, b) >= _SMALLEST_IMAGE)


def is_factor(takers: Iterable[str]) -> bool:
    """Is a tensor that these operators take, by their names, a mask or a weight rather than an image?

    >>> is_factor(["mul"]), is_factor(["mul", "conv2d"]), is_factor([])
    (True, False, False)
    """
    names = set(takers)
    return bool(names) and names <= {"mul"}


def _off_centre(recording: Recording, call: CallRow) -> str:
    """An image, as far as a shape can tell, that uses one half of the integers."""
    if not isinstance(call.module, QuantStub) or len(call.inputs) != 1:
        return ""
    if is_factor(taker.method or type(taker.module).__name__ for taker in recording.consumers(call)):
        return ""
    (x,) = call.inputs
    if not is_image(x.shape) or x.low is None or x.high is None or x.low < 0 or x.high <= 0:
        return ""
    return (
        f"image input in [{x.low:.4g}, {x.high:.4g}] is not centred, half of the integers are not used: images are "
        "centred YUV444 on the chip; normalise to [-1, 1] and use QuantStub(scale=1/128)"
    )


def _clipped(call: CallRow) -> str:
    """Values beyond the reach of a fixed scale."""
    quantizer = call.quantizer
    if not isinstance(quantizer, FakeQuantize) or not quantizer.is_fixed or quantizer.scale.numel() != 1:
        return ""
    reach = (quantizer.quant_max + 1) * float(quantizer.scale)
    largest = max((x.largest for x in call.outputs), default=0.0)
    if largest <= reach:
        return ""
    return (
        f"values reach {largest:.4g} and the fixed scale {float(quantizer.scale):.4g} ends at {reach:.4g}: what lies "
        f"beyond is clipped; use a scale of at least {largest / (quantizer.quant_max + 1):.4g}, or none"
    )


def vanishes(largest: float, step: float) -> bool:
    """Are values up to this magnitude all 0 on a grid with this step?"""
    return largest < step / 2


def _vanishing(recording: Recording, call: CallRow) -> str:
    """An operand that is all 0 in the scale that the result will have."""
    quantizer, name = call.quantizer, call.method or getattr(call.module, "operator", "")
    if name not in JOINS or not isinstance(quantizer, FakeQuantize) or quantizer.is_fixed or len(call.outputs) != 1:
        return ""
    step = call.outputs[0].largest / quantizer.activation_post_process.half_range
    for x in call.inputs:
        is_constant = x.low == x.high  # 1e-6 is there for a reason, all 0 or not
        if x.low is None or is_constant or not vanishes(x.largest, step):
            continue
        operand = "an operand" if x.origin is None else f"`{recording.calls[x.origin].name}`"
        return (
            f"{operand} reaches {x.largest:.4g} and the result {call.outputs[0].largest:.4g}: one step in "
            f"{quantizer.dtype} is {step:.4g}, so that nothing is left of it; bring the operands to similar ranges"
            f"{', or use qint16' if quantizer.dtype == qint8 else ''}"
        )
    return ""


def _format(recording: Recording, call: CallRow) -> str:
    """An integer format that the published tables do not give the operator on this chip."""
    if isinstance(call.module, (QuantStub, DeQuantStub)):
        return ""
    row = row_named(row_name_of(call.method, ()) if call.method else getattr(call.module, "operator", ""))
    support = None if row is None or recording.march is None else row.support(recording.march)
    if row is None or support is None:
        return ""
    wrong = [x.dtype for x in call.inputs if x.is_integer and x.dtype not in support.inputs]
    if not wrong:
        return ""
    return (
        f"{wrong[0]} input, and the published tables give {row.name} {', '.join(support.inputs)} on {recording.march}: "
        "set such a format for the module that gives this input"
    )


def _dual_int16(call: CallRow) -> str:
    weight = _weight_quantizer(call.module)
    is_wide = isinstance(weight, FakeQuantize) and weight.dtype == qint16
    if not is_wide or not call.inputs or call.inputs[0].dtype != str(qint16):
        return ""
    return (
        "input and weight are both qint16, which J6M multiplies from OE 3.5 on only: make one of them qint8, "
        "the weight if in doubt"
    )
