"""A TorchScript module run operator by operator in Python, so that it can be recorded as a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, HorizonError, at, source_line
from horizon_plugin_pytorch.program.place import Places

_NAME = re.compile(r"^(\w+)::(\w+)(?:\.(\w+))?\(")
_CONSTRUCTORS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "prim::ListConstruct": list,
    "prim::TupleConstruct": tuple,
    "prim::DictConstruct": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "prim::NumToTensor": lambda parts: torch.tensor(parts[0]),
    "aten::Int": lambda parts: int(parts[0]),
    "aten::Float": lambda parts: float(parts[0]),
    "aten::Bool": lambda parts: bool(parts[0]),
    "aten::ScalarImplicit": lambda parts: parts[0].item(),
    "aten::IntImplicit": lambda parts: int(parts[0]),
    "aten::FloatImplicit": lambda parts: float(parts[0]),
    "aten::__getitem__": lambda parts: parts[0][parts[1]],
    "aten::len": lambda parts: len(parts[0]),
    "prim::device": lambda parts: parts[0].device,
    "prim::dtype": lambda parts: parts[0].dtype,
    "prim::TupleIndex": lambda parts: parts[0][parts[1]],
}
_UNPACKING = ("prim::ListUnpack", "prim::TupleUnpack")


class ScriptSteps(nn.Module):
    """Runs the graph of a TorchScript module, one operator after the other.

    Args:
        script: what `torch.jit.trace` or `torch.jit.load` gives.
        has_steps: run softmax, one operator here, in the steps that it consists of, if they give the same integers. The
            positions of its largest values, which nobody reads, are given besides the results then.
        watch: is called after each operator with its kind, the class of the module that it is in, path, line, inputs
            and outputs.

    >>> script = torch.jit.trace(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.zeros(2))
    >>> x = torch.randn(2)
    >>> torch.equal(ScriptSteps(script)(x), script(x))
    True
    """

    def __init__(
        self, script: torch.jit.ScriptModule, has_steps: bool = False, watch: Callable[..., None] | None = None
    ) -> None:
        super().__init__()
        self._has_steps, self._watch = has_steps, watch
        self._owner = [script]  # a list: its tensors are no parameters of this module
        self.places = _ScriptPlaces()
        self._besides: list[Tensor] = []

    def forward(self, *args: Any) -> Any:
        self._besides.clear()
        self._require_runnable(args)
        out = self._method(_Object(self._owner[0], ""), "forward", args)
        besides, self._besides = self._besides, []
        return (out, besides) if besides else out

    def _require_runnable(self, args: tuple[Any, ...]) -> None:
        script = self._owner[0]
        count = len(list(script._c._get_method("forward").graph.inputs())) - 1
        if count != len(args):
            raise ExportError(f"the script takes {count} arguments, got {len(args)}.")
        if any(x.is_meta for x in (*script.parameters(), *script.buffers())):
            raise ExportError(
                "the tensors of the script are on `meta` and have no numbers: give the one that it was made of."
            )

    def _method(self, owner: _Object, name: str, args: Sequence[Any]) -> Any:
        graph = owner.module._c._get_method(name).graph
        values: dict[str, Any] = {}
        for value, given in zip(graph.inputs(), (owner, *args), strict=True):
            values[value.debugName()] = given
        for node in graph.nodes():
            inputs = [values[x.debugName()] for x in node.inputs()]
            results = self._results(node, inputs, owner)
            for output, result in zip(node.outputs(), results, strict=True):
                values[output.debugName()] = result
        found = [values[x.debugName()] for x in graph.outputs()]
        return found[0] if len(found) == 1 else tuple(found)

    def _results(self, node: Any, inputs: list[Any], owner: _Object) -> Sequence[Any]:
        kind, path = node.kind(), owner.path
        if kind == "prim::Constant":
            return [node.output().toIValue()]
        if kind == "prim::GetAttr":
            return [_attribute(inputs[0], node.s("name"))]
        if kind == "prim::CallMethod":
            return [self._method(inputs[0], node.s("name"), inputs[1:])]
        if kind in _CONSTRUCTORS:
            return [_CONSTRUCTORS[kind](inputs)]
        if kind in _UNPACKING:
            return list(inputs[0])
        if list(node.blocks()) or node.schema() == "(no schema)":
            raise ExportError(
                f"the script has `{kind}`{f' at `{path}`' if path else ''}, which is no operator on tensors. Make the "
                "script with `torch.jit.trace`, which writes down operators only."
            )
        line = source_line(node.sourceRange())
        try:
            with self.places.at(path, line):
                has_steps = kind == "horizon::softmax"
                out = self._softmax(inputs, path, line) if has_steps else _called(node.schema(), inputs)
        except RuntimeError as error:
            if isinstance(error, HorizonError):
                raise
            given = _shown(inputs[0]) if inputs else "nothing"
            raise ExportError(
                f"the script does not run on these inputs: `{kind}` {at(path, line)} got {given} "
                f"({next(iter(str(error).splitlines()), '')}). Give inputs like those that it was traced with."
            ) from error
        results = [out] if node.outputsSize() == 1 else list(out)
        if self._watch is not None:
            self._watch(kind, owner.class_name, path, line, inputs, results)
        return results

    def _softmax(self, inputs: list[Any], path: str, line: str) -> Tensor:
        """Softmax in the steps that the guides show: largest, difference, exp, sum, reciprocal, product."""
        q, dim, hidden, table, gain, _, low, high = inputs
        whole = torch.ops.horizon.softmax(*inputs)
        if hidden is not None or not self._has_steps:
            return whole
        largest, position = torch.max(q, dim, keepdim=True)
        steps = torch.sub(largest, q)
        with self.places.at(f"{path}.exp", line):
            entries = torch.ops.horizon.lookup(steps, table, 0)
        total = torch.sum(entries, dim, keepdim=True, dtype=torch.float64)
        with self.places.at(f"{path}.reciprocal", line):
            factor = torch.div(torch.tensor(gain, dtype=torch.float64), total)
        with self.places.at(f"{path}.mul", line):
            scaled = torch.round(torch.mul(entries, factor.float()))
        out = torch.clamp(scaled, low, high)
        if not torch.equal(out, whole):
            return whole
        self._besides.append(position)
        return out


class _ScriptPlaces(Places):
    """The module of the script whose operators run."""

    def __init__(self) -> None:
        self._here = ("", "")

    def has(self, module: nn.Module) -> bool:
        return False

    def here(self) -> tuple[str, str]:
        return self._here

    @contextmanager
    def at(self, path: str, line: str) -> Any:
        """What runs in here is of this module and line."""
        before, self._here = self._here, (path, line)
        try:
            yield
        finally:
            self._here = before


def _shown(value: Any) -> str:
    """A value in a few words."""
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.20}"


class _Object:
    """A module of the script and its path."""

    def __init__(self, module: Any, path: str) -> None:
        self.module, self.path = module, path

    @property
    def class_name(self) -> str:
        """``torch.nn.modules.container.Sequential``."""
        return self.module._c._type().str().removeprefix("__torch__.")


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner.module, name)
    if isinstance(value, torch.jit.ScriptModule):
        return _Object(value, f"{owner.path}.{name}" if owner.path else name)
    return value.detach() if isinstance(value, Tensor) else value


def _called(schema: str, inputs: list[Any]) -> Any:
    match = _NAME.match(schema)
    assert match is not None, schema
    space, name, overload = match[1], match[2], match[3] or "default"
    operator = getattr(getattr(getattr(torch.ops, space), name), overload)
    named = [argument.kwarg_only for argument in operator._schema.arguments]
    args = [value for value, is_named in zip(inputs, named, strict=False) if not is_named]
    options = {
        argument.name: value for argument, value in zip(operator._schema.arguments, inputs, strict=False)
        if argument.kwarg_only
    }  # fmt: skip
    return operator(*args, **options)
