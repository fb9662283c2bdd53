"""Float code of a prepared model that no ONNX file can hold, found before anybody calibrates or trains."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, at, warn
from horizon_plugin_pytorch.export.onnx_export import require_written
from horizon_plugin_pytorch.nested import map_instances, map_tensors
from horizon_plugin_pytorch.program.record import record_run
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.watch.flow import TensorNotes
from horizon_plugin_pytorch.watch.operator_call import OperatorCall

_TOLD = 6  # places in a warning


class UnwritableCalls:
    """Consumer of a watched run: tries to write each float call that depends on the inputs, once for each kind.

    Without the packages of ONNX it finds nothing: whoever has not installed them writes no file.

    >>> from horizon_plugin_pytorch.watch import Watch
    >>> class Inverse(nn.Module):
    ...     def forward(self, x):
    ...         return torch.linalg.pinv(x).relu()
    >>> found = UnwritableCalls(net := Inverse())
    >>> with Watch(net, found):
    ...     _ = net(torch.eye(2))
    >>> list(found.places.values())
    ['`aten::linalg_pinv` has no ONNX form']
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, str] = {}  # with what the writer says
        self._tried: dict[Any, str | None] = {}
        self._constants = TensorNotes()
        self._has_onnx = find_spec("onnx") is not None and find_spec("onnx_ir") is not None
        for x in (*model.parameters(), *model.buffers()):
            self._constants[x] = True

    def __call__(self, call: OperatorCall) -> None:
        if not self._has_onnx:
            return
        if all(x in self._constants for x in call.inputs):
            for x in call.outputs:
                self._constants[x] = True
            return
        if isinstance(call.module, PlacedModule) or any(isinstance(x, QTensor) for x in (*call.inputs, *call.outputs)):
            return
        key = _kind_of(call)
        if key not in self._tried:
            self._tried[key] = self._refusal(call)
        refusal = self._tried[key]
        if refusal is not None:
            self.places.setdefault(at(call.path, call.line), refusal)

    def _refusal(self, call: OperatorCall) -> str | None:
        """Why the call cannot be written; None if it can, or nobody knows before the export."""
        step = _Step(call, self._constants)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                require_written(record_run(step, step.variables, takes_real=True))
        except ExportError as error:
            return _first_sentence(str(error).partition(": ")[2] or str(error))
        except Exception:  # a call that does not run alone; the export will see it in its place
            return None
        return None

    def tell(self, caller: str) -> None:
        """Warn of what was found."""
        if not self.places:
            return
        found = [f"{refusal} {place}" for place, refusal in self.places.items()]
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        text = "; ".join(found[:_TOLD]) + more
        warn(
            f"{caller}: no ONNX file can be written of what depends on these float operators: {text}. Leave "
            "them out of the model that you export, as pre- and post-processing, or write them with other operators. "
            "All else works: calibration, training, conversion, and the converted model in torch.",
            QuantizationWarning,
        )


class _Step(nn.Module):
    """One call as a model of its own, with what varies as its inputs."""

    def __init__(self, call: OperatorCall, constants: TensorNotes) -> None:
        super().__init__()
        self.__dict__["_call"] = call  # not as a child: the module keeps its parents
        self.variables: list[Tensor] = []

        def place(x: Tensor) -> Any:
            if x in constants:
                return x.detach()
            self.variables.append(x.detach().clone())
            return _Slot(len(self.variables) - 1)

        self._given = map_tensors(place, (call.args, call.kwargs))
        if isinstance(call.module, nn.Module):
            self.module = call.module

    def forward(self, *given: Tensor) -> Any:
        call: OperatorCall = self.__dict__["_call"]
        args, kwargs = map_instances(lambda slot: given[slot.index], _Slot, self._given)
        if call.function is not None:
            return call.function(*args, **kwargs)
        target = getattr(call.module, call.method) if call.method else call.module
        return target(*args, **kwargs)  # type: ignore[misc]


@dataclass(frozen=True)
class _Slot:
    """The place of an input among the arguments of a call."""

    index: int


def _kind_of(call: OperatorCall) -> Any:
    """What decides whether a call can be written: the function or the module, its options, ranks and types."""
    what = call.module if call.function is None else call.function
    shown = map_tensors(lambda x: f"{x.dtype}{x.dim()}", (call.args, call.kwargs))
    return what, call.method, repr(shown)


def _first_sentence(text: str) -> str:
    """What is wrong; the advice that follows it is given once for all."""
    return re.split(r"[.;] ", text.replace(" for these arguments", ""), maxsplit=1)[0].rstrip(".")
