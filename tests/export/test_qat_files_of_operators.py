"""Every operator in a file of its QAT form: ONNX Runtime is within one step of the training route at every output."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.fake_quant.route import written_route
from horizon_plugin_pytorch.fixed_point.kernels import Reach, proved_reach
from horizon_plugin_pytorch.march import set_march
from horizon_plugin_pytorch.nn.atan2 import Atan2
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import FakeQuantState, set_fake_quantize
from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx
from tests.operators.cases import (
    CASES,
    Case,
    arithmetic,
    attention,
    bench,
    detection,
    gemm,
    norms,
    reductions,
    shapes,
    spatial,
    tables,
)
from tests.operators.cases.calls import calls_of
from tests.routes import prepared, run_session, session_of

ROOMS = {
    room.__name__.rpartition(".")[2]: room.CASES
    for room in (arithmetic, attention, detection, gemm, norms, reductions, shapes, spatial, tables)
}
# Where torch's kernels do not saturate, ONNX Runtime's do not.
HAS_VNNI = proved_reach() is Reach.BYTES
_ROUNDING = 1e-2  # of float32, in steps: 65536 of them are 2**16 * 2**-24 apart


def _leaves(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _assert_within_a_step(case: Case, found: Sequence[Tensor], outputs: Any) -> None:
    """Numbers on a grid, and the real values of them, within a step; float values within 1e-5 of the largest; others
    equal."""
    wanted = _leaves(outputs)
    picked = [outputs[0]] if case.picks is None else [outputs[0][i] for i in case.picks]
    # The last outputs are the real values of those before them, which know the scale.
    grids = [*wanted[: len(wanted) - len(picked)], *picked]
    for x, out, grid in zip(found, wanted, grids, strict=True):
        if isinstance(grid, QTensor) and grid.dtype != qbool:
            value = out.dequantize() if isinstance(out, QTensor) else out
            axes = [-1 if axis == grid.per_channel_axis else 1 for axis in range(x.dim())]
            step = grid.scale if grid.scale.numel() == 1 else grid.scale.reshape(axes)
            assert ((x - value).abs() <= (1 + _ROUNDING) * step).all(), ((x - value).abs() / step).max()
        elif isinstance(out, QTensor) or not out.is_floating_point():
            assert torch.equal(x, out.plain() if isinstance(out, QTensor) else out)
        else:
            finite = out[out.isfinite()]
            atol = 1e-5 * float(finite.abs().max()) if finite.numel() else 0.0
            torch.testing.assert_close(x, out, rtol=1e-5, atol=atol, equal_nan=True)


def _assert_written(case: Case, dtype: str, opsets: Sequence[int]) -> None:
    set_march(case.march)
    inputs, others = case.inputs(), case.inputs(seed=2)
    beyond = tuple(3 * x if i < len(case.shapes) else x for i, x in enumerate(others))  # saturates
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qat = prepared(case.model(), inputs, dtype)
    batches = [(batch, _trained(qat, batch)) for batch in (inputs, others, beyond)]
    for opset in opsets:
        file = export_to_onnx(qat, inputs, io.BytesIO(), opset_version=opset)
        for optimization in ("off", "on"):
            # The kernels that ONNX Runtime puts in round otherwise; in the steps of a GRU at opset 21, twice. Without
            # VNNI they saturate.
            session = session_of(file, optimization, int8_kernels=opset < (21 if HAS_VNNI else 13))
            for batch, wanted in batches:
                _assert_within_a_step(case, run_session(session, batch), wanted)


def _trained(qat: nn.Module, batch: Sequence[Tensor]) -> Any:
    with torch.no_grad(), written_route():
        return qat(*[x.clone() for x in batch])


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.slow
def test_every_operator_is_within_a_step(room: str) -> None:
    """One case for each row of the operator table, in each way in which it is called, in one format and opset."""
    seen: set[Any] = set()
    for index, case in enumerate(ROOMS[room]):
        met = {(call.row.name, call.how) for call in calls_of(case)}
        if met <= seen:
            continue
        seen |= met
        _assert_written(case, case.formats[index % len(case.formats)], [(11, 13, 17, 21)[index % 4]])


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_within_a_step(case: Case) -> None:
    """In all formats, at the opset of the vendor, at ours, and at the last."""
    for dtype in case.formats:
        _assert_written(case, dtype, (11, 17, 21))


def test_every_case_is_in_a_room() -> None:
    assert sum(map(len, ROOMS.values())) == len(CASES)


def test_zero_has_no_sign_in_an_angle() -> None:
    """A small negative y rounds to 0: in training, among integers and in the file the angle is pi, not minus pi."""
    y, x = torch.tensor([[-0.001, 1.0, -1.0]]), torch.tensor([[-1.0, 1.0, -1.0]])
    qat = prepared(bench(Atan2(), 2), (y, x))
    exact = qat(y, x)[1]
    set_fake_quantize(qat, FakeQuantState.QAT)
    with torch.no_grad():
        trained = qat(y, x)[1]
    file = export_to_onnx(qat, (y, x), io.BytesIO())
    found = run_session(session_of(file), (y, x))[1]
    for angles in (exact, trained, found):
        assert abs(float(angles[0, 0]) - torch.pi) < 0.03
