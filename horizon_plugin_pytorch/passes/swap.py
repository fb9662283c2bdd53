"""Float modules become QAT modules, and QAT modules become quantized modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from horizon_plugin_pytorch.capture.plain_model import require_float32_weights
from horizon_plugin_pytorch.capture.plain_weights import settle_weights
from horizon_plugin_pytorch.capture.region import computed_value
from horizon_plugin_pytorch.config.choice import Choice, inherited_choice
from horizon_plugin_pytorch.config.resolve import needs_activation
from horizon_plugin_pytorch.errors import (
    CalibrationWarning,
    HorizonError,
    QuantizationConfigError,
    QuantizationWarning,
    at,
    listed,
    warn,
)
from horizon_plugin_pytorch.fake_quant.dynamic import is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.learnable import LearnableFakeQuantize
from horizon_plugin_pytorch.fake_quant.qconfig import asked_input, format_of
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.intrinsic import check_rank_hook
from horizon_plugin_pytorch.nn.qat.composite import Composite
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, has_integer_weight, is_half
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.packed_linear import PackedLinear
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.nn.train_mode import watch_mode
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.operators.table import Operator, row_of_module
from horizon_plugin_pytorch.passes.own_scales import share_integers
from horizon_plugin_pytorch.passes.preserved import is_preserved
from horizon_plugin_pytorch.passes.read_tensors import keep_reads, read_float
from horizon_plugin_pytorch.passes.successors import keep_attributes, replace_references
from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy
from horizon_plugin_pytorch.runtime.children import list_parameters
from horizon_plugin_pytorch.runtime.fixed_settings import CONVERTED, PREPARED, FixedSettings
from horizon_plugin_pytorch.runtime.hooks import copy_hooks, drop_hooks, drop_kept
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.runtime.surroundings import on_cpu

_OURS = frozenset((*dir(QATModule), *dir(PlacedModule)))  # attributes that this package gives a module


def map_modules(model: nn.Module, change: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Rebuild the tree: `change` gives a module's replacement, or None to look inside. Shared modules stay shared."""
    done: dict[int, nn.Module] = {}
    replaced: list[tuple[nn.Module, nn.Module]] = []

    def visit(module: nn.Module, path: str) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        new = change(path, module)
        if new is None:
            done[id(module)] = new = module
            for name, child in list(module._modules.items()):
                if child is not None:
                    module._modules[name] = visit(child, f"{path}.{name}" if path else name)
        else:
            copy_hooks(new, module)
            if isinstance(new, (QATGemm, QuantizedGemm)):  # which ask by themselves, and have quicker calls without
                drop_kept(new, check_rank_hook)
            drop_hooks(module)  # which a float16 module still runs
            replaced.append((module, keep_attributes(new, module)))
        done[id(module)] = new
        return new

    root = visit(model, "")
    replace_references(root, replaced)
    return root


def _check_output(row: Operator, path: str, qconfig: Any, march: March) -> None:
    if is_cast(qconfig.activation) and row.needs_qconfig and march.family != "nash":
        raise QuantizationConfigError(
            f"the qconfig of `{path}` asks for float16, which {march} does not compute; NASH chips do. Use qint16 here."
        )
    if has_integer_weight(row) and is_cast(qconfig.weight) and not is_cast(qconfig.activation):
        cast = format_of(qconfig.weight)
        raise QuantizationConfigError(
            f"the qconfig of `{path}` has {cast} weights and another output: a layer with such weights is computed in "
            f"{cast}, with its result. Give it that output, `get_qconfig(weight_dtype={cast}, out_dtype={cast})` or "
            f"`ModuleNameTemplate({{{path!r}: {{'weight': {cast}, 'output': {cast}}}}})`; or integer weights."
        )
    if qconfig.activation is None and row.needs_qconfig and not row.has_real_output:
        raise needs_activation(f"`{row.name}` {at(path)}")


def _check_dynamic(row: Operator, path: str, qconfig: Any, march: March) -> None:
    """Dynamic quantization is documented for linear layers on nash-p."""
    if not row.needs_qconfig or not is_dynamic(asked_input(qconfig, 0)):
        return
    if not has_integer_weight(row) or is_half(row, qconfig):
        raise QuantizationConfigError(
            f"`{row.name}` {at(path)} has a qconfig whose input is quantized dynamically, and only linear layers with "
            "integer weights can: give such a qconfig by name, or use SetDynamicQuantTemplate."
        )
    if march is not March.NASH_P:
        raise QuantizationConfigError(
            f"`{row.name}` {at(path)} has a qconfig whose input is quantized dynamically, and the documents give that "
            f"to nash-p only, not to {march}. Use qint16 or torch.float16 for its input."
        )


