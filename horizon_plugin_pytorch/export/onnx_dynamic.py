"""Files for inputs of other sizes than the example's.

The model is written at several sizes. Where these files differ, in constants such as the shape of a `Reshape`, the
constant is computed of the sizes of the inputs when the file runs; what cannot be computed so depends on the size in a
way that a file cannot have, and is refused with its place in the model.

Size 1 is apart (`onnx_at_one.py`).
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError, HorizonError, at
from horizon_plugin_pytorch.export.onnx_at_one import (
    AtOneError,
    built_alone,
    compare_axes,
    compare_numbers,
    is_of_inputs,
    spelled,
)
from horizon_plugin_pytorch.nested import map_tensors

_LONG = 20  # at this size a loop over an axis is one in the file, also if its first steps are others


@dataclass(frozen=True)
class Axis:
    """A size that may change.

    Args:
        label: its name.
        uses: the inputs and axes that have it.
        sizes: at which the model is written: one for all comparisons, and two others.
    """

    label: str
    uses: tuple[tuple[int, int], ...]
    sizes: tuple[int, int, int]


def dynamic_sizes(
    dynamic_axes: Any, names: Sequence[str], tensors: Sequence[Tensor], outputs: Sequence[str] | None
) -> list[Axis]:
    """The sizes that may change, as `torch.onnx.export` takes them.

    Args:
        dynamic_axes: ``{"input": {0: "batch"}}``, or ``{"input": [0]}``, where equal axes of equal sizes are one.
        names: of the inputs.
        tensors: the inputs.
        outputs: names of the outputs, if the user gave them; what changes there follows from the inputs.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    if not isinstance(dynamic_axes, Mapping):
        raise ExportError(f"dynamic_axes must be a dictionary, such as {{'{names[0]}': {{0: 'batch'}}}}.")
    for name, axes in dynamic_axes.items():
        if name not in names:
            if outputs is None or name in outputs:
                continue
            raise ExportError(f"dynamic_axes: there is no input {name!r}; the file has {', '.join(names)}.")
        index = list(names).index(name)
        rank = tensors[index].dim()
        labels = axes if isinstance(axes, Mapping) else dict.fromkeys(axes, "")
        for axis, label in labels.items():
            if not -rank <= axis < rank:
                raise ExportError(f"dynamic_axes: {name!r} has {rank} axes, and none is {axis}.")
            size = tensors[index].shape[axis]
            label = label or ("batch" if axis % rank == 0 else f"axis_{axis % rank}_{size}")
            found.setdefault(str(label), []).append((index, axis % rank))
    taken = {size for x in tensors for size in x.shape}
    axes = []
    for label, uses in found.items():
        sizes = {tensors[index].shape[axis] for index, axis in uses}
        if len(sizes) > 1:
            raise ExportError(f"dynamic_axes: {label!r} is the size of several axes, which differ: {sorted(sizes)}.")
        axes.append(Axis(label, tuple(uses), _tried(sizes.pop(), all(axis == 0 for _, axis in uses), taken)))
    if not axes:
        raise ExportError(f"dynamic_axes names none of the inputs {', '.join(names)}.")
    return axes


def _tried(size: int, is_batch: bool, taken: set[int]) -> tuple[int, int, int]:
    """Sizes to compare; those of a batch are small, and unlike any other size, so that none is mistaken."""
    if not is_batch:
        first = max(size, 2)  # one step does not show how numbers grow along the axis
        return first, first + 1, first + 2
    first, second, third = itertools.islice((n for n in itertools.count(2) if n not in taken), 3)
    taken |= {first, second, third}
    return first, second, third


def _resized(args: Any, tensors: Sequence[Tensor], axes: Sequence[Axis], sizes: Mapping[str, int]) -> Any:
    """The inputs at other sizes: their slices over and over."""
    wanted: dict[int, dict[int, int]] = {}
    for axis in axes:
        for index, dim in axis.uses:
            wanted.setdefault(id(tensors[index]), {})[dim] = sizes[axis.label]

    def one(x: Tensor) -> Tensor:
        for dim, size in wanted.get(id(x), {}).items():
            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
        return x

    return map_tensors(one, args)


