"""The compiled passes as functions of tensors, and the proof that their numbers are torch's."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.untraced import is_recorded, untraced

NO_LIMITS = (-math.inf, math.inf)  # of values that nothing clamps

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# How sums of a layer and its output are stored.
_KINDS = {
    "float_16": (torch.float32, torch.int16),
    "float_8": (torch.float32, torch.int8),
    "int_16": (torch.int32, torch.int16),
    "int_8": (torch.int32, torch.int8),
}
_ARGUMENTS = {
    "horizon_range": [_POINTER, _LONG, _POINTER],
    "horizon_rows": [_POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "horizon_clamp": [_POINTER, _LONG, _FLOAT, _FLOAT, _POINTER],
    "horizon_count": [
        _POINTER, _LONG, _LONG, _LONG, _FLOAT, _FLOAT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER,
    ],
    "horizon_round": [_POINTER, _POINTER, _LONG, _FLOAT, _FLOAT, _FLOAT],
    "horizon_round_rows": [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, _FLOAT],
    "horizon_learned": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _FLOAT, _FLOAT, _INT],
    "horizon_errors": [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER],
    "horizon_between": [
        _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, ctypes.c_double, _POINTER,
    ],
    "horizon_reach": [_POINTER, _LONG, _LONG],
    "horizon_halves": [_POINTER, _LONG, _INT, _POINTER, _POINTER],
    **{
        f"horizon_finish_{name}": [
            _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_double,
            ctypes.c_double, _POINTER,
        ]
        for name in _KINDS
    },
    **{
        f"horizon_settle_{name}": [
            _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _FLOAT, _POINTER,
        ]
        for name in _KINDS
    },
}  # fmt: skip
_RESULTS = {
    "horizon_clamp": _LONG,
    "horizon_reach": _LONG,
    "horizon_between": ctypes.c_double,
    "horizon_learned": ctypes.c_double,
}
BINS = 16384  # of a count, as in `passes.c`
_MOST = 1 << 30  # values of a count: places are 32 bits wide
_SERIAL = 1 << 15  # torch shares larger tensors among its threads, and a pass here has one


class Passes:
    """What `passes.c` has, of a loaded library."""

    def __init__(self, library: Any) -> None:
        self._library = library  # which must stay loaded
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _RESULTS.get(name)
        self._range, self._clamp, self._count = library.horizon_range, library.horizon_clamp, library.horizon_count
        self._round, self._errors, self._reach = library.horizon_round, library.horizon_errors, library.horizon_reach
        self._between, self._halves = library.horizon_between, library.horizon_halves
        self._rows, self._round_rows = library.horizon_rows, library.horizon_round_rows
        self._finishes = {kind: getattr(library, f"horizon_finish_{name}") for name, kind in _KINDS.items()}
        self._settles = {kind: getattr(library, f"horizon_settle_{name}") for name, kind in _KINDS.items()}
        self._learned = library.horizon_learned

    def range(self, x: Tensor) -> tuple[float, float]:
        """``torch.aminmax(x)`` as numbers."""
        ends = (_FLOAT * 2)()
        self._range(x.data_ptr(), x.numel(), ends)
        return ends[0], ends[1]

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x.amin(1), x.amax(1)``."""
        lows, highs = torch.empty((2, len(x)), dtype=torch.float32, device="cpu").unbind(0)
        self._rows(x.data_ptr(), *x.shape, lows.data_ptr(), highs.data_ptr())
        return lows, highs

    def clamp_(self, x: Tensor, low: float, high: float) -> tuple[float, float] | None:
        """``x.clamp_(low, high)``, and ``torch.aminmax`` of before.

        None if there is NaN or infinity: then only a part is clamped, and they are still there.
        """
        ends = (_FLOAT * 2)()
        if self._clamp(x.data_ptr(), x.numel(), low, high, ends) < x.numel():
            return None
        return ends[0], ends[1]

    def count(
        self, x: Tensor, sample: tuple[int, int, int, int], each: int, shift: int, first: int,
        ends: tuple[float, float], limits: tuple[float, float], counts: Tensor,
    ) -> tuple[int, int]:  # fmt: skip
        """Add to `counts` the bins of magnitudes, ``(bits >> shift) - first``; and how many values lie at the ends.

        Args:
            x: finite values, clamped to `limits` before they are counted.
            sample: the first value, how many runs of neighbours, their length, and how far the next one begins from
                each.
            each: for how many values each one counts.
        """
        begin, runs, run, stride = sample
        place, peaks = x.data_ptr() + 4 * begin, (_LONG * 2)()
        self._count(
            place, runs, run, stride, *limits, shift, first, each, (_FLOAT * 2)(*ends), counts.data_ptr(), peaks
        )
        return peaks[0] * each, peaks[1] * each

    def round(self, x: Tensor, step: float, low: float, high: float) -> Tensor:
        """``torch.div(x, step).round_().clamp_(low, high).mul_(step)``."""
        out = torch.empty_like(x)
        self._round(x.data_ptr(), out.data_ptr(), x.numel(), step, low, high)
        return out

    def round_rows(self, x: Tensor, steps: Tensor, low: float, high: float) -> Tensor:
        """The same with a step for each place on the first axis."""
        out, rows = torch.empty_like(x), x.shape[0]
        size = x.numel() // max(rows, 1)
        self._round_rows(x.data_ptr(), out.data_ptr(), rows, size, steps.data_ptr(), low, high)
        return out

    def learned(
        self, grad: Tensor, x: Tensor, y: Tensor, edges: tuple[float, float] | None, is_clip: bool
    ) -> tuple[Tensor, float]:
        """The gradient of values that were rounded, and the sum that a trained scale's follows from.

        The first is ``hardtanh_backward(grad, x, *edges)``, the second ``sum(grad * (y - d))`` with `d` 0 where `x` is
        outside the edges, and inside it `x`, or `y` with `is_clip`; summed in float64.
        """
        to_x = grad if edges is None else torch.empty_like(grad)
        lower, upper = edges or NO_LIMITS
        place = None if edges is None else to_x.data_ptr()
        total = self._learned(grad.data_ptr(), x.data_ptr(), y.data_ptr(), place, x.numel(), lower, upper, int(is_clip))
        return to_x, total

    def errors(self, sums: np.ndarray, edges: np.ndarray, scales: np.ndarray, limits: list[float]) -> np.ndarray:
        """Squared errors of values that are spread evenly within bins: see `search.squared_errors`."""
        size = len(sums)
        found, falls = np.empty_like(scales), np.empty(size + 1)
        ways = (ctypes.c_double * len(limits))(*limits)
        self._errors(
            _address(sums), _address(edges), size, _address(scales), len(scales), ways, len(limits), _address(falls),
            _address(found),
        )  # fmt: skip
        return found

    def between(
        self, scales: np.ndarray, errors: np.ndarray, places: np.ndarray, ends: np.ndarray, points: np.ndarray,
        weight: float,
    ) -> tuple[float, float]:  # fmt: skip
        """The best of the scales that lie between given ones, and its error: see `search.best_scale`."""
        least = ctypes.c_double()
        best = self._between(
            _address(scales), _address(errors), len(scales), _address(places), len(places), _address(ends), len(ends),
            _address(points), len(points), weight, ctypes.byref(least),
        )  # fmt: skip
        return best, least.value

    def reach(self, counts: np.ndarray, wanted: int) -> int:
        """``np.searchsorted(counts.cumsum(), wanted)`` of int32 counts."""
        return self._reach(_address(counts), len(counts), wanted)

    def halves(self, x: Tensor, turned: int) -> tuple[Tensor, Tensor]:
        """``(x ^ turned).to(torch.uint8)`` and ``((x ^ turned) >> 8).to(torch.uint8)`` of int16 numbers."""
        low, high = (torch.empty_like(x, dtype=torch.uint8) for _ in range(2))
        self._halves(x.data_ptr(), x.numel(), turned, low.data_ptr(), high.data_ptr())
        return low, high

    def finish(
        self, sums: Sequence[Tensor], weights: Sequence[int], residual: Tensor | None, ratio: Tensor | None,
        bias: Tensor, factor: Tensor, low: int, high: int, out: Tensor,
    ) -> None:  # fmt: skip
        """Write ``clamp(floor((sum + bias + floor(residual * ratio + 0.5)) * factor + 0.5), low, high)``.

        Args:
            sums: [rows, columns] in float32 or int32, of which each counts as many times as `weights` say.
            residual: int16, or None.
            ratio, bias, factor: one for each column, float64.
            out: int16 or int8.
        """
        rows, columns = out.shape
        pieces = (_POINTER * len(sums))(*(x.data_ptr() for x in sums))
        times = (ctypes.c_double * len(sums))(*weights[: len(sums)])
        added = (None, None) if residual is None or ratio is None else (residual.data_ptr(), ratio.data_ptr())
        self._finishes[sums[0].dtype, out.dtype](
            pieces, times, len(sums), *added, bias.data_ptr(), factor.data_ptr(), rows, columns, low, high,
            out.data_ptr(),
        )  # fmt: skip

    def settle(
        self, sums: Tensor, bias: Tensor | None, residual: Tensor | None, ratio: Tensor | None, factor: Tensor,
        limits: tuple[int, int], out: Tensor,
    ) -> None:  # fmt: skip
        """Write ``((sums + bias + (residual * ratio + 0.5).floor()) * factor).round().clamp(*limits)``, in float32.

        Args:
            sums: [rows, columns] in float32 or int32, in float32's exact range.
            residual: int8, or None.
            bias, ratio, factor: one for each column, float32.
            out: int16 or int8.
        """
        rows, columns = out.shape
        given = (None if x is None else x.data_ptr() for x in (bias, residual, ratio))
        self._settles[sums.dtype, out.dtype](
            sums.data_ptr(), *given, factor.data_ptr(), rows, columns, *limits, out.data_ptr()
        )


