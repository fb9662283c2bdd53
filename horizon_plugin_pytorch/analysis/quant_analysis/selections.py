"""sort, topk and argmax while two models are compared: the second selects what the first has selected.

Where two scores are close, a small error of one of them swaps positions, and everything behind is another thing, which
says nothing about the size of the error. So positions come from the first model, and the values of the second are those
at these positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from horizon_plugin_pytorch.asking.owners import is_package_code, is_torch_code
from horizon_plugin_pytorch.asking.stack import running_functions
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.watch.watch import Watch

_WITH_VALUES = {"topk": torch.return_types.topk, "sort": torch.return_types.sort}  # type: ignore[attr-defined]
_POSITIONS = ("argmax", "argmin", "argsort")
_SELECTING = (*_WITH_VALUES, *_POSITIONS)


@dataclass(frozen=True)
class _Selected:
    name: str
    shape: tuple[int, ...]  # of what it selects from
    dim: int
    positions: Tensor


class Selections:
    """The selections of a run of one model, for runs of another.

    Attributes:
        unlike: why the second model's selections were left as they are; empty if they were not.

    >>> chosen, x, y = Selections(), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.9])
    >>> with chosen.noting():
    ...     _ = x.argmax()
    >>> with chosen.taking():
    ...     y.argmax().item()
    1
    """

    def __init__(self) -> None:
        self._kept: list[_Selected] = []
        self.unlike = ""

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep the positions that are selected in here."""
        self._kept = []

        def note(name: str, dim: int, args: tuple, call: Callable[[], Any]) -> Any:
            out = call()
            positions = out if isinstance(out, Tensor) else out[1]
            self._kept.append(_Selected(name, tuple(args[0].shape), dim, positions.detach().clone()))
            return out

        with _Mode(note):
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Select the positions that were kept, call by call."""
        waiting = iter(self._kept)
        self.unlike = ""

        def take(name: str, dim: int, args: tuple, call: Callable[[], Any]) -> Any:
            wanted = None if self.unlike else next(waiting, None)
            if wanted is None or (wanted.name, wanted.shape, wanted.dim) != (name, tuple(args[0].shape), dim):
                self.unlike = self.unlike or (
                    f"`{name}` of a tensor of shape {tuple(args[0].shape)} has no counterpart in the baseline"
                )
                return call()
            positions = wanted.positions.to(args[0].device)
            if name in _POSITIONS:
                return positions.clone()
            return _WITH_VALUES[name]((torch.gather(args[0], dim, positions), positions.clone()))

        with _Mode(take):
            yield


class _Mode(TorchFunctionMode):
    """Sees the selections of the model's code, not those of the package's own operators."""

    def __init__(self, answer: Callable[[str, int, tuple, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _SELECTING or "out" in kwargs or not _is_of_model():
            return func(*args, **kwargs)
        given = (*args, *(kwargs[key] for key in ("input", "self") if key in kwargs and not args))
        if not given or not isinstance(given[0], Tensor) or not tensors_of(given[0]):
            return func(*args, **kwargs)
        return self._answer(name, _dim(name, args, kwargs), given, lambda: func(*args, **kwargs))


def _is_of_model() -> bool:
    """Does the model's code, or a post_process, select, rather than an operator of the package inside of it?"""
    for running in running_functions():
        if is_torch_code(running.file) or running.name in _PASSING or running.name in _SELECTING:
            continue
        if running.is_of(Watch.function):  # the run is watched, too
            continue
        return not is_package_code(running.file)
    return True


_PASSING = (
    "__torch_function__",
    "_is_of_model",
)  # what hands a call on; the package's own functions have torch's names


def _dim(name: str, args: tuple, kwargs: dict[str, Any]) -> int:
    """The axis along which a call selects; of `argmax` over all, any number will do."""
    if "dim" in kwargs:
        return -1 if kwargs["dim"] is None else int(kwargs["dim"])
    place = 2 if name == "topk" else 1
    given = args[place] if len(args) > place else -1
    return given if isinstance(given, int) and not isinstance(given, bool) else -1