def with_dynamic_axes(
    build: Callable[[Any], Any],
    args: Any,
    tensors: Sequence[Tensor],
    axes: Sequence[Axis],
    tolerance: float = 0.0,
) -> Any:
    """A file for inputs of any sizes along these axes.

    Args:
        build: gives the file for inputs.
        args: the example inputs.
        tensors: those among them, in the order of the file.
        tolerance: how far real outputs may differ, of the largest, where the file at size 1 has other operators.
    """
    try:
        try:
            return _one_file(build, args, tensors, axes, tolerance)
        except _OtherOperatorsError as error:
            try:  # steps that repeat are a loop, of any length, where there are enough of them
                return _one_file(build, args, tensors, _longer(axes), tolerance)
            except AtOneError:
                raise
            except HorizonError:
                raise ExportError(str(error)) from None
    except AtOneError as error:
        raise ExportError(str(error)) from error.__cause__


class _OtherOperatorsError(ExportError):
    """The model runs other operators at other sizes."""


def _longer(axes: Sequence[Axis]) -> list[Axis]:
    """The axes at sizes at which loops over them are found."""
    found, taken = [], {size for axis in axes for size in axis.sizes}
    for axis in axes:
        free = (size for size in itertools.count(_LONG) if size not in taken)
        first, second, third = axis.sizes if axis.sizes[0] >= _LONG else itertools.islice(free, 3)
        taken |= {first, second, third}
        found.append(replace(axis, sizes=(first, second, third)))
    return found


def _one_file(
    build: Callable[[Any], Any], args: Any, tensors: Sequence[Tensor], axes: Sequence[Axis], tolerance: float
) -> Any:
    """The file of models at the sizes of the axes, which holds for size 1 too, or for no model of this size."""
    base = {axis.label: axis.sizes[0] for axis in axes}
    variants = [base]
    variants += [{**base, axis.label: size} for axis in axes for size in axis.sizes[1:]]
    if len(axes) > 1:
        variants.append({axis.label: axis.sizes[1] for axis in axes})
    models = []
    for sizes in variants:
        try:
            models.append(build(_resized(args, tensors, axes, sizes)))
        except HorizonError as error:
            if isinstance(error, ExportError) and not is_of_inputs(error):
                raise
            raise ExportError(
                f"dynamic_axes: the model does not run with {spelled(sizes)}. Axes that must be of one size need one "
                f"name, as in {{'image': {{0: 'batch'}}, 'prior': {{0: 'batch'}}}}. {error}"
            ) from error
    file = _Merged(models, variants, axes).model()
    for sizes in _with_one(axes, base, tensors):
        alone = built_alone(build, _resized(args, tensors, axes, sizes), sizes)
        if alone is None:
            continue
        compare_axes(file, alone, sizes)
        difference = _Merged([*models, alone], [*variants, sizes], axes, is_trial=True).difference()
        if difference is not None:
            compare_numbers(file, alone, _resized(list(tensors), tensors, axes, sizes), sizes, tolerance, difference)
    return file


def _with_one(axes: Sequence[Axis], base: Mapping[str, int], tensors: Sequence[Tensor]) -> list[dict[str, int]]:
    """Each axis at size 1, alone, beside those that have it in the example, and with all others."""
    single = {axis.label: 1 for axis in axes for index, dim in axis.uses[:1] if tensors[index].shape[dim] == 1}
    found = [{**base, axis.label: 1} for axis in axes]
    found += [{**base, **single, axis.label: 1} for axis in axes if single]
    found.append(dict.fromkeys(base, 1))
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]


