"""Compiled passes: the proof that they give torch's numbers, how they are made and turned on, and what uses them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import compiled
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.compiled import building, choice
from horizon_plugin_pytorch.compiled.passes import Passes, disproof
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    default_qat_8bit_lsq_quant_qconfig,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.statistics.observer_names import range_methods
from horizon_plugin_pytorch.statistics.sketch import Sketch
from tests.statistics.test_sketch import ONE_VALUE
from tests.tiers import in_soak

OBSERVERS = {**range_methods(), "histogram": HistogramObserver}


@pytest.fixture(autouse=True)
def one_thread_and_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    compiled.use_compiled_passes(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "made"


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """The passes of this checkout, in use."""
    try:
        passes = Passes(building.library(folder=folder))
    except building.CannotBuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(choice._choice, "_made", passes)
    monkeypatch.setattr(choice._choice, "_is_tried", True)
    compiled.use_compiled_passes(True)
    assert compiled.compiled_passes() == "on: compiled on this machine, with the numbers of torch"
    return passes


WRONG = {
    "halves up": ("float v = nearbyintf(x[i] / step)", "float v = floorf(x[i] / step + 0.5f)", "rounding"),
    "a product for a quotient": ("nearbyintf(x[i] / step)", "nearbyintf(x[i] * (1 / step))", "rounding"),
    "no NaN": ("odd[0] ? NAN : low[0]", "low[0]", "the range"),
    "the last one": ("for (; i < size; i++) {", "for (; i < size - 1; i++) {", "the range"),
    "the next row": ("horizon_range(x + r * size", "horizon_range(x + r * (size - 1)", "the rows"),
    "the last runs": ("    count_block(&c, held, filled);\n    for", "    for", "counting"),
    "the sign": ("keys[i] & 0x7fffffff", "keys[i]", "counting"),
    "one bin too low": ("- c->first + TURNS", "- c->first + TURNS - 1", "counting"),
    "the other edge": ("x[i] >= upper ? 0.0f : g[i]", "x[i] > upper ? 0.0f : g[i]", "gradients"),
    "one way": ("way < ways", "way < 1", "errors"),
    "a longer step": ("first + places[i] * step,", "first + places[i] * step * 1.01,", "the best scale"),
    "beyond": ("sum >= wanted", "sum > wanted", "reaching"),
    "another byte": ("(uint8_t)(v >> 8)", "(uint8_t)(v >> 7)", "the bytes"),
    "half down": ("factor[begin + i] + 0.5)", "factor[begin + i] + 0.499999)", "finishing"),
    "no bias": ("acc[i] = bias[begin + i]", "acc[i] = 0", "finishing"),
    "half up": ("nearbyintf(acc[i] * factor[begin + i])", "floorf(acc[i] * factor[begin + i] + 0.5f)", "settling"),
    "a residual down": ("ratio[begin + i] + 0.5f)", "ratio[begin + i] + 0.49f)", "settling"),
    "no bias of bytes": ("acc[i] += bias[begin + i]", "acc[i] += 0", "settling"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(WRONG)[:2], *in_soak(*list(WRONG)[2:])])
def test_a_pass_with_other_numbers_is_found(name: str, made: Passes, tmp_path: Path) -> None:
    right, wrong, said = WRONG[name]
    text = building.SOURCE.read_text()
    assert right in text
    source = tmp_path / "wrong.c"
    source.write_text(text.replace(right, wrong))
    assert disproof(made) == ""
    assert disproof(Passes(building.library(source, tmp_path / "made"))).startswith(said)


def test_a_library_is_made_once(made: Passes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_build", None)
    Passes(building.library(folder=folder))
    assert len(list(folder.iterdir())) == 1 and folder.stat().st_mode & 0o077 == 0


def test_a_folder_of_others_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(building.CannotBuildError, match=r"open can be written by others; `chmod 700` mends"):
        building.library(folder=tmp_path / "open")


def test_source_that_does_not_compile_says_so(made: Passes, tmp_path: Path) -> None:
    (tmp_path / "no.c").write_text("this is no C;")
    with pytest.raises(building.CannotBuildError, match="fails: .*no.c"):
        building.library(tmp_path / "no.c", tmp_path / "made")


def test_without_a_compiler_torch_is_used_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(choice, "_choice", choice._Choice())
    compiled.use_compiled_passes(True)
    said = "off: there is no C compiler (no-such-compiler); torch's operators give the same numbers"
    assert compiled.compiled_passes() == said and not compiled.are_passes_compiled()
    assert float(observed("mse", torch.linspace(-1, 1, 1001))) > 0


@pytest.mark.parametrize(
    ("command", "said"),
    [("'cc", 'CC is "\'cc", which is no command'), ("true", "true fails: code 0, and there is no library")],
)
def test_what_is_no_compiler_is_told(command: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(building.CannotBuildError, match=said):
        building.library(folder=tmp_path / "made")


def test_a_library_that_is_cut_off_is_made_anew(made: Passes, folder: Path, tmp_path: Path) -> None:
    [whole] = folder.iterdir()
    cut = tmp_path / "made" / whole.name
    cut.parent.mkdir(mode=0o700)
    cut.write_bytes(whole.read_bytes()[:12000])  # to load it would end the process
    assert disproof(Passes(building.library(folder=cut.parent))) == ""


def test_without_a_home_nothing_is_written_to_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "beside")  # by its specification not a relative path
    assert building.cache_folder() == Path.home() / ".cache" / "horizon_plugin_pytorch"
    monkeypatch.setenv("HOME", "nowhere")
    with pytest.raises(building.CannotBuildError, match="there is no home folder .* set XDG_CACHE_HOME"):
        building.cache_folder()


def test_they_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    compiled.use_compiled_passes(None)
    assert compiled.compiled_passes() == "off: not asked for (HORIZON_COMPILED_PASSES=1 does)"
    monkeypatch.setenv(compiled.VARIABLE, "sometimes")
    compiled.use_compiled_passes(None)
    with pytest.raises(ValueError, match="HORIZON_COMPILED_PASSES is 'sometimes': say 1"):
        compiled.are_passes_compiled()


# -- what uses them


def observed(name: str, x: Tensor, limits: tuple[float, float] = (-math.inf, math.inf)) -> Tensor:
    """The scale after two batches, one of which the quantizer may write to."""
    quantizer = FakeQuantize(OBSERVERS[name])
    quantizer.set_state(FakeQuantState.CALIBRATION)
    with torch.no_grad():
        quantizer(x * 0.9, limits)
        out = quantizer(x.clone(), limits, owned=True)
    assert torch.equal(out.dequantize(), x.clamp(*limits)) or bool(x.isnan().any())
    return quantizer.scale


TENSORS = {
    "normal": lambda: torch.randn(5000),
    "large": lambda: torch.randn(8, 16, 100, 100),
    "clamped": lambda: torch.randn(4, 8, 40, 40) * 3,
    "few values": lambda: torch.randint(-3, 9, (3000,)).float(),
    "one value": lambda: torch.full((200,), 2.5),
    "zeros": lambda: torch.zeros(300),
    "tiny": lambda: torch.randn(7) * 1e-30,
    "channels last": lambda: torch.randn(2, 8, 30, 30).contiguous(memory_format=torch.channels_last),
    "half": lambda: torch.randn(1000).half(),
}


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.CalibrationWarning")
def test_scales_are_the_same(name: str, made: Passes) -> None:
    torch.manual_seed(0)
    for kind, tensor in TENSORS.items():
        x = tensor()
        for limits in ((-math.inf, math.inf), (0.0, 6.0), (0.0, math.inf)):
            found = []
            for is_on in (True, False):
                compiled.use_compiled_passes(is_on)
                found.append(observed(name, x, limits))
            assert torch.equal(*found), (kind, limits)


def test_a_view_whose_memory_has_the_other_sign_is_left_to_torch(made: Passes) -> None:
    torch.manual_seed(0)
    x = torch._neg_view(torch.randn(3000) - 1)
    found = []
    for values in (x, x.resolve_neg()):
        quantizer = FakeQuantize(OBSERVERS["mse"])
        quantizer.set_state(FakeQuantState.CALIBRATION)
        quantizer(values)
        quantizer.set_state(FakeQuantState.QAT)
        found.append((float(quantizer.scale), quantizer(values).dequantize()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("value", ONE_VALUE, ids=str)
def test_errors_of_one_value_are_the_same(value: float, made: Passes) -> None:
    found = []
    for is_on in (True, False):
        compiled.use_compiled_passes(is_on)
        found.append(Sketch.of(torch.full((50,), value)).errors(torch.tensor([1e-3, 0.1, 2.0]), -128, 127))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-60)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_told_in_the_same_words(value: float, made: Passes) -> None:
    torch.manual_seed(0)
    x = torch.randn(20000)
    x[[3, 9000, 19999]] = value
    said = []
    for is_on in (True, False):
        compiled.use_compiled_passes(is_on)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scale = observed("percentile", x, (0.0, 6.0))
        said.append((float(scale), [str(w.message) for w in caught]))
    assert said[0] == said[1] and "3 values of 20000" in said[0][1][0]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(),
            nn.Conv2d(8, 4, 1),
        )  # fmt: skip


@pytest.mark.parametrize("qconfig", ["STE", "LSQ"])
def test_a_training_step_is_the_same(qconfig: str, made: Passes) -> None:
    torch.manual_seed(0)
    net, x = QuantWrapper(Net().eval()), torch.randn(2, 3, 20, 20)
    chosen = get_default_qconfig() if qconfig == "STE" else default_qat_8bit_lsq_quant_qconfig
    steps = []
    for is_on in (True, False):
        compiled.use_compiled_passes(is_on)
        model = prepare_qat_fx(net, {"": chosen}).eval()
        set_fake_quantize(model, FakeQuantState.CALIBRATION)
        model(x)
        model.train()
        set_fake_quantize(model, FakeQuantState.QAT)
        out = model(x)
        out.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        steps.append({"out": out, **gradients})
        model.zero_grad()
        for parameter in net.parameters():
            parameter.grad = None
    assert len(steps[0]) > 4
    for name, value in steps[0].items():  # the sum that a trained scale gets is rounded in another order
        tolerance = 1e-5 if name.endswith("scale") else 0
        torch.testing.assert_close(value, steps[1][name], rtol=tolerance, atol=tolerance, msg=name)


LAYERS = {  # shape of the weight, groups
    "dense": ((24, 40, 3, 3), 1),
    "depthwise": ((48, 1, 3, 3), 48),
    "pointwise": ((70, 33, 1, 1), 1),
    "linear": ((40, 64), 1),
}


@pytest.mark.skipif(not kernels.are_kernels_used(), reason="the kernels of this machine are not exact, or off")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_the_same(kind: str, bits: int, made: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[int] = []
    name, storage, least, most = (
        ("settle", torch.int8, -128, 127) if bits == 8 else ("finish", torch.int16, -32768, 32767)
    )
    finish = getattr(Passes, name)
    monkeypatch.setattr(Passes, name, lambda *args: finished.append(1) or finish(*args))
    (outputs, *rest), groups = LAYERS[kind]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (outputs, *rest), generator=generator).float()
    scale = 10 ** -(torch.rand(outputs, generator=generator, dtype=torch.float64) * (bits / 8) + 2)
    walk = None if kind == "linear" else fp.Geometry([1, 1], [rest[-1] // 2] * 2, [1, 1], [0, 0], groups, False)
    run = fp.linear if walk is None else fp.conv
    for low, limits, has_residual in ((least, (-128, 127), False), (0, (0, most), True)):
        plan = fp.plan_accumulator(
            weight, torch.randn(outputs, generator=generator), scale, torch.tensor([2.0]), output_axis=0,
            groups=groups, input_range=(low, most), weight_bits=8, low=limits[0], high=limits[1],
            residual_scale=torch.tensor([0.3]) if has_residual else None, residual_bits=bits,
        )  # fmt: skip
        layer = fp.ByteLayer.of(plan, walk, (low, most), 8)
        if walk is None and not kernels.has_products():
            pytest.skip("linear layers run on float32 here")
        assert isinstance(layer, fp.ByteLayer if bits == 8 else fp.WideLayer)
        shape = (30, rest[0]) if walk is None else (2, rest[0] * groups, 9, 11)
        x = torch.randint(low, most + 1, shape, generator=generator).to(storage)
        expected = run(x.float(), None, *fp.flatten(plan, *([] if walk is None else [walk])))
        residual = None
        if has_residual:
            residual = torch.randint(least, most + 1, expected.shape, generator=generator).to(storage)
            residual = residual if walk is None else residual.contiguous(memory_format=torch.channels_last)
            expected = run(x.float(), residual.float(), *fp.flatten(plan, *([] if walk is None else [walk])))
        for is_on in (True, False):
            compiled.use_compiled_passes(is_on)
            out = layer(x, residual)
            assert out is not None and torch.equal(out.float(), expected)
            assert bool(finished) is is_on
            finished.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_another_default_type_changes_no_number(dtype: torch.dtype, made: Passes) -> None:
    """C writes float32 to the memory that it is given."""
    weight, x = torch.randn(16, 500), torch.randn(70_000)
    found = []
    for default in (torch.float32, dtype):
        by_channel = range_methods()["min_max"](qscheme=torch.per_channel_symmetric, ch_axis=0)
        whole = range_methods()["mse"]()
        torch.set_default_dtype(default)
        try:
            by_channel(weight)
            whole(x)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([by_channel.max_val.double(), whole.max_val.double()])
    assert all(map(torch.equal, *found))
