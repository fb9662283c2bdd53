"""Write a converted model as an ONNX file that stock ONNX Runtime runs to the same integers."""

from __future__ import annotations

import gc
import json
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import CalibrationWarning, ExportError, HorizonError, listed, warn
from horizon_plugin_pytorch.export import (
    onnx_attention,  # noqa: F401 - registers its lowerings
    onnx_colour,  # noqa: F401 - registers its lowerings
    onnx_comparison,  # noqa: F401 - registers its lowerings
    onnx_detection,  # noqa: F401 - registers its lowerings
    onnx_fake_quantize,  # noqa: F401 - registers its lowerings
    onnx_float,  # noqa: F401 - registers its lowerings
    onnx_float_layers,  # noqa: F401 - registers its lowerings
    onnx_layers,  # noqa: F401 - registers its lowerings
    onnx_normalization,  # noqa: F401 - registers its lowerings
    onnx_reduction,  # noqa: F401 - registers its lowerings
    onnx_sampling,  # noqa: F401 - registers its lowerings
    onnx_scattering,  # noqa: F401 - registers its lowerings
    onnx_selection,  # noqa: F401 - registers its lowerings
    onnx_tables,  # noqa: F401 - registers its lowerings
)
from horizon_plugin_pytorch.export.names import port_names
from horizon_plugin_pytorch.export.onnx_aten import ATEN
from horizon_plugin_pytorch.export.onnx_dynamic import dynamic_sizes, with_dynamic_axes
from horizon_plugin_pytorch.export.onnx_fixed_point import FIXED_POINT
from horizon_plugin_pytorch.export.onnx_graph import FIRST_OPSET, LAST_OPSET, OPSET, TYPES, OnnxGraph, Scope, Site
from horizon_plugin_pytorch.export.onnx_loops import LoopWriter
from horizon_plugin_pytorch.export.onnx_open_sizes import first_difference
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nested import located, tensors_of
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, operator_name, value_of
from horizon_plugin_pytorch.program.open_sizes import with_any_count
from horizon_plugin_pytorch.program.record import record_run
from horizon_plugin_pytorch.program.simplify import simplified
from horizon_plugin_pytorch.runtime.arguments import argument_names, positional_arguments
from horizon_plugin_pytorch.runtime.surroundings import on_cpu

# Fused float kernels: torch defines them by simpler operators, and those are written.
_FUSED = tuple(
    getattr(torch.ops.aten, name)
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "logit", "std", "addcmul", "addcdiv",
                 "lerp", "logsumexp", "mse_loss", "rad2deg", "deg2rad", "linalg_cross", "dot", "mv",
                 "affine_grid_generator")
)  # fmt: skip
_SAMPLING = (torch.ops.aten.grid_sampler_2d,)  # ONNX has it from opset 16 on
_FEWEST = 16  # steps of a loop: fewer load fast as they are, and layers with many numbers run faster so
_EQUAL, _CLOSE = 1e-5, 1e-2  # real numbers behind integers; and those of models that round as they compute
_OF_MEMORY = ("memory_format", "layout", "device", "pin_memory", "non_blocking")


