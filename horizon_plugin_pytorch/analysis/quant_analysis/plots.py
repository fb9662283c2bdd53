"""Pictures of what operators give: histograms, and bars over channels and positions. They need no package."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page

_SIDES = ("baseline", "analysis")
_BINS, _BARS = 200, 32


def plot_histograms(name: str, sides: Sequence[Sequence[Tensor]]) -> str:
    """A page with the distribution of each output, of both models over one range.

    >>> page = plot_histograms("<conv>", [[torch.randn(100)], [torch.randn(100)]])
    >>> "&lt;conv&gt;" in page, page.count("<polyline")
    (True, 2)
    """
    parts = []
    for number in range(max(map(len, sides), default=0)):
        given = {side: tensors[number] for side, tensors in zip(_SIDES, sides, strict=False) if number < len(tensors)}
        finite = {side: x.float()[x.float().isfinite()] for side, x in given.items()}
        known = [x for x in finite.values() if x.numel()]
        if not known:
            parts.append(f"<p>output {number} has no finite number.</p>")
            continue
        low, high = min(float(x.min()) for x in known), max(float(x.max()) for x in known)
        high = high if high > low else low + 1e-6 + abs(low) * 1e-6
        curves = []
        for side, x in finite.items():
            counts = torch.histc(x, _BINS, low, high).tolist()
            width = (high - low) / _BINS
            labels = [
                f"{side}, {low + i * width:.5g} to {low + (i + 1) * width:.5g}: {c:g}" for i, c in enumerate(counts)
            ]
            middles = [low + (i + 0.5) * width for i in range(_BINS)]
            curves.append(Curve(side, [math.log10(1 + c) for c in counts], labels, middles))
        title = f"<h2>output {number}, from {low:.7g} to {high:.7g}; log10(1 + count)</h2>"
        parts += [title, chart(curves, "value")]
    return page(name, *parts)


def plot_bars(name: str, sides: Sequence[Sequence[Tensor]]) -> str:
    """A page with the largest magnitude of each output over channels (the second axis) and positions, as bars.

    >>> plot_bars("conv", [[torch.randn(1, 3, 4, 4)]]).count("<polygon") >= 3 * 16
    True
    """
    parts = []
    for side, tensors in zip(_SIDES, sides, strict=False):
        for number, x in enumerate(tensors):
            parts += [f"<h2>{side}, output {number}: {html.escape(str(tuple(x.shape)))}</h2>", _bars(_magnitudes(x))]
    return page(name, *parts)


def _magnitudes(x: Tensor) -> Tensor:
    """The largest magnitudes in a grid of channels and positions, at most as many as can be seen."""
    x = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    if x.dim() < 2:
        x = x.reshape(1, -1)
    elif x.dim() > 2 or x.shape[0] != 1:
        x = x.transpose(0, 1).flatten(1) if x.dim() > 1 else x
    if not x.numel():
        return torch.zeros(1, 1)
    size = min(x.shape[0], _BARS), min(x.shape[1], _BARS)
    return torch.nn.functional.adaptive_max_pool2d(x[None], size)[0]


def _bars(heights: Tensor) -> str:
    """Bars that are seen from above and from the side, the nearest last."""
    rows, columns = heights.shape
    largest = float(heights.max()) or 1.0
    wide, deep, tall = 900.0 / (columns + rows / 2), 450.0 / (columns + rows), 160.0
    drawn = []
    for row in range(rows):
        for column in range(columns):
            height = float(heights[row, column])
            x = column * wide + (rows - 1 - row) * wide / 2 + 10
            y = 180 + row * deep
            top = y - tall * height / largest
            shade = int(230 - 180 * height / largest)
            face = f"{x:.1f},{top:.1f} {x + wide * 0.8:.1f},{top:.1f} {x + wide * 0.8:.1f},{y:.1f} {x:.1f},{y:.1f}"
            drawn.append(
                f'<polygon points="{face}" fill="rgb({shade},{shade},240)" stroke="#345"><title>channel {row}, '
                f"position {column}: {height:.5g}</title></polygon>"
            )
    height = 180 + rows * deep + 10
    return f'<svg viewBox="0 0 1000 {height:.0f}">{"".join(drawn)}</svg>'
