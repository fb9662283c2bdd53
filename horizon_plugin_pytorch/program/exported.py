"""Programs as `torch.export` has them: its own object, and its files."""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program.note import Value, value_of
from horizon_plugin_pytorch.program.program import Program
from horizon_plugin_pytorch.program.record import record_program
from horizon_plugin_pytorch.program.structure import filled

_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)")


def exported_program(program: Program) -> torch.export.ExportedProgram:
    """A program as `torch.export` has it: tensors in, a tuple of tensors out, integers in float32.

    ``torch.export.export(model, args)`` records the program itself, and keeps the structure of inputs and outputs.

    >>> from horizon_plugin_pytorch.program import record_program
    >>> exported = exported_program(record_program(torch.nn.ReLU(), torch.zeros(2)))
    >>> exported.module()(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in map(value_of, program.placeholders))
    return torch.export.export(program.graph_module, examples)


def exported_model(
    torchs: Callable[..., torch.export.ExportedProgram],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    preserve_module_call_signature: tuple[str, ...] = (),
    **options: Any,
) -> torch.export.ExportedProgram:
    """What ``torch.export.export(model, args, kwargs)`` gives for a converted model: the program that it computes.

    It takes and gives what the model does, in the same structures. Where the model gives integers with a scale, these
    are the integers in their storage type (``int_repr()``).

    Args:
        torchs: torch's own function.
        model: a converted model, or one that has such a model inside. It is recorded in eval mode.
        args: of its forward.
        kwargs: of its forward.
        dynamic_shapes: refused, unless it names no axis: a program has the shapes that it was recorded with.
        strict: makes no difference, as a program has no Python that torch could overlook.
        preserve_module_call_signature: refused: a program has operators and no modules.
        options: for torch's own function.
    """
    name = type(model).__name__
    if torch.onnx.is_in_onnx_export():  # which calls this, and has no form for the operators that it would get
        raise ExportError(
            f"torch.onnx.export: `{name}` computes with integers. Write it with `export_quantized_onnx`; or import "
            "`horizon_plugin_pytorch.utils._register_onnx_ops`, after which `torch.onnx.export` does."
        )
    if any(x is not None for x in pytree.tree_leaves(dynamic_shapes)) or preserve_module_call_signature:
        given = "preserve_module_call_signature" if preserve_module_call_signature else "dynamic_shapes"
        raise ExportError(
            f"torch.export.export: `{given}` is not for a converted model such as `{name}`, which is exported as the "
            "operators that it runs on inputs of the given shapes. Export it once for each shape; "
            "`export_quantized_onnx(..., dynamic_axes=...)` writes one file for several."
        )
    signature = inspect.signature(model.forward)
    program = record_program(model, _in_order(signature, args, kwargs or {}, name))
    if any(value_of(node).quantization is not None for node in program.placeholders):
        raise ExportError(
            f"torch.export.export: an input of `{name}` has a scale, which an exported program cannot take. Export a "
            "model whose inputs are ordinary tensors, as with a QuantStub at its beginning."
        )
    return torchs(_recorded(program, signature), args, kwargs, strict=False, **options)


def _in_order(signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """All arguments by position."""
    if not isinstance(args, (tuple, list)):
        raise ExportError(f"torch.export.export: `args` is a tuple of what `{name}` is called with, as in `(image,)`.")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(f"torch.export.export: `{name}` cannot be called with these arguments: {error}.") from error
    bound.apply_defaults()
    if bound.kwargs:
        raise ExportError(
            f"torch.export.export: `{name}` takes {', '.join(f'`{key}`' for key in bound.kwargs)} by keyword only, and "
            "a recorded program takes arguments in an order; let the forward take it by position, too."
        )
    return bound.args


def _recorded(program: Program, signature: inspect.Signature) -> nn.Module:
    """A program as a module with the signature of the model's forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = self.program(*tensors_of(_in_order(signature, args, kwargs, program.name)))
        return filled(program.outputs, [_stored(x, value) for x, value in zip(results, program.results, strict=True)])

    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[receiver, *signature.parameters.values()])  # type: ignore
    module = type(program.name, (nn.Module,), {"forward": forward})()
    module.program = program.graph_module
    return module.eval()


def _stored(x: Tensor, value: Value) -> Tensor:
    """A result in the type that it is stored in."""
    return x if value.quantization is None else x.to(value.quantization.dtype.storage)


def save_exported(exported: torch.export.ExportedProgram, f: Any) -> None:
    """Write what `exported_program` gives, to a path or a binary file object; a failure leaves nothing."""
    data = io.BytesIO()
    torch.export.save(exported, data)
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data.getvalue(), os.fspath(f))
    else:
        f.write(data.getvalue())


def load_exported(f: Any) -> torch.export.ExportedProgram:
    """Read a file of `torch.export.save`.

    `torch.export.load` executes what a file asks for (pickled objects, compiled libraries); this does not.

    Raises:
        ExportError: it is none; it calls an operator that is not registered, which is named; or it holds more than
            tensors and a graph.
    """
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as file:
            data = file.read()
    else:
        data = f.read()
    name = f"`{os.fspath(f)}`" if isinstance(f, (str, os.PathLike)) else "the file"
    records = _records(data, name)
    _require_plain_data(records, name)
    missing = _missing_operators(records, name)
    if missing:
        raise ExportError(
            f"{name} calls {', '.join(f'`{operator}`' for operator in missing)}, which is not registered: import the "
            "package that has it, or export the model again with this version."
        )
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:  # of whatever the bytes mean to torch
        raise ExportError(
            f"{name} is damaged, or of another version of torch: {type(error).__name__}: {error} (torch logs more)."
        ) from error


def _records(data: bytes, name: str) -> dict[str, bytes]:
    """What is in an archive, as torch itself reads it."""
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        return {record: reader.get_record(record) for record in reader.get_all_records()}
    except (RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise ExportError(f"{name} is no file of `torch.export.save` ({first}).") from error


def _require_plain_data(records: Mapping[str, bytes], name: str) -> None:
    """Insist that nothing in an archive is executed when torch loads it."""
    for record, content in records.items():
        if record.startswith("data/aotinductor/"):
            raise _executes(name, record, "compiled code")
        if record.endswith("_config.json") and record.startswith(("data/weights/", "data/constants/")):
            text = content.decode(errors="replace")
            if re.search(r'"use_pickle"\s*:\s*true|"(custom|opaque)_obj_', text):
                raise _executes(name, record, "pickled objects")
        elif record.startswith("data/") and record.endswith(".pt"):
            try:
                torch.load(io.BytesIO(content), weights_only=True)
            except Exception as error:
                raise _executes(name, record, "something else than tensors, numbers and strings") from error


def _executes(name: str, record: str, what: str) -> ExportError:
    return ExportError(
        f"{name} is damaged or may execute code: its part `{record}` has {what}. If you trust who wrote it, "
        "`torch.export.load` reads it."
    )


def _missing_operators(records: Mapping[str, bytes], name: str) -> list[str]:
    models = [content.decode(errors="replace") for record, content in records.items() if record.startswith("models/")]
    if not models:
        raise ExportError(f"{name} is no file of `torch.export.save`: there is no model in it.")
    found = dict.fromkeys(match.groups() for text in models for match in _OPERATOR.finditer(text))
    return [f"{space}::{operator}" for space, operator, overload in found if not _is_known(space, operator, overload)]


def _is_known(space: str, operator: str, overload: str) -> bool:
    return hasattr(getattr(getattr(torch.ops, space), operator, None), overload)
