"""Checkpoints between stages: what a state dict lacks or has too much, module by module."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    CheckpointError,
    QuantizationWarning,
    listed,
    require_module,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.loaded_scale import LoadedScale
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.notes import hidden
from horizon_plugin_pytorch.passes.own_scales import completed
from horizon_plugin_pytorch.passes.unmet import unmet_keys
from horizon_plugin_pytorch.runtime.located import FusedAway

_QUANTIZER = re.compile(r"(?:(?P<owner>.*?)\.)?(?P<part>activation_post_process|weight_fake_quant)\.(?P<buffer>.+)")
_PARTS = {"activation_post_process": "output", "weight_fake_quant": "weight"}
_SWITCHES = (".fake_quant_enabled", ".observer_enabled")
# DataParallel and DistributedDataParallel; torch.compile; and one around the other.
_WRAPPERS = ("module._orig_mod.", "_orig_mod.module.", "module.", "_orig_mod.")
_CALL = re.compile(r"_call_\d+_*(?=\.|$)")  # what `own_scales` adds to the names of further calls
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
        joined_calls: modules with one scale whose calls have own scales in the state dict, with the names of these.
        is_float: has the state dict no scale at all?
        is_foreign: has it no entry of the model at all?
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
    joined_calls: ByModule = field(default_factory=dict)
    is_float: bool = False
    is_foreign: bool = False
    wrapper: str = ""

    def __bool__(self) -> bool:
        return any((
            self.missing_quantization, self.unexpected_quantization, self.missing_parameters,
            self.unexpected_parameters, self.fused_parameters, self.joined_calls, self.wrapper,
        ))  # fmt: skip

    def __str__(self) -> str:
        if self.wrapper:
            return (
                f"the keys of the checkpoint or of the model begin with `{self.wrapper}`, and those of the other do "
                "not: one was wrapped (DataParallel, DistributedDataParallel, torch.compile). Load the state dict of "
                "the wrapped model itself (`wrapped.module.state_dict()`) into the model itself; load_calib_state_dict "
                "takes either."
            )
        if self.is_foreign:
            others = [*self.unexpected_parameters, *self.unexpected_quantization]
            has = f"it has `{'`, `'.join(others[:4])}`" if any(others) else "it has no parameters of modules"
            return f"the checkpoint has no entry of this model, and nothing was loaded: {has}. Is it the right file?"
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
            ("calls with own scales in the checkpoint, and one scale here, which covers the ranges of all (own_scales, "
             "as in the checkpoint, would keep them apart)", self.joined_calls),
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

    calls = _joined_calls(model.state_dict().keys(), unexpected)
    joined = {call for names in calls.values() for call in names}
    unexpected = [key for key in unexpected if not any(key.startswith(f"{call}.{_ACTIVATION}") for call in joined)]
    missing_scales, missing_parameters = _split(key for key in missing if not is_detail(key))
    extra_scales, extra = _split(key for key in unexpected if not is_detail(key))
    fused = {path: names for path, names in extra.items() if path and _is_fused(model, path)}
    own = {path: names for path, names in extra.items() if path not in fused}
    quantizers = {m for m in model.modules() if isinstance(m, FakeQuantize)}
    lacking = [key for key in missing if key.endswith(".scale") and _QUANTIZER.fullmatch(key)]
    is_foreign = len(missing) >= len(model.state_dict()) > 0
    is_float = bool(quantizers) and len(lacking) >= len(quantizers) and not extra_scales and not is_foreign
    return StateDictMismatch(missing_scales, extra_scales, missing_parameters, own, fused, calls, is_float, is_foreign)


def compare_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> StateDictMismatch:
    """What a checkpoint lacks for a prepared model, and what it has too much, by module.

    A missing or unexpected scale says that logic was quantized in one of the two only; a missing or unexpected
    parameter, that the forward was another when the checkpoint was made.

    >>> compare_state_dict(nn.Linear(1, 1), {"weight": 0, "quant.activation_post_process.scale": 1})
    StateDictMismatch(missing_quantization={}, unexpected_quantization={'quant': ('output',)},
                      missing_parameters={'': ('bias',)}, unexpected_parameters={}, fused_parameters={},
                      joined_calls={}, is_float=False, is_foreign=False, wrapper='')
    """
    mine, added = model.state_dict().keys(), _added_biases(model, state_dict)
    given = completed(model, state_dict)  # weights, and scales where there are none, of all calls of shared modules
    unmet = unmet_keys(model, state_dict.keys())
    known = {*mine, *added, *unmet}
    return _mismatch(model, [k for k in mine if k not in given], [k for k in state_dict if k not in known])


def report_mismatches(model: nn.Module) -> None:
    """Let a prepared model explain what is missing or unexpected when it loads a state dict, beside torch's own keys.

    `load_state_dict` gives and raises what it always does; a warning that names modules comes before.
    """
    model.register_load_state_dict_pre_hook(_before_loading)
    model.register_load_state_dict_post_hook(_report)


def refuse_other_formats(model: nn.Module) -> None:
    """Let a converted model refuse the integers of other formats before it loads anything."""
    model.register_load_state_dict_pre_hook(_before_loading)


_OUTCOMES = {
    LoadedScale.CONVERTED: (
        "the checkpoint's scales are those of another format in {count} places; they were converted, so that the "
        "ranges stay: {places}. `load_observer_params` does the same."
    ),
    LoadedScale.DOUBTFUL: (
        "the checkpoint is of an earlier version and does not say the formats of its scales; in {count} places they "
        "are neither those of their ranges nor near those of this model's format, and were taken as they are: "
        "{places}. If the checkpoint is of another format, load it into a model of that format, and move the scales "
        "with `load_observer_params`."
    ),
    LoadedScale.IGNORED: (
        "the checkpoint has other scales than the ones that are given in this model (`QuantStub(scale=...)`, a fixed "
        "scale or a threshold), and in {count} places the given ones stay: {places}. Give the checkpoint's scale, or "
        "none."
    ),
}
_REPORTED = "load_state_dict: the checkpoint does not fit the prepared model"


def _report(model: nn.Module, keys: Any) -> None:
    mismatch = _mismatch(model, keys.missing_keys, keys.unexpected_keys)
    if mismatch and any(isinstance(m, FakeQuantize) for m in model.modules()):  # not one that was converted since
        warn(f"{_REPORTED}:\n{mismatch}", QuantizationWarning)
    for outcome, message in _OUTCOMES.items():
        found = [m for m in model.modules() if isinstance(m, FakeQuantize) and m.loaded is outcome]
        if found:
            warn(message.format(count=len(found), places=_named(model, found)), CalibrationWarning)


def _named(model: nn.Module, quantizers: Collection[FakeQuantize]) -> str:
    paths = {m: name for name, m in model.named_modules()}
    names = [m.activation_post_process.owner or paths[m] for m in quantizers]
    return listed(names, _SHOWN)


def _before_loading(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Refuse what is no state of a prepared model, add biases that calibration added, join ranges of calls."""
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    if not any(isinstance(m, FakeQuantize) for m in model.modules()):
        _check_formats(model, own)
        return
    _check(own)
    _check_numbers(model, own)
    added = _added_biases(model, own)
    for layer in added.values():
        layer.add_bias()
    if added:  # for all calls of shared modules
        state_dict.update({prefix + key: value for key, value in completed(model, own).items()})
    for path, calls in _joined_calls(model.state_dict().keys(), own).items():
        state_dict.update({prefix + key: value for key, value in _join(own, path, calls).items()})


