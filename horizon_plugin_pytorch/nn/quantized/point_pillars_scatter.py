"""Features of pillars back to their places in an image, on integers: the scale is kept."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.point_pillars_scatter import image_size, point_pillars_scatter
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule, is_real


class PointPillarsScatter(QuantizedModule):
    """Integers go to their cells; the others are 0."""

    def configure(self, mod: Any) -> None:
        self.output_shape = mod.output_shape

    def forward(self, voxel_features: Any, coords: Any, output_shape: Any = None) -> Any:
        shape = self.output_shape if output_shape is None else output_shape
        if is_real(voxel_features):
            return point_pillars_scatter(voxel_features, coords, shape)
        x = self.quantized_input(voxel_features)
        size = image_size(voxel_features, coords, shape)
        out = x.like(fp.scatter_rows(x.plain().flatten(1), coords, *size))
        out.set_range(min(x.range[0], 0), max(x.range[1], 0))
        return out

    def extra_repr(self) -> str:
        return f"output_shape={self.output_shape}"
