"""Values derived from tensors, kept while the tensors hold the same numbers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.untraced import is_traced, untraced

_LIBRARY = "msvcrt" if sys.platform == "win32" else None
_ARGUMENTS = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
# As fast as memory is, which no comparison of torch is. Other threads run meanwhile; to let them takes longer than to
# compare what is small.
_memcmp = ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS)(("memcmp", ctypes.CDLL(_LIBRARY)))
_memcmp_of_few = ctypes.PYFUNCTYPE(ctypes.c_int, *_ARGUMENTS)(("memcmp", ctypes.PyDLL(_LIBRARY)))
_FEW = 1 << 14  # bytes


class _Copy:
    """The numbers that a tensor held, to compare with those that it holds later."""

    __slots__ = ("address", "compare", "dtype", "numbers", "shape", "size", "source", "stride", "version")

    def __init__(self, source: Tensor, is_exact: bool) -> None:
        self.source, self.shape, self.dtype, self.stride = source, source.shape, source.dtype, source.stride()
        self.numbers: Tensor | None = None
        self.size = self.address = 0
        self.compare = _memcmp
        self.version: object = None
        if source.device.type != "cpu" and (not is_exact or source.is_meta):
            # To look at the numbers would wait for the device; a tensor of inference mode counts no writes at all.
            self.version = object() if source.is_inference() else (source._version, source.data_ptr())
            return
        self.numbers = source.detach().clone()
        if source.device.type == "cpu" and self.numbers.stride() == self.stride and _is_dense(source):
            self.size, self.address = source.numel() * source.element_size(), self.numbers.data_ptr()
            self.compare = _memcmp_of_few if self.size <= _FEW else _memcmp

    def matches(self, tensor: Tensor) -> bool:
        """Does the tensor hold the same numbers in the same places? For those that memory alone does not tell of."""
        if self.numbers is None:
            is_same = tensor is self.source and not tensor.is_inference()
            return is_same and (tensor._version, tensor.data_ptr()) == self.version
        if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.numbers.device:
            return False
        return torch.equal(tensor.detach(), self.numbers)


def _is_dense(x: Tensor) -> bool:
    """Do the numbers lie in memory without gaps?"""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def lasting(build: Callable[[], Any]) -> Any:
    """What `build` gives, also in inference mode as ordinary tensors: what is kept may be trained with later.

    >>> with torch.inference_mode():
    ...     made, kept = torch.ones(1), lasting(lambda: torch.ones(1))
    >>> made.is_inference(), kept.is_inference()
    (True, False)
    """
    if not torch.is_inference_mode_enabled():
        return build()
    with torch.inference_mode(False), torch.no_grad():
        return build()


class Cache:
    """A value derived from tensors; made anew when their numbers change, and not copied or pickled.

    The numbers themselves are compared with a copy, because torch does not count every write: fused optimizers, the
    collectives of ``torch.distributed``, ``tensor.data`` and arrays that share its memory change a tensor unseen.
    Threads may use it at the same time.

    Args:
        is_exact: compare numbers on every device. Otherwise those on an accelerator, where looking at them waits for
            it, count as changed when torch has counted a write.

    >>> weight, cache = torch.ones(2), Cache()
    >>> cache.get((weight,), lambda: float(weight.sum()))
    2.0
    >>> weight.data[0] = 5
    >>> cache.get((weight,), lambda: float(weight.sum()))
    6.0
    """

    def __init__(self, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        # Replaced as a whole: other threads may be reading.
        self._entry: tuple[tuple[_Copy, ...], tuple, Any] | None = None

    def clear(self) -> None:
        """Forget."""
        self._entry = None

    def get(self, sources: tuple[Tensor, ...], build: Callable[[], Any], facts: tuple = ()) -> Any:
        """The value for these tensors, built anew if any of them was replaced or written to.

        Args:
            build: makes the value.
            facts: what else the value depends on; see `plain_attributes`.
        """
        return (self._get if not is_traced() else self._get_untraced)(sources, build, facts)

    def _get(self, sources: tuple[Tensor, ...], build: Callable[[], Any], facts: tuple) -> Any:
        entry = self._entry
        if entry is not None and _are_equal(entry[1], facts) and _match(entry[0], sources):
            return entry[2]
        copies = tuple([_Copy(t, self._is_exact) for t in sources])
        value = lasting(build)
        if _match(copies, sources):  # another thread may have written meanwhile, and may write back what was there
            self._entry = (copies, facts, value)
        return value

    _get_untraced = untraced(_get)

    def known(self, sources: Sequence[Tensor]) -> Any:
        """The value for these tensors; None if there is none, or one of them was replaced or written to."""
        entry = self._entry
        return entry[2] if entry is not None and _match(entry[0], sources) else None

    @untraced
    def holds(self, sources: tuple[Tensor, ...]) -> bool:
        """Is there a value for these tensors, and none of them was written to since?"""
        entry = self._entry
        return entry is not None and _match(entry[0], sources)

    def __deepcopy__(self, memo: dict) -> Cache:
        return Cache(self._is_exact)

    def __reduce__(self) -> tuple:
        return Cache, (self._is_exact,)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The public attributes of a module that are neither tensors with axes nor modules, as they are now.

    >>> plain_attributes(nn.Flatten(2))
    {'training': True, 'start_dim': 2, 'end_dim': -1}
    """
    return {
        name: v if (copied := _COPIES[type(v)]) is _itself else copied(v)
        for name, v in vars(module).items()
        if name[0] != "_"
    }


