"""Positions of a map that are worth a look, and run-length encoding of maps."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.leaf import own_leaf


@own_leaf
def filter(*inputs: Tensor, threshold: float, idx_range: tuple[int, int] | None = None) -> list[list[Tensor]]:
    """The positions where the first map's largest channel is above a threshold, with the values of all maps there.

    QTensors give real numbers, so its results may leave a model without a DeQuantStub.

    Args:
        inputs: maps ``[N, C, H, W]`` of the same N, H and W; the number of channels may differ.
        threshold: what the largest channel must exceed.
        idx_range: the channels ``first, ..., last - 1`` of the first map that are compared; None: all.

    Returns:
        For each image ``[max_value [M], max_idx [M], coord [M, 2], data [M, C], ...]``: the largest value, its channel
        in the first map, row and column, and the values of each map; in the order of rows and columns (a BPU's
        differs).

    >>> x = torch.tensor([[0.1, 0.9], [0.2, 0.3]]).reshape(1, 2, 1, 2)
    >>> value, index, place, data = filter(x, threshold=0.5)[0]
    >>> value, index, place, data
    (tensor([0.9000]), tensor([0]), tensor([[0, 1]]), tensor([[0.9000, 0.3000]]))
    """
    if not all(isinstance(x, Tensor) for x in inputs) or not isinstance(threshold, (int, float, Tensor)):
        kinds = ", ".join(type(x).__name__ for x in inputs)
        raise refused_input("filter", "maps [N, C, H, W] and a number as threshold", inputs=kinds, threshold=threshold)
    sizes = [tuple(map(int, x.shape)) for x in inputs]  # while torch.jit traces, they are tensors
    if not inputs or any(len(size) != 4 for size in sizes) or len({(n, *place) for n, _, *place in sizes}) > 1:
        raise OperatorInputError(
            f"`filter` takes maps [N, C, H, W] of one N, H and W, got {', '.join(map(str, sizes)) or 'none'}."
        )
    maps = [x.as_real() if isinstance(x, QTensor) else x for x in inputs]
    first, last = (0, maps[0].shape[1]) if idx_range is None else idx_range
    if not 0 <= first < last <= maps[0].shape[1]:
        raise OperatorInputError(
            f"`filter`: idx_range ({first}, {last}) is no range of channels of the first map, which has "
            f"{maps[0].shape[1]}."
        )
    values, channels = maps[0][:, first:last].max(1)
    channels = channels + first
    width = maps[0].shape[-1]
    rows = [x.flatten(2).transpose(1, 2) for x in maps]
    found = []
    for n in range(maps[0].shape[0]):
        places = (values[n] > threshold).nonzero()
        flat = places[:, 0] * width + places[:, 1]
        best = (x[n].flatten().index_select(0, flat) for x in (values, channels))
        found.append([*best, places, *(x[n].index_select(0, flat) for x in rows)])
    return found


@own_leaf
def rle(input: Tensor) -> list[Tensor]:
    """Run-length encoding, such as of a map of classes: it is short where neighbours are equal.

    Args:
        input: ``[N, ...]``, integers, floating-point numbers that are whole, or a QTensor (its integers).

    Returns:
        For each of the N, an int64 tensor ``[runs, value, length, value, length, ...]``; a run may continue from one
        row to the next.

    >>> rle(torch.tensor([[[7, 7], [7, 2]]]))
    [tensor([2, 7, 3, 2, 1])]
    """
    whole = input.as_grid() if isinstance(input, QTensor) else input
    if not isinstance(whole, Tensor):
        raise refused_input("rle", "a tensor [N, ...]", "Stack the maps of a list.", input=whole)
    if whole.dim() == 0:
        raise OperatorInputError("`rle` takes a batch of maps, got one number.")
    if type(input) is Tensor and whole.is_floating_point() and not torch.equal(whole, whole.round()):
        raise OperatorInputError("`rle` encodes whole numbers; round the values, or take their argmax, before it.")
    return [fp.rle(item) for item in whole]
