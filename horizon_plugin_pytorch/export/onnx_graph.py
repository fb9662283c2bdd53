"""A small builder for ONNX graphs; the `onnx` package is imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.fixed_point.accumulator import Geometry

OPSET = 17
IR_VERSION = 8
TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11,
}  # fmt: skip


def _type_of(dtype: torch.dtype) -> int:
    """ONNX's number of an element type."""
    if dtype not in TYPES:
        raise ExportError(f"{dtype} has no form in the file; compute in float32 there, or leave it out of the model.")
    return TYPES[dtype]


@dataclass(frozen=True)
class Site:
    """What a lowering may need to know of a call: its name, shapes of its first input and of its outputs, and these."""

    name: str
    input_shape: list[int]
    output_shape: list[int]
    outputs: list[Tensor]
    input_dtype: torch.dtype = torch.float32
    inputs: tuple[Tensor, ...] = ()

    @property
    def rank(self) -> int:
        """Axes of the first input."""
        return len(self.input_shape)


class OnnxGraph:
    """Nodes and constants of a graph under construction."""

    def __init__(self, opset: int = OPSET, reserved: Iterable[str] = ()) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._count = 0
        self._taken = set(reserved)
        self._constants: dict[tuple, str] = {}

    def fresh(self, hint: str) -> str:
        """A name that no other value has."""
        while True:
            self._count += 1
            name = f"{hint}_{self._count}"
            if name not in self._taken:
                return name

    def constant(self, value: Any, dtype: torch.dtype | None = None, hint: str = "constant") -> str:
        """A constant tensor; equal constants share one initializer."""
        from onnx import numpy_helper

        # A Python number goes straight to its type: by way of float32 it would be rounded.
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        tensor = tensor.to(dtype) if dtype is not None else tensor
        array = np.ascontiguousarray(tensor.contiguous().numpy()).reshape(tuple(tensor.shape))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh(hint)
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def compact(self, value: Tensor, hint: str = "weight") -> str:
        """A constant of integers in float32, stored in the smallest integer type that holds them."""
        for storage in (torch.int8, torch.int16, torch.int32):
            info = torch.iinfo(storage)
            if value.numel() == 0 or (float(value.min()) >= info.min and float(value.max()) <= info.max):
                return self.cast(self.constant(value, storage, hint), value.dtype)
        return self.constant(value, hint=hint)

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; the name of its output, or a list of names."""
        from onnx import helper

        names = [self.fresh(operator.lower()) for _ in range(outputs)]
        attributes = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=names[0], **attributes))
        return names[0] if outputs == 1 else names

    def cast(self, x: str, dtype: torch.dtype) -> str:
        """Change the element type."""
        return self.node("Cast", x, to=_type_of(dtype))

    def reshape(self, x: str, shape: Any) -> str:
        """Give a tensor another shape."""
        return self.node("Reshape", x, self.constant([int(s) for s in shape], torch.int64, "shape"))

    def clip(self, x: str, low: float, high: float, dtype: torch.dtype = torch.float32) -> str:
        """Clamp."""
        return self.node("Clip", x, self.constant(float(low), dtype), self.constant(float(high), dtype))

    def scalar(self, value: float, dtype: torch.dtype) -> str:
        """A constant of one number."""
        return self.constant(float(value), dtype)

    def apart_from_pad(self, x: str) -> str:
        """The same value, so that no optimizer makes a `Pad` before it part of a pooling after it.

        ONNX Runtime does so from its basic level on, and pads with what the pooling pads with: not with zeros, if it
        takes the largest value.
        """
        is_padded = any(node.op_type == "Pad" and x in node.output for node in self.nodes)
        return self.node("Max", x, self.scalar(-np.inf, torch.float32)) if is_padded else x

    def axes(self, operator: str, x: str, axes: list[int], keepdim: bool) -> str:
        """A reduction over axes, in the form that the opset wants."""
        as_input = self.opset >= 18 or operator == "ReduceSum"
        if as_input:
            return self.node(operator, x, self.constant(axes, torch.int64, "axes"), keepdims=int(keepdim))
        return self.node(operator, x, axes=axes, keepdims=int(keepdim))

    def conv(self, x: str, weight: str, bias: str | None, geometry: Geometry) -> str:
        """A convolution over one to three axes."""
        if geometry.is_transposed:
            return self._conv_transpose(x, weight, bias, geometry)
        return self.node(
            "Conv", *([x, weight] if bias is None else [x, weight, bias]), strides=list(geometry.stride),
            pads=list(geometry.padding) * 2, dilations=list(geometry.dilation), group=geometry.groups,
        )  # fmt: skip

    def _conv_transpose(self, x: str, weight: str, bias: str | None, geometry: Geometry) -> str:
        """A transposed convolution.

        Output padding crops less at the end. Where there is less to crop than that, ONNX has an attribute, which ONNX
        Runtime takes below the stride; beyond it, rows that no input reaches are appended.
        """
        ends = [p - o for p, o in zip(geometry.padding, geometry.output_padding, strict=True)]
        missing = [max(-e, 0) for e in ends]
        is_appended = any(m >= s for m, s in zip(missing, geometry.stride, strict=True))
        inputs = [x, weight] if bias is None or is_appended else [x, weight, bias]
        out = self.node(
            "ConvTranspose", *inputs, strides=list(geometry.stride), dilations=list(geometry.dilation),
            group=geometry.groups, pads=[*geometry.padding, *(max(e, 0) for e in ends)],
            output_padding=[0] * len(missing) if is_appended else missing,
        )  # fmt: skip
        if not is_appended:
            return out
        pads = self.constant([0] * (4 + len(missing)) + missing, torch.int64, "pads")
        out = self.node("Pad", out, pads, self.scalar(0.0, torch.float32))
        return out if bias is None else self.node("Add", out, self.reshape(bias, [1, *geometry.spread]))

    def _of_open_shape(self) -> set[str]:
        """Values whose shapes may depend on numbers: positions that `NonZero` finds, and what comes of them."""
        found: set[str] = set()
        for node in self.nodes:
            if node.op_type == "NonZero" or not found.isdisjoint(node.input):
                found.update(node.output)
        return found

    def model(self, inputs: list[tuple[str, Tensor]], outputs: list[tuple[str, Tensor]], name: str) -> Any:
        """The finished, checked ONNX model."""
        import onnx
        from onnx import helper

        from horizon_plugin_pytorch._version import __version__

        open_names = self._of_open_shape()

        def info(pairs: list[tuple[str, Tensor]]) -> list[Any]:
            shapes = [[None] * t.dim() if name in open_names else list(t.shape) for name, t in pairs]
            return [
                helper.make_tensor_value_info(name, _type_of(t.dtype), shape)
                for (name, t), shape in zip(pairs, shapes, strict=True)
            ]

        graph = helper.make_graph(self.nodes, name, info(inputs), info(outputs), self.initializers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            producer_name="horizon_plugin_pytorch",
            producer_version=__version__,
        )
        model.ir_version = IR_VERSION
        try:
            onnx.checker.check_model(model, full_check=True)
        except Exception as error:  # the checker's own exceptions differ between versions of onnx
            raise ExportError(
                "the model mixes types or shapes in a way that its ONNX form does not allow, most likely in float code "
                f"after the DeQuantStub; leave that out of the exported model. The checker says: {error}"
            ) from error
        return model
