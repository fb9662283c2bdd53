"""Modules that know where they are in the user's model, and say so when they fail."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.asking.functions import is_package_function
from horizon_plugin_pytorch.asking.who import package_asks
from horizon_plugin_pytorch.errors import (
    OperatorInputError,
    QuantizationConfigError,
    QuantizationWarning,
    UnsupportedOperatorError,
    at,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.in_place import LentValuesError, write
from horizon_plugin_pytorch.nested import map_tensors
from horizon_plugin_pytorch.operators.arguments import by_position
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import asked_by_forward, current_forward, interceptor, is_any_running
from horizon_plugin_pytorch.runtime.compiled import is_proxied, refuse_compiled, refuse_proxied
from horizon_plugin_pytorch.runtime.fixed_settings import FixedSettings, is_same
from horizon_plugin_pytorch.runtime.hooks import NAMED_NOW, is_any_everywhere, keep_names
from horizon_plugin_pytorch.runtime.real_tensor import RealTensor, as_output, marked, unmarked
from horizon_plugin_pytorch.runtime.stub_input import MAPPED, is_mapped
from horizon_plugin_pytorch.runtime.surroundings import as_float32, float32, has_default_device, is_autocast
from horizon_plugin_pytorch.untraced import is_recorded, is_traced

# Of quantized tensors that a model keeps from one forward to the next.
STATE_REASON = (
    "a checkpoint or an exported file cannot keep such a state, and the first forward after loading would begin "
    "without it."
)
STATE_REMEDY = (
    "Make the state an input and an output of the model, with a QuantStub and a DeQuantStub; or keep "
    "`self.dequant(y)`, and read it through a QuantStub."
)
PRESERVED = "preserve_qat_mode"  # an attribute that users set: the module stays a QAT module when others are converted
# Attributes of a module that are not its settings: each module has its own.
NOT_SETTINGS = frozenset(vars(nn.Module())) | {"qconfig", "path", "line", "operator", PRESERVED}
QUICK = "_quick"  # an attribute: what the module does if it is called as it was last, see `QuickCall`
_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl


@dataclass(frozen=True)
class OwnCalls:
    """The calls of a shared module that has scales of its own for each.

    Args:
        path: the module.
        sites: the module for the call at each call site.
        is_functional: is it called through its methods?
    """

    path: str
    sites: dict[Any, str]
    is_functional: bool = False


class Successor(nn.Module):
    """A module that takes the place of one of the user's, and is of that one's class to the user's forward.

    A forward may ask ``isinstance(layer, nn.Conv2d)`` or ``layer.__class__``, and must get the answer it got in float.
    Everybody else, and ``type(layer)``, gets the real class.
    """

    written_as: type | None = None  # the class of the module that it takes the place of
    own_calls: OwnCalls | None = None  # where each call of the module goes, if each has its own scales
    member: Any = None  # its part in a fused operator of a model that runs its own forward

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        is_asked = asked_by_forward()
        return self.__dict__.get("written_as", type(self)) if is_asked else type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        vars(object)["__class__"].__set__(self, cls)

    def by_position(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call that names them as the module does whose place this one has."""
        args, kwargs = by_position((self.written_as or type(self)).forward, args, kwargs)  # type: ignore[attr-defined]
        return by_position(type(self).forward, args, kwargs)

    def of_call(self) -> Any:
        """The module whose scales the call has that is beginning now: this one, or a copy of it."""
        model = None if self.own_calls is None else interceptor()
        return self if model is None else model.module_of_call(self.own_calls)


def is_undisturbed(module: nn.Module) -> bool:
    """Is a module called by plain code, and nobody watches, replaces or records what it does?"""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    cls: Any = type(module)
    if "forward" in own or cls.forward is not cls._known_forward or is_any_everywhere():
        return False
    if nn.Module.__call__ is not _CALL or nn.Module._call_impl is not _CALL_IMPL:  # somebody times or counts calls
        return False
    return not (is_any_running() or is_recorded() or is_autocast())


