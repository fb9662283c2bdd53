"""Which calls of two models belong together: of float and QAT, QAT and integer, two formats, two checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx, nn

from horizon_plugin_pytorch.capture.graph_text import graph_of
from horizon_plugin_pytorch.operators.table import row_named
from horizon_plugin_pytorch.runtime.located import FUSED_INTO
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.operator_call import GENERATED, OperatorCall, is_generated

OWN_CALL = re.compile(r"_call_\d+(?=\.|$)")  # a further call of a shared module that has scales of its own


@dataclass(frozen=True)
class Unpaired:
    """A call that has no partner in the other model, and why."""

    call: OperatorCall
    reason: str

    def __str__(self) -> str:
        return f"{self.call.name}: {self.reason}"


@dataclass(frozen=True)
class Pairing:
    """The calls of two models that belong together, in the order of the second run, and those that have no partner."""

    pairs: tuple[tuple[OperatorCall, OperatorCall], ...]
    first_only: tuple[Unpaired, ...]
    second_only: tuple[Unpaired, ...]


def pair_calls(first: CallLog, second: CallLog) -> Pairing:
    """Find the calls of two models that compute the same tensor.

    Modules are known by their paths. A function is known by the module that calls it, its line and its operator, also
    where a model has a module for it, and in whatever way it was prepared. Calls that are repeated are matched in their
    order. An operator that is fused in one model is matched to the last of its members in the other; the members before
    it give nothing that the fused operator has, and are named among those without a partner.

    Args:
        first, second: a run of each model, on inputs of the same kind.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net, x = QuantWrapper(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())).eval(), torch.ones(1, 1, 4, 4)
    >>> qat = prepare_qat_fx(net, {"": get_default_qconfig()})
    >>> pairing = pair_calls(CallLog.of(net, x), CallLog.of(qat, x))
    >>> for first, second in pairing.pairs:
    ...     print(first.name, second.name)
    quant quant
    module.1 module.0
    dequant dequant
    >>> print(*pairing.first_only)
    module.0: a part of `module.0`, which is fused
    """
    return _Pairs(_Side(first, second), _Side(second, first)).result()


class _Key(NamedTuple):
    """What calls of two models have in common.

    Args:
        path: of the module; for a function, of the module that calls it.
        operator, line: of a function.
    """

    path: str
    operator: str = ""
    line: str = ""


class _Side:
    """The calls of one model, each with what it is known by in both: a key, and the number of calls with it before."""

    def __init__(self, log: CallLog, other: CallLog) -> None:
        self.log = log
        self._theirs = {path for path, _ in other.model.named_modules(remove_duplicate=False)}
        self.members = fused_members(log.model)
        times = Counter(path for members in self.members.values() for path in set(members))
        self._shared = {path for path, count in times.items() if count > 1}
        lines = {call.path: call.line for call in log.calls if call.module is not None}
        self._keys = {
            path: self._key_of_path(path, lines.get(path) or str(getattr(module, "line", "")))
            for path, module in log.model.named_modules()
        }
        self._slots: dict[_Key, list[str]] = {}
        for path in sorted(self._keys, key=_numbered):
            self._slots.setdefault(self._keys[path], []).append(path)
        self.keys: list[_Key] = []
        self.index: dict[tuple[_Key, int], int] = {}  # of what each call computes, and the calls it is made of
        for call in log.calls:
            self._add(call)

    def _add(self, call: OperatorCall) -> None:
        if call.module is None or call.path not in self._keys or self._is_hidden(call):
            key = _Key(self._plain(call.path), _without_number(call.operator), call.line)
            number = 0
            while (key, number) in self.index:
                number += 1
        else:
            key, number = self.place(call.path, call.repetition)
            for member in self._own_members(call):
                self.index.setdefault(self.place(member, call.repetition), call.index)
        self.keys.append(key)
        self.index.setdefault((key, number), call.index)

    def _is_hidden(self, call: OperatorCall) -> bool:
        """True for a module that the model does not list: it goes by the module that calls it."""
        return self.log.model.get_submodule(call.path) is not call.module

    def place(self, path: str, repetition: int) -> tuple[_Key, int]:
        """The key of a module's call, and how many calls with that key are before it in a run of the float model."""
        key = self._keys[path]
        slots = self._slots[key]
        return key, repetition * len(slots) + slots.index(path)

    def _own_members(self, call: OperatorCall) -> list[str]:
        return [path for path in self.members.get(call.path, ()) if path not in self._shared and path in self._keys]

    def places_of_members(self, call: OperatorCall) -> list[tuple[_Key, int]]:
        """Of the members of a fused operator that are members of no other one."""
        return [self.place(path, call.repetition) for path in self._own_members(call)]

    def shared_members(self, call: OperatorCall) -> list[_Key]:
        """Keys of its other members, such as a ReLU that serves several."""
        members = self.members.get(call.path, ())
        return [self._keys[path] for path in members if path in self._shared and path in self._keys]

    def repeated_members(self, call: OperatorCall, taken: set[int]) -> Iterator[int]:
        """Calls of shared members of a fused operator that run once more on its result.

        A model that keeps its own forward still calls the ReLU, if that serves other calls as well.
        """
        for key in () if isinstance(self.log.model, fx.GraphModule) else self.shared_members(call):
            yield from self.readers(key, {call.index}, taken)

    def readers(self, key: _Key, found: set[int], taken: set[int]) -> Iterator[int]:
        """The first call with a key that reads what one of the calls gave."""
        for index, other in enumerate(self.keys):
            if other == key and index not in taken and not found.isdisjoint(self.log.producers[index]):
                yield index
                return

    def has_member(self, index: int, key: _Key) -> bool:
        """True if a call is of a fused operator that has this member."""
        members = self.members.get(self.log.calls[index].path, ())
        return any(self._keys.get(path) == key for path in members)

    def _key_of_path(self, path: str, line: str) -> _Key:
        path = self._plain(path)
        if not is_generated(path):
            return _Key(path)
        scope, _, name = path.rpartition(".")
        return _Key(scope, _operator_of(name), line)

    def _plain(self, path: str) -> str:
        """A path as the float model has it: without the names of wrapped code, and of copies for further calls."""
        kept = ".".join(name for name in path.split(".") if not name.startswith("_leaf_"))
        original = OWN_CALL.sub("", kept)
        scope = original.rpartition(".")[0] if is_generated(original) else original
        is_copy = kept not in self._theirs and (scope in self._theirs or not scope)
        return original if is_copy else kept


