"""`prepare`: from a float model to one that calibrates and trains on the integer grid."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch  # noqa: F401 - for the docstring's example
from torch import nn

from horizon_plugin_pytorch.analysis.calls import Recording, record_calls
from horizon_plugin_pytorch.analysis.check import RESULT_FILE, inspect_recording
from horizon_plugin_pytorch.analysis.float_run import FloatComparison
from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.graph_text import graph_of, graph_text
from horizon_plugin_pytorch.capture.plain_model import copy_model, require_numbers, unwrapped
from horizon_plugin_pytorch.capture.recording import record_runs
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning, require_module, warn
from horizon_plugin_pytorch.export.unwritable import UnwritableCalls
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.march import require_march
from horizon_plugin_pytorch.passes.fuse_mode import FuseMode
from horizon_plugin_pytorch.passes.hybrid import HybridConfig
from horizon_plugin_pytorch.passes.late_modules import meet_calls
from horizon_plugin_pytorch.passes.own_scales import OwnScales, split_aliases
from horizon_plugin_pytorch.passes.pipeline import run_passes
from horizon_plugin_pytorch.passes.preparation import RecordedPreparation
from horizon_plugin_pytorch.runtime.arguments import arguments_of, surplus
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.workflow.checkpoint import report_mismatches
from horizon_plugin_pytorch.workflow.eager import prepare_qat
from horizon_plugin_pytorch.workflow.float_model import as_written, require_float
from horizon_plugin_pytorch.workflow.garbage import collected_later
from horizon_plugin_pytorch.workflow.symbolic import prepare_by_tracing

GRAPH_FILE = "fx_graph.txt"


class PrepareMethod(Enum):
    """How the model's graph is found."""

    JIT_STRIP = "jit-strip"
    JIT = "jit"
    SYMBOLIC = "symbolic"
    EAGER = "eager"


def prepare(
    model: nn.Module,
    example_inputs: Any = None,
    qconfig_setter: Any = None,
    method: PrepareMethod | str = PrepareMethod.JIT_STRIP,
    *,
    example_kw_inputs: dict[str, Any] | None = None,
    qconfig_dict: dict[str, Any] | None = None,
    fuse_mode: FuseMode | str = FuseMode.BNAddReLU,
    own_scales: bool | Iterable[str] = False,
    hybrid: bool = False,
    hybrid_dict: dict[str, list] | None = None,
    out_dir: str | os.PathLike | None = ".",
) -> nn.Module:
    """Prepare a float model for calibration and training on the integer grid; `model` itself is not changed.

    What lies between QuantStub and DeQuantStub is quantized, the rest stays float. JIT_STRIP and JIT find the graph by
    running the model on the example inputs, in eval mode, and in training mode too if its code can tell them apart; its
    own forward stays, with all its Python.
    SYMBOLIC traces it, and EAGER leaves replacing and fusing to you.

    Args:
        example_inputs: a tuple or list of the model's arguments; a dictionary of them by name, if the forward has
            parameters of these names; anything else is its only argument. `calibrate` takes a batch in the same way.
        qconfig_setter: a setter, or a tuple of them from high to low priority.
        method: a `PrepareMethod` or its value.
        example_kw_inputs: keyword arguments of the model.
        qconfig_dict: instead of setters, as `prepare_qat_fx` takes it.
        own_scales: paths of modules that are called several times and whose calls shall each have activation scales of
            their own, with all that is inside; True means all. Weights stay shared. The second call's module is
            ``<path>_call_1``.
        hybrid: run operators that have no quantized form on the CPU, in float, instead of refusing them.
        hybrid_dict: further operators for the CPU: ``{"module_type": [cls], "module_name": [path]}``.
        out_dir: where ``fx_graph.txt`` and ``model_check_result.txt`` are written; None writes none.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.NASH_E)
    >>> x = torch.randn(1, 1, 4, 4)
    >>> net = prepare(QuantWrapper(nn.Conv2d(1, 2, 1)), (x,), default_calibration_qconfig_setter, out_dir=None)
    >>> type(net).__name__, type(net.module).__name__
    ('QuantWrapper', 'Conv2d')
    """
    require_module(model, "prepare")
    try:
        method = PrepareMethod(method)
    except ValueError:
        names = ", ".join(f"PrepareMethod.{m.name} ({m.value!r})" for m in PrepareMethod)
        raise ValueError(f"prepare: method must be one of {names}, got {method!r}.") from None
    if qconfig_setter is not None and qconfig_dict:
        raise QuantizationConfigError("prepare: give qconfig_setter or qconfig_dict, not both.")
    fuse_mode = FuseMode.of(fuse_mode, "prepare")
    require_numbers(model, "prepare")
    _warn_surplus(model, example_inputs)
    if fuse_mode is FuseMode.NoFuse and method is PrepareMethod.EAGER:
        raise QuantizationConfigError("prepare: PrepareMethod.EAGER fuses nothing by itself; leave fuse_mode out.")
    if hybrid_dict and not hybrid:
        raise QuantizationConfigError("prepare: hybrid_dict is for hybrid=True.")
    if method is PrepareMethod.EAGER and hybrid_dict:
        raise QuantizationConfigError(
            "prepare: PrepareMethod.EAGER has no hybrid_dict: a module with `qconfig = None` runs on the CPU."
        )
    if method is PrepareMethod.EAGER and qconfig_dict:
        raise QuantizationConfigError("prepare: PrepareMethod.EAGER reads the modules' own `qconfig`; set it there.")
    if method is PrepareMethod.EAGER and own_scales:
        raise NotImplementedError("prepare: PrepareMethod.EAGER sees no calls, so it has no own_scales; use JIT_STRIP.")
    with collected_later():
        comparison = None
        if method is PrepareMethod.EAGER:
            prepared: Any = _prepare_eager(model, example_inputs, example_kw_inputs, qconfig_setter, hybrid)
        elif method is PrepareMethod.SYMBOLIC:
            has_example = example_inputs is not None or example_kw_inputs
            example = arguments_of(model, example_inputs, example_kw_inputs) if has_example else None
            prepared = prepare_by_tracing(
                model,
                qconfig_dict,
                hybrid=hybrid,
                hybrid_dict=hybrid_dict,
                qconfig_setter=qconfig_setter,
                own_scales=own_scales,
                is_fused=fuse_mode is not FuseMode.NoFuse,
                example=example,
            )
            if example is not None:
                meet_calls(prepared, *example)
        else:
            if example_inputs is None and not example_kw_inputs:
                raise ValueError(
                    f"prepare: {method} runs the model, so it needs example_inputs: a tuple of the model's arguments."
                )
            example = arguments_of(model, example_inputs, example_kw_inputs)
            prepared, comparison = _prepare_by_running(
                model,
                *example,
                qconfig_dict,
                qconfig_setter,
                fuse_mode,
                own_scales,
                HybridConfig(hybrid_dict, qconfig_setter) if hybrid else None,
            )
        recording = None
        if example_inputs is not None or example_kw_inputs:
            unwritable = UnwritableCalls(prepared)
            own_args, own_kwargs = own_tensors(arguments_of(prepared, example_inputs, example_kw_inputs))
            recording = record_calls(prepared, own_args, own_kwargs, comparison, unwritable)
            unwritable.tell("prepare")
        if out_dir is not None:
            _write_results(prepared, out_dir, recording)
        return prepared


