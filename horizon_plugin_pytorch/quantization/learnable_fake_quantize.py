"""Scales that are trained with the weights: LSQ and PACT."""

from horizon_plugin_pytorch.fake_quant.learnable import (
    LayerOfData,
    LearnableFakeQuantize,
    PACTFakeQuantize,
    RoundedData,
    _LearnableFakeQuantize,
    _Learned,  # noqa: F401 - named in pickles
    parameter_groups,
    rounded_data,
)

__all__ = [
    "LayerOfData",
    "LearnableFakeQuantize",
    "PACTFakeQuantize",
    "RoundedData",
    "_LearnableFakeQuantize",
    "parameter_groups",
    "rounded_data",
]
