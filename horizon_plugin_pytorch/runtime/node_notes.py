"""What is known of a node of a graph besides its call: notes that capture and passes leave for later passes.

Torch keeps what belongs to a node in `node.meta` and copies that, entry by entry, whenever it copies a graph. So each
note is an entry there, and a copied graph has notes of its own. Nothing else writes to `node.meta`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import Tensor, fx

if TYPE_CHECKING:  # which reads notes
    from horizon_plugin_pytorch.runtime.call_site import CallSite, ModuleCall

T = TypeVar("T")


class Note(Generic[T]):
    """One note: an attribute of `Notes` that is an entry of `node.meta`.

    Args:
        otherwise: what nodes without it say; to say that takes a note away.
    """

    def __init__(self, otherwise: T) -> None:
        self._otherwise = otherwise

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, notes: None, owner: type) -> Note[T]: ...

    @overload
    def __get__(self, notes: Notes, owner: type) -> T: ...

    def __get__(self, notes: Notes | None, owner: type) -> Note[T] | T:
        return self if notes is None else notes.meta.get(self._name, self._otherwise)

    def __set__(self, notes: Notes, value: T) -> None:
        if value is self._otherwise:
            notes.meta.pop(self._name, None)
        else:
            notes.meta[self._name] = value


class Notes:
    """What is known of a node: ``notes(node).shape``.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> notes(x).shape, notes(x).is_measured
    (None, False)
    >>> notes(x).shape = (1, 3)
    >>> notes(x).shape
    (1, 3)
    """

    __slots__ = ("meta",)

    def __init__(self, node: fx.Node) -> None:
        self.meta = node.meta

    # -- of the call, by who recorded or traced it
    site: Note[CallSite | None] = Note(None)  # where a function is called
    calls: Note[tuple[ModuleCall, ...]] = Note(())  # the calls of modules that the node is in
    block: Note[CallSite | None] = Note(None)  # the dynamic block that it is in
    is_training_only: Note[bool] = Note(False)  # only the training run made the call
    is_unseen: Note[bool] = Note(False)  # an operator that torch did not report as a function
    # -- of the result
    dtype: Note[torch.dtype | None] = Note(None)
    shape: Note[tuple[int, ...] | None] = Note(None)
    device: Note[torch.device | None] = Note(None)
    value: Note[Tensor | None] = Note(None)  # of a constant: the tensor itself, which may be no attribute of the model
    number: Note[Any] = Note(None)  # that a tensor without axes held
    is_unread: Note[bool] = Note(False)  # nobody reads it
    is_measured: Note[bool] = Note(False)  # the model read its shape
    kept_as: Note[str | None] = Note(None)  # the tensor of the model that the forward replaces by it
    read_later: Note[str | None] = Note(None)  # the stack at which a later forward reads it
    given_as_data: Note[str | None] = Note(None)  # the stack at which another tensor takes its memory: `x.data = y`
    # -- of memory
    writes: Note[bool] = Note(False)  # it changes its first argument in place
    stale_by: Note[fx.Node | None] = Note(None)  # the call that wrote, through another tensor, to memory that it reads
    handed_out_stale: Note[fx.Node | None] = Note(None)  # the same, to memory that the model gives
    # -- of its part in the quantized model
    is_stochastic: Note[bool] = Note(False)  # depends on random numbers
    is_constant: Note[bool | None] = Note(None)  # depends on no float input of the model; None in a traced graph
    is_weight: Note[bool] = Note(False)  # a weight that the model computes
    weight_of: Note[tuple[str, ...]] = Note(())  # the layers that it is the weight of
    is_wrapped: Note[bool] = Note(False)  # a call in code that tracing does not enter
    generated_name: Note[str | None] = Note(None)  # of the module of such a call
    runs_on_cpu: Note[bool] = Note(False)  # runs in float, in a hybrid model
    dequantized_by: Note[str] = Note("")  # the stub before it, if it does
    # -- of nodes that passes made
    made_by: Note[str] = Note("")  # the pass
    is_made: Note[bool] = Note(False)  # a stub that is not in the user's model
    members: Note[tuple[str, ...]] = Note(())  # paths of the modules that are fused here
    called_as: Note[str] = Note("")  # the node of the method call that a fused module has taken the place of
    has_shape: Note[tuple[bool, ...]] = Note(())  # which of the members give tensors of float's shape

    @property
    def scope(self) -> str:
        """Path of the module whose forward made the node; empty for the top module. Torch's own note."""
        scopes = self.scopes
        return scopes[-1] if scopes else ""

    @scope.setter
    def scope(self, path: str) -> None:
        self.meta[_SCOPES] = {path: (path, "")} if path else {}

    @property
    def scopes(self) -> list[str]:
        """Paths of the modules whose forwards were running, from the outermost on."""
        stack = self.meta.get(_SCOPES) or {}
        return [value[0] if isinstance(value, tuple) else key for key, value in stack.items()]


_SCOPES = "nn_module_stack"
_LINE = "stack_trace"
_PACKED = (_LINE, "made_by", "weight_of", "members", "called_as")  # what a pickled graph keeps


notes = Notes  # passes ask thousands of times: a function would be one call more


def inherit(new: fx.Node, node: fx.Node, made_by: str) -> Notes:
    """Let a node that a pass makes have the notes, the line and the scope of the one that it stands for."""
    new.meta = {**node.meta, "made_by": made_by}
    return Notes(new)


def place_like(new: fx.Node, node: fx.Node) -> Notes:
    """Let a new node be at the line and in the scope of another; else nothing is known of it."""
    new.meta.update({name: node.meta[name] for name in (_LINE, _SCOPES) if name in node.meta})
    return Notes(new)


def packed_notes(node: fx.Node) -> dict[str, Any]:
    """The notes that a pickled graph keeps, as plain values; scopes without the classes of their modules."""
    kept = {name: node.meta[name] for name in _PACKED if name in node.meta}
    scopes = notes(node).scopes
    return kept | ({_SCOPES: {path: (path, "") for path in scopes}} if scopes else {})


def unpack_notes(node: fx.Node, packed: dict[str, Any]) -> None:
    """Give a node the notes of a pickled graph."""
    node.meta.update(packed)
