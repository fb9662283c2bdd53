"""The results of each operator of a TorchScript module, next to those of another engine or of another script."""

from __future__ import annotations

import io
import operator
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import ExportError, require_module
from horizon_plugin_pytorch.export.script_files import quiet, require_script
from horizon_plugin_pytorch.export.second_opinion import values_in_onnx_runtime
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.march import as_march
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, operator_name
from horizon_plugin_pytorch.program.record import record_run
from horizon_plugin_pytorch.program.script import ScriptSteps
from horizon_plugin_pytorch.runtime.arguments import positional_arguments, script_arguments
from horizon_plugin_pytorch.tables import Table

__all__ = ["compare_script_models", "script_profile"]

RESULT_FILE = "horizon_script_result.pt"
# Operators by the names that the guides give them.
_LABELS = {
    "horizon::lookup": "hz_lut", "horizon::evaluate": "hz_segment_lut", "horizon::resize2d": "hz_interpolate",
    "horizon::resample2d": "hz_interpolate", "aten::cat": "hz_cat", "aten::sub": "hz_sub", "aten::sum": "hz_sum",
}  # fmt: skip
_PARTS = {"aten::max": ("_val", "_arg"), "aten::min": ("_val", "_arg")}
_SMALL_TABLE = 256
# What only passes numbers on, or is a part of the operator that reads it.
_UNMARKED = frozenset(
    f"aten::{name}" for name in ("alias", "detach", "clone", "_to_copy", "lift_fresh", "mul", "round", "to")
) | {"horizon::requantize", "horizon::dequantize"}


def script_profile(
    model: nn.Module | torch.jit.ScriptModule,
    example_inputs: Any,
    out_dir: str | os.PathLike | None = None,
    march: Any = None,
    mark_node_func: Callable[[fx.Node], bool] | None = None,
    compare_with_hbdk_parser: bool = True,
) -> dict[str, Tensor]:
    """The results of each operator of a converted model, compared with those that another engine computes.

    The other engine is ONNX Runtime, on the integer graph that `export_quantized_onnx` writes, with all values as
    outputs; the vendor takes its compiler's parser, which is not here. Results are printed, written to
    ``horizon_script_result.pt`` (read it with `torch.load`) and returned.

    Args:
        model: a converted model, or what `torch.jit.trace` gives for it.
        example_inputs: the model's arguments.
        out_dir: where to write the file; None is the working directory.
        march: the chip; its name is checked, and changes nothing: the model has its integers.
        mark_node_func: says of each node of the recorded program (`program.record_program`) whether its result is kept;
            None leaves out what only passes numbers on. What differs is always shown.
        compare_with_hbdk_parser: compare with the other engine.

    Returns:
        The result of each operator, by its name. Integers are in float32.

    Raises:
        ExportError: the model is not converted, cannot be traced, or has an operator without ONNX form.
    """
    require_module(model, "script_profile")
    _check_march(march)
    is_script = isinstance(model, torch.jit.ScriptModule)
    args = script_arguments(example_inputs) if is_script else positional_arguments(model, example_inputs)
    script = _script_of(model, args, "script_profile")
    args = args if is_script else tuple(tensors_of(args))
    profile = _profile(script, args, mark_node_func)
    others = values_in_onnx_runtime(profile.program, args) if compare_with_hbdk_parser else None
    data = io.BytesIO()
    torch.save({row.name: row.value for row in profile.rows if row.is_marked}, data)
    write_atomically(data.getvalue(), os.path.join(out_dir or ".", RESULT_FILE))
    if others is not None:
        pairs = [(row, others.get(row.node, row.value)) for row in profile.rows]
        same = "Torch run pt output is same with hbdk parser (here: ONNX Runtime on the integer graph)."
        _print_pairs(pairs, same, "ONNX Runtime")
    return {row.name: row.value for row in profile.rows if row.is_marked}


def compare_script_models(
    model1: torch.jit.ScriptModule, model2: torch.jit.ScriptModule, example_inputs: Any, march: Any = None
) -> None:
    """Compare the results of each operator of two TorchScript modules, such as those of two versions of this package.

    Args:
        model1, model2: what `torch.jit.trace` or `jit.load` gives.
        example_inputs: the arguments of both.
        march: the chip; its name is checked, and changes nothing: the scripts have their integers.

    Raises:
        ExportError: a script is none of operators alone.
    """
    _check_march(march)
    args = script_arguments(example_inputs)
    first, second = (
        _profile(_script_of(model, args, "compare_script_models", is_traced=True), args) for model in (model1, model2)
    )
    found = {row.name: row for row in second.rows}
    pairs = [(row, found[row.name].value if row.name in found else None) for row in first.rows]
    known = {row.name for row in first.rows}
    _print_pairs(pairs, "All ops in two ScriptModules are same.", "the second script")
    extra = [row.name for row in second.rows if row.name not in known and row.is_marked]
    if extra:
        print(f"Only the second script has: {', '.join(extra)}.")


@dataclass(frozen=True)
class _Row:
    """The result of an operator."""

    name: str
    value: Tensor
    node: str
    operator: str
    line: str
    is_marked: bool


@dataclass(frozen=True)
class _Profile:
    program: Program
    rows: list[_Row]


