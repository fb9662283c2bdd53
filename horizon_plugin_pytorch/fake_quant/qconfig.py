"""Which fake quantizers a module gets."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, as_dtype, qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.dynamic import is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.fake_quant.fake_quantize import (
    FakeQuantize,
    default_8bit_fake_quant,
    default_weight_8bit_fake_quant,
)
from horizon_plugin_pytorch.fake_quant.learnable import LearnableFakeQuantize, PACTFakeQuantize
from horizon_plugin_pytorch.statistics.observer import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from horizon_plugin_pytorch.statistics.observer_names import OBSERVERS
from horizon_plugin_pytorch.statistics.observer_v2 import FixedScaleObserver, MinMaxObserver, MSEObserver
from horizon_plugin_pytorch.statistics.partial import Partial


class _Fields(NamedTuple):
    activation: Any
    weight: Any
    input: Any


class QConfig(_Fields):
    """Constructors of fake quantizers for a module's output, weight and input; None leaves that tensor alone.

    `output` is another name of `activation`.

    >>> q = QConfig(output=FakeQuantize.with_args(dtype=qint16), weight=None)
    >>> q.activation().dtype
    'qint16'
    """

    def __new__(cls, activation: Any = None, weight: Any = None, input: Any = None, output: Any = None) -> "QConfig":
        if activation is not None and output is not None and activation is not output:
            raise QuantizationConfigError("QConfig: `output` is another name of `activation`; give one of them.")
        return super().__new__(cls, activation if output is None else output, weight, input)

    @property
    def output(self) -> Any:
        """The output's fake quantizer."""
        return self.activation

    def __getnewargs__(self) -> tuple:
        return tuple(self)


_QUANTIZERS = {"fake_quant": FakeQuantize, "lsq": LearnableFakeQuantize, "pact": PACTFakeQuantize}
_PER_CHANNEL = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}


def _observers(what: str) -> dict[str, type]:
    """The observers of activations or of weights, by name."""
    found = {name: cls for name, cls in OBSERVERS.items() if what == "activation" or cls._is_for_weights}
    return found | {"min_max": MovingAverageMinMaxObserver}  # the documents name the first generation's class


def _partial(what: str, fake_quant: str | None, observer: str | None, qkwargs: dict | None) -> Partial | None:
    if fake_quant is None or (observer is None and not (qkwargs or {}).get("observer")):
        return None
    if fake_quant not in _QUANTIZERS:
        raise QuantizationConfigError(
            f"get_default_qconfig: {what}_fake_quant={fake_quant!r} is not available; choose one of "
            f"{', '.join(_QUANTIZERS)}, or None."
        )
    kwargs = dict(qkwargs or {})
    if "observer" not in kwargs:
        found = _observers(what)
        if observer not in found:
            raise QuantizationConfigError(
                f"get_default_qconfig: {what}_observer={observer!r} is not available; choose one of {', '.join(found)}."
            )
        kwargs["observer"] = found[observer]
    if kwargs["observer"] is MovingAverageMinMaxObserver and kwargs.get("qscheme") == torch.per_channel_symmetric:
        kwargs["observer"] = MovingAveragePerChannelMinMaxObserver
    if kwargs["observer"] is FixedScaleObserver and "scale" not in kwargs:
        raise QuantizationConfigError(
            f"get_default_qconfig: a fixed {what} scale needs {what}_qkwargs={{'scale': ...}}."
        )
    kwargs["dtype"] = as_dtype(kwargs.get("dtype", qint8))
    if kwargs["dtype"] not in (qint8, qint16):
        raise QuantizationConfigError(
            f"get_default_qconfig: {what} dtype {kwargs['dtype']} is not for tensors; choose qint8 or qint16. For an "
            "output in high precision use `get_default_qat_out_qconfig()`."
        )
    return _QUANTIZERS[fake_quant].with_args(**kwargs)