def _warn_surplus(model: nn.Module, example_inputs: Any) -> None:
    """Say which example inputs the model does not take; `calibrate` leaves labels out without a word."""
    count = surplus(model, example_inputs)
    if count:
        kind = type(example_inputs).__name__
        warn(
            f"prepare: example_inputs has {len(example_inputs)} items, and the forward of `{type(model).__name__}` "
            f"takes {len(example_inputs) - count}: the rest is left out, as `calibrate` leaves out labels. If the "
            f"{kind} is one argument, put it into a tuple, `(example_inputs,)`.",
            QuantizationWarning,
        )


def _write_results(prepared: Any, out_dir: str | os.PathLike, recording: Recording | None) -> None:
    """Write the graph and the check; the model is prepared whether or not they can be written."""
    try:
        graph = graph_of(prepared)
        if graph is not None:
            write_atomically(graph_text(graph).encode(), os.path.join(out_dir, GRAPH_FILE))
        if recording is not None:
            inspect_recording(recording, out_dir)
    except CheckError as error:
        warn(f"prepare: {error} The model is prepared; `check_qat_model` repeats the check.", QuantizationWarning)
    except OSError as error:
        warn(
            f"prepare could not write {GRAPH_FILE} and {RESULT_FILE} into `{os.fspath(out_dir)}`: {error}. The model "
            "is prepared. Give an out_dir that can be written to, or out_dir=None to write none.",
            QuantizationWarning,
        )


def _prepare_eager(
    model: nn.Module, inputs: Any, kwargs: dict[str, Any] | None, qconfig_setter: Any, hybrid: bool
) -> nn.Module:
    if qconfig_setter is None or (inputs is None and not kwargs):
        return prepare_qat(model, hybrid=hybrid, qconfig_setter=qconfig_setter)
    return prepare_qat(
        model,
        hybrid=hybrid,
        qconfig_setter=qconfig_setter,
        example_inputs=inputs,
        example_kw_inputs=kwargs,
    )


def _prepare_by_running(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None,
    qconfig_dict: dict[str, Any] | None,
    qconfig_setter: Any,
    fuse_mode: FuseMode,
    own_scales: bool | Iterable[str],
    hybrid: HybridConfig | None,
) -> tuple[nn.Module, FloatComparison]:
    """The prepared model, and what compares it with the float model."""
    march = require_march("prepare")
    model = unwrapped(model, "prepare")
    require_float(model, "prepare")
    copied = as_written(copy_model(model, "prepare"))
    modules = copied.named_modules(remove_duplicate=False)  # aliases become modules of their own
    children = {path: {name for name, _ in module._modules.items()} for path, module in modules}
    own = OwnScales.of(own_scales, copied, "prepare")
    split_aliases(copied, own)
    graph, runs, given = record_runs(copied, args, kwargs)
    prep = RecordedPreparation(
        Captured(copied, graph),
        march,
        own,
        name=type(model).__name__,
        qconfig_dict=qconfig_dict,
        qconfig_setter=qconfig_setter,
        hybrid=hybrid,
        is_fused=fuse_mode is not FuseMode.NoFuse,
        runs=runs,
        children=children,
    )
    run_passes(prep)
    report_mismatches(copied)
    return copied, FloatComparison(copied, given, [site for site in prep.deployed if prep.sites.get(site)])


show_at("quantization.prepare", PrepareMethod, prepare)
