"""Recurrent modules while training: linear layers, tables, products and sums, unrolled over time.

A layer in one direction is a step with one set of parameters and one scale for each of its parts, whatever the time.
While observing, the values of all times count as one batch: a sequence is run once to see them, then again with the
scales that follow from them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import ConversionError, UnsupportedOperatorError, at
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.qconfig import QConfig
from horizon_plugin_pytorch.fake_quant.states import keep_ranges, observe_together
from horizon_plugin_pytorch.nn import recurrent as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite, inner_qconfig, on_both, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.module import QATModule, attach_gradient
from horizon_plugin_pytorch.nn.qat.packed_linear import PackedLinear, PackedLinearAdd
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.operators.support import Limit, Support, on
from horizon_plugin_pytorch.operators.table import Kind, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor, exact_qtensor, integer_qtensor, real_qtensor
from horizon_plugin_pytorch.runtime.replayed_steps import replay_steps
from horizon_plugin_pytorch.runtime.steps import take_steps
from horizon_plugin_pytorch.statistics.observer_v2 import ObserverBase

_UNIT = 1 / 32767.5  # sigmoid and tanh lie in [-1, 1]


def _on_grid_of(part: Any, x: Any) -> QTensor:
    """A state as the part gives it: real numbers are put on its grid; integers keep their own scale."""
    if isinstance(x, QTensor):
        return x
    if not isinstance(part, QATModule):
        return part.output(fp.quantize(x, part.scale, -1, part.low, part.high))
    quantizer = part.activation_post_process
    assert quantizer is not None
    scale, dtype = quantizer.current_scale(), quantizer.dtype
    if not quantizer.is_exact:
        quantizer.gather(x)
        value = quantizer.round(x) if quantizer.is_quantizing else x
        return real_qtensor(value, scale, dtype, is_rounded=quantizer.is_quantizing)
    grid = fp.quantize(x.detach(), scale, -1, quantizer.quant_min, quantizer.quant_max)
    out = exact_qtensor(integer_qtensor(grid, scale, dtype), scale)
    has_gradient = torch.is_grad_enabled() and x.requires_grad
    return out.like(attach_gradient(quantizer.round(x), out.plain()), grid) if has_gradient else out


class _Step(nn.Module):
    """One step in time. `ih` is the layer of the input, `hh` that of the last output, plus the former's result.

    Args:
        owner: the module that has torch's parameters.
        suffix: what ends their names: ``_l0`` and the like, nothing in a cell.
    """

    hh_class: ClassVar[type[PackedLinear]] = PackedLinearAdd
    ih: Any
    hh: Any

    def __init__(self, owner: nn.Module, suffix: str, qconfig: Any) -> None:
        super().__init__()
        self.inner = inner_qconfig(qconfig)
        gates = QConfig(activation=self.inner.activation, weight=qconfig.weight)
        self.ih = PackedLinear(owner, f"weight_ih{suffix}", f"bias_ih{suffix}", None, gates)
        self.hh = self.hh_class(owner, f"weight_hh{suffix}", f"bias_hh{suffix}", None, gates)
        self.hidden_size = self.hh.in_features
        self.add_parts(owner, qconfig)
        del self.inner

    def add_parts(self, owner: Any, qconfig: Any) -> None:
        raise NotImplementedError

    def table(self, function: Any) -> SegmentLUT:
        """A function whose values lie in [-1, 1], in int16."""
        name = function.__name__
        return SegmentLUT(function, name, QConfig(inner_qconfig(self.inner, _UNIT).activation))

    def start(self, states: tuple) -> tuple:
        """The state before the first step, from what the user gives or from zeros."""
        raise NotImplementedError


class LSTMStep(_Step):
    """Parts: `ih`, `hh`, `sigmoid`, `tanh`, `forget_mul`, `input_mul`, `cell_add`, `cell_tanh`, `hidden_mul`.

    The cell's state is int16; the output has the qconfig's format.
    """

    def add_parts(self, owner: Any, qconfig: Any) -> None:
        self.sigmoid, self.tanh, self.cell_tanh = (self.table(f) for f in (torch.sigmoid, torch.tanh, torch.tanh))
        self.forget_mul, self.input_mul, self.cell_add = (FloatFunctional(self.inner) for _ in range(3))
        self.hidden_mul = FloatFunctional(qconfig)

    def start(self, states: tuple) -> tuple:
        return _on_grid_of(self.hidden_mul, states[0]), _on_grid_of(self.cell_add, states[1])

    def forward(self, gates: Any, state: tuple) -> tuple:
        hidden, cell = state
        gates = self.hh(hidden, gates)
        new = self.tanh(gates.narrow(-1, 2 * self.hidden_size, self.hidden_size))
        take, forget, _, show = self.sigmoid(gates).chunk(4, -1)
        cell = self.cell_add.add(self.forget_mul.mul(forget, cell), self.input_mul.mul(take, new))
        return self.hidden_mul.mul(show, self.cell_tanh(cell)), cell


class GRUStep(_Step):
    """Parts: `ih`, `hh`, `gate_add`, `sigmoid`, `reset_mul`, `new_add`, `tanh`, `hidden_sub`, `hidden_mul`,
    `hidden_add`, `output`.

    ``h' = n + z * (h - n)``. The state is int16; `output` brings it to the qconfig's format, in which it leaves and
    enters `hh`. In int16, and in a cell, whose user keeps the state, the sum itself has the qconfig's format.
    """  # fmt: skip

    hh_class = PackedLinear

    def add_parts(self, owner: Any, qconfig: Any) -> None:
        self.sigmoid, self.tanh = self.table(torch.sigmoid), self.table(torch.tanh)
        self.gate_add, self.reset_mul, self.new_add, self.hidden_sub, self.hidden_mul = (
            FloatFunctional(self.inner) for _ in range(5)
        )
        is_wide = not isinstance(owner, RecurrentCell) and qconfig.activation().dtype.bits < 16
        self.hidden_add = FloatFunctional(self.inner if is_wide else qconfig)
        self.output = FloatFunctional(qconfig) if is_wide else None

    def start(self, states: tuple) -> tuple:
        state = _on_grid_of(self.hidden_add, states[0])
        return (state if self.output is None else _on_grid_of(self.output, states[0])), state

    def forward(self, gates: Any, state: tuple) -> tuple:
        shown, hidden = state
        size = self.hidden_size
        own = self.hh(shown)
        reset, keep = self.sigmoid(self.gate_add.add(gates.narrow(-1, 0, 2 * size), own.narrow(-1, 0, 2 * size))).chunk(
            2, -1
        )
        new = self.new_add.add(
            gates.narrow(-1, 2 * size, size), self.reset_mul.mul(reset, own.narrow(-1, 2 * size, size))
        )
        new = self.tanh(new)
        hidden = self.hidden_add.add(new, self.hidden_mul.mul(keep, self.hidden_sub.sub(hidden, new)))
        return (hidden if self.output is None else self.output.mul_scalar(hidden, 1.0)), hidden


class RNNStep(_Step):
    """Parts: `ih`, `hh`, `activation`."""

    def add_parts(self, owner: Any, qconfig: Any) -> None:
        function = torch.tanh if owner.nonlinearity == "tanh" else torch.relu
        self.activation = SegmentLUT(function, owner.nonlinearity, qconfig)

    def start(self, states: tuple) -> tuple:
        state = _on_grid_of(self.activation, states[0])
        return state, state

    def forward(self, gates: Any, state: tuple) -> tuple:
        hidden = self.activation(self.hh(state[0], gates))
        return hidden, hidden


class _Recurrent(Composite):
    """Parameters with torch's names, shared with the float module."""

    step_class: ClassVar[type[_Step]]
    has_cell: ClassVar[bool] = False  # is there a second state?
    qconfig: Any

    def __init__(self, source: Any, qconfig: Any) -> None:
        super().__init__()
        self.hidden_size, self.qconfig = source.hidden_size, qconfig
        self.nonlinearity = getattr(source, "nonlinearity", "tanh")
        for name, parameter in source.named_parameters():
            self.register_parameter(name, parameter)

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that the settings of a float module have a quantized form."""
        if getattr(mod, "proj_size", 0):
            raise UnsupportedOperatorError(
                f"`LSTM` {at(getattr(mod, 'path', ''))} has no quantized form with proj_size: leave it out, and put a "
                "Linear after the LSTM."
            )

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form."""
        cls.require_form(mod)
        return cls(mod, mod.qconfig)

    def drop_float_parameters(self) -> None:
        for name in self._parameters:
            self._parameters[name] = None

    def steps(self) -> list[_Step]:
        """All steps: one for each layer and direction."""
        return [m for m in self._modules.values() if isinstance(m, _Step)]

    def check_input(self, x: Any) -> None:
        """Insist on a quantized tensor."""
        if not isinstance(x, QTensor):
            what = "a float tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ConversionError(
                f"{type(self).__name__} {self.place} got {what}; put a QuantStub before it, and give it padded tensors "
                "instead of packed sequences."
            )


