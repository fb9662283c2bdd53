"""Write a converted model as an ONNX file that stock ONNX Runtime runs to the same integers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import ExportError, HorizonError
from horizon_plugin_pytorch.export import (
    onnx_attention,  # noqa: F401 - registers its lowerings
    onnx_colour,  # noqa: F401 - registers its lowerings
    onnx_comparison,  # noqa: F401 - registers its lowerings
    onnx_detection,  # noqa: F401 - registers its lowerings
    onnx_float,  # noqa: F401 - registers its lowerings
    onnx_normalization,  # noqa: F401 - registers its lowerings
    onnx_reduction,  # noqa: F401 - registers its lowerings
    onnx_sampling,  # noqa: F401 - registers its lowerings
    onnx_selection,  # noqa: F401 - registers its lowerings
    onnx_tables,  # noqa: F401 - registers its lowerings
)
from horizon_plugin_pytorch.export.onnx_aten import ATEN
from horizon_plugin_pytorch.export.onnx_fixed_point import FIXED_POINT
from horizon_plugin_pytorch.export.onnx_graph import OPSET, TYPES, OnnxGraph, Site
from horizon_plugin_pytorch.export.recorder import OF_SHAPES, Step, plain, record, tensor_key
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import positional_arguments


class _Exporter:
    def __init__(self, opset: int, reserved: list[str]) -> None:
        self.graph = OnnxGraph(opset, reserved)
        self.values: dict[tuple[Hashable, ...], str] = {}
        self.stale: set[tuple[Hashable, ...]] = set()
        self.missing: dict[tuple[Hashable, ...], str] = {}

    def name_of(self, x: Tensor) -> str:
        key = tensor_key(x)
        if key in self.stale:
            raise ExportError(
                f"a tensor of shape {tuple(x.shape)} is read after a view of it was written to in place, which ONNX "
                "cannot express; write `y = torch.cat(...)` or `y = x * mask` instead of changing a part in place. An "
                "`nn.GRU` in float16 does so inside: give it int16 to export it."
            )
        if key in self.missing:
            raise ExportError(
                f"the model reads a result of `{self.missing[key]}` that has no ONNX form, such as the indices of max "
                "pooling; leave what needs it out of the exported model."
            )
        return self.values[key] if key in self.values else self.graph.constant(plain(x), hint="constant")

    def bind(self, x: Tensor, name: str) -> None:
        key = tensor_key(x)
        self.values[key] = name
        self.stale.discard(key)

    def is_data(self, x: Tensor) -> bool:
        """Does the tensor depend on the model's inputs?"""
        key = tensor_key(x)
        return key in self.values or key in self.stale or key in self.missing

    def forget_views(self, x: Tensor) -> None:
        """After a write to `x` in place, other views of its memory no longer have the values that were recorded."""
        memory = tensor_key(x)[0]
        others = [key for key in self.values if key[0] == memory]
        self.stale.update(others)
        for key in others:
            del self.values[key]

    def add(self, step: Step) -> None:
        """Write an operator that the model has run; what cannot be written is said with its place in the model."""
        try:
            if step.name.startswith("horizon::"):
                self._add_fixed_point(step)
            else:
                self._add_aten(step)
        except ExportError as error:
            raise ExportError(f"{step.place}: {error}") from error
        except (ArithmeticError, AssertionError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise ExportError(
                f"{step.place}: `{step.name}` has no ONNX form for these arguments ({type(error).__name__}: {error}). "
                "Write it with simpler operators, or leave it out of the exported model."
            ) from error

    def _add_fixed_point(self, step: Step) -> None:
        known = FIXED_POINT.get(step.name)
        if known is None:
            raise ExportError(f"`{step.name}` has no ONNX form.")
        args = []
        for argument, value in zip(step.operator._schema.arguments, step.args, strict=False):
            args.append(self._argument(value, argument.name in known.data))
        result = known.lower(self.graph, self._site(step), *args)
        outputs = tensors_of(step.outputs)
        names = [result] if isinstance(result, str) else result
        for tensor, name in zip(outputs, names, strict=True):
            self.bind(tensor, self.graph.reshape(name, []) if tensor.dim() == 0 else name)

    def _argument(self, value: Any, is_data: bool) -> Any:
        """The name of a value of the graph; constants and plain arguments as they are."""
        if isinstance(value, (list, tuple)) and is_data:
            return [self._argument(v, is_data) for v in value]
        if isinstance(value, Tensor) and (is_data or self.is_data(plain(value))):
            return self.name_of(value)
        return value

    @staticmethod
    def _site(step: Step) -> Site:
        inputs = tuple(plain(t) for t in tensors_of((step.args, step.kwargs)))
        outputs = tensors_of(step.outputs)
        source = inputs[0]
        return Site(step.name, list(source.shape), list(outputs[0].shape), outputs, source.dtype, inputs)

    def _add_aten(self, step: Step) -> None:
        lower = ATEN.get(step.name)
        outputs = tensors_of(step.outputs)
        sources = [plain(t) for t in tensors_of((step.args, step.kwargs))]
        if step.name == "aten::_local_scalar_dense" and any(self.is_data(source) for source in sources):
            raise ExportError(
                "the model reads a number out of a computed tensor (`x[:, i]`, `x.select`, `x.narrow`, `x.roll` with a "
                "tensor of no axes, or `.item()`), which the file would keep as a constant. Keep an axis and select "
                "with it, as in `x.index_select(1, i.reshape(1)).squeeze(1)`."
            )
        if not outputs:
            return
        if step.name in OF_SHAPES or not any(self.is_data(source) for source in sources):
            return  # made from constants or shapes alone: its result is a constant too
        unknown = [self.missing[key] for key in map(tensor_key, sources) if key in self.missing]
        if unknown:  # nothing is lost unless the model gives it, or computes integers with it
            self.missing.update({tensor_key(out): unknown[0] for out in outputs})
            return
        if lower is None:
            raise ExportError(
                f"`{step.name}` has no ONNX form. It is a float operator: leave pre- and post-processing out of the "
                "exported model, or write it with simpler operators; where it is part of an operator in float16 (an "
                "`nn.LSTM`, say), give that operator int16 to export it."
            )
        args, kwargs = pytree.tree_map(
            lambda v: self.name_of(v) if isinstance(v, Tensor) else v, (step.args, step.kwargs)
        )
        kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "device", "pin_memory")}
        result = lower(self.graph, self._site(step), *args, **kwargs)
        if step.operator._schema.is_mutable:
            self.forget_views(outputs[0])
        names = [result] if isinstance(result, str) else result
        for tensor, name in zip(outputs, names, strict=True):
            if name is None:
                self.missing[tensor_key(tensor)] = step.name
            else:
                self.bind(tensor, name)


