"""Watching a converted model run, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from horizon_plugin_pytorch.asking.stack import user_line
from horizon_plugin_pytorch.errors import ExportError, at
from horizon_plugin_pytorch.function_handlers import name_of
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program.builder import Builder
from horizon_plugin_pytorch.program.copied_steps import CopiedSteps
from horizon_plugin_pytorch.program.memory import memory_of, operands, plain, written_arguments
from horizon_plugin_pytorch.program.open_sizes import open_sizes
from horizon_plugin_pytorch.program.place import Places
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.hooks import EveryCall
from horizon_plugin_pytorch.runtime.located import listening
from horizon_plugin_pytorch.runtime.steps import walking
from horizon_plugin_pytorch.torch_functions import is_metadata

# What they give depends on the shape of a tensor, and not on its values.
_OF_SHAPES = frozenset(
    f"aten::{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
                                 "new_full", "new_empty", "new_empty_strided")
)  # fmt: skip
_UNFILLED = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_ROUNDING = "horizon::fake_quantize"  # also of weights: their scales are to be seen
# What reads numbers without an operator, or inside a constructor, which shows none.
_NUMBERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__dlpack__})
_INTEGERS = frozenset({Tensor.__int__, Tensor.__index__, Tensor.__bool__})  # which float tensors are asked for, too
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new})
_STACK = "Put tensors together with `torch.stack` or `torch.cat`."
_SELECT = "Keep an axis and select with it, as in `x.index_select(1, i.reshape(1)).squeeze(1)`."


class ProgramRecorder(TorchDispatchMode):
    """Adds every operator that depends on the inputs to a program, while it is active.

    Args:
        builder: of the program; it has the inputs.
        places: where operators come from.
        kept: memory with data of an earlier run.
        takes_real: may the model compute with real values, as prepared models do?
    """

    def __init__(
        self, builder: Builder, places: Places, kept: frozenset[Hashable] = frozenset(), takes_real: bool = False
    ) -> None:
        super().__init__()
        self._takes_real = takes_real
        self.refusals: list[ExportError] = []
        self.drawn: dict[str, None] = {}  # where random numbers are drawn, which become constants
        self.reads: str | None = None  # the line that reads data of an earlier run
        self._builder, self._places, self._kept = builder, places, kept
        self._made: dict[Hashable, StorageWeakRef] = {}  # memory with data of this run
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # memory that is used again would be mistaken for what it was

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper for that would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        sources = operands(args, kwargs)
        if self.reads is None and not self._kept.isdisjoint(map(memory_of, sources)):
            self.reads = user_line()
        is_data = any(map(self._builder.is_data, sources)) and func._schema.name not in _OF_SHAPES
        is_data = is_data or func._schema.name == _ROUNDING
        self._builder.place = self._places.here() if is_data else ("", "")
        out = self._computed(func, args, kwargs) if is_data else self._constant(func, args, kwargs)
        for x in operands((out,), {}) if is_data else ():
            self._made[memory_of(x)] = StorageWeakRef(plain(x).untyped_storage())
        self._alive.append((args, kwargs, out))
        return out

    def _keep(self, x: Tensor) -> None:
        """Note a tensor with data that no operator was seen to give."""
        self._made[memory_of(x)] = StorageWeakRef(plain(x).untyped_storage())
        self._alive.append(x)

    def release(self) -> dict[Hashable, StorageWeakRef]:
        """Let go of all tensors; the memory with data of this run, some of which others may keep."""
        self._alive.clear()
        self._builder.release()
        return self._made

    def _constant(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn[at(*self._places.here())] = None
        for x in written_arguments(func, args, kwargs) if func._schema.is_mutable else ():
            self._builder.keep_constants(x)
        out = func(*args, **kwargs)
        if func._schema.name in _UNFILLED:  # whatever lies there would be a constant
            for x in operands((out,), {}):
                x.zero_()
        return out

    def _computed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            self.refuse("(`x[:, i]`, `x.select`, `x.narrow`, `x.roll` with a tensor of no axes, or `.item()`)")
        if func._schema.is_mutable:
            try:
                return self._builder.write(func, args, kwargs)
            except ExportError as error:
                self.refusals.append(ExportError(f"{at(*self._builder.place)}: {error}"))
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        sizes = open_sizes()
        if sizes is not None:
            out = sizes.see(func, args, out, self._builder.is_data)
        self._builder.add(func, args, kwargs, out)
        return out

    def refuse(self, how: str, remedy: str = _SELECT) -> None:
        """Remember that the model reads a number: what depends on it would be the same for all inputs."""
        self.refusals.append(ExportError(
            f"{at(*self._builder.place)}: the model reads a number out of a computed tensor {how}, which the program "
            f"and the file would keep as a constant. {remedy}"
        ))  # fmt: skip

    def one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """`F.one_hot`, which looks at the numbers; where their count is given, by comparing."""
        if not self._builder.is_data(tensor):
            return F.one_hot(tensor, num_classes)
        if num_classes < 0:
            self._builder.place = self._places.here()
            self.refuse("(`F.one_hot` looks for the largest class)", "Give it the count: `F.one_hot(x, num_classes)`.")
            return F.one_hot(tensor, num_classes)
        with _disable_current_modes():
            F.one_hot(plain(tensor), num_classes)  # its own checks
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()

    @contextmanager
    def formats(self) -> Iterator[None]:
        """What must be active besides: operators see integers, and only modules and functions see their scales."""
        hook = EveryCall(self._see_call)
        try:
            with _Functions(self), listening(self._see_method), walking(CopiedSteps(self._builder, self._keep)):
                yield
        finally:
            hook.remove()

    def _see_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        if self._places.has(module):
            self.see([*args, *kwargs.values(), out])

    def _see_method(self, module: nn.Module, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """A method of a FloatFunctional, whose result another may take, so that no module or function sees it."""
        self._see_call(module, args, kwargs, out)

    def see(self, values: Sequence[Any]) -> None:
        """Note the scales of tensors, and of those in structures."""
        for x in values if all(isinstance(v, Tensor) for v in values) else tensors_of(values):
            if type(x) is QTensor and id(x) not in self._seen:  # its subclasses have no numbers to read
                self._seen.add(id(x))
                self._alive.append(x)
                if x.is_integer:
                    self._builder.see(x, self._places.here)
                elif not self._takes_real:
                    self.refusals.append(ExportError(
                        "the model computes with real values, as prepared models do, and not with integers: it has no "
                        "integer program. Call `convert_fx` (or `convert`) first."
                    ))  # fmt: skip

    def see_numbers(self, x: Tensor, how: str, remedy: str = _SELECT) -> None:
        """Note that numbers of a tensor are read."""
        if self._builder.is_data(x):
            self._builder.place = self._places.here()
            self.refuse(how, remedy)
        elif how in ("(`.numpy()`)", "(`.__array__()`)"):  # whoever has the array may write to it unseen
            self._builder.keep_constants(x)


class _Functions(TorchFunctionMode):
    """Sees the functions that the model calls."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_read = func in _NUMBERS or (func in _INTEGERS and not args[0].is_floating_point())
        if is_read and isinstance(args[0], Tensor):
            self._recorder.see_numbers(args[0], f"(`.{func.__name__}()`)")
        elif func in _MAKERS:
            lists = [value for value in (*args, *(kwargs or {}).values()) if not isinstance(value, Tensor)]
            for x in tensors_of(lists):
                self._recorder.see_numbers(x, f"(`{name_of(func)}` of a list of tensors)", _STACK)
        if func is F.one_hot:
            return self._recorder.one_hot(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if any(issubclass(t, QTensor) for t in types) and not is_metadata(func):
            self._recorder.see([*args, out])
        return out