def get_default_qconfig(
    activation_fake_quant: str | None = "fake_quant",
    weight_fake_quant: str | None = "fake_quant",
    activation_observer: str | None = "min_max",
    weight_observer: str | None = "min_max",
    activation_qkwargs: dict | None = None,
    weight_qkwargs: dict | None = None,
) -> QConfig:
    """A qconfig from names.

    Args:
        activation_fake_quant, weight_fake_quant: ``"fake_quant"``, ``"lsq"`` or ``"pact"`` (scales that are trained),
            or None not to quantize.
        activation_observer: ``"min_max"``, ``"percentile"``, ``"mse"``, ``"kl"``, ``"mix"``, ``"histogram"``,
            ``"clip"``, ``"clip_std"`` or ``"fixed_scale"``.
        weight_observer: ``"min_max"``, ``"percentile"``, ``"mse"``, ``"clip"``, ``"clip_std"`` or ``"fixed_scale"``.
        activation_qkwargs, weight_qkwargs: dtype, averaging_constant, qscheme, ch_axis, an observer class, a scale, ...
            Weights are per channel (axis 0) unless weight_qkwargs says otherwise. Their scale is the guides'
            ``max / 127.5``, which clips the largest weight by half a step; ``weight_qkwargs={"unclipped": True}`` makes
            it ``max / 127``, as in `get_qconfig`.

    >>> get_default_qconfig(activation_qkwargs={"dtype": qint16}).activation().dtype
    'qint16'
    >>> weights = torch.tensor([[2.54, -1.0]])
    >>> for settings in ({}, {"unclipped": True}):
    ...     print(get_default_qconfig(weight_qkwargs=settings).weight().weight(weights))
    tensor([[ 2.5300, -0.9961]])
    tensor([[ 2.5400, -1.0000]])
    """
    return QConfig(
        activation=_partial("activation", activation_fake_quant, activation_observer, activation_qkwargs),
        weight=_partial("weight", weight_fake_quant, weight_observer, _PER_CHANNEL | (weight_qkwargs or {})),
    )


def _format(dtype: Any, bits: int | None) -> Any:
    """A number format, which the oldest scripts give as a number of bits."""
    chosen = dtype if bits is None else bits
    return as_dtype(f"qint{chosen}" if isinstance(chosen, int) else chosen)


def _tell_backend(backend: str, what: str) -> None:
    if backend:
        warn(f"{what}: backend={backend!r} changes nothing: set_march chooses the chip.", QuantizationWarning)


def get_default_qat_qconfig(
    dtype: Any = "qint8",
    weight_dtype: Any = "qint8",
    activation_fake_quant: str | None = "fake_quant",
    weight_fake_quant: str | None = "fake_quant",
    activation_qkwargs: dict | None = None,
    weight_qkwargs: dict | None = None,
    backend: str = "",
    bits: int | None = None,
) -> QConfig:
    """The first generation's name of `get_default_qconfig`, with the formats as arguments.

    Args:
        dtype, weight_dtype: formats of the output and the weight, as a dtype, a name, or a number of bits.
        bits: an older name of `dtype`.

    >>> get_default_qat_qconfig(dtype="qint16").activation().dtype
    'qint16'
    """
    _tell_backend(backend, "get_default_qat_qconfig")
    return get_default_qconfig(
        activation_fake_quant,
        weight_fake_quant,
        activation_qkwargs={"dtype": _format(dtype, bits)} | (activation_qkwargs or {}),
        weight_qkwargs={"dtype": _format(weight_dtype, None)} | (weight_qkwargs or {}),
    )


def get_default_qat_out_qconfig(
    dtype: Any = "qint8",
    weight_fake_quant: str | None = "fake_quant",
    weight_qkwargs: dict | None = None,
    backend: str = "",
    bits: int | None = None,
) -> QConfig:
    """A qconfig for output layers: the accumulator leaves as float. `dtype` (or `bits`) is the weight's format.

    >>> get_default_qat_out_qconfig().activation is None
    True
    """
    _tell_backend(backend, "get_default_qat_out_qconfig")
    return get_default_qconfig(
        None, weight_fake_quant, None, weight_qkwargs={"dtype": _format(dtype, bits)} | (weight_qkwargs or {})
    )


