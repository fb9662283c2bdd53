"""Processes that calibrate together and do not have the same model: an error in each names the first difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import run_workers

pytestmark = pytest.mark.processes

WORKER = """
import json, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState, QuantStub, QuantWrapper, calibrate, get_default_qconfig, prepare, prepare_qat_fx, set_fake_quantize,
)

warnings.simplefilter("ignore")
torch.set_num_threads(1)
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)


def net(*layers, seed=0, march=March.BAYES, stub=None, **qconfig):
    set_march(march)
    torch.manual_seed(seed)
    made = [make() for make in layers or (lambda: nn.Conv2d(2, 2, 1), nn.ReLU, lambda: nn.Conv2d(2, 2, 1))]
    model = QuantWrapper(nn.Sequential(*made)).eval()
    if stub is not None:
        model.quant = QuantStub(scale=stub)
    return prepare_qat_fx(model, {"": get_default_qconfig(**qconfig)})


def edited(index):
    model = net()
    with torch.no_grad():
        model.module[0].weight.view(-1)[3] += index
    return model


data = [torch.rand(2, 2, 4, 4) + rank for _ in range(3)]
conv, linear = (lambda: nn.Conv2d(2, 2, 1)), (lambda: nn.Linear(4, 4))


def by_hand(model):
    for module in model.modules():
        if hasattr(module, "is_sync_quantize"):
            module.is_sync_quantize = True
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    for batch in data:
        model(batch)


cases = {
    "seed": lambda: calibrate(net(seed=rank), data),
    "one weight": lambda: calibrate(edited(rank), data),
    "march": lambda: calibrate(net(march=[March.BAYES, March.NASH_E][rank]), data),
    "observer": lambda: calibrate(net(activation_observer=["mse", "kl"][rank]), data),
    "format": lambda: calibrate(net(activation_qkwargs={"dtype": ["qint8", "qint16"][rank]}), data),
    "given scale": lambda: calibrate(net(stub=[None, 0.5][rank]), data),
    "given scales": lambda: calibrate(net(stub=[0.25, 0.5][rank]), data),
    "layer": lambda: calibrate(net(*[(conv, nn.ReLU), (conv, nn.Sigmoid)][rank]), data),
    "class": lambda: calibrate(net([conv, linear][rank]), data),
    "longer": lambda: calibrate(net(*[conv] * (1 + rank)), data),
    "steps": lambda: calibrate(net(), data, steps=1 + rank),
    "patience": lambda: calibrate(net(), data, patience=1 + rank),
    "state file": lambda: calibrate(net(), data, state_file=[None, "state"][rank]),
    "by hand": lambda: by_hand(net(*[(conv, nn.ReLU, conv), (conv, nn.Sigmoid, conv)][rank])),
    "by hand, channels": lambda: by_hand(net(lambda: nn.Conv2d(2, 2 + rank, 1))),
    "by hand, observer": lambda: by_hand(net(activation_observer=["mse", "min_max"][rank])),
}
found = {}
for name, case in cases.items():
    try:
        case()
        found[name] = "nothing"
    except CalibrationError as error:
        found[name] = str(error)
# And after all this the same model goes through, in any state file that each has.
found["same"] = [float(s.max()) for s in calibrate(net(), data, state_file=f"state.{rank}").scales.values()]
with open(f"{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""

WEIGHT = "the weights `module.0.weight` of process 1 are not those of process 0. Load the same checkpoint"
WORDS = {
    "seed": WEIGHT,
    "one weight": WEIGHT,
    "march": "the march is bayes in process 0 and nash-e in process 1",
    "observer": "the quantizer `quant.activation_post_process` is qint8 by MSEObserver",
    "format": "the quantizer `quant.activation_post_process` is qint8 by MovingAverageMinMaxObserver",
    "given scale": "the quantizer `quant.activation_post_process` is qint8 by MovingAverageMinMaxObserver",
    "given scales": "of scale [0.25] in process 0 and qint8 by FixedScaleObserver",
    "layer": "`module.0",
    "class": "the module `module.0` is Conv2d(2, 2, kernel_size=(1, 1), stride=(1, 1)) in process 0 and Linear(in_f",
    "longer": "`module.1",
    "steps": "steps is 1 in process 0 and 2 in process 1",
    "patience": "patience is 1 in process 0 and 2 in process 1",
    "state file": "a state_file is False in process 0 and True in process 1",
    "by hand": "the processes do not do the same: where process 0 has",
    "by hand, channels": "the processes do not do the same: the tensor `module.0 (weight)` is qint8, 2 ranges",
    "by hand, observer": "the processes do not do the same: the tensor `quant` is qint8, 1 ranges, MSEObserver",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("processes")
    for done in run_workers(folder, WORKER):
        assert done.returncode == 0, done.stderr[-3000:]
    assert not list(folder.glob("state*"))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", WORDS)
def test_the_first_difference_is_named_in_every_process(case, found) -> None:
    for of_process in found:
        assert WORDS[case] in of_process[case]
        assert case.startswith("by hand") or of_process[case].startswith("calibrate: the processes do not do the same")


def test_the_processes_go_on(found) -> None:
    assert found[0]["same"] == found[1]["same"] != []
