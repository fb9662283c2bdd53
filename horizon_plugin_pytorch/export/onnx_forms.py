"""Other forms in which values of a file exist beside their float32 numbers; what nobody reads is not written.

Layers of 16-bit integers end in float64. What moves is what they cost, so that large ones are written in blocks of
channels, each of which stays in a processor's cache until the next layer has read it.
"""

from __future__ import annotations

from typing import NamedTuple

from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph

_BLOCK = 16  # channels, as many as ONNX Runtime's convolutions take at once
_IN_CACHE = 65536  # numbers


class Integers(NamedTuple):
    """int32 numbers that are the value when they are clamped to a range."""

    name: str
    low: int
    high: int


class Block(NamedTuple):
    """Channels of a value, side by side in its second axis."""

    name: str
    size: int


def note_integers(g: OnnxGraph, x: str, integers: Integers) -> None:
    """Say that a value is made of int32 numbers."""
    g.once(("integers", x), lambda: integers)


def integers_of(g: OnnxGraph, x: str) -> Integers | None:
    """The int32 numbers that a value is made of, if it is."""
    return g.made(("integers", x))


def block_size(g: OnnxGraph, channels: int, places: int) -> int:
    """How many channels of an image are written at once."""
    if not g.is_sized or 2 * channels * places <= 3 * _IN_CACHE:
        return channels
    return max(_IN_CACHE // places // _BLOCK, 1) * _BLOCK


def joined(g: OnnxGraph, blocks: list[Block]) -> str:
    """The value that blocks of channels make together."""
    if len(blocks) == 1:
        return blocks[0].name
    out = g.node("Concat", *(block.name for block in blocks), axis=1)
    g.once(("blocks", out), lambda: blocks)
    return out


def blocks_of(g: OnnxGraph, x: str, channels: int) -> list[Block]:
    """The blocks of channels that a value is made of."""
    return g.made(("blocks", x)) or [Block(x, channels)]
