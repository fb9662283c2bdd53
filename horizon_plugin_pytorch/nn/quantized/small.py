"""Which operators run on bytes, beside the layers: those whose input is here as such and whose output has 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.untraced import is_recorded


def bytes_of(x: QTensor, out_dtype: QuantDType | None) -> Tensor | None:
    """An input's integers in int8, for an operator with this output; None where it is to take them in float32.

    That is where they are not here as bytes, where the output would not be bytes, and where somebody records operators.
    """
    if not x.has_bytes or out_dtype is None or out_dtype.bits > 8 or is_recorded() or not fp.are_kernels_used():
        return None
    values = x.as_bytes()
    return values if values.dtype == torch.int8 else None
