"""Fused float modules: what `fuse_modules` and `fuse_fx` put in place of conv, bn, add and relu.

There is one for each layer (Conv1d, Conv2d, Conv3d, their transposed forms, Linear) and each of what may follow it,
called ``Conv[BN][Add][ReLU|ReLU6]2d`` and so on: ``ConvReLU2d``, ``ConvAddReLU62d``, ``LinearAdd``, ... Those with
``BN`` are made in the modes `QATMode.WithBN` and `QATMode.WithBNReverseFold` only; otherwise it is folded.

A module with an add is called with two tensors, the layer's input and the tensor to add, or through its `add` method,
because it stands where the model calls ``add``.
"""

from typing import TYPE_CHECKING, Any

from horizon_plugin_pytorch.nn.intrinsic.folding import by_output, fold, fold_bn, gain_of, rank_for
from horizon_plugin_pytorch.nn.intrinsic.forms import BN_FORMS, FORMS, LAYER_NAMES, Form, derive
from horizon_plugin_pytorch.nn.intrinsic.fused import (
    FUSED_CLASSES,
    CalledByAdd,
    Entry,
    FusedBNModule,
    FusedModule,
    check_rank,
    check_rank_hook,
    fused_class,
)

globals().update(FUSED_CLASSES)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "BN_FORMS", "FORMS", "FUSED_CLASSES", "LAYER_NAMES", "CalledByAdd", "Entry", "Form", "FusedBNModule", "FusedModule",
    "by_output", "check_rank", "check_rank_hook", "derive", "fold", "fold_bn", "fused_class", "gain_of", "rank_for",
    *FUSED_CLASSES,
]  # fmt: skip
