"""Calls of the guides around the vendor's compiler: what can be done without it, and errors for what cannot."""

from __future__ import annotations

import html
import os
import webbrowser
from pathlib import Path
from typing import Any, NoReturn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, warn
from horizon_plugin_pytorch.export.integer_graph import integer_graph, program_of_model
from horizon_plugin_pytorch.export.layer_costs import Cost, layer_costs
from horizon_plugin_pytorch.export.picture import picture_of
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.march import as_march
from horizon_plugin_pytorch.program.record import record_run
from horizon_plugin_pytorch.tables import Table

__all__ = ["compile_model", "export_hbir", "perf_model", "visualize_model"]

_STYLE = "body{font-family:sans-serif}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:3px 8px}"
_NOT_A_LATENCY = "These are counts, not a latency: only the vendor's compiler and the chip know how long they take."


def compile_model(
    module: Any,
    example_inputs: Any,
    hbm: Any,
    march: Any = None,
    name: str | None = None,
    input_source: Any = "ddr",
    input_layout: Any = None,
    output_layout: Any = "NCHW",
    opt: str = "O2",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    debug: bool = True,
    extra_args: Any = None,
) -> NoReturn:
    """Compile a model for the chip; the vendor's compiler does that.

    Raises:
        ExportError: always; it says which file to hand over instead.
    """
    raise ExportError(
        f"compile_model needs the vendor's compiler (hbdk) to write {hbm!r}, and it is not part of this project. Hand "
        'over the integer graph: `export_hbir(module, example_inputs, "model.onnx")` writes it as standard ONNX, with '
        "the integers that the chip is to give; `check_model` says whether it keeps the chip's published limits."
    )


def export_hbir(module: Any, example_inputs: Any, hbir: Any, march: Any = None) -> tuple[list[str], list[str]]:
    """Write the integer graph of a converted model, with flat inputs and outputs.

    The file is standard ONNX, whatever it is called: the format of the vendor's compiler is not public.

    Args:
        module: a converted model, or what `torch.jit.trace` gives for it.
        example_inputs: its arguments; the graph is for their shapes.
        hbir: a path, or a binary file object.
        march: the chip; its name is checked, and changes nothing: the model has its integers.

    Returns:
        The names of the inputs, and those of the outputs.

    Raises:
        ExportError: the model is not converted, or cannot be written; there is no file then.
    """
    _check_march(march)
    program = program_of_model(module, example_inputs, "export_hbir")
    graph = integer_graph(program, "forward", march=None if march is None else str(as_march(march)))
    graph.save(hbir)
    if isinstance(hbir, (str, os.PathLike)) and not os.fspath(hbir).endswith(".onnx"):
        name = os.fspath(hbir)
        warn(f"export_hbir: `{name}` is an ONNX file; call it .onnx, so that tools know.", QuantizationWarning)
    return graph.functions[0].inputs, graph.functions[0].outputs


def perf_model(
    module: Any,
    example_inputs: Any,
    march: Any = None,
    out_dir: str | os.PathLike = ".",
    name: str | None = None,
    hbm: Any = None,
    input_source: Any = "ddr",
    input_layout: Any = None,
    output_layout: Any = "NCHW",
    opt: str = "O3",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    layer_details: bool = False,
    extra_args: Any = None,
) -> dict[str, Any]:
    """What can be known of the cost of a converted model without the chip: operations, parameters, bytes.

    It is not a latency, and there are no frames per second: those need the vendor's compiler. A page with the cost of
    each operator is written to ``<name>.html``.

    Args:
        module: a converted model, or what `torch.jit.trace` gives for it.
        example_inputs: its arguments, in the sizes of the deployment.
        march: the chip; its name is checked.
        out_dir: where to write the page.
        name: of the page; None takes the model's class.
        layer_details: also give and print a row for each operator.
        others: options of the compiler; they have no effect, and warn if they are not the defaults.

    Returns:
        ``{"summary": {...}}``, and ``"layer details"`` if they are asked for.
    """
    _check_march(march)
    options = {
        "hbm": hbm is not None, "input_source": input_source != "ddr", "input_layout": input_layout is not None,
        "output_layout": output_layout != "NCHW", "opt": opt != "O3", "balance_factor": balance_factor != 2,
        "extra_args": extra_args is not None,
    }  # fmt: skip
    given = [option for option, is_given in options.items() if is_given]
    if given:
        warn(
            f"perf_model: {', '.join(given)} changes nothing: it is for the vendor's compiler, which is not run here.",
            QuantizationWarning,
        )
    program = program_of_model(module, example_inputs, "perf_model", record_run)
    costs = layer_costs(program, module)
    summary = {
        "BPU OPs": sum(cost.operations for cost in costs),
        "parameters": sum(cost.parameters for cost in costs),
        "weight bytes": sum(cost.weight_bytes for cost in costs),
        "bytes read by operators": sum(cost.read for cost in costs),
        "bytes written by operators": sum(cost.written for cost in costs),
        "operators": len(costs),
        "note": _NOT_A_LATENCY,
    }
    table = Table(
        ["layer", "operator", "format", "ops", "parameters", "weight bytes", "bytes read", "bytes written"],
        [_row(cost) for cost in costs],
    )
    title = name or program.name
    path = os.path.join(out_dir, f"{title}.html")
    write_atomically(_page(title, summary, table).encode(), path)
    print(Table(["", ""], [[key, f"{value:,}"] for key, value in summary.items() if isinstance(value, int)]).text())
    if layer_details:
        print(table.text())
    print(f"{_NOT_A_LATENCY}\n{path}")
    return {"summary": summary, **({"layer details": [list(row) for row in table.rows]} if layer_details else {})}


def visualize_model(
    module: Any, example_inputs: Any, march: Any = None, save_path: str | os.PathLike | None = None, show: bool = True
) -> str:
    """Draw the integer graph: operators with number format, scale, shape, module and line.

    Args:
        module: a converted model, or what `torch.jit.trace` gives for it (scales are not known of a script).
        example_inputs: its arguments.
        march: the chip; its name is checked.
        save_path: where to write the picture, an SVG; None is ``<class of the model>.svg``.
        show: open it in a browser, if there is one.

    Returns:
        Where the picture is.
    """
    _check_march(march)
    program = program_of_model(module, example_inputs, "visualize_model", record_run)
    path = os.fspath(save_path if save_path is not None else f"{program.name}.svg")
    path = path if path.endswith(".svg") else f"{path}.svg"
    title = f"{program.name}: {len(program.operators)} operators"
    write_atomically(picture_of(program, title).encode(), path)
    if show:
        webbrowser.open(Path(path).resolve().as_uri())
    print(path)
    return path


def _row(cost: Cost) -> list[Any]:
    return [
        cost.name, cost.operator, cost.format, cost.operations, cost.parameters, cost.weight_bytes, cost.read,
        cost.written,
    ]  # fmt: skip


def _page(title: str, summary: dict[str, Any], table: Table) -> str:
    shown = [[key, f"{value:,}" if isinstance(value, int) else value] for key, value in summary.items()]
    facts = Table(["", ""], shown)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n<p>{html.escape(_NOT_A_LATENCY)}</p>\n"
        f"{facts.html()}\n{table.html()}\n</body></html>\n"
    )


def _check_march(march: Any) -> None:
    if march is not None:
        as_march(march)
