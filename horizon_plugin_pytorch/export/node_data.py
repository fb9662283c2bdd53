"""What the profiler measured, as node data of Google's Model Explorer: colours on the nodes of an exported file."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.profile.document import Document, ModelCall, read_document
from horizon_plugin_pytorch.analysis.profile.model_explorer import MEASURES, node_data
from horizon_plugin_pytorch.analysis.profile.profiler import JSON_FILE
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import ExportError

_WHO = "write_node_data"
_SCOPES = "pkg.torch.onnx.name_scopes"  # written by `Scope` in onnx_graph.py


@dataclass(frozen=True)
class NodeData:
    """What `write_node_data` wrote.

    Args:
        files: one for each measure: similarity, sqnr, error.
        nodes: how many operator nodes the file has.
        known: how many of them belong to an operator of the report.
    """

    files: tuple[str, ...]
    nodes: int
    known: int


def write_node_data(
    report: Document | str | os.PathLike, onnx_file: str | os.PathLike, out_dir: str | os.PathLike | None = None
) -> NodeData:
    """Write what the profiler found as node data of Model Explorer, for a file that was exported of one of its models.

    Open the ONNX file in Model Explorer (with its extension for ONNX), and one of
    ``model_explorer_<file>_similarity.json``, ``..._sqnr.json`` and ``..._error.json`` over it as node data. Results
    go by the names of the file's nodes: all nodes that an operator was written as have its number. Colours are those
    of the page's verdict where there is a limit, else they run from the best operator to the worst.

    Args:
        report: what `model_profiler` returned, its ``profiler.json``, or the folder of that.
        onnx_file: of the first or the second model of the report, written by this package: float, QAT or quantized.
        out_dir: the folder of the files; None is the folder of the ONNX file.

    Raises:
        ExportError: the report or the file cannot be read, or no node belongs to an operator of the report.

    >>> import json, tempfile, torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> from horizon_plugin_pytorch.utils.onnx_helper import export_to_onnx
    >>> from horizon_plugin_pytorch.utils.quant_profiler import model_profiler
    >>> set_march(March.BAYES)
    >>> net, x = QuantWrapper(torch.nn.ReLU()).eval(), torch.linspace(-1, 1, 8)
    >>> qat = prepare_qat_fx(net, {"": get_default_qconfig()}).eval()
    >>> _ = qat(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = model_profiler(net, qat, x, mode="FvsQ", out_dir=folder)  # doctest: +ELLIPSIS
    ...     export_to_onnx(net, x, f"{folder}/float.onnx")
    ...     written = write_node_data(found, f"{folder}/float.onnx")
    ...     print(json.loads(Path(written.files[1]).read_text())["QuantWrapper"]["results"].keys())
    Please check if these OPs qconfigs are expected...
    dict_keys(['module/Relu'])
    """
    document, path = _document(report), Path(onnx_file)
    name, nodes = _read_nodes(path)
    owners = max((operators_of(nodes, calls) for calls in (document.second_calls, document.first_calls)), key=_count)
    if not _count(owners):
        raise ExportError(
            f"{_WHO}: no node of {path.name} belongs to an operator of the report. Give a file that this package "
            "exported of one of the two models that were profiled; reports of earlier versions do not have what is "
            "needed, so profile again."
        )
    operators = {node.name: owner for node, owner in zip(nodes, owners, strict=True) if owner is not None}
    written = []
    for measure in MEASURES:
        text = node_data(document, measure, name, operators)
        target = f"model_explorer_{path.stem}_{measure}.json"
        written.append(write_report(text, path.parent if out_dir is None else out_dir, target, _WHO))
    return NodeData(tuple(written), len(nodes), _count(owners))


def _document(report: Document | str | os.PathLike) -> Document:
    if isinstance(report, Document):
        return report
    path = Path(report)
    path = path / JSON_FILE if path.is_dir() else path
    try:
        return read_document(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{_WHO}: {path} cannot be read as a report of the profiler: {error}") from error


@dataclass(frozen=True)
class FileNode:
    """A node of a file, and where it comes from.

    Args:
        name: of the node, which no other one has.
        path: the module that it was written for; for a function, the module whose forward calls it.
        line: of the user's code.
        label: the step of the program that it is a part of.
    """

    name: str
    path: str
    line: str
    label: str


def _read_nodes(path: Path) -> tuple[str, list[FileNode]]:
    """The name of the file's graph, and its nodes."""
    try:
        import onnx
    except ImportError as error:
        raise ExportError(f"{_WHO} reads files with `onnx`: pip install 'horizon-plugin-pytorch[onnx]'.") from error
    try:
        graph = onnx.load(os.fspath(path), load_external_data=False).graph
    except Exception as error:  # the file system's, or protobuf's
        raise ExportError(f"{_WHO}: {path} cannot be read as an ONNX file: {error}") from error
    return graph.name, [_file_node(node) for node in graph.node]


def _file_node(node: Any) -> FileNode:
    scopes = next((item.value for item in node.metadata_props if item.key == _SCOPES), "[]")
    try:
        parts = [str(part) for part in ast.literal_eval(scopes)]
    except (ValueError, SyntaxError):  # not written by us
        parts = []
    path, label = (parts[-2], parts[-1]) if len(parts) > 1 else ("", "")
    return FileNode(node.name or node.output[0], path, node.doc_string, label)


def operators_of(nodes: Sequence[FileNode], calls: Sequence[ModelCall]) -> list[int | None]:
    """The operator that each node is a part of, by its index in the report; None where it is not known for certain.

    Nodes and calls are in the order of the run. A node belongs to the innermost module that was called as an operator;
    else to a function that is called by its module at its line.
    """
    modules = {call.path for call in calls if not call.function}
    homes = [_home(node, modules) for node in nodes]
    called: dict[tuple[str, str], list[ModelCall]] = {}
    for call in calls:
        called.setdefault((call.path, call.line if call.function else "*"), []).append(call)
    members: dict[tuple[str, str], list[int]] = {}
    for index, home in enumerate(homes):
        members.setdefault(home, []).append(index)
    found: list[int | None] = [None] * len(nodes)
    for home, those in members.items():
        known = called.get(home, []) if nodes[those[0]].label else []
        for index, which in _shared_out(nodes, those, known):
            found[index] = known[which].operator
    return found


def _home(node: FileNode, modules: set[str]) -> tuple[str, str]:
    path = node.path
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return (path, "*") if path in modules else (node.path, node.line)


def _shared_out(
    nodes: Sequence[FileNode], those: Sequence[int], calls: Sequence[ModelCall]
) -> Iterable[tuple[int, int]]:
    """Nodes of one module, or of the functions of one line, with the position of the call that each belongs to."""
    if len(calls) < 2:
        return [(index, 0) for index in those] if calls else []
    runs = _runs(those)
    if not calls[0].function and len(runs) == len(calls):  # something else is called between them
        return [(index, which) for which, run in enumerate(runs) for index in run]
    labels = list(dict.fromkeys(nodes[index].label for index in those))
    if len(labels) % len(calls) == 0 and (len(labels) == len(calls) or not calls[0].function):
        each = len(labels) // len(calls)
        place = {label: at // each for at, label in enumerate(labels)}
        return [(index, place[nodes[index].label]) for index in those]
    place = {}
    for function in {call.function for call in calls if call.function}:
        same = [at for at, call in enumerate(calls) if call.function == function]
        named = [label for label in labels if _plain_label(label, nodes[those[0]].path) == function]
        if len(same) == len(named):
            place.update(zip(named, same, strict=True))
    return [(index, place[nodes[index].label]) for index in those if nodes[index].label in place]


def _plain_label(label: str, path: str) -> str:
    """``blocks_0_add_3`` of the module ``blocks.0`` is ``add``."""
    prefix = f"{path.replace('.', '_')}_" if path else ""
    return re.sub(r"_\d+$", "", label.removeprefix(prefix))


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _count(owners: Sequence[int | None]) -> int:
    return sum(owner is not None for owner in owners)


show_at("utils.quant_profiler", write_node_data)