class PlacedModule(Successor):
    """A module with its path and, where it is known, the line of the user's model that calls it.

    >>> import torch
    >>> class Add(PlacedModule):
    ...     def forward(self, x, y):
    ...         return x + y
    >>> add = Add()
    >>> add.path = "head.add"
    >>> try:
    ...     add(torch.ones(2), torch.ones(3))
    ... except OperatorInputError as error:
    ...     print(str(error)[:64])
    `Add` at `head.add` cannot run on inputs of shapes (2,), (3,): T
    """

    path: str = ""
    line: str = ""
    operator: str = ""  # its row in the operator table
    stub_paths: dict[int, str] = {}  # arguments, by position, that go through a stub of the model first
    is_accumulator: bool = False  # does its accumulator leave as float, where the quantized part ends?
    writes_input: bool = False  # was it written with `inplace=True`? Then all names of its input see the result
    gives_accumulator: bool = False  # has it no scale for its result?
    _meetings: dict[bool, str] = {}  # the lines that first called it on real numbers (True), and on quantized ones
    float_form: Any = None  # in code that tracing does not enter: runs in its place on what has no scale
    _fixed: FixedSettings | None = None  # the settings that something was made of
    _known_forward: ClassVar[Any] = None  # that of the class as this package has it; users may write or put in another

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner: Any = next(base for base in cls.__mro__ if "forward" in vars(base))
        if owner is cls:
            cls._known_forward = cls.forward if is_package_function(cls.forward) else None
        else:  # whose forward somebody may have replaced
            cls._known_forward = vars(owner).get("_known_forward")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._fixed is not None and name in self._fixed.values:
            self._fixed.require(name, value, f"`{(self.written_as or type(self)).__name__}.{name}` {self.place}")
        super().__setattr__(name, value)

    def as_parameter(self, name: str) -> Any:
        """A tensor of the module, as the user's forward reads it: in real numbers."""
        return getattr(self, name, None)

    @property
    def place(self) -> str:
        """``at `path` (file:line)``, for messages."""
        return at(self.path, self.line)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            refuse_compiled(type(self).__name__, self.place)
        quick = self.__dict__.get(QUICK)
        if quick is not None and not kwargs and is_undisturbed(self):
            try:
                out = quick(self, args)
            except (RuntimeError, IndexError) as error:
                raise self.explained(error, (args, kwargs)) from error
            if out is not None:
                return out
        if is_proxied():
            refuse_proxied(type(self).__name__, self.place)
        if has_default_device():
            with torch.device("cpu"):
                return self(*args, **kwargs)
        if is_autocast():
            with float32():
                return self(*as_float32(args), **as_float32(kwargs))
        if kwargs:
            named = kwargs
            args, kwargs = self.by_position(args, kwargs)
            if self._forward_pre_hooks_with_kwargs or self._forward_hooks_with_kwargs:
                self.__dict__[NAMED_NOW] = keep_names(self, self.place, named, kwargs)
        elif NAMED_NOW in self.__dict__:
            del self.__dict__[NAMED_NOW]
        if self.own_calls is not None and not self.own_calls.is_functional:
            module = self.of_call()
            if module is not self:
                return module(*args, **kwargs)
        if current_forward():
            self.refuse_states((*args, *kwargs.values()))
        model = interceptor()
        is_run = model is not None  # by the forward of the user's model
        step, given = None, args
        if is_run:
            if self.is_on_real(args, kwargs):
                return self.current_float_form()(*args, **kwargs)
            args, kwargs = model.with_scales(self, "", args, kwargs)
            if self.member is not None:
                step, args = self.member.take(args)
            args, kwargs = unmarked((args, kwargs))
            if self.stub_paths:
                args, kwargs = self.through_stubs(args, kwargs)
        try:
            out = super().__call__(*args, **kwargs)
            if self.gives_real or self.gives_accumulator:
                out = self.real_result(out, is_run)
            out = out if step is None else self.member.give(step, out)
        except (RuntimeError, IndexError) as error:
            raise self.explained(error, (args, kwargs)) from error
        return self._written(given[0] if given else kwargs.get("input"), out) if self.writes_input else out

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What torch compiles is the call of a module, which has scales here: refused."""
        refuse_compiled(type(self).__name__, self.place)

    def refuse_states(self, values: Iterable[Any]) -> None:
        """Insist that what it is called on belongs to the forward that runs."""
        for value in values:
            if isinstance(value, (list, tuple)):
                self.refuse_states(value)
            elif isinstance(value, QTensor) and value._is_of_earlier_forward:
                raise UnsupportedOperatorError(
                    f"`{type(self).__name__}` {at(self.path)}{calling_line()} reads a quantized tensor that an earlier "
                    f"forward made and kept: {STATE_REASON} {STATE_REMEDY}"
                )

    def _written(self, target: Any, out: Any) -> Any:
        """The result, written to what the module was called on."""
        if isinstance(target, Tensor) and isinstance(out, Tensor) and target is not out:
            write(target, out, f"`{(self.written_as or type(self)).__name__}`{calling_line()}")
            return target
        return out

    @property
    def gives_real(self) -> bool:
        """Are its results float16, or of high precision?"""
        cast = self._modules.get("activation_post_process") or self._modules.get("cast")
        return self.is_accumulator or isinstance(cast, FakeCast)

    def real_result(self, out: Any, is_run: bool) -> Any:
        """Real numbers as they leave this module: into the user's forward, or into a graph or the caller's code."""
        if is_run:
            return marked(out) if self.gives_real else out
        return as_output(out) if self.gives_accumulator else out

    def is_on_real(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Is it called before the QuantStub or after the DeQuantStub, in code that tracing does not enter?"""
        if self.float_form is None:
            return False
        is_real = not any(isinstance(x, (QTensor, RealTensor)) for x in pytree.tree_leaves((args, kwargs)))
        if is_real not in self._meetings:
            self._meet(is_real)
        return is_real

    def met(self, is_real: bool) -> bool:
        """Was it called on real numbers, or on quantized ones, by code that tracing does not enter?"""
        return is_real in self._meetings

    def _meet(self, is_real: bool) -> None:
        """It is called on real numbers for the first time, or on quantized ones.

        Raises:
            UnsupportedOperatorError: both, and it has weights, which a converted module has as integers alone.
        """
        self.__dict__["_meetings"] = met = {**self._meetings, is_real: calling_line()}
        if len(met) == 2 and any(True for _ in self.float_form.parameters()):
            raise UnsupportedOperatorError(
                f"`{(self.written_as or type(self)).__name__}` {at(self.path)} is called on quantized tensors"
                f"{met[False]} and on real ones{met[True]} by code that tracing does not enter: its weights become "
                "integers, which real numbers cannot be computed with. Put a QuantStub before the real ones, or use "
                "two modules."
            )

    def current_float_form(self) -> Any:
        """The float module in whose place this one is, with the tensors and settings that this one has now."""
        form = self.float_form
        own, theirs = vars(self), vars(form)
        theirs.update({name: own[name] for name in theirs if name in own and name not in NOT_SETTINGS})
        for mine, theirs in ((self._parameters, form._parameters), (self._buffers, form._buffers)):
            theirs.update({name: mine[name] for name in theirs if mine.get(name) is not None})
        return form.train(self.training)

    def through_stubs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Float tensors that the model computes or keeps, on the grid of the stubs made for them."""
        model = interceptor()
        if model is None:
            return args, kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: v is None)
        for position, path in self.stub_paths.items():
            if not isinstance(leaves[position], (int, float)):  # the first of ``sum(tensors)``, which begins with 0
                leaves[position] = model.resolve(path)(leaves[position])
        return pytree.tree_unflatten(leaves, spec)

    def require_scales(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse, as soon as data are seen, operands of the user's that integers could not be computed of."""

    def explained(self, error: Exception, inputs: Any) -> Exception:
        """The error with this module's place and the shapes of its inputs; errors that say enough are left alone."""
        if isinstance(error, LentValuesError) and self.line and interceptor() is None:  # a traced graph calls it
            return error.read_by(f"`{type(self).__name__}` {self.place}")
        if isinstance(error, OperatorInputError) and error.complaint:
            return OperatorInputError(f"`{type(self).__name__}` {self.place} {error.complaint}")
        if type(error) not in (RuntimeError, IndexError):  # our own errors, out of memory, unsupported operators
            return error
        shapes = ", ".join(str(tuple(x.shape)) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor))
        if any(map(is_mapped, (*pytree.tree_leaves(inputs), *self._parameters.values(), *self._buffers.values()))):
            return OperatorInputError(f"`{type(self).__name__}` {self.place} is in `torch.vmap`. {MAPPED}.")
        return OperatorInputError(
            f"`{type(self).__name__}` {self.place} cannot run on inputs of shapes {shapes}: "
            f"{str(error).rstrip('.')}. Check what reaches this place of the model."
        )


