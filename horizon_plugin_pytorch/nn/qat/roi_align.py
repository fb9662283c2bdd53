"""Features of boxes while training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.nn.qat.module import GridModule, RoundedModule, real
from horizon_plugin_pytorch.nn.quantized import roi_align as quantized
from horizon_plugin_pytorch.nn.roi_align import MultiScaleRoIAlign as _FloatMulti
from horizon_plugin_pytorch.nn.roi_align import RoIAlign as _Float
from horizon_plugin_pytorch.nn.roi_align import roi_align
from horizon_plugin_pytorch.operators.support import INT8, Limit, Support, on
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor

_ADAPTIVE = "sampling_ratio must be above 0: a number of samples that depends on the boxes has no quantized form"


class _Sampled:
    """What has a quantized form only if the number of samples is given."""

    @classmethod
    def require_form(cls, mod: Any) -> None:
        """Insist that the settings of a float module have a quantized form."""
        if mod.sampling_ratio < 1:
            raise UnsupportedOperatorError(f"`{cls.__name__}` {at(getattr(mod, 'path', ''))}: {_ADAPTIVE}.")


class RoIAlign(_Sampled, GridModule, _Float):  # type: ignore[misc] # forward takes what theirs takes
    """RoIAlign on the grid of its input."""

    quantized_class = quantized.RoIAlign
    takes_real = True

    @classmethod
    def from_float(cls, mod: Any) -> RoIAlign:
        """The QAT form of a RoIAlign module."""
        cls.require_form(mod)
        return cls(mod.output_size, mod.spatial_scale, mod.sampling_ratio, mod.aligned)

    def _train(self, x: QTensor, boxes: Any) -> Tensor:
        if not x.is_rounded:
            return self.align(x.plain(), real(boxes))
        out = self.align(x.plain(), real(boxes), quantized.sample_bits([x]))
        return round_to_grid(out, x.scale, -1, x.dtype.min, x.dtype.max, saturate=False)


class MultiScaleRoIAlign(_Sampled, RoundedModule, _FloatMulti):  # type: ignore[misc]
    """MultiScaleRoIAlign with its output rounded."""

    quantized_class = quantized.MultiScaleRoIAlign
    takes_real = True

    @classmethod
    def from_float(cls, mod: Any) -> MultiScaleRoIAlign:
        """The QAT form of a MultiScaleRoIAlign module."""
        cls.require_form(mod)
        self = cls(
            mod.output_size, mod.feature_strides, mod.sampling_ratio, mod.canonical_box_size, mod.canonical_level,
            mod.aligned,
        )  # fmt: skip
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self

    def _train(self, features: Any, boxes: Any) -> Any:
        assert self.activation_post_process is not None
        rounded = [x for x in features if isinstance(x, QTensor) and x.is_rounded]
        bits = quantized.sample_bits(rounded) if rounded else 0
        return self.activation_post_process(self.align(real(features), real(boxes), bits))


def _bind(
    input: Any, boxes: Any, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = -1,
    aligned: bool = False,
) -> Call:  # fmt: skip
    if sampling_ratio < 1:
        raise NotBindable(_ADAPTIVE)
    settings = {
        "output_size": output_size, "spatial_scale": spatial_scale, "sampling_ratio": sampling_ratio, "aligned": aligned
    }  # fmt: skip
    return Call(_Float, (input, boxes), settings=settings)


_SAMPLES = Limit(
    "1 to 5 feature maps", lambda use: 1 <= len([x for x in use.inputs if x.format.startswith("qint")]) <= 5,
    lambda use: f"{len(use.inputs)} inputs", "use fewer feature maps",
)  # fmt: skip
_MARCHES = on(
    bayes=Support(INT8, INT8, limits=(_SAMPLES,), note="boxes are left, top, right, bottom, one tensor an image")
)
register(Operator(
    "roi_align", ScaleRule.INHERIT, RoIAlign, quantized.RoIAlign, (_Float,), {roi_align: _bind}, marches=_MARCHES,
    real_inputs=("boxes",),
))  # fmt: skip
register(Operator(
    "multi_scale_roi_align", ScaleRule.OWN, MultiScaleRoIAlign, quantized.MultiScaleRoIAlign, (_FloatMulti,),
    marches=_MARCHES, real_inputs=("boxes",),
))  # fmt: skip
