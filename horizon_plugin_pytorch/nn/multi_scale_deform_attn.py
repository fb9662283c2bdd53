"""Attention that looks at a few learned places of several feature maps (Deformable DETR)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shapes = Sequence[tuple[int, int]]


def level_shapes(spatial_shapes: Any) -> list[tuple[int, int]]:
    """Height and width of each feature map, from a tensor [levels, 2] or pairs."""
    pairs = spatial_shapes.tolist() if isinstance(spatial_shapes, Tensor) else spatial_shapes
    return [(int(height), int(width)) for height, width in pairs]


def deformable_attention(
    value: Tensor,
    offsets: Tensor,
    weights: Tensor,
    reference: Tensor,
    shapes: Shapes,
    on_grid: Callable[[Tensor, tuple[int, int]], Tensor] = lambda grid, size: grid,
    on_samples: Callable[[Tensor], Tensor] = lambda samples: samples,
) -> Tensor:
    """The weighted sum of samples: [N, queries, heads * D].

    Args:
        value: features of all levels, [N, positions, heads, D].
        offsets: [N, queries, heads, levels, points, 2], in pixels; in parts of the reference's size where it has one.
        weights: [N, queries, heads, levels, points].
        reference: x and y in [0, 1], and width and height if there are four: [N, queries, levels, 2 or 4].
        on_grid, on_samples: what quantization does to places and samples.
    """
    batch, _, heads, depth = value.shape
    points = offsets.shape[4]
    planes = value.permute(0, 2, 3, 1).flatten(0, 1)
    parts, start = [], 0
    for level, (height, width) in enumerate(shapes):
        size = offsets.new_tensor([width, height])
        moved = offsets[:, :, :, level]
        place = reference[:, :, None, level, None, :2]
        if reference.shape[-1] == 4:
            place = place + moved / points * reference[:, :, None, level, None, 2:] * 0.5
        else:
            place = place + moved / size
        grid = on_grid(2 * place - 1, (height, width)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        image = planes[..., start : start + height * width].unflatten(-1, (height, width))
        samples = on_samples(F.grid_sample(image, grid, "bilinear", "zeros", False))
        weight = weights[..., level, :].permute(0, 2, 3, 1).flatten(0, 1).unsqueeze(1)
        parts.append((samples * weight).sum(2))
        start += height * width
    return sum(parts[1:], parts[0]).reshape(batch, heads * depth, -1).transpose(1, 2)


class MultiScaleDeformableAttention(nn.Module):
    """Each query looks at `num_points` places, around its reference point, of each of `num_levels` feature maps.

    Args:
        embed_dims: features of queries and values.
        num_heads, num_levels, num_points: heads, feature maps, and places in each.
        im2col_step: taken for compatibility; nothing here depends on it.
        dropout: of the result, before the identity is added.
        batch_first: queries are [N, queries, features] instead of [queries, N, features].
        value_proj_ratio: features of the projected values, in parts of `embed_dims`.

    >>> attention = MultiScaleDeformableAttention(8, 2, 1, 4, batch_first=True).eval()
    >>> query, value, points = torch.rand(1, 3, 8), torch.rand(1, 20, 8), torch.rand(1, 3, 1, 2)
    >>> attention(query, value=value, reference_points=points, spatial_shapes=[(4, 5)]).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f"embed_dims ({embed_dims}) must be a multiple of num_heads ({num_heads}).")
        self.embed_dims, self.num_heads, self.num_levels, self.num_points = (
            embed_dims,
            num_heads,
            num_levels,
            num_points,
        )
        self.im2col_step, self.batch_first, self.value_proj_ratio = im2col_step, batch_first, value_proj_ratio
        inner = int(embed_dims * value_proj_ratio)
        self.dropout = nn.Dropout(dropout)
        self.sampling_offsets = nn.Linear(embed_dims, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * num_points)
        self.value_proj = nn.Linear(embed_dims, inner)
        self.output_proj = nn.Linear(inner, embed_dims)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """At first each head looks in its own direction, point by point one pixel further, with equal weights."""
        angle = torch.arange(self.num_heads) * (2.0 * math.pi / self.num_heads)
        direction = torch.stack([angle.cos(), angle.sin()], -1)
        direction /= direction.abs().max(-1, keepdim=True)[0]
        distance = torch.arange(1, self.num_points + 1).reshape(1, 1, -1, 1)
        bias = direction.reshape(-1, 1, 1, 2) * distance
        self.sampling_offsets.weight.zero_()
        self.sampling_offsets.bias.copy_(bias.expand(-1, self.num_levels, -1, -1).flatten())
        self.attention_weights.weight.zero_()
        self.attention_weights.bias.zero_()
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
            layer.bias.zero_()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Any = None,
    ) -> Tensor:
        """What the queries find, plus `identity` (the queries, if it is not given).

        Args:
            key: not used.
            value: features of all maps one after the other, [positions, N, features]; the queries, if not given.
            query_pos: added to the queries.
            key_padding_mask: True at positions that count as zero, [N, positions].
            reference_points: x and y in [0, 1], and width and height if there are four: [N, queries, levels, 2 or 4].
            spatial_shapes: height and width of each map.
        """
        shapes = level_shapes(spatial_shapes)
        value = query if value is None else value
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        batch, count = query.shape[:2]
        sizes = (batch, count, self.num_heads, self.num_levels, self.num_points)
        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        offsets = self.sampling_offsets(query).reshape(*sizes, 2)
        weights = self.attention_weights(query).reshape(*sizes[:3], -1).softmax(-1).reshape(sizes)
        assert reference_points is not None
        out = deformable_attention(
            value.unflatten(-1, (self.num_heads, -1)), offsets, weights, reference_points, shapes
        )
        out = self.output_proj(out)
        out = out if self.batch_first else out.transpose(0, 1)
        return self.dropout(out) + identity
