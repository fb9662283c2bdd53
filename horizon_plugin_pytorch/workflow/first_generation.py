"""The first generation's calibration, over the same machinery: a prepared model in the CALIBRATION state."""

from __future__ import annotations

from typing import Any

from torch import nn

from horizon_plugin_pytorch.errors import require_module
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.qconfig import default_calib_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.workflow.eager import prepare_qat
from horizon_plugin_pytorch.workflow.symbolic import prepare_qat_fx


def prepare_calibration(model: nn.Module, inplace: bool = False) -> nn.Module:
    """`prepare_qat` with the model left in eval mode and in the CALIBRATION state."""
    require_module(model, "prepare_calibration")
    return _calibrating(prepare_qat(model, inplace=inplace))


def prepare_calibration_fx(
    model: nn.Module,
    qconfig_dict: dict[str, Any] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    optimize_graph: bool = False,
    hybrid: bool = False,
    hybrid_dict: dict[str, list] | None = None,
) -> nn.Module:
    """`prepare_qat_fx` with the model left in eval mode and in the CALIBRATION state; int8 if nothing is said.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
    >>> set_march(March.BAYES)
    >>> prepare_calibration_fx(QuantWrapper(nn.Conv2d(1, 2, 1))).quant.activation_post_process.is_quantizing
    False
    """
    require_module(model, "prepare_calibration_fx")
    chosen = {"": default_calib_8bit_fake_quant_qconfig} if qconfig_dict is None else qconfig_dict
    return _calibrating(prepare_qat_fx(model, chosen, prepare_custom_config_dict, optimize_graph, hybrid, hybrid_dict))


def _calibrating(model: nn.Module) -> nn.Module:
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    return model