def get_default_calib_qconfig(
    dtype: Any = "qint8", calib_qkwargs: dict | None = None, backend: str = "", bits: int | None = None
) -> QConfig:
    """A qconfig for calibration: percentile observer on activations, min_max on weights.

    >>> type(get_default_calib_qconfig().activation().activation_post_process).__name__
    'PercentileObserver'
    """
    _tell_backend(backend, "get_default_calib_qconfig")
    return get_default_qconfig(
        activation_observer="percentile", activation_qkwargs={"dtype": _format(dtype, bits)} | (calib_qkwargs or {})
    )


# Where no observer is named. The documents name MSEObserver (HistogramObserver since 3.3) for calibration, and
# MinMaxObserver for training.
CALIBRATION_OBSERVER: type = MSEObserver
TRAINING_OBSERVER: type = MinMaxObserver


def as_format(dtype: Any) -> QuantDType | torch.dtype:
    """A number format of a setter or template: an integer format, ``torch.float16`` or ``torch.float32``.

    >>> as_format("qint8"), as_format(torch.float16)
    ('qint8', torch.float16)
    """
    name = str(dtype).removeprefix("torch.")
    if name in ("float16", "half"):
        return torch.float16
    if name in ("float32", "float"):
        return torch.float32
    found = as_dtype(dtype)
    if found not in (qint8, qint16):
        raise QuantizationConfigError(f"{found} is not for tensors; choose qint8, qint16, torch.float16 or float32.")
    return found


def format_of(part: Any) -> QuantDType | torch.dtype:
    """The number format of a part of a qconfig; ``torch.float32`` for None, which is high precision.

    >>> format_of(get_default_qconfig().activation), format_of(None)
    ('qint8', torch.float32)
    """
    if part is None:
        return torch.float32
    return part.kwargs.get("dtype", torch.float16) if is_cast(part) else as_dtype(part.kwargs.get("dtype", qint8))


def asked_input(qconfig: Any, position: int) -> Any:
    """What a qconfig says of an operand: of this one, or of the last one that it names, or of all."""
    part = getattr(qconfig, "input", None)
    if isinstance(part, (tuple, list)):
        return part[min(position, len(part) - 1)] if part else None
    return part


def unasked(qconfig: Any) -> Any:
    """A qconfig for many operators: what it says of inputs counts where they must be quantized, and narrows none."""
    part = getattr(qconfig, "input", None)
    if not isinstance(part, Partial) or part.is_default:
        return qconfig
    return qconfig._replace(input=replace(part, is_default=True))


def with_output(qconfig: QConfig, part: Any) -> QConfig:
    """A qconfig with another output. Where an integer one becomes real, the operator still takes real numbers in it.

    >>> with_output(get_qconfig(out_dtype=qint16), None).input.kwargs["dtype"]
    'qint16'
    """
    before, asked = qconfig.activation, getattr(qconfig, "input", None)
    is_integer = isinstance(format_of(before), QuantDType)
    if is_integer and not isinstance(format_of(part), QuantDType) and (asked is None or _is_unasked(asked)):
        base = before if asked is None else asked
        is_fixed = base.kwargs.get("scale") is not None  # which is that of the output
        asked = replace(with_format(None if is_fixed else base, format_of(before)), is_default=True)
    return qconfig._replace(activation=part, input=asked)


def _is_unasked(part: Any) -> bool:
    return isinstance(part, Partial) and part.is_default and not is_dynamic(part)