SETTINGS = "_former_settings"  # and here what it was set to
FUSED_INTO = "_fused_into"  # what is left of a fused module has here a list of the modules that it became a part of


TENSORS = "_tensors_of_float"  # and here what its parameters and buffers were, None for those that were None


@dataclass(frozen=True)
class FormerTensor:
    """A parameter or buffer of a module that is fused into another.

    Args:
        dtype, shape, requires_grad: what it was.
        is_layers: has the fused module it as well, under the same name? Not if a batch norm is folded.
    """

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    is_layers: bool

    def of(self, name: str, fused: Any) -> Tensor:
        """The tensor, or one of its type and shape on its device; no numbers are left of a batch norm, so they are NaN.

        Whoever computes with them was met when the model was prepared, and then the module is not fused.
        """
        if self.is_layers:
            return as_written(fused, name)
        device = next((x.device for x in (*fused.parameters(), *fused.buffers())), None)
        number = torch.full((), torch.nan if self.dtype.is_floating_point else 0, dtype=self.dtype, device=device)
        return number.expand(self.shape).requires_grad_(self.requires_grad)


def as_written(module: Any, name: str) -> Any:
    """A parameter or buffer of a module as the user's forward reads it: a converted layer has real numbers for that."""
    is_converted = name in module._buffers and hasattr(module, "as_parameter")
    return module.as_parameter(name) if is_converted else getattr(module, name)


