"""Models that compute with parameters, buffers and sizes of their own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationWarning, TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, calibrate, convert_fx, prepare, prepare_qat_fx
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from tests.routes import assert_one_arithmetic, prepared, qconfig


class _Constants(nn.Module):
    """A model that computes with parameters and buffers of its own, in the way that `function` says."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.quant, self.dequant, self.other = QuantStub(), DeQuantStub(), QuantStub(scale=0.25)
        self.table, self.embedding = nn.Parameter(torch.randn(16, 8)), nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("positions", torch.randn(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + m.table[m.index],
        lambda m, x: x + m.table[m.index.view(-1)].view(4, 8).unsqueeze(0),
        lambda m, x: x + m.embedding(torch.arange(x.shape[1])),
        lambda m, x: x + m.embedding(m.index[: x.shape[1]]),
        lambda m, x: x + F.embedding(torch.arange(x.shape[1]), m.table),
        lambda m, x: x + F.embedding(weight=m.table, input=torch.arange(x.shape[1])),
        lambda m, x: x + torch.embedding(m.table, torch.arange(x.shape[1])),
        lambda m, x: x + m.positions[:, : x.size(1)],
        lambda m, x: x + m.positions[:, :4].expand(x.shape[0], -1, -1),
        lambda m, x: torch.cat([x, torch.zeros(x.shape[0], 1, 8)], 1),
        lambda m, x: x * torch.arange(8) + m.index[:, None],  # integers count as numbers
        lambda m, x: (x - torch.arange(x.shape[1]).flip(0)[:, None]) * (m.index > 1)[:, None] * (torch.arange(8) < 5),
    ],
)
def test_constants_that_indices_and_sizes_select(function: Any, tmp_path: Any) -> None:
    model, x = _Constants(function).eval(), torch.randn(2, 4, 8)
    quantized = assert_one_arithmetic(prepared(model, (x,), "qint16"), (x,), tmp_path)
    assert (quantized(x) - model(x)).abs().max() < 1e-3


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * (m.relu(m.table) / (m.relu(m.table).sum(0) + 1e-4))[2],  # weights of a BiFPN
        lambda m, x: x + m.norm(m.table)[:4],
        lambda m, x: x + m.linear(m.drop(m.table))[:4],
        lambda m, x: m.relu(x) + m.relu(m.table)[:4],  # one module, on a constant and on quantized numbers
        lambda m, x: m.linear(x) + m.linear(m.table)[:4],
        lambda m, x: x + m.sum.add(m.table[:4], m.positions[0, :4]),
        lambda m, x: x * m.sigmoid(m.embedding.weight)[0],
    ],
)
def test_constants_that_modules_compute(function: Any, method: str) -> None:
    set_march(March.NASH_M)
    model, x = _Constants(function).eval(), torch.randn(2, 4, 8)
    model.relu, model.linear, model.drop, model.sigmoid = nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Sigmoid()
    model.sum = FloatFunctional()
    model.eval()
    qat = prepare(model, (x,), default_calibration_qconfig_setter, method=method, out_dir=None)
    calibrate(qat, [x], progress=False)
    with torch.no_grad():
        assert torch.equal(qat(x), convert_fx(qat)(x))
        assert (qat(x) - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * F.one_hot(x.argmax(-1), 8),
        lambda m, x: x + (x.argmax(-1, keepdim=True) * 2 + 1),
        lambda m, x: torch.sub(*x.topk(3)),
    ],
)
def test_positions_that_count_as_numbers(function: Any, method: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    model, x = _Constants(function).eval(), torch.randn(2, 4, 8)
    qat = prepare(model, (x,), qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)
    calibrate(qat, [x], progress=False)
    assert (assert_one_arithmetic(qat, (x,), tmp_path)(x) - model(x)).abs().max() < 2e-3


@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * torch.from_numpy(np.full((4, 8), 0.5, np.float32)),
        lambda m, x: x * m.gamma,
        lambda m, x: torch.cat([x, torch.zeros(x.shape[0], 1, 8)], 1),
    ],
)
def test_constants_whose_values_are_equal_are_no_alarm(function: Any, method: str) -> None:
    set_march(March.NASH_M)
    model, x = _Constants(function).eval(), torch.randn(2, 4, 8)
    model.gamma = nn.Parameter(torch.full((8,), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        calibrated = prepare(model, x, default_calibration_qconfig_setter, method, out_dir=None)
        calibrate(calibrated, [x], progress=False)
    assert calibrated._generated_quant_0.activation_post_process.has_statistics


def test_tracing_leaves_torch_as_it_was() -> None:
    zeros, methods = torch.zeros, set(vars(Tensor))
    prepare_qat_fx(_Constants(lambda m, x: m.norm(x)), {"": qconfig()})
    assert torch.zeros is zeros and set(vars(Tensor)) == methods
    assert torch.tensor([torch.ones(2)[0], torch.zeros(())]).tolist() == [1, 0]  # tensors are no sequences to Python


def test_a_converted_model_has_no_gradients() -> None:
    x = torch.randn(2, 4, 8)
    quantized = convert_fx(prepared(_Constants(lambda m, x: m.norm(x + m.table[:4])), (x,)))
    assert torch.is_grad_enabled() and not quantized(x).requires_grad


@pytest.mark.parametrize("name", ["table", "positions"])
def test_a_quant_stub_on_a_constant_is_the_only_one(name: str) -> None:
    model, x = _Constants(lambda m, x: x + m.other(getattr(m, name)[..., :4, :])).eval(), torch.randn(2, 4, 8)
    qat = prepared(model, (x,))
    assert not [path for path, _ in qat.named_modules() if "_generated_quant" in path]
    given = []
    quantized = convert_fx(qat)
    quantized.other.register_forward_hook(lambda module, args, out: given.append(out.q_scale()))
    quantized(x)
    assert given == [0.25]


def test_a_loop_over_a_size_says_what_to_write() -> None:
    model = _Constants(lambda m, x: sum(x for _ in range(x.shape[0])))
    with pytest.raises(TraceError, match=r"test_constants.py:\d+: a size is not known .*range\(self.levels\)"):
        prepare_qat_fx(model, {"": qconfig()})


def _casts(y: Tensor) -> Tensor:
    return (y * torch.linspace(0.5, 1.0, 4, dtype=torch.float64)).to(torch.float32)


_OF_OTHER_TYPES: dict[str, Any] = {
    "float64": lambda y: y + torch.linspace(0.0, 1.0, 4, dtype=torch.float64),
    "array": lambda y: torch.cat([y, torch.from_numpy(np.full((2, 1, 4, 4), 0.3))], 1),
    "float16": lambda y: y * torch.full((1, 3, 1, 1), 0.3, dtype=torch.float16),
    "of a type": lambda y: y - torch.full_like(y, 0.3, dtype=torch.float64),
    "zeros": lambda y: y + torch.zeros_like(y, dtype=torch.float64),
    "and back": _casts,
}


@pytest.mark.parametrize("method", ["symbolic", "jit", "jit-strip"])
@pytest.mark.parametrize("function", _OF_OTHER_TYPES.values(), ids=list(_OF_OTHER_TYPES))
def test_constants_of_other_real_types(function: Any, method: str, tmp_path: Any) -> None:
    """numpy's numbers are float64: they get a scale as those of float32 do."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(function(self.conv(self.quant(x))))

    set_march(March.NASH_E)
    x = torch.randn(2, 3, 4, 4)
    net = Net().eval()
    net.qconfig = qconfig()
    expected = net(x).float()
    qat = prepare(net, example_inputs=(x,), method=method)
    calibrate(qat, [(x,)])
    assert_one_arithmetic(qat, (x,), tmp_path)
    assert (qat(x) - expected).abs().max() < 0.03 * expected.abs().max()