def _storage_output(graph: OnnxGraph, x: Any, name: str, value: str) -> tuple[str, Tensor]:
    """An output in the type that the model gives: integers in their storage type, or float."""
    from onnx import helper

    tensor = x.int_repr() if isinstance(x, QTensor) else x
    source = graph.cast(value, tensor.dtype) if isinstance(x, QTensor) else value
    graph.nodes.append(helper.make_node("Identity", [source], [name], name=f"output_{name}"))
    return name, tensor


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


def _recorded(model: nn.Module, args: tuple) -> tuple[list[Step], Any]:
    try:
        return record(model, args)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, HorizonError):
            raise
        given = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)[:40]
            for x in args
        )
        raise ExportError(
            f"`{type(model).__name__}` does not run on the example inputs ({given}): {type(error).__name__}: {error}. "
            "Give the arguments of its forward, as a tuple if there are several."
        ) from error


def _check_unique(names: list[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ExportError(f"{what}: {', '.join(repr(name) for name in twice)} is given twice; names must differ.")


def _names(wanted: list[str] | None, count: int, kind: str) -> list[str]:
    names = [f"{kind}_{i}" for i in range(count)] if count > 1 else [kind]
    if wanted is None:
        return names
    if len(wanted) != count:
        raise ExportError(f"{kind}_names has {len(wanted)} names, but the model has {count} {kind}s.")
    return list(wanted)


def build_onnx(
    model: nn.Module,
    args: Any,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    opset_version: int | None = None,
) -> Any:
    """The ONNX model of a converted model, run on example inputs."""
    try:
        import onnx  # noqa: F401 - an extra; asked for before any work is done
    except ImportError as error:
        raise ExportError("export needs the `onnx` package: pip install 'horizon-plugin-pytorch[onnx]'.") from error
    kept = [path for path, m in model.named_modules() if isinstance(m, QATModule)]
    if kept and any(isinstance(m, QuantizedModule) for m in model.modules()):
        raise ExportError(
            f"`{kept[0]}` is still a QAT module, kept by `preserve_qat_mode = True` on it or around it. Set that to "
            "False on the prepared model, and convert again."
        )
    if kept:
        raise ExportError(
            f"`{type(model).__name__}` is not converted: it still has QAT modules. Call `convert_fx` (or `convert`) "
            "first."
        )
    if not any(isinstance(m, QuantizedModule) for m in model.modules()):
        raise ExportError(
            f"`{type(model).__name__}` is a float model. Prepare and calibrate it, then call `convert_fx` (or "
            "`convert`); a float model is exported with `torch.onnx.export`."
        )
    opset = OPSET if opset_version is None else opset_version
    if not 13 <= opset <= 20:
        raise ExportError(f"opset_version must lie in [13, 20], got {opset}.")
    args = positional_arguments(model, args)
    _check_inputs(args, input_names)
    args = map_tensors(lambda x: x.detach().clone(), args)
    was_training = model.training
    model.eval()
    try:
        steps, outputs = _recorded(model, args)
    finally:
        model.train(was_training)
    inputs, results = tensors_of(args), tensors_of(outputs)
    if not results:
        raise ExportError(f"`{type(model).__name__}` gives no tensor on these inputs, so there is nothing to export.")
    input_names = _names(input_names, len(inputs), "input")
    output_names = _names(output_names, len(results), "output")
    _check_unique(input_names, "input_names")
    _check_unique(input_names + output_names, "input_names and output_names")
    exporter = _Exporter(opset, input_names + output_names)
    for name, tensor in zip(input_names, inputs, strict=True):
        exporter.bind(tensor, name)
    for step in steps:
        exporter.add(step)
    input_pairs = list(zip(input_names, inputs, strict=True))
    output_pairs = [
        _storage_output(exporter.graph, x, name, exporter.name_of(x))
        for name, x in zip(output_names, results, strict=True)
    ]
    return exporter.graph.model(input_pairs, output_pairs, type(model).__name__)