def to_qat(
    model: nn.Module, choices: dict[str, Choice], march: March, lines: dict[str, str] | None = None
) -> nn.Module:
    """Replace float modules that have a qconfig by their QAT forms.

    Args:
        march: the chip; it decides which formats weights may have.
        lines: paths of the modules in the quantized part, with the line of the user's model that calls each; None means
            all modules.
    """
    home = next((p.device for p in model.parameters()), None)  # of modules without parameters

    def change(path: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, (QATModule, FakeQuantize, Float16)):
            return module
        row = row_of_module(type(module))
        if row is None or row.qat is None:
            return None
        if lines is not None and _line(path, lines) is None:
            return None
        return qat_form(path, module, row, choices, march, home, _line(path, lines or {}) or "")

    model = map_modules(model, change)
    warn_wide_weights(model, march)
    follow_consistency(model, march)
    name_modules(model, lines or {})
    return model


def qat_form(
    path: str,
    module: nn.Module,
    row: Operator,
    choices: dict[str, Choice],
    march: March,
    home: torch.device | None = None,
    line: str = "",
) -> nn.Module | None:
    """The QAT form of a float module; None if it has no qconfig and needs one.

    Args:
        row: the module's row in the operator table.
        home: the device of a module without parameters.
        line: the line of the user's model that calls it, for errors.
    """
    choice, nearest = choices.get(path), inherited_choice(choices, path)
    qconfig: Any = None if nearest is None else nearest.qconfig
    if qconfig is None and row.needs_qconfig:
        return None
    if qconfig is not None:
        _check_output(row, path, qconfig, march)
        _check_dynamic(row, path, qconfig, march)
    require_float32_weights(module, at(path))
    module.qconfig = qconfig
    module.path = path  # type: ignore[assignment]
    if choice is not None and choice.products is not None:
        module.products = choice.products  # type: ignore[assignment]
    device = next((p.device for p in module.parameters()), home)
    if qconfig is not None and row.needs_qconfig and is_half(row, qconfig):
        qat: nn.Module = Float16(module, qconfig)
    else:
        try:
            with nullcontext() if device is None else on_cpu():  # from where it goes to its device
                qat = row.qat.from_float(module)  # type: ignore[union-attr]
        except HorizonError as error:
            raise type(error)(str(error).replace(at(path), at(path, line), 1)) from error
    if isinstance(qat, Composite):
        qat.__dict__["_fixed"] = FixedSettings.of(module, PREPARED, free=qat.follows)
    qat.operator = row.name  # type: ignore[assignment]
    is_accumulator = row.has_real_output and qconfig is not None and qconfig.activation is None
    qat.gives_accumulator = is_accumulator  # type: ignore[assignment]
    if device is not None and not _is_on(qat, device):
        qat = qat.to(device)
    return qat.train(module.training)