def _profile(script: torch.jit.ScriptModule, args: tuple, mark: Callable[[fx.Node], bool] | None = None) -> _Profile:
    program = record_run(ScriptSteps(script, has_steps=True), args)
    counts: Counter[str] = Counter()
    rows: list[_Row] = []
    numbers = {node: f"arg{index}" for index, node in enumerate(program.placeholders)}
    for node, value in program.run(*args):
        if node.op == "placeholder":
            if _quantizer(node) is None:
                rows.append(_Row(numbers[node], value.clone(), node.name, "input", "", True))
            continue
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        source = _input_of(node)
        if source is not None:
            name, is_marked = numbers[source], True
        else:
            base = _name(node, program)
            name = f"{base}_{counts[base]}" if counts[base] else base
            counts[base] += 1
            is_marked = _is_marked(node) if mark is None else bool(mark(node))
        rows.append(_Row(name, value.clone(), node.name, _operator(node), note_of(node).line, is_marked))
    order = {name: index for index, name in enumerate(numbers.values())}
    rows.sort(key=lambda row: order.get(row.name, len(order)))
    return _Profile(program, rows)


def _quantizer(node: fx.Node) -> fx.Node | None:
    """The QuantStub that alone reads an input."""
    users = list(node.users)
    return users[0] if len(users) == 1 and operator_name(users[0]) == "horizon::quantize" else None


def _input_of(node: fx.Node) -> fx.Node | None:
    """The input that a QuantStub quantizes; to the compiler, its integers are the input."""
    source = node.args[0] if node.args else None
    is_input = isinstance(source, fx.Node) and source.op == "placeholder" and _quantizer(source) is node
    return source if is_input else None  # type: ignore[return-value]


def _operator(node: fx.Node) -> str:
    return operator_name(node.args[0] if node.target is operator.getitem else node)  # type: ignore[arg-type]


def _is_marked(node: fx.Node) -> bool:
    return _operator(node) not in _UNMARKED


def _name(node: fx.Node, program: Program) -> str:
    """As the guides have it: the module, and the operator in it: ``_backbone_conv_hz_conv``."""
    is_part = node.target is operator.getitem
    whole: Any = node.args[0] if is_part else node
    path, kind = note_of(whole).path, operator_name(whole)
    parts = [part for part in path.split(".") if part]
    label = _LABELS.get(kind) or kind.replace("aten::", "aten_").replace("horizon::", "hz_")
    if parts and parts[-1].startswith("_generated_"):
        parts.pop()
    if kind == "aten::clamp":
        label = "aten_relu" if whole.args[1:2] == (0,) else "aten_clamp"
    if kind == "aten::clamp" and operator_name(whole.args[0]) == "aten::round":  # the last step of softmax
        label = "hz_mul"
    elif _is_long_table(whole, program):
        label = "hz_segment_lut"
    name = "_".join(["", *parts, label])
    if not is_part:
        return name
    index: Any = node.args[1]
    return name + (_PARTS[kind][index] if kind in _PARTS else f".{index}")


def _is_long_table(node: fx.Node, program: Program) -> bool:
    """Is it a table of many entries, or one of the two inside of softmax?"""
    inner, kind = note_of(node).path.rpartition(".")[2], operator_name(node)
    if kind == "horizon::lookup":
        table: Any = node.args[1]
        return inner == "exp" or program.constants[str(table.target)].numel() > _SMALL_TABLE
    return kind == "aten::div" and inner == "reciprocal"


def _print_pairs(pairs: Sequence[tuple[_Row, Tensor | None]], same: str, other: str) -> None:
    """The table of the guides; where something differs, also how much, and where it begins."""
    differing = [(row, value) for row, value in pairs if not _is_same(row.value, value)]
    names = {row.name for row, _ in differing}
    shown = [row for row, _ in pairs if row.is_marked or row.name in names]
    print(Table(["name", "if equal"], [[row.name, str(row.name not in names)] for row in shown]).text())
    if not differing:
        print(same)
        return
    rows = [[row.name, row.operator, *_difference(row.value, value), row.line] for row, value in differing]
    print(
        f"{len(differing)} ops differ from {other}; {differing[0][0].name} is the first, later ones may follow from it:"
    )
    print(Table(["name", "operator", "elements", "differ", "at most by", "line"], rows).text())


def _is_same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and not _differing(a, b.to(a.dtype)).any()


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ; what is no number equals itself."""
    return (a != b) & ~(a.isnan() & b.isnan())


def _difference(a: Tensor, b: Tensor | None) -> list[Any]:
    if b is None:
        return [a.numel(), "absent", ""]
    if a.shape != b.shape:
        return [a.numel(), f"shape {tuple(b.shape)}, not {tuple(a.shape)}", ""]
    differs = _differing(a, b.to(a.dtype))
    gap = (a.double() - b.double())[differs].abs()
    return [a.numel(), int(differs.sum()), f"{float(gap.max()):g}"]


def _script_of(model: Any, args: tuple, who: str, is_traced: bool = False) -> torch.jit.ScriptModule:
    if isinstance(model, torch.jit.ScriptModule):
        return model
    if is_traced:
        require_script(model, who)
    if not isinstance(model, nn.Module) or any(isinstance(m, QATModule) for m in model.modules()):
        raise ExportError(
            f"{who} takes a converted model or a TorchScript module: call `convert_fx` or `convert` first."
        )
    if not any(isinstance(m, QuantizedModule) for m in model.modules()):
        raise ExportError(f"{who}: `{type(model).__name__}` is a float model; it has no integers to compare.")
    with quiet(), torch.no_grad():
        return torch.jit.trace(_Flat(model.eval(), args), tuple(tensors_of(args)))


class _Flat(nn.Module):
    """A model as the tracer takes it: tensors in and tensors out, whatever structures they are in for the model."""

    def __init__(self, model: nn.Module, args: tuple) -> None:
        super().__init__()
        self._parts: list[Any] = [model, args]  # a list: paths begin at the modules of the model
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.training = False

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        model, args = self._parts
        given = iter(tensors)
        return tuple(tensors_of(model(*map_tensors(lambda _: next(given), args))))


def _check_march(march: Any) -> None:
    if march is not None:
        as_march(march)


show_at("utils.quant_profiler", script_profile, compare_script_models)
