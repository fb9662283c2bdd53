"""Features of pillars back to their places in an image while training: the scale is kept."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.point_pillars_scatter import PointPillarsScatter as _Float
from horizon_plugin_pytorch.nn.point_pillars_scatter import point_pillars_scatter
from horizon_plugin_pytorch.nn.qat.module import GridModule
from horizon_plugin_pytorch.nn.quantized import point_pillars_scatter as quantized
from horizon_plugin_pytorch.operators.support import INTS, Limit, Support, on
from horizon_plugin_pytorch.operators.table import Call, Operator, ScaleRule, register


class PointPillarsScatter(GridModule, _Float):  # type: ignore[misc] # forward takes what theirs takes
    """PointPillarsScatter on the grid of its input."""

    quantized_class = quantized.PointPillarsScatter
    takes_real = True

    @classmethod
    def from_float(cls, mod: Any) -> PointPillarsScatter:
        """The QAT form of a scatter."""
        return cls(mod.output_shape)


def _bind(voxel_features: Any, coords: Any, output_shape: Any) -> Call:
    return Call(_Float, (voxel_features, coords), {"output_shape": output_shape})


_SHAPES = Limit(
    "features [M, C], coords [M, 4]", lambda use: all(len(x.shape) == 2 for x in use.inputs[:2]),
    advice="flatten the features to [M, C]",
)  # fmt: skip
register(Operator(
    "point_pillars_scatter", ScaleRule.INHERIT, PointPillarsScatter, quantized.PointPillarsScatter, (_Float,),
    {point_pillars_scatter: _bind}, marches=on(bayes=Support(INTS, INTS, limits=(_SHAPES,))), real_inputs=("coords",),
))  # fmt: skip
