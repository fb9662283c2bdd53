"""Multi-head attention while training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ConversionError, UnsupportedOperatorError, at
from horizon_plugin_pytorch.nn import attention as floats
from horizon_plugin_pytorch.nn.qat.attention import Attention, as_mask, causal_mask, operand_qconfig
from horizon_plugin_pytorch.nn.qat.composite import Composite, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.linear import Linear
from horizon_plugin_pytorch.nn.qat.packed_linear import PackedLinear
from horizon_plugin_pytorch.operators.support import Support, on
from horizon_plugin_pytorch.operators.table import Kind, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor


class MultiheadAttention(Composite):
    """`torch.nn.MultiheadAttention` from smaller operators; conversion replaces these.

    Parts: `q_proj`, `k_proj`, `v_proj` (linear layers on thirds of `in_proj_weight`), `attention`, `out_proj`, and
    `weights_mean`, the weights averaged over heads where these are asked for. Parameters are shared with the float
    module and have its names. A query that may see no key at all gives the bias of `out_proj`, where torch gives NaN.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    products_take = "parts"
    follows = frozenset({"num_heads", "batch_first", "dropout"})

    def __init__(self, source: nn.MultiheadAttention, qconfig: Any) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = source.embed_dim, source.num_heads, source.batch_first
        self.dropout = source.dropout
        self.qconfig, products = qconfig, getattr(source, "products", None)
        self.in_proj_weight, self.in_proj_bias = source.in_proj_weight, source.in_proj_bias
        self.q_proj, self.k_proj, self.v_proj = (
            PackedLinear(
                self,
                "in_proj_weight",
                "in_proj_bias",
                slice(i * self.embed_dim, (i + 1) * self.embed_dim),
                operand_qconfig(qconfig, products, min(i, 1)),
            )
            for i in range(3)
        )
        self.attention = Attention(source.dropout, qconfig, products)
        self.weights_mean = optional(FloatFunctional(qconfig))
        source.out_proj.qconfig = qconfig  # type: ignore[assignment]
        self.out_proj = Linear.from_float(source.out_proj)

    @classmethod
    def require_form(cls, mod: nn.MultiheadAttention) -> None:
        """Insist that the settings of a float module have a quantized form."""
        extras = [
            name
            for name, is_there in (
                ("add_bias_kv", mod.bias_k is not None),
                ("add_zero_attn", mod.add_zero_attn),
                ("kdim or vdim other than embed_dim", mod.in_proj_weight is None),
            )
            if is_there
        ]
        if extras:
            raise UnsupportedOperatorError(
                f"`MultiheadAttention` {at(getattr(mod, 'path', ''))} has no quantized form with "
                f"{' and '.join(extras)}: leave that out, or bring key and value to embed_dim with a Linear first."
            )

    @classmethod
    def from_float(cls, mod: nn.MultiheadAttention) -> MultiheadAttention:
        """The QAT form."""
        cls.require_form(mod)
        return cls(mod, mod.qconfig)

    def drop_float_parameters(self) -> None:
        """After conversion the projections have their own integers."""
        self.in_proj_weight = self.in_proj_bias = None

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        if not all(isinstance(x, QTensor) for x in (query, key, value)):
            raise ConversionError(f"MultiheadAttention {self.place} got a float tensor; put a QuantStub before it.")
        is_batched = query.dim() == 3
        hidden, bias = self._masks(query, key, key_padding_mask, attn_mask, is_causal)
        q = self._heads(self.q_proj(query), is_batched)
        k = self._heads(self.k_proj(key), is_batched)
        v = self._heads(self.v_proj(value), is_batched)
        scale = 1 / math.sqrt(self.embed_dim // self.num_heads)
        out, weights = self.attention(q, k, v, hidden, bias, scale, self.dropout)
        if is_batched and not self.batch_first:
            out = out.permute(2, 0, 1, 3)
        else:
            out = out.transpose(-3, -2)
        out = self.out_proj(out.flatten(-2))
        if not need_weights:
            return out, None
        return out, self.weights_mean.mean(weights, -3) if average_attn_weights else weights

    def _heads(self, x: Any, is_batched: bool) -> Any:
        """``[..., head, position, feature]``."""
        x = x.unflatten(-1, (self.num_heads, self.embed_dim // self.num_heads))
        return x.permute(1, 2, 0, 3) if is_batched and not self.batch_first else x.transpose(-3, -2)

    def _masks(
        self, query: Any, key: Any, key_padding_mask: Any, attn_mask: Any, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions that are left out, and numbers to add to the scores; both fit [batch, head, query, key]."""
        padding, mask = as_mask(key_padding_mask), as_mask(attn_mask)
        if mask is not None and mask.dim() == 3 and query.dim() == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        if mask is None and is_causal:
            time = 1 if self.batch_first and query.dim() == 3 else 0
            mask = causal_mask(query.movedim(time, -2), key.movedim(time, -2))
        if padding is not None and padding.dim() == 2:
            padding = padding[:, None, None]
        masks = [m for m in (padding, mask) if m is not None]
        hidden = bias = None
        for m in masks:
            if m.dtype == torch.bool:
                hidden = m if hidden is None else hidden | m
            else:
                bias = m if bias is None else bias + m
        return hidden, bias


register(Operator(
    "multi_head_attention", ScaleRule.OWN, MultiheadAttention, MultiheadAttention,
    (nn.MultiheadAttention, floats.MultiheadAttention),
    marches=on(bayes=Support(note="no add_bias_kv, no add_zero_attn; query, key and value of one embed_dim")),
    results=(Kind.QUANTIZED, Kind.QUANTIZED), unless_read={1: {"need_weights": False}},
    real_inputs=("attn_mask", "key_padding_mask"),
))  # fmt: skip
