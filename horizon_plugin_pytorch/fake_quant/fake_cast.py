"""Values that the chip computes in float16."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.statistics.partial import Partial
from horizon_plugin_pytorch.untraced import applied


class _Cast(torch.autograd.Function):
    """Round to the numbers of `dtype`; the gradient passes where nothing was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.edges = (low, high)
        return x.clamp(low, high).to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        low, high = ctx.edges
        return torch.where((x >= low) & (x <= high), grad, 0.0), None, None, None


class FakeCast(nn.Module):
    """Round to float16 and stay in float32; values beyond its range are clipped to its ends.

    A qconfig that has it as `activation` keeps an operator in float16, one that has it as `weight` its weights too.

    Args:
        dtype: ``torch.float16``.
        min_val, max_val: where to clip; None takes the ends of the format.

    >>> FakeCast()(torch.tensor([1.0, 0.1, 1e6]))
    tensor([1.0000e+00, 9.9976e-02, 6.5504e+04])
    """

    enabled: ClassVar[bool] = True
    ch_axis = -1
    has_statistics = True

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        min_val: float | None = None,
        max_val: float | None = None,
        channel_len: int = 1,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float16, torch.float32):
            raise QuantizationConfigError(f"FakeCast: dtype must be torch.float16 or torch.float32, got {dtype}.")
        info = torch.finfo(dtype)
        self.dtype = dtype
        self.min_val = info.min if min_val is None else float(min_val)
        self.max_val = info.max if max_val is None else float(max_val)
        self.owner = ""

    @classmethod
    def with_args(cls, **kwargs: Any) -> Partial:
        """A constructor with some arguments already given."""
        return Partial(cls, kwargs)

    def set_owner(self, path: str) -> None:
        """The module's path in the model, for messages."""
        self.owner = path

    @classmethod
    def enable(cls) -> None:
        """Cast, everywhere. This is how it starts."""
        FakeCast.enabled = True

    @classmethod
    def disable(cls) -> None:
        """Compute in float32 everywhere, to see what float16 costs."""
        FakeCast.enabled = False

    def forward(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS, owned: bool = False) -> Tensor:
        """The nearest numbers of the format.

        Args:
            limits: range of a fused activation, such as ``(0, 6)`` for ReLU6.
            owned: as for `FakeQuantize`.
        """
        fake_quantize_base.check(self.owner, None, x)
        if limits != NO_LIMITS:
            x = x.clamp(*limits)
        if not FakeCast.enabled:
            return x
        return applied(_Cast, x, self.dtype, self.min_val, self.max_val)

    def weight(self, weight: Tensor) -> Tensor:
        """The nearest weights of the format."""
        return self(weight)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, min_val={self.min_val}, max_val={self.max_val}"


def is_cast(part: Any) -> bool:
    """Does this part of a qconfig make a `FakeCast`?"""
    return isinstance(part, Partial) and isinstance(part.cls, type) and issubclass(part.cls, FakeCast)


default_fp16_fake_cast = FakeCast.with_args(dtype=torch.float16)

show_at("quantization.fake_cast", FakeCast, is_cast)
