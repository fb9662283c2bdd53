"""Tools and evaluations run on integer kernels where they run a model in the VALIDATION state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from horizon_plugin_profiler import featuremap_similarity, model_profiler
from horizon_plugin_profiler.model_profilerv2 import QuantAnalysis
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.quantization import convert
from tests.analysis.quant_analysis.models import batches, calibrated, float_net
from tests.fixed_point.reach import count_calls, needs_kernels

pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore:calibration. ranges differ")]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.chdir(tmp_path)
    fp.use_integer_kernels(True)
    return count_calls(monkeypatch)


@pytest.fixture
def net() -> nn.Module:
    return float_net()


@pytest.fixture
def qat(net: nn.Module) -> nn.Module:
    return calibrated(net, "prepare")


def test_an_evaluation(qat: nn.Module, calls: Counter[str]) -> None:
    for is_wanted in (True, False):
        fp.use_integer_kernels(is_wanted)
        calls.clear()
        with torch.no_grad():
            for batch in batches():
                qat(*batch)
        assert (calls.total() > 0) is is_wanted


@pytest.mark.parametrize("stage", ["qat", "converted"])
def test_featuremap_similarity(stage: str, net: nn.Module, qat: nn.Module, calls: Counter[str]) -> None:
    featuremap_similarity(net, qat if stage == "qat" else convert(qat), batches(1)[0])
    assert calls.total() > 0


def test_model_profiler(net: nn.Module, qat: nn.Module, calls: Counter[str]) -> None:
    model_profiler(net, qat, batches(1)[0], mode="FvsQ")
    assert calls.total() > 0


def test_quant_analysis_but_for_sensitivity(net: nn.Module, qat: nn.Module, calls: Counter[str]) -> None:
    analysis = QuantAnalysis(net, qat, "fake_quant")
    analysis.set_bad_case(batches(1)[0])
    for run in (analysis.run, analysis.compare_per_layer):
        calls.clear()
        run()
        assert calls.total() > 0
    calls.clear()
    analysis.sensitivity()
    assert not calls  # one quantizer rounds at a time