def _address(x: np.ndarray) -> int:
    """Where the numbers lie; they follow each other."""
    return x.__array_interface__["data"][0]


def is_plain(x: Tensor) -> bool:
    """Can a pass read the numbers from memory: float32 on the CPU, one after the other, and nobody writes down?"""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.is_contiguous()
        and not x.is_neg()  # a view whose memory holds the other sign, as of an imaginary part
        and not x._is_zerotensor()  # which has no memory
        and not is_recorded()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_serial(x: Tensor) -> bool:
    """Would torch work on the tensor with one thread, as a pass does?"""
    return x.numel() <= _SERIAL or torch.get_num_threads() == 1


def is_countable(x: Tensor) -> bool:
    """Can a pass count it? Torch does so with one thread, whatever its size."""
    return is_plain(x) and 0 < x.numel() < _MOST


# -- the proof

_SIZES = (1, 2, 15, 31, 32, 33, 63, 64, 65, 200, 4095, 4096, 4097, 20000)
_SHIFT, _FIRST = 13, 115 << 10
_ODD = (0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 0.5, -0.5, 1.5, 2.5, -2.5, 6.0, 1.0000001)


@untraced
def disproof(passes: Passes) -> str:
    """What shows that a pass does not give torch's numbers; empty if all do."""
    modes: Any = torch.utils._python_dispatch._disable_current_modes()
    with modes, torch.inference_mode(False), torch.no_grad():
        return next(_failures(passes), "")


