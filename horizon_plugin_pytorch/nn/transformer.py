"""Transformer layers as plain compositions of operators, which symbolic trace can follow.

torch's own choose a fused kernel by the values of flags and masks. These have the same parameters, so that state dicts
load from one into the other, and `prepare` puts them in place of torch's (`plain_transformers`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional

_ACTIVATIONS: dict[Any, Any] = {F.relu: nn.ReLU, F.gelu: nn.GELU}


class _Layer(nn.Module):
    """What encoder and decoder layers share: adds with a place for their scale, and the activation as a module."""

    is_traced_through = True
    _adds: tuple[str, ...]
    activation: Any
    linear1: Any
    linear2: Any
    dropout: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_parts()

    def add_parts(self) -> None:
        """Modules that torch's class does not have; none of them has parameters."""
        for name in self._adds:
            self.add_module(name, FloatFunctional())
        if self.activation in _ACTIVATIONS:
            cls = _ACTIVATIONS[self.activation]
            del self.activation
            self.activation = cls()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # torch's takes an activation that is a module for a missing one

    def _feed_forward(self, x: Any) -> Any:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`, with its arguments, parameters and their names.

    Args:
        src_mask, src_key_padding_mask: as in torch; of `is_causal` the mask says everything.

    >>> import torch
    >>> TransformerEncoderLayer(8, 2, 16, batch_first=True)(torch.randn(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    _adds = ("attention_add", "feed_forward_add")
    attention_add: FloatFunctional
    feed_forward_add: FloatFunctional

    def forward(self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Any:
        x = src
        if self.norm_first:
            x = self.attention_add.add(x, self._attend(self.norm1(x), src_mask, src_key_padding_mask))
            return self.feed_forward_add.add(x, self.dropout2(self._feed_forward(self.norm2(x))))
        x = self.norm1(self.attention_add.add(x, self._attend(x, src_mask, src_key_padding_mask)))
        return self.norm2(self.feed_forward_add.add(x, self.dropout2(self._feed_forward(x))))

    def _attend(self, x: Any, mask: Any, padding: Any) -> Any:
        out = self.self_attn(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        return self.dropout1(out[0])


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer`, with its arguments, parameters and their names.

    >>> import torch
    >>> layer = TransformerDecoderLayer(8, 2, 16, batch_first=True)
    >>> layer(torch.randn(1, 4, 8), torch.randn(1, 5, 8)).shape
    torch.Size([1, 4, 8])
    """

    _adds = ("attention_add", "cross_attention_add", "feed_forward_add")
    attention_add: FloatFunctional
    cross_attention_add: FloatFunctional
    feed_forward_add: FloatFunctional

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Any:
        own, other = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
        x = tgt
        if self.norm_first:
            x = self.attention_add.add(x, self._attend(self.norm1(x), *own))
            x = self.cross_attention_add.add(x, self._look(self.norm2(x), memory, *other))
            return self.feed_forward_add.add(x, self.dropout3(self._feed_forward(self.norm3(x))))
        x = self.norm1(self.attention_add.add(x, self._attend(x, *own)))
        x = self.norm2(self.cross_attention_add.add(x, self._look(x, memory, *other)))
        return self.norm3(self.feed_forward_add.add(x, self.dropout3(self._feed_forward(x))))

    def _attend(self, x: Any, mask: Any, padding: Any) -> Any:
        out = self.self_attn(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        return self.dropout1(out[0])

    def _look(self, x: Any, memory: Any, mask: Any, padding: Any) -> Any:
        out = self.multihead_attn(x, memory, memory, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        return self.dropout2(out[0])


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` of plain layers.

    >>> import torch
    >>> TransformerEncoder(TransformerEncoderLayer(8, 2, 16), 2)(torch.randn(5, 1, 8)).shape
    torch.Size([5, 1, 8])
    """

    is_traced_through = True

    def __init__(self, encoder_layer: Any, num_layers: int, norm: Any = None, **kwargs: Any) -> None:
        kwargs["enable_nested_tensor"] = False  # only torch's fused kernel knows these
        super().__init__(encoder_layer, num_layers, norm, **kwargs)

    def forward(
        self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Any:
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` of plain layers."""

    is_traced_through = True

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Any:
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(nn.Transformer):
    """`torch.nn.Transformer` of plain layers."""

    is_traced_through = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain_transformers(self)

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Any:
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)


_PLAIN: dict[type, type] = {
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
    nn.Transformer: Transformer,
}


def torch_class(module: nn.Module) -> type:
    """The class under which a configuration may name a module: torch's for what stands in place of torch's."""
    return next((ours for ours, plain in _PLAIN.items() if type(module) is plain), type(module))


def hides_operators(model: nn.Module) -> bool:
    """Does a model have transformer modules of torch's, which run as one?

    >>> hides_operators(nn.TransformerEncoderLayer(8, 2)), hides_operators(TransformerEncoderLayer(8, 2))
    (True, False)
    """
    return any(type(module) in _PLAIN for module in model.modules())


def plain_transformers(model: nn.Module) -> nn.Module:
    """Put the plain forms in place of torch's transformer modules, in the model itself; parameters stay where they are.

    >>> type(plain_transformers(nn.TransformerEncoderLayer(8, 2))).__module__
    'horizon_plugin_pytorch.nn.transformer'
    """
    for module in list(model.modules()):
        plain = _PLAIN.get(type(module))
        if plain is not None:
            module.__class__ = plain  # a module that the user holds on to, or shares, stays the same object
            if isinstance(module, _Layer):
                module.add_parts()
    return model