def _is_on(module: nn.Module, device: torch.device) -> bool:
    """Are all tensors of a module on a device? `nn.Module.to` takes long to find out."""
    tensors = (t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    return all(t is None or t.device == device for t in tensors)


def warn_int16(model: nn.Module, march: March) -> None:
    """Say which modules are int16 on a chip that the guides give int8 only."""
    if march.family != "bernoulli":
        return
    found = [path for path, m in model.named_modules() if isinstance(m, FakeQuantize) and m.dtype.bits > 8]
    if found:
        shown = listed(p.removesuffix(".activation_post_process") for p in found)
        warn(
            f"int16 on {march}: {shown}. The guides give int16 to BAYES and "
            "later chips only; expect the compiler to refuse most of these operators.",
            QuantizationWarning,
        )


def warn_wide_weights(model: nn.Module, march: March, prefix: str = "") -> None:
    """Name the layers whose weights the chip does not have in their format. The user asked for it, as in the guides'
    example of the check, which flags them; setters, which choose formats themselves, choose others.

    Args:
        prefix: the path of `model`.
    """
    found = []
    for path, module in model.named_modules(prefix=prefix):
        row = row_of_module(module.float_class) if isinstance(module, QATGemm) else None
        support = None if row is None else row.support(march)
        if support is not None and isinstance(module, QATGemm):
            found += [path] if str(module.weight_fake_quant.dtype) not in support.weights else []
    if found:
        warn(
            f"int16 weights on {march}: {listed(found)}. Weights are "
            "qint8 there, int16 weights exist on nash chips only; expect the compiler to refuse these layers. Give "
            "them a qconfig with qint8 weights.",
            QuantizationWarning,
        )


def follow_consistency(model: nn.Module, march: March) -> None:
    """Let observed scales be powers of two, as `ConsistencyStrategy` asks."""
    level = ConsistencyStrategy.get_consistency_level()
    if not level:
        return
    if march not in (March.NASH_E, March.NASH_M):
        warn(
            f"the consistency level is {level}, which the documents give to nash-e and nash-m; scales are powers of "
            f"two on {march} too. `ConsistencyStrategy.set_consistency_level(0)` takes them as they are observed.",
            QuantizationWarning,
        )
    for path, module in model.named_modules():
        if not isinstance(module, FakeQuantize) or module.is_fixed:
            continue
        if path.endswith("weight_fake_quant") and level < 2:
            continue
        if isinstance(module, LearnableFakeQuantize):
            raise QuantizationConfigError(
                f"`{path}` trains its scale, which would leave the powers of two of consistency level {level}. Take "
                "`fake_quant` instead of `lsq` and `pact`, or level 0."
            )
        module.activation_post_process.pow_quantization = True


def name_modules(model: nn.Module, lines: dict[str, str], prefix: str = "") -> None:
    """Tell modules and observers where they are, for their messages."""
    for path, module in model.named_modules(prefix=prefix):
        if isinstance(module, PlacedModule):
            module.path = path
            module.line = _line(path, lines) or ""
            cast = module.__dict__.get("_weight_cast")
            if cast is not None:
                cast.set_owner(f"{path} (weight)")
        elif isinstance(module, (FakeQuantize, FakeCast)):
            owner = path.removesuffix(".activation_post_process").removesuffix(".weight_fake_quant")
            module.set_owner(f"{owner} (weight)" if path.endswith("weight_fake_quant") else owner)


def _line(path: str, lines: dict[str, str]) -> str | None:
    """The line that calls a module, or a module around it; None if none is called."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return lines.get("")


def _tell_state(model: nn.Module, quantizers: Sequence[FakeQuantize]) -> None:
    """Warn of a model that is still in the CALIBRATION state: what it gave so far was float."""
    idle = [q.activation_post_process.owner for q in quantizers if q.is_observing is q.is_quantizing is False]
    if idle and FakeQuantize.enabled:
        warn(
            f"{', '.join(idle[:8])}{' and more' if len(idle) > 8 else ''}: rounding is switched off here "
            "(`disable_fake_quant`), so the prepared model computes in float what becomes integers now. Call "
            "`set_fake_quantize(model, FakeQuantState.VALIDATION)` and evaluate the model before you convert it.",
            QuantizationWarning,
        )
    learning = [q for q in quantizers if not q.is_fixed]
    if learning and all(q.is_observing and not q.is_quantizing and q.has_statistics for q in learning):
        warn(
            f"`{type(model).__name__}` is converted in the CALIBRATION state, in which it computes in float: nobody "
            "has seen yet what it gives on integers. Call `set_fake_quantize(model, FakeQuantState.VALIDATION)` and "
            "evaluate it before you convert.",
            QuantizationWarning,
        )


def _never_calibrated(model: nn.Module) -> list[str]:
    found, left_float = [], paths_left_float(model)
    for path, module in model.named_modules():
        quantizer = getattr(module, "activation_post_process", None)
        if not isinstance(module, QATModule) or module.is_optional or is_inside(path, left_float):
            continue
        if isinstance(quantizer, FakeQuantize) and not quantizer.has_statistics:
            found.append(f"{path} ({type(module).__name__})")
    return found


def _stays_float(module: nn.Module) -> bool:
    """Has a module in code that tracing does not enter met nothing with a scale? Conversion gives its float form."""
    if not isinstance(module, PlacedModule) or module.float_form is None or module.met(is_real=False):
        return False
    quantizers = [m for name, m in module.named_modules() if isinstance(m, FakeQuantize) and "weight_fake" not in name]
    return bool(quantizers) and not any(q.has_statistics and not q.is_fixed for q in quantizers)


def paths_left_float(model: nn.Module) -> dict[str, bool]:
    """The modules of a prepared model that are float after conversion, as nothing with a scale has met them.

    Returns:
        paths, each with whether the model uses it: calls it on real numbers, or reads its parameters.
    """
    found: dict[str, Any] = {path: module for path, module in model.named_modules() if _stays_float(module)}
    return {path: m.met(is_real=True) or bool(getattr(m, "read_tensors", ())) for path, m in found.items()}


def is_inside(path: str, owners: Iterable[str]) -> bool:
    """Is it one of these modules, or a part of one?

    >>> is_inside("norm.mul", ["norm"]), is_inside("norms", ["norm"])
    (True, False)
    """
    return any(path == owner or path.startswith(f"{owner}.") for owner in owners)


def keep_float_forms(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Let modules that may be called on real numbers, too, know what runs then.

    Args:
        modules: the float modules, by path.
    """
    for path, module in modules.items():
        qat = model.get_submodule(path)
        if isinstance(qat, PlacedModule) and qat is not module and qat.operator != "quant":
            qat.__dict__["float_form"] = module


def _compute_weights(model: nn.Module) -> None:
    """Give layers the weights that the model computes of its parameters as these are now, not as in the last run."""
    graph = note_of(model, "graph")
    for node in () if graph is None else graph.nodes:
        for path in notes(node).weight_of:
            layer: Any = model.get_submodule(path)
            weight = computed_value(model, node)
            if isinstance(layer, QATGemm) and not torch.equal(layer.weight, weight):
                layer.weight.copy_(weight)


@torch.no_grad()
def to_quantized(model: nn.Module, remove_qconfig: bool = True) -> nn.Module:
    """Replace QAT modules by their integer forms; warn of modules that never saw data.

    A module with ``preserve_qat_mode = True``, or inside of one, stays a QAT module, in the VALIDATION state.
    """
    settle_weights(model)
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    for quantizer in quantizers:
        quantizer.finish()
    _tell_state(model, quantizers)
    missing = _never_calibrated(model)
    if missing:
        shown = listed(missing, most=8)
        warn(
            f"{shown} {'have' if len(missing) > 1 else 'has'} not collected any statistics of activations; the "
            "scale is 1. Run calibration data through the model in the CALIBRATION or QAT state before "
            "converting, or load a calibrated checkpoint.",
            CalibrationWarning,
        )
    _compute_weights(model)
    for module in model.modules():
        if isinstance(module, QATGemm) and not module.weight_fake_quant.has_statistics:
            module.observe_weight()  # weights are known without any data
    for quantizer in quantizers:
        quantizer.require_scale()
    for module in model.modules():
        if isinstance(module, QATModule):
            module.require_numbers()
            module.require_settings()

    def change(path: str, module: nn.Module) -> nn.Module | None:
        if _stays_float(module):
            return module.current_float_form()  # type: ignore[operator]
        if not isinstance(module, QATModule):
            return None
        if is_preserved(model, path):
            set_fake_quantize(module, FakeQuantState.VALIDATION)
            return module
        with on_cpu():  # as it would be by itself; it goes where its tensors are
            quantized = type(module).quantized_class.from_qat(module).train(module.training)
        # Not taken by `from_qat`: a twin has no calls of its own.
        quantized.own_calls, quantized.member = module.own_calls, module.member
        if module.float_form is not None and not any(True for _ in module.float_form.parameters()):
            quantized.__dict__["float_form"] = module.float_form
        if not remove_qconfig and "qconfig" in module.__dict__:
            quantized.__dict__["qconfig"] = module.qconfig
        source = module.__dict__.get("_source", module)  # of a table
        # A tensor may have the name of a setting: the scale of a QuantStub.
        quantized.__dict__["_fixed"] = FixedSettings.of(source, CONVERTED, free={*_OURS, *quantized._buffers})
        keep_reads(quantized, module)
        names = [name for name, x in module._parameters.items() if x is not None]
        list_parameters(quantized, [name for name in names if hasattr(quantized, name)])
        return quantized

    model = map_modules(model, change)
    if isinstance(model, fx.GraphModule):
        read_float(model)
    share_integers(model)
    watch_mode(model)
    for module in model.modules():
        if isinstance(module, Composite) and not any(isinstance(part, PackedLinear) for part in module.modules()):
            module.drop_float_parameters()  # none of its layers is kept, which would read them
    if remove_qconfig:
        for module in model.modules():
            module.__dict__.pop("qconfig", None)
    return model.eval()
