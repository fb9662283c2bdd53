"""Float modules that torch does not have; their QAT forms are in `nn.qat`, their integer forms in `nn.quantized`."""

from horizon_plugin_pytorch.nn import intrinsic, quantized  # noqa: I001 - qat registers operators on top of these
from horizon_plugin_pytorch.nn.elementwise import Exp, Reciprocal, Rsqrt, Sqrt
from horizon_plugin_pytorch.nn.interpolate import Interpolate
from horizon_plugin_pytorch.nn.layer_norm import LayerNorm
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.nn import pass_through  # noqa: F401 - fills the operator table

__all__ = ["Exp", "Interpolate", "LayerNorm", "Reciprocal", "Rsqrt", "Sqrt", "intrinsic", "qat", "quantized"]