def _failures(passes: Passes) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    for size in _SIZES:
        x = torch.randn(size, generator=generator) * 3
        odd = torch.tensor(_ODD)[:size]
        edges = x.clone()
        edges[torch.randperm(size, generator=generator)[: len(odd)]] = odd
        for values in (x, edges, x.relu(), torch.full_like(x, 6.0)):
            yield from _wrong(passes, values)
        for value in (math.nan, math.inf, -math.inf):
            values = x.clone()
            values[-1] = value
            if not _is_same(passes.range(values), torch.aminmax(values)):
                yield f"the range of {size} values with {value}"
            if not all(map(_same, passes.rows(values.view(1, -1)), (values.amin().view(1), values.amax().view(1)))):
                yield f"the rows of {size} values with {value}"
            if passes.clamp_(values, 0.0, 1.0) is not None or bool(values.isfinite().all()):
                yield f"clamping {size} values with {value}"
            if not _same(passes.round(values, 0.1, -128, 127), _rounded(values, 0.1, -128, 127)):
                yield f"rounding {size} values with {value}"
    halves = torch.arange(-140, 140) + 0.5  # where every other order of steps shows
    for step in (0.1, 0.03, 1 / 3, 0.7, 1e-3):
        at = halves * step
        x = torch.cat([at, at.nextafter(at + 1), at.nextafter(at - 1)])
        if not _same(passes.round(x, step, -128, 127), _rounded(x, step, -128, 127)):
            yield f"rounding halves of {step}"
    yield from _wrong_sums(passes, generator)
    yield from _wrong_choices(passes, generator)
    yield from _wrong_layers(passes, generator)
    yield from _wrong_bytes(passes, generator)
    yield from _wrong_gradients(passes, generator)


