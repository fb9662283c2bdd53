"""Numbers, tensors and arrays that a forward changes in plain Python: told where a graph cannot follow."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    convert,
    prepare,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import calibrate, qconfig, run_onnx

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
STEPS = {"n": 0}


class Memory:
    """An object of the user's."""

    def __init__(self) -> None:
        self.t, self.n = torch.ones(8), 1


class Net(nn.Module):
    calls, seen = 1, [0.0]  # of the class

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.body = QuantStub(), DeQuantStub(), body
        self.list, self.dict, self.memory = [torch.ones(8), 1.0], {"a": torch.ones(8)}, Memory()
        self.space, self.queue = SimpleNamespace(n=1), collections.deque([1.0, 2.0, 3.0])
        self.tensor, self.number, self.array = torch.ones(8), 1, np.ones(8, dtype=np.float32)
        self.grown: list[float] = []
        self.made: Any = None
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self, self.quant(x)))


def _replaced(s: Net, x: Tensor) -> Tensor:
    s.list[0] = s.list[0] + 1
    return x + s.list[0]


def _written(s: Net, x: Tensor) -> Tensor:
    s.dict["a"].add_(1)
    return x + s.dict["a"]


def _in_object(s: Net, x: Tensor) -> Tensor:
    s.memory.t = s.memory.t * 2
    s.memory.n += 1
    return x + s.memory.t * s.memory.n


def _in_namespace(s: Net, x: Tensor) -> Tensor:
    s.space.n += 1
    return x * float(s.space.n)


def _rotated(s: Net, x: Tensor) -> Tensor:
    s.queue.rotate(1)
    return x * s.queue[0]


def _attributes(s: Net, x: Tensor) -> Tensor:
    s.tensor, s.number = s.tensor + 1, s.number + 1
    return x * s.number + s.tensor


def _numpy(s: Net, x: Tensor) -> Tensor:
    s.array += 1
    return x + torch.from_numpy(s.array)


def _growing(s: Net, x: Tensor) -> Tensor:
    s.grown.append(1.0)
    return x * float(len(s.grown))


def _global(s: Net, x: Tensor) -> Tensor:
    STEPS["n"] += 1
    return x * float(STEPS["n"])


def _of_class(s: Net, x: Tensor) -> Tensor:
    type(s).calls += 1
    Net.seen[0] += 1
    Net.seen.append(1.0)
    return x * float(Net.calls)


def _of_constants(s: Net, x: Tensor) -> Tensor:
    s.list[0] = torch.ones(8)
    s.number = 1
    s.number += 1
    if s.made is None:
        s.made = torch.arange(8.0)
    if 8 not in s.cache:
        s.cache[8] = torch.arange(8.0)
    return x + s.made + s.cache[8] * s.number


CHANGING = {
    _replaced: r"`list\[0\]`",
    _written: r"`dict\['a'\]`",
    _in_object: r"`memory\.t`, `memory\.n`",
    _in_namespace: r"`space\.n`",
    _rotated: r"`queue\[0\]`, `queue\[1\]`, `queue\[2\]`",
    _attributes: "`tensor`, `number`",
    _numpy: "`array`",
    _growing: r"`len\(grown\)`",
    _global: r"`STEPS\['n'\]`",
    _of_class: r"`Net\.calls`, `len\(Net\.seen\)`, `Net\.seen\[0\]`",
}


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


@pytest.mark.parametrize("body", CHANGING)
def test_tracing_tells_what_each_forward_changes(body: Any) -> None:
    with pytest.warns(QuantizationWarning, match=f"`Net`: its forward writes to {CHANGING[body]}"):
        prepare_qat_fx(Net(body).eval(), {"": qconfig()})


def _look(net: Any) -> Any:
    parts = [net.list, net.dict, net.memory.t, net.memory.n, net.space.n, list(net.queue), net.tensor, net.number]
    return copy.deepcopy([*parts, net.array, net.grown, net.cache, Net.calls])


def _of_all(s: Net, x: Tensor) -> Tensor:
    for body in (_replaced, _written, _in_object, _in_namespace, _rotated, _attributes, _numpy, _growing, _of_class):
        x = body(s, x)
    s.cache[0] = s.cache.get(0, 0) + 1
    return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT, PrepareMethod.JIT_STRIP])
def test_runs_of_prepare_are_no_forwards_of_the_users(method: PrepareMethod) -> None:
    net = Net(_of_all).eval()
    before = _look(net)
    model = prepare(net, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    for after in (_look(net), _look(model)):
        assert str(after) == str(before)
    model(X)
    assert (str(_look(model)) == str(before)) == (method is PrepareMethod.SYMBOLIC)


class Kept(Net):
    """It keeps real numbers outside of the quantized part; at first there are none."""

    def forward(self, x: Tensor) -> Tensor:
        if self.made is not None:
            x = x + self.made
        self.made = x
        y = self.dequant(self.quant(x))
        if self.grown:
            y = y + self.grown[-1]
        self.grown.append(y)
        return y


def test_tracing_tells_of_real_numbers_that_the_next_forward_reads() -> None:
    lines = r"the input `x`, read at test_plain_state.py:\d+, line test_plain_state.py:\d+, read at test_plain_state.py"
    with pytest.warns(QuantizationWarning, match=rf"`Kept`: a tensor of one forward .*\({lines}.*as the first one"):
        prepare_qat_fx(Kept(_numpy).eval(), {"": qconfig()})


def test_what_is_made_once_or_is_the_same_each_time_is_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepare_qat_fx(Net(_of_constants).eval(), {"": qconfig()})


@pytest.mark.parametrize("body", [_attributes, _in_object, _numpy])
def test_export_tells_what_the_file_has_once_and_for_all(body: Any, tmp_path: Any) -> None:
    net = Net(body).eval()
    quantized = convert(calibrate(prepare(net, (X,), qconfig_dict={"": qconfig()}, out_dir=None), (X,)))
    with pytest.warns(QuantizationWarning, match=f"its forward changes {CHANGING[body]}.*this one run"):
        export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx")


def _array_between(s: Net, x: Tensor) -> Tensor:
    t = torch.from_numpy(s.array)
    for step in range(3):
        s.array[:] = step + 1
        x = x * t
    return x + torch.as_tensor(s.array)


def _view_between(s: Net, x: Tensor) -> Tensor:
    t = torch.zeros(8)
    x = x + t
    array = t.numpy()
    array += 1
    x = x + t
    np.multiply(array, 3, out=array)
    return x * t


def _positions_between(s: Net, x: Tensor) -> Tensor:
    array = np.array([0, 1])
    positions = torch.from_numpy(array)
    first = x[:, positions]
    array[:] = [5, 6]
    return first - x[:, positions]


@pytest.mark.parametrize("body", [_array_between, _view_between, _positions_between])
def test_arrays_that_are_written_between_two_reads(body: Any, tmp_path: Any) -> None:
    class Float(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(self, self.dequant(self.quant(x)))

    net = Float(body).eval()
    qat = prepare(net, (X,), qconfig_dict={"": qconfig("qint16")}, method=PrepareMethod.JIT, out_dir=None)
    quantized = convert(calibrate(qat, (X,)))
    (found,) = run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx"), (X,))
    assert torch.allclose(found, quantized(X), atol=1e-5) and torch.allclose(found, net(X), atol=0.01)
