"""Statistics, configuration, and the verbs: prepare, calibrate, convert."""

from horizon_plugin_pytorch.dtype import qinfo, qint8, qint16  # noqa: I001 - statistics before operators before verbs
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode, set_qat_mode
from horizon_plugin_pytorch.quantization import fake_quantize, observer, observer_v2  # noqa: F401 - attributes
from horizon_plugin_pytorch.quantization.observer import (
    FixedScaleObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from horizon_plugin_pytorch.quantization.fake_quantize import (
    CalibFakeQuantize,
    DynamicFakeQuantize,
    FakeQuantize,
    FakeQuantState,
    freeze_qat_module,
    get_fake_quantize,
    set_fake_quantize,
)
from horizon_plugin_pytorch.fake_quant.learnable import (
    PACTFakeQuantize,
    _LearnableFakeQuantize,
    parameter_groups,
)
from horizon_plugin_pytorch.quantization.stubs import DeQuantStub, QuantStub, QuantWrapper
from horizon_plugin_pytorch.quantization.qconfig import (
    QConfig,
    default_8bit_fake_quant,
    default_calib_8bit_fake_quant_qconfig,
    default_calib_8bit_weight_16bit_act_fake_quant_qconfig,
    default_calib_8bit_weight_32bit_out_fake_quant_qconfig,
    default_calib_out_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_fixed_act_fake_quant_qconfig,
    default_qat_8bit_lsq_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig,
    default_qat_8bit_weight_32bit_out_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
    default_weight_8bit_fake_quant,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    get_qconfig,
    per_channel_qat_8bit_qconfig,
)
from horizon_plugin_pytorch import nn  # operators, on top of statistics
from horizon_plugin_pytorch.nn.qat.stubs import _WrappedCalibFakeQuantize
from horizon_plugin_pytorch.calibration.calibrate import calibrate
from horizon_plugin_pytorch.quantization.auto_calibration import auto_calibrate, auto_calibration
from horizon_plugin_pytorch.quantization.weight_reconstruction import mix_calibration, weight_reconstruction
from horizon_plugin_pytorch.calibration.bias_correction import correct_bias
from horizon_plugin_pytorch.calibration.bn_reestimation import reestimate_bn
from horizon_plugin_pytorch.calibration.centering import center_norms
from horizon_plugin_pytorch.calibration.equalization import equalize
from horizon_plugin_pytorch.calibration.smoothing import smooth_norms
from horizon_plugin_pytorch.analysis.tuning.ranges import search_scales
from horizon_plugin_pytorch.workflow.checkpoint import load_calib_state_dict
from horizon_plugin_pytorch.quantization.fuse_modules import (
    fuse_conv_shared_modules,
    fuse_known_modules,
    fuse_modules,
)
from horizon_plugin_pytorch.quantization import qconfig_setter, qconfig_template
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.quantization.explain import explain
from horizon_plugin_pytorch.quantization.quantize import convert, load_observer_params, prepare_qat
from horizon_plugin_pytorch.quantization.quantize_fx import convert_fx, fuse_fx, prepare_qat_fx
from horizon_plugin_pytorch.capture.graph_text import compare_graphs
from horizon_plugin_pytorch.passes.fuse_mode import FuseMode
from horizon_plugin_pytorch.quantization.prepare import PrepareMethod, prepare
from horizon_plugin_pytorch.workflow.first_generation import prepare_calibration, prepare_calibration_fx
from horizon_plugin_pytorch.analysis.limits import check_model
from horizon_plugin_pytorch.export.compiler import compile_model, export_hbir, perf_model, visualize_model

__all__ = [
    "CalibFakeQuantize",
    "DeQuantStub",
    "DynamicFakeQuantize",
    "FakeQuantState",
    "FakeQuantize",
    "FixedScaleObserver",
    "FuseMode",
    "March",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PACTFakeQuantize",
    "PrepareMethod",
    "QATMode",
    "QConfig",
    "QconfigSetter",
    "QuantStub",
    "QuantWrapper",
    "_LearnableFakeQuantize",
    "_WrappedCalibFakeQuantize",
    "auto_calibrate",
    "auto_calibration",
    "calibrate",
    "center_norms",
    "check_model",
    "compare_graphs",
    "compile_model",
    "convert",
    "convert_fx",
    "correct_bias",
    "default_8bit_fake_quant",
    "default_calib_8bit_fake_quant_qconfig",
    "default_calib_8bit_weight_16bit_act_fake_quant_qconfig",
    "default_calib_8bit_weight_32bit_out_fake_quant_qconfig",
    "default_calib_out_8bit_fake_quant_qconfig",
    "default_qat_8bit_fake_quant_qconfig",
    "default_qat_8bit_fixed_act_fake_quant_qconfig",
    "default_qat_8bit_lsq_quant_qconfig",
    "default_qat_8bit_weight_16bit_act_fake_quant_qconfig",
    "default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig",
    "default_qat_8bit_weight_32bit_out_fake_quant_qconfig",
    "default_qat_out_8bit_fake_quant_qconfig",
    "default_weight_8bit_fake_quant",
    "equalize",
    "explain",
    "export_hbir",
    "freeze_qat_module",
    "fuse_conv_shared_modules",
    "fuse_fx",
    "fuse_known_modules",
    "fuse_modules",
    "get_default_calib_qconfig",
    "get_default_qat_out_qconfig",
    "get_default_qat_qconfig",
    "get_default_qconfig",
    "get_fake_quantize",
    "get_qat_mode",
    "get_qconfig",
    "load_calib_state_dict",
    "load_observer_params",
    "mix_calibration",
    "observer",
    "observer_v2",
    "parameter_groups",
    "per_channel_qat_8bit_qconfig",
    "perf_model",
    "prepare",
    "prepare_calibration",
    "prepare_calibration_fx",
    "prepare_qat",
    "prepare_qat_fx",
    "qconfig_setter",
    "qconfig_template",
    "qinfo",
    "qint8",
    "qint16",
    "reason_of",
    "reestimate_bn",
    "search_scales",
    "set_fake_quantize",
    "set_qat_mode",
    "smooth_norms",
    "visualize_model",
    "weight_reconstruction",
]
del nn
