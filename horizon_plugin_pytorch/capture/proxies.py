"""What stands for tensors, numbers and containers while a forward is traced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from horizon_plugin_pytorch.asking.questions import (
    asked_classes,
    user_asks_attribute,
    user_asks_class,
    user_compares_truth,
    user_looks_up,
    user_spells,
    user_tests_identity,
)
from horizon_plugin_pytorch.capture.given import Place, is_setting
from horizon_plugin_pytorch.capture.sizes import count_of_sizes, is_size
from horizon_plugin_pytorch.plain_values import array_ufunc, number_function
from horizon_plugin_pytorch.torch_functions import VIEW_ATTRIBUTES
from horizon_plugin_pytorch.writing import IN_PLACE_OPERATORS

_LEGACY = type(torch.FloatTensor)
# What is the same for all tensors that have been through a QuantStub, as in float.
_OF_QUANTIZED: dict[str, Any] = dict.fromkeys(("is_sparse", "is_quantized", "is_mkldnn", "is_nested"), False)
_OF_QUANTIZED["layout"] = torch.strided
UNKNOWN_TRUTH = "is not known while tracing, so `is True` and `is False` cannot compare it"


class TracedProxy(torch.fx.Proxy):
    """A proxy that may be kept until the model is traced once more, and says so when it is read."""

    tracer: Any
    __call__: Any = None  # to `isinstance(x, Callable)`: a tensor is none

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of what it stands for to the user's code, which may ask ``isinstance(x, Tensor)``."""
        if not user_asks_class():
            return type(self)
        if any(isinstance(cls, _LEGACY) for cls in asked_classes()):  # written in C, it would read the tensor's memory
            raise TypeError(
                "torch.FloatTensor and its like cannot be asked for a traced value; write "
                "`isinstance(x, torch.Tensor)` and `x.dtype == torch.float32`"
            )
        return self.told_class()

    def told_class(self) -> type:
        """The class of what it stands for; where tracing does not know, its own, and the line is noted."""
        return self.asked_class() or self.tracer.tell_class() or type(self)

    @property
    def is_callable(self) -> bool:
        """Can what it stands for be called?"""
        cls = self.told_class()
        has_call = any("__call__" in vars(base) for base in cls.__mro__)
        return has_call and not issubclass(cls, TracedProxy)

    def asked_class(self) -> type | None:
        """The class of what it stands for; None where tracing does not know."""
        class_of = getattr(self.tracer, "class_of", None)
        return None if class_of is None else class_of(self)

    def __len__(self) -> int:
        count = count_of_sizes(self.node)
        return super().__len__() if count is None else count

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        now: Any = torch.fx.node.map_aggregate((args or (), kwargs or {}), _current)
        return super().__torch_function__(orig_method, types, *now)


def _current(value: Any) -> Any:
    """What stands in the second trace for a proxy of the first."""
    successor = getattr(value.tracer, "successor", None) if isinstance(value, torch.fx.Proxy) else None
    return value if successor is None else successor.stand_in(value)


