"""QTensor: what passes through it, what it refuses, and being a tensor like others."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16, qint32
from horizon_plugin_pytorch.qtensor import QTensor, exact_qtensor, integer_qtensor, keeps_scale, real_qtensor

SCALE = 0.05


def grid_of(shape: tuple[int, ...] = (2, 4, 6, 6)) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(5)).float()


def make(stage: str, grid: Tensor, dtype: Any = qint8) -> QTensor:
    """The same integers as a QTensor of each stage of a model's life."""
    scale = torch.tensor([SCALE])
    if stage == "converted":
        return integer_qtensor(grid.clone(), scale, dtype)
    if stage == "deferred":
        return exact_qtensor(integer_qtensor(grid.clone(), scale, dtype), scale)
    return real_qtensor(grid * scale, scale, dtype, grid=grid.clone() if stage == "validation" else None)


STAGES = ["training", "validation", "deferred", "converted"]

MOVES: dict[str, Callable[[Tensor], Any]] = {
    "reshape": lambda x: x.reshape(2, -1),
    "torch.reshape": lambda x: torch.reshape(x, (-1,)),
    "reshape_as": lambda x: x.reshape_as(torch.empty(8, 36)),
    "view": lambda x: x.view(8, 36),
    "view_as": lambda x: x.view_as(torch.empty(8, 36)),
    "flatten": lambda x: x.flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "nn.Flatten": nn.Flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "nn.Unflatten": nn.Unflatten(1, (2, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "torch.permute": lambda x: torch.permute(x, (0, 2, 3, 1)),
    "transpose": lambda x: x.transpose(1, 2),
    "torch.transpose": lambda x: torch.transpose(x, -1, -2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: torch.swapdims(x, 0, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis": lambda x: torch.moveaxis(x, 1, -1),
    "t": lambda x: x[0, 0].t(),
    "T": lambda x: x[0, 0].T,
    "mT": lambda x: x.mT,
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "torch.squeeze": lambda x: torch.squeeze(x),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "torch.unsqueeze": lambda x: torch.unsqueeze(x, dim=-1),
    "expand": lambda x: x[:1].expand(3, -1, -1, -1),
    "expand_as": lambda x: x[:1].expand_as(torch.empty(3, 4, 6, 6)),
    "broadcast_to": lambda x: torch.broadcast_to(x[:1], (3, 4, 6, 6)),
    "split": lambda x: x.split(2, dim=1),
    "torch.split": lambda x: torch.split(x, [1, 3], dim=1),
    "split_with_sizes": lambda x: torch.split_with_sizes(x, [1, 3], 1),
    "chunk": lambda x: x.chunk(2, 1),
    "torch.chunk": lambda x: torch.chunk(x, 3, dim=-1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1),
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": lambda x: torch.unbind(x, 0),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(1, 2),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([2, 0])),
    "flip": lambda x: x.flip(-1),
    "torch.flip": lambda x: torch.flip(x, (0, 1)),
    "roll": lambda x: torch.roll(x, 2, 1),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "tile": lambda x: torch.tile(x, (2,)),
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone": lambda x: x.clone(),
    "torch.clone": torch.clone,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "nn.PixelUnshuffle": nn.PixelUnshuffle(2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "nn.ChannelShuffle": nn.ChannelShuffle(2),
    "relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "nn.ReLU in place": lambda x: nn.ReLU(inplace=True)(x.clone()),
    "amax": lambda x: x.amax((2, 3)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "nn.MaxPool2d": nn.MaxPool2d(3, 2, 1),
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pad reflect": lambda x: F.pad(x, (1, 2, 1, 2), "reflect"),
    "pad circular": lambda x: F.pad(x, (1, 2, 1, 0), "circular"),
    "nn.ZeroPad2d": nn.ZeroPad2d(1),
    "getitem": lambda x: x[:, 1:3, ::2],
    "getitem none": lambda x: x[None, ..., 0],
    "getitem tensor": lambda x: x[:, torch.tensor([0, 2])],
    "getitem mask": lambda x: x[torch.tensor([True, False])],
    "getitem scalar": lambda x: x[0, 0, 0, 0],
    "operator.getitem": lambda x: operator.getitem(x, 0),
    "iteration": lambda x: list(x),
    "unpacking": lambda x: tuple(v for v in x),
    "to device": lambda x: x.to("cpu"),
    "to dtype": lambda x: x.to(torch.float32),
    "to tensor": lambda x: x.to(torch.ones(1)),
    "to own format": lambda x: x.to(x.dtype) if isinstance(x, QTensor) else x,
    "to device keyword": lambda x: x.to(device="cpu", non_blocking=True),
    "type_as": lambda x: x.type_as(torch.ones(1)),
    "cpu": lambda x: x.cpu(),
    "dropout eval": lambda x: F.dropout(x, 0.5, training=False),
    "nn.Dropout eval": nn.Dropout(0.5).eval(),
    "nn.Identity": nn.Identity(),
}  # fmt: skip


def leaves(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MOVES)
def test_pass_through_operators_keep_scale_format_and_integers(name: str, stage: str) -> None:
    grid = grid_of()
    q = make(stage, grid)
    out, expected = MOVES[name](q), MOVES[name](grid)
    assert isinstance(out, (list, tuple)) == isinstance(expected, (list, tuple))
    assert len(leaves(out)) == len(leaves(expected))
    for found, want in zip(leaves(out), leaves(expected), strict=True):
        assert type(found) is QTensor
        assert found.shape == want.shape
        assert torch.equal(found.scale, torch.tensor([SCALE]))
        assert found.dtype is qint8
        assert found.is_integer == (stage == "converted")
        assert (found.grid is not None) == (stage != "training")
        assert torch.equal(found.int_repr(), want.to(torch.int8))
        torch.testing.assert_close(found.dequantize(), want * SCALE, atol=1e-6, rtol=1e-6)
        assert type(found.dequantize()) is type(found.int_repr()) is type(found.plain()) is Tensor
        low, high = found.range
        assert low <= int(want.min())
        assert int(want.max()) <= high


@pytest.mark.parametrize("name", sorted(n for n in MOVES if n not in ("detach", "data")))
def test_gradients_pass_through(name: str) -> None:
    x = (grid_of() * SCALE).requires_grad_()
    out = MOVES[name](real_qtensor(x * 1, torch.tensor([SCALE]), qint8))
    sum(v.dequantize().sum() for v in leaves(out)).backward()
    other = (grid_of() * SCALE).requires_grad_()
    sum(v.sum() for v in leaves(MOVES[name](other * 1))).backward()
    assert torch.equal(x.grad, other.grad)


PLAIN = torch.ones(2, 4, 6, 6)
FLOAT_OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, 1),
    "add": lambda x: x + 1,
    "add reversed": lambda x: 1 + x,
    "add tensor": lambda x: x + PLAIN,
    "tensor add": lambda x: PLAIN + x,
    "torch.add": lambda x: torch.add(PLAIN, x),
    "sub": lambda x: x - x,
    "mul": lambda x: x * 2,
    "div": lambda x: x / 2,
    "exp": torch.exp,
    "lgamma": torch.lgamma,
    "matmul": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, x]),
    "cat mixed": lambda x: torch.cat([PLAIN, x]),
    "stack": lambda x: torch.stack([x, x]),
    "conv2d": lambda x: F.conv2d(x, torch.ones(1, 4, 1, 1)),
    "linear": lambda x: F.linear(x, torch.ones(3, 6)),
    "mean": lambda x: x.mean(),
    "sum": lambda x: torch.sum(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "batch_norm": lambda x: nn.BatchNorm2d(4)(x),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "to float64": lambda x: x.to(torch.float64),
    "to int8": lambda x: x.to(torch.int8),
    "to half tensor": lambda x: x.to(torch.ones(1, dtype=torch.float16)),
    "to another format": lambda x: x.to(qint16),
    "type_as half": lambda x: x.type_as(torch.ones(1, dtype=torch.float16)),
    "item": lambda x: x[0, 0, 0, 0].item(),
    "bool": lambda x: bool(x[0, 0, 0, 0]),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "setitem": lambda x: operator.setitem(x, 0, 1.0),
    "add in place": lambda x: x.add_(1),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "where": lambda x: torch.where(PLAIN > 0, x, PLAIN),
    "quantized index": lambda x: PLAIN[x],
    "real": lambda x: x.real,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FLOAT_OPERATORS)
def test_float_operators_are_refused_with_their_name_the_place_and_a_remedy(name: str, stage: str) -> None:
    q = make(stage, grid_of())
    with pytest.raises(NotImplementedError) as error:
        FLOAT_OPERATORS[name](q)
    text = str(error.value)
    assert re.match(r"`torch\.[\w.]+` \(test_qtensor\.py:\d+\) ", text), text
    remedies = ("DeQuantStub", "dequantize()", "an ordinary tensor was expected", "leave out return_indices")
    assert any(remedy in text for remedy in remedies), text


def test_the_message_names_the_operator_and_the_line() -> None:
    q = make("training", grid_of())
    with pytest.raises(NotImplementedError) as error:
        torch.sigmoid(q)
    assert str(error.value).startswith("`torch.sigmoid` (test_qtensor.py:")
    with pytest.raises(NotImplementedError, match=r"`torch\.nn\.functional\.softmax` .*FloatFunctional.*qconfig"):
        F.softmax(q, 1)
    with pytest.raises(NotImplementedError, match=r"`torch\.Tensor\.add` "):
        _ = q + 1


@pytest.mark.parametrize("stage", STAGES)
def test_padding_with_a_constant_puts_it_on_the_grid(stage: str) -> None:
    grid = grid_of((1, 1, 2, 2)).clamp(0, 100)
    for value, steps in ((0.12, 2), (-0.12, -2), (100.0, 127), (-float("inf"), -128), (0.0, 0)):
        q = make(stage, grid)
        if stage in ("deferred", "converted"):
            q.set_range(0, 100)
        for out in (
            F.pad(q, (1, 0), "constant", value),
            F.pad(q, (1, 0), value=value),
            nn.ConstantPad2d((1, 0, 0, 0), value)(q),
        ):
            assert torch.equal(out.int_repr(), F.pad(grid, (1, 0), value=steps).to(torch.int8))
            assert out.range[0] <= steps <= out.range[1]


def test_padding_while_calibrating_keeps_the_constant_as_it_is() -> None:
    q = real_qtensor(torch.tensor([0.3, 0.4]), torch.ones(1), qint8, is_rounded=False)
    torch.testing.assert_close(F.pad(q, (1, 0), value=0.2).plain(), torch.tensor([0.2, 0.3, 0.4]))


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_dropout_acts_on_real_values_while_training_and_not_on_integers(module: nn.Module) -> None:
    module.train()
    out = module(make("validation", grid_of().abs() + 1))
    values = out.dequantize()
    kept = values != 0
    assert kept.any()
    assert not kept.all()
    torch.testing.assert_close(values[kept], ((grid_of().abs() + 1) * SCALE * 2)[kept])
    assert not out.is_rounded
    assert out.grid is None
    q = make("converted", grid_of())
    assert torch.equal(module(q).int_repr(), q.int_repr())


@pytest.mark.parametrize("stage", STAGES)
def test_questions_about_the_tensor_are_answered(stage: str) -> None:
    q = make(stage, grid_of())
    assert torch.is_tensor(q)
    assert isinstance(q, Tensor)
    assert (q.shape, q.size(), q.size(1), q.dim(), q.ndim, q.numel(), len(q)) == (
        (2, 4, 6, 6),
        (2, 4, 6, 6),
        4,
        4,
        4,
        288,
        2,
    )
    assert (q.stride(), q.is_contiguous(), q.storage_offset()) == ((144, 36, 6, 1), True, 0)
    assert q.device == torch.device("cpu")
    assert not q.is_cuda
    assert q.is_floating_point()
    assert torch.is_floating_point(q)
    assert not q.requires_grad
    assert q.is_leaf
    assert q.grad is None
    assert q.element_size() == 4
    assert q.layout == torch.strided
    assert not q.is_quantized
    assert (q.q_scale() is q.scale, q.q_per_channel_axis(), q.q_zero_point().tolist()) == (True, -1, [0])


@pytest.mark.parametrize("stage", STAGES)
def test_it_can_be_hashed_compared_by_identity_and_kept_in_containers(stage: str) -> None:
    q, other = make(stage, grid_of()), make(stage, grid_of())
    assert {q: 1, other: 2}[q] == 1
    assert q in [q]
    assert {q, q, other} == {q, other}
    assert hash(q) == hash(q)


@pytest.mark.parametrize("stage", STAGES)
def test_copies_and_pickles_keep_everything_and_share_nothing(stage: str) -> None:
    q = make(stage, grid_of())
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    copies = [copy.deepcopy(q), pickle.loads(pickle.dumps(q)), torch.load(file, weights_only=False), copy.copy(q)]
    for other in copies:
        assert type(other) is QTensor
        assert torch.equal(other.int_repr(), q.int_repr())
        assert torch.equal(other.scale, q.scale)
        assert (other.dtype, other.is_integer, other.is_rounded) == (q.dtype, q.is_integer, q.is_rounded)
        assert (other.grid is None) == (q.grid is None)
    copies[0].plain().zero_()
    copies[0].scale.zero_()
    assert q.scale.item() == pytest.approx(SCALE)
    assert q.dequantize().abs().sum() > 0
    twice = copy.deepcopy([q, q])
    assert twice[0] is twice[1]


def test_results_of_a_graph_can_be_copied_and_pickled() -> None:
    x = torch.ones(2, requires_grad=True)
    q = real_qtensor(x * 2, torch.ones(1), qint8)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert other.requires_grad
        assert other.is_leaf
        assert other.plain().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("stage", STAGES)
def test_repr_shows_values_scale_and_format(stage: str) -> None:
    q = make(stage, torch.tensor([2.0, -4.0]))
    kind, values = ("integers", "[ 2., -4.]") if stage == "converted" else ("values", "[ 0.1000, -0.2000]")
    expected = f"QTensor({kind}=tensor({values}), scale=tensor([0.0500]), dtype=qint8)"
    assert repr(q) == str(q) == f"{q}" == expected


def test_repr_shows_the_channel_axis() -> None:
    q = QTensor(torch.ones(2, 3), torch.tensor([0.1, 0.2]), "qint8", per_channel_axis=0)
    assert repr(q).endswith("scale=tensor([0.1000, 0.2000]), dtype=qint8, per_channel_axis=0)")


def test_scale_moves_with_the_values() -> None:
    for stage in STAGES:
        out = make(stage, grid_of()).to("meta")
        assert out.device.type == out.scale.device.type == "meta"


def test_ordinary_tensors_can_take_after_a_qtensor() -> None:
    q = make("converted", grid_of())
    out = torch.ones(3, dtype=torch.float64).type_as(q)
    assert type(out) is Tensor
    assert out.dtype == torch.float32
    assert torch.ones(1, 4, 6, 6).expand_as(q.plain()).shape == q.shape


def test_a_qtensor_can_take_the_shape_of_another_without_integers() -> None:
    q, other = make("validation", grid_of((1, 4, 1, 1))), make("training", grid_of())
    out = q.expand_as(other)
    assert out.grid is not None
    assert torch.equal(out.int_repr(), q.int_repr().expand(2, 4, 6, 6))


@pytest.mark.parametrize("dtype", [qint8, qint16, qint32])
def test_the_constructor_takes_integers_or_real_values(dtype) -> None:
    integers = torch.tensor([dtype.min, -3, 0, 7, dtype.max], dtype=dtype.storage)
    q = QTensor(integers, torch.tensor([0.5]), dtype)
    assert q.is_integer
    assert torch.equal(q.int_repr(), integers)
    torch.testing.assert_close(q.dequantize().double(), integers.double() * 0.5)
    real = QTensor(integers.double() * 0.5, 0.5, str(dtype))
    assert not real.is_integer
    assert torch.equal(real.int_repr(), integers)


def test_values_beyond_the_format_saturate_in_integers() -> None:
    q = QTensor(torch.tensor([1e6, -1e6, 0.26]), 0.5, qint8)
    assert q.int_repr().tolist() == [127, -128, 1]


def test_per_channel_tensors_know_their_axis_and_refuse_to_be_rearranged() -> None:
    scale = torch.tensor([0.1, 1.0])
    q = QTensor(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8), scale, "qint8", per_channel_axis=0)
    torch.testing.assert_close(q.dequantize(), torch.tensor([[0.1, 0.2, 0.3], [4.0, 5.0, 6.0]]))
    for kept in (q.clone(), q.detach(), q.contiguous(), q.cpu(), torch.relu(q), q.to("cpu")):
        assert (kept.q_per_channel_axis(), kept.int_repr().tolist()) == (0, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(NotImplementedError, match=r"per-channel QTensor \(axis 0\)"):
        q.t()
    real = QTensor(q.dequantize(), scale, "qint8", 0)
    assert torch.equal(real.int_repr(), q.int_repr())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: QTensor(torch.ones(2), 0.1, "qint8", zero_point=3), "zero_point must be 0"),
        (lambda: QTensor(torch.ones(2), 0.1, "qint9"), "unknown quantized dtype"),
        (lambda: QTensor(torch.ones(2), torch.tensor([0.1, 0.2]), "qint8"), "2 scales do not fit"),
        (lambda: QTensor(torch.ones(3), torch.tensor([0.1, 0.2]), "qint8", 0), "2 scales do not fit.*(3,)"),
        (lambda: QTensor(torch.ones(2), torch.tensor([0.1, 0.2]), "qint8", 1), "per_channel_axis=1"),
    ],
)  # fmt: skip
def test_a_qtensor_that_makes_no_sense_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_gradients_reach_a_leaf() -> None:
    q = real_qtensor(torch.tensor([0.5, 1.0]), torch.tensor([0.5]), qint8)
    q.requires_grad_()
    q.reshape(2, 1).dequantize().sum().backward()
    assert q.grad is not None
    assert q.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("target", "expected"),
    [("reshape", True), ("size", True), ("sigmoid", False), (torch.flatten, True), (F.pad, True), (F.dropout, True),
     (operator.getitem, True), (torch.sigmoid, False), (operator.add, False), (F.max_pool2d, True), (torch.cat, False)],
)  # fmt: skip
def test_keeps_scale_tells_pass_through_operators(target, expected: bool) -> None:
    assert keeps_scale(target) is expected


def test_an_ordinary_tensor_indexed_by_a_quantized_mask_is_refused_with_a_remedy() -> None:
    mask = real_qtensor(torch.tensor([1.0, -1.0]), torch.tensor([0.5]), qint8) > 0
    with pytest.raises(NotImplementedError, match="__getitem__.*DeQuantStub before that one"):
        torch.ones(2)[mask]