class _Exporter:
    """Writes the nodes of a program one by one."""

    def __init__(
        self,
        program: Program,
        opset: int,
        reserved: list[str],
        is_fast: bool = False,
        fewest: int | None = _FEWEST,
        is_sized: bool = True,
    ) -> None:
        self.graph = OnnxGraph(opset, reserved, is_fast, is_sized)
        self._program = program
        self._names: dict[fx.Node, str] = {}
        self._parts: dict[fx.Node, list[str | None]] = {}  # of nodes that give several tensors
        self._missing: dict[fx.Node, str] = {}  # what has no form in the file, and the operator that gives it
        self._loops = None if fewest is None else LoopWriter(program, self, fewest)

    def bind(self, node: fx.Node, name: str) -> None:
        """Let a value of the file be what a node gives."""
        self._names[node] = name

    def name_of(self, node: fx.Node) -> str:
        """The value of the file that a node gives."""
        if node in self._missing:
            raise ExportError(
                f"the model reads a result of `{self._missing[node]}` that has no ONNX form, such as the indices of "
                "max pooling; leave what needs it out of the exported model."
            )
        if node.op == "get_attr":
            return self.graph.constant(self._program.constants[str(node.target)], hint="constant")
        if node not in self._names:
            self._add_late(node)
            return self.name_of(node)
        return self._names[node]

    def _add_late(self, node: fx.Node) -> None:
        """What is written when it is first read: parts, slices, and what loops give."""
        found = None if self._loops is None else self._loops.find(node)
        if found is not None:
            self.bind(node, found)
        elif self._loops is not None and self._loops.is_late(node):
            self._add_aten(node)
        else:
            self._add_part(node)

    def name_of_part(self, node: fx.Node, part: int | None) -> str:
        """The value of the file that a node gives, or one of several."""
        name = self.name_of(node) if part is None else self._parts[node][part]
        assert name is not None, f"{operator_name(node)} has a result without ONNX form"
        return name

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """What is bound in here is forgotten afterwards."""
        kept = self._names, self._parts, self._missing
        self._names, self._parts, self._missing = dict(self._names), dict(self._parts), dict(self._missing)
        try:
            yield
        finally:
            self._names, self._parts, self._missing = kept

    def add(self, node: fx.Node, label: str = "") -> None:
        """Write a node; what cannot be written is said with its place in the model.

        Args:
            label: the node that stands for it in the file.
        """
        note, name = note_of(node), operator_name(node)
        self.graph.scope = Scope(note.path, note.line, label or node.name)
        try:
            if self._loops is not None and not label and self._loops.takes(node):
                return
            joined = None if self._loops is None else self._loops.joined(node)
            if joined is not None:
                self.bind(node, joined)
            elif node.target is operator.getitem:
                self._add_part(node)
            elif name.startswith("horizon::"):
                self._add_fixed_point(node)
            else:
                self._add_aten(node)
        except ExportError as error:
            raise ExportError(f"{note.place}: {error}") from error
        except (ArithmeticError, AssertionError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise ExportError(
                f"{note.place}: `{name}` has no ONNX form for these arguments ({type(error).__name__}: {error}). "
                "Write it with simpler operators, or leave it out of the exported model."
            ) from error

    def _add_part(self, node: fx.Node) -> None:
        whole, index = node.args
        if whole in self._missing:
            self._missing[node] = self._missing[whole]  # type: ignore[index]
            return
        name = self._parts[whole][index]  # type: ignore[index]
        if name is None:
            self._missing[node] = operator_name(whole)  # type: ignore[arg-type]
        else:
            self.bind(node, name)

    def _add_fixed_point(self, node: fx.Node) -> None:
        known = FIXED_POINT.get(operator_name(node))
        if known is None:
            raise ExportError(f"`{operator_name(node)}` has no ONNX form.")
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        args = [self._argument(v, a.name in known.data) for a, v in zip(arguments, node.args, strict=False)]
        result = known.lower(self.graph, self._site(node), *args)
        names = [result] if isinstance(result, str) else result
        values = note_of(node).values
        shaped = [
            name if value.shape else self.graph.reshape(name, []) for name, value in zip(names, values, strict=True)
        ]
        self._bind_results(node, shaped)

    def _argument(self, value: Any, is_data: bool) -> Any:
        """The name of a value of the file; constants and plain arguments as they are."""
        if isinstance(value, (list, tuple)):
            return [self._argument(part, is_data) for part in value]
        if isinstance(value, fx.Node):
            is_constant = value.op == "get_attr" and not is_data
            return self._program.constants[str(value.target)] if is_constant else self.name_of(value)
        return value

    def _site(self, node: fx.Node) -> Site:
        inputs, outputs = tuple(map(value_of, _sources(node))), note_of(node).values
        source = inputs[0]
        return Site(operator_name(node), list(source.shape), list(outputs[0].shape), outputs, source.dtype, inputs)

    def _add_aten(self, node: fx.Node) -> None:
        lower = ATEN.get(operator_name(node))
        unknown = [self._missing[source] for source in node.all_input_nodes if source in self._missing]
        if unknown:  # nothing is lost unless the model gives it, or computes integers with it
            self._missing[node] = unknown[0]
            return
        if lower is None:
            raise ExportError(
                f"`{operator_name(node)}` has no ONNX form. It is a float operator: leave pre- and post-processing out "
                "of the exported model, or write it with simpler operators; where it is part of an operator in float16 "
                "(an `nn.LSTM`, say), give that operator int16 to export it."
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.name_of)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_MEMORY}
        result = lower(self.graph, self._site(node), *args, **kwargs)
        self._bind_results(node, [result] if isinstance(result, str) else result)

    def _bind_results(self, node: fx.Node, names: list[str | None]) -> None:
        if note_of(node).value is None:
            self._parts[node] = names
        elif names[0] is None:
            self._missing[node] = operator_name(node)
        else:
            self.bind(node, names[0])


