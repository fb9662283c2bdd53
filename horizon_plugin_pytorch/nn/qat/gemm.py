"""Shared by QAT convolutions and linear layers: rounded weights, a fused add and activation, a rounded output."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize, is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.qconfig import asked_input, spell
from horizon_plugin_pytorch.nn import intrinsic
from horizon_plugin_pytorch.nn.intrinsic import FORMS, Form, check_rank, derive
from horizon_plugin_pytorch.nn.qat.module import QATModule, real, relu_limits
from horizon_plugin_pytorch.nn.qat.quick_twin import QuickTwin
from horizon_plugin_pytorch.operators.arguments import arguments_by_name
from horizon_plugin_pytorch.operators.support import Marches
from horizon_plugin_pytorch.operators.table import (
    Binder,
    Call,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    depends_on_graph,
    register,
    row_of_module,
)
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.hooks import is_any_everywhere
from horizon_plugin_pytorch.runtime.located import QUICK
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.runtime.real_tensor import unmarked
from horizon_plugin_pytorch.runtime.stochastic import is_draw
from horizon_plugin_pytorch.untraced import is_recorded


class QATGemm(intrinsic.CalledByAdd, QATModule):
    """A layer with weights, mixed into the torch layer of the same kind."""

    float_class: ClassVar[Any]
    form: ClassVar[Form] = Form()
    limits: ClassVar[tuple[float, float]] = NO_LIMITS
    weight_axis: ClassVar[int] = 0
    takes_weight: ClassVar[bool] = True  # at a call, from a model that computes it
    takes_dynamic: ClassVar[bool] = False  # may its input be quantized while the model runs?
    input_rank: int | None = None
    weight: Tensor
    bias: Tensor | None

    def __init__(self, *args: Any, qconfig: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(qconfig)

    def attach(self, qconfig: Any) -> None:
        """Make the fake quantizers that a qconfig asks for."""
        if qconfig is None or qconfig.weight is None:
            raise QuantizationConfigError(
                f"`{type(self).__name__}` {self.place} needs a qconfig with weight quantization; use one of "
                "`horizon_plugin_pytorch.quantization.qconfig`, or qconfig=None to leave the layer float."
            )
        self.qconfig = qconfig
        self.attach_weight(qconfig.weight)
        activation = None if qconfig.activation is None else qconfig.activation(channel_len=1).to(self.weight.device)
        self.register_module("activation_post_process", activation)  # printed also where it is None, as in the guides
        self.attach_input(asked_input(qconfig, 0))
        self._seen: tuple = ()
        self._computed_weight: Tensor | None = None

    def attach_weight(self, make: Any) -> None:
        """Make the weight's fake quantizer."""
        channels = self.weight.shape[self.weight_axis]
        quantizer = make(channel_len=channels)
        if self.weight_axis and quantizer.ch_axis == 0:  # transposed: output channels are axis 1
            quantizer = make.with_args(ch_axis=self.weight_axis)(channel_len=channels)
        if quantizer.ch_axis not in (-1, self.weight_axis):
            raise QuantizationConfigError(
                f"`{type(self).__name__}` {self.place}: weights have one scale for each output channel, ch_axis="
                f"{self.weight_axis}; the qconfig says ch_axis={quantizer.ch_axis}."
            )
        self.weight_fake_quant: FakeQuantize = quantizer.to(self.weight.device)

    def attach_input(self, make: Any) -> None:
        """Make the input's fake quantizer, where that is computed while the model runs."""
        if not is_dynamic(make):
            return
        quantizer = make()
        if not self.takes_dynamic or quantizer.dim != -1 or isinstance(self.weight_fake_quant, FakeCast):
            raise QuantizationConfigError(
                f"`{type(self).__name__}` {self.place} cannot have this input: {spell(make)}. Dynamic quantization is "
                "for linear layers with integer weights, along their input features, dim=-1: the products that are "
                "summed must have one scale."
            )
        self.input_fake_quant = quantizer
        self.takes_real = True

    @property
    def dynamic(self) -> DynamicFakeQuantize | None:
        """What quantizes its input while the model runs."""
        return self._modules.get("input_fake_quant")  # type: ignore[return-value]

    @property
    def is_exact(self) -> bool:
        return super().is_exact and (self.dynamic is None or self.dynamic.is_quantizing)

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a float layer, or of a fused float module; parameters are shared with it."""
        source = getattr(mod, "conv", None) or getattr(mod, "linear", None) or mod
        parameters = inspect.signature(cls.float_class.__init__).parameters
        names = [n for n in parameters if n not in ("self", "device", "dtype")]
        arguments = {n: getattr(source, n) for n in names if n != "bias"}
        arguments["bias"] = source.bias is not None
        with torch.device("meta"):
            self = cls.__new__(cls)
            QATModule.__init__(self, **arguments)
        for name in ("weight", "bias"):
            share_tensor(self, name, getattr(source, name))
        self.input_rank = getattr(source, "input_rank", None)
        self.path = getattr(mod, "path", "")
        self.called_as(mod)
        self.attach(getattr(mod, "qconfig", None))
        return self

    def reset_parameters(self) -> None:
        """Draw new weights, as torch's layer does."""
        if not self._parameters["weight"].is_meta:  # type: ignore[union-attr] # `from_float` puts others in their place
            super().reset_parameters()  # type: ignore[misc]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The float layer with other weights."""
        raise NotImplementedError

    def deployed(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weight, bias and the weight's scales as the integer form has them."""
        return self.weight, self.bias, self.weight_fake_quant.sound_scale()

    def deployed_parameters(self) -> Iterable[tuple[str, Tensor]]:
        if not isinstance(self.weight_fake_quant, FakeQuantize):
            return super().deployed_parameters()
        weight, bias, _ = self.deployed()
        return [("weight", weight)] + ([] if bias is None else [("bias", bias)])

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Write the weight so that `deployed` gives this one."""
        self.weight.copy_(weight)
        self.forget_twin()

    @property
    def bias_place(self) -> tuple[nn.Module, str]:
        """The module that has what `move_bias` moves, and its name there."""
        return self, "bias"

    @property
    def moved_bias(self) -> Tensor | None:
        """What `move_bias` moves."""
        return self.bias

    @torch.no_grad()
    def move_bias(self, shift: Tensor) -> None:
        """Add to the bias that `deployed` gives; a layer without bias gets one."""
        if self.moved_bias is None:
            self.add_bias()
        assert self.moved_bias is not None
        self.moved_bias.add_(shift)
        self.forget_twin()

    def add_bias(self) -> None:
        """Give a layer without bias one, of zeros; it is frozen if the weight is."""
        groups = getattr(self, "groups", 1) if self.weight_axis else 1
        zeros = self.weight.new_zeros(self.weight.shape[self.weight_axis] * groups)
        owner, name = self.bias_place
        setattr(owner, name, nn.Parameter(zeros, self.weight.requires_grad))

    def observe_weight(self) -> None:
        """Update the weight's scale from the weight."""
        self.weight_fake_quant.observe(self.weight)

    def _make_twin(self) -> nn.Module:
        if not self.weight_fake_quant.has_statistics and self._computed_weight is None:
            self.observe_weight()  # weights are known without any data, and `convert` looks at them too
        return super()._make_twin()

    def layer(self, x: Tensor) -> Tensor:
        """The layer while training: real values, with rounded weights."""
        return self.product(x, self.rounded_weight(), self.bias)

    def rounded_weight(self) -> Tensor:
        """The weights that the training route computes with."""
        computed = self._computed_weight
        return self.weight_fake_quant.weight(self.weight if computed is None else computed)

    def inputs_seen(self) -> list[tuple]:
        """Scales, formats and ranges of the last inputs, for `convert` to plan with."""
        return [self._seen] if self._seen else []

    def forward(self, x: Any, residual: Any = None, weight: Tensor | None = None) -> Any:
        """Training route, or exact integers in the VALIDATION state.

        Args:
            weight: where the model computes the weight of its parameters (weight standardisation); conversion keeps
                the last one.
        """
        if weight is not None:
            return self._with_weight(weight, x, residual)
        check_rank(x, self.input_rank)
        if self.dynamic is None and isinstance(x, QTensor) and (residual is None or isinstance(residual, QTensor)):
            added = () if residual is None else (residual._scale, residual._format)
            self.__dict__["_seen"] = (x._scale, x._format, x.range, *added)
        if self.is_exact:
            if self._is_alone(x, residual):
                return self._exact_alone(x, residual)
            inputs = (x,) if residual is None else (x, residual)
            return self.exact(*inputs, trained=lambda: self._train(x, residual))
        return self._train(x, residual)

    def _is_alone(self, x: Any, residual: Any) -> bool:
        """Does nobody train, record or watch modules inside this one, so that its twin needs no call of its own?"""
        if torch.is_grad_enabled() or is_recorded() or is_any_everywhere():
            return False
        operands = (x,) if residual is None else (x, residual)
        return self.dynamic is None and all(isinstance(v, QTensor) and v._format != qbool for v in operands)

    def _exact_alone(self, x: QTensor, residual: QTensor | None) -> Any:
        """What `exact` gives then: the twin takes the tensors as they are here."""
        self.check_nan()
        twin: Any = self.twin()
        out = unmarked(twin.run(x, residual))
        self.__dict__[QUICK] = None  # it is one of the attributes that `Settings` counts
        self.__dict__[QUICK] = QuickTwin.of(self, twin)
        return out._as_training() if isinstance(out, QTensor) else out

    def _with_weight(self, weight: Tensor, x: Any, residual: Any) -> Any:
        if not torch.equal(self.weight, weight):  # a write makes the integer form anew
            with torch.no_grad():
                self.weight.copy_(weight)
        self._computed_weight = weight
        try:
            return self.forward(x, residual)
        finally:
            self._computed_weight = None

    def _train(self, x: Any, residual: Any) -> Any:
        dynamic = self.dynamic
        if dynamic is not None and not self.weight_fake_quant.is_quantizing:
            dynamic = None
        out = self.layer(real(x) if dynamic is None else dynamic(real(x)))
        if residual is not None:
            out = out.add_(real(residual)) if residual.shape == out.shape else out + real(residual)
        quantizer = self.activation_post_process
        if quantizer is not None:
            return quantizer(out, self.limits, owned=True)
        fake_quantize_base.check(self.path, None, out)
        return out if self.limits == NO_LIMITS else out.clamp(*self.limits)


def has_integer_weight(row: Operator) -> bool:
    """Is the operator a layer, whose weights can be integers while its result is float16?"""
    return row.qat is not None and issubclass(row.qat, QATGemm)


def is_half(row: Operator, qconfig: Any) -> bool:
    """True if the operator is computed in float16.

    A layer with integer weights sums integers, and only its result is cast.
    """
    if not is_cast(qconfig.activation):
        return False
    return not has_integer_weight(row) or qconfig.weight is None or is_cast(qconfig.weight)


def share_tensor(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Let a module use another's parameter; one that is a buffer there is a buffer here."""
    if value is None or isinstance(value, nn.Parameter):
        setattr(module, name, value)
    else:
        delattr(module, name)
        module.register_buffer(name, value)


def qat_forms(base: Any, quantized: ModuleType, module: str, forms: Sequence[Form] = FORMS) -> list[type[QATGemm]]:
    """The fused forms of a QAT layer; `quantized` has their integer classes, under the names without BN."""
    layer = base.float_class
    return derive(
        base,
        layer,
        forms,
        module,
        lambda form: {
            "limits": relu_limits(form.relu is not None, form.relu is nn.ReLU6),
            "quantized_class": getattr(quantized, form.without_bn.name_of(layer)),
        },
    )


def register_layers(
    name: str,
    layer: type[QATGemm],
    fused: Sequence[type[QATGemm]],
    marches: Marches,
    functions: dict[Any, Binder],
    traits: Trait = Trait.NONE,
) -> None:
    """Rows for a layer and its fused forms, whose float classes in `intrinsic` have the same names."""
    row = Operator(
        name, ScaleRule.OWN, layer, layer.quantized_class, (layer.float_class,), functions, marches=marches,
        has_real_output=True, traits=traits,
    )  # fmt: skip
    register(row)
    register_fused(layer, fused)


def register_fused(layer: type[QATGemm], fused: Sequence[type[QATGemm]]) -> None:
    """Rows for forms of a layer that has one, whose float classes in `intrinsic` have the same names."""
    row = row_of_module(layer.float_class)
    assert row is not None
    for cls in fused:
        float_class = intrinsic.FUSED_CLASSES[cls.__name__]
        register(
            replace(
                row, name=cls.__name__, qat=cls, quantized=cls.quantized_class, modules=(float_class,), functions={}
            )
        )


CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
CONV_TRANSPOSE = "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"


def layer_function(float_class: type, signature: str) -> Binder:
    """A binder for the functional form of a layer.

    Its weight is a parameter or buffer of the model, or is computed of these at every call.
    """
    by_name = arguments_by_name(signature)

    def bind(*args: Any, **kwargs: Any) -> Call:
        values = by_name(*args, **kwargs)
        x = values.pop("input")
        return Call(make, (x,), settings=values)

    def make(weight: Any, bias: Any = None, **values: Any) -> nn.Module:
        is_computed = _is_computed(weight)
        weight = _computed_weight(weight) if is_computed else tensor_of(weight, "weight")
        bias = None if bias is None else tensor_of(bias, "bias")
        if any(depends_on_graph(value) for value in values.values()):
            raise NotBindable(f"{', '.join(values)} must be numbers, not computed from a tensor's shape or value")
        sizes = _channels(float_class, weight, values.get("groups", 1))
        with torch.device("meta"):
            layer = float_class(*sizes, bias=bias is not None, **values)
        share_tensor(layer, "weight", weight)
        share_tensor(layer, "bias", bias)
        layer.__dict__["is_weight_computed"] = is_computed
        return layer

    return bind


def _is_computed(node: Any) -> bool:
    """Does a recorded model compute a tensor of its parameters and buffers, or make it, with no input and no chance?"""
    if not isinstance(node, fx.Node) or notes(node).shape is None or is_draw(node):
        return False
    if node.op == "get_attr":  # not an attribute: of numpy, of a list, or of a constructor that torch does not report
        return _attribute(node) is None and not isinstance(notes(node).value, nn.Parameter)
    is_call = node.op in ("call_function", "call_method")
    return is_call and all(source.op == "get_attr" or _is_computed(source) for source in node.all_input_nodes)


def _attribute(node: Any) -> Any:
    """What a node reads of the model; None if that has no such attribute."""
    value: Any = node.graph.owning_module if isinstance(node, fx.Node) and node.op == "get_attr" else None
    for part in str(node.target).split(".") if value is not None else ():
        value = getattr(value, part, None)
    return value


def _computed_weight(node: fx.Node) -> Tensor:
    """A place for a weight that the model computes."""
    notes(node).is_weight = True
    shape = notes(node).shape
    assert shape is not None  # of a recorded graph
    return torch.zeros(shape, device=notes(node).device)


def _channels(float_class: type, weight: Tensor, groups: int) -> tuple:
    if float_class is nn.Linear:
        if weight.dim() != 2:
            raise NotBindable("its weight has one axis and a layer's has two: use weight.unsqueeze(0) when making it")
        return weight.shape[1], weight.shape[0]
    first, second, *kernel = weight.shape
    is_transposed = issubclass(float_class, nn.modules.conv._ConvTransposeNd)
    return (first, second * groups, kernel) if is_transposed else (second * groups, first, kernel)


def tensor_of(node: Any, name: str) -> Tensor:
    """The parameter or buffer that a node reads."""
    value = _attribute(node)
    if value is None and isinstance(node, fx.Node) and isinstance(notes(node).value, nn.Parameter):
        raise NotBindable(
            f"its {name} belongs to a module that is not registered, as one in a plain list, dictionary or object: "
            "keep modules as attributes of their module, in nn.ModuleList or nn.ModuleDict, and parameters in "
            "nn.ParameterList"
        )
    if value is None:
        otherwise = "use operators whose operands are both quantized (matmul, mul)"
        if name == "bias":  # it is int32 at the scale of the products, so that conversion has to know it
            otherwise = "add it to the layer's result, as in `F.conv2d(x, weight) + bias.view(1, -1, 1, 1)`"
        raise NotBindable(
            f"its {name} is computed or made in the forward, and a layer's must be a parameter or a buffer of the "
            f"model: keep it as one (`self.register_buffer`), or {otherwise}"
        )
    return value