def spell(part: Any) -> str:
    """A part of a qconfig in words: its format, and its scale if that is given.

    >>> spell(get_default_qconfig().activation), spell(None)
    ('qint8', 'float32')
    """
    if isinstance(part, (tuple, list)):
        return ", ".join(spell(one) for one in part)
    if part is not None and not isinstance(part, Partial):
        return type(part).__name__
    text = str(format_of(part)).removeprefix("torch.")
    kwargs = {} if part is None else part.kwargs
    if is_dynamic(part):
        return f"{text} dynamic (block_size {kwargs.get('block_size', 'full')}, dim {kwargs.get('dim', -1)})"
    scale = None if is_cast(part) else kwargs.get("scale")
    if scale is None:
        return text
    is_number = isinstance(scale, (int, float)) or scale.numel() == 1
    return f"{text} of scale {float(scale):g}" if is_number else f"{text} (fixed)"


def with_format(part: Any, dtype: Any, threshold: float | None = None) -> Partial:
    """A part of a qconfig in another number format; its observer stays, and a fixed scale covers the same range.

    Args:
        part: what it was; one without an integer format gets the observer of calibration.
        threshold: the largest magnitude, which fixes the scale: ``threshold / 128`` in int8, ``/ 32768`` in int16.

    >>> with_format(get_default_qconfig().activation, qint16).kwargs["dtype"]
    'qint16'
    >>> with_format(None, qint8, threshold=1.0).kwargs["scale"]
    0.0078125
    """
    chosen = as_format(dtype)
    if not isinstance(chosen, QuantDType):
        if threshold is not None:
            raise QuantizationConfigError(f"a threshold fixes the scale of integers; {chosen} has none.")
        return FakeCast.with_args(dtype=chosen)
    if threshold is not None:
        if not 0 < threshold < math.inf:
            raise QuantizationConfigError(f"a threshold must be positive and finite, got {threshold}.")
        return FakeQuantize.with_args(observer=FixedScaleObserver, dtype=chosen, scale=threshold / -chosen.min)
    if part is None or is_cast(part):
        return FakeQuantize.with_args(observer=CALIBRATION_OBSERVER, dtype=chosen)
    changed = {"dtype": chosen} | {name: None for name in ("quant_min", "quant_max") if name in part.kwargs}
    if part.kwargs.get("scale") is not None:
        changed["scale"] = part.kwargs["scale"] * (as_dtype(part.kwargs.get("dtype", qint8)).min / chosen.min)
    return part.with_args(**changed)


def default_weight(observer: type | None = None) -> Partial:
    """The weights of `get_qconfig`, setters and templates: int8, a scale for each channel, and nothing clipped.

    Args:
        observer: its class; one of the user's that does not know `unclipped` makes its scales by its own rule.

    >>> default_weight()(channel_len=2).activation_post_process.half_range
    127.0
    """
    settings: dict[str, Any] = {} if observer is None else {"observer": observer}
    if observer is None or _takes(observer, "unclipped"):
        settings["unclipped"] = True
    weight = get_default_qconfig(weight_qkwargs=settings).weight
    assert weight is not None
    return weight


