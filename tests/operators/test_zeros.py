"""Tensors of zeros: weights as branches begin, parameters, inputs and states. They say nothing about a range, and must
not spoil what they meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import AccumulatorWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert_fx, prepare
from tests.operators.cases import arithmetic, attention, gemm, norms
from tests.operators.cases.base import Case
from tests.routes import as_numbers, assert_one_arithmetic, calibrate, mismatches, prepared, qconfig
from tests.tiers import in_soak

LIMITS = {"qint8": 0.06, "qint16": 0.02}
CASES = {case.name: case for part in (gemm, arithmetic, norms, attention) for case in part.CASES}
_NAMES = list(CASES)  # spellings of one operator are next to each other
# They keep the grid of their input, which zeros do not give.
GRID_OF_THE_INPUT = {"clamp-outside-of-the-range", "clamp-by-a-tensor", "clamp-by-tensors"}


def _zeros(case: Case) -> Iterator[tuple[set[int], set[str]]]:
    """Which inputs and which parameters are zero."""
    yield from (({i}, set()) for i in range(len(case.shapes)) if case.name not in GRID_OF_THE_INPUT)
    weights = {name for name, _ in case.model().named_parameters() if not name.endswith("bias")}
    if weights:
        yield set(), weights


def _of_all(names: list[str], step: int) -> list[Any]:
    """Some of them, and the others for `make soak`."""
    return [name if number % step == 0 else in_soak(name)[0] for number, name in enumerate(names)]


def _copied(inputs: list[Tensor]) -> list[Tensor]:
    """Some cases write into their inputs."""
    return [x.clone() for x in inputs]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _of_all(_NAMES, 6))
def test_an_operand_of_zeros_spoils_nothing(name: str) -> None:
    case = CASES[name]
    dtype = case.formats[-1]
    set_march(case.march)
    for inputs_of_zeros, weights_of_zeros in _zeros(case):
        model = case.model()
        inputs = [torch.zeros_like(x) if i in inputs_of_zeros else x for i, x in enumerate(case.inputs())]
        with torch.no_grad():
            for weight in weights_of_zeros:
                model.get_parameter(weight).zero_()
            qat = prepared(model, _copied(inputs), dtype)
            exact, wanted = qat(*_copied(inputs)), model.body(*_copied(inputs))
            assert not mismatches(as_numbers(exact), as_numbers(convert_fx(qat)(*_copied(inputs))))
        picks = [(exact[0], wanted)] if case.picks is None else [(exact[0][i], wanted[i]) for i in case.picks]
        for found, real in picks:
            assert isinstance(found, QTensor)
            is_number = real.isfinite()  # a division by zero gives none
            if not is_number.any():
                continue
            error = float((found.dequantize() - real)[is_number].abs().max())
            size = float(real[is_number].abs().max())
            assert error <= max(LIMITS[dtype] * size, 1e-6), (inputs_of_zeros, weights_of_zeros)


class Net(nn.Module):
    """A quantized input, a function of it, and its parts."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


def _zero(layer: Any, *names: str, bias: float = 4.0) -> Any:
    """The layer with zeros in these parameters, and a bias of some size."""
    with torch.no_grad():
        for name in names or ("weight",):
            getattr(layer, name).zero_()
        if getattr(layer, "bias", None) is not None and "bias" not in names:
            layer.bias.uniform_(-bias, bias)
    return layer


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _small_bias(layer: Any) -> Any:
    with torch.no_grad():
        layer.bias.mul_(0.05)
    return layer


def _pruned(layer: Any, axis: int = 0) -> Any:
    """Every other output channel is zero."""
    with torch.no_grad():
        layer.weight.transpose(0, axis)[::2] = 0
    return layer


def _branch(self: Any, x: Tensor) -> Tensor:
    return x + self.last(self.first(x).relu())


def _attention(self: Any, x: Tensor) -> Tensor:
    weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
    return weights @ self.v(x)


