"""A small builder for ONNX graphs; the packages `onnx` and `onnx_ir` are imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.fixed_point.accumulator_plan import Geometry
from horizon_plugin_pytorch.program.note import Value

OPSET, FIRST_OPSET, LAST_OPSET = 17, 11, 21
_BYTE_ZERO = 128  # the zero point of bytes that stand for -128 to 127
_LARGE = 1 << 16  # numbers: larger constants are not kept for being asked for again
_LONG = 1 << 12  # entries: shorter tables are stored as they are
_LISTS = {"Unsqueeze": "axes", "Squeeze": "axes", "ReduceSum": "axes", "Split": "split"}  # inputs since opset 13
_OR_EQUAL = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}  # since opset 12
TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11,
}  # fmt: skip


def _type_of(dtype: torch.dtype) -> Any:
    """The element type as ONNX has it."""
    import onnx_ir as ir

    if dtype not in TYPES:
        raise ExportError(f"{dtype} has no form in the file; compute in float32 there, or leave it out of the model.")
    return ir.DataType(TYPES[dtype])


@dataclass(frozen=True)
class Site:
    """What a lowering may need to know of a call: its name, shapes of its first input and of its outputs, and these."""

    name: str
    input_shape: list[int]
    output_shape: list[int]
    outputs: tuple[Value, ...]
    input_dtype: torch.dtype = torch.float32
    inputs: tuple[Value, ...] = ()

    @property
    def rank(self) -> int:
        """Axes of the first input."""
        return len(self.input_shape)


@dataclass(frozen=True)
class Scope:
    """Where the nodes that are written come from; viewers group them by it.

    Args:
        path: the module, as ``backbone.layer1.0.conv``.
        line: of the user's code.
        label: the node of the program.
    """

    path: str = ""
    line: str = ""
    label: str = ""

    @cached_property
    def prefix(self) -> str:
        """What names of values begin with: ``backbone/layer1/0/conv/``."""
        return f"{self.path.replace('.', '/')}/" if self.path else ""

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The module and those around it, in the form of torch's own exporter."""
        if not self.label:
            return {}
        parts = self.path.split(".") if self.path else []
        scopes = [".".join(parts[:count]) for count in range(len(parts) + 1)]
        return {"pkg.torch.onnx.name_scopes": repr([*scopes, self.label])}


