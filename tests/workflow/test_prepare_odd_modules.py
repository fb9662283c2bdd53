"""Prepare by running takes modules that are written in ways nobody recommends."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from horizon_plugin_pytorch.capture.graph_text import graph_text
from horizon_plugin_pytorch.errors import TraceError, UnsupportedOperatorError
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import as_numbers, calibrate, mismatches, qconfig


class PlainWeights(nn.Module):
    """Weights that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.randn(4, 4), torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class NewReLU(nn.Module):
    """A forward that puts a new module into `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fc(x) + x)
        self.relu = nn.ReLU()
        return x


def _written_in_torch() -> type[nn.Module]:
    """A module whose file is one of torch's, as those of `torch.testing` are."""
    text = """
class Sums(nn.Module):
    def forward(self, x):
        y = x + x
        return 100 * x + y
"""
    space = {"nn": nn, "__name__": "torch.testing.sums"}
    exec(compile(text, str(Path(torch.__file__).parent / "testing" / "sums.py"), "exec"), space)
    return space["Sums"]


@pytest.mark.parametrize("cls", [PlainWeights, NewReLU, _written_in_torch()])
def test_prepared_and_converted_models_follow_the_float_one(cls):
    model, inputs = QuantWrapper(cls()).eval(), (torch.randn(16, 4),)
    qat = calibrate(prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, out_dir=None), inputs)
    with torch.no_grad():
        wanted, found = model(*inputs), qat(*inputs)
        assert torch.allclose(found, wanted, atol=1e-2 * float(wanted.abs().max()))
        quantized = convert(qat)
        for _ in range(2):
            assert mismatches(as_numbers(quantized(*inputs)), as_numbers(found)) == 0
            assert mismatches(as_numbers(qat(*inputs)), as_numbers(found)) == 0


def test_a_weight_that_is_a_plain_attribute_is_a_constant():
    model, inputs = QuantWrapper(PlainWeights()), (torch.randn(2, 4),)
    qat = prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None)
    assert list(qat.parameters()) == []
    assert torch.equal(qat.module._generated_linear_0.weight, model.module.weight)


def test_each_line_of_a_forward_in_torch_has_its_module():
    model, inputs = QuantWrapper(_written_in_torch()()), (torch.randn(2, 4),)
    qat = prepare(model, inputs, qconfig_dict={"": qconfig()}, out_dir=None)
    assert {name for name, _ in qat.module.named_children()} >= {"_generated_add_0", "_generated_add_1"}


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*weight_norm.*:DeprecationWarning")
def test_a_computed_weight_becomes_a_weight_that_trains(norm, method):
    model, inputs = QuantWrapper(norm(nn.Linear(4, 4))).eval(), (torch.randn(2, 4),)
    before = set(model.state_dict())
    wanted = model(*inputs)
    qat = prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)
    assert torch.allclose(calibrate(qat, inputs)(*inputs), wanted, atol=0.05)
    set_fake_quantize(qat, FakeQuantState.QAT)
    qat(*inputs).sum().backward()
    assert qat.module.weight.is_leaf and float(qat.module.weight.grad.abs().sum()) > 0
    assert {"module.weight", "module.bias"} <= set(qat.state_dict())
    prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None).load_state_dict(
        qat.state_dict()
    )
    assert set(model.state_dict()) == before and torch.equal(model(*inputs), wanted)  # the caller's is not touched
    copy.deepcopy(qat)(*inputs)


class Sequence(nn.Module):
    """A recurrent layer, as readers of text write it."""

    def __init__(self, cls):
        super().__init__()
        self.rnn = cls(4, 4, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(x)[0]


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_forward_may_flatten_parameters(cls, method):
    model, inputs = QuantWrapper(Sequence(cls)).eval(), (torch.randn(3, 2, 4),)
    qat = calibrate(prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None), inputs)
    assert torch.allclose(qat(*inputs), model(*inputs), atol=0.05)
    assert torch.equal(qat(*inputs), convert(qat)(*inputs))


class LongAndPooled(nn.Module):
    """More calls than pickle could follow from one to the next, and a function that has no name of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x, 2)
        for _ in range(400):
            x = x.flip(-1)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_long_models_can_be_pickled(method):
    model, inputs = QuantWrapper(LongAndPooled()).eval(), (torch.randn(1, 2, 4, 4),)
    qat = calibrate(prepare(model, inputs, qconfig_dict={"": qconfig()}, method=method, out_dir=None), inputs)
    again = pickle.loads(pickle.dumps(qat))
    assert graph_text(again.graph) == graph_text(qat.graph) == graph_text(copy.deepcopy(qat).graph)
    assert torch.equal(again(*inputs), qat(*inputs))
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(qat)))(*inputs), qat(*inputs))


class Replaced(nn.Module):
    """A forward that is put in place of the class's, as after `fuse()` of a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.forward = self.forward_fuse

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def forward_fuse(self, x: Tensor) -> Tensor:
        return self.fc(x).relu() * 2


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_forward_that_is_an_attribute_of_a_users_module_is_the_one_that_runs(method):
    model, inputs = QuantWrapper(Replaced()).eval(), (torch.randn(16, 4),)
    qat = prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)
    with torch.no_grad():
        found = calibrate(qat, inputs)(*inputs)
        assert torch.allclose(found, model(*inputs), atol=1e-2)
        assert mismatches(as_numbers(convert(qat)(*inputs)), as_numbers(found)) == 0


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_forward_that_is_an_attribute_of_a_layer_is_refused(method):
    model = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    model.module[1].forward = lambda x: F.leaky_relu(x, 0.1)
    with pytest.raises(UnsupportedOperatorError, match=r"`module.1` is a ReLU whose `forward` was replaced"):
        prepare(model, (torch.randn(2, 4),), qconfig_dict={"": qconfig()}, method=method, out_dir=None)


def test_a_forward_that_is_an_attribute_of_the_model_is_not_traced():
    class Model(QuantWrapper):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4))
            self.forward = self.forward_fuse

        def forward_fuse(self, x: Tensor) -> Tensor:
            return self.dequant(self.module(self.quant(x)).relu())

    with pytest.raises(TraceError, match=r"`Model` has a `forward` that is an attribute of the object"):
        prepare_qat_fx(Model(), {"": qconfig()})


class HalfWeight(nn.Conv2d):
    """Changes what the forward of its base class calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding) * 0.5


class Lenient(nn.BatchNorm2d):
    """Changes nothing that is computed."""

    def _check_input_dim(self, x: Tensor) -> None:
        pass


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_layer_that_changes_what_its_forward_calls_is_the_users_code(method):
    torch.manual_seed(0)
    model, inputs = QuantWrapper(nn.Sequential(HalfWeight(2, 2, 1), Lenient(2))).eval(), (torch.randn(4, 2, 4, 4),)
    qat = prepare(model, inputs, qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)
    with torch.no_grad():
        found = calibrate(qat, inputs)(*inputs)
        assert torch.allclose(found, model(*inputs), atol=1e-2)
        assert mismatches(as_numbers(convert(qat)(*inputs)), as_numbers(found)) == 0
