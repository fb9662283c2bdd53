"""What stands around a model that knows nothing of quantization: a QuantStub before it, a DeQuantStub after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

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