class Written(TracedProxy):
    """A proxy that records ``x += y`` as what it is: torch's own takes it for ``x = x + y``, and loses it for views."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and self._are_sizes(inputs):
            return self._on_sizes(ufunc, inputs)
        return array_ufunc(self, ufunc, method, *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``np.prod(x.shape)``."""
        if kwargs or not self._are_sizes(args):
            raise TypeError(f"numpy.{func.__name__}: __array_function__")
        return self._on_sizes(func, args)

    def _are_sizes(self, inputs: tuple) -> bool:
        return all(is_size(x.node) for x in inputs if isinstance(x, torch.fx.Proxy))

    def _on_sizes(self, function: Any, inputs: tuple) -> Any:
        own = number_function(function)
        if own is None:
            raise TypeError(f"numpy.{function.__name__}: __array_function__")
        return self.tracer.create_proxy("call_function", own, inputs, {})

    def __hash__(self) -> int:
        if user_looks_up():
            self._tell_fact()
        return object.__hash__(self)

    def __str__(self) -> str:
        if user_spells():
            self._tell_fact()
        return super().__str__()

    def _tell_fact(self) -> None:
        """Note that the forward looks for a size, or the like, among values that are known."""
        tells = getattr(self.tracer, "tell_fact", None)
        if tells is not None:
            tells(self)

    def __eq__(self, other: Any) -> Any:  # a tensor is not None
        return False if other is None else self.tracer.create_proxy("call_function", operator.eq, (self, other), {})

    def __ne__(self, other: Any) -> Any:
        return True if other is None else self.tracer.create_proxy("call_function", operator.ne, (self, other), {})

    def __getattr__(self, name: str) -> Any:
        if name in VIEW_ATTRIBUTES or name == "shape":  # what torch's own gives is no proxy of this class
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if name in ("dtype", "itemsize") and (dtype := self._dtype()) is not None:
            return dtype if name == "dtype" else dtype.itemsize
        if name in _OF_QUANTIZED and self._dtype() is not None:
            return _OF_QUANTIZED[name]
        if name == "dtype" and user_tests_identity():
            raise TypeError("`x.dtype` is not known while tracing, so `is` cannot compare it")
        if name == "grad":
            return None  # no backward has run through a tensor of this forward
        if name in ("grad_fn", "_base"):  # whose use is to ask whether they are None
            raise TypeError(f"`x.{name}` is not known while tracing")
        if user_compares_truth(is_later=True):
            raise TypeError(f"`x.{name}` {UNKNOWN_TRUTH}")
        is_asked = user_asks_attribute()
        if is_asked is not None and not name.startswith("__"):
            self._require(name, is_asked)
        return ReadAttribute(self, name)

    def _require(self, name: str, is_asked: bool) -> None:
        """Answer as what it stands for does where that has no such attribute.

        Args:
            name: of the attribute.
            is_asked: may it be absent, as in ``hasattr(x, name)``? Then it counts what an argument is.
        """
        requires = getattr(self.tracer, "require_attribute", None)
        if requires is not None:
            requires(self, name, is_asked)

    def _dtype(self) -> torch.dtype | None:
        dtype_of = getattr(self.tracer, "dtype_of", None)
        return None if dtype_of is None else dtype_of(self.node)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise TypeError("assignment to `x.data`")
        super().__setattr__(name, value)


class ReadAttribute(Written, torch.fx.proxy.Attribute):
    """An attribute or method of what is traced: ``batch.image``, ``x.device``, ``x.relu``."""

    __call__ = torch.fx.proxy.Attribute.__call__

    @property
    def is_callable(self) -> bool:
        return callable(getattr(torch.Tensor, self.attr, None))


class Unseen(Written):
    """What code that is not entered gives: anything, also a function."""

    __call__ = torch.fx.Proxy.__call__


def _in_place(target: Any) -> Any:
    def record(self: torch.fx.Proxy, other: Any) -> torch.fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return record


for _target in IN_PLACE_OPERATORS:
    setattr(Written, f"__{_target.__name__}__", _in_place(_target))


class Parts(TracedProxy):
    """What a call such as ``x.chunk(2, 1)`` gives: the number of parts is in the call, so they can be iterated."""

    def __init__(self, node: torch.fx.Node, tracer: torch.fx.Tracer, count: int) -> None:
        super().__init__(node, tracer)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self._count)])  # type: ignore[index] # Proxy's operators are made at import


