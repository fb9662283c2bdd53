"""Putting values on the integer grid while training, and switching that on and off."""

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize, is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    FakeQuantState,
    default_8bit_fake_quant,
    default_weight_8bit_fake_quant,
)
from horizon_plugin_pytorch.fake_quant.learnable import PACTFakeQuantize, _LearnableFakeQuantize
from horizon_plugin_pytorch.fake_quant.loaded_scale import LoadedScale
from horizon_plugin_pytorch.fake_quant.states import (
    freeze_qat_module,
    get_fake_quantize,
    keep_ranges,
    observe_together,
    set_fake_quantize,
)
from horizon_plugin_pytorch.nn.qat.stubs import _WrappedCalibFakeQuantize

__all__ = [
    "CalibFakeQuantize",
    "DynamicFakeQuantize",
    "FakeQuantState",
    "FakeQuantize",
    "LoadedScale",
    "PACTFakeQuantize",
    "_LearnableFakeQuantize",
    "_WrappedCalibFakeQuantize",
    "default_8bit_fake_quant",
    "default_weight_8bit_fake_quant",
    "freeze_qat_module",
    "get_fake_quantize",
    "is_dynamic",
    "keep_ranges",
    "observe_together",
    "qint8",
    "qint16",
    "set_fake_quantize",
]
