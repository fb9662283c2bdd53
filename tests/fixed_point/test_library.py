"""Fixed-point functions as operators: pure, with shapes that tracers can compute, one node in every graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fake_quant.rounding import fake_quantize
from horizon_plugin_pytorch.fixed_point import library
from horizon_plugin_pytorch.march import set_march
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.program.note import operator_name
from horizon_plugin_pytorch.quantization import convert_fx
from tests.operators.cases import CASES
from tests.routes import prepared
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
    "fake_quantize": (fake_quantize, (X * 0.1, torch.tensor([0.1]), -1, *INT8)),
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
    "resize2d": (fp.resize2d, (X, torch.arange(9.0).double() * 100, torch.arange(4.0).double() * 300, 8)),
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
    "mix_channels": (
        fp.mix_channels,
        (X, torch.eye(4), torch.full((4,), 0.5), torch.full((4,), -128.0), torch.full((4,), 127.0)),
    ),
    "matmul": (fp.matmul, (X, X.transpose(-1, -2) + 0, NARROW, False, *INT8, False)),
    "matmul wide": (fp.matmul, (X, X.transpose(-1, -2) + 0, WIDE, True, *INT8, False)),
    "matmul real": (fp.matmul, (X, X.transpose(-1, -2) + 0, NARROW, False, *INT8, True)),
    "conv": (fp.conv, conv_args(layer(KERNEL))),
    "conv residual": (fp.conv, conv_args(layer(KERNEL, residual=True), integers((2, 3, 6, 6), 8, 4))),
    "conv digits": (fp.conv, conv_args(layer(KERNEL, 16))),
    "conv real": (fp.conv, conv_args(layer(KERNEL, is_real=True))),
    "linear": (fp.linear, linear_args(layer(integers((2, 5), 8, 3)))),
    "dynamic_linear": (fp.dynamic_linear, (X, integers((2, 6), 8, 3), torch.rand(2), torch.rand(2), 6, *INT8)),
    "dynamic_linear blocks": (fp.dynamic_linear, (X, integers((2, 6), 8, 3).double(), torch.rand(1), None, 4, *INT8)),
    "linear digits": (fp.linear, linear_args(layer(integers((2, 5), 8, 3), 16))),
}


# Operators with many arguments: a call as a case of the operator table makes it.
OF_CASES = {
    "atan2": "atan2", "avg_pool3d": "avg-pool-3d", "bev_pool": "bev-pool", "compare": "where-compared",
    "correlation": "correlation", "cumsum": "cumsum", "deformable_attention": "deformable-attention",
    "div": "functional-div", "divide_by_norm": "normalize", "evaluate": "one-div", "extremum": "functional-maximum",
    "grid_sample": "grid-sample", "log_softmax": "log-softmax", "norm": "norm", "normalize": "layer-norm",
    "prelu": "prelu", "resample3d": "adaptive-3d", "rle": "rle-of-classes", "roi_align": "multi-scale-roi-align",
    "scatter_rows": "point-pillars-scatter", "softmax": "softmax", "topk": "topk",
}  # fmt: skip
# Its length depends on the values, which no tracer can know.
OPEN_SHAPES = {"rle"}


def _call(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if name in CALLS:
        return CALLS[name]
    case = next(case for case in CASES if case.name == OF_CASES[name])
    set_march(case.march)
    quantized = convert_fx(prepared(case.model(), case.inputs(), "qint8"))
    program = record_program(quantized, case.inputs())
    values = dict(program.run(*case.inputs()))
    values.update({node: program.constants[node.target] for node in program.graph.nodes if node.op == "get_attr"})
    node = next(node for node in program.operators if operator_name(node) == f"horizon::{name}")
    return getattr(torch.ops.horizon, name), pytree.tree_map(_clone, fx.map_arg(node.args, values.__getitem__))


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_every_operator_is_tried() -> None:
    names = {str(call._qualified_op_name) for call, _ in CALLS.values()} | {f"horizon::{name}" for name in OF_CASES}
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("horizon::")}
    assert names == {name.split(".")[0] for name in defined}
    assert library._LIBRARY.ns == "horizon"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, *OF_CASES])
def test_operators_change_no_argument_and_tracers_see_their_shapes(name: str) -> None:
    call, args = _call(name)
    checks = ("test_schema",) if name in OPEN_SHAPES else ("test_schema", "test_faketensor")
    torch.library.opcheck(call.default, args, test_utils=checks)
    first = pytree.tree_leaves(call(*args))[0]
    assert first.dtype in (torch.float32, torch.bool) or name in OPEN_SHAPES


@pytest.mark.parametrize("name", [name for name in (*CALLS, *OF_CASES) if name not in OPEN_SHAPES])
def test_a_graph_has_one_node_for_an_operator(name: str) -> None:
    call, args = _call(name)
    leaves, spec = pytree.tree_flatten(args)
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def run(x: Tensor) -> Any:
        return call(*pytree.tree_unflatten([*leaves[:place], x, *leaves[place + 1 :]], spec))

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(leaves[place])
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [t for t in targets if getattr(t, "namespace", "") == "horizon"] == [call.default]
    others = {t for t in targets if getattr(t, "namespace", "") != "horizon"}
    assert others <= {torch.ops.aten.detach.default, operator.getitem}
    found, wanted = (pytree.tree_leaves(f(leaves[place])) for f in (graph, run))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


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
    for call in [call for call, _ in CALLS.values()] + [getattr(torch.ops.horizon, name) for name in OF_CASES]:
        assert call.__doc__