def _takes(cls: Any, argument: str) -> bool:
    """Does a class take this argument, or any?"""
    parameters = inspect.signature(cls).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def get_qconfig(
    observer: type | None = None,
    in_dtype: Any = None,
    weight_dtype: Any = qint8,
    out_dtype: Any = qint8,
    fix_scale: bool = False,
    weight_observer: type | None = None,
) -> QConfig:
    """A qconfig from an observer and number formats.

    Args:
        observer: a class of `observer_v2`, of inputs and outputs; None takes that of calibration.
        in_dtype: what an operator takes. None takes integers as they come, and float16 in the format of the output. A
            narrower format than what comes is made before it; a wider one changes nothing.
        weight_dtype, out_dtype: integer formats, or ``torch.float16`` for numbers that are cast. None or
            ``torch.float32`` as `out_dtype` is an output in high precision.
        fix_scale: keep scales at what calibration gave, while training.
        weight_observer: a class of `observer_v2`, of weights, which have one scale a channel; None takes min_max, as
            documented. The scale is ``max / 127`` (int16: ``max / 32767``), so that the largest weight is not clipped.

    >>> get_qconfig(out_dtype=qint16).activation().dtype
    'qint16'
    >>> get_qconfig(weight_dtype=torch.float16, out_dtype=torch.float16).activation()
    FakeCast(dtype=torch.float16, min_val=-65504.0, max_val=65504.0)
    """
    for name, given in (("observer", observer), ("weight_observer", weight_observer)):
        if given is not None and not _is_observer(given):
            raise QuantizationConfigError(
                f"get_qconfig: {name} must be an observer class, such as `observer_v2.MinMaxObserver`, got {given!r}."
            )
    if not isinstance(fix_scale, bool):
        raise QuantizationConfigError(f"get_qconfig: fix_scale must be True or False, got {fix_scale!r}.")
    kwargs: dict[str, Any] = {"averaging_constant": 0} if fix_scale else {}
    base = FakeQuantize.with_args(observer=observer or CALIBRATION_OBSERVER, **kwargs)
    weight = default_weight(weight_observer)

    def part(base: Partial, dtype: Any, what: str) -> Partial | None:
        try:
            return None if dtype is None or as_format(dtype) is torch.float32 else with_format(base, dtype)
        except (QuantizationConfigError, TypeError, ValueError) as error:
            raise QuantizationConfigError(f"get_qconfig: {what}={dtype!r}: {error}") from None

    return QConfig(
        activation=part(base, out_dtype, "out_dtype"),
        weight=part(weight, weight_dtype, "weight_dtype"),
        input=replace(with_format(base, qint8), is_default=True)
        if in_dtype is None
        else part(base, in_dtype, "in_dtype"),
    )


def _is_observer(observer: Any) -> bool:
    return isinstance(observer, type) and hasattr(observer, "calculate_qparams")


def per_channel_qat_8bit_qconfig() -> QConfig:
    """int8 for QAT with a scale for each output channel of weights: `default_qat_8bit_fake_quant_qconfig`.

    The documents name it and do not define it; the name says what it gives.

    >>> per_channel_qat_8bit_qconfig().weight().qscheme
    torch.per_channel_symmetric
    """
    return default_qat_8bit_fake_quant_qconfig


default_qat_8bit_fake_quant_qconfig = QConfig(default_8bit_fake_quant, default_weight_8bit_fake_quant)
default_qat_8bit_fixed_act_fake_quant_qconfig = get_default_qconfig(activation_qkwargs={"averaging_constant": 0})
default_qat_8bit_weight_16bit_act_fake_quant_qconfig = get_default_qconfig(activation_qkwargs={"dtype": qint16})
default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig = get_default_qconfig(
    activation_qkwargs={"dtype": qint16, "averaging_constant": 0}
)
default_qat_out_8bit_fake_quant_qconfig = get_default_qconfig(activation_fake_quant=None, activation_observer=None)
default_qat_8bit_weight_32bit_out_fake_quant_qconfig = default_qat_out_8bit_fake_quant_qconfig
default_calib_8bit_fake_quant_qconfig = get_default_qconfig(activation_observer="percentile")
default_calib_8bit_weight_16bit_act_fake_quant_qconfig = get_default_qconfig(
    activation_observer="percentile", activation_qkwargs={"dtype": qint16}
)
default_qat_8bit_lsq_quant_qconfig = get_default_qconfig(
    activation_fake_quant="lsq",
    weight_fake_quant="lsq",
    activation_qkwargs={"use_grad_scaling": True, "averaging_constant": 1.0},
    weight_qkwargs={"use_grad_scaling": True, "averaging_constant": 1.0},
)
default_calib_out_8bit_fake_quant_qconfig = default_qat_out_8bit_fake_quant_qconfig
default_calib_8bit_weight_32bit_out_fake_quant_qconfig = default_qat_out_8bit_fake_quant_qconfig

show_at(
    "quantization.qconfig",
    QConfig,
    get_default_qconfig,
    get_default_qat_qconfig,
    get_default_qat_out_qconfig,
    get_default_calib_qconfig,
    as_format,
    format_of,
    asked_input,
    unasked,
    with_output,
    spell,
    with_format,
    default_weight,
    get_qconfig,
    per_channel_qat_8bit_qconfig,
)
