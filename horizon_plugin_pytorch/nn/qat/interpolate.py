"""Resizing while training: the scale of the input is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.nn.interpolate import Interpolate as _Float
from horizon_plugin_pytorch.nn.qat.module import QATModule, attach_gradient
from horizon_plugin_pytorch.nn.quantized import interpolate as quantized
from horizon_plugin_pytorch.operators.support import INT8, Limit, Support, Use, between, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, as_module, register
from horizon_plugin_pytorch.qtensor import QTensor


class _Resize(QATModule):
    """A resizing module whose output is rounded to the grid of its input."""

    copied: tuple[str, ...]

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a resizing module."""
        self: Any = cls.__new__(cls)
        QATModule.__init__(self)
        for name in cls.copied:
            setattr(self, name, getattr(mod, name))
        self.path = getattr(mod, "path", "")
        self.require_settings()
        self.qconfig = None  # it has no quantization parameters of its own
        self.activation_post_process = None
        return self

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that the settings of a float module have a quantized form."""
        cls.from_float(mod)

    def require_settings(self) -> None:
        has_antialias = getattr(self, "antialias", False)
        if self.mode not in quantized.MODES or has_antialias:
            raise UnsupportedOperatorError(
                f"interpolate {self.place} with mode={self.mode!r}{' and antialias' if has_antialias else ''} has no "
                f"quantized form; use mode={', '.join(map(repr, quantized.MODES))}, without antialias."
            )

    def forward(self, x: Any, size: Any = None) -> Any:
        wanted = () if size is None else (size,)  # torch's Upsample modules take no size
        if not isinstance(x, QTensor):
            return super().forward(x, *wanted)
        if x.grid is None:
            return x.like(self._train(x, *wanted))
        out = self.exact(x, *wanted)
        if torch.is_grad_enabled() and x.requires_grad:
            return x.like(attach_gradient(self._train(x, *wanted), out.plain()), out.grid)
        return out

    def _train(self, x: QTensor, *size: Any) -> torch.Tensor:
        if not x.is_rounded or self.mode in quantized.NEAREST:
            return super().forward(x.plain(), *size)
        rows, columns = self.twin().real_matrices(x, *size)  # type: ignore[operator]
        is_line = self.mode == "linear"
        image = x.plain().unsqueeze(-2) if is_line else x.plain()
        out = torch.matmul(rows, torch.matmul(image, columns))
        out = out.squeeze(-2) if is_line else out
        return round_to_grid(out, x.scale, -1, x.dtype.min, x.dtype.max, saturate=False)


class Interpolate(_Resize, _Float):
    """Interpolate on the grid of its input."""

    quantized_class = quantized.Interpolate
    copied = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


def _ratios(use: Use) -> list[float]:
    if not use.outputs:
        return []
    return [b / a for a, b in zip(use.inputs[0].shape[2:], use.outputs[0].shape[2:], strict=False)]


_MODES = Limit(
    "nearest or bilinear, on images", lambda use: use.attributes.get("mode", "nearest") in ("nearest", "bilinear"),
    lambda use: str(use.attributes.get("mode")), "use mode='nearest' or 'bilinear'",
)  # fmt: skip
_BERNOULLI2 = Limit(
    "1/256 < ratio <= 256", lambda use: all(1 / 256 < ratio <= 256 for ratio in _ratios(use)),
    lambda use: f"ratio {', '.join(f'{ratio:.4g}' for ratio in _ratios(use))}", "resize in two steps",
)  # fmt: skip
_CORNERS = Limit(
    "align_corners False or None", lambda use: not use.attributes.get("align_corners"),
    lambda use: "align_corners=True", "leave align_corners out",
)  # fmt: skip
_RECOMPUTE = Limit(
    "recompute_scale_factor=True with scale_factor",
    lambda use: use.attributes.get("scale_factor") is None or bool(use.attributes.get("recompute_scale_factor")),
    lambda use: f"scale_factor={use.attributes.get('scale_factor')}",
    "give recompute_scale_factor=True, or the size",
)
_SIZES = (_MODES, between("C", 1, 8192), between("H", 1, 8192), between("W", 1, 8192))
# torch's UpsamplingBilinear2d and UpsamplingNearest2d have no such arguments.
UPSAMPLING_MARCHES = on(
    bernoulli2=Support(INT8, INT8, limits=(_MODES, _BERNOULLI2)), bayes=Support(INT8, INT8, limits=_SIZES)
)
RESIZE_MARCHES = on(
    bernoulli2=UPSAMPLING_MARCHES["bernoulli2"], bayes=Support(INT8, INT8, limits=(*_SIZES, _CORNERS, _RECOMPUTE))
)
register(Operator(
    "interpolate", ScaleRule.INHERIT, Interpolate, quantized.Interpolate, (_Float,),
    {F.interpolate: as_module(
        _Float,
        "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
        "antialias=False",
        at_run_time=("size",),
    )},
    marches=RESIZE_MARCHES,
))  # fmt: skip
