"""The peers, as their documentation sets them up: `torch.ao`, and ModelOpt and AIMET where they are installed.

Only benchmarks use them.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.toolkits import modelopt_calibrating


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


def calibration_peers(model: nn.Module, example: Tensor) -> dict[str, nn.Module]:
    """The model as each peer that is installed calibrates it: to call it is a batch of calibration."""
    made: dict[str, Callable[[], nn.Module | None]] = {}
    for observer in ("MinMaxObserver", "HistogramObserver"):
        made[f"torch.ao {observer}"] = lambda observer=observer: _torch_ao(model, example, observer)
    for calibrator in ("max", "histogram"):
        made[f"ModelOpt {calibrator}"] = lambda calibrator=calibrator: _modelopt(model, example, calibrator)
    for scheme in ("min_max", "post_training_tf_enhanced"):
        made[f"AIMET {scheme}"] = lambda scheme=scheme: _aimet(model, example, scheme)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # they tell what they do
        warnings.simplefilter("ignore")
        peers = {name: make() for name, make in made.items()}
    return {name: peer for name, peer in peers.items() if peer is not None}


def _torch_ao(model: nn.Module, example: Tensor, observer: str) -> nn.Module | None:
    """The model prepared by torch.ao for calibration with one of its observers."""
    try:
        from torch.ao.quantization import QConfig, QConfigMapping, default_per_channel_weight_observer
        from torch.ao.quantization.quantize_fx import prepare_fx
    except ImportError:
        return None
    qconfig = QConfig(peer_observer(observer), default_per_channel_weight_observer)
    return prepare_fx(_Unstubbed(model).eval(), QConfigMapping().set_global(qconfig), (example,))


def _modelopt(model: nn.Module, example: Tensor, calibrator: str) -> nn.Module | None:
    """The model with ModelOpt's quantizers, which collect statistics."""
    try:
        return modelopt_calibrating(_Unstubbed(model).eval(), calibrator)
    except ImportError:
        return None


def _aimet(model: nn.Module, example: Tensor, scheme: str) -> nn.Module | None:
    """The model of AIMET's simulation, whose quantizers collect statistics."""
    try:
        from aimet_torch import nn as aimet_nn
        from aimet_torch.common.defs import QuantScheme
        from aimet_torch.model_preparer import prepare_model
        from aimet_torch.quantsim import QuantizationSimModel
    except ImportError:
        return None
    logging.disable(logging.WARNING)
    simulation = QuantizationSimModel(prepare_model(_Unstubbed(model).eval()), example, QuantScheme[scheme])
    logging.disable(logging.NOTSET)
    collecting = aimet_nn.compute_encodings(simulation.model)
    collecting.__enter__()
    simulation.model.collecting = collecting  # what is left, or forgotten, collects no more
    return simulation.model


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