class RecurrentCell(_Recurrent):
    """One step, called by the user for each time. All calls of one forward of the model count as one batch."""

    def __init__(self, source: Any, qconfig: Any) -> None:
        super().__init__(source, qconfig)
        self.step = self.step_class(self, "", qconfig)
        for observer in self._observers():
            observer.counts_together = not observer.is_per_channel

    def _observers(self) -> list[ObserverBase]:
        return [m for m in self.step.modules() if isinstance(m, ObserverBase)]

    def begin_batch(self) -> None:
        """The next call is the first of a forward of the model."""
        for observer in self._observers():
            observer.begin_batch()

    def forward(self, x: Any, hx: Any = None) -> Any:
        self.check_input(x)
        if not isinstance(hx[0] if isinstance(hx, (tuple, list)) else hx, QTensor):
            self.begin_batch()  # a state that no call gave: also where the model is not called as a whole
        if hx is None:
            zeros = torch.zeros(*x.shape[:-1], self.hidden_size, device=x.device, dtype=torch.float32)
            states: tuple = (zeros, zeros)
        else:
            states = tuple(hx) if self.has_cell else (hx,)
        state = self.step(self.step.ih(x), self.step.start(states))
        return state if self.has_cell else state[0]


class RecurrentNetwork(_Recurrent):
    """Several layers over a sequence.

    Parts: a step ``l0``, ``l0_reverse``, ``l1``, ... for each layer and direction; ``cat_l0``, ... which puts the two
    directions of a layer on one scale; `hidden_cat` and `cell_cat`, which do that with the last states.
    """

    follows = frozenset({"batch_first", "dropout"})

    def __init__(self, source: Any, qconfig: Any) -> None:
        super().__init__(source, qconfig)
        self.num_layers, self.batch_first, self.dropout = source.num_layers, source.batch_first, source.dropout
        self.directions = ("", "_reverse") if source.bidirectional else ("",)
        for layer in range(self.num_layers):
            for direction in self.directions:
                step = self.step_class(self, f"_l{layer}{direction}", qconfig)
                self.add_module(f"l{layer}{direction}", step)
            if source.bidirectional:
                self.add_module(f"cat_l{layer}", FloatFunctional(qconfig))
        if self.num_layers * len(self.directions) > 1:
            self.hidden_cat = optional(FloatFunctional(qconfig))
            if self.has_cell:
                self.cell_cat = optional(FloatFunctional(inner_qconfig(qconfig)))

    def flatten_parameters(self) -> None:
        """Do nothing: forwards call it for the memory of a GPU's kernels, which this one does not use."""

    def forward(self, x: Any, hx: Any = None) -> tuple[Any, Any]:
        self.check_input(x)
        quantizers = [m for m in self.modules() if isinstance(m, FakeQuantize)]
        if not any(q.is_observing for q in quantizers):
            return self._run(x, hx)
        with ExitStack() as stack:
            for step in self.steps():
                stack.enter_context(step.ih.rounded_once())
                stack.enter_context(step.hh.rounded_once())
            with observe_together(quantizers), torch.no_grad():
                self._run(x, hx)
            with keep_ranges(quantizers):
                return self._run(x, hx)

    def _run(self, x: Any, hx: Any) -> tuple[Any, Any]:
        is_batched = x.dim() == 3
        if not is_batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        given: tuple = () if hx is None else tuple(hx) if self.has_cell else (hx,)
        if not is_batched:
            given = tuple(state.unsqueeze(1) for state in given)
        finals: list[tuple] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for direction in self.directions:
                step = self.get_submodule(f"l{layer}{direction}")
                out, final = self._sequence(step, x, [state[len(finals)] for state in given], bool(direction))
                outputs.append(out)
                finals.append(final)
            x = outputs[0] if len(outputs) == 1 else self.get_submodule(f"cat_l{layer}").cat(outputs, -1)  # type: ignore[operator]
        states = [self._joined("hidden_cat", [final[0] for final in finals])]
        if self.has_cell:
            states.append(self._joined("cell_cat", [final[1] for final in finals]))
        if not is_batched:
            x, states = x.squeeze(1), [state.squeeze(1) for state in states]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, (tuple(states) if self.has_cell else states[0])

    def _sequence(self, step: Any, x: Any, given: list[Any], is_reversed: bool) -> tuple[Any, tuple]:
        if not given:
            zeros = torch.zeros(x.shape[1], self.hidden_size, device=x.device, dtype=torch.float32)
            given = [zeros, zeros]
        state = step.start(tuple(given))
        gates = step.ih(x)
        replayed = replay_steps(step, gates, state, is_reversed)
        if replayed is not None:
            return replayed
        inputs = gates.unbind(0)
        states = take_steps(step, inputs[::-1] if is_reversed else inputs, state)
        outputs = [state[0] for state in (reversed(states) if is_reversed else states)]
        return on_both(lambda *values: torch.stack(values), *outputs), states[-1]

    def _joined(self, name: str, states: list[Any]) -> Any:
        """The last states of all layers and directions, on one scale."""
        if len(states) == 1:
            return states[0].unsqueeze(0)
        return getattr(self, name).cat([state.unsqueeze(0) for state in states], 0)