def _check_formats(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuse integers of another format before any of them is loaded: a mixture would mean nothing."""
    modules = ((path, m) for path, m in model.named_modules() if isinstance(m, QuantizedModule))
    found = [text for path, module in modules if (text := module.other_format(state_dict, f"{path}." if path else ""))]
    is_real = any("is torch.float" in text for text in found)
    if found:
        what, remedy = (
            ("has real weights, as float and prepared models do", "Load it into the prepared model, and convert that")
            if is_real
            else (
                "has integers of other formats",
                "Convert a model that was prepared with the formats of the checkpoint",
            )
        )
        raise CheckpointError(
            f"load_state_dict: the checkpoint {what}, and nothing was loaded: {listed(found)}. {remedy}."
        )


def _check_numbers(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Insist that constants which symbolic trace has read as numbers are those of the checkpoint."""
    for path, number in (hidden(model, "numbers_read", dict) or {}).items():
        value = state_dict.get(path)
        if isinstance(value, Tensor) and value.numel() == 1 and value.item() != number:
            raise CheckpointError(
                f"`{path}` is {value.item():g} in the checkpoint and was {number:g} when the model was prepared, where "
                "it is used as a number and became part of the traced graph. Load the float checkpoint first and "
                "prepare then; or prepare with `PrepareMethod.JIT_STRIP`, which reads it in each run."
            )


def _added_biases(model: nn.Module, keys: Collection[str]) -> dict[str, QATGemm]:
    """Biases that `correct_bias` gave to layers of a prepared model; by their keys, the layers here, without bias."""
    paths = {module: path for path, module in model.named_modules()}
    found = {}
    for layer, path in paths.items():
        if isinstance(layer, QATGemm) and layer.moved_bias is None:
            owner, name = layer.bias_place
            key = f"{paths.get(owner)}.{name}".lstrip(".")
            if key in keys and f"{path}.weight_fake_quant.scale".lstrip(".") in keys:
                found[key] = layer
    return found


def _check(state_dict: Mapping[str, Any]) -> None:
    """Insist on a state dict that a prepared model can have.

    Raises:
        CheckpointError: for that of a converted model, for one inside another dictionary, and for impossible scales.
    """
    tensors = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
    inner = [key for key, value in state_dict.items() if isinstance(value, Mapping) and _has_tensors(value)]
    if inner and not tensors:
        raise CheckpointError(f"the checkpoint has its tensors in {inner[0]!r}: load `checkpoint[{inner[0]!r}]`.")
    integers = [
        key.removesuffix(".weight")
        for key, value in tensors.items()
        if key.endswith("weight") and not value.is_floating_point() and f"{key}_scale" in tensors
    ]
    if integers:
        raise CheckpointError(
            f"the checkpoint is of a converted model: the weights of `{'`, `'.join(integers[:4])}` are integers, and a "
            "prepared model has real ones. Load the checkpoint of the calibrated or trained model, before `convert`."
        )
    scales = {key: value for key, value in tensors.items() if key.endswith(".scale") and _QUANTIZER.fullmatch(key)}
    wrong = [key for key, value in scales.items() if not bool((value > 0).all() & torch.isfinite(value).all())]
    if wrong:
        raise CheckpointError(
            f"the checkpoint has scales that are not positive numbers: {listed(wrong)}. Calibration or training "
            "broke before it was saved; look for NaN in the data or the loss."
        )
    shifted = [k for k, v in tensors.items() if k.endswith(".zero_point") and _QUANTIZER.fullmatch(k) and v.any()]
    if shifted:
        raise CheckpointError(
            f"the checkpoint is of asymmetric quantization, which the BPU does not have: the zero points "
            f"{listed(shifted, most=1)} are not 0. Calibrate the float model anew."
        )


def _has_tensors(state_dict: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in state_dict.values())


_ACTIVATION = "activation_post_process."


def _joined_calls(model_keys: Collection[str], keys: Iterable[str]) -> ByModule:
    """Modules with one scale whose calls have own scales among `keys`: the names of these calls."""
    end = f".{_ACTIVATION}scale"
    owners = [key.removesuffix(end) for key in keys if key.endswith(end) and _CALL.search(key)]
    if not owners:
        return {}
    known = {key.removesuffix(end) for key in model_keys if key.endswith(end)}
    places = {path.replace(".", "_"): path for path in known}  # copies of `heads.0` are called `heads_0_call_1`
    found: dict[str, tuple[str, ...]] = {}
    for owner in owners:
        parts = _CALL.sub("", owner).split(".")
        names = ((".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts)))
        around, path = next(
            ((a, places[n.replace(".", "_")]) for a, n in names if n.replace(".", "_") in places), ("", "")
        )
        if path and owner.removeprefix(f"{around}.") not in known:
            place = f"{around}.{path}" if around else path
            found[place] = (*found.get(place, ()), owner)
    return found


def _join(state_dict: Mapping[str, Any], path: str, calls: Iterable[str]) -> dict[str, Any]:
    """The activation's entries of a module that cover the ranges of several calls."""
    parts = []
    for name in (path, *calls):
        prefix = f"{name}.{_ACTIVATION}"
        parts.append({k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)})
    parts = [part for part in parts if isinstance(part.get("scale"), Tensor)]
    low, high = f"{_ACTIVATION}min_val", f"{_ACTIVATION}max_val"
    observed = [p for p in parts if low in p and high in p and bool((p[low].isfinite() & p[high].isfinite()).all())]
    if not observed:
        widest = max(parts, key=lambda p: float(p["scale"].max()) * _steps(p))
        return {f"{path}.{_ACTIVATION}{name}": value for name, value in widest.items()}
    joined: dict[str, Any] = dict(max(observed, key=lambda p: float(torch.maximum(p[low].abs(), p[high].abs()).max())))
    joined[low] = torch.stack([p[low] for p in observed]).amin(0)
    joined[high] = torch.stack([p[high] for p in observed]).amax(0)
    joined["scale"] = torch.stack([p["scale"] * (_steps(p) / _steps(joined)) for p in observed]).amax(0)
    return {f"{path}.{_ACTIVATION}{name}": value for name, value in joined.items()}


def _steps(entries: Mapping[str, Any]) -> float:
    """How many steps of its scale a tensor's largest magnitude has: as written, or as its range says."""
    if isinstance(entries.get("quant_range"), Tensor):
        smallest, largest = entries["quant_range"].tolist()
        return (largest - smallest) / 2
    low, high = (entries.get(f"{_ACTIVATION}{name}") for name in ("min_val", "max_val"))
    if low is None or high is None:
        return 1.0
    steps = float((torch.maximum(low.abs(), high.abs()) / entries["scale"]).max())
    return steps if 0 < steps < float("inf") else 1.0


def _rewrapped(model_keys: Collection[str], state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the prefix of a wrapper removed or added, whichever fits the model best."""
    known, best = set(model_keys), state_dict
    for prefix in _WRAPPERS:
        for changed in (
            {key.removeprefix(prefix): value for key, value in state_dict.items()},
            {f"{prefix}{key}": value for key, value in state_dict.items()},
        ):
            if len(known.intersection(changed)) > len(known.intersection(best)):
                best = changed
    return best


def load_calib_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> StateDictMismatch:
    """Load the state of a calibrated model into a prepared one: parameters, ranges and scales.

    What the calibrated model observed and rounded at the time it was saved does not matter: the fake-quantization
    state of `model` stays. A difference between the two is a warning that names modules. Either may be wrapped by
    DistributedDataParallel.

    Returns:
        The difference; it is false if there is none.

    >>> from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize, LoadedScale
    >>> calibrated, model = nn.Sequential(FakeQuantize()), nn.Sequential(FakeQuantize())
    >>> calibrated[0].set_qparams(0.5)
    >>> bool(load_calib_state_dict(model, calibrated.state_dict())), float(model[0].scale)
    (False, 0.5)
    """
    require_module(model, "load_calib_state_dict")
    if not isinstance(state_dict, Mapping):
        hint = "call its `state_dict()`" if isinstance(state_dict, nn.Module) else "give the dictionary of tensors"
        if isinstance(state_dict, (str, os.PathLike)):
            hint = f"load it first: `torch.load({str(state_dict)!r}, weights_only=True)`"
        raise TypeError(f"load_calib_state_dict takes a state dict, got {type(state_dict).__name__}: {hint}.")
    _check(state_dict)
    own = model.state_dict()
    state_dict = _rewrapped(own.keys(), state_dict)
    mismatch = compare_state_dict(model, state_dict)
    kept = {key: value for key, value in own.items() if key.endswith(_SWITCHES)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(_REPORTED), QuantizationWarning)  # it is told below
        model.load_state_dict({**state_dict, **kept}, strict=False)
    if mismatch:
        warn(f"load_calib_state_dict:\n{mismatch}", QuantizationWarning)
    return mismatch
