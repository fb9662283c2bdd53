"""Sampling and scattering as standard ONNX operators, mirroring `fixed_point.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.deploy.onnx_fixed_point import lowers
from horizon_plugin_pytorch.deploy.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.sampling import FAR, base_positions, reflection_of

_WIDE = torch.float64


def _number(g: OnnxGraph, value: float) -> str:
    return g.scalar(value, _WIDE)


def _within_image(g: OnnxGraph, position: str, size: int, bits: int, padding_mode: str, align_corners: bool) -> str:
    """As `fixed_point.sampling.within_image`."""
    unit = 1 << bits
    if padding_mode == "zeros":
        return g.clip(position, -unit, size * unit, _WIDE)
    if padding_mode == "reflection":
        low, span = reflection_of(size, bits, align_corners)
        distance = g.node("Abs", g.node("Sub", position, _number(g, low)))
        turned = g.node("Mod", distance, _number(g, 2 * span), fmod=1)
        position = g.node("Add", g.node("Min", turned, g.node("Sub", _number(g, 2 * span), turned)), _number(g, low))
    return g.clip(position, 0, (size - 1) * unit, _WIDE)


def round_positions(g: OnnxGraph, position: str, bits: int) -> str:
    """As `fixed_point.sampling.round_positions`."""
    return g.node("Round", position) if bits == 0 else g.node("Floor", g.node("Add", position, _number(g, 0.5)))


class Pixels:
    """An image [N, C, H, W] as rows of channels, with zeros around it: one pixel before and two after each line."""

    def __init__(self, g: OnnxGraph, image: str, shape: list[int]) -> None:
        self.graph, (self.batch, self.channels, height, width) = g, shape
        self.height, self.width = height + 3, width + 3
        padded = g.node("Pad", image, g.constant([0, 0, 1, 1, 0, 0, 2, 2], torch.int64, "pads"))
        self.rows = g.reshape(g.node("Transpose", padded, perm=[0, 2, 3, 1]), [-1, self.channels])

    def at(self, x: str, y: str, first: str) -> str:
        """Rows at whole positions (float64) of the images whose first rows are given."""
        g = self.graph
        line = g.node("Mul", g.node("Add", y, _number(g, 1)), _number(g, self.width))
        row = g.node("Add", g.node("Add", line, g.node("Add", x, _number(g, 1))), first)
        return g.node("Gather", self.rows, g.cast(row, torch.int64), axis=0)

    def between(self, x: str, y: str, first: str, bits: int) -> tuple[str, torch.dtype]:
        """The exact sum of four pixels times their weights, in ``1 / 4**bits`` steps, and its type."""
        g, unit = self.graph, float(1 << bits)
        dtype = torch.float32 if bits <= 8 else _WIDE
        whole, weights = [], []
        for position in (x, y):
            floor = g.node("Floor", g.node("Mul", position, _number(g, 1 / unit)))
            right = g.node("Sub", position, g.node("Mul", floor, _number(g, unit)))
            whole.append([floor, g.node("Add", floor, _number(g, 1))])
            weights.append([g.node("Sub", _number(g, unit), right), right])
        total = None
        for i in range(2):
            for j in range(2):
                pixel = self.at(whole[0][i], whole[1][j], first)
                weight = g.node("Mul", weights[0][i], weights[1][j])
                weight = g.node("Unsqueeze", weight, g.constant([-1], torch.int64, "axes"))
                if dtype == _WIDE:
                    pixel = g.cast(pixel, _WIDE)
                else:
                    weight = g.cast(weight, dtype)
                term = g.node("Mul", pixel, weight)
                total = term if total is None else g.node("Add", total, term)
        assert total is not None
        return total, dtype


@lowers("grid_sample", data="q grid")
def grid_sample(
    g: OnnxGraph,
    site: Site,
    q: str,
    grid: str,
    factor: Tensor,
    offset: Tensor,
    is_real: bool,
    is_flow: bool,
    bits: int,
    padding_mode: str,
    align_corners: bool,
) -> str:
    batch, _, height, width = site.input_shape
    wide = g.cast(grid, _WIDE)
    if is_real:
        wide = g.node("Where", g.node("IsNaN", wide), _number(g, -1.0), wide)
    position = g.node("Add", g.node("Mul", wide, g.constant(factor)), g.constant(offset))
    position = round_positions(g, g.clip(position, -FAR, FAR, _WIDE), bits)
    if is_flow:
        base = base_positions(site.output_shape[2], site.output_shape[3], bits, torch.device("cpu"))
        position = g.node("Add", position, g.constant(base))
    x, y = (
        _within_image(
            g, g.node("Gather", position, g.constant(i, torch.int64), axis=-1), size, bits, padding_mode, align_corners
        )
        for i, size in enumerate((width, height))
    )
    pixels = Pixels(g, q, site.input_shape)
    first = torch.arange(batch, dtype=_WIDE).mul_(pixels.height * pixels.width).reshape(-1, 1, 1)
    if bits == 0:
        out = pixels.at(x, y, g.constant(first))
    else:
        total, dtype = pixels.between(x, y, g.constant(first), bits)
        mean = g.node("Mul", total, g.scalar(0.25**bits, dtype))
        out = g.node("Floor", g.node("Add", mean, g.scalar(0.5, dtype)))
        out = out if dtype == torch.float32 else g.cast(out, torch.float32)
    return g.node("Transpose", out, perm=[0, 3, 1, 2])