class Settings:
    """The public attributes of a module, to ask whether it has them still: all at once, and not one by one.

    Of a module whose attributes are other objects when they change; see `Settings.can_tell`.

    >>> flatten = nn.Flatten(2)
    >>> settings = Settings(flatten)
    >>> flatten.start_dim = 1
    >>> settings.are_of(flatten)
    False
    """

    __slots__ = ("_count", "_names", "_values")

    def __init__(self, module: nn.Module) -> None:
        own = vars(module)
        self._names, self._count = tuple([name for name in own if name[0] != "_"]), len(own)
        self._values = tuple(map(own.get, self._names))

    @staticmethod
    def can_tell(module: nn.Module) -> bool:
        """Are its attributes other objects when they change? What users keep there, but for lists and such, counts so.

        `plain_attributes` looks no deeper either.
        """
        return all(_COPIES[type(value)] is _itself for name, value in vars(module).items() if name[0] != "_")

    def are_of(self, module: nn.Module) -> bool:
        """Are these the attributes of a module?"""
        own = vars(module)
        return len(own) == self._count and _are_equal(tuple(map(own.get, self._names)), self._values)


def _itself(value: Any) -> Any:
    return value


def _number(value: Tensor) -> Any:
    """A tensor without axes may be a setting; any other is what somebody keeps there, such as a hook."""
    return None if value.dim() or type(value) is not Tensor else value.item()


class _Copies(dict[type, Callable[[Any], Any]]):
    """How to copy a value of each type: what can change without becoming another object is copied."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        self[kind] = _number if issubclass(kind, Tensor) else _itself
        return self[kind]


_COPIES = _Copies({list: tuple, dict: dict, set: frozenset})


def _are_equal(a: tuple, b: tuple) -> bool:
    try:
        return a == b
    except (RuntimeError, TypeError, ValueError):  # arrays, say, whose comparison is no truth value
        return False


def _match(copies: tuple[_Copy, ...], sources: Sequence[Tensor]) -> bool:
    """Do tensors hold the same numbers in the same places? Asked by each layer in each forward."""
    if len(sources) != len(copies):
        return False
    for copy, x in zip(copies, sources, strict=True):
        if copy.size and x.shape == copy.shape and x.dtype is copy.dtype and x.stride() == copy.stride and x.is_cpu:
            place = x.data_ptr()
            if not place or copy.compare(place, copy.address, copy.size):  # memory may have been given back
                return False
        elif not copy.matches(x):
            return False
    return True
