"""TorchScript files that know the version of this package that wrote them, and on which device they run."""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning, warn
from horizon_plugin_pytorch.files import write_atomically

__all__ = ["get_version_from_scriptmodule", "load", "save", "save_with_version", "to_device"]

_NAME = "horizon_plugin_pytorch_version"
_UNKNOWN = re.compile(r"Unknown builtin op: ([\w:]+)")


def save(m: torch.jit.ScriptModule, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
    """Write a TorchScript module as `torch.jit.save` does, with the version of this package.

    The version is an attribute of the module, so it is there whoever loads the file, and a further file inside.

    Args:
        m: what `torch.jit.trace` or `torch.jit.script` gives.
        f: a path, or a binary file object.
        _extra_files: further files to put inside: names and contents.

    >>> file = io.BytesIO()
    >>> save(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)), file, {"note": "of a ReLU"})
    >>> _ = file.seek(0)
    >>> extra = {"note": ""}
    >>> load(file, _extra_files=extra)(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    >>> extra["note"]
    b'of a ReLU'
    """
    _write(m, f, _extra_files, "jit.save")


def save_with_version(m: torch.jit.ScriptModule, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
    """The older name of `jit.save`.

    >>> file = io.BytesIO()
    >>> save_with_version(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)), file)
    >>> _ = file.seek(0)
    >>> get_version_from_scriptmodule(torch.jit.load(file)) == __version__
    True
    """
    _write(m, f, _extra_files, "save_with_version")


def load(f: Any, map_location: Any = None, _extra_files: dict[str, Any] | None = None) -> torch.jit.ScriptModule:
    """Read a TorchScript module as `torch.jit.load` does, and warn if another version of this package wrote it.

    Args:
        f: a path, or a binary file object.
        map_location: the device for parameters and buffers; devices that the graph names are for `to_device`.
        _extra_files: names of further files inside; their contents are put there.

    Raises:
        ExportError: the file is none of TorchScript, or calls an operator that is not registered.
    """
    contents, wanted = _contents(f), dict.fromkeys(_extra_files or {}, "")
    try:
        with quiet():
            module = torch.jit.load(io.BytesIO(contents), map_location, _extra_files=wanted)
    except Exception as error:  # of whatever the bytes mean to torch
        raise _load_error(f, contents, error) from error
    (_extra_files or {}).update(wanted)
    _tell_version(get_version_from_scriptmodule(module), f)
    return module


def get_version_from_scriptmodule(m: torch.jit.ScriptModule) -> str | None:
    """The version of this package that a TorchScript module was saved with; None if none is known.

    >>> get_version_from_scriptmodule(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1))) is None
    True
    """
    require_script(m, "get_version_from_scriptmodule")
    return m._c.getattr(_NAME) if m._c.hasattr(_NAME) else None


def to_device(script_module: torch.jit.ScriptModule, device: Any) -> torch.jit.ScriptModule:
    """The same TorchScript module on another device.

    ``script_module.to(device)`` moves parameters and buffers only. Here the devices that the graph names
    (``torch.ones(..., device=x.device)`` was written down as ``"cpu"``) and the constants that it holds are replaced
    too. The module that is given stays as it is.

    Args:
        script_module: what `torch.jit.trace` or `torch.jit.load` gives.
        device: where it is to run. On ``meta`` tensors have no numbers, and those that the graph held are attributes of
            its modules.

    Raises:
        ExportError: it is on ``meta`` and has no numbers to move.

    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.ones(2, device=x.device)
    >>> script = to_device(torch.jit.trace(Net(), torch.zeros(2)), "meta")
    >>> script(torch.zeros(2, device="meta")).device
    device(type='meta')
    """
    require_script(script_module, "to_device")
    device = torch.device(device)
    _require_numbers(script_module, device)
    file = io.BytesIO()
    with quiet():
        torch.jit.save(script_module, file)
        file.seek(0)
        # With its parameters, buffers and constants; torch compares constants, which it cannot on `meta`.
        moved = torch.jit.load(file, map_location=None if device.type == "meta" else device)
    if device.type == "meta":
        _forget_numbers(moved)
    for graph in _graphs(moved):
        _replace_devices(graph, device)
    return moved


def _graphs(script: Any) -> Iterator[torch._C.Graph]:
    """The graphs of all methods of a module and of those inside of it."""
    for module in script.modules():
        for name in module._c._method_names():
            yield module._c._get_method(name).graph


def _require_numbers(script: torch.jit.ScriptModule, device: torch.device) -> None:
    if device.type != "meta" and any(x.is_meta for x in (*script.parameters(), *script.buffers())):
        raise ExportError(
            f"to_device: the tensors of this module are on `meta` and have no numbers, so that none can be moved to "
            f"`{device}`. Move the module that it was made of."
        )


def _forget_numbers(script: Any) -> None:
    """Put all tensors on `meta`, and those that graphs hold into attributes: torch compares what is in a graph.

    Modules of one type have their methods in common, and each has attributes of its own.
    """
    constants: dict[str, dict[str, tuple[Any, Any]]] = {}  # of each type
    for module in script.modules():
        for name, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            module._c.setattr(name, x.detach().to("meta").requires_grad_(x.requires_grad))
        kind = module._c._type().qualified_name()
        if kind not in constants:
            constants[kind] = _taken_out([module._c._get_method(name).graph for name in module._c._method_names()])
        for name, (value_type, value) in constants[kind].items():
            module._c._register_attribute(name, value_type, pytree.tree_map(lambda x: x.to("meta"), value))


def _taken_out(graphs: list[Any]) -> dict[str, tuple[Any, Any]]:
    """Replace tensors in graphs, and lists of them, by attributes of the module; types and values by their names."""
    found: dict[str, tuple[Any, Any]] = {}
    for graph in graphs:
        for node in graph.findAllNodes("prim::Constant", recurse=True):
            value_type = node.output().type()
            value = node.output().toIValue()
            is_number = isinstance(value, torch.Tensor) and value.dim() == 0  # for all devices: sizes are such
            if value is None or is_number or value_type.str() not in ("Tensor", "Tensor[]"):
                continue
            name = f"_graph_constant_{len(found)}"
            found[name] = value_type, value
            reader = graph.create("prim::GetAttr", [next(graph.inputs())], 1)
            reader.s_("name", name)
            reader.insertBefore(node)
            reader.output().setType(value_type)
            node.output().replaceAllUsesWith(reader.output())
            node.destroy()
    return found


def require_script(m: Any, who: str) -> None:
    """Insist on a TorchScript module."""
    if not isinstance(m, torch.jit.ScriptModule):
        raise TypeError(
            f"{who} takes a TorchScript module, as `torch.jit.trace` and `torch.jit.load` give it, got "
            f"{type(m).__name__}."
        )


def _write(m: torch.jit.ScriptModule, f: Any, extra_files: dict[str, Any] | None, who: str) -> None:
    require_script(m, who)
    if m._c.hasattr(_NAME):
        m._c.setattr(_NAME, __version__)
    else:
        m._c._register_attribute(_NAME, torch._C.StringType.get(), __version__)
    data = io.BytesIO()
    try:
        with quiet():
            torch.jit.save(m, data, _extra_files={**(extra_files or {}), _NAME: __version__})
    except RuntimeError as error:
        if "python operator" not in str(error).lower() and "PythonOp" not in str(error):
            raise
        raise ExportError(
            f"{who}: the traced model calls Python, which a file cannot hold ({str(error).splitlines()[0]}). It comes "
            "of an `autograd.Function` in the forward: let it run as ordinary operators while `torch.jit.is_tracing()`."
        ) from error
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data.getvalue(), os.fspath(f))
    else:
        f.write(data.getvalue())


def _contents(f: Any) -> bytes:
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as file:
            return file.read()
    return f.read()


def _load_error(f: Any, contents: bytes, error: Exception) -> ExportError:
    """What a failed load means."""
    name = _named(f)
    unknown = _UNKNOWN.search(str(error))
    if unknown is not None:
        return ExportError(
            f"{name} calls the operator `{unknown[1]}`, which is not registered: import the package that has it (this "
            f"one is version {__version__}), or trace the model again with this version."
        )
    if not zipfile.is_zipfile(io.BytesIO(contents)):
        return ExportError(
            f"{name} is no TorchScript file, which `torch.jit.save` and `jit.save` write: {_first(error)}"
        )
    if "constants.pkl" in str(error):
        return ExportError(
            f"{name} is no TorchScript file but one of `torch.save`, such as a state dict: load it with `torch.load`."
        )
    return ExportError(f"{name} cannot be read as TorchScript: {_first(error)}")


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _named(f: Any) -> str:
    return f"`{os.fspath(f)}`" if isinstance(f, (str, os.PathLike)) else "the file"


def _tell_version(version: str | None, f: Any) -> None:
    if version == __version__:
        return
    by = "without a version, by `torch.jit.save` or another package" if version is None else f"by version {version}"
    warn(
        f"{_named(f)} was written {by}; this is version {__version__}. Operators may compute other integers: compare "
        "with `compare_script_models`, or trace the model again and write it with `jit.save`.",
        QuantizationWarning,
    )


def _replace_devices(graph: torch._C.Graph, device: torch.device) -> None:
    for node in graph.findAllNodes("prim::Constant", recurse=True):  # type: ignore[attr-defined]
        if node.output().type().kind() == "DeviceObjType":
            node.s_("value", str(device))


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings that TorchScript is deprecated: these files are what deployment asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message=r".*torch\.jit.*(deprecated|not supported)", category=Warning)
        yield


show_at("utils.serialization", save_with_version, get_version_from_scriptmodule)
show_at("jit", save, load, to_device)
