"""Does a converted model keep the limits of a chip? Every operator that runs is compared with the operator table."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from horizon_plugin_pytorch.capture.tracer import scope_of
from horizon_plugin_pytorch.errors import HorizonError, QuantizationWarning, at, source_line, user_frames, warn
from horizon_plugin_pytorch.march import March, as_march, get_march, require_march
from horizon_plugin_pytorch.nested import fresh, tensors_of
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.operators.support import GENERAL, TensorFact, Use, group_of
from horizon_plugin_pytorch.operators.table import (
    Operator,
    row_named,
    row_of_function,
    row_of_method,
    row_of_module,
)
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import positional_arguments
from horizon_plugin_pytorch.runtime.located import PlacedModule, listening
from horizon_plugin_pytorch.runtime.unfinished import Unfinished

_VANISHING = {"dequant", "identity", "dropout", "alpha_dropout", "to"}  # no reader of what an operator gives
_OWN_FORMAT = "give its qconfig an activation of one of these formats"


@dataclass(frozen=True)
class Finding:
    """One limit that an operator of the model breaks."""

    place: str
    operator: str
    limit: str
    found: str
    advice: str


def _is_geometry(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, (int, float)) for v in value)
    return isinstance(value, (int, float, str))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The geometry of a module: its plain attributes, and what its weight's shape says."""
    found = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() > 2:
        found.setdefault("kernel_size", tuple(weight.shape[2:]))
    found.update(_formats(module))
    if isinstance(weight, Tensor):
        found["weight_format"] = str(getattr(module, "weight_dtype", weight.dtype))
    return found


def _formats(module: nn.Module) -> dict[str, str]:
    """The format of results that have no scale."""
    is_half = isinstance(module, Float16) or getattr(module, "cast", None) is not None
    return {"result": "float16"} if is_half else {}


