"""Float modules that torch does not have; their QAT forms are in `nn.qat`, their integer forms in `nn.quantized`."""

from horizon_plugin_pytorch.nn import intrinsic, quantized  # noqa: I001 - qat registers operators on top of these
from horizon_plugin_pytorch.nn.affine_grid import AffineGrid
from horizon_plugin_pytorch.nn.bgr_to_yuv444 import BgrToYuv444
from horizon_plugin_pytorch.nn.attention import MultiheadAttention, ScaledDotProductAttention
from horizon_plugin_pytorch.nn.elementwise import Exp, Reciprocal, Rsqrt, Sqrt
from horizon_plugin_pytorch.nn.grid_sample import GridSample
from horizon_plugin_pytorch.nn.interpolate import Interpolate
from horizon_plugin_pytorch.nn.layer_norm import LayerNorm
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.nn import float_operators, pass_through  # noqa: F401 - fill the operator table
from horizon_plugin_pytorch.nn import functional

__all__ = [
    "AffineGrid", "BgrToYuv444", "Exp", "GridSample", "Interpolate", "LayerNorm", "MultiheadAttention", "Reciprocal",
    "Rsqrt", "ScaledDotProductAttention", "Sqrt", "functional", "intrinsic", "qat", "quantized",
]  # fmt: skip
