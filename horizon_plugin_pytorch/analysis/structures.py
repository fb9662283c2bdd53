"""Nested inputs and outputs: what they look like, and changing what is in them.

No document defines these functions; their names and their uses say what they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.nested import map_instances
from horizon_plugin_pytorch.qtensor import QTensor

__all__ = ["pytree_convert", "tensor_struct_repr"]


def tensor_struct_repr(data: Any) -> str:
    """A nested structure as text, with shape and type in place of a tensor's numbers.

    >>> import torch
    >>> print(tensor_struct_repr({"image": torch.zeros(1, 3, 8, 8), "sizes": [(8, 8), None]}))
    {'image': Tensor(shape=(1, 3, 8, 8), dtype=torch.float32, device=cpu), 'sizes': [(8, 8), None]}
    """
    if isinstance(data, Tensor):
        shown = f"shape={tuple(data.shape)}, dtype={data.dtype}, device={data.device}"
        if isinstance(data, QTensor):
            scales = data.q_scale()
            scale = f"{float(scales):.7g}" if scales.numel() == 1 else f"{scales.numel()} channels"
            return f"QTensor({shown}, scale={scale})"
        return f"{type(data).__name__}({shown})"
    if isinstance(data, Mapping):
        body = ", ".join(f"{key!r}: {tensor_struct_repr(value)}" for key, value in data.items())
        return f"{{{body}}}" if type(data) is dict else f"{type(data).__name__}({{{body}}})"
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _named(data, [(field.name, getattr(data, field.name)) for field in dataclasses.fields(data)])
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return _named(data, list(zip(data._fields, data, strict=True)))
    if isinstance(data, (list, tuple)):
        body = ", ".join(map(tensor_struct_repr, data))
        return f"[{body}]" if isinstance(data, list) else f"({body}{',' if len(data) == 1 else ''})"
    return repr(data)


def _named(data: Any, fields: list[tuple[str, Any]]) -> str:
    return f"{type(data).__name__}({', '.join(f'{name}={tensor_struct_repr(value)}' for name, value in fields)})"


def pytree_convert(data: Any, target_type: type | tuple[type, ...], converter: Callable[[Any], Any]) -> Any:
    """The same structure with what `converter` makes of each instance of a type; the rest stays as it is.

    Args:
        data: anything: values, or tuples, lists, dicts, named tuples and dataclasses of them.
        target_type: what is converted; also a container, which is then given to `converter` as it is.
        converter: gives what takes its place.

    >>> import torch
    >>> pytree_convert({"x": [torch.ones(2), 3]}, torch.Tensor, lambda x: x.tolist())
    {'x': [[1.0, 1.0], 3]}
    """
    kinds = target_type if isinstance(target_type, tuple) else (target_type,)
    if not kinds or not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"pytree_convert(data, target_type, converter): {target_type!r} is no type.")
    if not callable(converter):
        raise TypeError(f"pytree_convert(data, target_type, converter): {converter!r} cannot be called.")
    return map_instances(converter, kinds, data)


show_at("utils.misc", tensor_struct_repr, pytree_convert)