class _Watch(TorchFunctionMode):
    """Collects the uses of operators while a model runs; what runs inside an operator is not counted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.node: fx.Node | None = None  # of the graph, that runs
        self._uses: list[tuple[Operator, Use]] = []
        self._paths = {module: path for path, module in model.named_modules()}
        self._entered: list[nn.Module] = []
        self._depth = 0
        self._constants = WeakIdKeyDictionary(dict.fromkeys([*model.parameters(), *model.buffers()], True))
        self._origins = WeakIdKeyDictionary()  # of tensors: the uses, and the places among their results
        self._read: set[tuple[int, int]] = set()

    @property
    def uses(self) -> list[tuple[Operator, Use]]:
        """The uses, each with what is known only after the run: who read its results."""
        return [
            (row, replace(use, outputs=tuple(
                replace(x, is_read=(index, place) in self._read) for place, x in enumerate(use.outputs)
            )))
            for index, (row, use) in enumerate(self._uses)
        ]  # fmt: skip

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._entered.append(module)
        self._depth += _row_of(module) is not None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self._entered.pop()
        row = _row_of(module)
        if row is None:
            return
        self._depth -= 1
        self._add(row, module, (args, kwargs), out, _attributes(module))

    def method(self, module: PlacedModule, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        row = row_named(row_name_of(name, args))
        if row is not None:
            named = inspect.signature(getattr(module, name)).bind(*args, **kwargs).arguments
            self._add(row, module, (args, kwargs), out, {**_formats(module), **named})

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        found = row_of_function(func, args, kwargs) or row_of_method(getattr(func, "__name__", ""), args, kwargs)
        before, taken = len(self._uses), tensors_of((args, kwargs))
        is_part = _has_unfinished(taken)  # of a fused operator; a write makes it another tensor
        out = func(*args, **kwargs)
        is_met = len(self._uses) > before  # the model has a module for it, met with what that really takes
        if is_met or is_part or _has_unfinished(tensors_of(out)):
            return out
        if found is not None and any(isinstance(x, QTensor) for x in taken):
            self._add(found[0], None, (args, kwargs), out, found[0].named(args, kwargs))
        elif self._depth == 0:
            self._follow(taken, tensors_of(out))
        return out

    def _place(self, module: nn.Module | None) -> str:
        """Path and line of a module, or of a function that runs as it is."""
        frames = user_frames() if self.node is None else self.node.stack_trace
        line = source_line(frames) or getattr(module, "line", "")
        if module is not None:
            path = self._paths.get(module, "")
        elif self.node is not None:
            path = scope_of(self.node)
        else:
            path = self._paths.get(self._entered[-1], "") if self._entered else ""
        return at(path, line).removeprefix("at ")

    def _add(self, row: Operator, module: nn.Module | None, inputs: Any, out: Any, attributes: dict[str, Any]) -> None:
        if self._depth:
            return
        index, taken, given = len(self._uses), tensors_of(inputs), tensors_of(out)
        attributes = {k: v for k, v in attributes.items() if _is_geometry(v)}
        facts = tuple(map(self._fact, taken)), tuple(map(self._fact, given))
        self._uses.append((row, Use(row.name, self._place(module), *facts, attributes)))
        self._follow(taken, given)
        if row.name in _VANISHING:
            return
        for x in taken:
            self._read |= self._origins.get(x, set())
        for place, x in enumerate(given):
            self._origins[x] = {(index, place)}

    def _follow(self, taken: list[Tensor], given: list[Tensor]) -> None:
        """What is made of constants alone is constant; what ordinary code makes of a result still comes from there."""
        is_constant = all(x in self._constants for x in taken)
        origins = set().union(*(self._origins.get(x, set()) for x in taken))
        for x in given:
            self._origins[x] = origins
            if is_constant:
                self._constants[x] = True

    def _fact(self, x: Tensor) -> TensorFact:
        return TensorFact(tuple(x.shape), str(x.dtype).removeprefix("torch."), x in self._constants)


class _Nodes(fx.Interpreter):
    """Runs a graph node by node, and tells which one."""

    def __init__(self, model: fx.GraphModule, watch: _Watch) -> None:
        super().__init__(model)
        self._watch = watch

    def run_node(self, n: fx.Node) -> Any:
        self._watch.node = n
        out = super().run_node(n)
        return self.fetch_args_kwargs_from_env(n)[0][0] if n.target is operator.setitem else out  # as generated code


def _has_unfinished(tensors: list[Tensor]) -> bool:
    return any(isinstance(x, Unfinished) for x in tensors)


def _row_of(module: nn.Module) -> Operator | None:
    name = getattr(module, "operator", "")
    if isinstance(name, str) and name:
        return row_named(name)
    return row_of_module(type(module)) if type(module).__module__.startswith("torch.nn.") else None


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    watch = _Watch(model)
    before = register_module_forward_pre_hook(watch.enter)
    after = register_module_forward_hook(watch.leave, with_kwargs=True)  # type: ignore[call-arg]
    try:
        with watch, listening(watch.method):
            yield watch
    finally:
        before.remove()
        after.remove()


def operator_uses(model: nn.Module, args: tuple) -> list[tuple[Operator, Use]]:
    """Every operator that a converted model runs on these inputs, with the tensors that it met."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _watching(model) as watch:
            args = fresh(args)
            _Nodes(model, watch).run(*args) if isinstance(model, fx.GraphModule) else model(*args)
    finally:
        model.train(was_training)
    return watch.uses


