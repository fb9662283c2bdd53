"""The integer graph as a picture: an SVG of its own, with the format, scale and shape of each value."""

from __future__ import annotations

import html

from torch import fx

from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, operator_name
from horizon_plugin_pytorch.program.text import described

_WIDTH, _HEIGHT, _GAP, _MARGIN = 300, 62, 26, 20
_COLOURS = {"placeholder": "#dfe8f5", "output": "#dfe8f5", "horizon": "#e3f1e3", "aten": "#f3f3f3"}
_LONGEST = 44  # characters that fit a box


def picture_of(program: Program, title: str) -> str:
    """The program as SVG: a box for each operator below those that it reads, and lines between them."""
    nodes = [node for node in program.graph.nodes if node.op != "get_attr" and "getitem" not in str(node.target)]
    place, rows = _layout(nodes)
    width = max(rows) * (_WIDTH + _GAP) + 2 * _MARGIN
    height = len(rows) * (_HEIGHT + _GAP) + 2 * _MARGIN + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{html.escape(title)}</title>",
        f'<text x="{_MARGIN}" y="{_MARGIN}" font-size="14">{html.escape(title)}</text>',
    ]
    for node in nodes:
        parts += [_line(place[source], place[node]) for source in _sources(node) if source in place]
    parts += [_box(node, *place[node]) for node in nodes]
    return "\n".join([*parts, "</svg>", ""])


def _layout(nodes: list[fx.Node]) -> tuple[dict[fx.Node, tuple[int, int]], list[int]]:
    """Where each box is, and how many boxes each row has."""
    depth: dict[fx.Node, int] = {}
    rows: list[int] = []
    place = {}
    for node in nodes:
        depth[node] = 1 + max((depth[source] for source in _sources(node) if source in depth), default=-1)
        if depth[node] == len(rows):
            rows.append(0)
        place[node] = (
            _MARGIN + rows[depth[node]] * (_WIDTH + _GAP), _MARGIN + 24 + depth[node] * (_HEIGHT + _GAP),
        )  # fmt: skip
        rows[depth[node]] += 1
    return place, rows


def _sources(node: fx.Node) -> list[fx.Node]:
    """The boxes that a box reads: parts of a node that gives several are that node."""
    found = [source for source in node.all_input_nodes if source.op != "get_attr"]
    return [source.all_input_nodes[0] if "getitem" in str(source.target) else source for source in found]


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1, x2, y2 = start[0] + _WIDTH // 2, start[1] + _HEIGHT, end[0] + _WIDTH // 2, end[1]
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#888"/>'


def _box(node: fx.Node, x: int, y: int) -> str:
    note, kind = note_of(node), operator_name(node)
    colour = _COLOURS[node.op if node.op in _COLOURS else kind.split("::")[0] if "::" in kind else "aten"]
    texts = [kind or node.name, ", ".join(map(described, note.values)), note.path, note.line]
    if node.op == "output":
        texts = ["output", ", ".join(str(source) for source in node.all_input_nodes), "", ""]
    lines = "".join(
        f'<text x="{x + 8}" y="{y + 15 + 14 * i}">{html.escape(_short(text))}</text>' for i, text in enumerate(texts)
    )
    full = html.escape("\n".join([node.name, *texts]))
    return (
        f'<g><title>{full}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{colour}" '
        f'stroke="#666"/>{lines}</g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
