"""Products of tensors, attention, recurrent cells, embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch import nn as horizon_nn
from tests.operators.cases.base import cases, module


def _einsum(name: str, equation: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return name, lambda x, y: torch.einsum(equation, x, y), dict(shapes=shapes)


PRODUCTS = cases(
    ("torch-mm", lambda x, y: torch.mm(x, y), dict(shapes=((5, 8), (8, 4)))),
    ("torch-mm-mat2", lambda x, y: torch.mm(x, mat2=y), dict(shapes=((5, 8), (8, 4)))),
    ("method-mm", lambda x, y: x.mm(y), dict(shapes=((5, 8), (8, 4)))),
    ("method-bmm", lambda x, y: x.bmm(y), dict(shapes=((3, 5, 8), (3, 8, 4)))),
    ("torch-mv", lambda x, y: torch.mv(x, y), dict(shapes=((5, 8), (8,)))),
    ("method-mv", lambda x, y: x.mv(y), dict(shapes=((5, 8), (8,)))),
    ("torch-dot", lambda x, y: torch.dot(x, y), dict(shapes=((8,), (8,)), low=0.5)),
    ("matmul-vector-left", lambda x, y: x @ y, dict(shapes=((8,), (3, 8, 4)))),
    _einsum("einsum-matmul", "ij,jk->ik", (5, 8), (8, 4)),
    _einsum("einsum-batch", "bij,bjk->bik", (3, 5, 8), (3, 8, 4)),
    _einsum("einsum-scores", "bhqd,bhkd->bhqk", (2, 3, 5, 8), (2, 3, 6, 8)),
    _einsum("einsum-scores-heads-last", "bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 6, 3, 8)),
    _einsum("einsum-weighted", "bhqk,bkhd->bqhd", (2, 3, 5, 6), (2, 6, 3, 8)),
    _einsum("einsum-graph", "nctv,vw->nctw", (2, 3, 4, 6), (6, 7)),
    _einsum("einsum-graph-2-summed", "nkctv,kvw->nctw", (2, 3, 4, 5, 6), (3, 6, 7)),
    _einsum("einsum-ellipsis", "...ij,...jk->...ik", (2, 3, 5, 8), (3, 8, 4)),
    _einsum("einsum-implicit", "ij,jk", (5, 8), (8, 4)),
    _einsum("einsum-inner", "i,i->", (8,), (8,)),
    _einsum("einsum-elementwise", "bij,bij->bij", (3, 5, 8), (3, 5, 8)),
    _einsum("einsum-outer", "i,j->ij", (5,), (8,)),
    _einsum("einsum-broadcast", "bchw,bc->bhwc", (2, 3, 4, 5), (2, 3)),
    ("einsum-list", lambda x, y: torch.einsum("ij,jk->ik", [x, y]), dict(shapes=((5, 8), (8, 4)))),
    low=0.2,  # sums of products stay away from 0, where they cancel
    steps16=0.54,  # a multiplier has 20 bits: 3 % of a step at 32,767
)

# The product is rounded to int16 before the sum is rounded to the output's format: in int16 both count.
SUMS = cases(
    ("torch-addmm", lambda x, a, b: torch.addmm(x, a, b), dict(shapes=((5, 4), (5, 8), (8, 4)))),
    ("torch-addmm-broadcast", lambda x, a, b: torch.addmm(x, a, b), dict(shapes=((4,), (5, 8), (8, 4)))),
    ("torch-addmm-numbers", lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2),
     dict(shapes=((5, 4), (5, 8), (8, 4)))),
    ("torch-baddbmm", lambda x, a, b: torch.baddbmm(x, a, b, beta=1, alpha=0.125),
     dict(shapes=((3, 5, 4), (3, 5, 8), (3, 8, 4)))),
    ("method-baddbmm", lambda x, a, b: x.baddbmm(batch1=a, batch2=b),
     dict(shapes=((3, 5, 4), (3, 5, 8), (3, 8, 4)))),
    ("torch-addmv", lambda x, a, b: torch.addmv(x, a, b), dict(shapes=((5,), (5, 8), (8,)))),
    ("einsum-three", lambda x, a, b: torch.einsum("bij,bjk,kl->bil", x, a, b),
     dict(shapes=((3, 4, 5), (3, 5, 6), (6, 2)), low=0.2)),
    ("einsum-three-weighted", lambda x, a, b: torch.einsum("nhwc,nhw,c->nc", x, a, b),
     dict(shapes=((2, 3, 4, 5), (2, 3, 4), (5,)), low=0.2)),
    steps8=0.53,
    steps16=1.1,
)  # fmt: skip

HEADS = ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))


def _bool_mask(*shape: int) -> Any:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        mask = torch.rand(shape, generator=generator) < 0.4
        mask[..., 0] = False
        return (mask,)

    return make


def _float_mask(*shape: int) -> Any:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.rand(shape, generator=generator) - 0.5,)

    return make


def _attention(x: Any, y: Any, z: Any, **kwargs: Any) -> Any:
    return F.scaled_dot_product_attention(x, y, z, **kwargs)


ATTENTION = cases(
    ("attention", lambda x, y, z: _attention(x, y, z)),
    ("attention-causal", lambda x, y, z: _attention(x, y, z, is_causal=True)),
    ("attention-scale", lambda x, y, z: _attention(x, y, z, scale=0.25)),
    (
        "attention-grouped",
        lambda x, y, z: _attention(x, y, z, enable_gqa=True),
        dict(shapes=((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    ),
    ("attention-3d", lambda x, y, z: _attention(x, y, z), dict(shapes=((3, 5, 8), (3, 6, 8), (3, 6, 8)))),
    ("attention-bool-mask", lambda x, y, z, m: _attention(x, y, z, attn_mask=~m), dict(others=_bool_mask(5, 6))),
    ("attention-float-mask", lambda x, y, z, m: _attention(x, y, z, attn_mask=m), dict(others=_float_mask(2, 1, 5, 6))),
    shapes=HEADS,
    steps8=2.0,  # the weights are rounded to the qconfig's format before they are summed with
    steps16=3.0,  # scores, three tables of the softmax, weights and result: each its own rounding
    train_steps16=4,
)


class _Heads(nn.Module):
    """A MultiheadAttention as models call it."""

    def __init__(self, cls: Any, options: dict[str, Any], call: Any) -> None:
        super().__init__()
        self.attn, self.call = cls(12, 3, **options), call
        for bias in (self.attn.in_proj_bias, self.attn.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias, std=0.2)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.attn, *inputs)


def _mha(call: Any, cls: Any = nn.MultiheadAttention, **options: Any) -> Any:
    def make() -> nn.Module:
        return _Heads(cls, {"batch_first": True, **options}, call)

    return make


THREE = ((2, 5, 12), (2, 6, 12), (2, 6, 12))
HEADED = cases(
    ("mha-self", _mha(lambda a, x: a(x, x, x)[0])),
    ("mha-horizon", _mha(lambda a, x: a(x, x, x, need_weights=False)[0], horizon_nn.MultiheadAttention)),
    ("mha-cross", _mha(lambda a, q, k, v: a(q, k, v)[0]), dict(shapes=THREE)),
    ("mha-time-first", _mha(lambda a, q, k, v: a(q, k, v)[0], batch_first=False),
     dict(shapes=((5, 2, 12), (6, 2, 12), (6, 2, 12)))),
    ("mha-unbatched", _mha(lambda a, x: a(x, x, x)[0], batch_first=False), dict(shapes=((5, 12),))),
    ("mha-no-bias", _mha(lambda a, x: a(x, x, x)[0], bias=False)),
    ("mha-weights", _mha(lambda a, x: a(x, x, x)[1])),
    ("mha-weights-of-heads", _mha(lambda a, x: a(x, x, x, average_attn_weights=False)[1])),
    ("mha-attn-mask", _mha(lambda a, x, m: a(x, x, x, attn_mask=m)[0]), dict(others=_bool_mask(5, 5))),
    ("mha-attn-mask-of-heads", _mha(lambda a, x, m: a(x, x, x, attn_mask=m)[0]), dict(others=_bool_mask(6, 5, 5))),
    ("mha-padding", _mha(lambda a, x, m: a(x, x, x, m)[0]), dict(others=_bool_mask(2, 5))),
    ("mha-float-mask", _mha(lambda a, x, m: a(x, x, x, attn_mask=m)[0]), dict(others=_float_mask(5, 5))),
    shapes=((2, 5, 12),),
    has_weight=True,
    steps8=2.0,  # as attention, and two layers of rounding around it
    steps16=3.5,
    train_steps=2,
    train_steps16=6,
)  # fmt: skip


class _Sequence(nn.Module):
    """A recurrent module as models call it."""

    def __init__(self, recurrent: nn.Module, call: Any) -> None:
        super().__init__()
        self.rnn, self.call = recurrent, call

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.rnn, *inputs)


def _rnn(cls: Any, call: Any, *args: Any, **options: Any) -> Any:
    def make() -> nn.Module:
        return _Sequence(cls(*(args or (6, 5)), **options), call)

    return make


SEQUENCE, PAIR = (4, 2, 6), dict(shapes=((2, 6), (2, 5)))
STATES = dict(shapes=((5, 2, 6), (1, 2, 5), (1, 2, 5)))
RECURRENT = cases(
    ("lstm", _rnn(nn.LSTM, lambda m, x: m(x)[0])),
    ("lstm-horizon", _rnn(horizon_nn.LSTM, lambda m, x: m(x)[0], batch_first=True)),
    ("lstm-hidden", _rnn(nn.LSTM, lambda m, x: m(x)[1][0])),
    ("lstm-cell-state", _rnn(nn.LSTM, lambda m, x: m(x)[1][1]),
     dict(out_format="qint16", steps8=32, train_steps=4)),  # int8 outputs enter it: an eighth of a step of theirs
    ("lstm-2-layers-hidden", _rnn(nn.LSTM, lambda m, x: m(x)[1][0], 6, 5, 2)),
    ("lstm-bidirectional", _rnn(nn.LSTM, lambda m, x: m(x)[0], bidirectional=True, bias=False)),
    ("lstm-states", _rnn(nn.LSTM, lambda m, x, h, c: m(x, (h, c))[0]), STATES),
    ("lstm-unbatched", _rnn(nn.LSTM, lambda m, x: m(x)[0]), dict(shapes=((5, 6),))),
    ("gru", _rnn(nn.GRU, lambda m, x: m(x)[0])),
    ("gru-horizon", _rnn(horizon_nn.GRU, lambda m, x: m(x)[0], batch_first=True)),
    ("gru-2-layers", _rnn(nn.GRU, lambda m, x: m(x)[0], 6, 5, 2)),
    ("gru-bidirectional-hidden", _rnn(nn.GRU, lambda m, x: m(x)[1], bidirectional=True)),
    ("gru-state", _rnn(nn.GRU, lambda m, x, h: m(x, h)[0]), dict(shapes=((5, 2, 6), (1, 2, 5)))),
    ("rnn", _rnn(nn.RNN, lambda m, x: m(x)[0])),
    ("rnn-relu", _rnn(nn.RNN, lambda m, x: m(x)[0], nonlinearity="relu"), dict(is_smooth=False)),
    ("lstm-cell", _rnn(nn.LSTMCell, lambda m, x, h, c: m(x, (h, c))[0]), dict(shapes=((2, 6), (2, 5), (2, 5)))),
    ("lstm-cell-zeros", _rnn(horizon_nn.LSTMCell, lambda m, x: m(x)[0]), dict(shapes=((2, 6),))),
    ("gru-cell", _rnn(nn.GRUCell, lambda m, x, h: m(x, h)), PAIR),
    ("gru-cell-zeros", _rnn(horizon_nn.GRUCell, lambda m, x: m(x)), dict(shapes=((2, 6),))),
    ("rnn-cell", _rnn(nn.RNNCell, lambda m, x, h: m(x, h)), PAIR),
    shapes=(SEQUENCE,),
    has_weight=True,
    steps8=1.0,  # outputs are rounded to int8 at every step, and enter the next
    steps16=5.0,  # two tables of one step each, and a table's step times the slope of what follows
    train_steps16=6,
)  # fmt: skip


def _indices(high: int, *shape: int) -> Any:
    return lambda generator: (torch.randint(0, high, shape, generator=generator),)


class _Table(nn.Module):
    """A table of the model's own, by function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(9, 6))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.weight, *inputs)


def _table(function: Any) -> Any:
    def make() -> nn.Module:
        return _Table(function)

    return make


EMBEDDINGS = cases(
    ("embedding", module(nn.Embedding, 9, 6), dict(shapes=(), others=_indices(9, 2, 5))),
    ("embedding-padding", module(nn.Embedding, 9, 6, padding_idx=2), dict(shapes=(), others=_indices(9, 5))),
    ("embedding-and-sum", _table(lambda w, x, i: F.embedding(i, w) + x),
     dict(shapes=((2, 5, 6),), others=_indices(9, 2, 5), steps8=1.0, steps16=1.0)),  # the table is rounded too
    ("embedding-torch", _table(lambda w, x, i: torch.embedding(w, i) * x),
     dict(shapes=((2, 5, 6),), others=_indices(9, 2, 5), steps8=1.0, steps16=1.0)),
)  # fmt: skip

CASES = [*PRODUCTS, *SUMS, *ATTENTION, *HEADED, *RECURRENT, *EMBEDDINGS]