def _wrong(passes: Passes, x: Tensor) -> Iterator[str]:
    """What is wrong on finite values."""
    ends = torch.aminmax(x)
    if not _is_same(passes.range(x), ends):
        yield f"the range of {x.numel()} values"
    length = min(x.numel(), 100)
    rows = x[: x.numel() // length * length].view(-1, length)
    if not all(map(torch.equal, passes.rows(rows), (rows.amin(1), rows.amax(1)))):
        yield f"the rows of {x.numel()} values"
    for low, high in ((0.0, 6.0), (-1.0, 1.0), (0.0, math.inf)):
        clamped = x.clone()
        if not _is_same(passes.clamp_(clamped, low, high), ends) or not torch.equal(clamped, x.clamp(low, high)):
            yield f"clamping {x.numel()} values to {low} and {high}"
    for step, low, high in ((0.1, -128, 127), (1.0, 0, 60), (2.0**-10, -32768, 32767), (1e-30, -128, 127)):
        if not _same(passes.round(x, step, low, high), _rounded(x, step, low, high)):
            yield f"rounding {x.numel()} values to steps of {step}"
        steps = torch.linspace(0.3, 3.0, len(rows)).mul_(step).unsqueeze(1)
        if not _same(passes.round_rows(rows, steps, low, high), _rounded(rows, steps, low, high)):
            yield f"rounding {len(rows)} rows of {length} values to steps about {step}"
    for limits in (NO_LIMITS, (0.0, 6.0)):
        taken = x.clamp(-3.9, 3.9).mul_(4.0)  # all bins are there
        for run, each in ((taken.numel(), 1), (64, 3), (16, 3), (24, 5)):
            if taken.numel() < run * each:
                continue
            stride = run * each - (each > 1)
            parts = taken[each:].unfold(0, run, stride) if each > 1 else taken.view(1, -1)
            sample, part = (each * (each > 1), len(parts), run, stride), parts.reshape(-1)
            low, high = (float(end.clamp(*limits)) for end in torch.aminmax(taken))
            bits = part.clamp(*limits).abs().view(torch.int32)
            wanted = torch.bincount(((bits >> _SHIFT) - _FIRST).clamp_(min=0), minlength=BINS).int() * each
            counts = torch.zeros(BINS, dtype=torch.int32)
            peaks = passes.count(taken, sample, each, _SHIFT, _FIRST, (low, high), limits, counts)
            if not torch.equal(counts, wanted) or peaks != (
                int((part <= low).sum()) * each,
                int((part >= high).sum()) * each,
            ):
                yield f"counting {x.numel()} values between {limits[0]} and {limits[1]}"


def _wrong_gradients(passes: Passes, generator: torch.Generator) -> Iterator[str]:
    for size in (1, 15, 16, 17, 5000):
        grad, x = torch.randn(2, size, generator=generator)
        x[0] = 1.5  # on an edge
        y = _rounded(x, 0.1, -10, 10)
        for edges in (None, (-0.8, 1.5)):
            lower, upper = edges or NO_LIMITS
            for is_clip in (False, True):
                to_x, total = passes.learned(grad, x, y, edges, is_clip)
                select = torch.ops.aten.hardtanh_backward
                moved = y - select(y if is_clip else x, x, lower, upper)
                wanted = grad.double() * moved.double()
                is_near = abs(total - float(wanted.sum())) <= 1e-6 * float(wanted.abs().sum())
                if not torch.equal(to_x, select(grad, x, lower, upper)) or not is_near:
                    yield f"gradients of {size} values between {edges}"


def _wrong_sums(passes: Passes, generator: torch.Generator) -> Iterator[str]:
    for size in (1, 7, 8, 300):
        counts = torch.randint(0, 50, (size,), generator=generator, dtype=torch.int32)
        below = counts.cumsum(0)
        for wanted in (0, 1, int(below[-1]) // 2, int(below[-1]), int(below[-1]) + 1):
            if passes.reach(counts.numpy(), wanted) != int(torch.searchsorted(below, torch.tensor([wanted]))):
                yield f"reaching {wanted} of {size} counts"
        edges = torch.linspace(0, 3, size + 1, dtype=torch.float64)
        scales = torch.linspace(0.01, 0.1, 5, dtype=torch.float64)
        for limits in ([127.0], [127.0, 128.0]):
            density = counts.double() / edges.diff()
            falls = torch.nn.functional.pad(density, (1, 1)).diff().neg_()
            steps = torch.outer(scales.reciprocal(), edges)
            wanted_sums = torch.zeros_like(scales)
            for limit in limits:
                nearest = steps.round().clamp_(max=limit)
                wanted_sums += (nearest / 12 + (steps - nearest) ** 3 / 3) @ falls
            wanted_sums *= scales**3 / len(limits)
            found = passes.errors(counts.double().numpy(), edges.numpy(), scales.numpy(), limits)
            if not torch.allclose(torch.from_numpy(found), wanted_sums, rtol=1e-9, atol=0):
                yield f"errors of {size} bins"


def _wrong_choices(passes: Passes, generator: torch.Generator) -> Iterator[str]:
    places = torch.linspace(0, 20, 401, dtype=torch.float64)
    for first, last in ((0.01, 0.1), (0.1, 0.01)):
        scales = torch.linspace(first, last, 21, dtype=torch.float64)
        errors = torch.rand(21, generator=generator, dtype=torch.float64)
        points = torch.tensor([(0.0, 0.0, 128.0), (6.0, 40.0, 127.0), (1.7, 9.0, 127.0)], dtype=torch.float64)
        for ends in (points[:1], points[1:]):
            step = (scales[-1] - scales[0]) / 20
            more = scales[0] + places * step
            for magnitude in ends[ends[:, 1] > 1, 0]:
                grid = magnitude / (magnitude / more[:401]).round_().clamp_(min=1)
                more = torch.cat([more, grid.clamp_(min(first, last), max(first, last))])
            place = (more - scales[0]) / step
            begin = place.long().clamp_(0, 19)
            found = errors[begin] + (place - begin) * (errors[begin + 1] - errors[begin])
            for magnitude, count, limit in points.tolist():
                steps = magnitude / more
                found += (steps - steps.round().clamp_(max=limit)) ** 2 * count * more**2
            least, at = (found + 1e-3 * more**2).min(0)
            values, known, on_grid = scales.numpy(), points.numpy(), ends.contiguous().numpy()
            best, error = passes.between(values, errors.numpy(), places.numpy(), on_grid, known, 1e-3)
            if best != float(more[at]) or not math.isclose(error, float(least), rel_tol=1e-12):
                yield f"the best scale between {first} and {last}"


def _wrong_layers(passes: Passes, generator: torch.Generator) -> Iterator[str]:
    ends = torch.tensor([-32768, -32767, -257, -256, -129, -128, -1, 0, 1, 127, 128, 255, 256, 32767])
    for size in (1, 14, 31, 64, 1000):
        x = ends.repeat(size // len(ends) + 1)[:size].to(torch.int16)
        for turned in (0, 0x80, 0x8000 - 0x10000):
            other = x ^ turned
            if not all(map(torch.equal, passes.halves(x, turned), (other.byte(), (other >> 8).byte()))):
                yield f"the bytes of {size} numbers"
    for (rows, columns), kind in itertools.product(((3, 1), (5, 64), (2, 97), (9, 200)), passes._finishes):
        most = (1 << 24) if kind[0] == torch.float32 else (1 << 30)
        low, high = (-32768, 32767) if kind[1] == torch.int16 else (0, 127)
        sums = [torch.randint(1 - most, most, (rows, columns), generator=generator).to(kind[0]) for _ in range(3)]
        sums[0].div_(1 << 20, rounding_mode="floor")  # near the steps
        factor = torch.randint(1 << 19, 1 << 20, (columns,), generator=generator).double() / 2**34
        factor[0] = 0.5  # every other sum is a half
        bias = torch.randint(-999, 999, (columns,), generator=generator).double()
        ratio = torch.randint(1 << 23, 1 << 24, (columns,), generator=generator).double() / 2**23
        residual = torch.randint(-32768, 32768, (rows, columns), generator=generator).to(torch.int16)
        for count, added in ((1, None), (2, residual), (3, None)):
            acc = sum((x.double() * w for x, w in zip(sums[:count], (1, 256, 256), strict=False)), bias)
            if added is not None:
                acc = acc + torch.mul(added.double(), ratio).add_(0.5).floor_()
            wanted = acc.mul(factor).add_(0.5).floor_().clamp_(low, high)
            out = torch.empty((rows, columns), dtype=kind[1])
            passes.finish(sums[:count], (1, 256, 256), added, ratio, bias, factor, low, high, out)
            if not torch.equal(out.double(), wanted):
                yield f"finishing {rows} x {columns} sums of {count} pieces"


def _wrong_bytes(passes: Passes, generator: torch.Generator) -> Iterator[str]:
    for (rows, columns), kind in itertools.product(((3, 1), (5, 64), (2, 97), (9, 200)), passes._settles):
        low, high = (-32768, 32767) if kind[1] == torch.int16 else (-128, 127)
        sums = torch.randint(-(1 << 22), 1 << 22, (rows, columns), generator=generator)
        sums[:, ::2] %= 512
        factor = torch.randint(1 << 19, 1 << 20, (columns,), generator=generator).float() / 2**34
        factor[::2] = 0.5  # every other sum is a half
        bias = torch.randint(-999, 999, (columns,), generator=generator).float()
        ratio = torch.randint(1 << 23, 1 << 24, (columns,), generator=generator).float() / 2**20
        ratio[::2] = 1.5
        residual = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
        for shift, added in ((None, None), (bias, None), (bias, residual), (None, residual)):
            acc = sums.float() if shift is None else sums.float() + shift
            if added is not None:
                acc = acc + torch.mul(added, ratio).add_(0.5).floor_()
            wanted = acc.mul(factor).round_().clamp_(low, high)
            out = torch.empty((rows, columns), dtype=kind[1])
            passes.settle(sums.to(kind[0]), shift, added, ratio, factor, (low, high), out)
            if not torch.equal(out.float(), wanted):
                yield f"settling {rows} x {columns} sums"


def _rounded(x: Tensor, step: float | Tensor, low: float, high: float) -> Tensor:
    return torch.div(x, step).round_().clamp_(low, high).mul_(step)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for how NaN are written."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _is_same(found: tuple[float, float] | None, ends: Any) -> bool:
    return found is not None and _same(torch.tensor(found), torch.stack(list(ends)))