def _sources(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node takes, as often as it takes them."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _check_inputs(args: tuple, names: list[str] | None) -> None:
    """Refuse inputs that a file cannot have."""
    wanted = "float32, float16, float64, bool, or integers of 8 to 64 bits"
    for i, x in enumerate(tensors_of(args)):
        name = repr(names[i]) if names is not None and i < len(names) else str(i)
        if x.dtype not in TYPES:
            raise ExportError(
                f"input {name} is a tensor of {x.dtype}, which the file cannot take: expected {wanted}. Give it as "
                "`x.float()`; the model that you export computes with float32 from its QuantStub on."
            )
        if x.layout != torch.strided or x.is_meta:
            kind = "on the meta device" if x.is_meta else f"of layout {x.layout}"
            raise ExportError(f"input {name} is a tensor {kind}: expected an ordinary one with numbers in it.")
    for i, x in enumerate(pytree.tree_leaves(args)):
        if hasattr(x, "__array__") and not isinstance(x, Tensor):
            raise ExportError(
                f"argument {i} is a `{type(x).__module__}.{type(x).__name__}`, which would become a constant of the "
                "file: expected a tensor. Give it as `torch.as_tensor(x)`."
            )
    if not tensors_of(args):
        raise ExportError(f"there is no tensor among the example inputs {args!r:.60}: expected those of the forward.")


def _recorded(model: nn.Module, args: Any, takes_real: bool) -> Program:
    try:
        return record_run(model, args, takes_real)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, HorizonError):
            raise
        given = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)[:40]
            for x in positional_arguments(model, args)
        )
        raise ExportError(
            f"`{type(model).__name__}` does not run on the example inputs ({given}): {type(error).__name__}: {error}. "
            "Give the arguments of its forward, as a tuple if there are several."
        ) from error


def build_onnx(
    model: nn.Module,
    args: Any,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    opset_version: int | None = None,
    takes_real: bool = False,
    dynamic_axes: Any = None,
    is_fast: bool = False,
) -> Any:
    """The ONNX model of a converted model, run on example inputs.

    Args:
        takes_real: write float and prepared models too.
        dynamic_axes: sizes of the inputs that may change, as ``{"image": {0: "batch"}}``.
        is_fast: take int8 kernels also where they round other than the model does.
    """
    try:
        import onnx  # noqa: F401 - an extra; asked for before any work is done
        import onnx_ir  # noqa: F401
    except ImportError as error:
        raise ExportError(
            "export needs the packages `onnx` and `onnx_ir`: pip install 'horizon-plugin-pytorch[onnx]'."
        ) from error
    _check_stage(model, takes_real)
    _tell_unseen(model)
    opset = chosen_opset(opset_version)
    _check_inputs(positional_arguments(model, args), input_names)

    with _no_collection():
        if not dynamic_axes:
            return with_any_count(
                lambda: _built(model, args, input_names, output_names, opset, takes_real, is_fast, is_sized=True),
                first_difference,
            )
        given, names = positional_arguments(model, args), argument_names(model, args)
        paths = [(names[path[0]], *path[1:]) for path, _ in located(given, spells_keys=True)]
        inputs = port_names(paths, "input", input_names)
        return with_dynamic_axes(
            lambda resized: with_any_count(
                lambda: _built(model, resized, input_names, output_names, opset, takes_real, is_fast, False),
                first_difference,
            ),
            args, tensors_of(given), dynamic_sizes(dynamic_axes, inputs, tensors_of(given), output_names),
            _CLOSE if takes_real else _EQUAL,
        )  # fmt: skip


def chosen_opset(version: Any) -> int:
    """The opset that the user asks for.

    >>> chosen_opset(None)
    17
    """
    if version is None:
        return OPSET
    if isinstance(version, bool) or not isinstance(version, int):
        raise ExportError(f"opset_version must be a whole number, got {version!r}.")
    if not FIRST_OPSET <= version <= LAST_OPSET:
        raise ExportError(f"opset_version must lie in [{FIRST_OPSET}, {LAST_OPSET}], got {version}.")
    return version


def _built(
    model: nn.Module,
    args: Any,
    input_names: list[str] | None,
    output_names: list[str] | None,
    opset: int,
    takes_real: bool,
    is_fast: bool,
    is_sized: bool,
) -> Any:
    program = program_to_write(model, args, opset, takes_real)
    if not program.results:
        raise ExportError(f"`{type(model).__name__}` gives no tensor on these inputs: there is nothing to export.")
    return _written(program, input_names, output_names, opset, is_fast, is_sized=is_sized)[0]


def program_to_write(model: nn.Module, args: Any, opset: int, takes_real: bool = False) -> Program:
    """The program of a model, in operators that have an ONNX form."""
    program = _recorded(model, args, takes_real)
    with on_cpu():
        return simplified(program, _FUSED if opset >= 16 else _FUSED + _SAMPLING)


def require_written(program: Program) -> None:
    """Write the operators of a program, and no file.

    Raises:
        ExportError: one of them has no ONNX form.
    """
    with on_cpu():
        program = simplified(program, _FUSED)
    _with_operators(program, [f"input_{index}" for index, _ in enumerate(program.placeholders)], [], OPSET)