class _Pairs:
    """Finds the pairs of two sides."""

    def __init__(self, first: _Side, second: _Side) -> None:
        self._first, self._second = first, second
        self._partners: dict[int, int] = {}  # of calls of the second
        self._parts: tuple[dict[int, str], dict[int, str]] = ({}, {})  # members of a fused operator: its name

    def result(self) -> Pairing:
        """All pairs."""
        self._pair_fused(self._second, self._first, is_swapped=False)
        self._pair_fused(self._first, self._second, is_swapped=True)
        self._pair_alike()
        self._pair_containers(self._first, self._second, is_swapped=False)
        self._pair_containers(self._second, self._first, is_swapped=True)
        calls = self._first.log.calls, self._second.log.calls
        return Pairing(
            tuple((calls[0][one], calls[1][other]) for other, one in sorted(self._partners.items())),
            tuple(self._unpaired(0, self._first, self._second)),
            tuple(self._unpaired(1, self._second, self._first)),
        )

    def _taken(self, place: int) -> set[int]:
        paired = self._partners.values() if place == 0 else self._partners.keys()
        return {*paired, *self._parts[place]}

    def _pair(self, one: int, other: int, is_swapped: bool) -> None:
        first, second = (other, one) if is_swapped else (one, other)
        self._partners[second] = first

    def _pair_fused(self, fused: _Side, other: _Side, is_swapped: bool) -> None:
        """Pair fused operators of one side with the last of their members on the other."""
        here, there = (0, 1) if is_swapped else (1, 0)
        for call in fused.log.calls:
            if call.index in self._taken(here) or len(fused.members.get(call.path, ())) < 2:
                continue
            taken = self._taken(there)
            places = fused.places_of_members(call)
            found = {other.index[place] for place in places if place in other.index} - taken
            for key in fused.shared_members(call):
                if not any(other.has_member(index, key) for index in found):
                    found |= set(other.readers(key, found, taken))
            if found:
                last = max(found)
                self._pair(last, call.index, is_swapped)
                self._parts[there].update(dict.fromkeys(found - {last}, call.name))
                self._parts[here].update(dict.fromkeys(fused.repeated_members(call, self._taken(here)), call.name))

    def _pair_alike(self) -> None:
        """Pair what has one key, in the order of the calls."""
        by_key = [self._by_key(place, side) for place, side in enumerate((self._first, self._second))]
        for key, theirs in by_key[1].items():
            mine = by_key[0].get(key, [])
            if len(mine) == len(theirs):
                self._partners.update(zip(theirs, mine, strict=True))
                continue
            numbers = [{side.index.get((key, n)): n for n in range(len(side.keys))} for side in self._sides]
            at = {numbers[0][index]: index for index in mine if index in numbers[0]}
            self._partners.update({i: at[numbers[1][i]] for i in theirs if numbers[1].get(i) in at})

    @property
    def _sides(self) -> tuple[_Side, _Side]:
        return self._first, self._second

    def _by_key(self, place: int, side: _Side) -> dict[_Key, list[int]]:
        taken, found = self._taken(place), dict[_Key, list[int]]()
        for index, key in enumerate(side.keys):
            if index not in taken:
                found.setdefault(key, []).append(index)
        return found

    def _pair_containers(self, whole: _Side, parts: _Side, is_swapped: bool) -> None:
        """Pair an operator with the last of those that it is made of on the other side, as attention may be."""
        here, there = (1, 0) if is_swapped else (0, 1)
        calls = [c for c in whole.log.calls if c.module is not None and c.index not in self._taken(here)]
        for path, count in Counter(call.path for call in calls).items():
            taken = self._taken(there)
            inside = [c.index for c in parts.log.calls if c.path.startswith(f"{path}.") and c.index not in taken]
            size = len(inside) // count
            if not path or not size or size * count != len(inside):
                continue
            for number, call in enumerate(c for c in calls if c.path == path):
                group = inside[number * size : (number + 1) * size]
                self._pair(call.index, group[-1], is_swapped)
                self._parts[there].update(dict.fromkeys(group[:-1], call.name))

    def _unpaired(self, place: int, side: _Side, other: _Side) -> Iterator[Unpaired]:
        paired = set(self._partners.values() if place == 0 else self._partners.keys())
        theirs = {path for path, _ in other.log.model.named_modules()}
        for call in side.log.calls:
            if call.index in self._parts[place]:
                yield Unpaired(call, f"a part of `{self._parts[place][call.index]}`, which is fused")
            elif call.index not in paired:
                yield Unpaired(call, _why(call, theirs))


