"""Scaled dot-product attention while training: scores and softmax in int16, operands of products in the qconfig's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.fake_quant.qconfig import with_format
from horizon_plugin_pytorch.nn import attention as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite, Times, constant_stub, inner_qconfig, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.nn.qat.softmax import Softmax
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor

# exp(-1000) is 0 in every format: a float mask's value below this leaves its position out, as -inf does.
_HIDDEN_BELOW = -1000.0


def operand_qconfig(qconfig: Any, products: Any, position: int) -> Any:
    """The qconfig of what gives an operand of a product: in the format that somebody asked for, if anybody did."""
    if products is None:
        return qconfig
    return qconfig._replace(activation=with_format(qconfig.activation, products[position]))


class Attention(nn.Module):
    """``softmax(query @ key.T * scale + mask) @ value``.

    Parts: `matmul` (the scores, int16; the factor is part of the query's scale), `mask_quant` and `mask_add` (a float
    mask, int16), `softmax` (int16 inside), `weighted_sum`.

    Args:
        products: formats of the two operands of both products: query and key, the weights and the value.
    """

    def __init__(self, dropout: float, qconfig: Any, products: Any = None) -> None:
        super().__init__()
        inner = inner_qconfig(qconfig)
        self.dropout = dropout
        self.scale = Times()
        self.matmul = FloatFunctional(inner)
        self.mask_quant = optional(constant_stub(inner))
        self.mask_add = optional(FloatFunctional(inner))
        self.softmax = Softmax(-1, operand_qconfig(qconfig, products, 0))
        self.weighted_sum = FloatFunctional(qconfig)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        hidden: Tensor | None,
        bias: Tensor | None,
        scale: float,
        dropout: float | None = None,
    ) -> tuple[Any, Any]:
        """The result and the weights.

        Args:
            hidden: True at positions that are left out.
            bias: added to the scores; real numbers.
            dropout: the probability for this call, instead of the module's own.
        """
        scores = self.matmul.matmul(self.scale(query, scale), key, y_trans=True)
        if bias is not None:
            is_hidden = bias <= _HIDDEN_BELOW
            hidden = is_hidden if hidden is None else hidden | is_hidden
            scores = self.mask_add.add(scores, self.mask_quant(torch.where(is_hidden, 0.0, bias)))
        weights = self.softmax(scores, hidden)
        dropout = self.dropout if dropout is None else dropout
        dropped = F.dropout(weights, dropout, self.training) if dropout else weights
        return self.weighted_sum.matmul(dropped, value), weights


def as_mask(mask: Any) -> Tensor | None:
    """A mask as an ordinary tensor: booleans or real numbers."""
    if isinstance(mask, QTensor):
        return mask.int_repr().bool() if mask.dtype == qbool else real(mask)
    return mask


def causal_mask(query: Any, key: Any) -> Tensor:
    """True where a key lies after the query."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)


class ScaledDotProductAttention(Composite):
    """`torch.nn.functional.scaled_dot_product_attention` from smaller operators; conversion replaces these."""

    products_take = "operands"
    follows = frozenset({"dropout_p", "is_causal", "scale", "enable_gqa"})

    def __init__(
        self,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        qconfig: Any,
        products: Any = None,
    ) -> None:
        super().__init__()
        self.is_causal, self.scale, self.enable_gqa, self.qconfig = is_causal, scale, enable_gqa, qconfig
        self.dropout_p = dropout_p
        self.attention = Attention(dropout_p, qconfig, products)

    @classmethod
    def from_float(cls, mod: floats.ScaledDotProductAttention) -> ScaledDotProductAttention:
        """The QAT form."""
        products = getattr(mod, "products", None)
        return cls(mod.dropout_p, mod.is_causal, mod.scale, mod.enable_gqa, mod.qconfig, products)

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float | None = None) -> Any:
        if self.enable_gqa:  # each head of key and value serves several of the query
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        mask = as_mask(attn_mask)
        hidden = bias = None
        if mask is not None:
            hidden, bias = (~mask, None) if mask.dtype == torch.bool else (None, mask)
        if self.is_causal:
            hidden = causal_mask(query, key)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        probability = self.dropout_p if dropout_p is None else dropout_p
        return self.attention(query, key, value, hidden, bias, scale, probability)[0]


def _bind(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: bool = False, *,
    scale: Any = None, enable_gqa: bool = False,
) -> Call:  # fmt: skip
    if is_causal and attn_mask is not None:
        raise NotBindable("give either attn_mask or is_causal, as torch wants it")
    if not all(isinstance(v, (int, float)) for v in (dropout_p, scale or 0.0)) or (scale is not None and scale <= 0):
        raise NotBindable("dropout_p and scale must be numbers, and scale a positive one")
    return Call(
        floats.ScaledDotProductAttention,
        (query, key, value),
        {} if attn_mask is None else {"attn_mask": attn_mask},
        settings={
            "dropout_p": float(dropout_p), "is_causal": bool(is_causal), "scale": scale, "enable_gqa": bool(enable_gqa)
        },
        follows=("dropout_p",),  # 0 in eval mode
    )  # fmt: skip


register(Operator(
    "scaled_dot_product_attention", ScaleRule.OWN, ScaledDotProductAttention, ScaledDotProductAttention,
    (floats.ScaledDotProductAttention,), {F.scaled_dot_product_attention: _bind}, {}, FROM_BAYES,
    real_inputs=("attn_mask",),
))  # fmt: skip