class KnownNumber(Written):
    """A number among the arguments: it takes part as an input, and where Python must know it, the graph is for it."""

    def __init__(self, node: torch.fx.Node, tracer: Any, place: Place, value: Any) -> None:
        super().__init__(node, tracer)
        self._place, self._number = place, value

    def asked_value(self) -> Any:
        """The number; the graph is for this one only from here on."""
        self.tracer.rely(self._place, "value", self._number)
        return self._number

    def __bool__(self) -> bool:
        return bool(self.asked_value())

    def __index__(self) -> int:
        return operator.index(self.asked_value())

    def __int__(self) -> int:
        return int(self.asked_value())

    def __float__(self) -> float:
        return float(self.asked_value())

    def __hash__(self) -> int:
        return hash(self.asked_value())


def _compared(compare: Any) -> Any:
    def answer(self: KnownNumber, other: Any) -> Any:
        if isinstance(other, (torch.fx.Proxy, torch.Tensor)):
            if not isinstance(other, KnownNumber):
                return self.tracer.create_proxy("call_function", compare, (self, other), {})
            other = other.asked_value()
        return compare(self.asked_value(), other)

    return answer


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(KnownNumber, f"__{_name}__", _compared(getattr(operator, _name)))


def stand_in(node: torch.fx.Node, tracer: Any, place: Place, value: Any) -> Any:
    """What stands for an argument, or for something inside it, whose value is known."""
    if is_setting(value):
        tracer.rely(place, "value", value, is_asked=bool(place.keys))  # a whole argument is given before any line runs
        return value
    if type(value) in (int, float):
        return KnownNumber(node, tracer, place, value)
    if isinstance(value, dict) and not hasattr(type(value), "__missing__"):
        return KnownDict(node, tracer, place, value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return KnownList(node, tracer, place, value)
    proxy = tracer.proxy(node)
    if place.keys and isinstance(value, torch.Tensor):
        tracer.rely(place, "given", True)
    return proxy


class _Unread:
    """An item of an argument that the forward has not read yet."""

    def __init__(self, value: Any) -> None:
        self.value = value


class KnownItems(Written):
    """A container among the arguments: what it holds is known, and reads of it are answered.

    What code asks of it besides its items (its length, which keys it has) is noted, and the graph is for calls where
    this is so.
    """

    def __init__(self, node: torch.fx.Node, tracer: Any, place: Place, value: Any) -> None:
        super().__init__(node, tracer)
        self._place, self._given, self._is_written = place, value, False
        self._content: Any = self._unread(value)

    def _unread(self, value: Any) -> Any:
        raise NotImplementedError

    def _asked_all(self) -> None:
        """Code depends on how many items there are, or on which."""
        raise NotImplementedError

    def _read(self, key: Any) -> Any:
        """An item of the content, which is there; `key` is the one that the argument has."""
        item = self._content[key]
        if isinstance(item, _Unread):
            made = self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})
            item = self._content[key] = stand_in(made.node, self.tracer, self._place.item(key), item.value)
        return item

    def plain(self) -> Any:
        """The content in an ordinary container."""
        raise NotImplementedError

    @property
    def given_class(self) -> type:
        """The class of the container."""
        return type(self._given)

    @property
    def is_written(self) -> bool:
        """Has the forward written into it?"""
        return self._is_written

    def _write(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method that writes on the content, now, and on the caller's container when the graph runs."""
        for key in range(len(self._content)) if isinstance(self._content, list) else list(self._content):
            self._read(key)  # items that are read later are those of before
        result = getattr(self._content, method)(*args, **kwargs)
        self._is_written = True
        self.tracer.create_proxy("call_function", write_into, (self.node_proxy, method, *args), kwargs)
        return result

    @property
    def node_proxy(self) -> torch.fx.Proxy:
        """The container itself, as the graph is given it."""
        return torch.fx.Proxy(self.node, self.tracer)

    def __len__(self) -> int:
        self._asked_all()
        return len(self._content)

    def __bool__(self) -> bool:
        return len(self) > 0


def write_into(container: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """What a graph does to a list or dictionary of the caller that the forward writes into.

    >>> batch = {"x": 1}
    >>> write_into(batch, "update", y=2)
    >>> batch
    {'x': 1, 'y': 2}
    """
    getattr(container, method)(*args, **kwargs)


torch.fx.node.has_side_effect(write_into)


def _writer(method: str) -> Any:
    def write(self: KnownItems, *args: Any, **kwargs: Any) -> Any:
        return self._write(method, *args, **kwargs)

    return write


class KnownList(KnownItems):
    """A list or tuple among the arguments."""

    def _unread(self, value: Any) -> Any:
        return [_Unread(item) for item in value]

    def _asked_all(self) -> None:
        self.tracer.rely(self._place, "length", len(self._given))

    def plain(self) -> Any:
        items = list(self)
        return tuple(items) if isinstance(self._given, tuple) else items

    def __iter__(self) -> Iterator[Any]:
        return iter([self._read(i) for i in range(len(self))])

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __contains__(self, item: Any) -> bool:
        return item in list(self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, torch.fx.Proxy) and not isinstance(index, KnownNumber):
            return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})
        if isinstance(index, slice):
            return self.plain()[index]
        index = operator.index(index)
        return self._read(index if 0 <= index < len(self._content) else range(len(self))[index])

    def _write(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._given, tuple):
            return getattr(self._given, method)(*args, **kwargs)  # which says that a tuple has no such thing
        self._asked_all()
        return super()._write(method, *args, **kwargs)

    def extend(self, items: Any) -> None:
        """As of a list."""
        self._write("extend", list(items))

    def __iadd__(self, items: Any) -> Any:
        self.extend(items)
        return self

    def __add__(self, items: Any) -> Any:
        return self.plain() + (items.plain() if isinstance(items, KnownList) else items)

    def copy(self) -> list[Any]:
        """As of a list."""
        return list(self)

    def index(self, item: Any, *ends: int) -> int:
        """As of a list."""
        return self.plain().index(item, *ends)

    def count(self, item: Any) -> int:
        """As of a list."""
        return self.plain().count(item)

    def sort(self, *_: Any, **__: Any) -> None:
        """The order of tensors is not known."""
        raise TypeError("a list of inputs cannot be sorted or searched for a tensor")

    remove = sort


