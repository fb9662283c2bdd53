"""A pickled model in another process: with the user's hooks, with its source elsewhere, and with other source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_scripts

pytestmark = pytest.mark.processes

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub

def halved(x):
    return F.relu(x) * 0.5

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 3, 1), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x) + x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant, self.unused = QuantStub(), DeQuantStub(), QuantStub()
        self.part, self.fc, self.norm = Part(), nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x):
        return self.dequant(self.norm(self.fc(halved(self.part(self.quant(x))).mean((2, 3)))))
"""
BEGIN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import net
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, convert, get_default_qconfig, set_fake_quantize
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.utils.check_model import check_qat_model
set_march(March.NASH_E)
file = sys.argv[2]
"""
SAVE = """
torch.manual_seed(0)
x = torch.randn(2, 3, 4, 4)
model = prepare(net.Net().eval(), (x,), qconfig_dict={"": get_default_qconfig()}, method=sys.argv[3], out_dir=None)
model.eval()(x)
set_fake_quantize(model, FakeQuantState.VALIDATION)
torch.save((model, convert(model), x, model(x)), file)
"""
LOAD = "prepared, converted, x, want = torch.load(file, weights_only=False)\n"
WITH_HOOKS = """
for model in (prepared, converted):
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    seen = []
    handles = [m.register_forward_hook(lambda m, i, o: seen.append(m)) for m in model.modules()]
    handles += [m.register_forward_pre_hook(lambda m, i: seen.append(m)) for m in model.modules()]
    after = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert after == before + len(handles), (before, after)
    assert torch.equal(model(x), want)
    assert seen
    for handle in handles:
        handle.remove()
    assert torch.equal(model(x), want)
"""
CHECKED = """
check_qat_model(prepared, (x,), save_results=False)
assert torch.equal(prepared(x), want)
"""
EQUAL = "assert torch.equal(prepared(x), want) and torch.equal(converted(x), want)\n"
CHANGED = """
from horizon_plugin_pytorch.errors import UnknownCallError
for model in (prepared, converted):
    try:
        model(x)
    except UnknownCallError as error:
        assert "the source of `net.halved` at `` (net.py" in str(error).replace("in the top module", "at ``"), error
        assert "state_dict" in str(error)
    else:
        raise AssertionError("no error")
"""


def _run(code: str, *argv: Any) -> None:
    (done,) = run_scripts(argv[0], BEGIN + code, [*map(str, argv)])
    assert done.returncode == 0, done.stderr[-2000:]


def _source(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "net.py").write_text(text)
    return folder


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_loaded_model_keeps_its_hooks(method: str, tmp_path: Path) -> None:
    source, file = _source(tmp_path / "source", MODEL), tmp_path / "model.pt"
    _run(SAVE, source, file, method)
    _run(LOAD + WITH_HOOKS + CHECKED, source, file)


def test_the_source_of_a_loaded_model_may_be_elsewhere_but_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    _run(SAVE, _source(tmp_path / "source", MODEL), file, "jit-strip")
    _run(LOAD + EQUAL, _source(tmp_path / "moved", "# A comment.\n" + MODEL), file)
    _run(LOAD + CHANGED, _source(tmp_path / "changed", MODEL.replace("F.relu(x) * 0.5", "F.relu(0.5 * x)")), file)
