"""Checkpoints between stages: what a state dict lacks or has too much, module by module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning

_QUANTIZER = re.compile(r"(?:(?P<owner>.*?)\.)?(?P<part>activation_post_process|weight_fake_quant)\.(?P<buffer>.+)")
_PARTS = {"activation_post_process": "output", "weight_fake_quant": "weight"}
_SWITCHES = (".fake_quant_enabled", ".observer_enabled")

ByModule = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class StateDictMismatch:
    """Where a state dict and a prepared model differ; each part gives names by the path of their module.

    Args:
        missing_quantization: outputs and weights of the model whose scales the state dict does not have.
        unexpected_quantization: those that only the state dict has.
        missing_parameters, unexpected_parameters: the same for the model's own parameters and buffers.

    >>> print(StateDictMismatch(missing_quantization={"head.conv": ("output", "weight")}))
    missing quantization parameters (not quantized when the checkpoint was made):
      head.conv: output, weight
    """

    missing_quantization: ByModule = field(default_factory=dict)
    unexpected_quantization: ByModule = field(default_factory=dict)
    missing_parameters: ByModule = field(default_factory=dict)
    unexpected_parameters: ByModule = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((
            self.missing_quantization, self.unexpected_quantization, self.missing_parameters,
            self.unexpected_parameters,
        ))  # fmt: skip

    def __str__(self) -> str:
        sections = (
            ("missing quantization parameters (not quantized when the checkpoint was made)", self.missing_quantization),
            ("unexpected quantization parameters (not quantized in this model)", self.unexpected_quantization),
            ("missing parameters (the checkpoint is of another forward)", self.missing_parameters),
            ("unexpected parameters (the checkpoint is of another forward)", self.unexpected_parameters),
        )
        lines = []
        for title, rows in sections:
            if rows:
                lines += [f"{title}:", *(f"  {path or '(top)'}: {', '.join(names)}" for path, names in rows.items())]
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


def _is_detail(key: str, scales: set[str]) -> bool:
    """Does the key belong to a fake quantizer that both sides have? Observers of another kind keep other statistics."""
    found = _QUANTIZER.fullmatch(key)
    if found is None:
        return False
    owner = f"{found['owner']}." if found["owner"] else ""
    return f"{owner}{found['part']}.scale" in scales


def compare_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> StateDictMismatch:
    """What a checkpoint lacks for a prepared model, and what it has too much, by module.

    A missing or unexpected scale says that logic was quantized in one of the two only; a missing or unexpected
    parameter, that the forward was another when the checkpoint was made.

    >>> compare_state_dict(nn.Linear(1, 1), {"weight": 0, "quant.activation_post_process.scale": 1})
    StateDictMismatch(missing_quantization={}, unexpected_quantization={'quant': ('output',)},
                      missing_parameters={'': ('bias',)}, unexpected_parameters={})
    """
    mine, theirs = model.state_dict().keys(), state_dict.keys()
    scales = {key for key in mine & theirs if key.endswith(".scale") or key == "scale"}
    missing = [key for key in mine if key not in theirs and not _is_detail(key, scales)]
    unexpected = [key for key in theirs if key not in mine and not _is_detail(key, scales)]
    (missing_scales, missing_parameters), (extra_scales, extra_parameters) = _split(missing), _split(unexpected)
    return StateDictMismatch(missing_scales, extra_scales, missing_parameters, extra_parameters)


def load_calib_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> StateDictMismatch:
    """Load the state of a calibrated model into a prepared one: parameters, ranges and scales.

    What the calibrated model observed and rounded at the time it was saved does not matter: the fake-quantization
    state of `model` stays. A difference between the two is a warning that names modules.

    Returns:
        The difference; it is false if there is none.

    >>> from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
    >>> calibrated, model = nn.Sequential(FakeQuantize()), nn.Sequential(FakeQuantize())
    >>> calibrated[0].set_qparams(0.5)
    >>> bool(load_calib_state_dict(model, calibrated.state_dict())), float(model[0].scale)
    (False, 0.5)
    """
    mismatch = compare_state_dict(model, state_dict)
    kept = {key: value for key, value in model.state_dict().items() if key.endswith(_SWITCHES)}
    model.load_state_dict({**state_dict, **kept}, strict=False)
    if mismatch:
        warnings.warn(f"load_calib_state_dict:\n{mismatch}", QuantizationWarning, stacklevel=2)
    return mismatch
