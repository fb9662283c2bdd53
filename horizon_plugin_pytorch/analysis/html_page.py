"""Pages that need no network: tables, and curves that can be zoomed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

_WIDTH, _HEIGHT, _MARGIN = 1000.0, 360.0, 10.0
_COLOURS = ("#1565c0", "#c62828", "#2e7d32")
_STYLE = """body{font:14px sans-serif;margin:1.5em}svg{width:100%;border:1px solid #999;touch-action:none}
figure{display:grid;grid-template-columns:5.5em 1fr;margin:0 0 1em}figure svg{height:min(60vh,24em);display:block}
polyline,path,line{fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke}line{stroke:#ddd}line.level{stroke:#777}
path{stroke-width:7;stroke-linecap:round}.y{position:relative;font-size:12px}
.y span{position:absolute;right:6px;transform:translateY(-50%)}
.x{grid-column:2;display:flex;justify-content:space-between;font-size:12px;padding:2px 0}
table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 8px;text-align:left;white-space:nowrap}"""
# The wheel zooms along the curves, a drag moves, a double click shows all; the ends of the axis follow.
_SCRIPT = """for(const s of document.querySelectorAll('figure svg')){const all=s.viewBox.baseVal.width;let v=[0,all];
const d=s.dataset,m=+d.margin,ends=s.parentElement.querySelectorAll('.x b'),at=u=>{
const p=Math.max(0,Math.min(1,(u-m)/(all-2*m)));return +(+d.low+p*(d.high-d.low)).toPrecision(3)+d.unit};
const set=()=>{s.setAttribute('viewBox',v[0]+' 0 '+v[1]+' '+s.viewBox.baseVal.height);
if(ends.length){ends[0].textContent=at(v[0]);ends[1].textContent=at(v[0]+v[1])}};
s.addEventListener('wheel',e=>{e.preventDefault();const r=s.getBoundingClientRect(),f=e.deltaY<0?.8:1.25,
p=(e.clientX-r.left)/r.width,w=Math.min(all,v[1]*f);v=[Math.max(0,Math.min(all-w,v[0]+p*(v[1]-w))),w];set()},
{passive:false});
s.addEventListener('pointermove',e=>{if(e.buttons&1){const w=s.getBoundingClientRect().width;
v[0]=Math.max(0,Math.min(all-v[1],v[0]-e.movementX*v[1]/w));set()}});
s.addEventListener('dblclick',()=>{v=[0,all];set()})}"""


@dataclass(frozen=True)
class Curve:
    """Values with what is shown when the pointer is on them; NaN and infinities have no point.

    Args:
        places: where each is along the axis; None is 0, 1, 2, ...
        is_joined: is there a line from each to the next?
    """

    name: str
    values: Sequence[float]
    labels: Sequence[str]
    places: Sequence[float] | None = None
    is_joined: bool = True

    @property
    def points(self) -> list[tuple[float, float, str]]:
        """Place, value and label of each that can be shown."""
        places = range(len(self.values)) if self.places is None else self.places
        return [(x, y, label) for x, y, label in zip(places, self.values, self.labels, strict=True) if isfinite(y)]


def page(title: str, *parts: str) -> str:
    """A whole page of parts that are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def chart(curves: Sequence[Curve], along: str = "", unit: str = "", level: tuple[str, float] | None = None) -> str:
    """Curves as SVG with axes; names and labels are shown as text, whatever they are.

    Args:
        along: what the curves run over.
        unit: of it.
        level: the name and the value of a line to compare with.

    >>> chart([Curve("max", [1.0, 2.0], ["<a>", "b"])]).count("<title>&lt;a&gt;</title>")
    1
    """
    points = [point for curve in curves for point in curve.points]
    across = _ends([x for x, _, _ in points])
    low, high = _ends([y for _, y, _ in points] + ([level[1]] if level is not None and isfinite(level[1]) else []))
    ticks = _ticks(low, high)
    drawn = [_line(_y(tick, low, high)) for tick in ticks.values()]
    names = []
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        names.append(f'<span style="color:{colour}">&#9632; {html.escape(curve.name)}</span>')
        places = [(_x(x, *across), _y(y, low, high), label) for x, y, label in curve.points]
        line = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in places)
        drawn += [f'<polyline points="{line}" stroke="{colour}"/>'] if curve.is_joined else []
        drawn += [
            f'<path d="M{x:.2f} {y:.2f}h0" stroke="{colour}"><title>{html.escape(label)}</title></path>'
            for x, y, label in places
        ]
    if level is not None and isfinite(level[1]):
        drawn.append(_line(_y(level[1], low, high), "level"))
        names.append(f'<span style="color:#777">&#9644; {html.escape(level[0])} {level[1]:.6g}</span>')
    body = "\n".join(drawn)
    marks = "".join(
        f'<span style="top:{100 * _y(tick, low, high) / _HEIGHT:.1f}%">{text}</span>' for text, tick in ticks.items()
    )
    return (
        f"<p>{' '.join(names)}. Wheel: zoom. Drag: move. Double click: all.</p>\n"
        f'<figure><div class="y">{marks}</div>\n'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" data-margin="{_MARGIN:g}" '
        f'data-low="{across[0]:g}" data-high="{across[1]:g}" data-unit="{html.escape(unit)}">\n{body}\n</svg>\n'
        f'<div class="x"><b>{across[0]:.3g}{html.escape(unit)}</b><span>{html.escape(along)}</span>'
        f"<b>{across[1]:.3g}{html.escape(unit)}</b></div></figure>"
    )


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    """The least and the largest, a little apart."""
    low, high = (float(min(numbers)), float(max(numbers))) if numbers else (0.0, 1.0)
    return (low, high) if high > low else (low - (abs(low) * 1e-3 or 1.0), high + (abs(high) * 1e-3 or 1.0))


def _ticks(low: float, high: float) -> dict[str, float]:
    """Round numbers between two, by how they are written.

    >>> list(_ticks(0.9995, 1.00003)), list(_ticks(1e6, 33e6))
    (['0.9995', '0.9996', '0.9997', '0.9998', '0.9999', '1.0000'], ['1e+07', '2e+07', '3e+07'])
    """
    power = 10.0 ** floor(log10((high - low) / 3))
    step = next(power * size for size in (5, 2, 1) if (high - low) / (power * size) >= 3)
    numbers = [
        round(number * step, 12 - floor(log10(step))) for number in range(ceil(low / step), floor(high / step) + 1)
    ]
    places = max(0, -floor(log10(step)))
    largest = max(abs(low), abs(high))
    is_plain = 1e-3 <= largest < 1e6
    digits = floor(log10(largest)) - floor(log10(step))
    return {f"{tick:.{places}f}" if is_plain else f"{tick:.{digits}e}": tick for tick in numbers}


def _line(y: float, name: str = "grid") -> str:
    return f'<line class="{name}" x1="0" x2="{_WIDTH:g}" y1="{y:.2f}" y2="{y:.2f}"/>'


def _x(place: float, low: float, high: float) -> float:
    return _MARGIN + (_WIDTH - 2 * _MARGIN) * (place - low) / (high - low)


def _y(value: float, low: float, high: float) -> float:
    return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (value - low) / (high - low)
