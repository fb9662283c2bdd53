"""Where operators stand in a drawing of the model: modules as boxes that open, layers from top to bottom.

What is costly is done here: the row of each member of a box, and its place in the row. The page makes coordinates of
them, in one pass over what is open.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from horizon_plugin_pytorch.analysis.profile.document import Operator

_SWEEPS = 4
# Long connections are led past the rows between in steps; a flat model with many of them would drown in steps.
_BENDS_A_MEMBER = 6
_BENDS = 200


@dataclass(frozen=True)
class Member:
    """What stands in a box.

    Args:
        kind: ``operator``, ``box``, ``bend`` of a connection; ``in`` and ``out`` of connections across the border.
        target: the index of the operator or of the box; -1 for others.
        row, place: from the top, and in the row from the left.
    """

    kind: str
    target: int
    row: int
    place: int


@dataclass(frozen=True)
class Box:
    """A module with what it calls.

    Args:
        path: of the module; empty for the model.
        label: the part of the path that the box around it does not show.
        routes: connections, each as positions in `members` from its start over bends to its end.
    """

    path: str
    label: str
    members: tuple[Member, ...]
    routes: tuple[tuple[int, ...], ...]


@dataclass
class _Node:
    path: str
    operators: list[int] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def layout_of(operators: Sequence[Operator]) -> tuple[Box, ...]:
    """The boxes of a model; the first is the model itself.

    >>> conv = Operator(0, "block.conv", "block.conv", "Conv2d")
    >>> relu = Operator(1, "block[relu]", "block", "relu", inputs=(0,))
    >>> model, block = layout_of([conv, relu, Operator(2, "head", "head", "Linear", inputs=(1,))])
    >>> [(member.kind, member.row) for member in model.members], model.routes
    ([('box', 0), ('operator', 1)], ((0, 1),))
    >>> block.path, [member.kind for member in block.members]
    ('block', ['operator', 'operator', 'out'])
    """
    root = _tree(operators)
    order = _boxes(root)
    number = {id(node): position for position, node in enumerate(order)}
    ancestry: dict[int, list[tuple[int, tuple[str, int]]]] = {}  # boxes around an operator, with their member for it
    _find_ancestry(root, number, [], ancestry)
    flows: list[dict[tuple[tuple[str, int], tuple[str, int]], None]] = [{} for _ in order]
    for operator in operators:
        for source in operator.inputs:
            if source in ancestry and source != operator.index:
                _connect(ancestry[source], ancestry[operator.index], flows)
    labels = _labels(order)
    return tuple(
        Box(node.path, labels[position], *_arranged(_members(node, number), flows[position]))
        for position, node in enumerate(order)
    )


def boxes_around(operators: Sequence[Operator]) -> dict[int, str]:
    """The path of the box that each operator stands in, by the operator's index.

    >>> conv, relu = Operator(0, "block.conv", "block.conv", "Conv2d"), Operator(1, "block[relu]", "block", "relu")
    >>> boxes_around([conv, relu, Operator(2, "head", "head", "Linear")])
    {2: '', 0: 'block', 1: 'block'}
    """
    return {index: node.path for node in _boxes(_tree(operators)) for index in node.operators}


def _tree(operators: Sequence[Operator]) -> _Node:
    root = _Node("")
    for operator in operators:
        parts = [part for part in operator.path.split(".") if part]
        # A function is called by the module at its path; a module stands in the one around it.
        inside = parts if "[" in operator.name else parts[:-1]
        node = root
        for depth, part in enumerate(inside):
            node = node.children.setdefault(part, _Node(".".join(parts[: depth + 1])))
        node.operators.append(operator.index)
    _simplify(root)
    return root


def _simplify(node: _Node) -> None:
    """A box around one operator is that operator; a box around one box is that box."""
    for name, child in list(node.children.items()):
        _simplify(child)
        if len(child.operators) == 1 and not child.children:
            node.operators.append(child.operators[0])
            del node.children[name]
        elif not child.operators and len(child.children) == 1:
            node.children[name] = next(iter(child.children.values()))
    node.operators.sort()


def _boxes(root: _Node) -> list[_Node]:
    found = [root]
    for node in found:
        found.extend(node.children.values())
    return found


def _labels(order: Sequence[_Node]) -> list[str]:
    around = {id(child): node.path for node in order for child in node.children.values()}
    return [node.path[len(around[id(node)]) :].lstrip(".") if id(node) in around else "" for node in order]


def _members(node: _Node, number: dict[int, int]) -> list[tuple[str, int]]:
    first: dict[tuple[str, int], int] = {("operator", index): index for index in node.operators}
    first |= {("box", number[id(child)]): _first_operator(child) for child in node.children.values()}
    return sorted(first, key=lambda member: first[member])


def _first_operator(node: _Node) -> int:
    return min([*node.operators[:1], *(_first_operator(child) for child in node.children.values())])


def _find_ancestry(
    node: _Node,
    number: dict[int, int],
    above: list[tuple[int, tuple[str, int]]],
    found: dict[int, list[tuple[int, tuple[str, int]]]],
) -> None:
    here = number[id(node)]
    for index in node.operators:
        found[index] = [*above, (here, ("operator", index))]
    for child in node.children.values():
        _find_ancestry(child, number, [*above, (here, ("box", number[id(child)]))], found)


def _connect(
    start: list[tuple[int, tuple[str, int]]],
    end: list[tuple[int, tuple[str, int]]],
    flows: list[dict[tuple[tuple[str, int], tuple[str, int]], None]],
) -> None:
    """The connection of two operators in each box that it runs through: out of boxes, across one, into boxes."""
    shared = 0
    while start[shared] == end[shared]:
        shared += 1
    box, member = start[shared]
    flows[box][member, end[shared][1]] = None
    for box, member in start[shared + 1 :]:
        flows[box][member, ("out", -1)] = None
    for box, member in end[shared + 1 :]:
        flows[box][("in", -1), member] = None


def _arranged(
    members: list[tuple[str, int]], flows: Iterable[tuple[tuple[str, int], tuple[str, int]]]
) -> tuple[tuple[Member, ...], tuple[tuple[int, ...], ...]]:
    """Members with row and place, and the routes between them."""
    flows = list(flows)
    ends = {end for flow in flows for end in flow}
    kinds = [*members, *(port for port in (("in", -1), ("out", -1)) if port in ends)]
    position = {member: at for at, member in enumerate(kinds)}
    edges = [(position[start], position[end]) for start, end in flows]
    rows = _rows(kinds, edges)
    routes = _routes(kinds, edges, rows)
    places = _places(rows, routes)
    shown = (Member(kind, target, rows[at], places[at]) for at, (kind, target) in enumerate(kinds))
    return tuple(shown), tuple(map(tuple, routes))


def _rows(kinds: list[tuple[str, int]], edges: list[tuple[int, int]]) -> list[int]:
    """The longest way to each member. Members are in the order of their first calls: what runs against it is a loop."""
    before: dict[int, list[int]] = defaultdict(list)
    for start, end in edges:
        before[end].append(start)
    rows = [0] * len(kinds)
    top = [at for at, (kind, _) in enumerate(kinds) if kind == "in"]
    middle = [at for at, (kind, _) in enumerate(kinds) if kind not in ("in", "out")]
    for at in middle:
        rows[at] = max((rows[start] + 1 for start in before[at] if start in top or start < at), default=len(top))
    for at, (kind, _) in enumerate(kinds):
        if kind == "out":
            rows[at] = 1 + max((rows[start] for start in middle), default=0)
    return rows


def _routes(kinds: list[tuple[str, int]], edges: list[tuple[int, int]], rows: list[int]) -> list[list[int]]:
    """Short connections first: they get their bends before the limit is met."""
    limit = len(kinds) + _BENDS + _BENDS_A_MEMBER * len(kinds)
    routes = []
    for start, end in sorted(edges, key=lambda edge: abs(rows[edge[1]] - rows[edge[0]])):
        between = range(rows[start] + 1, rows[end])
        bends: list[int] = []
        if len(kinds) + len(between) <= limit:
            bends = list(range(len(kinds), len(kinds) + len(between)))
            kinds.extend(("bend", -1) for _ in between)
            rows.extend(between)
        routes.append([start, *bends, end])
    return routes


def _places(rows: list[int], routes: list[list[int]]) -> list[int]:
    """Each row in the order of the means of what its members are connected to, above and below in turn."""
    above: dict[int, list[int]] = defaultdict(list)
    below: dict[int, list[int]] = defaultdict(list)
    for route in routes:
        for start, end in itertools.pairwise(route):
            if rows[end] == rows[start] + 1:
                above[end].append(start)
                below[start].append(end)
    levels: list[list[int]] = [[] for _ in range(max(rows, default=-1) + 1)]
    for at, row in enumerate(rows):
        levels[row].append(at)
    place = [0.0] * len(rows)
    for level in levels:
        _spread(level, place)
    for sweep in range(_SWEEPS):
        near = above if sweep % 2 == 0 else below
        for level in levels if sweep % 2 == 0 else reversed(levels):
            if len(level) > 1:
                mean = {at: sum(place[n] for n in near[at]) / len(near[at]) if near[at] else place[at] for at in level}
                level.sort(key=mean.__getitem__)
                _spread(level, place)
    result = [0] * len(rows)
    for level in levels:
        for at, member in enumerate(level):
            result[member] = at
    return result


def _spread(level: list[int], place: list[float]) -> None:
    """Positions around zero, so that rows of different lengths have a common middle."""
    for at, member in enumerate(level):
        place[member] = at - (len(level) - 1) / 2
