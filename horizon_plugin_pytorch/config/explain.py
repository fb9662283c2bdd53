"""Why an operator has the number formats that it has."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.config.choice import steps_of
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import require_module
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.runtime.located import PlacedModule


def explain(model: nn.Module, name: str | None = None) -> dict[str, tuple[str, ...]]:
    """Print for each operator of a prepared model the rules that gave it its formats, the deciding one first.

    Args:
        model: the result of `prepare` or `prepare_qat_fx`.
        name: one module's path, or a container's for all that is in it; None for the whole model. A module that is
            fused into another one, or stays float, is told if it is named.

    Returns:
        The chain of rules for each path, oldest first.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig_template import default_qat_qconfig_setter
    >>> from horizon_plugin_pytorch.quantization.quantize_fx import prepare_qat_fx
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.NASH_M)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), qconfig_setter=default_qat_qconfig_setter)
    >>> _ = explain(qat, "module")
    module
        output float32: high-precision output (int32)
        before: output qint8, weight qint8: default_qat_qconfig_setter
    """
    require_module(model, "explain")
    choices = note_of(model, "choices")
    if choices is None:
        raise TypeError(
            f"explain takes a prepared model, and `{type(model).__name__}` has no record of its configuration. Give it "
            "the result of `prepare` or `prepare_qat_fx`."
        )
    operators = [path for path, module in model.named_modules() if isinstance(module, PlacedModule) and path in choices]
    chains = {path: tuple(map(str, steps_of(model, path))) for path in operators if _is_asked(path, name)}
    if name is not None and not chains:
        chains = {name: tuple(map(str, steps_of(model, name)))}
    for path, reasons in chains.items():
        print(path)
        for index, reason in enumerate(reversed(reasons)):
            print(f"    {'before: ' if index else ''}{reason}")
    return chains


def _is_asked(path: str, name: str | None) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


show_at("quantization.explain", explain)
