"""`torch.jit.trace` of prepared and converted models: the same numbers on other inputs, in a file, in a new process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnknownCallError, UnsupportedOperatorError
from horizon_plugin_pytorch.jit import save
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    convert,
    convert_fx,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    qconfig_template,
    set_fake_quantize,
)
from tests.operators.cases import CASES
from tests.routes import calibrate, prepared, prepared_on, qconfig
from tests.tiers import in_soak

ROUTES = ("fx", "eager", "JIT", "JIT_STRIP")
X, OTHER = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.randn(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(self.quant(x)))
        return self.dequant(self.fc(x.permute(0, 2, 3, 1).reshape(-1, 4)))


class Functions(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(self.quant(x)))
        y = torch.cat([x + torch.sigmoid(x), x[:, 1:]], 1)[:, :4]
        return self.dequant(self.fc(torch.softmax(y, 1).mean((2, 3))))


def qat_model(route: str) -> nn.Module:
    set_march(March.BAYES)
    torch.manual_seed(0)
    model = (Net() if route == "eager" else Functions()).eval()
    if route == "fx":
        qat = prepare_qat_fx(model, {"": qconfig()})
    elif route == "eager":
        model.qconfig = qconfig()
        qat = prepare_qat(model)
    else:
        setter = qconfig_template.default_qat_qconfig_setter
        qat = prepare(model, example_inputs=X, qconfig_setter=setter, method=PrepareMethod[route])
    return calibrate(qat, (X,))


def converted(qat: nn.Module, route: str) -> nn.Module:
    return convert_fx(qat) if route == "fx" else convert(qat)


def trace(model: nn.Module, x: Any = X) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.trace(model, x)


def operators(script: Any) -> set[str]:
    return {node.kind() for node in script.inlined_graph.nodes()}


@pytest.mark.parametrize("route", ROUTES)
def test_a_traced_integer_model_shows_its_operators_and_gives_the_same_integers(route: str) -> None:
    quantized = converted(qat_model(route), route)
    script = trace(quantized)
    assert {"horizon::quantize", "horizon::conv", "horizon::linear"} <= operators(script)
    assert not [kind for kind in operators(script) if kind.startswith("prim::Python")]
    for x in (X, OTHER):
        assert torch.equal(script(x), quantized(x))


class Numbers(nn.Module):
    """Operators that read scales as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.quant(x)
        x = torch.where(x > 0.25, x.softmax(1), x.log_softmax(1))
        return self.dequant(torch.where(x > x * 2, x.clamp(-0.5, 0.5), x))