@dataclass(frozen=True)
class FormerSettings:
    """The settings of a module that is fused into another.

    Args:
        cls: its class.
        path: its place in the model.
        values: its plain attributes when it was fused.
    """

    cls: type
    path: str
    values: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, path: str) -> FormerSettings:
        """Those of a module that is about to be fused."""
        return cls(type(module), path, {k: v for k, v in vars(module).items() if k[0] != "_" and k not in NOT_SETTINGS})

    def hand_over(self, fused: nn.Module, name: str, value: Any) -> None:
        """Set it where it acts now.

        Raises:
            QuantizationConfigError: it is a part of the weights, or of the fused class.
        """
        is_trained = hasattr(fused, "twin_facts")
        if is_trained and issubclass(self.cls, getattr(fused, "float_class", ())):
            setattr(fused, name, value)
        elif is_trained and issubclass(self.cls, _BatchNorm) and fused._modules.get("bn") is not None:
            setattr(fused.bn, name, value)
        elif name != "inplace" and not is_same(self.values[name], value):
            raise QuantizationConfigError(
                f"`{self.cls.__name__}.{name}` {at(self.path)} cannot become {value!r}: the module is fused into "
                f"`{type(fused).__name__}` {at(getattr(fused, 'path', ''))}. Set it before the model is prepared."
            )


