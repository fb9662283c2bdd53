"""Deformable attention while training: offsets and scores in int16, samples on the grid of the values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import ConversionError
from horizon_plugin_pytorch.fake_quant.qconfig import QConfig
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.nn import multi_scale_deform_attn as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite, inner_qconfig, on_both, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.linear import Linear
from horizon_plugin_pytorch.nn.qat.module import RoundedModule, real
from horizon_plugin_pytorch.nn.qat.softmax import Softmax
from horizon_plugin_pytorch.nn.quantized import multi_scale_deform_attn as quantized
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor


class DeformableSampling(RoundedModule):
    """Samples of the values at learned places, and their weighted sum."""

    quantized_class = quantized.DeformableSampling
    takes_real = True

    def __init__(self, qconfig: Any) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.activation_post_process = qconfig.activation(channel_len=1)

    def _train(self, value: QTensor, offsets: Any, weights: Any, reference: Any, shapes: floats.Shapes) -> Any:
        assert self.activation_post_process is not None
        arguments = (real(value), real(offsets), real(weights), real(reference), shapes)
        if not value.is_rounded:
            return self.activation_post_process(floats.deformable_attention(*arguments))
        unit = float(1 << fp.weight_bits(value.dtype.bits))

        def on_grid(grid: Tensor, size: tuple[int, int]) -> Tensor:
            """Places in whole units of a pixel's part."""
            sides = torch.tensor([size[1], size[0]], dtype=torch.float64, device=grid.device)
            position = (((grid.detach() + 1) * sides - 1) / 2 * unit + 0.5).floor_() / unit
            return grid + (((2 * position + 1) / sides - 1).to(grid.dtype) - grid.detach())

        def on_samples(samples: Tensor) -> Tensor:
            return round_to_grid(samples, value.scale, -1, value.dtype.min, value.dtype.max, saturate=False)

        return self.activation_post_process(floats.deformable_attention(*arguments, on_grid, on_samples))


def _linear(layer: nn.Linear, qconfig: Any) -> Linear:
    layer.qconfig = qconfig
    return Linear.from_float(layer)


class MultiScaleDeformableAttention(Composite):
    """`MultiScaleDeformableAttention` from smaller operators; conversion replaces these.

    Parts: `query_add`, `value_proj`, `sampling_offsets` and `attention_weights` (int16), `softmax`, `sampling`,
    `output_proj`, `identity_add`.
    """

    follows = frozenset({"batch_first"})

    def __init__(self, source: floats.MultiScaleDeformableAttention, qconfig: Any) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.num_heads, self.num_levels, self.num_points = source.num_heads, source.num_levels, source.num_points
        self.batch_first, self.dropout = source.batch_first, source.dropout.p
        fine = QConfig(activation=inner_qconfig(qconfig).activation, weight=qconfig.weight)
        self.query_add = optional(FloatFunctional(qconfig))
        self.value_proj, self.output_proj = (_linear(x, qconfig) for x in (source.value_proj, source.output_proj))
        self.sampling_offsets = _linear(source.sampling_offsets, fine)
        self.attention_weights = _linear(source.attention_weights, fine)
        self.softmax = Softmax(-1, qconfig)
        self.sampling = DeformableSampling(qconfig)
        self.identity_add = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: Any) -> MultiScaleDeformableAttention:
        """The QAT form."""
        return cls(mod, mod.qconfig)

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        identity: Any = None,
        query_pos: Any = None,
        key_padding_mask: Any = None,
        reference_points: Any = None,
        spatial_shapes: Any = None,
    ) -> Any:
        value = query if value is None else value
        identity = query if identity is None else identity
        if not all(isinstance(x, QTensor) for x in (query, value, identity)):
            raise ConversionError(
                f"MultiScaleDeformableAttention {self.place} got a float query, value or identity; put a QuantStub "
                "before it. Reference points alone may be real numbers."
            )
        query = query if query_pos is None else self.query_add.add(query, query_pos)
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        batch, count = query.shape[:2]
        sizes = (batch, count, self.num_heads, self.num_levels, self.num_points)
        value = self.value_proj(value)
        if key_padding_mask is not None:
            keep = 1.0 - key_padding_mask.to(torch.float32).unsqueeze(-1)
            value = on_both(lambda x: x * keep, value)
        offsets = self.sampling_offsets(query).reshape(*sizes, 2)
        scores = self.attention_weights(query).reshape(*sizes[:3], -1)
        weights = self.softmax(scores).reshape(sizes)
        heads = value.unflatten(-1, (self.num_heads, -1))
        out = self.sampling(heads, offsets, weights, reference_points, floats.level_shapes(spatial_shapes))
        out = self.output_proj(out)
        out = out if self.batch_first else out.transpose(0, 1)
        out = F.dropout(out, self.dropout, self.training) if self.dropout else out
        return self.identity_add.add(out, identity)


register(Operator(
    "multi_scale_deformable_attention", ScaleRule.OWN, MultiScaleDeformableAttention, MultiScaleDeformableAttention,
    (floats.MultiScaleDeformableAttention,), marches=FROM_BAYES,
    real_inputs=("reference_points", "key_padding_mask", "spatial_shapes"),
))  # fmt: skip
