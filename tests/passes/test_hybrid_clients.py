"""Hybrid models as clients write them, from training to ONNX Runtime: every route, one arithmetic."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    prepare,
    prepare_qat,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    default_calibration_qconfig_setter,
)
from horizon_plugin_pytorch.utils.quant_profiler import check_deploy_device
from tests.routes import as_numbers, assert_one_arithmetic, calibrate, mismatches, qconfig

METHODS = ["symbolic", "jit-strip"]


def data(*size: int) -> Tensor:
    return torch.rand(*size, generator=torch.Generator().manual_seed(sum(size))) - 0.3


def block(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels), nn.ReLU())


class Client(nn.Module):
    inputs: Any = (data(1, 4, 8, 8),)
    hybrid_dict: dict[str, list] | None = None
    has_own_stubs = False  # tracing makes a stub for each call of a shared module, running one for each line

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()


class Boxes(nn.Module):
    def forward(self, scores: Tensor, deltas: Tensor) -> dict[str, Tensor]:
        sides, centers = deltas[:, 2:].exp(), deltas[:, :2]
        best, labels = scores.sigmoid().max(1)
        return {"boxes": torch.cat([centers - sides / 2, centers + sides / 2], 1), "scores": best, "labels": labels}


class Detector(Client):
    """Post-processing in float, by type; its results are handed out without a DeQuantStub."""

    hybrid_dict = {"module_type": [Boxes]}

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.deltas, self.boxes = block(), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 4, 1), Boxes()

    def forward(self, x: Tensor) -> Any:
        x = self.body(self.quant(x))
        return self.boxes(self.scores(x), self.deltas(x))


class Warp(nn.Module):
    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, align_corners=False)


class Bev(Client):
    """A grid of float, made of an input without a stub."""

    inputs = (data(1, 4, 8, 8), torch.eye(3)[None] + 0.1 * data(1, 3, 3))
    hybrid_dict = {"module_name": ["warp"]}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.warp, self.last = nn.Conv2d(4, 4, 3, 1, 1), Warp(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        line = torch.linspace(-1, 1, 8)
        points = torch.stack([*torch.meshgrid(line, line, indexing="xy"), torch.ones(8, 8)], -1)
        points = points[None] @ matrix.transpose(1, 2)[:, None]
        grid = points[..., :2] / points[..., 2:].clamp(min=0.1)
        return self.dequant(self.last(self.warp(self.first(self.quant(x)), grid)))


class Attention(Client):
    """A softmax in float, by type."""

    inputs = (data(2, 6, 8),)
    hybrid_dict = {"module_type": [nn.Softmax], "module_name": ["norm"]}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.softmax, self.qkv, self.out = (
            nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 24), nn.Linear(8, 8),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.dequant(x + self.out(self.softmax(q @ k.transpose(1, 2) * 8**-0.5) @ v))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.sum, self.relu = block(), block(), FloatFunctional(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.sum.add(x, self.b(self.a(x))))


class Nested(Client):
    """A block of the body in float, with a FloatFunctional in it, and a FloatFunctional alone."""

    hybrid_dict = {"module_name": ["body.1", "product"]}

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(Residual(), Residual(), Residual()), nn.Conv2d(4, 2, 1)
        self.product = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.head(self.product.mul(self.body(x), x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.left, self.b = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.left(self.a(x))) + x)


class Shared(Client):
    """Float inside a module that is called twice; dictionaries in and out."""

    has_own_stubs = True

    inputs = ({"near": data(1, 4, 8, 8), "far": data(1, 4, 4, 4)},)
    hybrid_dict = {"module_name": ["head.left"]}

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = Head(), QuantStub()

    def forward(self, images: dict[str, Tensor]) -> Any:
        near, far = self.head(self.quant(images["near"])), self.head(self.other(images["far"]))
        return {"near": self.dequant(near), "far": [self.dequant(far), far.shape[0]]}


class Written(Client):
    """Writes in place to what the CPU gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(4, 4, 1), nn.SELU(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.act(self.first(x)).clamp_(-1, 1)
        y[:, 0] = 0.5
        y += x
        return self.dequant(self.last(y))


class Recurrent(Client):
    """An LSTM in float, whose state is handed out."""

    inputs = (data(2, 5, 4),)
    hybrid_dict = {"module_type": [nn.LSTM]}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        y, (hidden, _) = self.lstm(self.first(self.quant(x)))
        return self.dequant(self.last(y)), hidden


CLIENTS = [Detector, Bev, Attention, Nested, Shared, Written, Recurrent]


def prepared(net: Client, method: str) -> nn.Module:
    return prepare(
        net, net.inputs, qconfig_dict={"": qconfig()}, method=method, hybrid=True, hybrid_dict=net.hybrid_dict,
        out_dir=None,
    )  # fmt: skip


def made(cls: type[Client]) -> Client:
    torch.manual_seed(0)
    return cls().eval()


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLIENTS)
@pytest.mark.filterwarnings("ignore:.*one scale must fit")
def test_from_float_to_onnx_runtime(cls: type[Client], tmp_path: Any) -> None:
    set_march(March.NASH_E)
    found, keys, devices = [], [], []
    for method in METHODS:
        qat = calibrate(prepared(made(cls), method), cls.inputs)
        quantized = assert_one_arithmetic(qat, cls.inputs, tmp_path, has_float_code=True)
        found.append(as_numbers(qat(*cls.inputs)))
        keys.append(sorted(qat.state_dict()))
        devices.append(check_deploy_device(qat, False, tmp_path))
        assert check_deploy_device(quantized, False, tmp_path) == devices[-1]
        other = prepared(made(cls), method)
        other.load_state_dict(qat.state_dict())
        set_fake_quantize(other.eval(), FakeQuantState.VALIDATION)
        for same in (other, copy.deepcopy(qat), pickle.loads(pickle.dumps(qat)), pickle.loads(pickle.dumps(quantized))):
            assert mismatches(as_numbers(same(*cls.inputs)), found[-1]) == 0
    if not cls.has_own_stubs:
        assert keys[0] == keys[1] and mismatches(*found) == 0
    wanted = as_numbers(made(cls)(*cls.inputs))
    for x, y in zip(found[-1], wanted, strict=True):
        assert not y.is_floating_point() or float((x - y).detach().abs().max()) < 0.05 * float(y.detach().abs().max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", CLIENTS)
@pytest.mark.filterwarnings("ignore:.*one scale must fit")
def test_hybrid_models_train(cls: type[Client], method: str) -> None:
    set_march(March.NASH_E)
    qat = prepared(made(cls), method).train()
    optimizer = torch.optim.SGD(qat.parameters(), 0.1)
    before = {name: x.detach().clone() for name, x in qat.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        leaves = [x for x in pytree.tree_leaves(qat(*cls.inputs)) if isinstance(x, Tensor) and x.is_floating_point()]
        torch.stack([x.square().mean() for x in leaves]).sum().backward()
        assert all(x.grad is not None for x in qat.parameters())
        optimizer.step()
    assert sum(not torch.equal(x, before[name]) for name, x in qat.named_parameters()) > 0.8 * len(before)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_setter_leaves_float_runs_on_the_cpu(method: str) -> None:
    set_march(March.NASH_E)
    names = {"body.1": None, "body.1.a": qconfig(), "head": None}
    setters = (ModuleNameQconfigSetter(names), default_calibration_qconfig_setter)
    model = prepare(made(Nested), Nested.inputs, setters, method, hybrid=True, out_dir=None)
    kinds = [type(model.get_submodule(p)) is nn.Conv2d for p in ("body.0.a.0", "body.1.a.0", "body.1.b.0", "head")]
    assert kinds == [False, False, True, True]
    calibrate(model, Nested.inputs)
    assert mismatches(as_numbers(model(*Nested.inputs)), as_numbers(convert(model)(*Nested.inputs))) == 0


class Mixed(Client):
    """One FloatFunctional, whose sum BERNOULLI2 has and whose maximum it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.both = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.both.add(self.both.maximum(x, x.transpose(2, 3)), x))


@pytest.mark.parametrize("method", METHODS)
def test_a_functional_is_quantized_or_not(method: str) -> None:
    set_march(March.BERNOULLI2)
    with pytest.raises(
        UnsupportedOperatorError, match="`maximum` at `both`.*other methods of the same FloatFunctional"
    ):
        prepared(made(Mixed), method)


class Eager(Client):
    """Functions, and modules without a qconfig, between quantized modules; the QuantStubs after them are written."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.once_more = QuantStub(), QuantStub()
        self.first, self.left, self.last = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.sum, self.left_sum, self.drop, self.pool = (
            FloatFunctional(),
            FloatFunctional(),
            nn.Dropout(),
            nn.MaxPool2d(2),
        )

    def forward(self, x: Tensor) -> Any:
        x = self.drop(self.first(self.quant(x)))
        y = self.again(torch.sigmoid(x) * x.mean((2, 3), keepdim=True))
        z = F.interpolate(self.left_sum.add(self.left(self.pool(y)), self.pool(y)), scale_factor=2.0)
        z = self.last(self.sum.add(self.once_more(z), y))
        return self.dequant(z), z.softmax(1), torch.cat([z, y.exp()], 1)


@pytest.mark.slow
def test_eager_mode(tmp_path: Any) -> None:
    set_march(March.NASH_E)
    net = made(Eager)
    net.qconfig, net.left.qconfig, net.left_sum.qconfig = qconfig(), None, None
    qat = calibrate(prepare_qat(net, hybrid=True), net.inputs)
    assert_one_arithmetic(qat, net.inputs, tmp_path, has_float_code=True)
    found = as_numbers(qat(*net.inputs))
    for same in (copy.deepcopy(qat), pickle.loads(pickle.dumps(qat)), pickle.loads(pickle.dumps(convert(qat)))):
        assert mismatches(as_numbers(same(*net.inputs)), found) == 0
    for x, y in zip(found, net(*net.inputs), strict=True):
        assert float((x - y).detach().abs().max()) < 0.05
    trained = prepare_qat(net, hybrid=True).train()
    sum(x.mean() for x in trained(*net.inputs)).backward()
    assert all(x.grad is not None for x in trained.parameters())
    with pytest.raises(NotImplementedError, match="sigmoid.*not implemented for QTensor"):
        prepare_qat(net)(*net.inputs)
