"""Models on integer kernels: the integers of float32 with several threads, kernels that saturate and older CPUs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.fixed_point import byte_convs, kernels
from horizon_plugin_pytorch.fixed_point.kernels import Kernels, PackedConv, Reach, Walk
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert_fx,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.fixed_point.reach import count_calls, needs_kernels, with_all_bytes
from tests.fixed_point.test_kernels import EVERYWHERE, StandIn, exact_conv, paired_multiply

pytestmark = pytest.mark.filterwarnings("ignore:matmul at .* in the worst case its accumulator")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Kinds(nn.Module):
    """A layer of each kind, behind a ReLU and not, large enough for several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        self.depthwise = nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.grouped = nn.Conv2d(32, 32, 3, 1, 1, groups=4)
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.up = nn.ConvTranspose2d(32, 32, 4, 2, 1)
        self.down = nn.Conv2d(32, 32, 3, 2, 1)
        self.query, self.head = nn.Linear(32, 32), nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(F.relu(self.depthwise(F.relu(self.stem(x)))))
        x = F.relu(self.pointwise(x) + x)
        x = F.relu(self.down(self.up(x)))
        tokens = F.max_pool2d(x, 2).flatten(2).transpose(1, 2)
        return self.head(torch.matmul(torch.matmul(self.query(tokens), tokens.transpose(1, 2)), tokens) + tokens)


Models = tuple[nn.Module, nn.Module]


def models(dtype: QuantDType, state: dict[str, Tensor] | None = None) -> Models:
    """In the VALIDATION state and converted: calibrated, or with the state of one that is."""
    set_march(March.BAYES)
    torch.manual_seed(0)
    net, data = QuantWrapper(Kinds().eval()), images()
    qat = prepare_qat_fx(net, {"": get_default_qconfig(activation_qkwargs={"dtype": dtype})}).eval()
    if state is None:
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        with torch.no_grad():
            qat(data)
    else:
        qat.load_state_dict(state)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat, convert_fx(qat)


def images() -> Tensor:
    return torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def outputs(pair: Models, times: int = 1) -> list[Tensor]:
    """Of both models, again and again: the second run makes what the third uses."""
    with torch.no_grad():
        return [model(images()) for _ in range(times) for model in pair]


def on_float32(pair: Models) -> Tensor:
    fp.use_integer_kernels(False)
    first, second = outputs(pair)
    assert torch.equal(first, second) and len(first.unique()) > 50
    return first


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_any_number_of_threads_in_a_layer_gives_the_same_bits(
    dtype: QuantDType, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    pair = models(dtype)
    expected = on_float32(pair)
    assert not calls
    torch.set_num_threads(threads)
    fp.use_integer_kernels(True)
    times = 3 if dtype == qint8 else 1  # kernels write bytes only
    found = outputs(pair, times)
    assert torch.get_num_threads() == threads and calls["sums"] > 0
    if fp.has_products():
        assert calls["products"] > 0 and (calls["rounded"] > 0 or dtype == qint16)
    torch.set_num_threads(1)  # what was packed for several
    found += outputs(pair)
    fp.use_integer_kernels(False)
    torch.set_num_threads(threads)
    found += outputs(pair)
    assert len(found) == 2 * times + 4 and all(torch.equal(out, expected) for out in found)


MET: Counter[str] = Counter()


class Saturating(PackedConv):
    """Sums of pairs of products in 16 bits, as on CPUs without VNNI, in the place of the kernel that layers call."""

    def __init__(self, weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> None:
        self._zero_point = zero_point
        self._stand_in = self.of(weight, walk, zero_point, shape)

    @staticmethod
    def of(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        return EVERYWHERE(weight, walk, zero_point, shape)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        MET["sums"] += 1
        return self._stand_in(x, bias).contiguous(memory_format=torch.channels_last)

    def rounded(self, x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
        MET["rounded"] += 1
        return self._stand_in.rounded(x, scale, offset, low, high).contiguous(memory_format=torch.channels_last)


class SaturatingEarly(Saturating):
    """Sums that saturate for inputs of 7 bits too."""

    @staticmethod
    def of(weight: Tensor, walk: Walk, zero_point: int, shape: torch.Size) -> StandIn:
        exact = exact_conv(weight, walk, zero_point, shape)
        return StandIn(lambda x: exact.sums(x).clamp(-(1 << 14), 1 << 14), exact.steps, zero_point)


def as_kernels(
    conv: type[PackedConv], multiply: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let others be the kernels of this machine, of which nothing is proved yet."""
    monkeypatch.setattr(kernels, "Kernels", functools.partial(Kernels, conv, multiply))
    monkeypatch.setattr(kernels, "multiply", multiply)
    monkeypatch.setattr(byte_convs, "PackedConv", conv)
    monkeypatch.setattr(kernels, "_choice", kernels._Choice())


SAID = {
    Saturating: "on: oneDNN's, proved exact on this machine for inputs from 0 to 127, as behind a ReLU; other layers",
    SaturatingEarly: "off: not exact on this machine (a ",
}


@pytest.mark.parametrize("conv", SAID)
@pytest.mark.parametrize("dtype", [qint8, qint16], ids=str)
def test_models_on_kernels_that_saturate(
    dtype: QuantDType, conv: type[Saturating], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_float32(models(dtype))
    as_kernels(conv, paired_multiply, monkeypatch)
    fp.use_integer_kernels(True)
    said = fp.integer_kernels()
    assert said.startswith(SAID[conv]) and "largest by largest, has wrong sums" in said
    assert fp.are_kernels_used() is (conv is Saturating)
    MET.clear()  # of the proofs
    pair = models(dtype)
    assert all(torch.equal(out, expected) for out in outputs(pair, 3))
    assert (MET["sums"] > 0) is (conv is Saturating)
    assert MET["rounded"] > 0 or conv is not Saturating or dtype == qint16
    assert torch.equal(on_float32(pair), expected)
    # Without the proof they would have been met.
    as_kernels(conv, paired_multiply, monkeypatch)
    with_all_bytes(monkeypatch)
    assert not any(torch.equal(out, expected) for out in outputs(models(dtype)))


_OTHER_PROCESS = """
import sys
import torch
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import qint8, qint16
from tests.fixed_point.test_models_on_kernels import models, outputs

folder = sys.argv[1]
for dtype in (qint8, qint16):
    pair = models(dtype, torch.load(f"{folder}/{dtype}.pt"))
    torch.save(outputs(pair, 3), f"{folder}/{dtype}-outputs.pt")
print(fp.integer_kernels())
"""


@needs_kernels
def test_models_on_the_kernels_of_older_cpus(tmp_path: Path) -> None:
    """Real ones, which saturate on any machine; scales are those of this process, as calibration is in float."""
    expected = {}
    for dtype in (qint8, qint16):
        pair = models(dtype)
        torch.save(pair[0].state_dict(), tmp_path / f"{dtype}.pt")
        expected[dtype] = on_float32(pair)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _OTHER_PROCESS, str(tmp_path)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", kernels.VARIABLE: "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"on: oneDNN's, proved exact on this machine for {Reach.SEVEN_BITS.value}")
    for dtype in (qint8, qint16):
        found = torch.load(tmp_path / f"{dtype}-outputs.pt")
        assert len(found) == 6 and all(torch.equal(out, expected[dtype]) for out in found)
