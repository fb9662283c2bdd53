"""Sums of products of bytes on the CPU's integer instructions.

torch has such kernels (oneDNN's), but not in its public API: this file alone calls them. On a CPU without dot products
of bytes (VNNI) they add two products in 16 bits, which saturate, so that nothing is taken on trust: before the first
use in a process they must give the exact sums of operands that would saturate. On CPUs where they do not, they are
tried once more with inputs from 0 to 127, as they are behind a ReLU: two products of these fit. Then such layers run on
them, and the convolutions between them on float32 sums of bytes (`FloatConv`). Where they fail again, and where
they are turned off, layers run on float32 as `accumulator.py` has it. The integers are the same.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.untraced import untraced

VARIABLE = "HORIZON_INTEGER_KERNELS"
_OFF = frozenset({"0", "off", "no", "false"})
_ON = frozenset({"", "1", "on", "yes", "true"})
# What lies behind `os.environ`, which takes longer to say that a variable is not set than a layer has time for.
_ENVIRON = os.environ
_ENVIRONMENT: Any = getattr(_ENVIRON, "_data", None)
_KEY: Any = getattr(os.environ, "encodekey", str)(VARIABLE)


@dataclass(frozen=True)
class Walk:
    """How a convolution walks over images of two axes."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class PackedConv:
    """Weights in the layout that the kernel wants, for inputs with one zero point.

    Args:
        weight: int8, [out, in / groups, two axes].
        zero_point: the byte of the input that stands for 0; padding is made of it.
        shape: of an input, for which the layout is chosen. Others are taken too, some at the cost of another layout.
    """

    def __init__(self, weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> None:
        self._zero_point = zero_point
        self._scale = torch.ones(len(weight), dtype=torch.float32, device=weight.device)
        self._zeros = torch.zeros(len(weight), dtype=torch.long, device=weight.device)
        self._geometry = list(walk.stride), list(walk.padding), list(walk.dilation), walk.groups
        self._packed = torch.ops.onednn.qconv_prepack(weight, self._scale, 1.0, zero_point, *self._geometry, shape)

    def taken(self, x: Tensor) -> Tensor:
        """Integers of a byte as the other methods want them: uint8, channels last, the zero point added.

        Those that are uint8 have it already.
        """
        # First the layout, then the type: to do both at once takes torch up to twice as long.
        return _as_unsigned(x.contiguous(memory_format=torch.channels_last), self._zero_point)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Sums and bias in float32, channels last: exact while they stay below 2**24, with the zero point in `x` too.

        Kernels on AMX (oneDNN 3.12) take the zero point off sums that are float32 numbers already; see `fits_kernel`.

        Args:
            x: as `taken` gives it.
        """
        return torch.ops.onednn.qconv2d_pointwise(
            x, 1.0, self._zero_point, self._packed, self._scale, self._zeros, bias, *self._geometry,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
        """``clamp(round(float32(float32(acc * scale) + offset)), low, high)`` of the sums: int8, channels last."""
        return torch.ops.onednn.qconv2d_pointwise(
            x, 1.0, self._zero_point, self._packed, scale, self._zeros, offset, *self._geometry,
            1.0, 0, torch.int8, *_limiting(low, high), "",
        )  # fmt: skip


class PackedLinear:
    """Weights of a linear layer, with the methods of `PackedConv` on rows.

    Args:
        weight: int8, [out, in].
        rows: of an input, for which the layout is chosen.
    """

    def __init__(self, weight: Tensor, zero_point: int, rows: int) -> None:
        self._zero_point, self._rows = zero_point, rows
        self._scale = torch.ones(len(weight), dtype=torch.float32, device=weight.device)
        self._zeros = torch.zeros(len(weight), dtype=torch.long, device=weight.device)
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [rows, weight.shape[1]])

    def of_channels(self, weight: Tensor) -> PackedLinear:
        """A layer of other weights, for the same rows."""
        return PackedLinear(weight, self._zero_point, self._rows)

    def taken(self, x: Tensor) -> Tensor:
        return _as_unsigned(x.contiguous(), self._zero_point)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, self._zero_point, self._packed, self._scale, self._zeros, bias,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, self._zero_point, self._packed, scale, self._zeros, offset,
            1.0, 0, torch.int8, *_limiting(low, high), "",
        )  # fmt: skip


def _as_unsigned(x: Tensor, zero_point: int) -> Tensor:
    """Integers of a byte with the zero point added, as kernels take them. Those that are uint8 have it already."""
    if x.dtype is torch.uint8:
        return x
    unsigned = (x if x.dtype is torch.int8 else x.to(torch.int8)).view(torch.uint8)
    return unsigned.bitwise_xor(128) if zero_point else unsigned  # the zero point is 128


def _limiting(low: int, high: int) -> tuple[str, list[float]]:
    """What a kernel does to its output, and the arguments of that."""
    return ("none", []) if (low, high) == (-128, 127) else ("hardtanh", [float(low), float(high)])


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of two int8 matrices, in int32.

    Args:
        out: memory for it.
    """
    if a.shape[1] == 1:  # torch 2.13 gives numbers that were in the memory before
        return torch.mul(a.int(), b.int(), out=out)
    if len(a) == 1:  # one row or column may have any stride, from which the kernel takes how its numbers lie
        a = a.contiguous().as_strided(a.shape, (a.shape[1], 1))
    elif 0 in a.stride():  # a row that is there several times, which the kernel takes for others
        a = a.contiguous()
    if b.shape[1] == 1:
        b = b.contiguous().as_strided(b.shape, (1, len(b)))
    elif 0 in b.stride():
        b = b.contiguous()
    return torch._int_mm(a, b, out=out)


class Packed(Protocol):
    """What a convolution or a linear layer can do: see `PackedConv`."""

    def taken(self, x: Tensor) -> Tensor: ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """The kernels that are proved and used: `PackedConv` and the others, or such with their arguments."""

    conv: Callable[[Tensor, Walk, int, torch.Size], Packed] = PackedConv
    multiply: Callable[..., Tensor] = multiply
    linear: Callable[[Tensor, int, int], Packed] = PackedLinear


# Input channels, output channels, kernel, walk, image: those of real layers, and odd ones. oneDNN has a kernel of its
# own for each kind.
_CONVOLUTIONS = {
    "dense 3x3": (64, 64, (3, 3), Walk((1, 1), (1, 1)), (6, 7)),
    "dense 3x3, long sums": (513, 17, (3, 3), Walk((2, 2), (1, 1)), (4, 4)),
    "three channels 7x7": (3, 20, (7, 7), Walk((2, 2), (3, 3)), (15, 9)),
    "pointwise": (96, 24, (1, 1), Walk(), (5, 5)),
    "pointwise, odd": (37, 5, (1, 1), Walk((2, 1)), (5, 3)),
    "dilated 5x3": (19, 33, (5, 3), Walk((1, 2), (2, 1), (2, 1)), (9, 8)),
    "two groups": (34, 10, (3, 3), Walk((1, 1), (1, 1), groups=2), (5, 5)),
    "many groups": (48, 64, (3, 3), Walk((1, 1), (0, 1), groups=16), (5, 5)),
    "depthwise 3x3": (50, 50, (3, 3), Walk((1, 1), (1, 1), groups=50), (7, 6)),
    "depthwise 5x5, stride 2": (64, 64, (5, 5), Walk((2, 2), (2, 2), groups=64), (9, 9)),
    "depthwise, more outputs": (6, 12, (3, 3), Walk((1, 1), (1, 1), groups=6), (5, 5)),
    "one row": (16, 16, (1, 5), Walk((1, 1), (0, 2)), (1, 33)),
}
_PRODUCTS = ((33, 1025, 40), (1, 64, 16), (17, 5, 9), (64, 384, 128), (3, 1, 5), (2, 2, 3), (5, 3, 1))
# Of an operand with integers between two limits.
_FILLS = {
    "largest": lambda shape, low, high, generator: torch.full(shape, float(high), dtype=torch.float32),
    "ends": lambda shape, low, high, generator: (
        low + (high - low) * torch.randint(2, shape, generator=generator).float()
    ),
    "high": lambda shape, low, high, generator: torch.randint(high - 7, high + 1, shape, generator=generator).float(),
    "small": lambda shape, low, high, generator: torch.randint(max(low, -1), 2, shape, generator=generator).float(),
}
# Of the input and of the weights. The last has small sums, whose terms with a zero point are large.
_PATTERNS = (("largest", "largest"), ("ends", "ends"), ("small", "high"))


class Reach(enum.Enum):
    """The inputs for which kernels are exact."""

    BYTES = "all inputs of 8 bits"
    SEVEN_BITS = "inputs from 0 to 127, as behind a ReLU"
    NOTHING = "no inputs"


def disproof(kernels: Kernels, reach: Reach = Reach.BYTES) -> str:
    """What shows that the kernels are not exact on this machine; empty if they give every sum.

    Args:
        reach: the inputs that are tried. Those of 7 bits are tried in convolutions only.

    >>> disproof(Kernels(multiply=lambda a, b, out=None: (a.float() @ b.float()).clamp(-32768, 32767).int()))
    'a product of 33x1025 by 1025x40 matrices, largest by largest, has wrong sums'
    """
    return _first(_failures(kernels, reach))


def products_disproof(kernels: Kernels) -> str:
    """What shows that products of matrices are not exact on this machine; empty if they are."""
    return _first(_wrong_products(kernels, torch.Generator().manual_seed(0)))


def rounding_disproof(kernels: Kernels, reach: Reach = Reach.BYTES) -> str:
    """What shows that a kernel's own requantization is not that of `PackedConv.rounded`; empty if it is."""
    return _first(_wrong_roundings(kernels, reach))


def linear_disproof(kernels: Kernels, reach: Reach = Reach.BYTES) -> str:
    """What shows that linear layers have wrong sums, or are rounded otherwise; empty if they have neither."""
    return _first(_wrong_linear_layers(kernels, reach))


def _first(failures: Iterator[str]) -> str:
    try:
        return next(failures, "")
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        return f"torch refuses a call: {str(error).splitlines()[0]}"


def _failures(kernels: Kernels, reach: Reach) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    lowest = -128 if reach is Reach.BYTES else 0
    if reach is Reach.BYTES:
        yield from _wrong_products(kernels, generator)
    for name, (channels, outputs, kernel, walk, image) in _CONVOLUTIONS.items():
        for inputs, weights in _PATTERNS:
            x = _FILLS[inputs]((2, channels, *image), lowest, 127, generator)
            w = _limited(_FILLS[weights]((outputs, channels // walk.groups, *kernel), -128, 127, generator))
            for zero_point in _zero_points(inputs, reach):
                if not _is_exact(kernels, x, w, walk, zero_point):
                    yield f"a convolution ({name}), {inputs} by {weights}, zero point {zero_point}, has wrong sums"


def _zero_points(inputs: str, reach: Reach) -> tuple[int, ...]:
    if reach is Reach.SEVEN_BITS:
        return (0,)
    return (128, 0) if inputs == "largest" else (128,)


def _wrong_products(kernels: Kernels, generator: torch.Generator) -> Iterator[str]:
    for (inputs, weights), (rows, length, columns) in itertools.product(_PATTERNS, _PRODUCTS):
        a = _FILLS[inputs]((rows, length), -128, 127, generator)
        b = _FILLS[weights]((columns, length), -128, 127, generator)
        left, right = a.to(torch.int8), b.to(torch.int8).t()
        exact = a.double() @ b.double().t()  # of columns, which lie in memory as such, and of rows
        if not all(_multiplies(kernels, left, x, exact) for x in (right, right.contiguous())):
            yield f"a product of {rows}x{length} by {length}x{columns} matrices, {inputs} by {weights}, has wrong sums"


def _multiplies(kernels: Kernels, left: Tensor, right: Tensor, exact: Tensor) -> bool:
    """Is a product of matrices exact, in memory of its own and in that which it is given?"""
    into = torch.full(exact.shape, -1, dtype=torch.int32)
    given = kernels.multiply(left, right), kernels.multiply(left, right, into)
    return all(torch.equal(found.double(), exact) for found in given)


def _limited(weight: Tensor) -> Tensor:
    """Weights that are small enough for sums of bytes from 0 to 255, with a bias, to stay below 2**24."""
    above = weight.clamp(min=0).flatten(1).sum(1).max()
    below = weight.clamp(max=0).flatten(1).sum(1).min()
    largest = 255 * float(torch.maximum(above, -below)) + len(weight)
    return weight.mul(min((1 << 24) / largest, 1.0)).trunc_()


def _is_exact(kernels: Kernels, x: Tensor, weight: Tensor, walk: Walk, zero_point: int) -> bool:
    """Does the kernel give the sums, as float32 numbers?"""
    exact = F.conv2d(x.double(), weight.double(), None, walk.stride, walk.padding, walk.dilation, walk.groups)
    bias = torch.arange(len(weight)).float() - 3
    exact += bias.reshape(-1, 1, 1)
    conv = kernels.conv(weight.to(torch.int8), walk, zero_point, x.shape)
    return torch.equal(conv(conv.taken(x), bias), exact.float())


def _wrong_linear_layers(kernels: Kernels, reach: Reach) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    lowest = -128 if reach is Reach.BYTES else 0
    for (inputs, weights), (rows, length, outputs) in itertools.product(_PATTERNS, _PRODUCTS):
        a = _FILLS[inputs]((rows, length), lowest, 127, generator)
        weight = _limited(_FILLS[weights]((outputs, length), -128, 127, generator))
        exact, bias = a.double() @ weight.double().t(), torch.arange(outputs).float() - 3
        for zero_point in _zero_points(inputs, reach):
            linear = kernels.linear(weight.to(torch.int8), zero_point, rows)
            if not torch.equal(linear(linear.taken(a), bias), (exact + bias).float()):
                yield f"a linear layer, {rows}x{length} by {length}x{outputs}, {inputs} by {weights}, has wrong sums"
    for (rows, length, outputs), (zero_point, low, high) in itertools.product(_PRODUCTS, _limits_tried(reach)):
        x, weight = _random_operands(torch.Size([rows, length]), torch.Size([outputs, length]), reach, generator)
        sums = (x - zero_point).double() @ weight.double().t()
        linear = kernels.linear(weight.to(torch.int8), zero_point, rows)
        if not _rounds(linear, x.to(torch.uint8), sums.t(), low, high, generator):
            yield f"a linear layer, {rows}x{length}, limits {low} and {high}, is rounded otherwise"


def _wrong_roundings(kernels: Kernels, reach: Reach) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    for name, (channels, outputs, kernel, walk, image) in _CONVOLUTIONS.items():
        for zero_point, low, high in _limits_tried(reach):
            shapes = torch.Size([2, channels, *image]), torch.Size([outputs, channels // walk.groups, *kernel])
            x, weight = _random_operands(*shapes, reach, generator)
            walked = walk.stride, walk.padding, walk.dilation, walk.groups
            sums = F.conv2d((x - zero_point).double(), weight.double(), None, *walked)
            taken = x.to(torch.uint8).contiguous(memory_format=torch.channels_last)
            conv = kernels.conv(weight.to(torch.int8), walk, zero_point, x.shape)
            if not _rounds(conv, taken, sums.transpose(0, 1), low, high, generator):
                yield f"a convolution ({name}), limits {low} and {high}, zero point {zero_point}, is rounded otherwise"


def _limits_tried(reach: Reach) -> tuple[tuple[int, int, int], ...]:
    """Zero points, and limits of outputs."""
    signed = 128 if reach is Reach.BYTES else 0
    return (0, 0, 127), (signed, -128, 127), (signed, 0, 96)


def _random_operands(
    shape: torch.Size, weight: torch.Size, reach: Reach, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Bytes as kernels take them, and weights."""
    x = torch.randint(256 if reach is Reach.BYTES else 128, shape, generator=generator)
    return x, torch.randint(-128, 128, weight, generator=generator)


def _rounds(packed: Packed, taken: Tensor, sums: Tensor, low: int, high: int, generator: torch.Generator) -> bool:
    """Does a kernel requantize as `PackedConv.rounded` says?

    Args:
        sums: with the output channels first.
    """
    by_channel = sums.float().flatten(1)
    outputs = len(by_channel)
    scale = torch.rand(outputs, generator=generator, dtype=torch.float32).add_(0.2)
    scale = scale * 100 / by_channel.abs().amax(1).clamp_(min=1)
    # The first sum of each channel lands on a half if it is rounded after the product and after the offset, and
    # rarely otherwise. So an order of steps that is not this one shows.
    half = torch.randint(low, high, (outputs,), generator=generator).float() + 0.5
    offset = half - by_channel[:, 0] * scale
    expected = by_channel.mul(scale.unsqueeze(1)).add_(offset.unsqueeze(1)).round_().clamp_(low, high)
    got = packed.rounded(taken, scale, offset, low, high)
    return got.dtype == torch.int8 and torch.equal(got.transpose(0, 1).flatten(1).float(), expected)


Proof = Callable[[Kernels, Reach], str]


class _Choice:
    """Whether the kernels are used in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted: bool | None = None  # None: as the environment has it
        self._found: dict[tuple[Proof, Reach], str] = {}  # by the proofs that were tried
        self._reach: Reach | None = None  # None: not tried yet

    def want(self, is_wanted: bool | None) -> None:
        self._is_wanted = is_wanted

    @property
    def is_set(self) -> bool:
        return self._is_wanted is not None

    @property
    def is_wanted(self) -> bool:
        if self._is_wanted is not None:
            return self._is_wanted
        if os.environ is _ENVIRON and _ENVIRONMENT is not None and _KEY not in _ENVIRONMENT:
            return True
        return _asked_for(os.environ.get(VARIABLE, ""))

    @property
    def reach(self) -> Reach:
        """The inputs for which the kernels are exact on this machine."""
        if self._reach is None:
            tries = (reach for reach in (Reach.BYTES, Reach.SEVEN_BITS) if not self.found(disproof, reach))
            self._reach = next(tries, Reach.NOTHING)
        return self._reach

    def found(self, proof: Proof, reach: Reach) -> str:
        """What a proof found; it is tried once in a process."""
        key = (proof, reach)
        if key not in self._found:
            with self._lock:
                if key not in self._found:
                    self._found[key] = _try(proof, reach)
        return self._found[key]


@functools.cache
def _asked_for(value: str) -> bool:
    word = value.strip().lower()
    if word not in _OFF | _ON:
        raise ValueError(f"The environment variable {VARIABLE} is {value!r}: say 1 to use integer kernels, 0 not to.")
    return word in _ON


@untraced
def _try(proof: Proof, reach: Reach) -> str:
    modes: Any = torch.utils._python_dispatch._disable_current_modes()
    with modes, torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        return proof(Kernels(), reach)


_choice = _Choice()


def use_integer_kernels(is_wanted: bool | None) -> None:
    """Turn integer kernels off, on, or back to what the environment variable says (None), in this process.

    They are used only where they are exact, whatever is wanted: see `integer_kernels`.

    >>> use_integer_kernels(False)
    >>> integer_kernels()
    'off: turned off by use_integer_kernels'
    >>> use_integer_kernels(None)
    """
    _choice.want(is_wanted)


def kernel_reach() -> Reach:
    """The inputs for which layers run on integer kernels: wanted, and proved exact by the first call in a process."""
    return _choice.reach if _choice.is_wanted else Reach.NOTHING


def proved_reach() -> Reach:
    """The inputs for which the kernels are exact, whether they are wanted or not; for layers that run on them."""
    return _choice.reach


def are_kernels_used() -> bool:
    """Do any layers run on integer kernels? Asked by each of them in each forward."""
    return _choice.is_wanted and (_choice._reach or _choice.reach) is not Reach.NOTHING


def has_products() -> bool:
    """Is `multiply` proved, and on a kernel? Where bytes have no kernel, torch multiplies number by number."""
    return kernel_reach() is Reach.BYTES


def has_linear() -> bool:
    """Is `PackedLinear` proved for all bytes? Only then do layers run on it; the first call in a process tries it."""
    return _choice.reach is Reach.BYTES and not _choice.found(linear_disproof, Reach.BYTES)


def are_kernels_rounding() -> bool:
    """May kernels requantize their sums themselves? Asked where they are used; the first call in a process tries it."""
    return not _choice.found(rounding_disproof, _choice.reach)


def integer_kernels() -> str:
    """Whether layers run on integer kernels in this process, and why not if they do not."""
    if not _choice.is_wanted:
        is_set = _choice.is_set
        return f"off: turned off by {'use_integer_kernels' if is_set else f'the environment variable {VARIABLE}'}"
    reach, wrong = _choice.reach, _choice.found(disproof, Reach.BYTES)
    if reach is Reach.NOTHING:
        return f"off: not exact on this machine ({wrong}); layers run on float32, with the same integers"
    rounding = _choice.found(rounding_disproof, reach)
    requantized = f"; requantized on float32 ({rounding})" if rounding else ""
    if reach is Reach.BYTES:
        linear = _choice.found(linear_disproof, Reach.BYTES)
        products = f"; linear layers on products of matrices ({linear})" if linear else ""
        return f"on: oneDNN's, proved exact on this machine{requantized}{products}"
    return (
        f"on: oneDNN's, proved exact on this machine for {reach.value}{requantized}; other layers run on float32, with "
        f"the same integers (for these the kernels are not exact: {wrong})"
    )
