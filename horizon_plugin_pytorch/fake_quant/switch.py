"""Switching fake quantization off for a while, everywhere."""

from __future__ import annotations

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize


class GlobalFakeQuantSwitch:
    """Turns the rounding and observing of all integer fake quantizers off and on, whatever state they are in.

    Called inside a forward, a part of it computes in float, to see which part costs accuracy. Forwards that are kept as
    they are written can do that (`prepare` with a JIT method or EAGER); symbolic trace would call it once, while
    tracing. `FakeCast.disable` does the same to float16. Meant for measuring; train and convert with it enabled.

    >>> import torch
    >>> fq = FakeQuantize()
    >>> GlobalFakeQuantSwitch.disable()
    >>> fq(torch.tensor([0.123456])).dequantize(), fq.has_statistics
    (tensor([0.1235]), False)
    >>> GlobalFakeQuantSwitch.enable()
    """

    @staticmethod
    def enable() -> None:
        """Fake quantizers do what their state says. This is how it starts."""
        FakeQuantize.enabled = True

    @staticmethod
    def disable() -> None:
        """Fake quantizers let values pass as they are."""
        FakeQuantize.enabled = False


show_at("utils.quant_switch", GlobalFakeQuantSwitch)
