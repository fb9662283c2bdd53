"""Record a converted model as a program."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from horizon_plugin_pytorch.capture.plain_state import PlainState
from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.fake_quant.route import written_route
from horizon_plugin_pytorch.in_place import counting_writes
from horizon_plugin_pytorch.nested import fresh, located, map_tensors, tensors_of
from horizon_plugin_pytorch.program.builder import Builder, drop_unread
from horizon_plugin_pytorch.program.memory import memory_of, plain
from horizon_plugin_pytorch.program.note import Note, Quantization, Value, note_of, set_note
from horizon_plugin_pytorch.program.open_sizes import first_difference, with_any_count
from horizon_plugin_pytorch.program.place import Places
from horizon_plugin_pytorch.program.program import Program
from horizon_plugin_pytorch.program.recorder import ProgramRecorder
from horizon_plugin_pytorch.program.script import ScriptSteps
from horizon_plugin_pytorch.program.structure import with_slots
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import argument_names, positional_arguments


def record_program(model: nn.Module, example_inputs: Any, takes_real: bool = False) -> Program:
    """What a converted model computes on inputs of these shapes, as a graph of `horizon::` and aten operators.

    The model runs in eval mode, and again if it keeps results: it must not read what an earlier run has computed. What
    does not depend on the inputs is a constant. Writes in place are recorded as new values.

    Args:
        model: the result of `convert_fx` or `convert`.
        example_inputs: those of its forward, as `prepare` takes them.
        takes_real: record float and prepared models too, of which a program has real values. That of a prepared model
            is its training route, with the scales that it has now: ``horizon::fake_quantize`` where it rounds.

    Raises:
        ExportError: the model keeps a tensor from one forward to the next, reads numbers out of computed tensors, or
            computes with how many values `nonzero` or `rle` found in the example.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> data = torch.randn(1, 3, 4, 4)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)), {"": get_default_qconfig()})
    >>> _ = qat(data)
    >>> quantized = convert_fx(qat)
    >>> program = record_program(quantized, data)
    >>> [node.name for node in program.operators]
    ['quant_quantize', 'module_conv', 'dequant_dequantize']
    >>> torch.equal(program(data), quantized(data))
    True
    """
    return with_any_count(lambda: record_run(model, example_inputs, takes_real), first_difference)


def record_run(model: nn.Module, example_inputs: Any, takes_real: bool = False) -> Program:
    """The same of these inputs only: how many values `nonzero` or `rle` finds in them may be part of it."""
    with counting_writes():
        args = map_tensors(lambda x: x.detach().clone(), positional_arguments(model, example_inputs))
    names = argument_names(model, example_inputs)
    paths = tuple((names[path[0]], *path[1:]) for path, _ in located(args, spells_keys=True))
    state = PlainState(model)
    # under `torch.inference_mode` torch would show functions of several operators, such as conv2d, as one
    with counting_writes(), torch.no_grad(), _eval_mode(model), written_route() if takes_real else nullcontext():
        program = _record(model, args, paths, takes_real)
    changes = state.changes()
    if changes:
        warn(
            f"`{type(model).__name__}`: its forward changes {listed(f'`{path}`' for path in changes)}, of which the "
            "recorded program, and a file that is made of it, has the value of this one run for ever. If what it "
            "computes depends on it, make it an input of the model.",
            QuantizationWarning,
        )
    return program


def _record(model: nn.Module, args: tuple, paths: tuple[tuple[Any, ...], ...], takes_real: bool) -> Program:
    program, made = _one_run(model, args, paths, takes_real)
    inputs = {memory_of(x) for x in tensors_of(args)}
    kept = _alive(made) - inputs
    if kept:
        gc.collect()  # an exception that was caught keeps the frames that it passed
        kept = _alive(made) - inputs
    if kept:  # somebody keeps results; does the next forward read them?
        program, _ = _one_run(model, args, paths, takes_real, kept)
    return program


def _alive(made: dict[Hashable, StorageWeakRef]) -> frozenset[Hashable]:
    return frozenset(memory for memory, storage in made.items() if not storage.expired())


def _one_run(
    model: nn.Module,
    args: tuple,
    paths: tuple[tuple[Any, ...], ...],
    takes_real: bool,
    kept: frozenset[Hashable] = frozenset(),
) -> tuple[Program, dict[Hashable, StorageWeakRef]]:
    """Record one forward; the program, and the memory that holds data of this forward."""
    builder = Builder()
    builder.name_constants({**dict(model.named_parameters()), **dict(model.named_buffers())})
    for i, x in enumerate(tensors_of(args)):
        builder.add_input(x, f"input_{i}")
    places = model.places if isinstance(model, ScriptSteps) else Places(model)
    recorder = ProgramRecorder(builder, places, kept, takes_real)
    with recorder, recorder.formats():
        outputs = model(*fresh(args))
    if recorder.reads is not None:
        raise ExportError(
            f"`{type(model).__name__}` keeps a tensor that it computes and reads it in the next forward"
            f"{f' (line {recorder.reads})' if recorder.reads else ''}; the file would have it as a constant. Make the "
            "state an input and an output of the model."
        )
    if recorder.refusals:
        raise recorder.refusals[0]
    if recorder.drawn and not kept:
        warn(
            f"`{type(model).__name__}` draws random numbers {listed(recorder.drawn)}. The recorded program, and a file "
            "that is made of it, has those of this one run for ever. Make them an input of the model.",
            QuantizationWarning,
        )
    program = _finished(model, builder, paths, outputs)
    return program, recorder.release()


def _finished(model: nn.Module, builder: Builder, paths: tuple[tuple[Any, ...], ...], outputs: Any) -> Program:
    results = tensors_of(outputs)
    builder.place = ("", "")
    nodes = []
    for i, x in enumerate(results):
        if isinstance(x, QTensor) and x.is_integer:
            builder.see(x)
        nodes.append(builder.node_of(x, f"output_{i}"))
    values = tuple(
        Value.of(plain(x), Quantization.of(x) if isinstance(x, QTensor) and x.is_integer else None) for x in results
    )
    set_note(builder.graph.output(tuple(nodes)), Note())
    constants = drop_unread(builder.graph, builder.constants.tensors)
    return Program(
        type(model).__name__, builder.graph, constants, paths, with_slots(outputs), values, _classes(model, builder)
    )


def _classes(model: nn.Module, builder: Builder) -> dict[str, str]:
    """The class of each module that a node names, and of those around it."""
    paths = {note_of(node).path for node in builder.graph.nodes}
    around = {path.rsplit(".", count)[0] for path in paths for count in range(path.count(".") + 1)} | {""}
    return {path: type(module).__name__ for path, module in model.named_modules() if path in around}


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Let a model be in eval mode, and each of its modules in its own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
