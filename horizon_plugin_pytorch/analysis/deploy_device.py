"""Where each operator of a hybrid model runs when it is deployed: on the BPU as integers, or on the CPU in float."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from horizon_plugin_pytorch.analysis.calls import operators_of
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.graph_text import graph_of
from horizon_plugin_pytorch.capture.leaves import is_functional
from horizon_plugin_pytorch.capture.region import (
    called_path,
    is_constant,
    module_at,
    operands,
    row_of_node,
    value_inputs,
)
from horizon_plugin_pytorch.capture.sizes import is_fact, is_size
from horizon_plugin_pytorch.capture.wrapped import wrapped_modules
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import HorizonError, QuantizationWarning, require_module, warn
from horizon_plugin_pytorch.nested import fresh
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.functional_modules import QFunctional
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.operators.table import Kind, Operator, row_named, row_of_module
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.operator_call import OperatorCall, is_generated
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.watch.watch import Watch

DEVICE_FILE = "deploy_device.txt"
_OPERATORS = {"div", "floor_divide", "remainder", *(name for name in dir(operator) if not name.startswith("_"))}


class Device(Enum):
    """What an operator runs on."""

    BPU = "BPU"
    CPU = "CPU"


class DeviceRow(NamedTuple):
    """One operator.

    Args:
        name: the module's path; for functions, and methods of a FloatFunctional, the name of the graph's node.
        device: where it runs.
        form: how the model calls it: ``module``, ``function`` or ``method``.
    """

    name: str
    device: Device
    form: str


def check_deploy_device(
    model: nn.Module,
    print_tabulate: bool = True,
    out_dir: str | os.PathLike | None = None,
    example_inputs: Any = None,
) -> dict[str, tuple[str, str]]:
    """Say for each operator of a model whether it runs on the BPU or on the CPU when the model is deployed.

    The table is written to ``deploy_device.txt``. QuantStubs, which belong to the input, and what a deployed model has
    nothing for (Identity, Dropout) are not listed; what is fused is one line.

    Args:
        model: a prepared or converted model.
        print_tabulate: print the table.
        out_dir: the file's folder; None is the current one.
        example_inputs: the model's arguments, as `prepare` takes them. A model of eager mode has no graph: with them it
            is run, without them the table has its modules in the order of their definition, and no functions.

    Returns:
        Device and kind of call by name: ``{"conv": ("BPU", "module")}``.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.Sequential(nn.Conv2d(1, 1, 1), nn.PReLU()))
    >>> qat = prepare_qat_fx(net, {"": get_default_qconfig()}, hybrid=True)
    >>> devices = check_deploy_device(qat)
    name                    deploy device    type
    ----------------------  ---------------  ------
    module.0                BPU              module
    module_1_input_dequant  CPU              module
    module.1                CPU              module
    dequant                 CPU              module
    >>> devices["module.1"]
    ('CPU', 'module')
    """
    require_module(model, "check_deploy_device")
    if not any(isinstance(m, (QATModule, QuantizedModule)) for m in model.modules()):
        raise HorizonError(
            f"check_deploy_device: `{type(model).__name__}` is a float model; it takes the result of `prepare`, "
            "`prepare_qat_fx` or `prepare_qat`, or a converted model."
        )
    rows = list({row.name: row for row in device_rows(model, example_inputs)}.values())
    table = Table(["name", "deploy device", "type"], [[r.name, r.device.value, r.form] for r in rows])
    text = table.text(aligns_numbers=True)
    write_report(f"{text}\n", out_dir, DEVICE_FILE, "check_deploy_device")
    if print_tabulate:
        print(text)
    return {row.name: (row.device.value, row.form) for row in rows}


def device_rows(model: nn.Module, example_inputs: Any = None) -> Iterator[DeviceRow]:
    """The rows of the table; a module that is called again has more than one."""
    graph = graph_of(model)
    if graph is not None:
        yield from _Graph(model, graph).rows()
    elif example_inputs is not None:
        yield from _rows_of_run(model, example_inputs)
    else:
        warn(
            f"check_deploy_device: `{type(model).__name__}` has no graph (eager mode), so its table has modules only, "
            "in the order of their definition. Give example_inputs: then it is run, and functions are listed too.",
            QuantizationWarning,
        )
        for path, module in operators_of(model).items():
            yield from _of_module(path, module, isinstance(module, (QATModule, QuantizedModule)))


def _row_of(module: nn.Module) -> Operator | None:
    """The row of a module at any stage."""
    name = getattr(module, "operator", "")
    return row_named(name) if isinstance(name, str) and name else row_of_module(type(module))


def _of_module(path: str, module: nn.Module, is_quantized: bool, name: str = "") -> Iterator[DeviceRow]:
    """The row of a module, if it has one."""
    row = _row_of(module)
    if row is not None and (row.is_quant or row.does_nothing):
        return
    device = Device.BPU if is_quantized and not (row is not None and row.is_stub) else Device.CPU
    is_method = isinstance(module, (FloatFunctional, QFunctional)) or is_functional(type(module))
    yield DeviceRow(name or path, device, "method" if is_method else "module")


class _Graph:
    """Follows the integers through the graph of a model."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model: Any = Captured(model, graph)
        self.root, self.graph = model, graph
        self._integers: set[fx.Node] = set()

    def rows(self) -> Iterator[DeviceRow]:
        for node in self.graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                yield from self._of_node(node)

    def _of_node(self, node: fx.Node) -> Iterator[DeviceRow]:
        path = called_path(self.model, node)
        if path is None:
            yield from self._of_function(node)
            return
        module = module_at(self.model, path)
        if isinstance(module, LeafCode):
            yield from self._of_code(node, path)
            return
        row, is_reading = _row_of(module), self._reads(node)
        is_stub, is_quant = row is not None and row.is_stub, row is not None and row.is_quant
        is_ours = isinstance(module, (QATModule, QuantizedModule))
        is_giving = _gives_integers(row) if is_ours else is_reading  # others move what they get
        if is_quant or (is_giving and not is_stub):
            self._integers.add(node)
        if is_stub and notes(node).made_by == "hybrid":
            yield DeviceRow(path, Device.CPU, "module")
        elif notes(node).called_as:  # fused, where the model calls a method
            yield DeviceRow(notes(node).called_as, Device.BPU, "method")
        else:
            name = node.name if node.op == "call_method" and not is_generated(path) else path
            yield from _of_module(path, module, is_ours or is_reading, name)

    def _of_function(self, node: fx.Node) -> Iterator[DeviceRow]:
        if is_fact(node) or is_size(node) or is_constant(self.model, node):
            return
        is_part = node.target in (operator.getitem, getattr) and not isinstance(node.args[1], (slice, tuple))
        is_reading = self._reads(node)
        row = row_of_node(self.model, node)
        if is_reading and (row is None or _gives_integers(row)):
            self._integers.add(node)
        if not is_part and not (row is not None and row.does_nothing):
            yield DeviceRow(node.name, Device.BPU if is_reading else Device.CPU, self._form(node))

    def _form(self, node: fx.Node) -> str:
        """How the model calls a function; a run reports ``x + y`` as the method."""
        is_written = isinstance(self.root, fx.GraphModule) or node.target not in _OPERATORS
        return "method" if node.op == "call_method" and is_written else "function"

    def _of_code(self, node: fx.Node, path: str) -> Iterator[DeviceRow]:
        """Code that tracing did not enter: the modules that it calls, and those of its functions."""
        inside = f"{path}."
        found = {p: m for p, m in operators_of(self.model.get_submodule("")).items() if p.startswith(inside)}
        called = {p: self.model.get_submodule(p) for p in wrapped_modules(self.model)}
        for name, module in {**called, **found}.items():
            yield from _of_module(name, module, isinstance(module, (QATModule, QuantizedModule)))
        self._integers.add(node)

    def _reads(self, node: fx.Node) -> bool:
        """Does a node compute with integers?"""
        sources = operands(self.model, node) if called_path(self.model, node) is not None else value_inputs(node)
        return any(source in self._integers for source in sources)


def _gives_integers(row: Operator | None) -> bool:
    return row is None or any(kind in (Kind.QUANTIZED, Kind.BOOL) for kind in row.results)


@torch.no_grad()
def _rows_of_run(model: nn.Module, example_inputs: Any) -> Iterator[DeviceRow]:
    """The operators that a run calls, named as those of a graph."""
    args, kwargs = arguments_of(model, example_inputs)
    rows: list[DeviceRow] = []
    names = fx.graph._Namespace()

    def note(call: OperatorCall) -> None:
        is_quantized = any(isinstance(x, QTensor) for x in call.outputs)
        if call.module is None:
            if not (call.row is not None and call.row.does_nothing):
                device = Device.BPU if is_quantized else Device.CPU
                rows.append(DeviceRow(names.create_name(call.operator, None), device, "function"))
            return
        is_ours = isinstance(call.module, (QATModule, QuantizedModule))
        name = names.create_name(call.method, None) if call.method else ""
        rows.extend(_of_module(call.path, call.module, is_ours or is_quantized, name))

    with undisturbed(model), Watch(model, note):
        model.eval()(*fresh(args), **fresh(kwargs))
    yield from rows


show_at("utils.quant_profiler", check_deploy_device)
