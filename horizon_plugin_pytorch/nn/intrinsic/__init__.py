"""Fused float modules: what `fuse_modules` and `fuse_fx` put in place of conv, bn, add and relu.

A module with an add is called with two tensors, the layer's input and the tensor to add, or through its `add` method,
because it stands where the model calls ``add``.
"""

from horizon_plugin_pytorch.nn.intrinsic.fused import (
    CalledByAdd,
    ConvAdd2d,
    ConvAddReLU2d,
    ConvAddReLU62d,
    ConvReLU2d,
    ConvReLU62d,
    ConvTransposeAdd2d,
    ConvTransposeAddReLU2d,
    ConvTransposeAddReLU62d,
    ConvTransposeReLU2d,
    ConvTransposeReLU62d,
    Entry,
    FusedModule,
    LinearAdd,
    LinearAddReLU,
    LinearAddReLU6,
    LinearReLU,
    LinearReLU6,
    check_rank,
    check_rank_hook,
    fused_class,
)

__all__ = [
    "CalledByAdd",
    "ConvAdd2d",
    "ConvAddReLU2d",
    "ConvAddReLU62d",
    "ConvReLU2d",
    "ConvReLU62d",
    "ConvTransposeAdd2d",
    "ConvTransposeAddReLU2d",
    "ConvTransposeAddReLU62d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU62d",
    "Entry",
    "FusedModule",
    "LinearAdd",
    "LinearAddReLU",
    "LinearAddReLU6",
    "LinearReLU",
    "LinearReLU6",
    "check_rank",
    "check_rank_hook",
    "fused_class",
]  # fmt: skip
