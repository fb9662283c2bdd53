"""A program as plain data: numbers, strings, tensors and containers of them, and nothing that needs a class."""

from __future__ import annotations

import io
import operator
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.dtype import as_dtype
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.program.note import Note, Quantization, Value, note_of, set_note
from horizon_plugin_pytorch.program.program import Program
from horizon_plugin_pytorch.program.structure import Slot, without_classes

VERSION = 1
_KIND = "horizon_plugin_pytorch program"
_TORCH = {torch.dtype: "dtype", torch.device: "device", torch.memory_format: "memory_format", torch.layout: "layout"}


def save(program: Program, f: Any) -> None:
    """Write a program to a path or a binary file object."""
    data = io.BytesIO()
    torch.save(state_of(program), data)
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data.getvalue(), os.fspath(f))
    else:
        f.write(data.getvalue())


def load(f: Any) -> Program:
    """Read what `save` wrote."""
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as file:
            content = file.read()
    else:
        content = f.read()
    name = f"`{os.fspath(f)}`" if isinstance(f, (str, os.PathLike)) else "the file"
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # of whatever the bytes mean to torch
        first = next(iter(str(error).splitlines()), "")
        raise ExportError(f"{name} is no program: it is not a file that `Program.save` wrote ({first}).") from error
    try:
        return program_of(state)
    except ExportError as error:
        raise ExportError(f"{name}: {error}") from error
    except Exception as error:  # parts that are missing, or are something else
        raise ExportError(f"{name} is a damaged program ({type(error).__name__}: {error}).") from error


def state_of(program: Program) -> dict[str, Any]:
    """The program as plain data."""
    return {
        "kind": _KIND,
        "version": VERSION,
        "name": program.name,
        "nodes": [_node_state(node) for node in program.graph.nodes],
        "constants": {name: _compact(x) for name, x in program.constants.items()},
        "input_paths": _plain(program.input_paths),
        "outputs": _plain(without_classes(program.outputs)),
        "results": [_value_state(value) for value in program.results],
        "classes": dict(program.classes),
    }


def program_of(state: Any) -> Program:
    """The program of plain data."""
    if not isinstance(state, dict) or state.get("kind") != _KIND:
        raise ExportError("the file holds no program: expected one that `Program.save` wrote.")
    if state["version"] > VERSION:
        raise ExportError(
            f"the program was written in format {state['version']}, and this version of the package reads {VERSION}. "
            "Update the package, or record the model again."
        )
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for entry in state["nodes"]:
        args, kwargs = _whole(entry["args"], nodes), _whole(entry["kwargs"], nodes)
        target = _target(entry["target"]) if entry["op"] == "call_function" else entry["target"]
        node = graph.create_node(entry["op"], target, args, kwargs, entry["name"])
        value = None if entry["value"] is None else _value_of(entry["value"])
        note = Note(entry["path"], entry["line"], value, tuple(map(_value_of, entry["parts"])))
        nodes[entry["name"]] = set_note(node, note)
    return Program(
        state["name"], graph, state["constants"], _whole(state["input_paths"]), _whole(state["outputs"]),
        tuple(map(_value_of, state["results"])), state["classes"],
    )  # fmt: skip


def _node_state(node: fx.Node) -> dict[str, Any]:
    note = note_of(node)
    return {
        "op": node.op,
        "name": node.name,
        "target": _target_name(node.target),
        "args": _plain(tuple(node.args)),
        "kwargs": _plain(dict(node.kwargs)),
        "path": note.path,
        "line": note.line,
        "value": None if note.value is None else _value_state(note.value),
        "parts": [_value_state(part) for part in note.parts],
    }


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return str(target) if isinstance(target, str) else f"{target._schema.name}.{target._overloadname}"


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    space, rest = name.split("::")
    label, overload = rest.rsplit(".", 1)
    target = getattr(getattr(getattr(torch.ops, space), label, None), overload, None)
    if not isinstance(target, torch._ops.OpOverload):  # whatever else can be reached from there
        raise ExportError(f"the program calls `{name}`, which this version of torch or of the package does not have.")
    return target


def _value_state(value: Value) -> dict[str, Any]:
    known = value.quantization
    found = {"shape": list(value.shape), "dtype": _plain(value.dtype)}
    if known is not None:
        found["quantization"] = {
            "scale": _compact(known.scale), "dtype": str(known.dtype), "axis": known.axis, "range": known.range,
        }  # fmt: skip
    return found


def _value_of(state: dict[str, Any]) -> Value:
    known = state.get("quantization")
    quantization = None
    if known is not None:
        bounds = None if known["range"] is None else (known["range"][0], known["range"][1])
        quantization = Quantization(known["scale"], as_dtype(known["dtype"]), known["axis"], bounds)
    return Value(tuple(state["shape"]), _whole(state["dtype"]), quantization)


def _compact(x: Tensor) -> Tensor:
    """A tensor without memory that it does not show."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


def _plain(value: Any) -> Any:
    """A value as numbers, strings and lists; what is none of them is a dictionary with its kind."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_plain(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(part)] for key, part in value.items()]}
    if isinstance(value, SimpleNamespace):
        return {"namespace": {name: _plain(part) for name, part in vars(value).items()}}
    for kind, name in _TORCH.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    return value


def _whole(state: Any, nodes: dict[str, fx.Node] | None = None) -> Any:
    """The value of plain data."""
    if not isinstance(state, dict):
        return state
    ((kind, value),) = state.items()
    if kind == "node":
        return (nodes or {})[value]
    if kind == "slot":
        return Slot(value)
    if kind in ("list", "tuple"):
        parts = [_whole(part, nodes) for part in value]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {_whole(key, nodes): _whole(part, nodes) for key, part in value}
    if kind == "namespace":
        return SimpleNamespace(**{name: _whole(part, nodes) for name, part in value.items()})
    found = torch.device(value) if kind == "device" else getattr(torch, value)
    if not isinstance(found, tuple(_TORCH)):
        raise ExportError(f"`{value}` is no {kind} of torch.")
    return found
