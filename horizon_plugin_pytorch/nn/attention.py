"""Attention: module forms of torch's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ScaledDotProductAttention(nn.Module):
    """`torch.nn.functional.scaled_dot_product_attention`; dropout acts while training only.

    Args:
        dropout_p, is_causal, scale, enable_gqa: as in torch.

    >>> import torch
    >>> ScaledDotProductAttention()(torch.ones(2, 3, 4), torch.ones(2, 5, 4), torch.ones(2, 5, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
    ) -> None:
        super().__init__()
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = dropout_p, is_causal, scale, enable_gqa

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float | None = None
    ) -> Tensor:
        dropout = (self.dropout_p if dropout_p is None else dropout_p) if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, with its parameters and their names.

    `add_bias_kv`, `add_zero_attn` and a `kdim` or `vdim` other than `embed_dim` have no quantized form.
    """
