"""One model, by tracing and by running: the same numbers, the same names, the same refusals."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, mismatches, qconfig, run_onnx

METHODS = ("symbolic", "jit", "jit-strip")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Stubs around a function of the model and its quantized input."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.body = QuantStub(), DeQuantStub(), body
        self.fc, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        out = self.body(self, self.quant(x))
        return [self.dequant(o) for o in out] if isinstance(out, (list, tuple)) else self.dequant(out)


def make(body: Callable[..., Any], parts: dict[str, Callable[[], Any]]) -> Net:
    torch.manual_seed(0)
    return Net(body, **{name: part() for name, part in parts.items()}).eval()


def _prepared(net: nn.Module, method: str, own_scales: bool = False) -> nn.Module:
    chosen = {"": qconfig("qint16")}
    return prepare(net, (X.clone(),), qconfig_dict=chosen, method=method, own_scales=own_scales, out_dir=None)


def _outputs(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return as_numbers(model(X.clone()))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    set_fake_quantize(model, FakeQuantState.QAT)
    out = model(X.clone())
    if not any(o.requires_grad for o in (out if isinstance(out, list) else [out])):
        return {}
    sum(o.square().sum() for o in (out if isinstance(out, list) else [out])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_one_answer(net: nn.Module, limit: float = 0.02, own_scales: bool = False) -> dict[str, nn.Module]:
    """On every method: near float, VALIDATION == converted, and the same numbers, names and gradients as by tracing."""
    wanted, qats, found = _outputs(net), {}, {}
    for method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qat = qats[method] = calibrate(_prepared(net, method, own_scales), (X.clone(),))
            found[method] = _outputs(qat)
            quantized = convert(qat)
        assert not mismatches(found[method], _outputs(quantized)), f"{method}: VALIDATION and converted differ"
        for one, other in zip(wanted, found[method], strict=True):
            error = float((one - other).norm() / one.norm().clamp_min(1e-9))
            assert error < limit, f"{method}: {error:.1%} from float"
    for method in METHODS[1:]:
        assert not mismatches(found["symbolic"], found[method]), f"{method}: other numbers than by tracing"
        assert set(qats["symbolic"].state_dict()) == set(qats[method].state_dict()), method
    gradients = {method: _gradients(qat) for method, qat in qats.items()}
    for method in METHODS[1:]:
        assert gradients[method].keys() == gradients["symbolic"].keys()
        for name, gradient in gradients["symbolic"].items():
            assert torch.allclose(gradients[method][name], gradient, rtol=1e-4, atol=1e-5), f"{method}: {name}"
    return qats


def _statement(name: str, *args: Any) -> Callable[[Any, Tensor], Tensor]:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        getattr(y, name)(*args)
        return y * 1.0

    return body


def _result_and_name(name: str, *args: Any) -> Callable[[Any, Tensor], Tensor]:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        before = y
        return m.fc2(getattr(y, name)(*args)) + before

    return body


_METHODS: list[tuple[Any, ...]] = [
    ("clamp_", -0.1, 0.2), ("clamp_min_", 0.1), ("clip_", -0.1, 0.2), ("relu_",), ("sigmoid_",), ("tanh_",),
    ("mul_", 2.0), ("add_", 1.0), ("sub_", 0.5), ("div_", 2.0), ("divide_", 2.0), ("abs_",), ("neg_",), ("exp_",),
    ("square_",), ("pow_", 2), ("sin_",), ("floor_",), ("masked_fill_", torch.arange(8) > 3, 0.5), ("unsqueeze_", 0),
    ("t_",), ("transpose_", 0, 1), ("tril_",), ("detach_",),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("call", _METHODS, ids=lambda call: call[0])
def test_a_method_that_writes(call: tuple) -> None:
    assert_one_answer(make(_statement(*call), {}))
    if call[0] not in ("t_", "transpose_", "unsqueeze_", "detach_"):
        assert_one_answer(make(_result_and_name(*call), {}))


_FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "torch.relu_": torch.relu_,
    "torch.clamp_": lambda y: torch.clamp_(y, -0.1, 0.1),
    "torch.neg_": torch.neg_,
    "F.relu": lambda y: F.relu(y, inplace=True),
    "F.relu by position": lambda y: F.relu(y, True),
    "F.relu by keyword": lambda y: F.relu(input=y, inplace=True),
    "F.relu6": lambda y: F.relu6(y, inplace=True),
    "F.silu": lambda y: F.silu(y, inplace=True),
    "F.hardswish": lambda y: F.hardswish(y, inplace=True),
    "F.mish": lambda y: F.mish(y, inplace=True),
    "F.leaky_relu": lambda y: F.leaky_relu(y, 0.1, True),
    "F.hardtanh": lambda y: F.hardtanh(y, -0.1, 0.2, True),
    "F.hardtanh_": lambda y: F.hardtanh_(y, -0.1, 0.2),
    "F.elu_": F.elu_,
    "F.dropout": lambda y: F.dropout(y, 0.5, False, True),
    "in a function": lambda y: _bump(y),
    "in a list": lambda y: [part.clamp_(-0.1, 0.2) for part in [y]],
    "in a dict": lambda y: {"y": y}["y"].clamp_(-0.1, 0.2),
}


def _bump(y: Tensor) -> None:
    y.add_(1.0)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_a_function_that_writes(name: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        _FUNCTIONS[name](y)
        return y * 1.0

    assert_one_answer(make(body, {}))


_ACTIVATIONS = [nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU, nn.Hardtanh, nn.Mish,
                nn.SELU, nn.CELU, nn.Dropout]  # fmt: skip


def _second_name(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    skip = x
    return m.fc2(m.act(x)) + skip


def _as_statement(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    m.act(x)
    return x * 1.0


@pytest.mark.in_turns("body", "cls")
@pytest.mark.parametrize("body", [_second_name, _as_statement])
@pytest.mark.parametrize("cls", _ACTIVATIONS)
def test_an_activation_that_writes(cls: Any, body: Any) -> None:
    assert_one_answer(make(body, {"act": lambda: cls(inplace=True)}))


def _operators(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = y
    y += x
    y -= 0.5
    y *= x
    y /= 2.0
    y **= 2
    return z * 1.0


def _fused(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = y
    y += x
    F.relu_(y)
    return m.fc2(z) + z


def _onto_the_input(m: Any, x: Tensor) -> Tensor:
    x += m.fc(x)
    return x * 1.0


def _parts(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = y
    y[..., 0] = x[..., 1]
    y[:, 1] = 0.25
    y[y < -0.5] = 0.0
    y[:, 2] += 1.0
    return z * 1.0


def _masks(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    low, high = y < 0, y > 0.5
    both = low
    low |= high
    low &= x < 1
    low.logical_not_()
    return y.masked_fill(both, 0.0)


def _between_layer_and_add(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = m.fc2(y)
    y.mul_(2.0)
    return z + y


def _activation_between_layer_and_add(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = m.fc2(y)
    m.act(y)
    return z + y


def _halves(m: Any, x: Tensor) -> Tensor:
    a, b = m.fc(x).chunk(2, -1)
    a.mul_(2.0)
    c, d = m.fc2(x).reshape(-1, 2, 4).unbind(1)
    c += 1.0
    return torch.cat([a, b, c, d], -1)


def _clone(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    z = y.clone()
    z.mul_(2.0)
    return y + z


def _several(m: Any, x: Tensor) -> list[Tensor]:
    outs = [m.fc(x), m.fc2(x)]
    for out in outs:
        out.clamp_(-0.1, 0.2)
    return outs


def _attribute(m: Any, x: Tensor) -> Tensor:
    m.state = m.fc(x)
    m.state.clamp_(-0.1, 0.2)
    out, m.state = m.state * 1.0, None
    return out


def _into_zeros(m: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    out += m.fc(x)
    return out * 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [_operators, _fused, _onto_the_input, _parts, _masks, _between_layer_and_add, _activation_between_layer_and_add,
     _halves, _clone, _several, _attribute, _into_zeros],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_statements_that_write(body: Any) -> None:
    assert_one_answer(make(body, {"act": lambda: nn.SiLU(inplace=True)}))


def _view(m: Any, y: Tensor) -> Tensor:
    y.view(-1, 4, 2).clamp_(-0.1, 0.2)
    return y * 1.0


def _base(m: Any, y: Tensor) -> Tensor:
    v = y.view(-1, 4, 2)
    y.clamp_(-0.1, 0.2)
    return v.reshape(-1, 8) * 1.0


def _slice(m: Any, y: Tensor) -> Tensor:
    y[:, :4].clamp_(-0.1, 0.2)
    return y * 1.0


def _overlapping_slices(m: Any, y: Tensor) -> Tensor:
    a, b = y[:, :4], y[:, 3:7]
    a.mul_(2.0)
    return torch.cat([a, b], -1)


def _whole(m: Any, y: Tensor) -> Tensor:
    a, _ = y.chunk(2, -1)
    a *= 2.0
    return y * 1.0


def _contiguous(m: Any, y: Tensor) -> Tensor:
    z = y.contiguous()
    z.mul_(2.0)
    return y + z


def _detached(m: Any, y: Tensor) -> Tensor:
    y.detach().mul_(2.0)
    return y * 1.0


def _data(m: Any, y: Tensor) -> Tensor:
    y.data.mul_(2.0)
    return y * 1.0


def _new_data(m: Any, y: Tensor) -> Tensor:
    y.data = y.data * 2.0
    return y * 1.0


def _activation_on_a_view(m: Any, y: Tensor) -> Tensor:
    m.act(y.view(-1, 4, 2))
    return y * 1.0


def _activation_under_a_view(m: Any, y: Tensor) -> Tensor:
    v = y.view(-1, 4, 2)
    m.act(y)
    return v.reshape(-1, 8) * 1.0


def _dropout_on_a_view(m: Any, y: Tensor) -> Tensor:
    m.drop(y.view(-1, 4, 2))
    return y * 1.0


def _dequantized(m: Any, y: Tensor) -> Tensor:
    m.dequant(y).mul_(2.0)
    return y * 1.0


def _quantized(m: Any, y: Tensor) -> Tensor:
    z = m.dequant(y) * 1.0
    m.quant2(z).mul_(2.0)
    return m.quant2(z) * 1.0


def _out(m: Any, y: Tensor) -> Tensor:
    torch.clamp(y, -0.1, 0.2, out=y)
    return y * 1.0


def _filled(m: Any, y: Tensor) -> Tensor:
    y.zero_()
    return y * 1.0


def _copied(m: Any, y: Tensor) -> Tensor:
    y.copy_(m.fc2(y))
    return y * 1.0


def _into_a_buffer(m: Any, y: Tensor) -> Tensor:
    m.shift.add_(y[0])
    return y * m.shift


@pytest.mark.parametrize(
    "body",
    [_view, _base, _slice, _overlapping_slices, _whole, _contiguous, _detached, _data, _new_data, _activation_on_a_view,
     _activation_under_a_view, _dropout_on_a_view, _dequantized, _quantized, _out, _filled, _copied, _into_a_buffer],
    ids=lambda body: body.__name__,
)  # fmt: skip
@pytest.mark.parametrize("method", METHODS[:2])
def test_what_tensors_with_a_scale_cannot_express_is_refused_with_its_line(body: Any, method: str) -> None:
    parts = {"act": lambda: nn.SiLU(True), "drop": lambda: nn.Dropout(0.5, True), "quant2": QuantStub}
    net = make(lambda m, x: body(m, m.fc(x)), parts)
    with pytest.raises((HorizonError, NotImplementedError), match=r"test_one_answer.py:\d+"):
        calibrate(_prepared(net, method), (X.clone(),))


def _bn() -> nn.Module:
    bn = nn.BatchNorm1d(8)
    bn.running_mean.uniform_(-0.5, 0.5)
    bn.running_var.uniform_(0.5, 2)
    nn.init.uniform_(bn.weight, 0.5, 2)
    return bn


_PARTS: dict[str, Callable[[], Any]] = {
    "bn": _bn, "relu": nn.ReLU, "emb": lambda: nn.Embedding(8, 8), "p": lambda: nn.Parameter(torch.randn(8)),
    "norm": lambda: nn.LayerNorm(8),
}  # fmt: skip
_READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "product with another layer's weight": lambda m, x: m.fc(x) @ m.fc2.weight.t() + m.fc2(x),
    "linear with another layer's weight": lambda m, x: F.linear(m.fc(x), m.fc2.weight, m.fc2.bias) * m.fc2(x),
    "linear with an embedding's weight": lambda m, x: F.linear(m.fc(x), m.emb.weight) + m.emb(torch.tensor([1])),
    "product with an embedding's weight": lambda m, x: m.fc(x) @ m.emb.weight.t() + m.emb(torch.arange(6)),
    "sum": lambda m, x: m.fc(x) * m.fc.weight.sum(),
    "sum, before a batch norm": lambda m, x: m.relu(m.bn(m.fc(x))) * m.fc.weight.sum(),
    "mean": lambda m, x: m.fc(x) + m.fc.weight.mean(0),
    "row": lambda m, x: m.relu(m.fc(x)) * m.fc.weight[1],
    "row, before an add": lambda m, x: (m.fc(x) + x) * m.fc.weight[1],
    "joined": lambda m, x: torch.cat([m.fc(x), m.fc.weight], 0),
    "detached": lambda m, x: m.fc(x) @ m.fc2.weight.detach().t() + m.fc2(x),
    "data": lambda m, x: m.fc(x) * m.fc.weight.data.sum(),
    "bias": lambda m, x: m.relu(m.fc(x)) + m.fc.bias,
    "bias, before a batch norm": lambda m, x: m.bn(m.fc(x)) + m.fc.bias,
    "weight of a batch norm": lambda m, x: m.relu(m.bn(m.fc(x))) * m.bn.weight + m.bn.bias,
    "mean of a batch norm": lambda m, x: m.bn(m.fc(x)) + m.bn.running_mean,
    "weight of a layer norm": lambda m, x: m.norm(m.fc(x)) * m.norm.weight,
    "dtype": lambda m, x: m.fc(x.to(m.fc.weight.dtype)),
    "dtype, before a ReLU": lambda m, x: F.relu(m.fc(x.to(m.fc.weight.dtype))),
    "dtype, before an add": lambda m, x: m.fc(x.to(m.fc.weight.dtype)) + m.p,
    "dtype, before a batch norm": lambda m, x: m.relu(m.bn(m.fc(x.to(m.fc.weight.dtype)))),
    "dtype of a batch norm": lambda m, x: m.relu(m.bn(m.fc(x.to(m.bn.weight.dtype)))),
    "dtype of a statistic": lambda m, x: m.relu(m.bn(m.fc(x.to(m.bn.running_mean.dtype)))),
    "device, before an add": lambda m, x: m.fc(x.to(m.fc.weight.device)) + m.p,
    "like a weight": lambda m, x: m.fc(x.type_as(m.fc.weight).to(m.fc.weight)) + x,
    "new, like a weight": lambda m, x: m.fc(x) + x * m.fc.weight.new_ones(8),
    "shape": lambda m, x: m.fc(x).reshape(-1, m.fc.weight.shape[0]) + x,
    "shape of a batch norm": lambda m, x: m.bn(m.fc(x)).reshape(-1, m.bn.weight.shape[0]),
    "size": lambda m, x: m.relu(m.fc(x)).view(-1, m.fc.weight.size(0)) * (1.0 / m.fc.weight.numel()),
    "no bias": lambda m, x: m.fc(x) + x if m.fc.bias is not None else x,
    "parameters": lambda m, x: m.fc(x.to(next(m.parameters()).dtype)) + x,
    "parameters of a layer": lambda m, x: m.fc(x.to(next(m.fc.parameters()).device)) + x,
    "parameters of a batch norm": lambda m, x: m.relu(m.bn(m.fc(x.to(next(m.bn.parameters()).dtype)))),
    "parameter by name": lambda m, x: m.fc(x) + dict(m.fc2.named_parameters())["bias"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _READS)
def test_a_forward_that_reads_parameters_of_its_layers(name: str, tmp_path: Any) -> None:
    qats = assert_one_answer(make(_READS[name], _PARTS))
    for qat in qats.values():
        with torch.no_grad():
            for parameter in qat.parameters():
                parameter.mul_(0.9)  # what training does
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        quantized = convert(qat)
        out = _outputs(qat)
        assert not mismatches(out, _outputs(quantized))
        assert not mismatches(out, run_onnx(export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx"), (X,)))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parameter = next(self.parameters())
        return self.dequant(self.fc(self.quant(x.to(parameter.device, parameter.dtype))))


def test_a_converted_model_without_parameters_lists_those_of_float_to_its_forward() -> None:
    for qat in assert_one_answer(Asking().eval()).values():
        quantized = convert(qat)
        for model in (quantized, copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
            assert not list(model.parameters())
            assert not mismatches(_outputs(model), _outputs(quantized))


class _Counting(Net):
    """Computes what nobody reads, and calls wrapped code for what it does."""

    calls = 0

    @wrap()
    def count(self, x: Tensor) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        torch.relu(self.fc2(x))
        self.count(x)
        return self.dequant(self.fc(x))


def test_what_nobody_reads_stays_float_by_tracing_and_wrapped_code_is_called() -> None:
    net = _Counting(None)  # type: ignore[arg-type]
    models = {method: calibrate(_prepared(net, method), (X,)) for method in METHODS}
    names = {method: {n for n in model.state_dict() if n.startswith("fc2.")} for method, model in models.items()}
    assert names["symbolic"] == {"fc2.weight", "fc2.bias"}
    assert "fc2.activation_post_process.scale" in names["jit"] & names["jit-strip"]
    before = {method: model.calls for method, model in models.items()}
    outputs = [_outputs(model) for model in models.values()]
    assert all(mismatches(outputs[0], other) == 0 for other in outputs)
    assert all(model.calls == before[method] + 1 for method, model in models.items())


def _tables(m: Any, x: Tensor) -> Tensor:
    return m.fc(x) * m.table + torch.ones(8)


def test_tensors_that_are_attributes_only_are_no_part_of_a_checkpoint() -> None:
    models = assert_one_answer(make(_tables, {"table": lambda: torch.linspace(0.5, 1, 8)}))
    for model in models.values():
        assert "table" not in model.state_dict() and "shift" in model.state_dict()
    model = models["symbolic"]
    model.load_state_dict(model.state_dict() | {"table": torch.zeros(8)})  # as earlier versions saved it
    assert model.get_buffer("table").any()