def _tell_unseen(model: nn.Module) -> None:
    """Look at weights that nobody has looked at; warn of activations of which no data were seen."""
    unseen = []
    for path, module in model.named_modules():
        if not isinstance(module, QATModule):
            continue
        weight = getattr(module, "weight_fake_quant", None)
        if isinstance(weight, FakeQuantize) and weight.is_quantizing and not weight.has_statistics:
            module.observe_weight()  # type: ignore[operator]
        quantizer = module.activation_post_process
        is_rounding = isinstance(quantizer, FakeQuantize) and quantizer.is_quantizing
        if is_rounding and not quantizer.has_statistics and not module.is_optional:  # type: ignore[union-attr]
            unseen.append(f"`{path}`")
    if unseen:
        warn(
            f"no data have reached {listed(unseen, most=5)}: their scale is 1 in the file, and what it gives says "
            "nothing. Calibrate the model first (`calibrate`, or data in the CALIBRATION or QAT state), or load the "
            "checkpoint of a calibrated one.",
            CalibrationWarning,
        )


def _check_stage(model: nn.Module, takes_real: bool) -> None:
    """Insist on a model at the stage that is written."""
    if isinstance(model, torch.jit.ScriptModule) and not takes_real:
        raise ExportError(
            f"`{model.original_name}` is a TorchScript module. Give the converted model that it was traced of; or "
            'write the script itself with `export_hbir(script, example_inputs, "model.onnx")`.'
        )
    kept = [path for path, m in model.named_modules() if isinstance(m, QATModule)]
    is_converted = any(isinstance(m, QuantizedModule) for m in model.modules())
    if kept and is_converted:
        raise ExportError(
            f"`{kept[0]}` is still a QAT module, kept by `preserve_qat_mode = True` on it or around it. Set that to "
            "False on the prepared model, and convert again."
        )
    if kept and not takes_real:
        raise ExportError(
            f"`{type(model).__name__}` is not converted: it still has QAT modules. Call `convert_fx` (or `convert`) "
            "first, or write it as it is with `export_to_onnx`."
        )
    if not is_converted and not takes_real:
        raise ExportError(
            f"`{type(model).__name__}` is a float model. Prepare and calibrate it, then call `convert_fx` (or "
            "`convert`); a float model is exported with `export_to_onnx`."
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let Python's garbage collector rest: graphs are many objects, which it would look through again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def write_program(
    program: Program, input_names: list[str] | None, output_names: list[str] | None, has_loops: bool = True
) -> Any:
    """The file of a program that is recorded already.

    Args:
        has_loops: write steps that repeat once; otherwise each is written.
    """
    return _written(program, input_names, output_names, OPSET, fewest=_FEWEST if has_loops else None)[0]


def write_fast(program: Program, output_names: list[str], opset: int) -> tuple[Any, dict[str, str]]:
    """The file of a program with int8 kernels, and what may differ in it, with why."""
    return _written(program, None, output_names, opset, is_fast=True)


def _with_operators(
    program: Program,
    inputs: list[str],
    outputs: list[str],
    opset: int,
    is_fast: bool = False,
    fewest: int | None = _FEWEST,
    is_sized: bool = True,
) -> _Exporter:
    exporter = _Exporter(program, opset, inputs + outputs, is_fast, fewest, is_sized)
    for name, node in zip(inputs, program.placeholders, strict=True):
        exporter.bind(node, exporter.graph.add_input(name, value_of(node).dtype, value_of(node).shape))
    with on_cpu():
        for node in program.graph.nodes:
            if node.op == "call_function":
                exporter.add(node)
    return exporter


def _written(
    program: Program,
    input_names: list[str] | None,
    output_names: list[str] | None,
    opset: int,
    is_fast: bool = False,
    fewest: int | None = _FEWEST,
    is_sized: bool = True,
) -> tuple[Any, dict[str, str]]:
    """The file of a program, and what in it may differ from the program.

    Args:
        fewest: steps that repeat are a loop where there are not fewer of them.
        is_sized: operators may be chosen by sizes of images; not where the file is for several.
    """
    inputs = port_names(program.input_paths, "input", input_names)
    outputs = port_names(program.output_paths, "output", output_names, inputs)
    exporter = _with_operators(program, inputs, outputs, opset, is_fast, fewest, is_sized)
    exporter.graph.scope = Scope()
    types: list[tuple[str, torch.dtype, Sequence[int]]] = []
    for name, node, value in zip(outputs, program.returned, program.results, strict=True):
        source, dtype = exporter.name_of(node), value.dtype
        if value.quantization is not None:  # integers are given in their storage type
            dtype = value.quantization.dtype.storage
            source = exporter.graph.cast(source, dtype)
        types.append((exporter.graph.output(name, source), dtype, value.shape))
    classes = json.dumps(program.classes, sort_keys=True)
    file = exporter.graph.model(inputs, types, program.name, {"horizon_plugin_pytorch.modules": classes})
    return file, exporter.graph.inexact