class LSTM(RecurrentNetwork):
    """`torch.nn.LSTM`; see `LSTMStep`."""

    step_class, has_cell = LSTMStep, True


class GRU(RecurrentNetwork):
    """`torch.nn.GRU`; see `GRUStep`."""

    step_class = GRUStep


class RNN(RecurrentNetwork):
    """`torch.nn.RNN`; see `RNNStep`."""

    step_class = RNNStep


class LSTMCell(RecurrentCell):
    """`torch.nn.LSTMCell`; see `LSTMStep`."""

    step_class, has_cell = LSTMStep, True


class GRUCell(RecurrentCell):
    """`torch.nn.GRUCell`; see `GRUStep`."""

    step_class = GRUStep


class RNNCell(RecurrentCell):
    """`torch.nn.RNNCell`; see `RNNStep`."""

    step_class = RNNStep


# LSTMCell is published; the others are made of the same operators.
_TWO_AXES = Limit(
    "2 axes", lambda use: all(len(x.shape) == 2 for x in use.inputs), advice="give the cell [batch, features]"
)
for _name, _cls, _modules, _limits in (
    ("lstm", LSTM, (nn.LSTM, floats.LSTM), ()),
    ("lstm_cell", LSTMCell, (nn.LSTMCell, floats.LSTMCell), (_TWO_AXES,)),
    ("gru", GRU, (nn.GRU, floats.GRU), ()),
    ("gru_cell", GRUCell, (nn.GRUCell, floats.GRUCell), (_TWO_AXES,)),
    ("rnn", RNN, (nn.RNN,), ()),
    ("rnn_cell", RNNCell, (nn.RNNCell,), (_TWO_AXES,)),
):
    _results = (Kind.QUANTIZED,) * (2 if _cls.has_cell or issubclass(_cls, RecurrentNetwork) else 1)
    register(Operator(
        _name, ScaleRule.OWN, _cls, _cls, _modules, marches=on(bayes=Support(limits=_limits)), results=_results,
        real_inputs=("hx",),
    ))  # fmt: skip
