"""fx mode: trace the model, then replace, fuse and swap by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from horizon_plugin_pytorch.capture.graph_module import GraphModuleWithAttr, ObservedGraphModule, QuantizedGraphModule
from horizon_plugin_pytorch.capture.plain_model import copy_model, unwrapped
from horizon_plugin_pytorch.capture.tracer import QuantizationTracer
from horizon_plugin_pytorch.capture.tracing import trace
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, require_module, warn
from horizon_plugin_pytorch.march import require_march
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.train_mode import watch_training
from horizon_plugin_pytorch.passes.fuse_mode import FuseMode
from horizon_plugin_pytorch.passes.hybrid import HybridConfig
from horizon_plugin_pytorch.passes.late_modules import meet_calls
from horizon_plugin_pytorch.passes.own_scales import OwnScales, keep_one_entry, split_aliases
from horizon_plugin_pytorch.passes.pipeline import FUSION, run_passes
from horizon_plugin_pytorch.passes.preparation import TracedPreparation
from horizon_plugin_pytorch.passes.swap import to_quantized
from horizon_plugin_pytorch.passes.tied_scales import TiedOperators, is_effective
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.workflow.checkpoint import refuse_other_formats, report_mismatches
from horizon_plugin_pytorch.workflow.float_model import as_written, require_float
from horizon_plugin_pytorch.workflow.garbage import collected_later

__all__ = ["QuantizationTracer", "convert_fx", "fuse_fx", "prepare_qat_fx"]


def _preserve(target: nn.Module, source: nn.Module, config: dict | None, who: str) -> None:
    """Do what a custom configuration asks, and say what of it cannot be done."""
    if config is None:
        return
    if not isinstance(config, dict):
        raise TypeError(
            f'{who}: a custom configuration is a dictionary, {{"preserved_attributes": [...]}}, got a '
            f"{type(config).__name__}."
        )
    unknown = [key for key in config if key != "preserved_attributes"]
    if unknown:
        warn(
            f"{who}: of a custom configuration only `preserved_attributes` is known; ignored: "
            f"{', '.join(map(repr, unknown))}.",
            QuantizationWarning,
        )
    names = config.get("preserved_attributes", ())
    names = (names,) if isinstance(names, str) else names
    missing = [name for name in names if not hasattr(source, name)]
    if missing:
        warn(
            f"{who}: `{type(source).__name__}` has no attribute {', '.join(map(repr, missing))} to preserve.",
            QuantizationWarning,
        )
    for name in names:
        if name not in missing and not hasattr(target, name):
            setattr(target, name, getattr(source, name))


def fuse_fx(
    model: nn.Module,
    fuse_custom_config_dict: dict[str, Any] | None = None,
    fuse_mode: FuseMode | str = FuseMode.BNAddReLU,
) -> GraphModuleWithAttr:
    """Fuse layers with the batch norm, add and ReLU that follow them; a float model comes out, `model` stays as it is.

    >>> type(fuse_fx(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())).get_submodule("0")).__name__
    'ConvReLU2d'
    """
    require_module(model, "fuse_fx")
    model = unwrapped(model, "fuse_fx")
    copied = as_written(copy_model(model, "fuse_fx"))
    graph_module = GraphModuleWithAttr(copied, trace(copied), type(model).__name__)
    is_fused = FuseMode.of(fuse_mode, "fuse_fx") is not FuseMode.NoFuse
    no_chip: Any = None
    run_passes(TracedPreparation(graph_module, no_chip, OwnScales(), is_fused=is_fused), FUSION)
    _preserve(graph_module, model, fuse_custom_config_dict, "fuse_fx")
    return graph_module


def prepare_qat_fx(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: dict[str, list] | None = None,
    opset_version: str = "hbdk3",
    example_inputs: Any = None,
    qconfig_setter: Any = None,
    verbose: int = 0,
    own_scales: bool | Iterable[str] = False,
) -> ObservedGraphModule:
    """Prepare a float model for calibration and training on the integer grid.

    What lies between QuantStub and DeQuantStub is quantized, the rest stays float. `model` itself is not changed.

    Args:
        model: a float model, or the result of `fuse_fx`.
        qconfig_dict: ``{"": qconfig, "module_type": [(cls, qconfig)], "module_name": [(path, qconfig)]}``; later keys
            beat earlier ones, and a module's own ``qconfig`` attribute beats all. None keeps a module float.
        qconfig_setter: instead of `qconfig_dict`, a setter of `qconfig_template` or a `QconfigSetter`, or a tuple of
            them, from high to low priority.
        prepare_custom_config_dict: ``{"preserved_attributes": [...]}``.
        own_scales: shared modules whose calls have activation scales of their own; see `prepare`.
        hybrid: run operators that have no quantized form on the CPU, in float; stubs are put around them.
        hybrid_dict: further operators for the CPU: ``{"module_type": [cls], "module_name": [path]}``.
        example_inputs: arguments of a call like those to come. They say which optional arguments are None, what flags
            are, and what lists and dictionaries hold. Code that tracing does not enter (`wrap`) runs once on them, so
            that functions there have their modules at once, rather than when they are first met; `verbose` needs them.
        verbose: 1 writes ``model_check_result.txt`` and prints it: shared and unfused operators, formats.
        optimize_graph: give the operands of a cat and its result one scale, on Bernoulli chips.
        opset_version: ``"hbdk3"`` or ``"hbdk4"``; there is one arithmetic here, so it changes nothing.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.BAYES)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), {"": default_qat_8bit_fake_quant_qconfig})
    >>> type(net.module)
    <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>
    """
    require_module(model, "prepare_qat_fx")
    _check_opset(opset_version)
    is_tied = optimize_graph and is_effective(require_march("prepare_qat_fx"), "prepare_qat_fx")
    example = None if example_inputs is None else arguments_of(model, example_inputs)
    with collected_later():
        prepared = prepare_by_tracing(
            model, qconfig_dict, prepare_custom_config_dict, hybrid, hybrid_dict, qconfig_setter, own_scales,
            joins_calls=False,  # while training: the guides print scales that average over the calls of a shared module
            tied=TiedOperators() if is_tied else None,
            example=example,
        )  # fmt: skip
    if example is not None:
        meet_calls(prepared, *example)
    if verbose:
        check_verbosely(prepared, example_inputs, "prepare_qat_fx")
    return prepared


def _check_opset(opset_version: Any) -> None:
    if opset_version not in ("hbdk3", "hbdk4"):
        raise QuantizationConfigError(
            f"prepare_qat_fx: opset_version must be 'hbdk3' or 'hbdk4', got {opset_version!r}."
        )
    if opset_version != "hbdk3":
        warn(
            f"prepare_qat_fx: opset_version={opset_version!r} changes nothing: models for both compilers have one "
            "arithmetic here, and set_march says which chip they are for.",
            QuantizationWarning,
        )


def check_verbosely(prepared: nn.Module, example_inputs: Any, what: str) -> None:
    """Write and print the check of shared and unfused operators and of formats."""
    from horizon_plugin_pytorch.analysis.check import inspect_model
    from horizon_plugin_pytorch.analysis.report import render

    if example_inputs is None:
        warn(f"{what}: verbose=1 runs the model to check it; give example_inputs.", QuantizationWarning)
        return
    print(render(inspect_model(prepared, example_inputs, ".")))


def prepare_by_tracing(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    hybrid: bool = False,
    hybrid_dict: dict[str, list] | None = None,
    qconfig_setter: Any = None,
    own_scales: bool | Iterable[str] = False,
    joins_calls: bool = True,
    is_fused: bool = True,
    tied: TiedOperators | None = None,
    example: tuple[tuple, dict[str, Any]] | None = None,
) -> ObservedGraphModule:
    """`prepare_qat_fx`, and `prepare` by symbolic trace.

    Args:
        is_fused: fuse layers with what follows them.
        joins_calls: let all calls of a module in one forward count as one batch, while training too.
        tied: operators that have one scale with what they take.
        example: the arguments and keyword arguments of a call like those to come.
    """
    march = require_march("prepare_qat_fx")
    if hybrid_dict and not hybrid:
        raise QuantizationConfigError("prepare_qat_fx: hybrid_dict is for hybrid=True.")
    if qconfig_setter is not None and qconfig_dict:
        raise QuantizationConfigError(
            "prepare_qat_fx: give qconfig_dict or qconfig_setter, not both; `ModuleNameQconfigSetter` sets qconfigs by "
            "name beside other setters."
        )
    model = unwrapped(model, "prepare_qat_fx")
    require_float(model, "prepare_qat_fx")
    copied = as_written(copy_model(model, "prepare_qat_fx"))
    own = OwnScales.of(own_scales, copied, "prepare_qat_fx")
    split_aliases(copied, own)
    observed = ObservedGraphModule(copied, trace(copied, example), type(model).__name__)
    run_passes(
        TracedPreparation(
            observed,
            march,
            own,
            name=type(model).__name__,
            qconfig_dict=qconfig_dict,
            qconfig_setter=qconfig_setter,
            hybrid=HybridConfig(hybrid_dict, qconfig_setter) if hybrid else None,
            is_fused=is_fused,
            joins_calls=joins_calls,
            tied=tied,
        )
    )
    report_mismatches(observed)
    _preserve(observed, model, prepare_custom_config_dict, "prepare_qat_fx")
    return observed


def convert_fx(
    graph_module: nn.Module,
    inplace: bool | dict[str, Any] | None = False,
    convert_custom_config_dict: dict[str, Any] | bool | None = None,
    _remove_qconfig: bool = True,
    fast_mode: bool = False,
) -> Any:
    """Convert a prepared and calibrated or trained model to integers.

    The documents have two orders of arguments, ``(model, inplace, convert_custom_config_dict, _remove_qconfig)`` and,
    older, ``(model, convert_custom_config_dict, _remove_qconfig)``. Both are understood.

    Args:
        graph_module: the result of `prepare_qat_fx`, or of `prepare` by any method.
        inplace: let the result reuse the modules of `graph_module`, which must not be used afterwards.
        convert_custom_config_dict: ``{"preserved_attributes": [...]}``.
        _remove_qconfig: False leaves the qconfigs on the modules.
        fast_mode: has no effect, and warns: the integer model is fast as it is.

    Returns:
        A `QuantizedGraphModule` for a model that was traced; a model that kept its own forward still has it.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.BAYES)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), {"": default_qat_8bit_fake_quant_qconfig})
    >>> _ = qat(torch.randn(1, 1, 4, 4))
    >>> type(convert_fx(qat).module)
    <class 'horizon_plugin_pytorch.nn.quantized.conv2d.Conv2d'>
    """
    if inplace is None or isinstance(inplace, dict):  # the older order
        inplace, given = False, inplace
        if isinstance(convert_custom_config_dict, bool):
            _remove_qconfig, convert_custom_config_dict = convert_custom_config_dict, None
        if given is not None and convert_custom_config_dict is not None:
            raise TypeError("convert_fx: convert_custom_config_dict is given twice, second and by name.")
        convert_custom_config_dict = convert_custom_config_dict if given is None else given
    quantized = converted(graph_module, "convert_fx", inplace, _remove_qconfig, fast_mode)
    _preserve(quantized, graph_module, convert_custom_config_dict, "convert_fx")  # type: ignore[arg-type]
    return quantized


def converted(model: nn.Module, who: str, inplace: bool, remove_qconfig: bool, fast_mode: bool) -> Any:
    """The integer form of a prepared model, however it was prepared."""
    require_module(model, who, "a prepared model")
    for name, value in (("inplace", inplace), ("remove_qconfig", remove_qconfig), ("fast_mode", fast_mode)):
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name} is True or False, got {value!r}.")
    if not any(isinstance(m, QATModule) for m in model.modules()):
        is_converted = any(isinstance(m, QuantizedModule) for m in model.modules())
        raise TypeError(
            f"{who} takes the result of `prepare`, `prepare_qat_fx` or `prepare_qat`, and `{type(model).__name__}` "
            f"{'is already converted' if is_converted else 'has no QAT modules: it is a float model'}."
        )
    if fast_mode:
        warn(f"{who}: fast_mode=True has no effect, the integer model is fast as it is.", QuantizationWarning)
    own: Any = model if inplace else copy_model(model, who)
    to_quantized(own, remove_qconfig)
    quantized = own
    if isinstance(own, ObservedGraphModule) and not (inplace and who == "convert"):
        quantized = QuantizedGraphModule(own, own.graph, model._get_name())
        keep_one_entry(quantized)
        refuse_other_formats(quantized)  # others have it from being prepared
    watch_training(quantized)
    return quantized


show_at("quantization.quantize_fx", fuse_fx, prepare_qat_fx, convert_fx)
