"""A folder with models of a user's, which commands run in."""

from __future__ import annotations

from pathlib import Path

import pytest

CODE = """
import copy, torch
from torch import nn
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx


def make():
    torch.manual_seed(0)
    print("a word of the user's code")
    return QuantWrapper(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))).eval()


def pair():
    set_march(March.BAYES)
    net = make()
    qat = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()}).eval()
    qat(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)))
    return net, qat


def share_of_positive(model):
    return float((model(torch.linspace(-1, 1, 24).reshape(4, 6)) > 0).float().mean())


def broken():
    raise ValueError("no weights here")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return {"a": self.first(x), "b": self.second(x)}


def only_first(out):
    return out["a"].sum()


class Wrong(nn.Module):
    def forward(self, x):
        return x @ x


instance, number = nn.Identity(), 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path
