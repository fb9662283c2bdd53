"""The peer: FX quantization-aware training of `torch.ao`, as its documentation sets it up. Only benchmarks use it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn


class _Unstubbed(nn.Module):
    """The benchmark model without our stubs: torch.ao inserts its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.quant, self.model.dequant = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def prepare_peer(model: nn.Module, example: Tensor) -> nn.Module | None:
    """The model prepared by torch.ao, or None where torch no longer has it."""
    try:
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_qat_fx
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapping = get_default_qat_qconfig_mapping("x86")
        return prepare_qat_fx(_Unstubbed(model).train(), mapping, (example,))


def calibration_peer(model: nn.Module, example: Tensor, observer: str) -> nn.Module | None:
    """The model prepared by torch.ao for calibration with one of its observers, or None where torch has it no more."""
    try:
        from torch.ao.quantization import QConfig, QConfigMapping, default_per_channel_weight_observer
        from torch.ao.quantization.quantize_fx import prepare_fx
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qconfig = QConfig(peer_observer(observer), default_per_channel_weight_observer)
        return prepare_fx(_Unstubbed(model).eval(), QConfigMapping().set_global(qconfig), (example,))


def peer_observer(name: str) -> Any:
    """A constructor of torch.ao's observer, as its default qconfig has it."""
    from torch.ao.quantization import observer

    return getattr(observer, name).with_args(dtype=torch.quint8, qscheme=torch.per_tensor_symmetric)


def peer_observers() -> dict[str, nn.Module]:
    """torch.ao's observers, where torch still has them."""
    try:
        return {name: peer_observer(name)() for name in ("MinMaxObserver", "HistogramObserver")}
    except ImportError:
        return {}
