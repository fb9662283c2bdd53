"""Max pooling one axis after the other has the values of torch's, and leaves to torch what it does not do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.operators.max_pool import max_pool2d, max_pool_bytes, trained_max_pool2d
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor

SIZES = [1, 2, 3, 5, (2, 3), (5, 1), 7, [3], (6, 2)]
STRIDES: list[Any] = [None, 1, 2, 3, (1, 2), [2, 1]]
PADDINGS: list[Any] = [0, 1, (0, 1), 2]


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 1, 1), (1, 2, 5, 1), (3, 8, 8), (0, 2, 4, 4)])
def test_the_values_and_errors_are_those_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(0)).float()
    for size, stride, padding, ceil in itertools.product(SIZES, STRIDES, PADDINGS, [False, True]):
        try:
            wanted = F.max_pool2d(x, size, stride, padding, ceil_mode=ceil)
        except Exception as error:
            with pytest.raises(type(error)):
                max_pool2d(x, size, stride, padding, ceil_mode=ceil)
            continue
        given = max_pool2d(x, size, stride, padding, ceil_mode=ceil)
        assert given.shape == wanted.shape and torch.equal(given, wanted), (size, stride, padding, ceil)
        assert given.data_ptr() != x.data_ptr() or not x.numel()
        small = max_pool_bytes(x.to(torch.int8), size, stride, padding, ceil_mode=ceil)
        assert small is None or (small.dtype == torch.int8 and torch.equal(small.float(), wanted))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_those_of_torch(value: float) -> None:
    x = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    x[0, 0, 2, 2] = value
    assert torch.equal(max_pool2d(x, 3, 2, 1).nan_to_num(7e7), F.max_pool2d(x, 3, 2, 1).nan_to_num(7e7))


def test_other_layouts_dilations_and_positions_are_left_to_torch() -> None:
    x = torch.randn(1, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(max_pool2d(x, 3, dilation=2), F.max_pool2d(x, 3, dilation=2))
    last = x.contiguous(memory_format=torch.channels_last)
    assert max_pool2d(last, 3).is_contiguous(memory_format=torch.channels_last)
    values, positions = max_pool2d(x, 3, return_indices=True)
    assert torch.equal(positions, F.max_pool2d(x, 3, return_indices=True)[1])
    assert torch.equal(values, max_pool2d(x, 3))


def test_bytes_stay_bytes_with_channels_last() -> None:
    x = torch.randint(-128, 128, (2, 3, 9, 9), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    pooled = max_pool_bytes(x.contiguous(memory_format=torch.channels_last), 3, 2, 1)
    assert pooled is not None and pooled.dtype == torch.int16
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled.float(), F.max_pool2d(x.float(), 3, 2, 1))
    assert max_pool_bytes(x, 3, dilation=2) is None and max_pool_bytes(x, 3, return_indices=True) is None


@pytest.mark.parametrize(("size", "stride", "padding", "dilation", "ceil"), [
    (3, 2, 1, 1, False), (2, None, 0, 1, True), ((2, 3), (1, 2), (1, 0), 1, False), (3, 1, 1, 2, True),
])  # fmt: skip
def test_with_gradient_ties_and_nan_are_those_of_torch(
    size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (2, 16, 9, 8), generator=generator).float()  # most windows have several largest values
    x[0, 3, 2, 2] = torch.nan
    found = []
    for pool in (F.max_pool2d, trained_max_pool2d):
        leaf = x.clone().requires_grad_()
        out = pool(leaf, size, stride, padding, dilation, ceil)
        assert out.is_contiguous()
        weights = torch.linspace(1, 2, out.numel()).view_as(out)
        (grad,) = torch.autograd.grad((out.nan_to_num() * weights).sum(), leaf)
        found.append((out.detach(), grad))
    assert torch.equal(found[0][0].nan_to_num(7e7), found[1][0].nan_to_num(7e7))
    assert torch.equal(found[0][1], found[1][1])


def test_with_gradient_errors_and_second_derivatives_are_those_of_torch() -> None:
    x = torch.randn(1, 16, 6, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for pool in (F.max_pool2d, trained_max_pool2d):
        with pytest.raises(RuntimeError, match="pad should be at most half"):
            pool(x, 3, 2, 2)
        (first,) = torch.autograd.grad((pool(x, 3, 2, 1) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert float(second.sum()) == 2 * 16 * 9


@pytest.mark.parametrize("is_integer", [True, False])
def test_windows_of_padding_alone_are_refused(is_integer: bool) -> None:
    image = torch.tensor([[[[3.0]]]])
    x = integer_qtensor(image, torch.ones(1), qint8) if is_integer else QTensor(image, torch.ones(1), qint8)
    with pytest.raises(OperatorInputError, match=r"windows that read nothing but padding.*image of \(1, 1\) pixels"):
        F.max_pool2d(x, 2, 1, 1, 2)
    larger = torch.arange(16.0).reshape(1, 1, 4, 4)
    pooled = F.max_pool2d(QTensor(larger, torch.ones(1), qint8), 2, 1, 1, 2)
    assert torch.equal(pooled.dequantize(), F.max_pool2d(larger, 2, 1, 1, 2))
