"""How much memory a model takes in forward and backward, operator by operator: measured, on CPU as on CUDA."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.memory_meter import CpuMeter, CudaMeter, Meter
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun
from horizon_plugin_pytorch.asking.stack import error_line
from horizon_plugin_pytorch.capture.leaves import is_leaf
from horizon_plugin_pytorch.capture.plain_model import is_compiled
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, at, require_module
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.qat.composite import hidden_parts
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.module_watch import ModuleWatch
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.watch.watch import Watch

PAGE_NAME = "mem_info"
_WHO = "show_cuda_memory_consumption"
_MIB = 1 << 20
FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"


@dataclass(frozen=True)
class MemoryRow:
    """What a part of the model did with memory; all numbers are bytes.

    Args:
        name: of the module, or of a function in a module's code: ``layer1.0[add]``; ``conv(1)`` is a second call.
        phase: ``forward``, ``backward``, or ``recomputed``: a forward inside backward, as a checkpoint makes it.
        before, after: what was allocated when it began and when it ended.
        peak: the most that was allocated while it ran.
    """

    name: str
    type: str
    phase: str
    before: int
    after: int
    peak: int

    @property
    def change(self) -> int:
        """What it has left behind: its results, what autograd keeps, gradients; less what it has let go."""
        return self.after - self.before


def show_cuda_memory_consumption(
    model: nn.Module,
    example_inputs: Any,
    device: torch.device,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    out_dir: str | os.PathLike | None = None,
    file_name: str | None = None,
    custom_backward: Callable[[Any], Any] | None = None,
) -> list[MemoryRow]:
    """Measure the memory that a model takes in forward and backward, operator by operator, and write a page of it.

    On CUDA torch's caching allocator is asked, on CPU torch's profiler reports every block, so that what kernels need
    for a moment counts as well. The model runs in the mode that it is in; one forward before does not count. It is not
    changed, and its gradients are as they were.

    Args:
        model: float, prepared or converted; it is copied if it is on another device.
        example_inputs: the model's arguments, as `prepare` takes them.
        device: where to run: ``cuda`` or ``cpu``.
        check_leaf_module: which modules have a row; what is inside these has none. None: the operators, that is
            modules of torch and of this package, and those that are marked with `wrap`.
        out_dir: where to write the page; None is the current folder.
        file_name: the name of the page, ``mem_info`` if None.
        custom_backward: is called with the model's output and runs backward; the graph may not be retained. None
            needs a model that gives one tensor. What has no gradients, as a converted model, runs forward only.

    Returns:
        The rows, in the order of the run. The code of modules with modules inside has rows where it allocates.

    Raises:
        CheckError: the device is not there, or the model fails on these inputs.

    >>> net, x = nn.Linear(8, 256), torch.ones(1, 8)
    >>> rows = show_cuda_memory_consumption(net, x, torch.device("cpu"), out_dir=__import__("tempfile").mkdtemp())
    Peak: ... KiB in `Linear` (backward), ... KiB of them before the run. ...mem_info.html has every step.
    >>> rows[0].phase, rows[0].change  # 256 numbers of four bytes
    ('forward', 1024)
    """
    require_module(model, _WHO)
    device = _available(device)
    _require_eager(model)
    run = WatchedRun(model, example_inputs, device, _WHO)
    rows, held = _measure(run, device, check_leaf_module or _is_operator, custom_backward)
    name = file_name or PAGE_NAME
    path = write_report(_page(rows, held, device), out_dir, name if name.endswith(".html") else f"{name}.html", _WHO)
    print(f"{_summary(rows, held)} {path} has every step.")
    return rows


# Modules of torch's that are made of operators.
_MADE_OF_OPERATORS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer, nn.DataParallel, nn.parallel.DistributedDataParallel,
)  # fmt: skip


def _is_operator(module: nn.Module) -> bool:
    return is_leaf(module) and not isinstance(module, _MADE_OF_OPERATORS)


def _require_eager(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if is_compiled(module):
            place = f"`{path}`" if path else "the model"
            raise CheckError(
                f"{_WHO}: {place} is compiled, and compiled code does not say where an operator begins: give the model "
                "from before `torch.compile`."
            )


def _available(device: Any) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CheckError(
            f"{_WHO}: {device!r} is no device: give torch.device('cuda') or torch.device('cpu')."
        ) from error
    if device.type not in ("cuda", "cpu"):
        raise CheckError(f"{_WHO}: memory on {device.type} cannot be measured: give a cuda or cpu device.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckError(
            f"{_WHO}: {device} is not available: torch sees no GPU here. Give torch.device('cpu'), where memory is "
            "measured, too."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CheckError(f"{_WHO}: {device} is not available: torch sees {torch.cuda.device_count()} GPU(s) here.")
    return device


def _measure(
    run: WatchedRun,
    device: torch.device,
    is_chosen: Callable[[nn.Module], bool],
    custom_backward: Callable[[Any], Any] | None,
) -> tuple[list[MemoryRow], int]:
    """The rows of one run, and what was held before it."""
    model = run.model
    with undisturbed(model), hidden_parts(), _without_gradients(model), torch.enable_grad():
        _run(run, *run.arguments())  # scales, tables and workspaces that are made once are there afterwards
        args, kwargs = run.arguments()
        held = _bytes([*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))])
        meter: Meter = CudaMeter(device) if device.type == "cuda" else CpuMeter(held)
        steps = _Steps(model, is_chosen, meter)
        with meter:
            with steps:
                out = _run(run, args, kwargs, steps)
                steps.begin_backward()
                _backward(out, custom_backward)
            del out
        return steps.rows(), (held if device.type == "cpu" else meter.readings[0].allocated)


def _run(run: WatchedRun, args: tuple, kwargs: dict[str, Any], steps: _Steps | None = None) -> Any:
    with Watch(run.model, lambda call: None if steps is None else steps.function(call)) as watch:
        try:
            return run.model(*args, **kwargs)
        except Exception as error:
            place = at(watch.failed_in or "", error_line(error))
            text = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
            raise CheckError(f"{_WHO}: the model failed {place}: {text}.") from error


def _backward(out: Any, custom_backward: Callable[[Any], Any] | None) -> None:
    tensors = [x for x in tensors_of(out) if x.requires_grad]
    if not tensors:
        return
    if custom_backward is None and len(tensors) > 1:
        raise CheckError(
            f"{_WHO}: the model gives {len(tensors)} tensors, and backward begins at one. Say what to do with them: "
            "custom_backward=lambda out: loss(out).backward()."
        )
    try:
        if custom_backward is not None:
            custom_backward(out)
        else:
            with_gradient(tensors[0]).sum().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
        raise CheckError(f"{_WHO}: backward failed: {text}.") from error


def with_gradient(x: Tensor) -> Tensor:
    """An output's real numbers, from which backward can begin."""
    return x.as_real() if isinstance(x, QTensor) else x


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """As in the first step of a training; the gradients that are there come back."""
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory that the tensors show, each block once."""
    blocks = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(blocks.values())


@dataclass(frozen=True)
class _Step:
    """Who runs between two marks; a step of a module with modules inside, or of nobody, is told if it allocates."""

    name: str
    type: str
    phase: str
    is_always_told: bool = False


_AUTOGRAD = _Step("(between operators)", "autograd", BACKWARD)


class _Steps:
    """Marks where modules begin and end, in forward and in backward.

    In backward a module runs while the nodes of autograd run that lie between its inputs and its outputs: hooks on
    these tell, and not torch's hooks on modules, which forbid to write in place.
    """

    def __init__(self, model: nn.Module, is_chosen: Callable[[nn.Module], bool], meter: Meter) -> None:
        self._meter = meter
        self._title = type(model).__name__
        modules, self._leaves = _down_to(model, is_chosen)
        self._watch = ModuleWatch(modules, before=self._enter, after=self._leave)
        self._running: list[_Step] = [_Step("(before the model)", "", FORWARD)]
        self._entered: list[tuple[int, list[Any]]] = []  # for each running module: its depth, what gave its inputs
        self._depths: list[int] = []  # for each running node of autograd
        self._steps: list[_Step] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._claim = object()  # in the metadata of a node that has a step: nodes must not be held, they hold tensors
        self._handles: list[Any] = []
        self._is_backward = False

    def __enter__(self) -> _Steps:
        self._watch.__enter__()
        self._mark(self._running[-1])
        return self

    def __exit__(self, *error: object) -> None:
        self._mark(self._running[0])
        self._watch.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def begin_backward(self) -> None:
        """What comes now is the loss, and backward."""
        self._is_backward = True
        self._running = [_AUTOGRAD]
        self._mark(_AUTOGRAD)

    def _mark(self, step: _Step) -> None:
        self._meter.mark()
        self._steps.append(step)

    def _push(self, step: _Step) -> None:
        self._running.append(step)
        self._mark(step)

    def _return_to(self, depth: int) -> None:
        """End all steps that have begun since: a checkpoint ends what it computes again by an error."""
        del self._running[depth:]
        self._mark(self._running[-1])

    # -- forward

    def _step_of(self, path: str, what: str, is_always_told: bool) -> _Step:
        phase = RECOMPUTED if self._is_backward else FORWARD
        name = path or self._title
        count = self._calls[name, phase]
        self._calls[name, phase] += 1
        return _Step(f"{name}({count})" if count else name, what, phase, is_always_told)

    def _enter(self, call: OperatorCall) -> None:
        assert call.module is not None
        self._entered.append((len(self._running), _nodes(call.inputs)))
        self._push(self._step_of(call.path, type(call.module).__name__, call.module in self._leaves))

    def _leave(self, call: OperatorCall) -> None:
        depth, inputs = self._entered.pop()
        self._claim_nodes(self._running[depth], call.outputs, inputs)
        self._return_to(depth)

    def function(self, call: OperatorCall) -> None:
        """A function, or a method of a FloatFunctional, has run in the code of a module."""
        if call.function is None and not call.method:
            return
        running = self._running[-1]
        if running.is_always_told or not self._steps or not self._entered:
            return
        title = f"{call.path}[{call.method or call.operator}]"
        self._steps[-1] = self._step_of(title, call.method or call.operator, True)
        self._claim_nodes(self._steps[-1], call.outputs, _nodes(call.inputs))
        self._mark(running)

    # -- backward

    def _claim_nodes(self, step: _Step, outputs: Sequence[Tensor], stops: list[Any]) -> None:
        """Let nodes between inputs and outputs that nobody has claimed tell of the step when they run."""
        step = _Step(step.name, step.type, BACKWARD, True)
        pending, seen = _nodes(outputs), set(stops)
        while pending:
            node = pending.pop()
            if node in seen or self._claim in node.metadata:
                continue
            seen.add(node)
            node.metadata[self._claim] = True
            self._handles.append(node.register_prehook(lambda gradients, step=step: self._enter_node(step)))
            self._handles.append(node.register_hook(lambda results, gradients: self._leave_node()))
            pending += [following for following, _ in node.next_functions if following is not None]

    def _enter_node(self, step: _Step) -> None:
        self._depths.append(len(self._running))
        self._push(step)

    def _leave_node(self) -> None:
        depth = self._depths.pop()
        while self._entered and self._entered[-1][0] >= depth:
            self._entered.pop()
        self._return_to(depth)

    # -- rows

    def rows(self) -> list[MemoryRow]:
        """What the meter read, step by step; the nodes of one module that follow each other are one row."""
        readings = self._meter.readings
        found: list[MemoryRow] = []
        last: _Step | None = None
        for step, begin, end in zip(self._steps, readings, readings[1:], strict=False):
            row = MemoryRow(step.name, step.type, step.phase, begin.allocated, end.allocated, end.peak)
            if step.phase == BACKWARD and step is not _AUTOGRAD and last is not None and last.name == step.name:
                found[-1] = replace(found[-1], after=row.after, peak=max(found[-1].peak, row.peak))
            elif step.is_always_told or row.peak > row.before:
                found.append(row)
                last = step if step.phase == BACKWARD else None
        return found


def _down_to(model: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> tuple[dict[str, nn.Module], set[nn.Module]]:
    """The modules that are not inside a chosen one, by path, and the chosen ones."""
    modules: dict[str, nn.Module] = {}
    chosen: set[nn.Module] = set()
    inside: str | None = None
    for path, module in model.named_modules():  # what is inside a module follows it
        if inside is not None and path.startswith(inside):
            continue
        modules[path] = module
        if is_chosen(module):
            chosen.add(module)
            inside = f"{path}." if path else ""
    return modules, chosen


def _nodes(tensors: Sequence[Tensor]) -> list[Any]:
    """The nodes of autograd that gave tensors; leaves have the one that takes their gradient."""
    found = []
    for x in tensors:
        if x.requires_grad:
            found.append(x.grad_fn if x.grad_fn is not None else torch.autograd.graph.get_gradient_edge(x).node)
    return found


def _size(count: int) -> str:
    if abs(count) < _MIB:
        return f"{count / 1024:.2f} KiB"
    return f"{count / _MIB:.2f} MiB"


def _summary(rows: Sequence[MemoryRow], held: int) -> str:
    if not rows:
        return f"The model ran without a step that takes memory; {_size(held)} were held before."
    highest = max(rows, key=lambda row: row.peak)
    backward = "" if any(row.phase == BACKWARD for row in rows) else " Nothing has a gradient, so there is no backward."
    return (
        f"Peak: {_size(highest.peak)} in `{highest.name}` ({highest.phase}), {_size(held)} of them before the run."
        f"{backward}"
    )


def _page(rows: Sequence[MemoryRow], held: int, device: torch.device) -> str:
    labels = [f"{i} {row.name}, {row.phase}" for i, row in enumerate(rows)]
    after = [row.after / _MIB for row in rows]
    peak = [row.peak / _MIB for row in rows]
    curves = [
        Curve("allocated afterwards, MiB", after, [f"{n}: {v:.3f} MiB" for n, v in zip(labels, after, strict=True)]),
        Curve("peak, MiB", peak, [f"{n}: peak {v:.3f} MiB" for n, v in zip(labels, peak, strict=True)]),
    ]
    sizes = [[_size(v) for v in (row.before, row.after, row.change, row.peak)] for row in rows]
    table = Table(
        ("Index", "Module Name", "Module Type", "Phase", "Before", "After", "Change", "Peak"),
        [[i, row.name, row.type, row.phase, *cells] for i, (row, cells) in enumerate(zip(rows, sizes, strict=True))],
    )
    summary = f"<p>{html.escape(_summary(rows, held))}</p>"
    return page(f"Memory on {device}", summary, chart(curves, "steps of forward and backward"), table.html())


show_at("utils.quant_profiler", show_cuda_memory_consumption, MemoryRow)
