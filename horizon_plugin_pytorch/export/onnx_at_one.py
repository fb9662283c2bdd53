"""Size 1 of an open axis: the file of all sizes against the one that is written for it.

Operators drop axes of size 1, or do nothing, where with more they do not. Where the two files do not plainly have the
same operators, both run in ONNX Runtime, and must give the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError, HorizonError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.export.onnx_session import run_file


class AtOneError(ExportError):
    """The file does not give what the model gives where an axis has size 1."""


def is_of_inputs(error: HorizonError) -> bool:
    """Does the model itself not take the inputs?"""
    return not isinstance(error, ExportError) or "does not run on the example inputs" in str(error)


def spelled(sizes: Mapping[str, int]) -> str:
    """Sizes as they are said: ``batch=1, time=3``."""
    return ", ".join(f"{label}={size}" for label, size in sizes.items())


def built_alone(build: Callable[[Any], Any], given: Any, sizes: Mapping[str, int]) -> Any:
    """The file at sizes of which one is 1; None if the model does not run there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were told, or are of a size that the user has not given
            return build(given)
    except ExportError as error:
        if is_of_inputs(error):
            return None
        raise AtOneError(
            f"dynamic_axes: with {spelled(sizes)} the model cannot be written, and with more it can: the file would "
            f"give something else there. Leave {_ones(sizes)} out of dynamic_axes, or mend this: {error}"
        ) from error
    except Exception:  # of the model's own code, which need not take this size
        return None


def compare_axes(file: Any, alone: Any, sizes: Mapping[str, int]) -> None:
    """Insist that the outputs at size 1 are those of other sizes, and have their axes."""
    outputs, wanted = file.graph.output, alone.graph.output
    if [x.name for x in outputs] != [x.name for x in wanted]:
        raise AtOneError(
            f"dynamic_axes: with {spelled(sizes)} the model gives {listed(repr(x.name) for x in wanted)}, and the "
            f"file {listed(repr(x.name) for x in outputs)}, as a branch on a size does. Let the model give the same "
            f"for all sizes, or leave {_ones(sizes)} out of dynamic_axes."
        )
    for output, known in zip(outputs, wanted, strict=True):
        if len(output.type.tensor_type.shape.dim) != len(known.type.tensor_type.shape.dim):
            raise AtOneError(
                f"dynamic_axes: with {spelled(sizes)} the model's output {output.name!r} has other axes than with "
                "more, as `squeeze()` drops every axis of size 1; the file keeps them. Name the axes that are meant, "
                f"as in `x.squeeze(-1)`, or leave {_ones(sizes)} out of dynamic_axes."
            )


def compare_numbers(
    file: Any, alone: Any, tensors: Sequence[Tensor], sizes: Mapping[str, int], tolerance: float, why: str
) -> None:
    """Insist that a file gives in ONNX Runtime what the file of one size gives; one that does not run is left alone.

    Args:
        why: how the operators of the two differ.
    """
    given = [_telling(x) for x in tensors]
    try:
        wanted, found = run_file(alone, given), run_file(file, given)
    except ImportError:
        warn(
            f"dynamic_axes: with {spelled(sizes)} the model runs other operators than with more, and there is no ONNX "
            "Runtime here to see whether the file gives the same (pip install onnxruntime). Compare its outputs with "
            "the model's at this size before you use them.",
            QuantizationWarning,
        )
        return
    except Exception:  # whoever runs the file at this size is told so by ONNX Runtime
        return
    for output, a, b in zip(file.graph.output, wanted, found, strict=True):
        if not _is_close(a, b, tolerance):
            raise AtOneError(
                f"{why} With {spelled(sizes)} the model's output {output.name!r} is another one than the file's "
                "(dynamic_axes)."
            )


def _telling(x: Tensor) -> np.ndarray:
    """An example input; random numbers in the place of real ones that are all equal, which would tell nothing."""
    array = x.detach().cpu().numpy()
    if array.dtype.kind != "f" or (array.size and not (array == array.flat[0]).all()):
        return array
    return np.random.default_rng(0).standard_normal(array.shape).astype(array.dtype)


def _is_close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Integers must be equal; real numbers lie within a tolerance, as fractions of the largest."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f" or not a.size:
        return bool((a == b).all())
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    return bool(np.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True))


def _ones(sizes: Mapping[str, int]) -> str:
    """The names of the axes of size 1."""
    return listed(repr(label) for label, size in sizes.items() if size == 1)
