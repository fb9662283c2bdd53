"""QuantStub and DeQuantStub while training."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import QuantizationConfigError, at
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.nn import stubs
from horizon_plugin_pytorch.nn.qat.module import QATModule, attach_gradient, real
from horizon_plugin_pytorch.nn.quantized.quantize import DeQuantize, Quantize
from horizon_plugin_pytorch.operators.support import INTS, WIDE, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, register
from horizon_plugin_pytorch.qtensor import QTensor, exact_qtensor, taken
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.runtime.stub_input import refuse_export, require_tensor
from horizon_plugin_pytorch.statistics.clipping import CLIPPED_INPUT
from horizon_plugin_pytorch.statistics.observer_v2 import FixedScaleObserver


def called(stub: QATModule) -> str:
    """A stub with the line that calls it, for messages."""
    is_traced = bool(stub.line) and interceptor() is None
    return f"`{type(stub).__name__}` {stub.place if is_traced else at(stub.path) + calling_line()}"


class QuantStub(QATModule):
    """Rounds a float input to the grid of its scale."""

    quantized_class = Quantize
    requantizes: bool = False
    clipped_from: ClassVar[float] = CLIPPED_INPUT

    def __init__(self, scale: float | None = None, zero_point: Any = None, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig is None or qconfig.activation is None:
            raise QuantizationConfigError(
                f"QuantStub {self.place} needs a qconfig with activation quantization; a high-precision output "
                "qconfig does not fit an input."
            )
        self.qconfig = qconfig
        activation = qconfig.activation
        if scale is not None:
            activation = activation.with_observer(FixedScaleObserver, scale=scale)
        self.activation_post_process = activation(channel_len=1)

    @classmethod
    def from_float(cls, mod: nn.Module) -> QuantStub:
        """The QAT form of a stub, ours or torch's."""
        if getattr(mod, "is_after_cpu", False):
            cls = _WrappedCalibFakeQuantize
        self = cls(getattr(mod, "scale", None), None, getattr(mod, "qconfig", None))
        self.requantizes = getattr(mod, "requantizes", False)
        observer = getattr(self.activation_post_process, "activation_post_process", None)
        if observer is not None:
            observer.may_be_constant = getattr(mod, "may_be_constant", False)
            observer.may_be_mask = getattr(mod, "may_be_mask", False)
        return self

    def forward(self, x: Any) -> Any:
        refuse_export(self.place)
        quantizer = self.activation_post_process
        assert quantizer is not None
        if self.notes is not None:
            self.notes.watch(self, quantizer)
        if isinstance(x, QTensor):
            if not self.requantizes:
                return x
            if self.is_exact:
                return self.exact(x, trained=lambda: quantizer(real(x)))
            return quantizer(real(x))
        require_tensor(x, self.place)
        # A mask that is all False now need not be so in the next batch.
        is_mask = x.dtype == torch.bool and x.numel() > 0 and isinstance(quantizer, FakeQuantize)
        seen = torch.tensor((0.0, 1.0), dtype=torch.float32, device=x.device) if is_mask else None
        return taken(self._quantized(x.float(), quantizer, seen), x, called(self))

    def _quantized(self, x: Tensor, quantizer: FakeQuantize, seen: Tensor | None) -> QTensor:
        if not quantizer.is_exact:
            return quantizer(x) if seen is None else quantizer(x, seen=seen)
        quantizer.check_nan(x)
        with torch.no_grad():
            integers = self.twin()(x)
        out = exact_qtensor(integers, quantizer.current_scale())
        if torch.is_grad_enabled() and x.requires_grad:
            return out.like(attach_gradient(quantizer(x), out.plain()), integers.plain())
        return out


class _WrappedCalibFakeQuantize(QuantStub):
    """The stub that a hybrid model has after an operator of the CPU, by the name that the guide prints."""

    takes_copy: bool = False  # does the model write to the tensor afterwards?

    def forward(self, x: Any) -> Any:
        is_trained = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        return super().forward(x.clone() if self.takes_copy and is_trained else x)


class DeQuantStub(QATModule):
    """Gives back ordinary tensors."""

    quantized_class = DeQuantize
    is_before_cpu: bool = False

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.activation_post_process = None

    @classmethod
    def from_float(cls, mod: nn.Module) -> DeQuantStub:
        """The QAT form of a stub, ours or torch's."""
        self = cls()  # whatever qconfig surrounds it, it has no quantization parameters
        self.is_before_cpu = getattr(mod, "is_before_cpu", False)
        return self

    def forward(self, x: Any) -> Any:
        by = called(self)

        def one(x: Any) -> Any:
            if self.is_before_cpu and isinstance(x, QTensor) and x.dtype == qbool:
                return x.shared(by)
            return x.lent(by) if isinstance(x, QTensor) and not x.is_integer else real(x)

        return pytree.tree_map(one, x)  # also tuples, lists and dictionaries of tensors


_QUANT, _DEQUANT = Support(("float32", *INTS), INTS), Support(WIDE, ("float32",))
register(Operator(
    "quant", ScaleRule.OWN, QuantStub, Quantize, (stubs.QuantStub,), marches=on(bernoulli2=_QUANT, bayes=_QUANT),
    traits=Trait.QUANT,
))  # fmt: skip
register(Operator(
    "dequant", ScaleRule.NONE, DeQuantStub, DeQuantize, (stubs.DeQuantStub,),
    marches=on(bernoulli2=_DEQUANT, bayes=_DEQUANT), traits=Trait.DEQUANT | Trait.UNREAD,
))  # fmt: skip
