"""Embeddings while training: a table that is quantized as a constant is, and whose rows plain indices select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.function_handlers import handle
from horizon_plugin_pytorch.nn.qat.composite import on_both
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized import embedding as quantized
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Call, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor, real_qtensor


class Embedding(QATModule):
    """`torch.nn.Embedding` whose table has one scale, from all its rows. It is where quantized values begin."""

    quantized_class = quantized.Embedding

    def __init__(self, source: nn.Embedding, qconfig: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.padding_idx, self.max_norm, self.qconfig = source.padding_idx, source.max_norm, qconfig
        self.scale_grad_by_freq, self.sparse = source.scale_grad_by_freq, source.sparse
        self.weight = source.weight
        self.activation_post_process = qconfig.activation(channel_len=1)
        self.activation_post_process.activation_post_process.may_be_constant = True

    @classmethod
    def from_float(cls, mod: nn.Embedding) -> Embedding:
        """The QAT form; the table is shared."""
        self = cls(mod, mod.qconfig)
        self.path = getattr(mod, "path", "")
        self.require_settings()
        return self

    def require_settings(self) -> None:
        self.require_form(self)

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that the settings of a float module have a quantized form."""
        if mod.max_norm is not None:
            raise UnsupportedOperatorError(
                f"`Embedding` {at(getattr(mod, 'path', ''))} has no quantized form with max_norm, which changes the "
                "table while the model runs. Normalise the table before `prepare`, and leave max_norm out."
            )

    def forward(self, input: Tensor) -> Any:
        quantizer = self.activation_post_process
        assert quantizer is not None
        if quantizer.is_exact:
            return self.exact(input, trained=lambda: self._train(input))
        if quantizer.is_observing:
            quantizer.observe(self.weight)
        return self._train(input)

    def _train(self, input: Tensor) -> QTensor:
        quantizer = self.activation_post_process
        assert quantizer is not None
        rows = F.embedding(
            input, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        value = quantizer.round(rows) if quantizer.is_quantizing else rows
        return real_qtensor(value, quantizer.current_scale(), quantizer.dtype, is_rounded=quantizer.is_quantizing)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


@handle(F.embedding, torch.embedding, keeps=True)
def _rows(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    """Rows of a quantized table: the indices of the function come first, those of `torch.embedding` second."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if func is torch.embedding:
        names = "weight indices padding_idx scale_grad_by_freq sparse"
    call = dict(zip(names.split(), args, strict=False)) | kwargs
    if call.get("max_norm") is not None:
        raise NotImplementedError("embedding with max_norm changes its table; normalise the table and leave it out.")
    table = call.pop("weight")
    if not isinstance(table, QTensor) or any(isinstance(v, QTensor) for v in call.values()):
        raise NotImplementedError("embedding takes plain integers as indices, and a table with a scale.")
    return on_both(lambda weight: func(weight=weight, **call), table)


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """The rows keep the table's scale; the table, a constant, gets a QuantStub."""
    return None


register(Operator(
    "embedding", ScaleRule.OWN, Embedding, quantized.Embedding, (nn.Embedding,), marches=FROM_BAYES, is_source=True
))  # fmt: skip
register(Operator(
    "embedding_rows", ScaleRule.INHERIT, functions={F.embedding: _as_it_is, torch.embedding: _as_it_is},
    marches=FROM_BAYES, is_source=True,
))  # fmt: skip
