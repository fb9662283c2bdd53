"""The operators that a model runs, recorded by running it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.asking import is_user_code, running_functions, user_line
from horizon_plugin_pytorch.errors import ExportError, at, source_line
from horizon_plugin_pytorch.nested import fresh, map_tensors, tensors_of
from horizon_plugin_pytorch.qtensor import QTensor


@dataclass(frozen=True)
class Step:
    """One operator: its overload, arguments and results, and where in the model it was called."""

    operator: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any
    place: str = ""  # of the model, for messages

    @property
    def name(self) -> str:
        """``aten::view`` or ``horizon::conv2d``."""
        return self.operator._schema.name


# Fused float kernels: torch writes them with simpler operators, and that is what is kept.
_FUSED = tuple(
    getattr(torch.ops.aten, name)
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "logit", "std", "addcmul", "addcdiv",
                 "lerp", "logsumexp", "mse_loss", "rad2deg", "deg2rad", "linalg_cross", "dot", "mv")
)  # fmt: skip


# What they give depends on the shape of a tensor, and not on its values.
OF_SHAPES = frozenset(
    f"aten::{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
                                 "new_full", "new_empty")
)  # fmt: skip


class Rehearsal(TorchDispatchMode):
    """Knows, while it is active, which memory has values that depend on the model's inputs."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self._inputs = {_memory(x) for x in tensors_of(inputs)}
        self._data: dict[Hashable, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name not in OF_SHAPES and any(map(self._is_data, tensors_of((args, kwargs)))):
            for x in tensors_of(out):
                if _memory(x) not in self._inputs:
                    self._data[_memory(x)] = StorageWeakRef(plain(x).untyped_storage())
        return out

    def _is_data(self, x: Tensor) -> bool:
        memory = _memory(x)
        return memory in self._inputs or (memory in self._data and not self._data[memory].expired())

    def kept(self) -> frozenset[Hashable]:
        """The memory that is still there: somebody keeps it for the next run."""
        return frozenset(memory for memory, storage in self._data.items() if not storage.expired())


class Recorder(TorchDispatchMode):
    """Keeps every operator call, and every tensor, while it is active.

    Args:
        inputs: the model's inputs. What does not depend on them is a constant, and is computed as ever: a fused kernel
            and its simpler operators differ in the last bit.
        kept: memory with data of an earlier run.
        model: whose modules and lines the operators are said to come from.
    """

    def __init__(self, inputs: Any, kept: frozenset[Hashable] = frozenset(), model: nn.Module | None = None) -> None:
        super().__init__()
        self._paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
        self.steps: list[Step] = []
        self.reads: str | None = None  # the line that reads data of an earlier run
        self._kept = kept
        self._data = {_memory(x) for x in tensors_of(inputs)}
        self._readers: dict[Hashable, list[int]] = {}  # memory of constants: the steps that read it
        self._decompositions = get_decompositions(_FUSED)
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        sources = {_memory(x) for x in tensors_of((args, kwargs))}
        is_data = func._schema.name not in OF_SHAPES and not sources.isdisjoint(self._data)
        if self.reads is None and not self._kept.isdisjoint(sources):
            self.reads = user_line()
        simpler = self._decompositions.get(func) if is_data else None
        if simpler is None and self._is_inside and func._can_decompose():
            simpler = func.decompose  # torch's own forms also call operators that are made of others
        if simpler is not None:
            was_inside, self._is_inside = self._is_inside, True
            try:
                with self:
                    return simpler(*args, **(kwargs or {}))
            finally:
                self._is_inside = was_inside
        kept = args, kwargs or {}
        if func._schema.is_mutable:
            written = _written(func, *kept)
            self._keep_values(written)
            kept = _copied(kept, written - self._data)
        out = func(*args, **(kwargs or {}))
        for memory in sources - self._data:
            self._readers.setdefault(memory, []).append(len(self.steps))
        self.steps.append(Step(func, *kept, out, _place(self._paths)))
        if is_data:
            self._data.update(_memory(x) for x in tensors_of(out))
        return out

    def _keep_values(self, memories: Collection[Hashable]) -> None:
        """Memory is about to be written: steps that have read it as a constant keep what they have read."""
        for memory in memories:
            for i in self._readers.pop(memory, ()):
                step = self.steps[i]
                args, kwargs = _copied((step.args, step.kwargs), {memory})
                self.steps[i] = replace(step, args=args, kwargs=kwargs)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> set[Hashable]:
    """The memory that an operator writes to."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    targets = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return {_memory(x) for x in tensors_of(targets)}


def _copied(values: Any, memories: Collection[Hashable]) -> Any:
    """Arguments, those that show one of these memories as copies."""
    if not memories:
        return values
    return map_tensors(lambda x: plain(x).clone() if _memory(x) in memories else x, values)


def _place(paths: dict[int, str]) -> str:
    """The innermost module of the model that is running, and the user's line."""
    path, line = None, ""
    for running in running_functions():
        known = paths.get(id(running.owner))
        if path is None and known is not None:
            path, line = known, line or getattr(running.owner, "line", "")
        if not line and running.file.startswith("<eval_with_key>"):
            scope, line = _place_of_node(running.owner, running.number)
            path = path or scope
        elif not line and is_user_code(running.file):
            line = running.line
        if (path is not None and line) or (known == "" and running.name == "forward"):
            break  # what is above called the model
    return at(path or "", line)


def _place_of_node(graph_module: Any, lineno: int) -> tuple[str, str]:
    """The user's module and line of what runs at a line of the code that fx has written."""
    code = getattr(graph_module, "code", "").split("\n")
    name = code[lineno - 1].split("=")[0].split(":")[0].strip() if 0 < lineno <= len(code) else ""
    for node in graph_module.graph.nodes if hasattr(graph_module, "graph") else ():
        if node.name == name:
            scopes = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
            return str(scopes[-1][0]), source_line(node.stack_trace)
    return "", ""


def plain(x: Any) -> Any:
    """An ordinary tensor for a QTensor."""
    return x.plain() if isinstance(x, QTensor) else x


def _memory(x: Tensor) -> Hashable:
    return plain(x).untyped_storage()._cdata


def tensor_key(x: Tensor) -> tuple[Hashable, ...]:
    """What a tensor shows of memory: two Python objects for the same data have the same key."""
    x = plain(x)
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def record(model: torch.nn.Module, args: tuple) -> tuple[list[Step], Any]:
    """Run the model and give its steps and outputs.

    It runs twice: plans are made before recording, and a model must not read what an earlier run has computed.

    Raises:
        ExportError: it does.
    """
    rehearsal = Rehearsal(args)
    with torch.no_grad(), rehearsal:
        model(*fresh(args))
    recorder = Recorder(args, rehearsal.kept(), model)
    with torch.no_grad(), recorder:
        outputs = model(*fresh(args))
    if recorder.reads is not None:
        raise ExportError(
            f"`{type(model).__name__}` keeps a tensor that it computes and reads it in the next forward"
            f"{f' (line {recorder.reads})' if recorder.reads else ''}; the file would have it as a constant. Make the "
            "state an input and an output of the model."
        )
    return recorder.steps, outputs
