"""Does a converted model keep the limits of a chip? Every operator that runs is compared with the operator table."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.findings import UNBIND_ADVICE, Finding
from horizon_plugin_pytorch.analysis.script_limits import script_findings
from horizon_plugin_pytorch.capture.graph_text import graph_of
from horizon_plugin_pytorch.errors import HorizonError, QuantizationWarning, at, listed, require_module, warn
from horizon_plugin_pytorch.march import March, as_march, get_march, require_march
from horizon_plugin_pytorch.nested import fresh
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.operators.support import GENERAL, TensorFact, Use, group_of
from horizon_plugin_pytorch.operators.table import Operator, Trait
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import positional_arguments, script_arguments
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.torch_functions import UNBINDING
from horizon_plugin_pytorch.watch.flow import TensorNotes
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.watch import Watch

_OWN_FORMAT = "give its qconfig an activation of one of these formats"


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


class _Uses:
    """Makes uses of the calls of a model that is watched, and forgets their tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._uses: list[tuple[Operator, Use]] = []
        self._constants = TensorNotes()
        for x in (*model.parameters(), *model.buffers()):
            self._constants[x] = True
        self._origins = TensorNotes()  # of tensors: the uses, and the places among their results
        self._read: set[tuple[int, int]] = set()

    def __call__(self, call: OperatorCall) -> None:
        taken, given = call.inputs, call.outputs
        row = _row_of(call)
        if row is None:
            self._follow(taken, given)
            return
        index = len(self._uses)
        facts = tuple(map(self._fact, taken)), tuple(map(self._fact, given))
        place = at(call.path, call.line).removeprefix("at ")
        self._uses.append((row, Use(row.name, place, *facts, _attributes_of(call))))
        self._follow(taken, given)
        if Trait.UNREAD in row.traits:
            return
        for x in taken:
            self._read |= self._origins.get(x, set())
        for position, x in enumerate(given):
            self._origins[x] = {(index, position)}

    @property
    def uses(self) -> list[tuple[Operator, Use]]:
        """The uses, each with what is known only after the run: who read its results."""
        return [
            (row, replace(use, outputs=tuple(
                replace(x, is_read=(index, place) in self._read) for place, x in enumerate(use.outputs)
            )))
            for index, (row, use) in enumerate(self._uses)
        ]  # fmt: skip

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


def _row_of(call: OperatorCall) -> Operator | None:
    """The row of an operator that a deployed model has; None for ordinary code."""
    if call.module is not None:
        is_known = isinstance(call.module, PlacedModule) or type(call.module).__module__.startswith("torch.nn.")
        return call.row if is_known else None
    has_scale, gives_scale = (any(isinstance(x, QTensor) for x in xs) for xs in (call.inputs, call.outputs))
    is_on_cpu = call.row is not None and call.row.qat is not None and not gives_scale  # it has no module there
    return call.row if has_scale and not is_on_cpu else None


def _attributes_of(call: OperatorCall) -> dict[str, Any]:
    """The geometry of a call."""
    if call.module is None:
        assert call.row is not None
        found = call.row.named(call.args, call.kwargs)
        if call.function in UNBINDING:
            found = {**found, "function": "unbind"}
    elif call.method:
        signature = inspect.signature(getattr(call.module, call.method))
        found = {**_formats(call.module), **signature.bind(*call.args, **call.kwargs).arguments}
    else:
        found = _attributes(call.module)
    return {k: v for k, v in found.items() if _is_geometry(v)}


def operator_uses(model: nn.Module, args: tuple) -> list[tuple[Operator, Use]]:
    """Every operator that a converted model runs on these inputs, with the tensors that it met."""
    was_training = model.training
    uses = _Uses(model)
    model.eval()
    try:
        with torch.no_grad(), Watch(model, uses):
            model(*fresh(args))
    finally:
        model.train(was_training)
    return uses.uses


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


def _unbound(use: Use) -> Iterator[Finding]:
    if use.attributes.get("function") == "unbind":
        yield Finding(use.place, "unbind", "supported nodes", "unsupported node", UNBIND_ADVICE)


def find_limits(model: nn.Module, args: tuple, march: March) -> list[Finding]:
    """Every limit of the chip that the converted model breaks."""
    found = [f for row, use in operator_uses(model, args) for f in (*_unbound(use), *_format_findings(row, use, march))]
    return list(dict.fromkeys(found))


def _on_cpu(model: nn.Module) -> list[str]:
    """The operators of a hybrid model that run in float, between or instead of quantized ones."""
    graph = graph_of(model)
    return [] if graph is None else [node.name for node in graph.nodes if notes(node).runs_on_cpu]


def _require_converted(model: nn.Module) -> None:
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
        module: the result of `convert_fx` or `convert`; or what `torch.jit.trace` gives for it, of which only the
            operators can be checked: number formats are not in a script.
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
    require_module(module, "check_model")
    is_script = isinstance(module, torch.jit.ScriptModule)
    if not is_script:
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
        noted = None if is_script else note_of(module, "march")
        march = noted or get_march() or require_march("check_model")
    chip = as_march(march)
    if is_script:
        return _check_script(module, example_inputs)
    findings = find_limits(module, positional_arguments(module, example_inputs), chip)
    apart = _on_cpu(module)
    if apart:
        print(f"On the CPU, and not checked: {listed((f'`{name}`' for name in apart), most=5)}.")
    if not findings and apart:
        print(f"Every operator on the BPU keeps the published formats and limits of {chip}.")
        return 0
    if not findings:
        print(f"This model is supported!\nEvery operator keeps the published formats and limits of {chip}.")
        return 0
    print(f"This model breaks {len(findings)} limits of {chip}:")
    _print_findings(findings)
    return 1


def _check_script(script: Any, example_inputs: Any) -> int:
    """Check the operators of a script."""
    findings, count = script_findings(script, script_arguments(example_inputs))
    if not count:
        raise HorizonError("check_model: the script has no integers; trace a model of `convert_fx` or `convert`.")
    if findings:
        print(f"This script has {len(findings)} operators that do not fit:")
        _print_findings(findings)
        return 1
    print(
        "Every operator of the script is known. Number formats and limits of the chip are not checked: they are not in "
        "a script; give check_model the converted model for them."
    )
    return 0


def _print_findings(findings: list[Finding]) -> None:
    headers = ["where", "operator", "limit", "found", "what to do"]
    rows = [[f.place, f.operator, f.limit, f.found, f.advice or "change the layer, or move it after the DeQuantStub"]
            for f in findings]  # fmt: skip
    print(Table(headers, rows).text("psql", aligns_numbers=True, widths=[40, None, 36, 40, 40]))
