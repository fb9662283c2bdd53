"""What every QAT module has in common: it can run on exact integers, through its quantized twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.stack import is_torch_quantizing
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import CalibrationWarning, ConversionError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.nn.qat.notes import ModelNotes
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule, require_float32
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor, exact_qtensor
from horizon_plugin_pytorch.running import asked_in_forward
from horizon_plugin_pytorch.runtime.hooks import forward_of
from horizon_plugin_pytorch.runtime.located import QUICK, PlacedModule
from horizon_plugin_pytorch.runtime.real_tensor import RealOutput, unmarked
from horizon_plugin_pytorch.statistics.cache import Cache, plain_attributes
from horizon_plugin_pytorch.untraced import is_traced, untraced


class _Exact(torch.autograd.Function):
    """The exact value forward, the training route's gradient backward."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return grad, None


def attach_gradient(trained: Tensor, exact: Tensor) -> Tensor:
    """The value of `exact` with the gradient of `trained`."""
    return _Exact.apply(trained.as_subclass(Tensor), exact)


class QATModule(PlacedModule):
    """Base of QAT modules.

    A subclass has a training route in `forward`, and a `quantized_class` whose `from_qat` takes this module. In the
    VALIDATION state `forward` runs that class on integers, so training and deployment cannot disagree.
    """

    quantized_class: ClassVar[Any]
    takes_real: bool = False  # may inputs be real numbers, such as coordinates?
    is_hybrid: bool = False  # in eager mode, beside float modules: it trains on what they give, without a QuantStub too
    read_tensors: tuple[str, ...] = ()  # its parameters and buffers that the user's forward reads; they stay float too
    is_optional: bool = False  # a part that its owner's calls may never use: nobody misses its statistics
    activation_post_process: FakeQuantize | None
    notes: ModelNotes | None = None  # of the model that it is in

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._twin = Cache(is_exact=True)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # Without a graph nobody knows that a forward reads ``self.query_embed.weight``, until it does.
        is_new = isinstance(value, Tensor) and name not in self.read_tensors
        if is_new and asked_in_forward():
            self.read_tensors = (*self.read_tensors, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig" and "written_as" in self.__dict__ and value is not self.__dict__.get("qconfig"):
            warn(
                f"the qconfig of `{type(self).__name__}` {self.place} is set after the model was prepared, and nobody "
                "reads it any more. Set it on the float model, and prepare that again.",
                QuantizationWarning,
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "qconfig" and is_torch_quantizing():  # the only thing that it does to modules it does not know
            raise ConversionError(
                "torch's own `convert` does not know the modules of this package, and would give back a model that is "
                "not converted. Call `convert` of `horizon_plugin_pytorch.quantization`, or `convert_fx`."
            )
        super().__delattr__(name)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls instead of `forward` while `torch.jit.trace` looks: the file has no gradients of ours."""
        with torch.no_grad():
            return super()._slow_forward(*args, **kwargs)

    def forget_twin(self) -> None:
        """Drop the cached integer form; it is made anew when needed."""
        self._twin.clear()
        self.__dict__.pop(QUICK, None)

    def train(self, mode: bool = True) -> Any:
        self.forget_twin()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        require_float32(fn, f"`{type(self).__name__}` {self.place}")
        return super()._apply(fn, recurse)

    def fake_quantizers(self) -> list[FakeQuantize]:
        """The module's own fake quantizers: weight and activation."""
        return [m for m in self._modules.values() if isinstance(m, FakeQuantize)]

    @property
    def is_exact(self) -> bool:
        """Is the module in the VALIDATION state?"""
        quantizers = self.fake_quantizers()
        for quantizer in quantizers:
            if not quantizer.is_exact:
                return False
        return bool(quantizers)

    def check_nan(self) -> None:
        """Raise where a scale or a parameter is NaN, if `fake_quantize_base.check_nan_scale` asks for it."""
        if fake_quantize_base.check_nan_scale is None:
            return
        for quantizer in self.fake_quantizers():
            quantizer.check_nan()
        for name, parameter in self.named_parameters(recurse=False):
            fake_quantize_base.check(f"{self.path} ({name})", None, parameter)

    @untraced
    def twin(self) -> nn.Module:
        """The quantized module for the current weights and scales."""
        return self._twin.get(tuple(self.twin_sources()), self._make_twin, self.twin_facts())

    def known_twin(self) -> nn.Module | None:
        """The quantized module, if it was made for these weights and scales; its settings are not compared."""
        return self._twin.known(tuple(self.twin_sources()))

    def require_numbers(self) -> None:
        """Refuse scales and parameters that integers cannot have.

        Raises:
            CalibrationError: a scale is not positive, or a number is NaN or infinite.
        """
        for quantizer in self.fake_quantizers():
            quantizer.require_scale()
        for name, values in self.deployed_parameters():
            fake_quantize_base.require_finite(f"{self.path} ({name})" if self.path else name, values)

    def deployed_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Names and values of the numbers that the integer form is made of."""
        return self.named_parameters(recurse=False)

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that a float module has a quantized form with its settings.

        Raises:
            UnsupportedOperatorError: names the module, the setting and a remedy.
        """

    def require_settings(self) -> None:
        """Refuse settings that integers cannot have; they may have been set after the model was prepared."""

    def _make_twin(self) -> nn.Module:
        self._tell_unseen()
        self.require_numbers()
        self.require_settings()
        twin = self.quantized_class.from_qat(self)
        twin.stub_paths = {}  # this module's inputs went through the stubs already
        if isinstance(twin, QuantizedModule):
            twin.seal()
        return twin

    def _tell_unseen(self) -> None:
        """Warn of a module that is run on integers and has a scale of nothing."""
        quantizer = self.activation_post_process
        if quantizer is None or quantizer.has_statistics or self.is_optional:
            return
        if self.notes is None:
            self.notes = ModelNotes()
        self.notes.say(
            "unseen",
            f"`{type(self).__name__}` {self.place} is run in the VALIDATION state and has never seen data: its scale "
            "is 1, and what it gives says nothing. Calibrate the model first (`calibrate`, or data in the CALIBRATION "
            "or QAT state), or load the checkpoint of a calibrated one. Other modules may be so too; `convert` names "
            "all.",
            CalibrationWarning,
        )

    def twin_sources(self) -> list[Tensor]:
        """The tensors that the quantized module is made of: it is made anew when one of them changes."""
        own: list[Tensor] = [t for t in self._parameters.values() if t is not None]
        own += [t for t in self._buffers.values() if t is not None]
        for part in self.float_parts():
            own += [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
        return own + [q._scale for q in self.fake_quantizers()]

    def float_parts(self) -> list[nn.Module]:
        """The modules in it that quantize nothing, such as a batch norm, or what computes a weight (`parametrize`)."""
        children = [m for m in self._modules.values() if not (m is None or isinstance(m, (FakeQuantize, QATModule)))]
        return [part for child in children for part in child.modules()]

    def twin_facts(self) -> tuple:
        """What else the quantized module is made of: settings, formats, and which children they are of."""
        facts: list[Any] = [plain_attributes(self)]
        for child in self._modules.values():
            facts.append(child)
            if isinstance(child, FakeQuantize):
                facts.append(child.format)
        for part in self.float_parts():
            facts += [part, plain_attributes(part), *forward_of(part)]
        return tuple(facts)

    def exact(
        self, *inputs: Any, call: Callable[..., Any] | None = None, trained: Callable[[], Tensor] | None = None
    ) -> Any:
        """Run the quantized twin on the integers of the inputs; real values come back, with their integers attached.

        Args:
            inputs: QTensors, lists of them, or plain arguments.
            call: what to call instead of the twin itself, given the twin.
            trained: the training route, evaluated only if a gradient is wanted.
        """
        self.check_nan()
        with torch.no_grad():
            twin = self.twin()
            integers = [_as_integers(x, self.place, self.takes_real) for x in inputs]
            out = unmarked(twin(*integers) if call is None else call(twin, *integers))
        routes = trained() if trained is not None and torch.is_grad_enabled() and not is_traced() else None
        if not isinstance(out, tuple):
            return self._with_gradient(out, routes)
        return tuple(self._with_gradient(o, None if routes is None else routes[i]) for i, o in enumerate(out))

    def _with_gradient(self, out: Any, route: Any) -> Any:
        """A result of the twin as the training stage sees it: real values, their integers, and a gradient."""
        if not isinstance(route, Tensor) or not route.requires_grad:
            route = None
        if not isinstance(out, QTensor):
            is_real = isinstance(out, Tensor) and out.is_floating_point()
            return attach_gradient(route, out) if is_real and route is not None else out
        if out.dtype == qbool:
            return bool_qtensor(out.plain(), is_integer=False)
        quantizer = self.activation_post_process
        result = exact_qtensor(out, out.scale if quantizer is None else quantizer.current_scale())
        return result if route is None else result.like(attach_gradient(route, result.plain()), out.plain())


class RoundedModule(QATModule):
    """A module whose output is rounded to a scale of its own.

    Mixed into a float module it takes its `forward` as the function; a subclass may give another in `value`. Inputs
    are tensors (QTensors, or plain ones such as positions) and plain arguments.
    """

    def real_value(self, *args: Any, **kwargs: Any) -> Tensor:
        """The float function, on real values."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Training route, or exact integers in the VALIDATION state."""
        if self.is_exact:
            return self.exact(
                *args,
                call=lambda twin, *integers: twin(*integers, **kwargs),
                trained=lambda: self._train(*args, **kwargs),
            )
        return self._train(*args, **kwargs)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        assert self.activation_post_process is not None
        return self.activation_post_process(self.real_value(*map(real, args), **kwargs))


class CopiedModule(RoundedModule):
    """A rounded module mixed into a float module, of which it takes over the constructor's arguments."""

    copied: tuple[str, ...]  # names of the arguments, and of the attributes that hold them

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of the float module."""
        self = cls(**{name: getattr(mod, name) for name in cls.copied})
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self


class GridModule(QATModule):
    """A module whose output is rounded to the grid of its first input: it has no quantization parameters of its own.

    Mixed into a float module it takes its `forward` as the function; a subclass may give another in `value`. Its
    quantized class computes on integers and keeps the scale. Other inputs may be QTensors or plain arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.qconfig = None
        self.activation_post_process = None

    def real_value(self, *args: Any, **kwargs: Any) -> Tensor:
        """The float function, on real values."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Training route, or exact integers where the input's are known."""
        if not isinstance(x, QTensor):
            return self.real_value(x, *map(real, args), **kwargs)
        if x.grid is None:
            return x.like(self._train(x, *args, **kwargs))
        return self.exact(
            x,
            *args,
            call=lambda twin, *integers: twin(*integers, **kwargs),
            trained=lambda: self._train(x, *args, **kwargs),
        )

    def _train(self, x: QTensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.real_value(x.plain(), *map(real, args), **kwargs)
        if not x.is_rounded:
            return out
        return round_to_grid(out, x.scale, -1, x.dtype.min, x.dtype.max, saturate=False)


def _as_integers(x: Any, place: str, takes_real: bool) -> Any:
    if isinstance(x, QTensor):
        return x.as_integers()
    if isinstance(x, (list, tuple)):
        return type(x)(_as_integers(v, place, takes_real) for v in x)
    if isinstance(x, Tensor) and x.is_floating_point() and not takes_real:
        raise ConversionError(
            f"the quantized operator {place} got a float tensor of shape {tuple(x.shape)}, which has no scale. Put "
            "a QuantStub where this tensor enters the quantized part of the model, and calibrate again."
        )
    return x


def real(x: Any) -> Any:
    """Real values of a QTensor, also inside a list or tuple; anything else as it is."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(real, x))
    if isinstance(x, QTensor):
        return x.as_real()
    return x.dequantize() if isinstance(x, RealOutput) else x


def relu_limits(has_relu: bool, is_relu6: bool) -> tuple[float, float]:
    """The real limits of a fused activation."""
    return (0.0 if has_relu else -math.inf, 6.0 if is_relu6 else math.inf)
