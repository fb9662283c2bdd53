"""Pages that need no network: tables, and curves that can be zoomed."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _MARGIN = 1000.0, 360.0, 10.0
_COLOURS = ("#1565c0", "#c62828", "#2e7d32")
_STYLE = """body{font:14px sans-serif;margin:1.5em}svg{width:100%;height:60vh;border:1px solid #999;touch-action:none}
polyline{fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke}
table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 8px;text-align:left;white-space:nowrap}"""
# The wheel zooms along the layers, a drag moves, a double click shows all.
_SCRIPT = """for(const s of document.querySelectorAll('svg')){const all=s.viewBox.baseVal.width;let v=[0,all];
const set=()=>s.setAttribute('viewBox',v[0]+' 0 '+v[1]+' '+s.viewBox.baseVal.height);
s.addEventListener('wheel',e=>{e.preventDefault();const r=s.getBoundingClientRect(),f=e.deltaY<0?.8:1.25,
p=(e.clientX-r.left)/r.width,w=Math.min(all,v[1]*f);v=[Math.max(0,Math.min(all-w,v[0]+p*(v[1]-w))),w];set()},
{passive:false});
s.addEventListener('pointermove',e=>{if(e.buttons&1){const w=s.getBoundingClientRect().width;
v[0]=Math.max(0,Math.min(all-v[1],v[0]-e.movementX*v[1]/w));set()}});
s.addEventListener('dblclick',()=>{v=[0,all];set()})}"""


@dataclass(frozen=True)
class Curve:
    """A value for each layer, with what is shown when the pointer is on it; NaN and infinities have no point."""

    name: str
    values: Sequence[float]
    labels: Sequence[str]


def page(title: str, *parts: str) -> str:
    """A whole page of parts that are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def chart(curves: Sequence[Curve]) -> str:
    """Curves over the layers as SVG; names and labels are shown as text, whatever they are.

    >>> chart([Curve("max", [1.0, 2.0], ["<a>", "b"])]).count("<title>&lt;a&gt;</title>")
    1
    """
    finite = [v for curve in curves for v in curve.values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    count = max((len(curve.values) for curve in curves), default=0)
    drawn, names = [], []
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        names.append(f'<span style="color:{colour}">&#9632; {html.escape(curve.name)}</span>')
        points = [(_x(i, count), _y(v, low, high), i) for i, v in enumerate(curve.values) if math.isfinite(v)]
        line = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in points)
        drawn.append(f'<polyline points="{line}" stroke="{colour}"/>')
        drawn += [
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.5" fill="{colour}"><title>{html.escape(curve.labels[i])}</title>'
            "</circle>"
            for x, y, i in points
        ]
    body = "\n".join(drawn)
    return (
        f"<p>{' '.join(names)}; from {low:.7g} to {high:.7g}. Wheel: zoom. Drag: move. Double click: all.</p>\n"
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none">\n{body}\n</svg>'
    )


def _x(index: int, count: int) -> float:
    return _MARGIN + (_WIDTH - 2 * _MARGIN) * (index / (count - 1) if count > 1 else 0.5)


def _y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share
