"""Watching the operators of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import Enum
from threading import get_ident
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from horizon_plugin_pytorch.asking import as_tool
from horizon_plugin_pytorch.asking.functions import names_in
from horizon_plugin_pytorch.asking.stack import running_functions
from horizon_plugin_pytorch.capture.leaves import is_functional, runs_as_one
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS, row_name_of
from horizon_plugin_pytorch.operators.calls import row_of_reported
from horizon_plugin_pytorch.operators.table import Operator, row_named, row_of_module
from horizon_plugin_pytorch.runtime.hooks import EveryCall
from horizon_plugin_pytorch.runtime.located import FUSED_INTO, PlacedModule, listening, watching
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.places import Places
from horizon_plugin_pytorch.writing import writes

Consumer = Callable[[OperatorCall], Any]


def both(one: Consumer, other: Consumer) -> Consumer:
    """Two consumers of one run."""

    def tell(call: OperatorCall) -> None:
        one(call)
        other(call)

    return tell


class _Part(Enum):
    """What a module is to a watch."""

    SCOPE = "has code of the user's, which calls operators"
    OPERATOR = "is one operator; what runs inside it is not told"
    FUSED_AWAY = "is left of a module that is a part of another operator now"
    END_OF_METHOD = "is called by each method of a float FloatFunctional, on its result"


class _Known(NamedTuple):
    """What a watch asks a module once.

    Args:
        row: of an operator.
        is_before: it is a stub that runs before the function itself.
    """

    part: _Part
    row: Operator | None = None
    is_before: bool = False


_FUSED_AWAY, _END_OF_METHOD = _Known(_Part.FUSED_AWAY), _Known(_Part.END_OF_METHOD)


class _KnownOfClass(NamedTuple):
    """What modules of one class have in common.

    Args:
        known: of those of which nothing special is known.
        by_operator: of those that are in the place of an operator, by its name.
        can_be_before: they have `is_before_cpu`. What neither class nor module has is searched for a long time.
    """

    known: _Known
    by_operator: dict[str, _Known]
    is_placed: bool
    can_be_before: bool


class Watch:
    """Tells a consumer of each operator call of a model, in the order of the run, while it is active.

    An operator is a module that is one node of a graph (torch's and this package's, and those that the user marked), a
    method of a FloatFunctional, or a function that gives tensors and that the model's own code calls. Where a prepared
    model has a module for a function, the call is that module's. What runs inside an operator is not told, nor what
    is left of a fused module.

    The model computes, observes and trains as it does without being watched. Nothing is kept: a tensor lives as long as
    the model, or the consumer, holds it. Calls in other threads are not told.

    Args:
        model: float, prepared in any way and in any state, or converted.
        after: is told of each call when it has given its result. An error that it raises ends the run.

    Attributes:
        failed_in: path of the innermost module that the last error came from; None if there was none.

    >>> net, shapes = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), {}
    >>> def note(call):
    ...     shapes[call.path] = call.operator, tuple(call.output.shape)
    >>> with Watch(net, note):
    ...     _ = net(__import__("torch").ones(1, 1, 8, 8))
    >>> shapes
    {'0': ('conv2d', (1, 2, 6, 6)), '1': ('relu', (1, 2, 6, 6))}
    """

    def __init__(self, model: nn.Module, after: Consumer) -> None:
        self._model, self._after = model, after
        self._mode = _Functions(self)
        self._paths, by_class = _modules_of(model)
        self._known: dict[nn.Module, _Known] = {}
        self._known_of_classes: dict[type, _KnownOfClass] = {}
        self._functionals = {
            module.activation_post_process: module
            for cls, modules in by_class.items()
            if is_functional(cls)
            for module in modules
            if isinstance(getattr(module, "activation_post_process", None), nn.Module)
        }
        graphs = [module for cls, modules in by_class.items() if issubclass(cls, fx.GraphModule) for module in modules]
        self._places = Places(graphs, *_methods_of(self._functionals.values()), [Watch.function])
        self._undo = ExitStack()
        self._thread = 0
        self._entered: list[nn.Module] = []  # whose forward is running; operators too, not what is inside them
        self._inside: nn.Module | None = None  # the operator that runs
        self._is_mode_off = False
        self._index = 0
        self._counts: dict[Any, int] = {}
        self._noticed = 0  # calls of modules
        self.failed_in: str | None = None

    def __enter__(self) -> Watch:
        self._thread = get_ident()
        before = register_module_forward_pre_hook(self._enter)
        after = EveryCall(self._leave, always_call=True)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        self._undo.enter_context(listening(self._method))
        self._undo.enter_context(watching(self._note_fused))
        _push_on_torch_function_stack(self._mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        self._end()
        _take_off(self._mode)

    # -- modules

    def _enter(self, module: nn.Module, args: Any) -> None:
        if get_ident() != self._thread:
            return
        self.failed_in = None
        entered = self._entered
        if entered and module is entered[0]:
            self._end_interrupted()
        if self._inside is not None:
            return
        if not entered:
            if module not in self._paths:  # another model's
                return
            self._index = 0
            self._counts.clear()
            self._places.begin()
        part = (self._known.get(module) or self._ask(module)).part
        if part is _Part.FUSED_AWAY:  # nothing of it is told, and it does little: the mode may stay
            self._inside = module
            return
        entered.append(module)
        if part is not _Part.SCOPE:
            self._inside = module
            self._is_mode_off = _take_off_top(self._mode)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any = None, out: Any = None) -> None:
        """After a module ran. After an error in it torch gives neither a result nor keyword arguments."""
        if get_ident() != self._thread:
            return
        if kwargs is not None:
            self.failed_in = None
        elif self.failed_in is None:
            self.failed_in = self._paths.get(module)
        entered, inside = self._entered, self._inside
        if inside is not None and inside is not module:
            return
        if inside is module and (known := self._known[module]).part is _Part.FUSED_AWAY:
            self._inside = None
            self._noticed += kwargs is not None and not known.is_before
            return
        if module not in entered:
            return
        while entered.pop() is not module:  # what an error left behind
            pass
        if not entered:
            self._places.end()
        self._inside = _CONSUMER  # what the consumer computes is not the model's
        try:
            if kwargs is not None:
                self._tell_module(module, args, kwargs, out)
        finally:
            self._leave_operator()

    def _leave_operator(self) -> None:
        self._inside = None
        if self._is_mode_off:
            self._is_mode_off = False
            _push_on_torch_function_stack(self._mode)

    def _end(self) -> None:
        """A run is over."""
        self._entered.clear()
        self._leave_operator()
        self._places.end()

    def _end_interrupted(self) -> bool:
        """End a run that a KeyboardInterrupt has ended, which torch tells no hook of; False if the model still runs."""
        is_over = self._places.is_over()
        if is_over:
            self._end()
        return is_over

    def _ask(self, module: nn.Module) -> _Known:
        cls = type(module)  # `isinstance` would look who asks
        of_class = self._known_of_classes.get(cls)
        if of_class is None:
            is_operator = cls is not nn.Module and runs_as_one(module)
            of_class = self._known_of_classes[cls] = _KnownOfClass(
                _Known(_Part.OPERATOR if is_operator else _Part.SCOPE, row_of_module(cls)),
                {},
                issubclass(cls, PlacedModule),
                hasattr(cls, "is_before_cpu"),
            )
        known = of_class.known
        if FUSED_INTO in module.__dict__:
            known = _FUSED_AWAY
        elif module in self._functionals:
            known = _END_OF_METHOD
        elif of_class.is_placed and (operator := cast(str, module.operator)):
            named = of_class.by_operator.get(operator)
            if named is None:
                named = of_class.by_operator[operator] = known._replace(row=row_named(operator))
            known = named
        if of_class.can_be_before and module.is_before_cpu:
            known = known._replace(is_before=True)
        self._known[module] = known
        return known

    def _tell_module(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        part, row, is_before = self._known.get(module) or self._ask(module)
        if part is _Part.SCOPE:
            return
        self._noticed += not is_before
        if part is _Part.OPERATOR:
            line = self._places.of_module() or getattr(module, "line", "")
            path = self._paths.get(module)
            path = self._path_of(module) if path is None else path
            self._tell(OperatorCall(0, path, 0, row, line, args, kwargs, out, module))
        elif part is _Part.END_OF_METHOD:
            functional = self._functionals[module]
            method, args = _method_of(functional)
            self._tell_method(functional, method, args, {}, out)

    def _path_of(self, module: nn.Module) -> str:
        """A module's path in the model; of one that the model does not list, the path of the module that calls it."""
        path = self._paths.get(module)
        if path is None and self._is_new(module):  # it was made for this call
            path = self._paths[module] = module.path  # type: ignore[assignment]
        return self._scope if path is None else path

    def _is_new(self, module: nn.Module) -> bool:
        if not isinstance(module, PlacedModule) or not module.path:
            return False
        try:
            return self._model.get_submodule(module.path) is module
        except AttributeError:
            return False

    @property
    def _scope(self) -> str:
        """Path of the module whose code is running."""
        for module in reversed(self._entered):
            if module in self._paths:
                return self._paths[module]
        return ""

    # -- methods of a FloatFunctional

    def _method(self, module: PlacedModule, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        if self._inside is not None or not self._entered:
            return
        if module not in self._paths and not self._is_new(module):  # the twin of one
            return
        if name == "_run":  # all methods of a QAT FloatFunctional go through it, with the name and the float route
            name, args = args[0], args[2:]
        self._noticed += 1
        is_mode_off = _take_off_top(self._mode)
        self._inside = _CONSUMER
        try:
            self._tell_method(module, name, args, kwargs, out)
        finally:
            self._inside = None
            if is_mode_off:
                _push_on_torch_function_stack(self._mode)

    def _note_fused(self, module: nn.Module, is_failed: bool) -> None:
        """What is left of a fused module ran, and has told so itself."""
        if self._inside is not None or not self._entered:
            return
        if not is_failed:
            self.failed_in = None
            self._noticed += 1
        elif self.failed_in is None:
            self.failed_in = self._paths.get(module)

    def _tell_method(self, module: nn.Module, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        row = row_named(row_name_of(name, args))
        line = self._places.of_module() or getattr(module, "line", "")
        self._tell(OperatorCall(0, self._path_of(module), 0, row, line, args, kwargs, out, module, name))

    # -- functions

    def function(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function that torch reports, and tell of it if the model called it as it is."""
        if self._inside is not None or not self._entered or self._end_interrupted():
            return func(*args, **kwargs)
        noticed = self._noticed
        out = func(*args, **kwargs)
        # A function that became a module has been told of as that module's call.
        if noticed == self._noticed:
            given = args[0] if out is None and writes(func, args, kwargs) else out
            if isinstance(given, Tensor) or (not isinstance(given, _NOT_TENSORS) and tensors_of(given)):
                self._inside = _CONSUMER
                try:
                    self._tell_function(func, args, kwargs, given)
                finally:
                    self._inside = None
        return out

    def _tell_function(self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        place = self._places.of_function()
        if place is None:
            return
        if place.method is not None:
            self._tell_method(place.method.owner, place.method.name, args, kwargs, out)
            return
        row = row_of_reported(func, args, kwargs)
        path = self._scope if place.scope is None else place.scope
        self._tell(OperatorCall(0, path, 0, row, place.line, args, kwargs, out, function=func))

    def _tell(self, call: OperatorCall) -> None:
        """Tell the consumer; `_inside` says that it computes, and torch's stack does not have the mode."""
        key = call.path if call.function is None else (call.path, call.operator)
        count = self._counts.get(key, 0)
        call.index, call.repetition = self._index, count
        self._index += 1
        self._counts[key] = count + 1
        with _AS_TOOL:
            self._after(call)


_AS_TOOL = as_tool()
_CONSUMER = nn.Module()  # in the place of the operator that runs, while a consumer is told
_NOT_TENSORS = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


class _Functions(TorchFunctionMode):
    """Hands the functions of a watched run to the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._watch.function(func, args, kwargs or {})


def _modules_of(model: nn.Module) -> tuple[dict[nn.Module, str], dict[type, list[nn.Module]]]:
    """The modules of a model by their first paths, and by class: each is touched once, as none is in the cache.

    `named_modules` alone takes twice as long.
    """
    paths: dict[nn.Module, str] = {}
    by_class: dict[type, list[nn.Module]] = {}

    def add(module: nn.Module, path: str) -> None:
        paths[module] = path
        by_class.setdefault(type(module), []).append(module)
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            if child is not None and child not in paths:
                add(child, prefix + name)

    add(model, "")
    return paths, by_class


def _method_of(functional: nn.Module) -> tuple[str, tuple]:
    """The method of a float FloatFunctional that is running, and its arguments."""
    method = next((f for f in running_functions() if f.owner is functional), None)
    return ("", ()) if method is None else (method.name, method.arguments)


def _methods_of(functionals: Iterable[nn.Module]) -> tuple[list[Callable], list[Callable]]:
    """The methods of float FloatFunctionals: those that hand their result to a child, and torch's that do not."""
    classes = {type(functional) for functional in functionals}
    methods = [getattr(cls, name) for cls in classes for name in FUNCTIONAL_METHODS if hasattr(cls, name)]
    ends = {method: "activation_post_process" in names_in(method) for method in methods}
    return [m for m, has_end in ends.items() if has_end], [m for m, has_end in ends.items() if not has_end]


def _take_off_top(mode: TorchFunctionMode) -> bool:
    """Take a mode from the top of torch's stack; False if another one is there."""
    if not _len_torch_function_stack():
        return False
    top = _pop_torch_function_stack()
    if top is mode:
        return True
    _push_on_torch_function_stack(top)
    return False


def _take_off(mode: TorchFunctionMode) -> None:
    """Take a mode from torch's stack, wherever it is."""
    above = []
    while _len_torch_function_stack():
        top = _pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_on_torch_function_stack(other)
