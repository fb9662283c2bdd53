"""Which qconfig each module gets: global < module_type < module_name < the module's own attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.config.choice import Choice, Step, step_between
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.dynamic import is_dynamic
from horizon_plugin_pytorch.nn.transformer import torch_class
from horizon_plugin_pytorch.operators.table import rows
from horizon_plugin_pytorch.statistics.partial import Partial

_KEYS = ("", "module_type", "module_name")
_MISSING = object()


def needs_activation(what: str) -> QuantizationConfigError:
    """The error of an operator that has no high-precision output and is asked for one."""
    names = [row.name for row in rows() if row.has_real_output and row.functions]  # fused ones have no function
    return QuantizationConfigError(
        f"{what} has a qconfig without activation quantization. High-precision output exists for "
        f"{', '.join(names[:-1])} and {names[-1]} only; give this module a qconfig with an activation format."
    )


def _pairs(value: Any, key: str) -> dict:
    if isinstance(value, dict):
        return dict(value)
    try:
        return dict(value)
    except (TypeError, ValueError):
        raise QuantizationConfigError(
            f"qconfig_dict[{key!r}] must be a list of pairs or a dictionary, got {value!r}."
        ) from None


def check_qconfig(qconfig: Any, reason: str) -> Any:
    """Insist on our own fake quantizers: others cannot be trained on the grid that conversion uses."""
    if qconfig is None:
        return None
    given = getattr(qconfig, "input", None)
    parts = [getattr(qconfig, name, _MISSING) for name in ("activation", "weight")]
    parts += given if isinstance(given, (tuple, list)) else [given]
    if any(part is not None and not isinstance(part, Partial) for part in parts):
        raise QuantizationConfigError(
            f"the qconfig of {reason} is {type(qconfig).__module__}.{type(qconfig).__name__} without fake quantizers "
            "of this package. Take one of `horizon_plugin_pytorch.quantization.qconfig`, or build it with "
            "`get_default_qconfig` or `FakeQuantize.with_args`; or delete a `qconfig` attribute that was meant for "
            "another toolkit, and the setter or the qconfig_dict decides."
        )
    if is_dynamic(qconfig.activation) or is_dynamic(qconfig.weight):
        raise QuantizationConfigError(
            f"the qconfig of {reason} has a DynamicFakeQuantize as activation or weight; it is for the `input`."
        )
    activation = qconfig.activation
    if activation is not None and activation.kwargs.get("qscheme") == torch.per_channel_symmetric:
        raise QuantizationConfigError(
            f"the qconfig of {reason} quantizes activations per channel; activations have one scale "
            "(torch.per_tensor_symmetric), weights one per output channel."
        )
    return qconfig


def _given(qconfig: Any, rule: str, is_fixed: bool = False) -> Choice:
    """The choice of a module that a rule names."""
    try:
        step = step_between(None, qconfig, rule)
    except AttributeError:  # no qconfig of ours: `check_qconfig` says so
        step = Step(rule)
    return Choice(qconfig, True, (step,), is_fixed)


def named_modules_of(qconfig_dict: dict | None) -> list[str]:
    """The paths that a qconfig_dict names."""
    return list(_pairs(_as_dictionary(qconfig_dict).get("module_name", {}), "module_name"))


def _as_dictionary(qconfig_dict: Any) -> dict:
    if qconfig_dict is not None and not isinstance(qconfig_dict, dict):
        raise QuantizationConfigError(
            f"qconfig_dict is a {type(qconfig_dict).__name__}, and must be a dictionary: `{{'': qconfig}}` for the "
            "whole model, with 'module_type' and 'module_name' for parts of it."
        )
    return qconfig_dict or {}


def resolve_qconfigs(model: nn.Module, qconfig_dict: dict | None) -> dict[str, Choice]:
    """The choice for every module path; functions take the choice of the module that calls them."""
    qconfig_dict = _as_dictionary(qconfig_dict)
    unknown = [k for k in qconfig_dict if k not in _KEYS]
    if unknown:
        raise QuantizationConfigError(
            f"qconfig_dict has unknown keys {unknown}; it takes '' (global), 'module_type' and 'module_name'."
        )
    by_type = _pairs(qconfig_dict.get("module_type", {}), "module_type")
    by_name = _pairs(qconfig_dict.get("module_name", {}), "module_name")
    choices: dict[str, Choice] = {}

    def visit(module: nn.Module, path: str, inherited: Choice) -> None:
        choice = inherited
        for cls in (torch_class(module), type(module)):
            if cls in by_type:
                choice = _given(by_type[cls], f"module_type {cls.__name__}")
        if path in by_name:
            choice = _given(by_name[path], f"module_name {path}")
        if "qconfig" in module.__dict__:
            choice = _given(module.__dict__["qconfig"], f"attribute of {path or 'the model'}", is_fixed=True)
        if choice is not inherited:
            check_qconfig(choice.qconfig, choice.reason)
        choices[path] = choice
        below = choice.below()
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, below)

    visit(model, "", _given(check_qconfig(qconfig_dict.get(""), "the whole model"), "global").below())
    missing = [name for name in by_name if name not in choices and "_generated_" not in name]
    if missing:
        raise QuantizationConfigError(
            f"qconfig_dict['module_name'] names {', '.join(repr(m) for m in missing)}, which the model does not have. "
            f"Its top modules are {', '.join(n for n, _ in model.named_children())}."
        )
    for name in by_name:
        if name not in choices:
            choices[name] = _given(by_name[name], f"module_name {name}")
    return choices