Linear = nn.Linear
IMAGE, ROWS = (2, 6, 5, 4), (2, 5, 6)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear of no weight": (lambda: Net(lambda s, x: s.fc(x), fc=_zero(Linear(6, 8))), ROWS),
    "linear of no weight, small bias": (lambda: Net(lambda s, x: s.fc(x), fc=_zero(Linear(6, 8), bias=1e-3)), ROWS),
    "linear of no weight and no bias": (lambda: Net(lambda s, x: s.fc(x), fc=_zero(Linear(6, 8, bias=False))), ROWS),
    "linear on many rows": (lambda: Net(lambda s, x: s.fc(x), fc=_zero(Linear(4, 256))), (1, 1100, 4)),
    "linear, relu": (lambda: Net(lambda s, x: s.fc(x).relu(), fc=_zero(Linear(6, 8))), ROWS),
    "conv1d": (lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.Conv1d(6, 4, 3))), (2, 6, 9)),
    "conv2d": (lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.Conv2d(6, 4, 3))), IMAGE),
    "conv3d": (lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.Conv3d(2, 4, 2))), (1, 2, 4, 4, 4)),
    "depthwise": (lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.Conv2d(6, 6, 3, groups=6))), IMAGE),
    "transposed": (lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.ConvTranspose2d(6, 4, 2, 2))), IMAGE),
    "transposed groups": (
        lambda: Net(lambda s, x: s.conv(x), conv=_zero(nn.ConvTranspose2d(6, 4, 2, 2, groups=2))), IMAGE,
    ),
    "pruned conv": (lambda: Net(lambda s, x: s.conv(x), conv=_pruned(nn.Conv2d(6, 8, 3))), IMAGE),
    "pruned transposed": (lambda: Net(lambda s, x: s.conv(x), conv=_pruned(nn.ConvTranspose2d(6, 8, 3), 1)), IMAGE),
    "batch norm of no gain": (
        lambda: Net(lambda s, x: s.bn(s.conv(x)), conv=nn.Conv2d(6, 4, 3), bn=_zero(nn.BatchNorm2d(4)).eval()), IMAGE,
    ),
    "branch that ends in zeros": (
        lambda: Net(_branch, first=Linear(6, 8), last=_zero(Linear(8, 6), "weight", "bias")), ROWS,
    ),
    "branch that begins in zeros": (lambda: Net(_branch, first=_zero(Linear(6, 8)), last=Linear(8, 6)), ROWS),
    "gate of zero": (lambda: Net(lambda s, x: x + s.gate * s.fc(x), gate=zeros(1), fc=Linear(6, 6)), ROWS),
    "positions of zero": (lambda: Net(lambda s, x: s.fc(x) + s.at, fc=Linear(6, 6), at=zeros(5, 6)), ROWS),
    "positions of zero, tiny layer": (
        lambda: Net(lambda s, x: s.fc(x * 1e-4) + s.at, fc=Linear(6, 6, bias=False), at=zeros(5, 6)), ROWS,
    ),
    "one position": (lambda: Net(lambda s, x: s.fc(x) + s.at, fc=Linear(6, 6), at=zeros(1)), ROWS),
    "conv and a map of zeros": (
        lambda: Net(lambda s, x: (s.conv(x) + s.at).relu(), conv=nn.Conv2d(6, 6, 1), at=zeros(6, 5, 4)), IMAGE,
    ),
    "cat with zeros": (lambda: Net(lambda s, x: torch.cat([x, s.at * x], 1), at=zeros(1)), ROWS),
    "dead activation": (lambda: Net(lambda s, x: s.fc((x - 9).relu()), fc=Linear(6, 8)), ROWS),
    "dead activation, small bias": (
        lambda: Net(lambda s, x: s.fc((x - 9).relu()), fc=_small_bias(Linear(6, 8))), ROWS,
    ),
    "layer norm of no weight": (lambda: Net(lambda s, x: s.norm(x), norm=_zero(nn.LayerNorm(6))), ROWS),
    "group norm of no weight": (lambda: Net(lambda s, x: s.norm(x), norm=_zero(nn.GroupNorm(2, 6))), IMAGE),
    "attention to nothing": (lambda: Net(_attention, q=_zero(Linear(6, 4)), k=Linear(6, 4), v=Linear(6, 4)), ROWS),
    "attention with no values": (lambda: Net(_attention, q=Linear(6, 4), k=Linear(6, 4), v=_zero(Linear(6, 4))), ROWS),
    "difference to itself": (lambda: Net(lambda s, x: s.fc(x - x) + x, fc=Linear(6, 6)), ROWS),
    "matmul with zeros": (lambda: Net(lambda s, x: (x @ s.at) + s.fc(x), at=zeros(6, 6), fc=Linear(6, 6)), ROWS),
}  # fmt: skip


def _near(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert float((found - wanted).norm()) <= limit * float(wanted.norm()) + 1e-6


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.CalibrationWarning")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NETS)
def test_nets_with_zeros_are_exact_and_near_float(name: str, dtype: str, tmp_path: Any) -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x = make().eval(), torch.randn(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?!matmul)", AccumulatorWarning)  # those of int16 products are true
        qat = prepared(net, (x,), dtype)
        with torch.no_grad():
            _near(qat(x), net(x), LIMITS[dtype] / 2)
            by_running = calibrate(prepare(net, (x,), qconfig_dict={"": qconfig(dtype)}, out_dir=None), (x,))
            _near(by_running(x), net(x), LIMITS[dtype] / 2)
        assert_one_arithmetic(qat, (x,), tmp_path, [(3 * torch.randn(shape),)])
