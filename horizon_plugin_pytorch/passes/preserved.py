"""`preserve_qat_mode`: modules that stay in their QAT form when the model is converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # noqa: F401 - for the docstring's example
from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, require_module, warn
from horizon_plugin_pytorch.nn.origin import is_made_of
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.passes.generated import GENERATED
from horizon_plugin_pytorch.runtime.located import FUSED_INTO, PRESERVED, left_of_layer


def is_preserved(model: nn.Module, path: str) -> bool:
    """Is a module to stay a QAT module? What is said of it, or of the nearest module around it, counts."""
    while True:
        own = model.get_submodule(path).__dict__.get(PRESERVED)
        if own is not None or not path:
            return bool(own)
        path = path.rpartition(".")[0]


def set_preserve_qat_mode(
    model: nn.Module, prefixes: str | Sequence[str] = (), types: type | Sequence[type] = (), value: bool = True
) -> None:
    """Keep modules in their QAT form when the model is converted, to find out which conversion costs accuracy.

    It sets ``module.preserve_qat_mode``, which can be set by hand as well. It counts for the module and for all that
    is inside it, and what is said of a module itself counts more than what is said of one around it. Of modules that
    are fused, the layer's counts: set it on the convolution, not on the batch norm. In a prepared model the fused
    module stands where its add was, if it has one, and else where its layer was.

    Args:
        model: a float model or a prepared one.
        prefixes: modules whose paths begin so, or one such beginning.
        types: modules of these classes. In a prepared model, a float class also means what has become of its modules
            (``nn.Conv2d``: convolutions, fused or not; ``FloatFunctional``: also what ``x + y`` has become).
        value: False takes it back.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, convert, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    >>> qat = prepare_qat_fx(QuantWrapper(net), {"": get_default_qconfig()})
    >>> _ = qat(torch.randn(1, 1, 4, 4))
    >>> set_preserve_qat_mode(qat, prefixes=("module.0",))
    >>> quantized = convert(qat)
    >>> type(quantized.get_submodule("module.0")).__module__, type(quantized.get_submodule("module.2")).__module__
    ('horizon_plugin_pytorch.nn.qat.conv2d', 'horizon_plugin_pytorch.nn.quantized.conv2d')
    """
    prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    types = (types,) if isinstance(types, type) else tuple(types)
    _check(model, prefixes, types)
    found: dict[str, nn.Module] = {}
    unused: list[str] = []
    modules = dict(model.named_modules())
    for prefix in prefixes:
        begun = {path: m for path, m in modules.items() if path.startswith(prefix)}
        found |= begun
        unused += [] if begun else [repr(prefix)]
    for cls in types:
        of_class = {path: m for path, m in modules.items() if _is_of(m, cls)}
        found |= of_class
        unused += [] if of_class else [cls.__name__]
    if unused:
        warn(
            f"set_preserve_qat_mode: `{type(model).__name__}` has no module of {listed(unused)}, so nothing is set "
            f"for it.{_generated_names(modules, unused)}",
            QuantizationWarning,
        )
    left = {path: module for path, module in found.items() if FUSED_INTO in module.__dict__}
    for path, module in found.items():
        if path not in left or left_of_layer(module):
            setattr(module, PRESERVED, value)
    _tell_fused(modules, left, value)


def _generated_names(modules: dict[str, nn.Module], unused: list[str]) -> str:
    """Where the functions of a model are, if a name like theirs was not found: other versions name them otherwise."""
    generated = [repr(path) for path in modules if path.rpartition(".")[2].startswith(GENERATED)]
    is_asked = any(GENERATED in name for name in unused)
    return f" Functions have modules at {listed(generated)}." if is_asked and generated else ""


def _check(model: Any, prefixes: tuple, types: tuple) -> None:
    require_module(model, "set_preserve_qat_mode")
    if any(isinstance(module, QuantizedModule) for module in model.modules()):
        raise TypeError(
            f"set_preserve_qat_mode takes a float or a prepared model, and `{type(model).__name__}` is converted "
            "already: set it before, and convert again."
        )
    wrong = [x for x in prefixes if not isinstance(x, str)] + [x for x in types if not isinstance(x, type)]
    if wrong:
        raise TypeError(
            f"set_preserve_qat_mode: prefixes are strings and types are classes, got {', '.join(map(repr, wrong))}."
        )
    if not prefixes and not types:
        warn("set_preserve_qat_mode: neither prefixes nor types are given, so nothing is set.", QuantizationWarning)


def _is_of(module: nn.Module, cls: type) -> bool:
    """Is a module of a class, or what has become of one? What fusion has left behind is neither."""
    return FUSED_INTO not in module.__dict__ and is_made_of(module, cls)


def _tell_fused(modules: dict[str, nn.Module], left: dict[str, nn.Module], value: bool) -> None:
    """Warn of modules that are parts of others, where nothing is set."""
    paths = {module: path for path, module in modules.items()}
    for path, module in left.items():
        whole = [m for m in module.__dict__[FUSED_INTO] if m.__dict__.get(PRESERVED) is not value]
        if whole:
            warn(
                f"set_preserve_qat_mode: `{path}` is fused into {listed(repr(paths.get(m, '?')) for m in whole)}, and "
                "nothing is set there. Give that path, or that of the layer.",
                QuantizationWarning,
            )


show_at("utils.quant_profiler", set_preserve_qat_mode)
