"""The passes of a prepare are one list, which both routes run, on one object that has all of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.graph_module import ObservedGraphModule
from horizon_plugin_pytorch.capture.recording import record_runs
from horizon_plugin_pytorch.capture.tracing import trace
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.nn.stubs import DeQuantStub, QuantStub
from horizon_plugin_pytorch.passes import pipeline
from horizon_plugin_pytorch.passes.eager import EAGER, EagerPreparation
from horizon_plugin_pytorch.passes.late_modules import LATE
from horizon_plugin_pytorch.passes.own_scales import OwnScales
from horizon_plugin_pytorch.passes.pipeline import FUSION, PIPELINE, run_passes, steps_of
from horizon_plugin_pytorch.passes.preparation import Preparation, RecordedPreparation, TracedPreparation
from horizon_plugin_pytorch.passes.steps import Pass, run_steps
from horizon_plugin_pytorch.quantization import prepare_qat
from horizon_plugin_pytorch.quantization.prepare import PrepareMethod, prepare
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.quantization.qconfig_template import default_qat_qconfig_setter
from horizon_plugin_pytorch.quantization.quantize_fx import prepare_qat_fx

ROUTES = (TracedPreparation, RecordedPreparation)
QCONFIG = {"": default_qat_8bit_fake_quant_qconfig}
X = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(torch.relu(self.bn(self.conv(x)) + x))


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.BAYES)


def _preparation(route: type[Preparation]) -> Any:
    net = Net()
    if route is TracedPreparation:
        model: Any = ObservedGraphModule(net, trace(net), "Net")
        return TracedPreparation(model, March.BAYES, OwnScales(), name="Net", qconfig_dict=QCONFIG)
    graph, runs, _ = record_runs(net, (X,))
    return RecordedPreparation(
        Captured(net, graph), March.BAYES, OwnScales(), name="Net", qconfig_dict=QCONFIG, runs=runs
    )


def _until(name: str) -> tuple[Pass, ...]:
    """The steps before one."""
    return PIPELINE[: [step.name for step in PIPELINE].index(name)]


@pytest.mark.parametrize("route", ROUTES)
def test_the_list_has_the_life_of_a_model_in_order(route: type[Preparation]) -> None:
    names = [step.name for step in steps_of(route)]
    order = (
        "find_region unshare choose split_devices replace_functions choose_float fuse choose_by_setters check_modules"
    )
    order += " fit_inputs find_lines swap share_weights note_choices"
    assert [name for name in names if name in order.split()] == order.split()
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("steps", [PIPELINE, FUSION, EAGER, LATE], ids=["pipeline", "fusion", "eager", "late"])
def test_every_step_says_what_it_does_and_is_there_once(steps: tuple[Pass, ...]) -> None:
    assert not [step.name for step in steps if not (step.run.__doc__ or "").strip()]
    assert len({step.name for step in steps}) == len(steps)


def test_eager_mode_stops_between_two_steps_too() -> None:
    net = Net()
    net.qconfig = default_qat_8bit_fake_quant_qconfig
    prep = EagerPreparation(Captured(net, fx.Graph()), March.BAYES, OwnScales(), name="Net")
    names = [step.name for step in EAGER]
    run_steps(prep, EAGER[: names.index("swap_modules")])
    assert prep.choices["conv"].qconfig is default_qat_8bit_fake_quant_qconfig
    assert not any(isinstance(module, QATModule) for module in prep.root.modules())
    run_steps(prep, EAGER[names.index("swap_modules") :])
    assert isinstance(prep.root.conv, QATModule)


def test_eager_mode_runs_the_model_once_for_setters_and_tied_scales() -> None:
    class Counted(nn.Module):
        runs = []

        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.ff = QuantStub(), DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            self.runs.append(self.training)
            x = self.quant(x)
            return self.dequant(self.ff.cat([x, x], 1))

    set_march(March.BERNOULLI2)
    prepare_qat(
        Counted(), example_inputs=(X,), qconfig_setter=default_qat_qconfig_setter, optimize_graph=True,
        optimize_kwargs={"opt_types": ("unify_inputs_scale",), "methods": ("cat",)},
    )  # fmt: skip
    assert Counted.runs.count(False) == 1


def test_steps_of_one_route_are_not_run_on_the_other() -> None:
    of_traced, of_recorded = ({step.name for step in steps_of(route)} for route in ROUTES)
    assert {"follow_writes", "attach_code", "write_now"} <= of_traced - of_recorded
    assert {"note_calls", "attach_dispatcher", "link_stubs"} <= of_recorded - of_traced
    assert of_traced | of_recorded == {step.name for step in PIPELINE}


@pytest.mark.parametrize(
    ("method", "route"),
    [("symbolic", TracedPreparation), ("jit-strip", RecordedPreparation), ("fx", TracedPreparation)],
)
def test_the_verbs_run_the_list(method: str, route: type[Preparation], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Preparation] = []

    def look(prep: Preparation) -> None:
        seen.append(prep)

    monkeypatch.setattr(pipeline, "PIPELINE", (*PIPELINE, Pass(look)))
    if method == "fx":
        prepared = prepare_qat_fx(Net(), QCONFIG)
    else:
        prepared = prepare(Net(), (X,), method=PrepareMethod(method), qconfig_dict=QCONFIG, out_dir=None)
    (prep,) = seen
    assert type(prep) is route
    assert prep.root is prepared


@pytest.mark.parametrize("route", ROUTES)
def test_one_can_stop_between_two_steps_and_look(route: type[Preparation]) -> None:
    prep = _preparation(route)
    run_passes(prep, _until("replace_functions"))
    assert {node.name for node in prep.graph.nodes if node in prep.region} >= {"quant", "conv", "bn", "add"}
    assert prep.choices["conv"].qconfig is default_qat_8bit_fake_quant_qconfig

    prep = _preparation(route)
    run_passes(prep, _until("fuse"))
    assert type(prep.root.get_submodule("_generated_add_0")).__name__ == "FloatFunctional"
    assert not any(isinstance(module, QATModule) for module in prep.root.modules())

    prep = _preparation(route)
    run_passes(prep)
    assert type(prep.root.get_submodule("_generated_add_0")).__name__ == "ConvAddReLU2d"


def test_a_prepared_model_keeps_nothing_of_the_state() -> None:
    prepared = prepare(Net(), (X,), qconfig_dict=QCONFIG, out_dir=None)
    assert not {"sites", "stubs"} & vars(prepared).keys()
    assert not [name for name, value in vars(prepared).items() if isinstance(value, Preparation)]
