"""What a `ModuleNameTemplate` says of one module, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.qconfig import as_format

_KEYS = ("input", "weight", "output")


@dataclass(frozen=True)
class Rule:
    """Formats and fixed ranges of one module; None leaves that as it is.

    Args:
        output, weight: number formats.
        inputs: formats of the operands; the last one counts for all that follow.
        output_threshold, weight_threshold: largest magnitudes, which fix scales.
        input_thresholds: likewise for each operand.
        dynamic: of a linear layer whose input is quantized while the model runs, ``{"block_size": ..., "dim": -1}``.
        freeze: let no later rule change it.
        products: formats of the two operands of the products of matrices inside of attention.
    """

    output: QuantDType | Any = None
    weight: QuantDType | Any = None
    inputs: tuple[Any, ...] = ()
    output_threshold: float | None = None
    weight_threshold: float | None = None
    input_thresholds: tuple[float | None, ...] = ()
    dynamic: Mapping[str, Any] | None = None
    freeze: bool = False
    products: tuple[Any, ...] = ()


def _listed(value: Any) -> tuple[Any, ...]:
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _parts(name: str, value: Any, what: str) -> dict[str, Any]:
    """A value for input, weight and output; one that is no dictionary is the output's."""
    if not isinstance(value, Mapping):
        return {"output": value}
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise QuantizationConfigError(f"{what} of {name!r} has {unknown}; it takes {', '.join(_KEYS)}.")
    return dict(value)


def canonicalize_rules(config_mapping: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules of a `ModuleNameTemplate` in one form, whichever was written.

    >>> canonicalize_rules({"conv": "qint16"})["conv"].output
    'qint16'
    >>> canonicalize_rules({"conv": {"dtype": "qint8", "threshold": 2.0}})["conv"].output_threshold
    2.0
    >>> canonicalize_rules({"mul": {"input": ["qint8", "qint16"]}})["mul"].inputs
    ('qint8', 'qint16')
    """
    if not isinstance(config_mapping, Mapping) or any(not isinstance(name, str) for name in config_mapping):
        raise QuantizationConfigError(
            "ModuleNameTemplate takes a dictionary of paths and formats, such as {'': qint8, 'head': qint16}, got "
            f"{config_mapping!r}."
        )
    return {name: value if isinstance(value, Rule) else _rule(name, value) for name, value in config_mapping.items()}


def _is_number(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError, RuntimeError):
        return False


def _pair(name: str, value: Any) -> tuple[Any, ...]:
    """Formats of the two operands of a product; one is for both."""
    listed = _listed(value)
    if len(listed) > 2:
        raise QuantizationConfigError(f"the products of {name!r} have two operands, got {len(listed)} formats.")
    return tuple(as_format(dtype) for dtype in (listed * 2 if len(listed) == 1 else listed))


def _rule(name: str, value: Any) -> Rule:
    threshold: Any = None
    dynamic, freeze, products = None, False, ()
    if isinstance(value, Mapping):
        dynamic, freeze = value.get("dynamic"), bool(value.get("freeze", False))
        products = _pair(name, value.get("products"))
        value = {key: part for key, part in value.items() if key not in ("dynamic", "freeze", "products")}
    if isinstance(value, Mapping) and ("dtype" in value or "threshold" in value):
        unknown = [key for key in value if key not in ("dtype", "threshold")]
        if unknown:
            raise QuantizationConfigError(f"the rule of {name!r} has {unknown} besides dtype and threshold.")
        threshold, value = value.get("threshold"), value.get("dtype")
    formats = {} if value is None else _parts(name, value, "the rule")
    ranges = {} if threshold is None else _parts(name, threshold, "the threshold")
    for limit in [one for part in ranges.values() for one in _listed(part) if one is not None]:
        if isinstance(limit, (str, bool)) or not _is_number(limit):
            raise QuantizationConfigError(
                f"the threshold of {name!r} must be the largest magnitude, a positive number, got {limit!r}."
            )

    if formats.get("weight") is not None and as_format(formats["weight"]) is torch.float32:
        raise QuantizationConfigError(
            f"the rule of {name!r} asks for a float32 weight: a weight is qint8, qint16 or torch.float16. "
            "ModuleNameQconfigSetter({path: None}) keeps a module float."
        )

    def chosen(key: str) -> Any:
        return None if formats.get(key) is None else as_format(formats[key])

    return Rule(
        output=chosen("output"),
        weight=chosen("weight"),
        inputs=tuple(None if one is None else as_format(one) for one in _listed(formats.get("input"))),
        output_threshold=ranges.get("output"),
        weight_threshold=ranges.get("weight"),
        input_thresholds=_listed(ranges.get("input")),
        dynamic=dynamic,
        freeze=freeze,
        products=products,
    )


show_at("quantization.qconfig_setter.rules", Rule, canonicalize_rules)
