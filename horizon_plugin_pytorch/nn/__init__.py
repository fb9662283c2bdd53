"""Float modules that torch does not have; their QAT forms are in `nn.qat`, their integer forms in `nn.quantized`."""

from horizon_plugin_pytorch.nn import intrinsic, quantized  # noqa: I001 - qat registers operators on top of these
from horizon_plugin_pytorch.nn.affine_grid import AffineGrid
from horizon_plugin_pytorch.nn.anchor_generator import AnchorGenerator
from horizon_plugin_pytorch.nn.assign import Assign
from horizon_plugin_pytorch.nn.atan2 import Atan2
from horizon_plugin_pytorch.nn.bgr_to_yuv444 import BgrToYuv444
from horizon_plugin_pytorch.nn.attention import MultiheadAttention, ScaledDotProductAttention
from horizon_plugin_pytorch.nn.detection_post_process import DetectionPostProcess
from horizon_plugin_pytorch.nn.detection_post_process_v1 import DetectionPostProcessV1
from horizon_plugin_pytorch.nn.div import Div
from horizon_plugin_pytorch.nn.elementwise import (
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atanh,
    Ceil,
    Cos,
    Cosh,
    Erf,
    Exp,
    Floor,
    HardLog,
    Logit,
    Pow,
    Reciprocal,
    Round,
    Rsqrt,
    SegmentLUT,
    Selu,
    Sign,
    Sin,
    Sinh,
    Sqrt,
    Tan,
    Trunc,
)
from horizon_plugin_pytorch.nn.point_pillars_scatter import PointPillarsScatter
from horizon_plugin_pytorch.nn.bev_pool_v2 import BevPoolV2
from horizon_plugin_pytorch.nn.multi_scale_deform_attn import MultiScaleDeformableAttention
from horizon_plugin_pytorch.nn.correlation import Correlation
from horizon_plugin_pytorch.nn.grid_sample import GridSample
from horizon_plugin_pytorch.nn.interpolate import Interpolate
from horizon_plugin_pytorch.nn.roi_align import MultiScaleRoIAlign, RoIAlign
from horizon_plugin_pytorch.nn.layer_norm import LayerNorm
from horizon_plugin_pytorch.nn.recurrent import GRU, LSTM, GRUCell, LSTMCell
from horizon_plugin_pytorch.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from horizon_plugin_pytorch.nn.rcnn_post_process import RcnnPostProcess
from horizon_plugin_pytorch.nn.norms import ChannelScale2d, GroupNorm, RMSNorm
from horizon_plugin_pytorch.nn.softmax import Softmax, SoftmaxBernoulli2
from horizon_plugin_pytorch.nn.where import Where
from horizon_plugin_pytorch.nn import qat
from horizon_plugin_pytorch.nn import float_operators, grid_functions  # noqa: F401 - fill the operator table
from horizon_plugin_pytorch.operators import pass_through  # noqa: F401 - fills the operator table
from horizon_plugin_pytorch.nn import bare_functions  # noqa: F401 - looks at all rows
from horizon_plugin_pytorch.runtime import scripted  # noqa: F401 - script functions meet quantized tensors
from horizon_plugin_pytorch.nn import functional

__all__ = [
    "GRU", "LSTM", "Acos", "Acosh", "AffineGrid", "AnchorGenerator", "Asin", "Asinh", "Assign", "Atan", "Atan2",
    "Atanh",
    "BevPoolV2", "BgrToYuv444", "Ceil", "ChannelScale2d", "Correlation", "Cos", "Cosh", "DetectionPostProcess",
    "DetectionPostProcessV1", "Div", "Erf", "Exp", "Floor", "GRUCell", "GridSample", "GroupNorm", "HardLog",
    "Interpolate", "LSTMCell", "LayerNorm", "Logit", "MultiScaleDeformableAttention", "MultiScaleRoIAlign",
    "MultiheadAttention", "PointPillarsScatter", "Pow", "RMSNorm", "RcnnPostProcess", "Reciprocal", "RoIAlign",
    "Round", "Rsqrt", "ScaledDotProductAttention", "SegmentLUT", "Selu", "Sign", "Sin", "Sinh", "Softmax",
    "SoftmaxBernoulli2", "Sqrt", "Tan", "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
    "TransformerEncoder", "TransformerEncoderLayer", "Trunc", "Where", "functional", "intrinsic", "qat", "quantized",
]  # fmt: skip
