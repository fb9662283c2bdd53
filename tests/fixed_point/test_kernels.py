"""Integer kernels: the proof that they are exact, how they are turned off, and what runs where they are not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import compiled
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.compiled import choice
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.kernels import (
    Kernels,
    Reach,
    Walk,
    disproof,
    linear_disproof,
    rounding_disproof,
)
from tests.fixed_point.reach import needs_all_bytes, pretend

Steps = Callable[[Tensor, Tensor, Tensor], Tensor]


class StandIn:
    """A convolution by its sums, and the steps of its requantization."""

    def __init__(self, sums: Callable[[Tensor], Tensor], steps: Steps, zero_point: int) -> None:
        self.sums, self.steps, self.zero_point = sums, steps, zero_point

    def taken(self, x: Tensor) -> Tensor:
        return x + self.zero_point

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        acc = self.sums(x)
        return acc if bias is None else acc + bias.reshape(-1, 1, 1)

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
        out = self.steps(self.sums(x), scale.reshape(-1, 1, 1), offset.reshape(-1, 1, 1))
        return out.clamp(low, high).to(torch.int8)


def exact_conv(
    weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size, steps: Steps = lambda a, s, b: (a * s + b).round()
) -> StandIn:
    """What the kernel should do, in float64."""

    def sums(x: Tensor) -> Tensor:
        walked = walk.stride, walk.padding, walk.dilation, walk.groups
        return F.conv2d(x.double() - zero_point, weight.double(), None, *walked).float()

    return StandIn(sums, steps, zero_point)


def exact_multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    sums = (a.double() @ b.double()).int()
    return sums if out is None else out.copy_(sums)


def paired_multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """As CPUs without VNNI do: products of unsigned and signed bytes, two of them in 16 bits that saturate."""
    length = a.shape[1] // 2 * 2
    terms = (a.int() + 128).unsqueeze(-1) * b.int()
    pairs = (terms[:, :length:2] + terms[:, 1:length:2]).clamp(-(1 << 15), (1 << 15) - 1)
    sums = (pairs.sum(1) + terms[:, length:].sum(1) - 128 * b.int().sum(0)).int()
    return sums if out is None else out.copy_(sums)


def paired_conv(only: Callable[[Walk, Tensor], bool]) -> Callable[..., StandIn]:
    """A convolution that saturates pairs of products in the layers that `only` names."""

    def pack(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        exact = exact_conv(weight, walk, zero_point, shape)

        def sums(x: Tensor) -> Tensor:
            if not only(walk, weight):
                return exact(x, None)
            pad = F.pad(x, [walk.padding[1]] * 2 + [walk.padding[0]] * 2, value=zero_point)
            columns = F.unfold(pad.double(), weight.shape[2:], walk.dilation, 0, walk.stride)
            size = weight[0].numel()
            columns = columns.reshape(len(x), walk.groups, size, -1)
            grouped = weight.double().reshape(walk.groups, -1, size)
            terms = torch.einsum("ngip,goi->ngoip", columns, grouped)
            even = size // 2 * 2
            pairs = (terms[..., 0:even:2, :] + terms[..., 1:even:2, :]).clamp(-(2.0**15), 2.0**15 - 1)
            acc = pairs.sum(-2) + terms[..., even:, :].sum(-2) - zero_point * grouped.sum(-1).unsqueeze(-1)
            return acc.reshape(exact(x, None).shape).float()

        return StandIn(sums, exact.steps, zero_point)

    return pack


def test_exact_stand_ins_are_accepted() -> None:
    assert disproof(Kernels(exact_conv, exact_multiply)) == ""
    assert rounding_disproof(Kernels(exact_conv, exact_multiply)) == ""


@pytest.mark.parametrize(
    "steps",
    [
        lambda a, s, b: (a.double() * s.double() + b.double()).float().round(),  # one rounding before the last
        lambda a, s, b: ((a + b / s) * s).round(),
        lambda a, s, b: (a * s + b + 0.5).floor(),
        lambda a, s, b: (a * s).round() + b.round(),
        lambda a, s, b: (a * s + b).trunc(),
    ],
    ids=["fused", "offset first", "half up", "each rounded", "cut off"],
)
def test_a_requantization_in_other_steps_is_refused(steps: Steps) -> None:
    kernels = Kernels(functools.partial(exact_conv, steps=steps), exact_multiply)
    assert "is rounded otherwise" in rounding_disproof(kernels)
    assert disproof(kernels) == ""


def as_linear(conv: Callable[..., StandIn]) -> Callable[..., Any]:
    """A linear layer as a convolution of one pixel for each row."""

    class Rows:
        def __init__(self, weight: Tensor, zero_point: int, rows: int) -> None:
            self._conv = conv(weight[..., None, None], Walk(), zero_point, torch.Size([rows, weight.shape[1], 1, 1]))

        def taken(self, x: Tensor) -> Tensor:
            return self._conv.taken(x)

        def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
            return self._conv(x[..., None, None], bias)[..., 0, 0]

        def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
            return self._conv.rounded(x[..., None, None], scale, offset, low, high)[..., 0, 0]

    return Rows


@pytest.mark.parametrize(
    ("conv", "wrong"),
    [
        (exact_conv, ""),
        (functools.partial(exact_conv, steps=lambda a, s, b: (a * s + b).trunc()), "is rounded otherwise"),
        (functools.partial(exact_conv, steps=lambda a, s, b: ((a + b / s) * s).round()), "is rounded otherwise"),
        (paired_conv(lambda walk, weight: True), "has wrong sums"),
    ],
    ids=["exact", "cut off", "offset first", "saturates"],
)
def test_linear_layers_are_proved_by_themselves(conv: Callable[..., StandIn], wrong: str) -> None:
    found = kernels.linear_disproof(Kernels(exact_conv, exact_multiply, as_linear(conv)))
    assert wrong in found and bool(found) == bool(wrong)


@needs_all_bytes
def test_where_linear_layers_have_no_proof_they_run_on_products(monkeypatch: pytest.MonkeyPatch) -> None:
    fp.use_integer_kernels(True)
    assert kernels.has_linear()
    monkeypatch.setitem(kernels._choice._found, (kernels.linear_disproof, Reach.BYTES), "wrong on purpose")
    assert not kernels.has_linear() and kernels.has_products()


@pytest.mark.parametrize("wrong", ["rows", "columns"])
def test_products_are_tried_with_matrices_in_rows_and_in_columns(wrong: str) -> None:
    def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        is_wrong = b.is_contiguous() if wrong == "rows" else b.t().is_contiguous()
        return paired_multiply(a, b, out) if is_wrong else exact_multiply(a, b, out)

    assert "has wrong sums" in kernels.products_disproof(Kernels(exact_conv, multiply))
    assert "a product of" in disproof(Kernels(exact_conv, multiply))


def test_a_kernel_that_cannot_requantize_still_sums() -> None:
    def pack(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        def refuse(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
            raise RuntimeError("no such output")

        return exact_conv(weight, walk, zero_point, shape, refuse)

    assert rounding_disproof(Kernels(pack, exact_multiply)) == "torch refuses a call: no such output"
    assert disproof(Kernels(pack, exact_multiply)) == ""


@pytest.mark.parametrize(
    ("only", "name"),
    [
        (lambda walk, weight: walk.groups == 1, "dense"),
        (lambda walk, weight: walk.groups > 1 and weight.shape[1] == 1, "depthwise"),
        (lambda walk, weight: walk.groups > 1 and weight.shape[1] > 1, "groups"),
        (lambda walk, weight: weight.shape[2:] == (1, 1), "pointwise"),
        (lambda walk, weight: walk.dilation != (1, 1), "dilated"),
        (lambda walk, weight: weight.shape[2] == 1 and weight.shape[3] > 1, "one row"),
    ],
)
def test_a_convolution_that_saturates_in_one_kind_of_layer_is_refused(only, name: str) -> None:
    assert name in disproof(Kernels(paired_conv(only), exact_multiply))


def test_a_product_of_matrices_that_saturates_is_refused() -> None:
    assert "matrices" in disproof(Kernels(exact_conv, paired_multiply))


def rounded_early(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
    """As on AMX: sums of bytes become float32 before what the zero point adds to them is taken off."""
    bare = Walk(walk.stride, (0, 0), walk.dilation, walk.groups)
    raw = exact_conv(weight, bare, 0, shape)

    def sums(x: Tensor) -> Tensor:
        walked = F.pad(x, [walk.padding[1]] * 2 + [walk.padding[0]] * 2, value=zero_point)
        return raw(walked, None) - raw(torch.full_like(walked, zero_point), None)

    return StandIn(sums, raw.steps, zero_point)


def test_sums_of_bytes_may_be_rounded_before_the_zero_point_is_taken_off() -> None:
    """Layers are cut so that it makes no difference: see `test_byte_layers.py`."""
    assert disproof(Kernels(rounded_early, exact_multiply)) == ""
    assert rounding_disproof(Kernels(rounded_early, exact_multiply)) == ""


def test_sums_below_the_limit_must_not_be_rounded() -> None:
    def pack(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        exact = rounded_early(weight, walk, zero_point, shape)
        return StandIn(lambda x: exact.sums(x).div(2).round().mul(2), exact.steps, zero_point)

    assert "has wrong sums" in disproof(Kernels(pack, exact_multiply))


def test_what_torch_does_not_have_is_no_error() -> None:
    def missing(*args: object) -> Tensor:
        raise RuntimeError("could not create a primitive\nmore")

    assert disproof(Kernels(exact_conv, missing)) == "torch refuses a call: could not create a primitive"


EVERYWHERE = paired_conv(lambda walk, weight: True)


def test_kernels_that_saturate_pairs_are_exact_for_inputs_of_seven_bits() -> None:
    saturating = Kernels(EVERYWHERE, paired_multiply)
    assert "has wrong sums" in disproof(saturating)
    assert disproof(saturating, Reach.SEVEN_BITS) == ""
    assert rounding_disproof(saturating, Reach.SEVEN_BITS) == ""


def test_kernels_that_saturate_sums_of_four_are_not() -> None:
    def pack(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        exact = exact_conv(weight, walk, zero_point, shape)
        return StandIn(lambda x: exact.sums(x).clamp(-(1 << 17), 1 << 17), exact.steps, zero_point)

    assert "has wrong sums" in disproof(Kernels(pack, exact_multiply), Reach.SEVEN_BITS)


def test_older_cpus_take_inputs_of_seven_bits_only() -> None:
    """oneDNN with the instructions of older CPUs: the real kernels of those, which saturate on any machine."""
    run = subprocess.run(
        [sys.executable, "-c", "from horizon_plugin_pytorch import fixed_point as fp; print(fp.integer_kernels())"],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "HORIZON_INTEGER_KERNELS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("on: oneDNN's, proved exact on this machine for inputs from 0 to 127")
    assert "other layers run on float32" in run.stdout and "has wrong sums" in run.stdout


NEEDED = {  # the proofs that are tried, by what the machine's kernels are exact for
    Reach.BYTES: [(disproof, Reach.BYTES), (rounding_disproof, Reach.BYTES), (linear_disproof, Reach.BYTES)],
    Reach.SEVEN_BITS: [(disproof, Reach.BYTES), (disproof, Reach.SEVEN_BITS), (rounding_disproof, Reach.SEVEN_BITS)],
    Reach.NOTHING: [(disproof, Reach.BYTES), (disproof, Reach.SEVEN_BITS)],
}


def at_once(run: Callable[[], object]) -> list[object]:
    """What eight threads get that run it at the same moment."""
    barrier, found = threading.Barrier(8), []

    def wait_and_run() -> None:
        barrier.wait()
        found.append(run())

    threads = [threading.Thread(target=wait_and_run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("reach", NEEDED, ids=lambda reach: reach.name)
def test_proofs_run_once_whichever_threads_ask_first(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    order = list(Reach)

    def take_a_while(proof: kernels.Proof, tried: Reach) -> str:
        calls.append((proof, tried))
        time.sleep(0.02)
        return "" if order.index(tried) >= order.index(reach) else "wrong on purpose"

    monkeypatch.setattr(kernels, "_choice", kernels._Choice())
    monkeypatch.setattr(kernels, "_try", take_a_while)
    fp.use_integer_kernels(True)
    found = at_once(lambda: (kernels.kernel_reach(), fp.integer_kernels()))
    assert calls == NEEDED[reach]
    assert len(found) == 8 and set(found) == {(reach, fp.integer_kernels())}


def test_a_machine_whose_kernels_are_never_exact_runs_on_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Reach.NOTHING)
    fp.use_integer_kernels(True)
    assert fp.integer_kernels().startswith("off: not exact on this machine (wrong on purpose)")
    assert not fp.are_kernels_used()


def test_the_environment_turns_them_off_and_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert fp.integer_kernels() == "off: turned off by the environment variable HORIZON_INTEGER_KERNELS"
    assert not fp.are_kernels_used()
    fp.use_integer_kernels(True)
    assert "environment" not in fp.integer_kernels()
    fp.use_integer_kernels(False)
    assert fp.integer_kernels() == "off: turned off by use_integer_kernels"
    fp.use_integer_kernels(None)
    monkeypatch.setenv(kernels.VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="HORIZON_INTEGER_KERNELS is 'sometimes': say 1"):
        fp.are_kernels_used()


def test_the_package_tells_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from horizon_plugin_pytorch import __version__
    from horizon_plugin_pytorch.__main__ import main

    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert main() == 0
    said = capsys.readouterr().out
    for part in (__version__, "nash-p", "off: turned off by the environment", f"{kernels.VARIABLE}=0", "quick-start"):
        assert part in said


@pytest.mark.parametrize("variable", [kernels.VARIABLE, compiled.VARIABLE])
def test_the_package_tells_which_variable_has_no_such_value(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from horizon_plugin_pytorch.__main__ import main

    for name in (kernels.VARIABLE, compiled.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(choice, "_choice", choice._Choice())  # what was decided before does not count
    monkeypatch.setenv(variable, "foo")
    assert main() == 1
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    rows = {name: said.strip() for name, said in rows.items()}
    row, other = ("integer kernels", "compiled passes")[:: 1 if variable == kernels.VARIABLE else -1]
    assert rows[row].startswith(f"The environment variable {variable} is 'foo': say 1 to ")
    assert rows[other].startswith(("on: ", "off: ")) and "torch" in rows


def test_the_command_ends_with_1_and_without_a_traceback() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "horizon_plugin_pytorch"],
        env={**os.environ, kernels.VARIABLE: "foo", compiled.VARIABLE: "bar"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"{kernels.VARIABLE} is 'foo'" in run.stdout and f"{compiled.VARIABLE} is 'bar'" in run.stdout


PRIVATE = ("ops.onednn", "_int_mm", "ops.mkldnn", "ops.prepacked", "ops.quantized", "qconv", "qlinear")


def test_only_one_file_knows_the_private_operators() -> None:
    root = Path(fp.__file__).parents[1]
    files = [path for package in (root, root.parent / "horizon_plugin_profiler") for path in package.rglob("*.py")]
    found = {path for path in files if any(name in path.read_text() for name in PRIVATE)}
    assert found == {Path(kernels.__file__)}
    assert {"kernels.py", "__main__.py", "model_profilerv2.py"} <= {path.name for path in files}


@pytest.mark.skipif(not kernels.has_products(), reason="bytes have no exact products here")
def test_rows_that_repeat_are_multiplied() -> None:
    row, matrix = torch.arange(-8, 8, dtype=torch.int8), torch.arange(16 * 40).reshape(16, 40).remainder(127).char()
    for rows in (9, 1):
        repeated = row.expand(9, 16)[:rows]
        assert torch.equal(kernels.multiply(repeated, matrix).double(), repeated.double() @ matrix.double())
        columns, few = row.expand(40, 16).t(), matrix.t()[:rows].contiguous()
        assert torch.equal(kernels.multiply(few, columns).double(), few.double() @ columns.double())


@pytest.mark.parametrize("length", [2, 16, 65])
def test_one_row_and_one_column_may_have_any_stride(length: int) -> None:
    """Torch 2.13 takes from that how their numbers lie in memory."""
    torch.manual_seed(length)
    numbers = torch.randint(-128, 128, (3, length), dtype=torch.int8)
    row, column = numbers[:1], numbers[1:2].t()
    exact = (row.double() @ column.double()).int()
    for a in (row, row.as_strided(row.shape, (1, 1)), row.as_strided(row.shape, (7, 1))):
        for stride in (1, 9, length):
            b = column.clone().as_strided(column.shape, (1, stride))
            assert torch.equal(kernels.multiply(a, b), exact)
        assert torch.equal(kernels.multiply(a, numbers.t()), (row.double() @ numbers.double().t()).int())
    one = column.clone().as_strided(column.shape, (1, 9))
    assert torch.equal(kernels.multiply(numbers, one), (numbers.double() @ column.double()).int())
