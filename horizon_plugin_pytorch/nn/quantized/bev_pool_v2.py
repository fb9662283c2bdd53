"""Camera features lifted into a bird's eye view, on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.bev_pool_v2 import as_image, require_view
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class BevPoolV2(QuantizedModule):
    """An exact sum of products for each cell, requantized once."""

    def forward(
        self,
        depth: Any,
        feat: Any,
        ranks_depth: Tensor,
        ranks_feat: Tensor,
        ranks_bev: Tensor,
        interval_starts: Tensor,
        interval_lengths: Tensor,
        bev_feat_shape: Any,
    ) -> QTensor:
        depth, feat = self.quantized_input(depth), self.quantized_input(feat)
        require_view(depth, feat, bev_feat_shape)
        batch, z, y, x = (int(n) for n in bev_feat_shape[:4])

        def plan() -> Tensor:
            assert self.scale is not None
            ratio = depth.scale.double() * feat.scale.double() / self.scale.double()
            return fp.choose_factor(ratio, self.low, self.high, fp.INT32_MAX).to(feat.device)

        factor = self._plans.get((depth, feat), "factor", plan)
        cells = fp.bev_pool(
            depth.plain().flatten(), feat.plain().flatten(0, -2), ranks_depth, ranks_feat, ranks_bev, interval_starts,
            interval_lengths, batch * z * y * x, depth.dtype.bits + feat.dtype.bits - 2, factor, self.low, self.high,
        )  # fmt: skip
        return self.output(as_image(cells, (batch, z, y, x)))