def _why(call: OperatorCall, theirs: set[str]) -> str:
    """Why a call has no partner in a model with these paths."""
    if call.is_generated and call.row is not None and call.row.is_quant:
        return "the stub of a constant, which `prepare` made"
    is_there = call.module is not None and call.path in theirs
    return "not called in the other model" if is_there else "not in the other model"


def fused_members(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each operator that is fused, by its path, the paths of its members, its own included.

    >>> from horizon_plugin_pytorch.quantization import fuse_modules
    >>> fused_members(fuse_modules(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), ["0", "1"]))
    {'0': ('0', '1')}
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for fused in vars(module).get(FUSED_INTO, ()):
            place = paths.get(id(fused))
            if place is not None:
                found.setdefault(place, [place]).append(path)
    graph = graph_of(model)
    for node in () if graph is None else graph.nodes:  # which knows of a ReLU, too, that others call as it is
        members = notes(node).members
        if members and str(node.target) in paths.values():
            found[str(node.target)] = list(members)
    return {place: tuple(members) for place, members in found.items()}


def _operator_of(name: str) -> str:
    """The operator of a generated module, by its name: ``_generated_mul_0``, ``_generated_mul_decode_12``."""
    words = name.removeprefix(GENERATED).split("_")
    names = ("_".join(words[:count]) for count in range(len(words) - 1, 0, -1))
    return _without_number(next((name for name in names if row_named(name) is not None), words[0]))


def _without_number(operator: str) -> str:
    """The operator as the model writes it: `mul_scalar` is how ``x * 2`` runs."""
    return operator.removesuffix("_scalar")


def _numbered(path: str) -> list[tuple[str, int]]:
    """Sorts ``_generated_add_10`` behind ``_generated_add_9``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", path)]
