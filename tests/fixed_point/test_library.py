"""Fixed-point functions as operators: pure, with shapes that tracers can compute, one node in every graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import library
from tests.strategies import integers

INT8 = (-128, 127)
X = integers((2, 4, 6, 6), 8, 0)
FLAT = integers((3, 5), 8, 1)
NARROW, WIDE = torch.tensor([0.013]), torch.tensor([0.013], dtype=torch.float64)


def layer(weight: Tensor, input_bits: int = 8, residual: bool = False, is_real: bool = False) -> fp.AccumulatorPlan:
    outputs = weight.shape[0]
    return fp.plan_accumulator(
        weight,
        torch.ones(outputs),
        torch.full((outputs,), 1e-3, dtype=torch.float64),
        None if is_real else torch.tensor([0.5]),
        output_axis=0,
        groups=1,
        input_range=(-(1 << (input_bits - 1)), (1 << (input_bits - 1)) - 1),
        weight_bits=8,
        low=-128,
        high=127,
        residual_scale=torch.tensor([0.1]) if residual else None,
    )


def conv_args(plan: fp.AccumulatorPlan, residual: Tensor | None = None) -> tuple[Any, ...]:
    return (X, residual, *fp.flatten(plan, fp.Geometry([1, 1], [1, 1], [1, 1], [0, 0], 1, False)))


def linear_args(plan: fp.AccumulatorPlan) -> tuple[Any, ...]:
    return (FLAT, None, *fp.flatten(plan))


KERNEL = integers((3, 4, 3, 3), 8, 2)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "quantize": (fp.quantize, (X * 0.1, torch.tensor([0.1]), -1, *INT8)),
    "quantize channels": (fp.quantize, (X * 0.1, torch.rand(4) + 0.1, 1, *INT8)),
    "dequantize": (fp.dequantize, (X, torch.tensor([0.1]), -1)),
    "requantize": (fp.requantize, (X, NARROW, -1, *INT8)),
    "requantize wide": (fp.requantize, (X, WIDE, -1, *INT8)),
    "add": (fp.add, (X, X + 0, 0.5, 0.25, True, *INT8)),
    "add broadcast": (fp.add, (X[:, :1], X, 0.5, 0.25, True, *INT8)),
    "add wide": (fp.add, (X, X + 0, 0.5, 0.25, False, *INT8)),
    "mul": (fp.mul, (X, X + 0, NARROW, *INT8)),
    "mul wide": (fp.mul, (X, X + 0, WIDE, *INT8)),
    "div": (fp.div, (X, X + 0, 0.7, 0.5, *INT8)),
    "extremum": (fp.extremum, (X, X + 0, NARROW, NARROW, False, *INT8)),
    "extremum wide": (fp.extremum, (X, X[:, :1] + 0, NARROW, WIDE, True, *INT8)),
    "compare": (fp.compare, (X, X + 0, 1.5, 1.0, True, "lt")),
    "compare wide": (fp.compare, (X, X[:1] + 0, 1.0, 1.5, False, "ne")),
    "affine": (fp.affine, (X, WIDE.expand(4), WIDE.expand(4), 1, *INT8)),
    "lookup": (fp.lookup, (X, torch.arange(256.0), -128)),
    "sum": (fp.sum, (X, [1, 2], True, NARROW, False, *INT8)),
    "sum wide": (fp.sum, (X, [3], False, WIDE, True, *INT8)),
    "avg_pool2d": (fp.avg_pool2d, (X, [3, 2], [2, 1], [1, 0], True, NARROW, False, *INT8)),
    "resample2d": (fp.resample2d, (X, torch.rand(3, 6).round(), torch.rand(6, 9).round(), NARROW, *INT8)),
    "avg_pool3d": (fp.avg_pool3d, (X, [3, 2, 1], [2, 1, 1], [1, 0, 0], True, NARROW, False, *INT8)),
    "resample3d": (
        fp.resample3d,
        (X, torch.ones(2, 4), torch.rand(3, 6).round(), torch.rand(6, 9).round(), NARROW, *INT8),
    ),
    "normalize": (fp.normalize, (X, [1, 3], torch.ones(6), torch.zeros(6), 1.0, 0.1, True, 8, *INT8)),
    "normalize wide": (fp.normalize, (X, [3], None, None, 20.0, 0.0, False, 16, *INT8)),
    "softmax": (fp.softmax, (X, 1, None, torch.arange(256.0).flip(0), 100.0, False, *INT8)),
    "softmax masked": (fp.softmax, (X, 3, X[0, 0] > 0, torch.arange(256.0).flip(0), 100.0, True, *INT8)),
    "log_softmax": (
        fp.log_softmax,
        (X, 1, torch.arange(256.0).flip(0), fp.choose_logarithm(1e-4), -0.5, 20.0, False, *INT8),
    ),
    "matmul": (fp.matmul, (X, X.transpose(-1, -2) + 0, NARROW, False, *INT8, False)),
    "matmul wide": (fp.matmul, (X, X.transpose(-1, -2) + 0, WIDE, True, *INT8, False)),
    "matmul real": (fp.matmul, (X, X.transpose(-1, -2) + 0, NARROW, False, *INT8, True)),
    "conv": (fp.conv, conv_args(layer(KERNEL))),
    "conv residual": (fp.conv, conv_args(layer(KERNEL, residual=True), integers((2, 3, 6, 6), 8, 4))),
    "conv digits": (fp.conv, conv_args(layer(KERNEL, 16))),
    "conv real": (fp.conv, conv_args(layer(KERNEL, is_real=True))),
    "linear": (fp.linear, linear_args(layer(integers((2, 5), 8, 3)))),
    "linear digits": (fp.linear, linear_args(layer(integers((2, 5), 8, 3), 16))),
}


def test_every_operator_is_tried() -> None:
    names = {str(call._qualified_op_name) for call, _ in CALLS.values()}
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("horizon::")}
    assert names == {name.split(".")[0] for name in defined}
    assert library._LIBRARY.ns == "horizon"


@pytest.mark.parametrize("name", CALLS)
def test_operators_change_no_argument_and_tracers_see_their_shapes(name: str) -> None:
    call, args = CALLS[name]
    torch.library.opcheck(call.default, args, test_utils=("test_schema", "test_faketensor"))
    out = call(*args)
    assert out.dtype == (torch.bool if name.startswith("compare") else torch.float32)


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_has_one_node_for_an_operator(name: str) -> None:
    call, args = CALLS[name]
    graph = make_fx(lambda x: call(x, *args[1:]), tracing_mode="fake", _allow_non_fake_inputs=True)(args[0])
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t.namespace == "horizon"] == [call.default]
    assert all(t.namespace == "horizon" or t is torch.ops.aten.detach.default for t in targets)
    assert torch.equal(graph(args[0]), call(*args))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_traces_keep_operators() -> None:
    traced = torch.jit.trace(lambda x: fp.requantize(x, NARROW, -1, *INT8), X, check_trace=False)
    assert "horizon::requantize" in str(traced.graph)
    assert torch.equal(traced(X), fp.requantize(X, NARROW, -1, *INT8))


def test_exported_programs_keep_operators() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fp.requantize(x, NARROW, -1, *INT8)

    program = torch.export.export(Model(), (X,))
    assert torch.ops.horizon.requantize.default in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(X), fp.requantize(X, NARROW, -1, *INT8))


def test_operators_are_documented() -> None:
    for call, _ in CALLS.values():
        assert call.__doc__
