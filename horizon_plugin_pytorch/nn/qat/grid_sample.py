"""Sampling of an image at given places while training: the scale of the image is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.nn.grid_sample import GridSample as _Float
from horizon_plugin_pytorch.nn.grid_sample import Warp as _FloatWarp
from horizon_plugin_pytorch.nn.grid_sample import autocasted_grid_sample_outer, channels_last, warp
from horizon_plugin_pytorch.nn.qat.module import GridModule, real
from horizon_plugin_pytorch.nn.quantized import grid_sample as quantized
from horizon_plugin_pytorch.operators.support import INT8, INTS, Limit, Support, Use, on
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, Trait, register
from horizon_plugin_pytorch.qtensor import QTensor

_MODES, _PADDING_MODES = ("bilinear", "nearest"), ("zeros", "border", "reflection")


def _remedy(mode: str, padding_mode: str) -> str:
    """What is wrong with the arguments; empty if nothing is."""
    if mode not in _MODES:
        return f"mode={mode!r} has no quantized form; use {' or '.join(map(repr, _MODES))}"
    return "" if padding_mode in _PADDING_MODES else f"padding_mode must be one of {', '.join(_PADDING_MODES)}"


class _Sampling(GridModule):
    """Positions are rounded as the chip rounds them; the gradient passes straight through that."""

    takes_real = True
    mode: str
    padding_mode: str

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a sampling module."""
        self = cls(
            **{name: getattr(mod, name) for name in ("mode", "padding_mode", "align_corners") if hasattr(mod, name)}
        )
        self.path = getattr(mod, "path", "")
        self.require_settings()
        return self

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that the settings of a float module have a quantized form."""
        cls.from_float(mod)

    def require_settings(self) -> None:
        remedy = _remedy(self.mode, self.padding_mode)
        if remedy:
            raise UnsupportedOperatorError(f"{type(self).__name__} {self.place}: {remedy}.")

    def _train(self, x: QTensor, grid: Any) -> Tensor:
        place = real(grid)
        bits = quantized.GridSample.bits(self, x)  # type: ignore[arg-type]
        if x.is_rounded and bits:
            place = place + (self._rounded(place.detach(), x.shape[-2:], bits) - place.detach())
        out = self.real_value(x.plain(), place)
        return round_to_grid(out, x.scale, -1, x.dtype.min, x.dtype.max, saturate=False) if x.is_rounded else out

    def _rounded(self, grid: Tensor, size: Sequence[int], bits: int) -> Tensor:
        """The grid whose positions are whole numbers of ``1 / 2**bits`` pixels."""
        raise NotImplementedError


class GridSample(_Sampling, _Float):  # type: ignore[misc] # forward takes what theirs takes
    """GridSample on the grid of its input."""

    quantized_class = quantized.GridSample

    def _rounded(self, grid: Tensor, size: Sequence[int], bits: int) -> Tensor:
        lists = fp.grid_factors(size[0], size[1], 1.0, bits, self.align_corners, False)
        factor, offset = (torch.tensor(values, dtype=torch.float64, device=grid.device) for values in lists)
        position = (grid.double() * factor + offset + 0.5).floor_()
        return ((position - offset) / factor.clamp(min=1.0)).to(grid.dtype)


class Warp(_Sampling, _FloatWarp):  # type: ignore[misc]
    """Warp on the grid of its input."""

    quantized_class = quantized.Warp

    def forward(self, input: Any, grid: Any) -> Any:
        return super().forward(input, channels_last(grid))

    def _rounded(self, grid: Tensor, size: Sequence[int], bits: int) -> Tensor:
        return (grid * (1 << bits) + 0.5).floor_() / (1 << bits)


def _bind(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Call:
    _check(mode, padding_mode)
    return Call(
        _Float,
        (input, grid),
        settings={"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners},
    )


def _bind_warp(x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros") -> Call:
    _check(mode, padding_mode)
    return Call(_FloatWarp, (x, grid), settings={"mode": mode, "padding_mode": padding_mode})


def _check(mode: str, padding_mode: str) -> None:
    remedy = _remedy(mode, padding_mode)
    if remedy:
        raise NotBindable(remedy)


def _image(use: Use) -> tuple[int, int]:
    return use.inputs[0].shape[-2], use.inputs[0].shape[-1]


_ADVICE = "sample a smaller image, or split it"
_LIMITS = (
    Limit("input qint8", lambda use: use.inputs[0].format == "qint8", lambda use: use.inputs[0].format,
          "give the producer of the image a qint8 qconfig; only the grid may be qint16"),
    Limit("padding_mode zeros or border",
          lambda use: use.attributes.get("padding_mode", "zeros") in ("zeros", "border"),
          lambda use: str(use.attributes["padding_mode"]), "use padding_mode='border'"),
    Limit("1 <= H, W <= 1024", lambda use: all(1 <= side <= 1024 for side in _image(use)), advice=_ADVICE),
    Limit("H * W <= 720 * 1024", lambda use: _image(use)[0] * _image(use)[1] <= 720 * 1024, advice=_ADVICE),
)  # fmt: skip
_MARCHES = on(bayes=Support(INTS, INT8, limits=_LIMITS, note="bilinear or nearest; the grid is qint8 or qint16"))
register(Operator(
    "grid_sample", ScaleRule.INHERIT, GridSample, quantized.GridSample, (_Float,),
    {F.grid_sample: _bind, autocasted_grid_sample_outer: _bind}, marches=_MARCHES, real_inputs=("grid",),
    traits=Trait.SAMPLER,
))  # fmt: skip
register(Operator(
    "warp", ScaleRule.INHERIT, Warp, quantized.Warp, (_FloatWarp,), {warp: _bind_warp}, marches=_MARCHES,
    real_inputs=("grid",), traits=Trait.SAMPLER,
))  # fmt: skip
