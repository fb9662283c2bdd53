"""One call of an operator in a run of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.operators.table import Operator

GENERATED = "_generated_"  # how modules are called that `prepare` makes for functions


@dataclass(eq=False, slots=True)
class OperatorCall:
    """One call of an operator: of a module, of a method of a FloatFunctional, or of a function.

    It holds the tensors of the call. Whoever keeps it keeps them; `released` gives the rest of it to keep. Keep copies
    of tensors if the model may write to them in place later, as ``nn.ReLU(inplace=True)`` does.

    Args:
        index: its position among the calls of the forward.
        path: the module that is called; for a function, the module whose forward calls it.
        repetition: how often it was called before in this forward: the module, or this function in that module.
        row: its row in the operator table; None for what has none.
        line: ``model.py:41``, the line of the user's model that makes the call; empty where it is not known.
        args, kwargs: what it was called with. A module that writes in place has written to them already.
        output: what it gave: a tensor, or any structure of tensors.
        module: the module that is called; None for a function.
        method: the method of a FloatFunctional.
        function: the function, as torch reports it; None for a module.
    """

    index: int
    path: str
    repetition: int = 0
    row: Operator | None = None
    line: str = ""
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    module: nn.Module | None = None
    method: str = ""
    function: Callable | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that it was called with, in order, however they are nested."""
        return tensors_of((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Tensor]:
        """All tensors that it gave, in order."""
        return tensors_of(self.output)

    @property
    def operator(self) -> str:
        """The operator's name: that of its row, or else of its function or class."""
        if self.row is not None:
            return self.row.name
        if self.function is None:
            return type(self.module).__name__
        name = getattr(self.function, "__name__", str(self.function))
        return getattr(self.function.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """As tables show it: ``conv``, ``conv(1)`` for a second call, ``sub[sub]`` for a method or a function."""
        what = self.method or (self.operator if self.function is not None else "")
        return f"{self.path}{f'[{what}]' if what else ''}{f'({self.repetition})' if self.repetition else ''}"

    @property
    def is_generated(self) -> bool:
        """True if the module was made for a function that the user's model calls."""
        return self.module is not None and is_generated(self.path)

    def released(self) -> OperatorCall:
        """The call without its arguments and results."""
        return replace(self, args=(), kwargs={}, output=None)


def is_generated(path: str) -> bool:
    """True for the path of a module that was made for a function which the model calls."""
    return path.rpartition(".")[2].startswith(GENERATED)