def _format_findings(row: Operator, use: Use, march: March) -> Iterator[Finding]:
    support = row.support(march)
    if support is None:
        yield Finding(
            use.place, row.name, f"not on {march}", "-", f"it runs on {', '.join(row.march_names)}; choose one of these"
        )
        return
    integers = [x.format for x in use.inputs if x.format.startswith("qint")]
    for format in dict.fromkeys(f for f in integers if f not in support.inputs):
        allowed = ", ".join(support.inputs)
        yield Finding(use.place, row.name, f"input {allowed}", format, "give the producer of this tensor such a format")
    for x in use.outputs[:1]:
        if x.format.startswith("qint") and x.format not in (*support.outputs, *support.inputs):
            yield Finding(use.place, row.name, f"output {', '.join(support.outputs)}", x.format, _OWN_FORMAT)
    if use.attributes.get("result") == "float16" and march.family != "nash":
        yield Finding(use.place, row.name, "integers", "float16", "give its qconfig an activation of qint16")
    weight = use.attributes.get("weight_format", "")
    if support.weights and weight.startswith("qint") and weight not in support.weights:
        yield Finding(
            use.place, row.name, f"weight {', '.join(support.weights)}", weight, "give its qconfig a weight of qint8"
        )
    for limit in (*support.limits, *GENERAL[group_of(march)]):
        if not limit.holds(use):
            shapes = ", ".join(str(x.shape) for x in use.inputs)
            yield Finding(use.place, row.name, limit.text, f"{limit.found(use)} (inputs {shapes})", limit.advice)


def find_limits(model: nn.Module, args: tuple, march: March) -> list[Finding]:
    """Every limit of the chip that the converted model breaks."""
    found = [f for row, use in operator_uses(model, args) for f in _format_findings(row, use, march)]
    return list(dict.fromkeys(found))


def _require_converted(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise HorizonError(
            "check_model takes the converted model itself (the result of `convert_fx` or `convert`): number formats "
            "and module names are no longer known in a traced one. Check first, then trace."
        )
    if any(isinstance(m, QATModule) for m in model.modules()) or not any(
        isinstance(m, (QuantizedModule, Float16)) for m in model.modules()
    ):
        raise HorizonError(f"check_model: `{type(model).__name__}` is not converted; call `convert_fx` first.")


def check_model(
    module: nn.Module,
    example_inputs: Any,
    march: March | str | None = None,
    input_source: str = "ddr",
    advice: int | None = None,
    check_quanti_param: bool = True,
) -> int:
    """Compare a converted model with the published limits of a chip; print what breaks which limit, and what to do.

    Args:
        module: the result of `convert_fx` or `convert`.
        example_inputs: the model's arguments, as `prepare` takes them, in the sizes of the deployment.
        march: the chip; None takes the one the model was prepared for, or that of `set_march`.
        input_source, advice, check_quanti_param: options of the vendor's compiler; they have no effect, and warn.

    Returns:
        0 if every operator fits, 1 otherwise.

    >>> from horizon_plugin_pytorch.march import set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx, prepare_qat_fx
    >>> from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig
    >>> set_march(March.BAYES)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 3)), {"": default_qat_8bit_fake_quant_qconfig})
    >>> x = torch.randn(1, 1, 8, 8)
    >>> _ = qat(x)
    >>> check_model(convert_fx(qat), (x,))
    This model is supported!
    Every operator keeps the published formats and limits of bayes.
    0
    """
    _require_converted(module)
    options = {"input_source": input_source != "ddr", "advice": advice is not None}
    given = [name for name, is_given in (options | {"check_quanti_param": not check_quanti_param}).items() if is_given]
    if given:
        warn(
            f"check_model: {', '.join(given)} changes nothing: it is for the vendor's compiler, which is not run here. "
            "What is checked are the published limits of the chip.",
            QuantizationWarning,
        )
    if march is None:
        march = note_of(module, "march") or get_march() or require_march("check_model")
    chip = as_march(march)
    findings = find_limits(module, positional_arguments(module, example_inputs), chip)
    if not findings:
        print(f"This model is supported!\nEvery operator keeps the published formats and limits of {chip}.")
        return 0
    print(f"This model breaks {len(findings)} limits of {chip}:")
    headers = ["where", "operator", "limit", "found", "what to do"]
    rows = [[f.place, f.operator, f.limit, f.found, f.advice or "change the layer, or move it after the DeQuantStub"]
            for f in findings]  # fmt: skip
    print(tabulate(rows, headers=headers, tablefmt="psql", maxcolwidths=[40, None, 36, 40, 40]))
    return 1
