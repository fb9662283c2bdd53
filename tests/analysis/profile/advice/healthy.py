"""Small healthy models, and the way from a float model to advice."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import quantization
from horizon_plugin_pytorch.analysis.profile.collect import collect
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    calibrate,
    get_qconfig,
    prepare,
    qconfig_setter,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from tests.models import shake_norms


class ConvNet(nn.Module):
    """Layers with batch norms, a residual, a concatenation and a convolution as head."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.sum, self.join = FloatFunctional(), FloatFunctional()
        self.head = nn.Conv2d(16, 4, 1)
        shake_norms(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.quant(x))
        left, right = self.left(x), self.right(x)
        return self.dequant(self.head(self.join.cat([self.sum.add(left, x), right], 1)))


class Detector(nn.Module):
    """Two levels, one head for both, and boxes and scores as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.tower = nn.Conv2d(8, 8, 3, padding=1)
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)
        shake_norms(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.backbone(self.quant(x))
        levels = [torch.relu(self.tower(x)) for x in (fine, self.down(fine))]
        return [self.dequant(head(level)) for level in levels for head in (self.boxes, self.scores)]


class Transformer(nn.Module):
    """A block of attention and a feed-forward part, with residuals and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.norm1(x)
        weights = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2) * 0.25, -1)
        x = x + self.out(weights @ self.value(y))
        x = x + self.down(self.act(self.up(self.norm2(x))))
        return self.dequant(self.head(x))


class Recurrent(nn.Module):
    """An LSTM and a linear layer on its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.lstm, self.head = nn.LSTM(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.quant(x))
        return self.dequant(self.head(x))


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    ConvNet: (4, 3, 24, 24), Detector: (4, 3, 24, 24), Transformer: (4, 12, 16), Recurrent: (6, 4, 8),
}  # fmt: skip


def make(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """A healthy float model."""
    torch.manual_seed(seed)
    return kind().eval()


def batches_for(net: nn.Module, count: int = 3, scale: float = 1.0) -> list[Tensor]:
    """Inputs that are normalised."""
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(SHAPES[type(net)], generator=generator) for _ in range(count)]


def prepared(
    net: nn.Module, batches: Sequence[Any], templates: Sequence[Any] = (), dtype: Any = qint8, **kwargs: Any
) -> nn.Module:
    """Prepared with templates, not calibrated."""
    setter = kwargs.pop("qconfig_setter", None) or QconfigSetter(
        get_qconfig(), [ModuleNameTemplate({"": dtype}), *templates], save_dir=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare(copy.deepcopy(net), (batches[0],), setter, out_dir=None, **kwargs)


def calibrated(net: nn.Module, batches: Sequence[Any], *args: Any, **kwargs: Any) -> nn.Module:
    """Prepared and calibrated, in the VALIDATION state."""
    qat = prepared(net, batches, *args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrate(qat, batches, progress=False)
    return qat


def document_of(net: nn.Module, other: nn.Module, batches: Sequence[Any], task: str = "") -> Document:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collect(net, other, batches, task=task)


def advice_for(net: nn.Module, other: nn.Module, batches: Sequence[Any], task: str = "") -> list[Advice]:
    document = document_of(net, other, batches, task)
    assert document.notes == ()
    return list(document.advice)


def tried(line: str, **names: Any) -> Any:
    """What a line of configuration gives; an argument of `prepare` comes as a dictionary."""
    names |= {**vars(quantization), **vars(qconfig_setter), "torch": torch, "qint8": qint8, "qint16": qint16}
    names |= {"HistogramObserver": HistogramObserver}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(f"dict({line})" if line.startswith("own_scales=") else line, names)


def error_of(net: nn.Module, other: nn.Module, batches: Sequence[Any], place: str = "") -> float:
    """The smallest ratio of signal to noise, of the outputs or of a module, in dB."""
    found = document_of(net, other, batches).operators
    chosen = [one for one in found if (one.path == place if place else one.operator == "dequant")]
    return min(one.sqnr for one in chosen if one.sqnr is not None)


def in_state(model: nn.Module, state: FakeQuantState) -> nn.Module:
    set_fake_quantize(model, state)
    return model
