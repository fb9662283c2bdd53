"""Quantization toolkit for PyTorch models on BPU chips: calibrate, train on the integer grid, convert, export.

What few scripts need at once is imported when it is first asked for; the operators `horizon::*` are registered at once,
so that files which call them can be loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horizon_plugin_pytorch import dtype, fixed_point, march, qat_mode
from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.doors import forward_old_paths
from horizon_plugin_pytorch.march import March, get_march, set_march
from horizon_plugin_pytorch.torch_export import take_converted_models

if TYPE_CHECKING:
    from horizon_plugin_pytorch import functional, fx, jit, nn, qconfig, qtensor, quantization, utils
    from horizon_plugin_pytorch.annotation import get_output_annotation, set_annotation
    from horizon_plugin_pytorch.functional import (
        abs,
        argmax,
        bgr2centered_gray,
        bgr2centered_yuv,
        bgr2gray,
        bgr2rgb,
        bgr2yuv,
        box3d_iou,
        box3d_iou_bev,
        box3d_overlap_bev,
        centered_yuv2bgr,
        centered_yuv2rgb,
        nms3d,
        rgb2bgr,
        rgb2centered_gray,
        rgb2centered_yuv,
        rgb2gray,
        rgb2yuv,
    )

__all__ = [
    "March", "__version__", "abs", "argmax", "bgr2centered_gray", "bgr2centered_yuv", "bgr2gray", "bgr2rgb",
    "bgr2yuv", "box3d_iou", "box3d_iou_bev", "box3d_overlap_bev", "centered_yuv2bgr", "centered_yuv2rgb", "dtype",
    "fixed_point", "functional", "fx", "get_march", "get_output_annotation", "jit", "march",
    "multi_tensor_legacynadamex", "nms3d", "nn", "qat_mode", "qconfig", "qtensor", "quantization", "rgb2bgr",
    "rgb2centered_gray", "rgb2centered_yuv", "rgb2gray", "rgb2yuv", "set_annotation", "set_march", "utils",
]  # fmt: skip

_MODULES = frozenset({"functional", "fx", "jit", "nn", "qconfig", "qtensor", "quantization", "utils"})
_ANNOTATION = frozenset({"get_output_annotation", "set_annotation"})

forward_old_paths()
take_converted_models()


def __getattr__(name: str) -> Any:
    """Import what is asked for the first time."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = importlib.import_module(f"{__name__}.{'annotation' if name in _ANNOTATION else 'functional'}")
    value = globals()[name] = getattr(owner, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def multi_tensor_legacynadamex(*args: object, **kwargs: object) -> None:
    """A CUDA kernel of the vendor's for an optimizer; refused when it is called.

    Raises:
        NotImplementedError: always; it says what there is instead.
    """
    raise NotImplementedError(
        "multi_tensor_legacynadamex was a compiled CUDA kernel of the vendor's package: a step of an optimizer like "
        "NAdam on many tensors at once. This package has no compiled code. Use torch.optim.NAdam(..., foreach=True)."
    )
