"""Files run in ONNX Runtime, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def run_file(model: Any, given: Sequence[np.ndarray], is_optimized: bool = False) -> list[np.ndarray]:
    """What a file gives.

    Args:
        model: the file, an `onnx.ModelProto`.
        given: its inputs, in their order.
        is_optimized: may nodes be merged, and run on several threads? Otherwise each is run as it is written.

    Raises:
        ImportError: there is no ONNX Runtime.
        Exception: it does not run the file; its own exceptions have no common class.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised as well
    if not is_optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {port.name: x for port, x in zip(session.get_inputs(), given, strict=True)}
    return [np.array(x) for x in session.run(None, feed)]