class Identity(nn.Identity):
    """What is left in a traced graph of a module that is fused into another: nobody calls it."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return nn.Identity

    def __reduce__(self) -> tuple:  # what pickle would do by itself asks for `__class__`
        return Identity, (), self.__dict__

    def __setattr__(self, name: str, value: Any) -> None:
        hand_over(self, name, value)
        super().__setattr__(name, value)


def left_of_layer(left: nn.Module) -> bool:
    """Is it what is left of a layer that is fused with what follows it?"""
    former = left.__dict__.get(SETTINGS)
    fused = left.__dict__.get(FUSED_INTO, ())
    return former is not None and any(issubclass(former.cls, getattr(m, "float_class", ())) for m in fused)


def hand_over(left: nn.Module, name: str, value: Any) -> None:
    """Hand a setting of a module of which nothing is left to those that it became a part of."""
    former = left.__dict__.get(SETTINGS)
    if name == PRESERVED and left_of_layer(left):
        for fused in left.__dict__[FUSED_INTO]:
            setattr(fused, PRESERVED, value)
    elif name == PRESERVED and former is not None:
        warn(
            f"`preserve_qat_mode` of `{former.cls.__name__}` {at(former.path)} has no effect: it is fused into a "
            "layer, whose own counts. Set it there.",
            QuantizationWarning,
        )
    if former is not None and name in former.values:
        for fused in left.__dict__[FUSED_INTO]:
            former.hand_over(fused, name, value)


class FusedAway(Successor):
    """What is left of a module that is fused into another: it gives back its argument.

    It is an `nn.Identity` to ``isinstance``, as the guides show it, and of its float class to the model's own forward.

    >>> isinstance(FusedAway(), nn.Identity)
    True
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        is_asked = asked_by_forward()
        return self.__dict__.get("written_as", nn.Identity) if is_asked else nn.Identity

    @__class__.setter
    def __class__(self, cls: type) -> None:
        vars(object)["__class__"].__set__(self, cls)

    def __getattr__(self, name: str) -> Any:
        """The parameters and buffers of the module that was here: its forward may ask ``self.bn.weight.dtype``."""
        known = self.__dict__.get(TENSORS, {})
        if name not in known:
            return super().__getattr__(name)
        return None if known[name] is None else known[name].of(name, self.__dict__[FUSED_INTO][0])

    def __setattr__(self, name: str, value: Any) -> None:
        hand_over(self, name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple:  # what pickle would do by itself asks for `__class__`
        return FusedAway, (), self.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.by_position(args, kwargs)
        module = self.of_call()
        if module is not self:
            return module(*args, **kwargs)
        if not _LISTENERS.watches or self._has_hooks or is_traced():
            return super().__call__(*args, **kwargs)
        # Who watches sees nothing of it but that it ran. There are many of these, and torch's way to hooks is long.
        try:
            out = self.forward(*args, **kwargs)
        except Exception:
            _tell_watches(self, is_failed=True)
            raise
        _tell_watches(self, is_failed=False)
        return out

    @property
    def _has_hooks(self) -> bool:
        """Do hooks want to be called, beside those of who watches?"""
        count = len(_LISTENERS.watches)
        return bool(
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or len(torch_module._global_forward_hooks) != count
            or len(torch_module._global_forward_pre_hooks) != count
            or torch_module._global_backward_hooks
            or torch_module._global_backward_pre_hooks
        )

    def forward(self, x: Any) -> Any:
        is_run = self.member is not None and interceptor() is not None
        return self.member.pass_on(x, getattr(self, "inplace", False)) if is_run else x

    def _get_name(self) -> str:
        return "Identity"


def located(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a `PlacedModule` that is not `forward` explain its errors."""

    @functools.wraps(method)
    def call(self: PlacedModule, *args: Any, **kwargs: Any) -> Any:
        if has_default_device():
            with torch.device("cpu"):
                return call(self, *args, **kwargs)
        if is_autocast():
            with float32():
                return call(self, *as_float32(args), **as_float32(kwargs))
        try:
            out = method(self, *args, **kwargs)
        except (RuntimeError, IndexError) as error:
            raise self.explained(error, (args, kwargs)) from error
        tell(self, method.__name__, args, kwargs, out)
        return out

    return call


def take_stubs(cls: type, methods: Iterable[str]) -> None:
    """Let methods that stand for operators send their arguments through the stubs that the model has for them.

    Where each call has scales of its own, it goes to the module that has them.
    """
    for name in methods:
        setattr(cls, name, _stubbed(getattr(cls, name)))


def _stubbed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: PlacedModule, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(method, args, kwargs)
        if is_traced():
            args, kwargs = _numbers_of_sizes((args, kwargs))
        module = self.of_call()
        if module is not self:
            return getattr(module, method.__name__)(*args, **kwargs)
        if current_forward():
            self.refuse_states((*args, *kwargs.values()))
        is_run = interceptor() is not None
        if is_run and self.is_on_real(args, kwargs):
            return getattr(self.current_float_form(), method.__name__)(*args, **kwargs)
        if is_run and not self.gives_real:
            args, kwargs = interceptor().with_scales(self, method.__name__, args, kwargs)
        if is_run:
            args, kwargs = unmarked((args, kwargs))
        if self.stub_paths:
            args, kwargs = self.through_stubs(args, kwargs)
        if not method.__name__.endswith("_scalar") and not package_asks():
            self.require_scales(args, kwargs)
        out = method(self, *args, **kwargs)
        return self.real_result(out, is_run) if self.gives_real or self.gives_accumulator else out

    return call


def _numbers_of_sizes(tree: Any) -> Any:
    """Numbers for what is computed from sizes, ``x.shape[-1] ** -0.5``.

    In a trace of `torch.jit.trace` they are tensors, for which an operator has no scale; torch warns of what it fixes.
    """

    def number(x: Tensor) -> Any:
        is_plain = x.dim() == 0 and not isinstance(x, QTensor) and not x.requires_grad
        return x.item() if is_plain else x

    return map_tensors(number, tree)


Listener = Callable[[PlacedModule, str, tuple, dict[str, Any], Any], None]


class _Listeners(threading.local):
    def __init__(self) -> None:
        self.all: list[Listener] = []
        self.watches: list[Callable[[nn.Module, bool], None]] = []


_LISTENERS = _Listeners()


def tell(module: PlacedModule, method: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Tell the listeners of this thread of a call."""
    for listener in _LISTENERS.all:
        listener(module, method, args, kwargs, out)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every call of a `located` method in this thread: module, method, arguments and result."""
    _LISTENERS.all.append(listener)
    try:
        yield
    finally:
        _LISTENERS.all.remove(listener)


def _tell_watches(module: FusedAway, is_failed: bool) -> None:
    for watch in _LISTENERS.watches:
        watch(module, is_failed)


@contextmanager
def watching(watch: Callable[[nn.Module, bool], None]) -> Iterator[None]:
    """Tell `watch` of what is left of fused modules in this thread, when it has run: the module, and whether it failed.

    Whoever watches has one of torch's hooks before and one after the forward of every module; these do not call them.
    """
    _LISTENERS.watches.append(watch)
    try:
        yield
    finally:
        _LISTENERS.watches.remove(watch)
