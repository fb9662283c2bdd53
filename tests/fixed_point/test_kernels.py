"""Integer kernels: the proof that they are exact, how they are turned off, and what runs where they are not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.models import TransformerBlock
from horizon_plugin_pytorch import compiled
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.byte_tensor import ByteTensor
from horizon_plugin_pytorch.compiled import choice
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.kernels import (
    Kernels,
    Reach,
    Walk,
    disproof,
    linear_disproof,
    rounding_disproof,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor, byte_qtensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.fixed_point.reach import needs_all_bytes, needs_kernels, pretend


@pytest.fixture(autouse=True)
def as_the_environment_says() -> Iterator[None]:
    yield
    fp.use_integer_kernels(None)


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


class Net(nn.Module):
    """Layers of every kind, a residual, and what is not on kernels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, 1, "same", groups=4)
        self.wrapped = nn.Conv2d(16, 16, 3, 1, 1, padding_mode="circular")
        self.reflected = nn.Conv2d(16, 16, 3, 1, 1, padding_mode="reflect", bias=False)
        self.pointwise = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.grouped(F.relu(self.depthwise(x)))
        y = self.reflected(self.wrapped(y))
        x = F.relu(self.pointwise(y) + x)
        x = F.max_pool2d(x, 2)
        return self.head(x.flatten(2).transpose(1, 2)).mean(1)


def models(dtype: QuantDType = qint8) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    set_march(March.BAYES)
    data = torch.randn(4, 3, 16, 16)
    qat = prepare_qat_fx(
        QuantWrapper(Net()).eval(), {"": get_default_qconfig(activation_qkwargs={"dtype": dtype})}
    ).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat, convert_fx(qat), data


@needs_kernels
@pytest.mark.parametrize("reach", [Reach.BYTES, Reach.SEVEN_BITS])
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_models_give_the_same_bits_with_and_without(
    dtype: QuantDType, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, reach)
    qat, quantized, data = models(dtype)
    results = []
    with torch.no_grad():
        for is_wanted in (True, False, True):
            fp.use_integer_kernels(is_wanted)
            assert fp.are_kernels_used() is is_wanted
            results += [qat(data), quantized(data), quantized(data[:1].expand(4, -1, -1, -1))]
        with torch.inference_mode():
            fp.use_integer_kernels(True)
            results += [qat(data), quantized(data), quantized(data[:1].expand(4, -1, -1, -1))]
    for first, other in zip(results[:3] * 3, results[3:], strict=True):
        assert torch.equal(first, other)
    assert torch.equal(results[0], results[1])


@needs_kernels
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_several_threads_give_the_same_bits(dtype: QuantDType) -> None:
    fp.use_integer_kernels(True)
    _, quantized, data = models(dtype)
    expected: list[Tensor] = []
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(5):
                found.append(quantized(data))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fp.use_integer_kernels(False)
    with torch.no_grad():
        expected.append(quantized(data))
    assert len(found) == 20 and all(torch.equal(out, expected[0]) for out in found)


@needs_kernels
def test_written_weights_are_seen() -> None:
    fp.use_integer_kernels(True)
    qat, quantized, data = models()
    with torch.no_grad():
        before = qat(data), quantized(data)
        for module in quantized.modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dtype == torch.int8:
                module.weight.data.neg_()
        qat.module.head.weight.data.mul_(-0.5)
        after = qat(data), quantized(data)
        fp.use_integer_kernels(False)
        assert torch.equal(after[0], qat(data)) and torch.equal(after[1], quantized(data))
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@needs_kernels
def test_programs_and_traces_have_the_operators_of_before() -> None:
    from horizon_plugin_pytorch.program import record_program
    from horizon_plugin_pytorch.program.exported import exported_program

    fp.use_integer_kernels(True)
    _, quantized, data = models()
    with torch.no_grad():
        expected = quantized(data)
        program = record_program(quantized, data)
        traced = torch.jit.trace(quantized, data, check_trace=False)
        exported = exported_program(program).module()
        assert torch.equal(program(data), expected)
        assert torch.equal(traced(data), expected)
        assert torch.equal(exported(data)[0], expected)
    for text in (str(program), str(traced.inlined_graph), str(exported.graph)):
        assert "horizon" in text and "conv" in text and "onednn" not in text and "int_mm" not in text