for _name in ("__setitem__", "__delitem__", "append", "insert", "pop", "clear", "reverse"):
    setattr(KnownList, _name, _writer(_name))


class KnownDict(KnownItems):
    """A dictionary among the arguments."""

    def _unread(self, value: Any) -> Any:
        return {key: _Unread(item) for key, item in value.items()}

    def _asked_all(self) -> None:
        self.tracer.rely(self._place, "keys", list(self._given))

    def plain(self) -> Any:
        return dict(self.items())

    def __iter__(self) -> Iterator[Any]:
        self._asked_all()
        return iter(list(self._content))

    def __contains__(self, key: Any) -> bool:
        found = key in self._content
        if found == (key in self._given):  # else the forward itself put it there, or took it away
            self.tracer.rely(self._place, "has", found, key)
        return found

    def __getitem__(self, key: Any) -> Any:
        if key not in self._content:
            self.tracer.rely(self._place, "has", False, key)
            raise KeyError(key)
        return self._read(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        return self._read(key) if key in self else default

    def keys(self) -> Any:
        """As of a dict."""
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        """As of a dict."""
        return [self._read(key) for key in self]

    def items(self) -> Any:
        """As of a dict."""
        return [(key, self._read(key)) for key in self]

    def copy(self) -> dict[Any, Any]:
        """As of a dict."""
        return self.plain()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        if key not in self:
            self[key] = default
        return self._read(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dict."""
        if key in self or not default:
            return self._write("pop", key)
        return default[0]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dict."""
        self._write("update", {**dict(*args), **kwargs})

    def popitem(self) -> Any:
        """As of a dict."""
        self._asked_all()
        return self._write("popitem")

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


for _name in ("__setitem__", "__delitem__", "clear"):
    setattr(KnownDict, _name, _writer(_name))
