"""The call of a layer that ran before on inputs of the same kind: nothing is asked again that cannot have changed.

Small layers take less time than the questions before them: what scale the inputs have, whether somebody wrote to the
weights, who runs the model and who watches. Here are those whose answers can change, in as few steps as there can be;
`PlacedModule` asks who runs and who watches.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import sharing
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.qtensor import QTensor, byte_qtensor
from horizon_plugin_pytorch.statistics.cache import Cache


class _Kind:
    """Scale, format, range and number of axes of a tensor of bytes."""

    __slots__ = ("dim", "format", "range", "scale")

    def __init__(self, x: Any) -> None:
        self.scale, self.format, self.range, self.dim = x._scale.item(), x._format, x._range, x._bytes.values.dim()

    def is_of(self, x: Any) -> bool:
        """Is a tensor of this kind, with its bytes here?"""
        if type(x) is not QTensor:
            return False
        own = x.__dict__  # quicker than as attributes
        integers, scale = own.get("_bytes"), own["_scale"]
        if integers is None:
            return False
        if sharing.is_known(x):  # a view, say
            x._require_unchanged()
        if own["_format"] is not self.format or own.get("_range") != self.range or integers.values.dim() != self.dim:
            return False
        return scale.numel() == 1 and scale.is_cpu and scale.item() == self.scale


class Held:
    """The tensors of a module that something was made of, while they are what they were.

    Args:
        names: of the module's buffers.
        kept: where it lies, for the numbers that these hold.
    """

    __slots__ = ("_kept", "_made", "_names")

    def __init__(self, names: tuple[str, ...], kept: Cache, made: Any) -> None:
        self._names, self._kept, self._made = names, kept, made

    def is_of(self, module: nn.Module) -> bool:
        """Do the module's buffers hold these numbers?"""
        buffers = module._buffers
        found = [x for name in self._names if (x := buffers.get(name)) is not None]
        return self._kept.known(found) is self._made


class QuickCall:
    """What a layer does with bytes of one kind.

    Args:
        on_bytes: the layer on integer kernels.
        inputs: of the call that this one repeats; their scales are numbers on the CPU.
        out: what that gave.
        held: what the layer was made of; None if nobody else knows its tensors.
    """

    __slots__ = ("_format", "_held", "_kinds", "_on_bytes", "_one_call", "_range")

    def __init__(self, on_bytes: Any, inputs: tuple[QTensor, ...], out: QTensor, held: Held | None) -> None:
        self._on_bytes, self._held = on_bytes, held
        self._one_call: fp.OneCall | None = None
        self._kinds = tuple(map(_Kind, inputs))
        self._format, self._range = out._format, out._range

    def __call__(self, module: nn.Module, args: tuple) -> QTensor | None:
        """The output; None if the layer has to be called as a whole."""
        kinds = self._kinds
        if len(args) != len(kinds):
            return None
        for kind, x in zip(kinds, args, strict=True):
            if not kind.is_of(x):
                return None
        if not fp.are_kernels_used() or (self._held is not None and not self._held.is_of(module)):
            return None
        x = args[0]._bytes.values
        one_call = self._one_call  # another thread may find another
        grid = None if one_call is None else one_call(x)
        if grid is None:
            grid = self._on_bytes(x, args[1]._bytes.values if len(args) == 2 else None)
            if grid is None:
                return None
            if len(args) == 1 and isinstance(self._on_bytes, fp.ByteLayer):
                self._one_call = self._on_bytes.as_one_call(x)
        scale: Any = module._buffers["scale"]
        out = byte_qtensor(ByteTensor(grid), scale, self._format)
        out._range = self._range
        return out

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the module finds its own."""

    def __reduce__(self) -> tuple:
        return type(None), ()


def is_known_by_a_number(x: QTensor) -> bool:
    """Has a tensor bytes, and a scale that is one number on the CPU?"""
    return x._bytes is not None and x._scale.numel() == 1 and x._scale.is_cpu
