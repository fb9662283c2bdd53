"""Modules that train on the integer grid. Importing this package fills the operator table."""

from horizon_plugin_pytorch.nn.qat.adaptive_avg_pool import AdaptiveAvgPool1d, AdaptiveAvgPool3d
from horizon_plugin_pytorch.nn.qat.adaptive_avg_pool2d import AdaptiveAvgPool2d
from horizon_plugin_pytorch.nn.qat.affine_grid import AffineGrid
from horizon_plugin_pytorch.nn.qat.assign import Assign
from horizon_plugin_pytorch.nn.qat.atan2 import Atan2
from horizon_plugin_pytorch.nn.qat.attention import ScaledDotProductAttention
from horizon_plugin_pytorch.nn.qat.avg_pool import AvgPool1d, AvgPool3d
from horizon_plugin_pytorch.nn.qat.avg_pool2d import AvgPool2d
from horizon_plugin_pytorch.nn.qat.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from horizon_plugin_pytorch.nn.qat.bev_pool_v2 import BevPoolV2
from horizon_plugin_pytorch.nn.qat.channel_scale import ChannelScale2d
from horizon_plugin_pytorch.nn.qat.combination import AddProduct, AddQuotient, Lerp, LogSumExp
from horizon_plugin_pytorch.nn.qat.conv1d import Conv1d
from horizon_plugin_pytorch.nn.qat.conv2d import (
    Conv2d,
    ConvAdd2d,
    ConvAddReLU2d,
    ConvAddReLU62d,
    ConvReLU2d,
    ConvReLU62d,
)
from horizon_plugin_pytorch.nn.qat.conv3d import Conv3d
from horizon_plugin_pytorch.nn.qat.conv_bn1d import ConvBN1d
from horizon_plugin_pytorch.nn.qat.conv_bn2d import (
    ConvBN2d,
    ConvBNAdd2d,
    ConvBNAddReLU2d,
    ConvBNAddReLU62d,
    ConvBNReLU2d,
    ConvBNReLU62d,
)
from horizon_plugin_pytorch.nn.qat.conv_bn3d import ConvBN3d
from horizon_plugin_pytorch.nn.qat.conv_transpose1d import ConvTranspose1d
from horizon_plugin_pytorch.nn.qat.conv_transpose2d import ConvTranspose2d
from horizon_plugin_pytorch.nn.qat.conv_transpose3d import ConvTranspose3d
from horizon_plugin_pytorch.nn.qat.correlation import Correlation
from horizon_plugin_pytorch.nn.qat.div import Div
from horizon_plugin_pytorch.nn.qat.embedding import Embedding
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.glu import GLU
from horizon_plugin_pytorch.nn.qat.grid_sample import GridSample
from horizon_plugin_pytorch.nn.qat.group_norm import GroupNorm
from horizon_plugin_pytorch.nn.qat.instance_norm import InstanceNorm
from horizon_plugin_pytorch.nn.qat.interpolate import Interpolate
from horizon_plugin_pytorch.nn.qat.layer_norm import LayerNorm
from horizon_plugin_pytorch.nn.qat.linear import Linear
from horizon_plugin_pytorch.nn.qat.linear_bn import LinearBN
from horizon_plugin_pytorch.nn.qat.matmul import AddMatmul, Einsum
from horizon_plugin_pytorch.nn.qat.multi_head_attention import MultiheadAttention
from horizon_plugin_pytorch.nn.qat.multi_scale_deform_attn import MultiScaleDeformableAttention
from horizon_plugin_pytorch.nn.qat.point_pillars_scatter import PointPillarsScatter
from horizon_plugin_pytorch.nn.qat.prelu import PReLU
from horizon_plugin_pytorch.nn.qat.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from horizon_plugin_pytorch.nn.qat.reduction import CumSum, Norm, Normalize, Std, Var, VarMean
from horizon_plugin_pytorch.nn.qat.relu import ReLU, ReLU6
from horizon_plugin_pytorch.nn.qat.rms_norm import RMSNorm
from horizon_plugin_pytorch.nn.qat.roi_align import MultiScaleRoIAlign, RoIAlign
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.qat.softmax import LogSoftmax, Softmax, SoftmaxBernoulli2
from horizon_plugin_pytorch.nn.qat.stubs import DeQuantStub, QuantStub
from horizon_plugin_pytorch.nn.qat.upsampling import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d
from horizon_plugin_pytorch.nn.qat.where import Where

__all__ = [
    "GLU", "GRU", "LSTM", "RNN", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AddMatmul",
    "AddProduct", "AddQuotient", "AffineGrid", "Assign", "Atan2", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BevPoolV2", "ChannelScale2d", "Conv1d", "Conv2d", "Conv3d",
    "ConvAdd2d", "ConvAddReLU2d", "ConvAddReLU62d", "ConvBN1d", "ConvBN2d", "ConvBN3d", "ConvBNAdd2d",
    "ConvBNAddReLU2d", "ConvBNAddReLU62d", "ConvBNReLU2d", "ConvBNReLU62d", "ConvReLU2d", "ConvReLU62d",
    "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Correlation", "CumSum", "DeQuantStub", "Div",
    "Einsum", "Embedding", "FloatFunctional", "GRUCell", "GridSample", "GroupNorm", "InstanceNorm", "Interpolate",
    "LSTMCell", "LayerNorm", "Lerp", "Linear", "LinearBN", "LogSoftmax", "LogSumExp",
    "MultiScaleDeformableAttention", "MultiScaleRoIAlign", "MultiheadAttention", "Norm", "Normalize", "PReLU",
    "PointPillarsScatter", "QuantStub", "RMSNorm", "RNNCell", "ReLU", "ReLU6", "RoIAlign",
    "ScaledDotProductAttention", "SegmentLUT", "Softmax", "SoftmaxBernoulli2", "Std", "SyncBatchNorm", "Upsample",
    "UpsamplingBilinear2d", "UpsamplingNearest2d", "Var", "VarMean", "Where",
]  # fmt: skip
