"""Integer modules, and `FloatFunctional`."""

from horizon_plugin_pytorch.nn.quantized.adaptive_avg_pool import AdaptiveAvgPool1d, AdaptiveAvgPool3d
from horizon_plugin_pytorch.nn.quantized.adaptive_avg_pool2d import AdaptiveAvgPool2d
from horizon_plugin_pytorch.nn.quantized.atan2 import Atan2
from horizon_plugin_pytorch.nn.quantized.avg_pool import AvgPool1d, AvgPool3d
from horizon_plugin_pytorch.nn.quantized.avg_pool2d import AvgPool2d
from horizon_plugin_pytorch.nn.quantized.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from horizon_plugin_pytorch.nn.quantized.bev_pool_v2 import BevPoolV2
from horizon_plugin_pytorch.nn.quantized.channel_scale import ChannelScale2d
from horizon_plugin_pytorch.nn.quantized.conv1d import Conv1d
from horizon_plugin_pytorch.nn.quantized.conv2d import (
    Conv2d,
    ConvAdd2d,
    ConvAddReLU2d,
    ConvAddReLU62d,
    ConvReLU2d,
    ConvReLU62d,
)
from horizon_plugin_pytorch.nn.quantized.conv3d import Conv3d
from horizon_plugin_pytorch.nn.quantized.conv_transpose1d import ConvTranspose1d
from horizon_plugin_pytorch.nn.quantized.conv_transpose2d import ConvTranspose2d
from horizon_plugin_pytorch.nn.quantized.conv_transpose3d import ConvTranspose3d
from horizon_plugin_pytorch.nn.quantized.correlation import Correlation
from horizon_plugin_pytorch.nn.quantized.embedding import Embedding
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional, QFunctional
from horizon_plugin_pytorch.nn.quantized.grid_sample import GridSample
from horizon_plugin_pytorch.nn.quantized.group_norm import GroupNorm
from horizon_plugin_pytorch.nn.quantized.instance_norm import InstanceNorm
from horizon_plugin_pytorch.nn.quantized.interpolate import Interpolate
from horizon_plugin_pytorch.nn.quantized.layer_norm import LayerNorm
from horizon_plugin_pytorch.nn.quantized.linear import Linear
from horizon_plugin_pytorch.nn.quantized.point_pillars_scatter import PointPillarsScatter
from horizon_plugin_pytorch.nn.quantized.prelu import PReLU
from horizon_plugin_pytorch.nn.quantized.quantize import DeQuantize, Quantize
from horizon_plugin_pytorch.nn.quantized.relu import ReLU, ReLU6
from horizon_plugin_pytorch.nn.quantized.rms_norm import RMSNorm
from horizon_plugin_pytorch.nn.quantized.roi_align import MultiScaleRoIAlign, RoIAlign
from horizon_plugin_pytorch.nn.quantized.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized.softmax import LogSoftmax, Softmax, SoftmaxBernoulli2
from horizon_plugin_pytorch.nn.quantized.upsampling import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d
from horizon_plugin_pytorch.nn.quantized.where import Where

__all__ = [
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "Atan2", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BevPoolV2", "ChannelScale2d", "Conv1d", "Conv2d", "Conv3d",
    "ConvAdd2d", "ConvAddReLU2d", "ConvAddReLU62d", "ConvReLU2d", "ConvReLU62d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "Correlation", "DeQuantize", "Embedding", "FloatFunctional", "GridSample", "GroupNorm",
    "InstanceNorm", "Interpolate", "LayerNorm", "Linear", "LogSoftmax", "MultiScaleRoIAlign", "PReLU",
    "PointPillarsScatter", "QFunctional", "Quantize", "RMSNorm", "ReLU", "ReLU6", "RoIAlign", "SegmentLUT", "Softmax",
    "SoftmaxBernoulli2", "SyncBatchNorm", "Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d", "Where",
]  # fmt: skip
