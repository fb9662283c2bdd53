"""Switching fake quantization off for a while, everywhere."""

from horizon_plugin_pytorch.fake_quant.switch import GlobalFakeQuantSwitch

__all__ = ["GlobalFakeQuantSwitch"]