class _Merged:
    """Files of one model at several sizes, made one.

    Args:
        models, sizes: the files, and what they are written for.
        is_trial: is the last one only to be compared? It is at size 1; see `difference`.
    """

    def __init__(
        self,
        models: Sequence[Any],
        sizes: Sequence[Mapping[str, int]],
        axes: Sequence[Axis],
        is_trial: bool = False,
    ) -> None:
        from onnx import numpy_helper

        models = [copy.deepcopy(models[0]), *models[1:]]  # into which what changes is written
        self._models, self._sizes, self._axes = models, sizes, axes
        self._constants = [{x.name: numpy_helper.to_array(x) for x in m.graph.initializer} for m in models]
        self._graph = models[0].graph
        self._values: list[dict[str, int]] = [{} for _ in models]  # by name; the same number is the same value
        self._bound, self._is_trial = 0, is_trial
        for ports in zip(*(model.graph.input for model in models), strict=True):
            self._bind([port.name for port in ports])
        self._nodes: list[Any] = []  # what computes sizes
        self._made: dict[tuple, str] = {}
        self._taken = {x for node in self._graph.node for x in node.output} | set(self._constants[0])
        self._taken |= {x.name for x in self._graph.input}
        self._taken |= {
            x for node in self._graph.node for body in _bodies(node) for step in body.node for x in step.output
        }
        self._taken |= {x.name for node in self._graph.node for body in _bodies(node) for x in body.input}

    def model(self) -> Any:
        """The file of the first size, with what changes computed."""
        import onnx

        self._compare_all([model.graph.node for model in self._models])
        nodes = [*self._nodes, *self._graph.node]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        inner = [step for node in nodes for body in _bodies(node) for step in body.node]
        read = {name for node in (*nodes, *inner) for name in node.input} | {x.name for x in self._graph.output}
        for stored in [x for x in self._graph.initializer if x.name not in read]:
            self._graph.initializer.remove(stored)
        for kind in ("input", "output"):
            for values in zip(*(getattr(model.graph, kind) for model in self._models), strict=True):
                self._name_axes(values)
        onnx.checker.check_model(self._models[0], full_check=True)
        return self._models[0]

    def difference(self) -> str | None:
        """Why the last file is not the one that is made of the others; None if it is."""
        try:
            self._compare_all([model.graph.node for model in self._models])
        except ExportError as error:
            return str(error)
        return None

    def _bind(self, names: Sequence[str]) -> None:
        """Let these be one value, by its name in each file."""
        self._bound += 1
        for known, name in zip(self._values, names, strict=True):
            known[name] = self._bound

    def _are_one(self, names: Sequence[str]) -> bool:
        """Are these one value, or constants of all files?"""
        numbers = {known.get(name, -1) for known, name in zip(self._values, names, strict=True)}
        return len(numbers) == 1

    def _compare_all(self, lists: Sequence[Sequence[Any]]) -> None:
        for position in range(max(map(len, lists))):
            alike = [nodes[position : position + 1] for nodes in lists]
            self._compare([nodes[0] if nodes else None for nodes in alike])

    def _compare(self, nodes: list[Any]) -> None:
        first = nodes[0]
        where = place_of(next(node for node in nodes if node is not None))
        if any(node is None or _form(node) != _form(first) for node in nodes):
            raise self._other_operators(where)
        attributes = [sorted(a.SerializeToString() for a in node.attribute if not a.HasField("g")) for node in nodes]
        if any(found != attributes[0] for found in attributes):
            raise ExportError(
                f"{where}: settings of `{first.op_type}` depend on the size of an axis ({self._labels}), and are fixed "
                "in the file. Leave this axis out of dynamic_axes."
            )
        for bodies in zip(*map(_bodies, nodes), strict=True):
            for ports in zip(*(body.input for body in bodies), strict=True):
                self._bind([port.name for port in ports])
            self._compare_all([body.node for body in bodies])
            if not all(self._are_one([x.name for x in ends]) for ends in zip(*(b.output for b in bodies), strict=True)):
                raise self._other_operators(where)
        for index in range(len(first.input)):
            found = [known.get(node.input[index]) for known, node in zip(self._constants, nodes, strict=True)]
            arrays = [array for array in found if array is not None]
            if not self._are_one([node.input[index] for node in nodes]) or 0 < len(arrays) < len(found):
                raise self._other_operators(where)
            if not arrays:
                continue  # computed, as in the other files
            if any(array.shape != arrays[0].shape or not _is_equal(array, arrays[0]) for array in arrays):
                first.input[index] = self._computed(arrays, first, index, where)
        for names in zip(*(node.output for node in nodes), strict=True):
            self._bind(names)

    def _other_operators(self, where: str) -> _OtherOperatorsError:
        return _OtherOperatorsError(
            f"{where}: the model runs other operators at other sizes ({self._labels}), as a loop over an axis or a "
            "branch on a size does; the file has one list of operators. Leave this axis out of dynamic_axes, or "
            "write the loop as an operator on whole tensors."
        )

    @property
    def _labels(self) -> str:
        return ", ".join(axis.label for axis in self._axes)

    # -- constants that follow from sizes ----------------------------------------------------------------------------

    def _computed(self, arrays: list[np.ndarray], node: Any, index: int, where: str) -> str:
        """A value that is the constant at each size."""
        key = tuple((x.dtype.str, x.shape, x.tobytes()) for x in arrays) + (node.op_type == "Reshape" and index == 1,)
        if key not in self._made:
            found = None
            if all(x.shape == arrays[0].shape for x in arrays):
                if node.op_type == "Reshape" and index == 1:
                    found = self._open(arrays)
                found = found or self._linear(arrays)
            elif all(x.ndim == arrays[0].ndim for x in arrays):
                found = self._spread(arrays) or self._ramp(arrays)
            if found is None:
                raise ExportError(
                    f"{where}: a constant of `{node.op_type}` depends on the size of an axis ({self._labels}) in a way "
                    "that the file cannot compute. Leave this axis out of dynamic_axes, or compute it of the input."
                )
            self._made[key] = found
        return self._made[key]

    def _open(self, arrays: list[np.ndarray]) -> str | None:
        """A shape of which one size changes: that one follows from the others."""
        stacked = np.stack(arrays)
        changes = (stacked != stacked[0]).any(0)
        is_fixed = self._is_trial and (stacked[:-1] == stacked[0]).all()  # at all sizes of the file
        if changes.sum() != 1 or (stacked <= 0).any() or is_fixed:
            return None
        return self._constant(np.where(changes, -1, stacked[0]), "shape")

    def _linear(self, arrays: list[np.ndarray]) -> str | None:
        """Whole numbers that grow evenly with sizes."""
        if arrays[0].dtype.kind != "i":
            return None
        terms, rest = self._terms([x.astype(np.int64) for x in arrays])
        if terms is None or rest is None:
            return None
        out = self._constant(rest, "sizes")
        for label, slope in terms.items():
            if slope.any():
                grown = self._node("Mul", [self._size(label), self._constant(slope, "slope")])
                out = self._node("Add", [out, grown])
        return self._cast(out, arrays[0].dtype)

    def _terms(self, arrays: list[np.ndarray]) -> tuple[dict[str, np.ndarray] | None, np.ndarray | None]:
        """The factor of each size, and what is left; None if the numbers are no such sum."""
        base, terms = self._sizes[0], {}
        for axis in self._axes:
            changed = [i for i, s in enumerate(self._sizes) if s[axis.label] != base[axis.label]][:2]
            step = self._sizes[changed[0]][axis.label] - base[axis.label]
            terms[axis.label] = (arrays[changed[0]] - arrays[0]) // step
        rest = arrays[0] - sum(slope * base[label] for label, slope in terms.items())
        for sizes, array in zip(self._sizes, arrays, strict=True):
            if not (rest + sum(slope * sizes[label] for label, slope in terms.items()) == array).all():
                return None, None
        return terms, rest

    def _spread(self, arrays: list[np.ndarray]) -> str | None:
        """The same numbers along the axes that change."""
        one = _first_slice(arrays)
        if any(not _is_equal(np.broadcast_to(one, x.shape), x) for x in arrays):
            return None
        shape = self._linear([np.array(x.shape, dtype=np.int64) for x in arrays])
        return None if shape is None else self._node("Expand", [self._constant(one, "values"), shape])

    def _ramp(self, arrays: list[np.ndarray]) -> str | None:
        """Whole numbers of any type that grow evenly along the one axis that changes, as positions do."""
        shapes = np.array([x.shape for x in arrays])
        changing = np.flatnonzero((shapes != shapes[0]).any(0))
        kind = arrays[0].dtype
        is_whole = kind.kind == "i" or (kind.kind == "f" and np.isfinite(arrays[0]).all())
        if len(changing) != 1 or not is_whole:
            return None
        axis = int(changing[0])
        first, second = (np.take(arrays[0], [i], axis).astype(np.int64) for i in (0, 1))
        form = [1] * arrays[0].ndim
        form[axis] = -1
        for x in arrays:
            wanted = first + (second - first) * np.arange(x.shape[axis]).reshape(form)
            if not _is_equal(wanted.astype(kind), x):
                return None
        length = self._linear([np.array(x.shape[axis], dtype=np.int64) for x in arrays])
        if length is None:
            return None
        zero, one = self._constant(np.array(0), "start"), self._constant(np.array(1), "step")
        line = self._node("Range", [zero, length, one])
        line = self._node("Reshape", [line, self._constant(np.array(form), "shape")])
        grown = self._node("Mul", [line, self._constant(second - first, "slope")])
        return self._cast(self._node("Add", [grown, self._constant(first, "first")]), kind)

    def _cast(self, value: str, kind: np.dtype) -> str:
        """Whole numbers, computed in int64, in the type of a constant."""
        from onnx import helper

        return value if kind == np.int64 else self._node("Cast", [value], to=helper.np_dtype_to_tensor_dtype(kind))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _size(self, label: str) -> str:
        """The size of an axis, as a whole number."""
        if ("size", label) not in self._made:
            index, axis = next(a for a in self._axes if a.label == label).uses[0]
            shape = self._node("Shape", [self._graph.input[index].name])
            self._made["size", label] = self._node("Gather", [shape, self._constant(np.array(axis), "axis")], axis=0)
        return self._made["size", label]

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        name = self._fresh(f"sizes/{operator}")
        self._nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def _constant(self, array: np.ndarray, hint: str) -> str:
        from onnx import numpy_helper

        array = np.ascontiguousarray(array).reshape(array.shape)
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._made:
            name = self._made[key] = self._fresh(f"sizes/{hint}")
            self._graph.initializer.append(numpy_helper.from_array(array, name))
        return self._made[key]

    def _fresh(self, hint: str) -> str:
        name = next(n for n in itertools.chain([hint], (f"{hint}_{i}" for i in itertools.count(1)))
                    if n not in self._taken)  # fmt: skip
        self._taken.add(name)
        return name

    def _name_axes(self, values: tuple[Any, ...]) -> None:
        """Let an input or output have names for the sizes that change."""
        dims = [value.type.tensor_type.shape.dim for value in values]
        for position, dim in enumerate(dims[0]):
            found = [each[position].dim_value for each in dims]
            if all(size == found[0] for size in found):
                continue
            label = next((a.label for a in self._axes if [s[a.label] for s in self._sizes] == found), "")
            dim.Clear()
            if label:
                dim.dim_param = label


def _form(node: Any) -> tuple[str, int, int]:
    """The operator of a node, and how much it takes and gives."""
    return node.op_type, len(node.input), len(node.output)


def _bodies(node: Any) -> list[Any]:
    """The graphs of the steps of a loop; other nodes have none."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def _first_slice(arrays: list[np.ndarray]) -> np.ndarray:
    """The first slice along all axes that change."""
    shapes = np.array([x.shape for x in arrays])
    changes = (shapes != shapes[0]).any(0)
    return arrays[0][tuple(slice(0, 1) if change else slice(None) for change in changes)]


def _is_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit by bit, as NaN is a number too."""
    return a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def place_of(node: Any) -> str:
    """Where in the model a node comes from."""
    scopes = {entry.key: entry.value for entry in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "['', '']")
    return at(ast.literal_eval(scopes)[-2], node.doc_string)
