"""int16 layers with a kernel for each channel, as files: sums of two convolutions in float32."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import convert_fx
from tests.export.test_layers_in_files import Between, assert_same_bits, exported
from tests.routes import prepared
from tests.sequences.comparison import LEVELS, open_session

# Kernels of nine weights, whose sums over 16-bit inputs pass 2**24 in one or both directions, in runs and mixed.
KERNELS = [
    [127] + [96] * 8,
    [-96] * 8 + [-127],
    [127] * 8 + [0],
    [0] + [-127] * 8,
    [127, -97] * 4 + [127],
    [127] * 5 + [-97] * 4,
    [-97] * 4 + [127] * 5,
    [127] + [0] * 8,
    [127, -127] * 4 + [0],
    [127, 1, 126, 2, 125, 3, 124, 4, 123],
]


def kernels(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 1, 3, 3)


def converted(rows: list[list[int]]) -> tuple[nn.Module, Tensor]:
    """A layer with these integers as weights, and images of 3x3: their ends under each kernel, and others."""
    generator = torch.Generator().manual_seed(1)
    weight = kernels(rows)
    layer = nn.Conv2d(len(rows), len(rows), 3, padding=1, groups=len(rows))
    with torch.no_grad():
        layer.weight.copy_(weight / weight.abs().flatten(1).amax(1).reshape(-1, 1, 1, 1))
    signs = torch.cat([weight > 0, weight < 0]).expand(-1, len(rows), 3, 3).float()
    masks = (torch.rand(60, len(rows), 3, 3, generator=generator) < 0.5).float()
    x = torch.cat([signs, masks, torch.rand(60, len(rows), 3, 3, generator=generator), torch.ones_like(masks[:1])])
    model = Between(nn.Sequential(nn.ReLU(), layer)).eval()
    return convert_fx(prepared(model, (x,), "qint16")), x


def sums(file: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The sums of two convolutions."""
    made_by = {name: node.op_type for node in file.graph.node for name in node.output}
    return [n for n in file.graph.node if n.op_type == "Add" and [made_by.get(x) for x in n.input] == ["Conv"] * 2]


def test_sums_beyond_24_bits_are_moved_around_zero() -> None:
    """The sums themselves, at their ends: a sum that is off by one seldom shows in what it is scaled to."""
    rows = (KERNELS * 4)[:32]  # ONNX Runtime takes 16 channels at once
    model, x = converted(rows)
    file = exported(model, x)
    (total,) = sums(file)
    convolutions = {node.output[0]: node for node in file.graph.node if node.op_type == "Conv"}
    plain, lifted = (convolutions[name] for name in total.input)
    lifts = {constant.name: onnx.numpy_helper.to_array(constant) for constant in file.graph.initializer}
    lift = torch.from_numpy(lifts[lifted.input[2]].copy()).double().reshape(-1, 1, 1)
    assert len(plain.input) == 2 and bool(lift.count_nonzero())
    del file.graph.output[:]
    for name in (plain.input[0], total.output[0]):
        file.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    beyond = 0
    for level in LEVELS:
        session = open_session(file.SerializeToString(), level, 1)
        given, found = (torch.from_numpy(y).double() for y in session.run(None, {"x": x.numpy()}))
        wanted = F.conv2d(given, kernels(rows).double(), padding=1, groups=len(rows))
        beyond += int((wanted.abs() > 1 << 24).sum())
        assert torch.equal(found - lift, wanted), level
    assert beyond > 1000


def test_files_are_exact_at_every_level_and_the_right_convolution_takes_the_sum(tmp_path: Path) -> None:
    """ONNX Runtime lets the first convolution add what the other gives: that is the one with the shift."""
    model, x = converted((KERNELS * 4)[:32])
    file = exported(model, x)
    assert_same_bits(file, model, [x, 0.999 * x, -x])
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    merged = [n for n in onnx.load(options.optimized_model_filepath).graph.node if len(n.input) == 4]
    assert all(node.op_type == "Conv" and node.input[2] == "" for node in merged)


def test_sums_that_no_shift_brings_within_24_bits_are_added_in_int32() -> None:
    model, x = converted([*KERNELS, [127] * 5 + [-127] * 4])
    file = exported(model, x)
    assert not sums(file)
    assert_same_bits(file, model, [x, torch.full_like(x, 1e9) * (x > 0.5)])
