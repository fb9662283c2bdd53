"""Makes the nodes of a graph of what a float model calls while it runs."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.asking.stack import is_module_call, user_frames
from horizon_plugin_pytorch.capture.memory import Memory, changed, distinct, versions
from horizon_plugin_pytorch.capture.packing import PackedGraph
from horizon_plugin_pytorch.capture.region import module_at
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.nested import tensors_in, tensors_of
from horizon_plugin_pytorch.operators.arguments import by_position
from horizon_plugin_pytorch.operators.calls import as_call, operator_name
from horizon_plugin_pytorch.plain_values import plain_arguments
from horizon_plugin_pytorch.runtime.call_site import (
    CallSite,
    ModuleCall,
    caller,
    counted,
    current_scope,
    here,
)
from horizon_plugin_pytorch.runtime.node_notes import notes, place_like
from horizon_plugin_pytorch.torch_functions import REAL, is_metadata, is_shape
from horizon_plugin_pytorch.writing import writes

LoggedCall = tuple[tuple[ModuleCall, ...], CallSite]  # a module's call and those around it; and where it is written


class Recorder(TorchFunctionMode):
    """Records the calls of torch functions and of leaf modules while a float model runs.

    A second run adds only what the first did not meet: branches on `self.training`, say. Calls of the same site are
    the same node's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = PackedGraph()
        self._model = model
        self._nodes: dict[int, fx.Node] = {}
        self._alive: dict[int, weakref.ref] = {}  # a tensor that is gone could share its id with a new one
        self._own = {id(t): t for _, t in _tensors(model)}  # held, so that no other tensor gets the id of one
        self._attributes = {id(t): path for path, t in _tensors(model)}
        self._stored = frozenset(self._attributes.values())
        self._known: dict[Any, fx.Node] = {}
        self._met: Counter[Any] = Counter()
        self._blocks: dict[CallSite, Counter[Any]] = {}  # what had been met before each block
        self._block: CallSite | None = None
        self._depth = 0
        self._inputs = 0
        self._constants = 0
        self._stack: tuple[ModuleCall, ...] = ()
        self._called: Counter[str] = Counter()
        self.runs: list[list[LoggedCall]] = []
        self._handed: dict[fx.Node, None] = {}
        self._memory = Memory()
        self.reads_values = False  # may what the model does depend on the values of its tensors?
        self._earlier: dict[int, tuple[weakref.ref, fx.Node]] = {}  # tensors of the runs before that are still there

    # -- values

    def _bind(self, value: Any, node: fx.Node) -> None:
        """A call's result is `node`; parts of a tuple are its items."""
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
            self._alive[id(value)] = weakref.ref(value, functools.partial(self._forget, id(value)))
            self._memory.know(value)
            known = notes(node)
            if known.dtype is None:
                known.dtype, known.shape = value.dtype, () if value.is_nested else tuple(value.shape)
            if node.op not in ("placeholder", "get_attr") and known.shape == () and known.number is None:
                self._note_number(value, node)
        elif isinstance(value, (tuple, list)):
            for index, part in enumerate(value):
                if _leaves(part):
                    key = ("item", node, index)
                    if key not in self._known:
                        self._known[key] = self.graph.call_function(operator.getitem, (node, index))
                        place_like(self._known[key], node)
                    self._bind(part, self._known[key])
        elif isinstance(value, dict):
            for part in value.values():
                self._bind(part, node)

    def _note_number(self, value: Tensor, node: fx.Node) -> None:
        """Note the number of a tensor without axes: where it is made of constants it is one."""
        if value.is_nested or value.is_complex() or value.is_meta:
            return
        self._depth += 1
        try:
            notes(node).number = value.item()
        finally:
            self._depth -= 1

    def _forget(self, key: int, gone: Any) -> None:
        """A tensor is gone."""
        self._alive.pop(key, None)
        self._nodes.pop(key, None)
        self._memory.forget(key)

    def node_of(self, value: Tensor) -> fx.Node:
        """The node whose result a tensor is."""
        node = self._nodes.get(id(value))
        if node is not None:
            return node
        if id(value) not in self._attributes:  # a list, a global or numpy has it; the model finds it there again
            self._attributes[id(value)] = f"_constant_{self._constants}"
            self._constants += 1
        path = self._attributes[id(value)]
        key = ("constant", path)
        if key not in self._known:
            self._known[key] = self.graph.create_node("get_attr", path)
            notes(self._known[key]).value = value
        self._bind(value, self._known[key])
        return self._known[key]

    def _arguments(self, tree: Any) -> Any:
        def one(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.node_of(value)
            if isinstance(value, (tuple, list)):
                return tuple(map(one, value)) if type(value) is not list else list(map(one, value))
            if isinstance(value, dict):
                return {k: one(v) for k, v in value.items()}
            if isinstance(value, slice):
                return slice(one(value.start), one(value.stop), one(value.step))
            is_plain = value is None or isinstance(
                value, (int, float, bool, complex, str, torch.dtype, torch.device, torch.memory_format, type(Ellipsis))
            )
            return value if is_plain else repr(value)

        return one(tree)

    def add_input(self, tree: Any) -> None:
        """Tensors of the model's inputs."""
        for leaf in tensors_of(tree):
            if id(leaf) not in self._nodes:
                key = ("input", self._inputs)
                self._inputs += 1
                if key not in self._known:
                    self._known[key] = self.graph.placeholder(f"input_{key[1]}")
                self._bind(leaf, self._known[key])

    # -- calls

    def _add(self, key: Any, make: Callable[[], fx.Node], out: Any, scope: str, stale: fx.Node | None) -> fx.Node:
        occurrence = self._met[key]
        self._met[key] += 1
        full = (key, occurrence)
        if full not in self._known:
            node = self._known[full] = make()
            node.stack_trace = user_frames()
            known = notes(node)
            known.scope, known.block, known.calls = scope, self._block, self._stack
            known.is_training_only = self._model.training  # the eval run comes first
            known.site = key if isinstance(key, CallSite) else None
        node = self._known[full]
        if stale is not None:
            notes(node).stale_by = stale
        self._bind(out, node)
        return node

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        with self._inside():
            return self._function(func, args, kwargs)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """In a function or a leaf module: what it calls itself is not recorded, and torch need not report it."""
        mode = None if self._depth else _top_off(Unseen)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if mode is not None:
                _push_on_torch_dispatch_stack(mode)

    def _function(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function that the model calls."""
        leaves = _leaves((args, kwargs))
        self._note_reads(leaves)
        before = versions(leaves)
        out = result = func(*args, **kwargs)
        if func == _SET_DATA and id(args[1]) in self._nodes:
            notes(self._nodes[id(args[1])]).given_as_data = user_frames()
        is_assignment = getattr(func, "__name__", "") == "__setitem__"
        if is_assignment:
            result = args[0]
        elif not writes(func, args, kwargs):
            out = result = distinct(out, leaves)
        if is_shape(func) and id(args[0]) in self._nodes:
            notes(self._nodes[id(args[0])]).is_measured = True
        stale = self._memory.stale(leaves, (args[1],) if is_assignment else None)
        if _leaves(result):
            op, target, call_args, call_kwargs = as_call(func, args, kwargs)
            site = here(operator_name(op, target, call_args, call_kwargs))
            node = self._add(
                site,
                lambda: self.graph.create_node(op, target, self._arguments(call_args), self._arguments(call_kwargs)),
                result,
                site.scope,
                stale,
            )
            self._note_writes(node, changed(leaves, before), result)
        elif not is_metadata(func) and func != _ASKS_DTYPE:
            self.reads_values = True
        self.reads_values |= _decides(leaves, result)
        return out

    def _note_reads(self, leaves: list[Tensor]) -> None:
        """A call is given tensors; some may be of an earlier run."""
        for x in leaves if self._earlier else ():
            tensor, node = self._earlier.get(id(x), (None, None))
            if tensor is not None and node is not None and tensor() is x and id(x) not in self._nodes:
                known = notes(node)
                known.read_later = user_frames() if known.read_later is None else known.read_later

    def _note_writes(self, node: fx.Node, changed: list[Tensor], out: Any) -> None:
        """A call changed some of the tensors that it was given."""
        if changed:
            notes(node).writes = True
            writer = next((x for x in changed if x is out), None)
            self._memory.write(changed, writer, node)

    def unseen(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """An operator ran, and torch did not report the function that called it."""
        if self._depth:  # the function or the module that it is part of is reported
            return
        sources = [x for x in _leaves((args, kwargs)) if id(x) in self._nodes]
        if not sources:
            return
        name = func.overloadpacket.__name__
        if name in _SAME:
            return self._bind(out, self._nodes[id(sources[0])])
        self.reads_values = True  # as a script may
        site = here(name)

        def make() -> fx.Node:
            node = self.graph.call_function(func, self._arguments(args), self._arguments(kwargs))
            notes(node).is_unseen = True
            return node

        self._add((site, "unseen"), make, out, site.scope, None)

    def leaf(self, path: str, run: Callable[[], Any], args: tuple, kwargs: dict[str, Any], method: str = "") -> Any:
        """Run a leaf module, or a method of a FloatFunctional, as one node."""
        if self._depth:
            return run()
        if not (method or is_module_call()):
            raise UnsupportedOperatorError(
                f"the forward of {at(path, caller(current_scope()).line).removeprefix('at ')} is called by its name, "
                "which the prepared model does not see. Call the module itself, as in `self.conv(x)`."
            )
        with self.called(path, caller(current_scope())):
            return self._leaf(path, run, args, kwargs, method)

    @contextlib.contextmanager
    def called(self, path: str, site: CallSite) -> Iterator[None]:
        """A module is called in here."""
        if self._depth or not path:
            yield
            return
        before, call = self._stack, ModuleCall(path, self._called[path])
        self._called[path] += 1
        self._stack = (*before, call)
        self.runs[-1].append((self._stack, counted(site, path)))
        try:
            yield
        finally:
            self._stack = before

    def _refuse_lent(self, path: str) -> None:
        """Insist that a leaf runs on its own parameters: `torch.func.functional_call` gives it others for one call."""
        owned = module_at(self._model, path)._parameters
        lent = [name for name, p in owned.items() if p is not None and not isinstance(p, nn.Parameter)]
        if lent:
            raise UnsupportedOperatorError(
                f"{at(path, caller(current_scope()).line).removeprefix('at ')} is called with another `{lent[0]}` than "
                "its own, as `torch.func.functional_call` does, which the prepared model cannot follow. Call the "
                "function with that tensor, as in `F.linear(x, weight, bias)`."
            )

    def _leaf(self, path: str, run: Callable[[], Any], args: tuple, kwargs: dict[str, Any], method: str) -> Any:
        scope, leaves = current_scope(), _leaves((args, kwargs))
        self._refuse_lent(path)
        self._note_reads(leaves)
        stale = self._memory.stale(leaves)

        def make() -> fx.Node:
            owner = self._model.get_submodule(path)
            named = by_position(getattr(type(owner), method or "forward"), args, kwargs)
            plain_args, plain_kwargs = plain_arguments(*named, arrays="tensor")
            call_args, call_kwargs = self._arguments(plain_args), self._arguments(plain_kwargs)
            if not method:
                return self.graph.call_module(path, call_args, call_kwargs)
            functional = self.graph.create_node("get_attr", path)
            return self.graph.call_method(method, (functional, *call_args), call_kwargs)

        with self._inside():
            before = versions(leaves)
            out = run()
            written = changed(leaves, before)
            out = out if written else distinct(out, leaves)
            self._note_writes(self._add((path, method), make, out, scope, stale), written, out)
        return out

    @contextlib.contextmanager
    def block(self, site: CallSite) -> Iterator[None]:
        """A dynamic block: when it runs again, its calls are those of its first run."""
        outer, met, self._block = self._block, Counter(self._met), site
        self._met = Counter(self._blocks.setdefault(site, Counter(met)))
        try:
            yield
        finally:
            self._block = outer
            self._met |= met

    def hand_out(self, result: Any) -> None:
        """What the model gives, and what it keeps: somebody may read it."""
        buffers = {path for path, _ in (*self._model.named_parameters(), *self._model.named_buffers())}
        for path, tensor in _tensors(self._model):
            is_other = self._attributes.get(id(tensor)) != path  # and not the same one, written to
            is_read = path in buffers or ("constant", path) in self._known
            if is_other and is_read and id(tensor) in self._nodes and path in self._stored:
                notes(self._nodes[id(tensor)]).kept_as = path
        kept = (value for module in self._model.modules() for value in vars(module).values())
        for tensor in tensors_in([result, *(value for value in kept if not _is_nothing(value))]):
            node = self._nodes.get(id(tensor))
            if node is not None and node.op not in ("placeholder", "get_attr"):
                self._handed.setdefault(node)
                stale = self._memory.stale([tensor])
                if stale is not None:
                    notes(node).handed_out_stale = stale

    @property
    def keeps_tensors(self) -> bool:
        """Has the model, or whoever it gave them to, kept tensors that it computed?"""
        return any(self._nodes[key].op not in ("placeholder", "get_attr") for key in self._alive)

    @property
    def has_read_earlier(self) -> bool:
        """Has a run read what an earlier one has computed?"""
        return any(notes(node).read_later is not None for node in self.graph.nodes)

    def finish(self) -> fx.Graph:
        """The graph; whatever nobody reads is an output too, as code that is not seen may have taken it."""
        unread = [node for node in self.graph.nodes if not node.users and node.op != "placeholder"]
        for node in unread:
            notes(node).is_unread = node not in self._handed
        self.graph.output(tuple(dict.fromkeys((*unread, *self._handed))))
        return self.graph

    def again(self) -> None:
        """Before another run."""
        for key, tensor in self._alive.items():
            if self._nodes[key].op not in ("placeholder", "get_attr") and key not in self._own:
                self._earlier[key] = (tensor, self._nodes[key])
        self._met.clear()
        self._blocks.clear()
        self._nodes.clear()
        self._alive.clear()
        self._called.clear()
        self._stack = ()
        self.runs.append([])
        self._memory.clear()
        self._inputs = 0


def _decides(leaves: list[Tensor], result: Any) -> bool:
    """True for a call that makes a choice of real numbers: positions, a mask; what follows may have any length."""
    return any(x.dtype not in REAL for x in _leaves(result)) and any(x.dtype in REAL for x in leaves)


_ASKS_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SAME = frozenset({"alias", "detach", "view", "view_as"})  # how torch's own code makes another object of a tensor


class Unseen(TorchDispatchMode):
    """Tells a recorder of operators that code calls which torch does not report: of torch.jit.script, or in C++."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper for that would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # or else the recorder takes it for a call of the model's
            out = func(*args, **(kwargs or {}))
        self._recorder.unseen(func, args, kwargs or {}, out)
        return out


def _top_off(kind: type[TorchDispatchMode]) -> TorchDispatchMode | None:
    """Take the innermost mode from torch's stack if it is of this class; a user's own stays and sees everything."""
    count = _len_torch_dispatch_stack()
    is_top = count and isinstance(_get_dispatch_stack_at(count - 1), kind)
    return _pop_torch_dispatch_stack(None) if is_top else None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the model has, with their paths: plain attributes too, which are no buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}" if path else name, value
    yield from model.named_parameters()
    yield from model.named_buffers()


def _leaves(tree: Any) -> list[Tensor]:
    """The tensors of a call's arguments or results; torch's own search takes longer than most functions."""
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or type(tree) in _ATOMS:
        return []
    if type(tree) in (tuple, list):
        return [x for part in tree for x in _leaves(part)]
    if type(tree) is dict:
        return [x for part in tree.values() for x in _leaves(part)]
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


_ATOMS = (int, float, bool, str, torch.dtype, torch.device, slice)


def _is_nothing(value: Any) -> bool:
    """Holds an attribute of a module no tensor for sure? Most of them are numbers, and dictionaries without hooks."""
    return value is None or type(value) in _ATOMS or (type(value) in (dict, OrderedDict) and not value)