class OnnxGraph:
    """Nodes and constants of a graph under construction; values are known by their names."""

    def __init__(
        self, opset: int = OPSET, reserved: Iterable[str] = (), is_fast: bool = False, is_sized: bool = True
    ) -> None:
        import onnx_ir

        self._ir = onnx_ir
        self.opset = opset
        self.is_fast = is_fast  # int8 kernels also where they round other than the model does
        self.is_sized = is_sized  # what is written may depend on sizes of images
        self.inexact: dict[str, str] = {}  # what does so, by module or node, and why
        self.scope = Scope()
        self._nodes: list[Any] = []
        self._inside: tuple[list[Any], set[str]] | None = None  # nodes and values of the body of a loop
        self._initializers: list[Any] = []
        self._values: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._taken = set(reserved)
        self._constants: dict[tuple, str] = {}
        self._numbers: dict[tuple[str, torch.dtype | None], str] = {}
        self._casts: dict[tuple[str, torch.dtype], str] = {}
        self._lists: dict[str, list[int]] = {}  # the numbers of constants that older opsets have as attributes
        self._from_bytes: set[str] = set()
        self._bytes: dict[str, tuple[str, int]] = {}  # float32 values that exist as bytes too, and their zero points
        self._made: dict[Any, Any] = {}  # what is made of a value once, by what it is
        self._known: dict[tuple[int, Any], tuple[Tensor, str]] = {}  # by identity; the tensors stay alive

    def fresh(self, hint: str) -> str:
        """A name that no other value has, in the module that is written."""
        name = base = self.scope.prefix + hint
        while name in self._taken:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}_{self._counts[base]}"
        self._taken.add(name)
        return name

    def add_input(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
        """A value that the file is given."""
        self._values[name] = _value(name, dtype, shape)
        return name

    def constant(self, value: Any, dtype: torch.dtype | None = None, hint: str = "constant") -> str:
        """A constant tensor; equal constants share one initializer."""
        if isinstance(value, Tensor):
            return self._once(value, dtype, lambda x: self._stored(x if dtype is None else x.to(dtype), hint))
        key = (repr(value), dtype)  # numbers and lists of them come again and again
        if key not in self._numbers:
            # A Python number goes straight to its type: by way of float32 it would be rounded.
            number = torch.tensor(value, dtype=dtype, device="cpu")
            if dtype is None and number.is_floating_point():  # whatever type torch takes by default
                number = torch.tensor(value, dtype=torch.float32, device="cpu")
            self._numbers[key] = self._stored(number, hint)
            if isinstance(value, list):
                self._lists[self._numbers[key]] = value
        return self._numbers[key]

    def _once(self, value: Tensor, form: Any, store: Callable[[Tensor], str]) -> str:
        """What is stored for a tensor in some form; known again if it is small, as tables are that many nodes read."""
        if value.numel() > _LARGE:
            return store(value.detach().cpu())
        known = self._known.get((id(value), form))
        if known is None:
            known = self._known[id(value), form] = (value, store(value.detach().cpu()))
        return known[1]

    def _stored(self, tensor: Tensor, hint: str) -> str:
        import onnx_ir as ir

        array = np.ascontiguousarray(tensor.contiguous().numpy()).reshape(tuple(tensor.shape))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh(hint)
            stored = ir.Value(name=name, const_value=ir.Tensor(array, _type_of(tensor.dtype), name=name))
            self._values[name] = stored
            self._initializers.append(stored)
            self._constants[key] = name
        return self._constants[key]

    def numbers_of(self, name: str) -> Tensor | None:
        """The numbers of a value that is stored in the file; None if it is computed."""
        stored = self._values[name].const_value
        return None if stored is None else torch.from_numpy(np.array(stored.numpy()))

    def compact(self, value: Tensor, hint: str = "weight") -> str:
        """A constant of integers in float32, stored in the smallest integer type that holds them."""
        return self._once(value, "compact", lambda x: self._compacted(x, hint))

    def _compacted(self, value: Tensor, hint: str) -> str:
        for storage in (torch.int8, torch.int16, torch.int32):
            info = torch.iinfo(storage)
            if value.numel() == 0 or (float(value.min()) >= info.min and float(value.max()) <= info.max):
                return self._cast_constant(self.constant(value, storage, hint), value.dtype)
        return self.constant(value, hint=hint)

    def table(self, value: Tensor, hint: str = "table") -> str:
        """A constant of integers in float32 along one axis, in as few bytes as a table of a smooth function takes.

        From one entry to the next it changes little, so it is stored as these steps, several in a byte, and summed up
        when the file is loaded.
        """
        return self._once(value, "table", lambda x: self._packed(x, hint))

    def _packed(self, value: Tensor, hint: str) -> str:
        packing = pack_steps(value)
        if packing is None:
            return self.compact(value, hint)
        data, bits, low, start = packing
        steps = self.cast(self.constant(data, hint=hint), torch.int32)
        if bits < 8:
            powers = [1 << shift for shift in range(0, 8, bits)]
            parts = self.node("Div", steps, self.constant(powers, torch.int32, "powers"))
            steps = self.node("Mod", parts, self.constant(1 << bits, torch.int32))
        steps = self.node("Add", self.reshape(steps, [-1]), self.constant(low, torch.int32))
        sums = self.node("CumSum", steps, self.constant(0, torch.int64, "axis"))
        return self.cast(self.node("Add", sums, self.constant(start, torch.int32)), value.dtype)

    def _cast_constant(self, name: str, dtype: torch.dtype) -> str:
        """A constant in another type; once, however many read it."""
        if (name, dtype) not in self._casts:
            self._casts[name, dtype] = self.cast(name, dtype)
        return self._casts[name, dtype]

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; the name of its output, or a list of names."""
        if self.opset < 13 and operator in _LISTS and len(inputs) == 2:
            attributes[_LISTS[operator]], inputs = self._lists[inputs[1]], inputs[:1]
        if self.opset < 12 and operator in _OR_EQUAL:
            return self.node("Or", self.node(_OR_EQUAL[operator], *inputs), self.node("Equal", *inputs))
        names = [self.fresh(operator) for _ in range(outputs)]
        self._add(operator, inputs, names, attributes)
        return names[0] if outputs == 1 else names

    def output(self, name: str, source: str) -> str:
        """Give a value a name that the user chose."""
        self._add("Identity", (source,), [name], {})
        return name

    def _add(self, operator: str, inputs: Sequence[str], names: list[str], attributes: dict[str, Any]) -> None:
        ir = self._ir
        given = [_attribute(name, value) for name, value in attributes.items() if value is not None]
        outputs = [ir.Value(name=name) for name in names]
        self._values.update(zip(names, outputs, strict=True))
        nodes = self._nodes
        if self._inside is not None and not self._inside[1].isdisjoint(inputs):
            nodes = self._inside[0]
            self._inside[1].update(names)
        nodes.append(
            ir.Node(
                "", operator, [self._values[x] if x else None for x in inputs], given, outputs=outputs, name=names[0],
                doc_string=self.scope.line or None, metadata_props=self.scope.metadata,
            )
        )  # fmt: skip

    @contextmanager
    def body(self) -> Iterator[None]:
        """What is written in here is done in each step of a loop, but for what is the same in all of them.

        Names of `step_input` are what a step is given; `scan` closes the body.
        """
        assert self._inside is None, "a loop in a loop"
        self._inside = ([], set())
        try:
            yield
        finally:
            self._inside = None

    def step_input(self, hint: str, dtype: torch.dtype) -> str:
        """A value that a step of a loop is given; of any shape, as sizes of the file may be open."""
        assert self._inside is not None
        name = self.fresh(hint)
        self._values[name] = self._ir.Value(name=name, type=self._ir.TensorType(_type_of(dtype)))
        self._inside[1].add(name)
        return name

    def scan(
        self,
        states: Sequence[tuple[str, str, str]],
        series: Sequence[tuple[str, str, int, bool]],
        kept: Sequence[tuple[str, bool]],
    ) -> tuple[list[str], list[str]]:
        """A loop of the body that was written.

        Args:
            states: what is passed from step to step: its first value, its name in a step, and the name of what the step
                passes on.
            series: what is read slice by slice: the whole, a slice's name in a step, the axis, and whether the last
                slice comes first.
            kept: values of a step that are wanted of all steps, and whether the last step's is to come first.

        Returns:
            The last states; and what is kept, steps along the first axis.
        """
        assert self._inside is not None
        nodes, own = self._inside
        results: list[str] = []
        for name in (*(last for _, _, last in states), *(name for name, _ in kept)):
            if name in results or self._values[name].producer() is None or name not in own:
                own.add(name)  # what a step gives must be its own, and each of them another value
                name = self.node("Identity", name)
            results.append(name)
        inputs = [name for _, name, _ in states] + [name for _, name, _, _ in series]
        graph = self._ir.Graph(
            [self._values[x] for x in inputs], [self._values[x] for x in results],
            nodes=_read_nodes(nodes, results)[0], name=self.fresh("step"),
        )  # fmt: skip
        self._inside = None
        outputs = self.node(
            "Scan", *(first for first, _, _ in states), *(whole for whole, _, _, _ in series), outputs=len(results),
            body=graph, num_scan_inputs=len(series), scan_input_axes=[axis for _, _, axis, _ in series],
            scan_input_directions=[int(is_reversed) for _, _, _, is_reversed in series],
            scan_output_directions=[int(is_reversed) for _, is_reversed in kept] or None,
        )  # fmt: skip
        outputs = [outputs] if isinstance(outputs, str) else outputs
        return outputs[: len(states)], outputs[len(states) :]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What several nodes read of a value; it is made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def made(self, key: Any) -> Any:
        """What was made with `once`; None if it was not."""
        return self._made.get(key)

    def cast(self, x: str, dtype: torch.dtype) -> str:
        """Change the element type.

        float64 is made before a transpose and not after it: where a product of matrices follows, ONNX Runtime makes
        both one node at its highest level, and ends the process.
        """
        to = int(_type_of(dtype))
        producer = self._values[x].producer() if dtype == torch.float64 else None
        if producer is not None and producer.op_type == "Transpose":
            source, order = producer.inputs[0].name, producer.attributes["perm"].as_ints()
            return self.node("Transpose", self.node("Cast", source, to=to), perm=list(order))
        return self.node("Cast", x, to=to)

    def reshape(self, x: str, shape: Any) -> str:
        """Give a tensor another shape."""
        return self.node("Reshape", x, self.constant([int(s) for s in shape], torch.int64, "shape"))

    def clip(self, x: str, low: float, high: float, dtype: torch.dtype = torch.float32) -> str:
        """Clamp."""
        if dtype == torch.float64 and self.opset < 12:  # ONNX Runtime has no such Clip
            return self.node("Min", self.node("Max", x, self.scalar(low, dtype)), self.scalar(high, dtype))
        return self.node("Clip", x, self.constant(float(low), dtype), self.constant(float(high), dtype))

    def scalar(self, value: float, dtype: torch.dtype) -> str:
        """A constant of one number."""
        return self.constant(float(value), dtype)

    def apart_from_pad(self, x: str) -> str:
        """The same value, so that no optimizer makes a `Pad` before it part of a pooling after it.

        ONNX Runtime does so from its basic level on, and pads with what the pooling pads with: not with zeros, if it
        takes the largest value.
        """
        return self._apart_from("Pad", x)

    def apart_from_transpose(self, x: str) -> str:
        """The same value, so that no optimizer makes a `Transpose` before it part of a product of matrices after it.

        ONNX Runtime does so from its extended level on, and its process ends where the matrix is a constant in float64.
        """
        return self._apart_from("Transpose", x)

    def _apart_from(self, operator: str, x: str) -> str:
        producer = self._values[x].producer()
        is_next = producer is not None and producer.op_type == operator
        return self.node("Max", x, self.scalar(-np.inf, torch.float32)) if is_next else x

    def without_sign_of_zero(self, x: str) -> str:
        """The same number with +0 for -0; ONNX Runtime takes an `Add` of zero for nothing and drops it."""
        return self.node("Sum", x, self.scalar(0.0, torch.float32))

    @property
    def has_bytes(self) -> bool:
        """Can bytes be clamped? Before opset 12 they cannot."""
        return self.opset >= 12

    def bytes_of(self, x: str, is_negative: bool) -> tuple[str, int]:
        """Integers of a float32 value, -128 to 127, as unsigned bytes, and their zero point.

        Args:
            is_negative: can they be negative? If not, the zero point is 0, and no byte is above 127.
        """
        if x not in self._bytes:
            zero = _BYTE_ZERO if is_negative else 0
            one, middle = self.scalar(1.0, torch.float32), self.constant(zero, torch.uint8, "zero_point")
            self._bytes[x] = (self.node("QuantizeLinear", x, one, middle), zero)
        return self._bytes[x]

    def quantized(self, x: str, scale: Tensor) -> str:
        """Real numbers divided by a scale, rounded half to even and limited to -128 and 127; NaN is 0."""
        zero = self.constant(_BYTE_ZERO, torch.uint8, "zero_point")
        number = self.constant(scale.reshape(()), torch.float32, "scale")
        integers = self.node("QuantizeLinear", x, number, zero)
        return self.from_bytes(self.node("Where", self.node("IsNaN", x), zero, integers), _BYTE_ZERO)

    def rounded_bytes(self, x: str, low: int, high: int) -> str:
        """Real numbers rounded half to even and limited to a part of -128 to 127, by way of bytes."""
        zero = _BYTE_ZERO if low < 0 else 0
        one, middle = self.scalar(1.0, torch.float32), self.constant(zero, torch.uint8, "zero_point")
        return self.from_bytes(self.limited_bytes(self.node("QuantizeLinear", x, one, middle), zero, low, high), zero)

    def limited_bytes(self, x: str, zero: int, low: int, high: int) -> str:
        """Clamp bytes to what stands for these integers."""
        ends = (low + zero, high + zero)
        return x if ends == (0, 255) else self.node("Clip", x, *(self.constant(end, torch.uint8) for end in ends))

    def from_bytes(self, x: str, zero: int) -> str:
        """The integers of bytes as a float32 value; it is not written if all that read it take bytes."""
        one, middle = self.scalar(1.0, torch.float32), self.constant(zero, torch.uint8, "zero_point")
        name = self.node("DequantizeLinear", x, one, middle)
        self._bytes[name] = (x, zero)
        self._from_bytes.add(name)
        return name

    def real_of_bytes(self, x: str, scale: float, zero: int) -> str:
        """Real numbers of bytes."""
        given = self.scalar(scale, torch.float32), self.constant(zero, torch.uint8, "zero_point")
        return self.node("DequantizeLinear", x, *given)

    def tell_inexact(self, why: str) -> None:
        """Say that what is written now may give other integers than the model."""
        self.inexact[self.scope.path or self.scope.label] = why

    def is_from_bytes(self, x: str) -> bool:
        """Was the value made of bytes? Then its zeros are +0."""
        return x in self._from_bytes

    def where(self, condition: str, a: str, b: str, dtype: torch.dtype) -> str:
        """One value or the other; ONNX Runtime has no kernel that chooses between booleans, so they are bytes then."""
        if dtype != torch.bool:
            return self.node("Where", condition, a, b)
        chosen = self.node("Where", condition, self.cast(a, torch.uint8), self.cast(b, torch.uint8))
        return self.cast(chosen, torch.bool)

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

    def _drop_unread(self, wanted: set[str]) -> None:
        """Leave out what nothing reads, such as the float32 form of values that are read as bytes."""
        self._nodes, read = _read_nodes(self._nodes, wanted)
        self._initializers = [value for value in self._initializers if value.name in read]

    def _of_open_shape(self) -> set[str]:
        """Values whose shapes may depend on numbers: positions that `NonZero` finds, and what comes of them."""
        found: set[str] = set()
        for node in self._nodes:
            is_open = any(each.op_type == "NonZero" for each in (node, *_steps(node)))
            if is_open or not found.isdisjoint(_names_read(node)):
                found.update(x.name for x in node.outputs)
        return found

    def model(
        self,
        inputs: list[str],
        outputs: list[tuple[str, torch.dtype, Sequence[int]]],
        name: str,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        """The finished, checked ONNX model."""
        import onnx
        import onnx_ir as ir

        from horizon_plugin_pytorch._version import __version__

        self._drop_unread({output for output, _, _ in outputs})
        open_names = self._of_open_shape()
        for output, dtype, shape in outputs:
            value, sizes = self._values[output], [None] * len(shape) if output in open_names else list(shape)
            value.type, value.shape = ir.TensorType(_type_of(dtype)), ir.Shape(sizes)
        graph = ir.Graph(
            [self._values[x] for x in inputs], [self._values[x] for x, _, _ in outputs], nodes=self._nodes,
            initializers=self._initializers, name=name, opset_imports={"": self.opset},
        )  # fmt: skip
        model = ir.to_proto(
            ir.Model(
                graph,
                ir_version=8 if self.opset < 21 else 10,
                producer_name="horizon_plugin_pytorch",
                producer_version=__version__,
                metadata_props=dict(metadata or {}),
            )
        )
        try:
            onnx.checker.check_model(model, full_check=True)
        except Exception as error:  # the checker's own exceptions differ between versions of onnx
            raise ExportError(
                "the model mixes types or shapes in a way that its ONNX form does not allow, most likely in float code "
                f"after the DeQuantStub; leave that out of the exported model. The checker says: {error}"
            ) from error
        return model


def _steps(node: Any) -> list[Any]:
    """The nodes of the body of a loop; other nodes have none."""
    return [step for attribute in node.attributes.values() if attribute.name == "body" for step in attribute.value]


def _names_read(node: Any) -> list[str]:
    """The values that a node reads, or a step of it if it is a loop."""
    return [x.name for each in (node, *_steps(node)) for x in each.inputs if x is not None]


def _read_nodes(nodes: Sequence[Any], wanted: Iterable[str]) -> tuple[list[Any], set[str]]:
    """The nodes that some values depend on; and all values that they read."""
    read, kept = set(wanted), []
    for node in reversed(nodes):
        if any(x.name in read for x in node.outputs):
            kept.append(node)
            read.update(_names_read(node))
    return kept[::-1], read


def pack_steps(values: Tensor) -> tuple[Tensor, int, int, int] | None:
    """The steps from one entry of a long table to the next, packed into bytes; None if that saves nothing.

    Returns:
        Bytes, of shape ``(count, 1)``; the bits that a step takes, the first step in the lowest; the smallest step,
        which is to be added to each; and what is to be added to their sums.

    >>> data, bits, low, start = pack_steps(torch.arange(65536) // 3 - 9)
    >>> tuple(data.shape), bits, low, start
    ((8192, 1), 1, 0, -9)
    """
    if values.numel() < _LONG or values.numel() % 8:
        return None
    entries = values.long()
    steps = entries.diff(prepend=entries[:1])
    low, high = int(steps[1:].min()), int(steps[1:].max())
    bits = next((bits for bits in (1, 2, 4, 8) if high - low < 1 << bits), None)
    is_byte = int(entries.min()) >= -128 and int(entries.max()) <= 127
    if bits is None or (is_byte and bits == 8):
        return None
    digits = (steps - low).view(-1, 8 // bits)
    digits[0, 0] = 0  # stands for the step to the first entry
    shifts = torch.arange(0, 8, bits)
    return (digits << shifts).sum(1, keepdim=True).to(torch.uint8), bits, low, int(entries[0]) - low


def _attribute(name: str, value: Any) -> Any:
    import onnx_ir as ir

    if isinstance(value, list):
        return ir.AttrInt64s(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if isinstance(value, ir.Graph):
        return ir.AttrGraph(name, value)
    return ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrInt64(name, int(value))


def _value(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    import onnx_ir as ir

    return ir.Value(name=name, type=ir.TensorType(_type_of(dtype)), shape=ir.Shape(shape))
