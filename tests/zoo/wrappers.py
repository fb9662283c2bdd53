"""What stands around a model that knows nothing of quantization: a QuantStub before it, a DeQuantStub after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


class Wrapped(nn.Module):
    """Stubs around a model.

    Args:
        model: takes the quantized tensor as keyword `name`, or as its first argument.
        outputs: fields of the result that are handed out; all by default.
        constants: further keyword arguments, which stay as they are.
    """

    def __init__(self, model: nn.Module, name: str = "", outputs: tuple[str, ...] = (), **constants: Any) -> None:
        super().__init__()
        self.model, self.name, self.outputs, self.constants = model, name, outputs, constants
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        out = self.model(**{self.name: x}, **self.constants) if self.name else self.model(x, **self.constants)
        if self.outputs:
            out = [getattr(out, field) for field in self.outputs]
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, (Tensor, fx.Proxy))]
        return [self.dequant(x) if isinstance(x, fx.Proxy) or x.is_floating_point() else x for x in tensors]


class Tokens(nn.Module):
    """Stubs around a language model; the table of embeddings is looked up in float."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...] = (), **constants: Any) -> None:
        super().__init__()
        self.wrapped = Wrapped(model, "inputs_embeds", outputs, **constants)

    def forward(self, ids: Tensor) -> Any:
        return self.wrapped(self.wrapped.model.get_input_embeddings()(ids))


class Decoder(nn.Module):
    """A decoder on quantized embeddings and the quantized result of an encoder."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.quant, self.quant_memory, self.dequant = QuantStub(), QuantStub(), DeQuantStub()

    def forward(self, ids: Tensor, memory: Tensor) -> list[Tensor]:
        x = self.quant(self.decoder.get_input_embeddings()(ids))
        out = self.decoder(inputs_embeds=x, encoder_hidden_states=self.quant_memory(memory), use_cache=False)
        return [self.dequant(out.last_hidden_state)]


class Cached(nn.Module):
    """One step of a language model: keys and values of earlier steps come in, those of this step as well go out."""

    def __init__(self, model: Any, layers: int = 2) -> None:
        super().__init__()
        self.model = model
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stubs = nn.ModuleList(QuantStub() for _ in range(2 * layers))
        self.layers = layers

    def forward(self, ids: Tensor, *past: Tensor) -> list[Tensor]:
        cache = DynamicCache()
        known = [stub(x) for stub, x in zip(self.stubs, past, strict=True)]
        for layer in range(self.layers):
            cache.update(known[2 * layer], known[2 * layer + 1], layer)
        x = self.quant(self.model.get_input_embeddings()(ids))
        out = self.model(inputs_embeds=x, past_key_values=cache, use_cache=True)
        layers = out.past_key_values.layers
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return [self.dequant(x) for x in (out.last_hidden_state, *tensors)]