@needs_kernels
def test_integers_travel_as_bytes_until_somebody_asks() -> None:
    fp.use_integer_kernels(True)
    _, quantized, data = models()
    seen: list[QTensor] = []
    layers = [m for m in quantized.modules() if type(m).__name__.startswith("Conv")]
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, out: seen.append(out))
    with torch.no_grad():
        quantized(data)
    assert any(x._bytes is not None for x in seen)
    for x in seen:
        integers = x.plain()
        assert x._bytes is None and integers.is_contiguous() and integers.dtype == torch.float32
        assert torch.equal(x.int_repr(), integers.to(torch.int8))
        low, high = x.range
        assert low <= int(integers.min()) and int(integers.max()) <= high


def test_pooling_leaves_bytes_as_they_are() -> None:
    values = torch.arange(-32, 32, dtype=torch.int8).reshape(1, 1, 8, 8)
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(values), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        pooled = F.max_pool2d(x, 2)
        assert x.has_bytes and isinstance(pooled, QTensor) and pooled.has_bytes
        assert torch.equal(pooled.as_grid(), F.max_pool2d(values.float(), 2))


@needs_kernels
@pytest.mark.parametrize("act", [nn.SiLU, nn.Hardswish, nn.Sigmoid])
def test_tables_leave_bytes_to_the_next_layer(act: type[nn.Module]) -> None:
    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    layers = [nn.Conv2d(32, 32, 3, padding=1), act(), nn.Conv2d(32, 32, 3, padding=1), act(), nn.Conv2d(32, 8, 1)]
    data = torch.randn(2, 32, 15, 17)
    qat = prepare_qat_fx(nn.Sequential(QuantStub(), *layers).eval(), {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert_fx(qat)
    seen: list[bool] = []
    for name in "35":
        quantized.get_submodule(name).register_forward_pre_hook(lambda module, xs: seen.append(xs[0].has_bytes))
    with torch.no_grad():
        on_bytes = [model(data).int_repr() for model in (quantized, qat)]
        assert seen == [True, True]
        fp.use_integer_kernels(False)
        assert all(torch.equal(model(data).int_repr(), x) for model, x in zip((quantized, qat), on_bytes, strict=True))


class Neck(nn.Module):
    """Branches of different ranges that are joined, resized and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
        self.third = nn.Conv2d(8, 4, 1)
        self.joined = nn.Sequential(nn.Conv2d(20, 8, 3, 1, 1), nn.ReLU())
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.first(x)
        z = self.second(y)
        y = self.joined(torch.cat([y, z * 3.0, self.third(z)], 1))
        return self.last(torch.cat([F.interpolate(y, scale_factor=2.0), x.relu()], dim=1))


@needs_kernels
@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
def test_joined_and_resized_images_stay_bytes(method: str) -> None:
    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    torch.manual_seed(0)
    data = torch.randn(2, 8, 18, 14)
    qat = prepare(Neck().eval(), (data,), qconfig_dict={"": get_default_qconfig()}, method=method, out_dir=None)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert(qat)
    seen: list[tuple[bool, int]] = []
    for name in ("joined.0", "last"):
        layer = quantized.get_submodule(name)
        layer.register_forward_pre_hook(lambda module, xs: seen.append((xs[0].has_bytes, xs[0].range[0])))
    with torch.no_grad():
        on_bytes = [model(data).int_repr() for model in (quantized, qat)]
        fp.use_integer_kernels(False)
        on_floats = [model(data).int_repr() for model in (quantized, qat)]
    assert seen[:2] == [(True, -128), (True, 0)]  # of the second, nothing is negative
    assert all(torch.equal(out, on_bytes[0]) for out in (*on_bytes, *on_floats))


VIEWS = {
    "reshape": lambda x: x.reshape(4, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(-1, -2),
    "movedim": lambda x: torch.movedim(x, 1, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "select": lambda x: x.select(2, 1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "slice": lambda x: x[:, 1:, ..., ::2],
    "last": lambda x: x[:, -1],
    "new axis": lambda x: x[:, None],
    "moved and contiguous": lambda x: x.flatten(2).transpose(1, 2).contiguous().view(2, -1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: torch.split(x, 3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
}
VALUES = (torch.arange(-40, 40) * 3).to(torch.int8).reshape(2, 4, 5, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_bytes_are_bytes(name: str, layout: torch.memory_format) -> None:
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        x.set_range(-120, 117)
        seen = VIEWS[name](x)
        assert isinstance(seen, QTensor) and seen.has_bytes and x.has_bytes and seen.is_integer == is_integer
        expected = VIEWS[name](VALUES.float())
        assert seen.shape == expected.shape and seen.range == (-120, 117) and seen.q_scale().item() == 0.5
        assert torch.equal(seen.as_grid(), expected) and torch.equal(seen.dequantize(), expected * 0.5)
        assert torch.equal(x.as_grid(), VALUES.float())


def shows_the_same_bytes(x: QTensor, other: QTensor) -> bool:
    return x.has_bytes and other.has_bytes and x.as_bytes() is other.as_bytes()


COPIES = {  # where the bytes need not move: what is contiguous there, of images or not, is not in float
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "channels last, then rows": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1),
    "rows of channels": lambda x: x.flatten(2).transpose(1, 2).contiguous(),
    "channels first": lambda x: x.permute(0, 3, 1, 2).contiguous(),
    "indexed": lambda x: x[:, torch.tensor([0, 3])].contiguous(),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("is_read", [False, True], ids=["bytes", "floats"])
@pytest.mark.parametrize("name", COPIES)
def test_what_float_copies_is_no_view(name: str, is_read: bool, layout: torch.memory_format) -> None:
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    if is_read:
        x.as_grid()
    copy = COPIES[name](x)
    copy.relu_()
    assert torch.equal(x.as_grid(), VALUES.float())
    assert torch.equal(copy.as_grid(), COPIES[name](VALUES.float()).relu())


@pytest.mark.parametrize("reads", ["nobody", "view", "base"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
def test_what_contiguous_gives_is_never_changed_unseen(layout: torch.memory_format, reads: str) -> None:
    """In float it may be a copy, where the numbers that are here need none."""
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    for view in (x, x.permute(0, 2, 3, 1), x.permute(0, 3, 1, 2), x.transpose(1, 2)):
        if reads != "nobody":
            (view if reads == "view" else x).as_grid()
        former, expected = view.contiguous(), view.as_grid().clone()
        assert former is not view
        former.relu_()
        assert torch.equal(former.as_grid(), expected.relu())
        try:
            now = view.as_grid()
        except UnsupportedOperatorError:
            break
        assert torch.equal(now, expected)


def test_images_of_bytes_can_be_viewed_as_in_float() -> None:
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=torch.channels_last)), torch.tensor([0.5]), qint8)
    assert shows_the_same_bytes(x, x.contiguous())
    assert torch.equal(x.contiguous(memory_format=torch.channels_last).as_grid(), VALUES.float())
    assert torch.equal(x.view(2, -1).as_grid(), VALUES.float().view(2, -1))
    assert x.is_contiguous()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("first", ["base", "view", "neither"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_bytes_is_stale_after_a_write_to_its_base(name: str, first: str, layout: torch.memory_format) -> None:
    """Also where the float32 numbers of one of them have memory of their own by then."""
    if name == "moved and contiguous":  # a copy
        return
    x = byte_qtensor(ByteTensor(VALUES.contiguous(memory_format=layout)), torch.tensor([0.5]), qint8)
    seen = VIEWS[name](x)
    other = seen[..., :1] if first == "view" else seen
    if first != "neither":
        (x if first == "base" else seen).as_grid()
    later = x[:1] if first == "base" else seen[..., :1]
    x.relu_()
    for stale in (seen, other, later):
        with pytest.raises(UnsupportedOperatorError, match="was changed in place"):
            stale.dequantize()


@needs_all_bytes
def test_a_transformer_hands_on_bytes() -> None:
    """Behind the first layer, between layers, norms, products of activations and sums, nothing is float32."""
    fp.use_integer_kernels(True)
    set_march(March.NASH_M)
    torch.manual_seed(0)
    model = nn.Sequential(QuantStub(), TransformerBlock(64, 2), TransformerBlock(64, 2)).eval()
    data = torch.randn(2, 100, 64)
    qat = prepare_qat_fx(model, {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    quantized = convert_fx(qat)
    seen: dict[str, bool] = {}

    def note(module: nn.Module, inputs: tuple, out: Any) -> None:
        if isinstance(module, QuantizedModule) and isinstance(out, QTensor):
            seen[module.path] = out.has_bytes

    with torch.no_grad():
        hook = register_module_forward_hook(note)
        try:
            on_bytes = [quantized(data).int_repr()]
        finally:
            hook.remove()
        on_bytes.append(qat(data).int_repr())
        assert len(seen) > 10 and [path for path, has_bytes in seen.items() if not has_bytes] == ["0", "1.norm1"]
        fp.use_integer_kernels(False)
        assert all(torch.equal(m(data).int_repr(), out) for m, out in zip((quantized, qat), on_bytes, strict=True))


def test_another_name_of_bytes_leaves_them_as_they_are() -> None:
    values = torch.arange(-32, 32, dtype=torch.int8).reshape(1, 1, 8, 8)
    for is_integer in (True, False):
        x = byte_qtensor(ByteTensor(values), torch.tensor([0.5]), qint8)
        x._is_integer = is_integer
        x.set_range(-32, 31)
        other = x.alias()
        assert other is not x and other.has_bytes and other.is_integer == is_integer and other.range == (-32, 31)
        assert torch.equal(other.as_grid(), values.float()) and x.has_bytes


@needs_kernels
@pytest.mark.parametrize("state", [FakeQuantState.VALIDATION, None])
def test_a_relu_that_writes_in_place_leaves_bytes_to_the_next_layer(state: FakeQuantState | None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = QuantStub()
            self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            for conv in self.convs:
                x = self.relu(conv(x))
            return x

    fp.use_integer_kernels(True)
    set_march(March.BAYES)
    data = torch.randn(1, 32, 16, 16)
    qconfigs = {"": get_default_qconfig()}
    qat = prepare(Net().eval(), (data,), qconfig_dict=qconfigs, method="jit-strip", out_dir=None)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    model = qat if state else convert(qat)
    seen: list[bool] = []
    for conv in list(model.convs)[1:]:
        conv.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].has_bytes))
    with torch.no_grad():
        on_bytes = model(data)
        assert seen == [True, True]
        fp.use_integer_kernels(False)
        assert torch.equal(on_bytes.int_repr(), model(data).int_repr())


@needs_kernels
def test_who_watches_modules_gets_the_integers_of_who_does_not() -> None:
    qat, quantized, data = models()
    seen: list[type] = []
    with torch.no_grad():
        alone = qat(data)
        handle = register_module_forward_hook(lambda module, inputs, out: seen.append(type(module)))
        try:
            watched = qat(data)
        finally:
            handle.remove()
    trained = qat(data)
    assert seen.count(type(quantized.get_submodule("module.grouped"))) == 3  # and `wrapped`, `reflected`
    assert trained.requires_grad and torch.equal(alone, watched) and torch.equal(alone, trained)


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
