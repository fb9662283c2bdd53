"""Eager mode: the user writes stubs and FloatFunctional, and fuses; these verbs swap modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.plain_model import copy_model, unwrapped
from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.capture.type_tests import tell_given_memory, tell_type_tests
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, require_module, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.march import March, require_march
from horizon_plugin_pytorch.passes.eager import EAGER, EagerPreparation
from horizon_plugin_pytorch.passes.own_scales import OwnScales, own_scales_of
from horizon_plugin_pytorch.passes.steps import run_steps
from horizon_plugin_pytorch.passes.tied_scales import (
    TiedOperators,
    is_effective,
)
from horizon_plugin_pytorch.passes.unmet import keep_state_of
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.workflow.checkpoint import report_mismatches
from horizon_plugin_pytorch.workflow.float_model import as_written, require_float
from horizon_plugin_pytorch.workflow.mappings import (
    get_qat_module_mappings,
    get_quantized_module_mappings,
)
from horizon_plugin_pytorch.workflow.symbolic import (
    check_verbosely,
    converted,
)


def prepare_qat(
    model: nn.Module,
    mapping: dict | None = None,
    inplace: bool = False,
    optimize_graph: bool = False,
    hybrid: bool = False,
    optimize_kwargs: dict | None = None,
    example_inputs: Any = None,
    qconfig_setter: Any = None,
    verbose: int = 0,
    example_kw_inputs: dict[str, Any] | None = None,
) -> nn.Module:
    """Replace the modules that have a qconfig by their QAT forms.

    Args:
        model: a float model whose ``qconfig`` attribute, or whose modules', says how to quantize.
        inplace: change `model` itself rather than a copy.
        qconfig_setter: instead of attributes, a setter of `qconfig_template` or a `QconfigSetter`, or a tuple of them,
            from high to low priority.
        example_inputs, example_kw_inputs: the model's arguments; setters then know which results are outputs, and leave
            what lies outside of the quantized part float.
        hybrid: let modules without a qconfig, and functions without a quantized form, take quantized tensors, as real
            values; put a QuantStub after them.
        verbose: 1 writes ``model_check_result.txt`` and prints it; it needs `example_inputs`.
        mapping: has no effect, and warns where it asks for something.
        optimize_graph: give the operands of a cat and its result one scale, on Bernoulli chips; it needs
            `example_inputs`, as nothing else says what a cat takes.
        optimize_kwargs: for which operators: ``opt_types`` (``"unify_inputs_scale"``), ``methods`` (of
            FloatFunctional), ``functions``, ``module_prefixes``, ``module_types``.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig import get_default_qat_qconfig
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.Conv2d(1, 2, 1))
    >>> net.qconfig = get_default_qat_qconfig()
    >>> type(prepare_qat(net).module)
    <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>
    """
    require_module(model, "prepare_qat")
    march = require_march("prepare_qat")
    _warn_mapping(mapping, "prepare_qat", get_qat_module_mappings(), model)
    model = unwrapped(model, "prepare_qat")
    require_float(model, "prepare_qat")
    if not inplace:
        model = copy_model(model, "prepare_qat")
    model = as_written(model, is_eager=True)
    tell_type_tests(model, has_own_forward=True)
    tell_given_memory(model)
    tied = _tied(march, optimize_graph, optimize_kwargs, example_inputs, example_kw_inputs)
    has_inputs = example_inputs is not None or bool(example_kw_inputs)
    has_graph = has_inputs and (tied is not None or qconfig_setter is not None)
    graph = record(model, *arguments_of(model, example_inputs, example_kw_inputs)) if has_graph else fx.Graph()
    prep = EagerPreparation(
        Captured(model, graph),
        march,
        OwnScales(),
        name=type(model).__name__,
        qconfig_setter=qconfig_setter,
        tied=tied,
        has_graph=has_graph,
        takes_integers=hybrid,
    )
    run_steps(prep, EAGER)
    prepared = prep.root
    report_mismatches(prepared)
    if verbose:
        check_verbosely(prepared, example_inputs, "prepare_qat")
    return prepared


def _tied(
    march: March,
    optimize_graph: bool,
    optimize_kwargs: dict | None,
    example_inputs: Any,
    example_kw_inputs: dict[str, Any] | None,
) -> TiedOperators | None:
    """The operators that are to have one scale with what they take."""
    tied = TiedOperators.of(optimize_kwargs, "prepare_qat")
    if optimize_kwargs and not optimize_graph:
        warn("prepare_qat: optimize_kwargs is for optimize_graph=True, and changes nothing.", QuantizationWarning)
    if tied is None or not optimize_graph or not is_effective(march, "prepare_qat"):
        return None
    if example_inputs is None and not example_kw_inputs:
        warn(
            "prepare_qat: optimize_graph needs example_inputs: eager mode does not see what a cat takes, and every "
            "scale stays as it is. Give them, or use `prepare_qat_fx`.",
            QuantizationWarning,
        )
        return None
    return tied


def convert(
    module: nn.Module,
    mapping: dict | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    fast_mode: bool = False,
) -> nn.Module:
    """Convert a prepared and calibrated or trained model to integers, whatever it was prepared by.

    Args:
        inplace: change `module` itself rather than a copy.
        remove_qconfig: False leaves the qconfigs on the modules.
        mapping, fast_mode: have no effect, and warn where they ask for something.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig import get_default_qat_qconfig
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.Conv2d(1, 2, 1))
    >>> net.qconfig = get_default_qat_qconfig()
    >>> qat = prepare_qat(net)
    >>> _ = qat(torch.randn(1, 1, 4, 4))
    >>> type(convert(qat).module)
    <class 'horizon_plugin_pytorch.nn.quantized.conv2d.Conv2d'>
    """
    _warn_mapping(mapping, "convert", get_quantized_module_mappings(), module)
    return converted(module, "convert", inplace, remove_qconfig, fast_mode)


def _warn_mapping(mapping: dict | None, who: str, known: dict[type, type], model: nn.Module) -> None:
    """Say what of a mapping of classes is not used: the operator table has the classes."""
    if mapping is None:
        return
    if not isinstance(mapping, dict):
        raise TypeError(f"{who}: mapping is a dictionary from class to class, got {type(mapping).__name__}.")
    wanted = [cls for cls, target in mapping.items() if known.get(cls) is not target]
    used = {type(module) for module in model.modules()} if isinstance(model, nn.Module) else set()
    wanted += [cls for cls in known if cls in used and cls not in mapping]  # torch would leave these as they are
    if wanted:
        names = listed(getattr(cls, "__name__", str(cls)) for cls in wanted)
        warn(
            f"{who}: mapping is not used, the operator table says what a class becomes. It differs from the table in "
            f"{names}; give a module `qconfig = None` to keep it as it is.",
            QuantizationWarning,
        )


def load_observer_params(src_model: nn.Module, dst_model: nn.Module) -> list[str]:
    """Copy statistics and scales from a calibrated model to another prepared from the same float model.

    Calls that have own scales in `src_model` and one scale in `dst_model` are joined: that one covers the ranges of
    all, and a warning names them. A warning also names what was not copied: scales of one of the two models only, of
    modules that saw no data in `src_model`, and of those whose scale is given in `dst_model`.

    Returns:
        Paths of fake quantizers of `dst_model` that `src_model` does not have; these keep what they had.

    >>> src, dst = FakeQuantize(dtype="qint8"), FakeQuantize(dtype="qint16")
    >>> src.set_qparams(0.5)
    >>> load_observer_params(nn.Sequential(src), nn.Sequential(dst))
    []
    >>> round(float(dst.scale) * 32767.5 / 127.5, 4)
    0.5
    """
    require_module(src_model, "load_observer_params")
    require_module(dst_model, "load_observer_params")
    source = {path: m for path, m in src_model.named_modules() if isinstance(m, FakeQuantize)}
    targets = {path: m for path, m in dst_model.named_modules() if isinstance(m, FakeQuantize)}
    calls = _calls_joined_in(src_model, source, targets)
    own = own_scales_of(dst_model)  # calls that the source does not tell apart start from one scale
    missing, taken = [], {id(call) for several in calls.values() for call in several}
    waiting = keep_state_of(dst_model, src_model)
    taken.update(id(quantizer) for path, quantizer in source.items() if path.startswith(waiting))
    unseen, given = [], []
    for path, target in targets.items():
        path = path if path in source or own is None else own.owner(path)
        if path not in source:
            missing.append(path)
            continue
        sources = [source[path], *calls.get(path, ())]
        taken.update(map(id, sources))
        target.join_statistics(sources)
        if target.is_fixed and not (sources[0].is_fixed and torch.equal(sources[0].scale, target.scale)):
            given.append(path)
        elif not target.is_fixed and not any(s.has_statistics for s in sources):
            unseen.append(path)
    left = [path for path, quantizer in source.items() if id(quantizer) not in taken]
    _tell_what_stays({
        "not in the source": missing,
        "only in the source": left,
        "without data in the source": unseen,
        "given in the target": given,
    })  # fmt: skip
    if calls:
        names = [path.removesuffix(".activation_post_process") for path in calls]
        warn(
            f"load_observer_params: calls of {listed(names)} have own "
            "scales in the source and one scale in the target, which covers the ranges of all now.",
            QuantizationWarning,
        )
    return missing


def _tell_what_stays(paths: dict[str, list[str]]) -> None:
    """Warn of scales that `load_observer_params` does not copy, by the reason."""
    parts = []
    for why, found in paths.items():
        if found:
            parts.append(f"{why}: {listed(path.removesuffix('.activation_post_process') for path in found)}")
    if parts:
        warn(
            f"load_observer_params did not copy the scales that are {'; '.join(parts)}. Prepare both models alike, and "
            "calibrate the source, or what the target has besides.",
            QuantizationWarning,
        )


def _calls_joined_in(
    src_model: nn.Module, source: dict[str, FakeQuantize], targets: dict[str, FakeQuantize]
) -> dict[str, list[FakeQuantize]]:
    """The fake quantizers of further calls that the target does not tell apart, by the path that it has for all."""
    own: Any = own_scales_of(src_model)
    found: dict[str, list[FakeQuantize]] = {}
    for path, quantizer in source.items() if own is not None else ():
        owner = own.owner(path)
        if path not in targets and owner in targets:
            found.setdefault(owner, []).append(quantizer)
    return found


show_at("quantization.quantize", prepare_qat, convert, load_observer_params)
