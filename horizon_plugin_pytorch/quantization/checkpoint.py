"""Checkpoints between stages: what a state dict lacks or has too much, module by module."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.nn.placed import FusedAway
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.passes.own_scales import completed

_QUANTIZER = re.compile(r"(?:(?P<owner>.*?)\.)?(?P<part>activation_post_process|weight_fake_quant)\.(?P<buffer>.+)")
_PARTS = {"activation_post_process": "output", "weight_fake_quant": "weight"}
_SWITCHES = (".fake_quant_enabled", ".observer_enabled")
_WRAPPERS = ("module.", "_orig_mod.")  # DataParallel and DistributedDataParallel; torch.compile
_SHOWN = 40  # modules of a section that a message names

ByModule = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class StateDictMismatch:
    """Where a state dict and a prepared model differ; each part gives names by the path of their module.

    Args:
        missing_quantization: outputs and weights of the model whose scales the state dict does not have.
        unexpected_quantization: those that only the state dict has.
        missing_parameters, unexpected_parameters: the same for the model's own parameters and buffers.
        fused_parameters: what the state dict has for modules that `prepare` fused with others.
        is_float: has the state dict no scale at all?
        wrapper: the prefix, such as ``module.``, that all keys of one of the two have and those of the other lack.

    >>> print(StateDictMismatch(missing_quantization={"head.conv": ("output", "weight")}))
    missing quantization parameters (this was not quantized when the checkpoint was made: deployment logic that was
    left float then, or logic that is not deployed and is quantized now):
      head.conv: output, weight
    """

    missing_quantization: ByModule = field(default_factory=dict)
    unexpected_quantization: ByModule = field(default_factory=dict)
    missing_parameters: ByModule = field(default_factory=dict)
    unexpected_parameters: ByModule = field(default_factory=dict)
    fused_parameters: ByModule = field(default_factory=dict)
    is_float: bool = False
    wrapper: str = ""

    def __bool__(self) -> bool:
        return any((
            self.missing_quantization, self.unexpected_quantization, self.missing_parameters,
            self.unexpected_parameters, self.fused_parameters, self.wrapper,
        ))  # fmt: skip

    def __str__(self) -> str:
        if self.wrapper:
            return (
                f"the keys of the checkpoint or of the model begin with `{self.wrapper}`, and those of the other do "
                "not: one was wrapped (DataParallel, DistributedDataParallel, torch.compile). Load the state dict of "
                "the wrapped model itself (`wrapped.module.state_dict()`) into the model itself; load_calib_state_dict "
                "takes either."
            )
        lines = []
        if self.is_float:
            lines.append(
                f"the checkpoint is of a float model: {len(self.missing_quantization)} modules of this model keep the "
                "scales that they have; calibrate or train before you validate or convert"
            )
        into = "modules that others are fused into; or " if self.fused_parameters else ""
        sections = (
            ("missing quantization parameters (this was not quantized when the checkpoint was made: deployment logic "
             "that was left float then, or logic that is not deployed and is quantized now)",
             {} if self.is_float else self.missing_quantization),
            ("unexpected quantization parameters (this model does not quantize it: deployment logic that is left float "
             "now, or logic that is not deployed and was quantized then)", self.unexpected_quantization),
            ("parameters of modules that `prepare` fused with others, and lost here (load a float checkpoint into "
             "the float model, and prepare that)", self.fused_parameters),
            (f"missing parameters ({into}the forward that was prepared is not the one of the checkpoint)",
             self.missing_parameters),
            ("unexpected parameters (the forward that was prepared is not the one of the checkpoint)",
             self.unexpected_parameters),
        )  # fmt: skip
        for title, rows in sections:
            shown = [f"  {path or '(top)'}: {', '.join(names)}" for path, names in rows.items()]
            if len(shown) > _SHOWN:
                shown[_SHOWN:] = [f"  and {len(shown) - _SHOWN} more modules; `compare_state_dict` gives all"]
            if shown:
                lines += [f"{title}:", *shown]
        return "\n".join(lines)


def _split(keys: Iterable[str]) -> tuple[ByModule, ByModule]:
    """Keys by module: those of fake quantizers, and the others."""
    quantization: dict[str, dict[str, None]] = {}
    parameters: dict[str, dict[str, None]] = {}
    for key in keys:
        found = _QUANTIZER.fullmatch(key)
        if found is None:
            path, _, name = key.rpartition(".")
            parameters.setdefault(path, {})[name] = None
        else:
            quantization.setdefault(found["owner"] or "", {})[_PARTS[found["part"]]] = None
    return {k: tuple(v) for k, v in quantization.items()}, {k: tuple(v) for k, v in parameters.items()}


def _is_fused(model: nn.Module, path: str) -> bool:
    """Has fusion left nothing at this path? The model may itself be part of another, which is in the path then."""
    parts = path.split(".")
    for start in range(len(parts)):
        with contextlib.suppress(AttributeError):
            return isinstance(model.get_submodule(".".join(parts[start:])), (nn.Identity, FusedAway))
    return False


def _wrapper_of(missing: Collection[str], unexpected: Collection[str]) -> str:
    """The prefix that makes unexpected keys of missing ones, or the other way round."""
    for prefix in _WRAPPERS:
        for short, long in ((missing, unexpected), (unexpected, missing)):
            shared = {f"{prefix}{key}" for key in short}.intersection(long)
            if 2 * len(shared) > min(len(short), len(long)):
                return prefix
    return ""


def _mismatch(model: nn.Module, missing: Collection[str], unexpected: Collection[str]) -> StateDictMismatch:
    """The differences by module.

    Statistics are no difference where both sides have the scale: observers of another kind keep others.
    """
    wrapper = _wrapper_of(missing, unexpected)
    if wrapper:
        return StateDictMismatch(wrapper=wrapper)
    scales = {found.group() for key in (*missing, *unexpected) if (found := re.match(r".*\.scale$", key))}

    def is_detail(key: str) -> bool:
        found = _QUANTIZER.fullmatch(key)
        return found is not None and f"{key[: found.start('buffer')]}scale" not in scales

    missing_scales, missing_parameters = _split(key for key in missing if not is_detail(key))
    extra_scales, extra = _split(key for key in unexpected if not is_detail(key))
    fused = {path: names for path, names in extra.items() if path and _is_fused(model, path)}
    own = {path: names for path, names in extra.items() if path not in fused}
    quantizers = {m for m in model.modules() if isinstance(m, FakeQuantize)}
    lacking = [key for key in missing if key.endswith(".scale") and _QUANTIZER.fullmatch(key)]
    is_float = bool(quantizers) and len(lacking) >= len(quantizers) and not extra_scales
    return StateDictMismatch(missing_scales, extra_scales, missing_parameters, own, fused, is_float)


def compare_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> StateDictMismatch:
    """What a checkpoint lacks for a prepared model, and what it has too much, by module.

    A missing or unexpected scale says that logic was quantized in one of the two only; a missing or unexpected
    parameter, that the forward was another when the checkpoint was made.

    >>> compare_state_dict(nn.Linear(1, 1), {"weight": 0, "quant.activation_post_process.scale": 1})
    StateDictMismatch(missing_quantization={}, unexpected_quantization={'quant': ('output',)},
                      missing_parameters={'': ('bias',)}, unexpected_parameters={}, fused_parameters={},
                      is_float=False, wrapper='')
    """
    mine, theirs = model.state_dict().keys(), state_dict.keys()
    given = completed(model, state_dict)  # weights, and scales where there are none, of all calls of shared modules
    return _mismatch(model, [k for k in mine if k not in given], [k for k in theirs if k not in mine])


def report_mismatches(model: nn.Module) -> None:
    """Let a prepared model explain what is missing or unexpected when it loads a state dict, beside torch's own keys.

    `load_state_dict` gives and raises what it always does; a warning that names modules comes before.
    """
    model.register_load_state_dict_post_hook(_report)


_REPORTED = "load_state_dict: the checkpoint does not fit the prepared model"


def _report(model: nn.Module, keys: Any) -> None:
    mismatch = _mismatch(model, keys.missing_keys, keys.unexpected_keys)
    if mismatch and any(isinstance(m, FakeQuantize) for m in model.modules()):  # not one that was converted since
        warnings.warn(f"{_REPORTED}:\n{mismatch}", QuantizationWarning, stacklevel=4)


def _rewrapped(model_keys: Collection[str], state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the prefix of a wrapper removed or added, as the model has it."""
    for prefix in _WRAPPERS:
        has_model = all(key.startswith(prefix) for key in model_keys)
        has_state = all(key.startswith(prefix) for key in state_dict)
        if has_state and not has_model:
            return {key.removeprefix(prefix): value for key, value in state_dict.items()}
        if has_model and not has_state:
            return {f"{prefix}{key}": value for key, value in state_dict.items()}
    return state_dict


def load_calib_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> StateDictMismatch:
    """Load the state of a calibrated model into a prepared one: parameters, ranges and scales.

    What the calibrated model observed and rounded at the time it was saved does not matter: the fake-quantization
    state of `model` stays. A difference between the two is a warning that names modules. Either may be wrapped by
    DistributedDataParallel.

    Returns:
        The difference; it is false if there is none.

    >>> from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
    >>> calibrated, model = nn.Sequential(FakeQuantize()), nn.Sequential(FakeQuantize())
    >>> calibrated[0].set_qparams(0.5)
    >>> bool(load_calib_state_dict(model, calibrated.state_dict())), float(model[0].scale)
    (False, 0.5)
    """
    own = model.state_dict()
    state_dict = _rewrapped(own.keys(), state_dict)
    mismatch = compare_state_dict(model, state_dict)
    kept = {key: value for key, value in own.items() if key.endswith(_SWITCHES)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(_REPORTED), QuantizationWarning)  # it is told below
        model.load_state_dict({**state_dict, **kept}, strict=False)
    if mismatch:
        warnings.warn(f"load_calib_state_dict:\n{mismatch}", QuantizationWarning, stacklevel=2)
    return mismatch