def test_scales_are_constants_of_which_the_tracer_does_not_warn() -> None:
    quantized = convert_fx(calibrate(prepare_qat_fx(Numbers().eval(), {"": qconfig()}), (X,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.TracerWarning.ignore_lib_warnings()  # torch's own filter, for torch's own files
        script = torch.jit.trace(quantized, X)
    for x in (X, OTHER):
        assert torch.equal(script(x), quantized(x))


@pytest.mark.in_turns("grad", "state", "route")
@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("state", ["VALIDATION", "QAT", "CALIBRATION"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_traced_qat_model_computes_what_the_model_does(route: str, state: str, grad: bool) -> None:
    qat = qat_model(route)
    set_fake_quantize(qat, FakeQuantState[state])
    for observer in (m for m in qat.modules() if hasattr(m, "averaging_constant")):
        observer.averaging_constant = 0  # a run in the QAT state would move the scales
    with torch.set_grad_enabled(grad):
        script = trace(qat)
    with torch.no_grad():
        for x in (X, OTHER):
            assert torch.equal(script(x), qat(x))
    assert not torch.equal(script(X), script(OTHER))
    assert ("horizon::conv" in operators(script)) == (state == "VALIDATION")


@pytest.mark.slow
def test_what_is_shown_to_the_tracer_is_no_data() -> None:
    qat = qat_model("JIT")
    set_fake_quantize(qat, FakeQuantState.QAT)
    before = {name: x.clone() for name, x in qat.state_dict().items()}
    torch.jit.trace(qat, OTHER, check_trace=False)  # torch's check would run the model besides
    after = qat.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_a_model_that_was_never_run_is_traced_as_it_is_later() -> None:
    """Plans are made in the first run: they are constants and no part of the graph."""
    quantized = converted(qat_model("fx"), "fx")
    first, second = (len(list(trace(quantized).inlined_graph.nodes())) for _ in range(2))
    assert first == second


TRACED = {case.name: case for case in CASES if not case.name.endswith("-in-place")}
SAMPLE = sorted({*sorted(TRACED)[::15], "filter", "is-finite"})


@pytest.mark.parametrize("name", [*SAMPLE, *in_soak(*sorted(TRACED.keys() - set(SAMPLE)))])
def test_operators_are_traced(name: str) -> None:
    case = TRACED[name]
    set_march(case.march)
    inputs, other = case.inputs(), case.inputs(seed=2)
    qat = prepared(case.model(), inputs, case.formats[0])
    for model in (qat, convert_fx(qat)):
        script = trace(model, inputs)
        for batch in (inputs, other):
            with torch.no_grad():
                wanted, found = _plain(model(*batch)), _plain(script(*batch))
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("route", ["fx", "JIT"])
def test_a_sum_in_place_is_traced(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Residual(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.conv(self.quant(x)))
            y = torch.sigmoid(x)
            y += x
            return self.dequant(y * x)

    monkeypatch.setitem(globals(), "Functions", Residual)
    qat = qat_model(route)
    for model in (qat, converted(qat, route)):
        script = trace(model)
        with torch.no_grad():
            assert torch.equal(script(OTHER), model(OTHER))


def test_a_write_in_place_is_refused_where_the_tracer_cannot_follow_it() -> None:
    class Write(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.relu(self.conv(self.quant(x)))
            y.transpose_(2, 3)
            return self.dequant(y)

    set_march(March.BAYES)
    quantized = convert_fx(prepared(Write().eval(), (X,)))
    with pytest.raises(UnsupportedOperatorError, match=r"transpose_.*test_torchscript\.py.*graph_module"):
        trace(quantized)
    script = trace(record_program(quantized, X).graph_module)
    assert torch.equal(script(OTHER)[0], quantized(OTHER))


def _plain(out: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(out)
    return [x.plain() if isinstance(x, QTensor) else x for x in leaves if isinstance(x, Tensor)]


RUN = """
import sys, torch
import horizon_plugin_pytorch.jit as jit
script = jit.load(sys.argv[1])
x, wanted = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(script(x), wanted), (script(x) - wanted).abs().max()
print("equal")
"""
FOREIGN = "import sys, torch\ntorch.jit.load(sys.argv[1])"


@pytest.mark.processes
@pytest.mark.parametrize("state", ["VALIDATION", "converted"])
def test_a_file_runs_in_a_new_process(state: str, tmp_path: Path) -> None:
    model = qat_model("fx")
    model = convert_fx(model) if state == "converted" else model
    save(trace(model), tmp_path / "model.pt")
    with torch.no_grad():
        torch.save((OTHER, model(OTHER)), tmp_path / "data.pt")
    files = [str(tmp_path / name) for name in ("model.pt", "data.pt")]
    done = subprocess.run([sys.executable, "-W", "error", "-c", RUN, *files], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
    foreign = subprocess.run([sys.executable, "-c", FOREIGN, files[0]], capture_output=True, text=True)
    assert "Unknown builtin op: horizon::" in foreign.stderr  # what the docs explain


class Scaled(Net):
    """As attention scales its products: by a number that comes of a size."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        factor = x.shape[-1] ** -0.5
        return self.dequant(self.scale.mul(x, factor) if hasattr(self, "scale") else x * factor)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("route", ["traced", "eager", "JIT_STRIP"])
def test_numbers_that_come_of_sizes(route: str) -> None:
    set_march(March.NASH_E)
    net = Scaled().eval()
    if route == "eager":
        net.scale = FloatFunctional()
    qat = calibrate(prepared_on(route, net, (X,)), (X,))
    integers = convert_fx(qat) if route == "traced" else convert(qat)
    for model in (qat, integers):
        assert torch.equal(torch.jit.trace(model, X)(OTHER), model(OTHER))


class InPlace(nn.Module):
    """As residual networks are written: an activation and an addition that write to what a layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.quant(x))
        y = self.bn(self.conv(x))
        y += x
        return self.dequant(self.relu(y))


class WrittenByName(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(self.quant(x)))
        self.relu(y)  # and nobody takes the result
        return self.dequant(y)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("route", ["traced", "JIT_STRIP"])
def test_writes_inside_of_fused_operators(route: str) -> None:
    set_march(March.NASH_E)
    qat = calibrate(prepared_on(route, InPlace().eval(), (X,)), (X,))
    integers = convert_fx(qat) if route == "traced" else convert(qat)
    for model in (qat, integers):
        assert torch.equal(torch.jit.trace(model, X)(OTHER), model(OTHER))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_write_that_a_trace_cannot_follow_is_told() -> None:
    set_march(March.NASH_E)
    qat = calibrate(prepared_on("JIT_STRIP", WrittenByName().eval(), (X,)), (X,))
    with pytest.raises(UnknownCallError, match="fused into one operator"):
        torch.jit.trace(qat, X)
