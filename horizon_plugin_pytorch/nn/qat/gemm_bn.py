"""Layers whose batch normalisation goes on training: `QATMode.WithBN` and `QATMode.WithBNReverseFold`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.intrinsic import BN_FORMS, by_output, fold, fold_bn, gain_of, rank_for
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, qat_forms, register_fused
from horizon_plugin_pytorch.qat_mode import QATMode, get_qat_mode

_SMALLEST_SCALE = 2.0**-60


class QATGemmBN(QATGemm):
    """A layer and its batch normalisation `bn`, mixed into the QAT layer.

    With ``g = gamma / sqrt(running_var + eps)`` and the scales ``s`` of the raw weight ``W``:

    * while `bn` trains, ``bn(layer(x, w))`` is computed with batch statistics, which move the running ones. `WithBN`
      rounds the raw weight: ``w = round(W)`` on the grid of ``s``. `WithBNReverseFold` rounds the folded one on the
      grid that is deployed, and divides back: ``w = round(W * g) / g``;
    * otherwise (``eval()``, a frozen `bn`, VALIDATION) the folded layer runs as it is deployed.

    Deployed are ``W * g`` and its scales ``s * |g|``. They follow the statistics at once, and their integers are those
    of the raw weight, but for the sign of ``g``. Only the groups of a transposed layer, which share scales, take the
    largest ``|g|`` among them.
    """

    plain_class: ClassVar[type[QATGemm]]
    bn: Any
    qat_mode: QATMode = QATMode.WithBN
    groups: int = 1

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form in the current mode; parameters and statistics are shared with `mod`."""
        if get_qat_mode() is QATMode.FuseBN:  # fused in another mode
            folded = copy.copy(mod)
            folded._modules = {**mod._modules, "conv": fold_bn(mod.conv, mod.bn)}
            return cls.plain_class.from_float(folded)
        self = super().from_float(mod)
        self.bn, self.qat_mode = mod.bn, get_qat_mode()
        self.input_rank = rank_for(mod.conv, mod.bn)
        return self

    def deployed(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return *fold(self, self.bn), self._deployed_scale()

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        gain = gain_of(self.bn)
        has_gain = gain.abs() > _SMALLEST_SCALE
        by_channel = by_output(torch.where(has_gain, gain, 1.0), self)
        super().set_weight(torch.where(by_output(has_gain, self), weight.double() / by_channel, self.weight.double()))

    @property
    def bias_place(self) -> tuple[nn.Module, str]:
        return self.bn, "bias"

    @property
    def moved_bias(self) -> Tensor | None:
        return self.bn.bias

    def _deployed_scale(self) -> Tensor:
        scale, gain = self.weight_fake_quant.sound_scale(), gain_of(self.bn).detach().abs()
        if self.weight_axis:
            gain = gain.reshape(self.groups, -1).amax(0)
        return (scale * gain).clamp(min=_SMALLEST_SCALE).to(scale.dtype)

    def layer(self, x: Tensor) -> Tensor:
        quantizer = self.weight_fake_quant
        if quantizer.is_observing:
            self.observe_weight()
        if self.bn.training and not self.is_exact:
            weight = self._training_weight() if quantizer.is_quantizing else self.weight
            return self.bn(self.product(x, weight, self.bias))
        weight, bias = fold(self, self.bn)
        return self.product(x, self._round_folded(weight) if quantizer.is_quantizing else weight, bias)

    def _training_weight(self) -> Tensor:
        if self.qat_mode is QATMode.WithBN:
            return self.weight_fake_quant.round_weight(self.weight)
        gain = by_output(gain_of(self.bn).detach(), self).to(self.weight.dtype)
        has_gain = gain.abs() > _SMALLEST_SCALE  # without, nothing is deployed; its raw weight lets gamma grow again
        rounded = self._round_folded(self.weight * gain) / torch.where(has_gain, gain, 1.0)
        return torch.where(has_gain, rounded, self.weight)

    def _round_folded(self, weight: Tensor) -> Tensor:
        return self.weight_fake_quant.round_weight(weight, self._deployed_scale())


def with_bn(layer: Any, plain: Sequence[type[QATGemm]], quantized: ModuleType, module: str) -> list[type[QATGemmBN]]:
    """The forms of a QAT layer that keep batch normalisation, with their rows in the table.

    Args:
        layer: the QAT layer.
        plain: its fused forms without batch normalisation.
        quantized: the module that has the integer classes.
        module: name of the module that has the new classes as attributes.
    """
    base = type(f"{layer.__name__}WithBN", (QATGemmBN, layer), {"__module__": module, "__doc__": QATGemmBN.__doc__})
    by_name = {cls.__name__: cls for cls in (layer, *plain)}
    made: Any = qat_forms(base, quantized, module, BN_FORMS)
    for cls in made:
        cls.plain_class = by_name[cls.form.without_bn.name_of(layer.float_class)]
    register_fused(layer, made)
    return made
