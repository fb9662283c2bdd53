"""Names and spellings of earlier generations, and of users' scripts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.quantization import (
    FuseMode,
    QuantWrapper,
    fuse_fx,
    get_default_qconfig,
    prepare,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
)

X = torch.randn(1, 3, 6, 6)


def net() -> nn.Module:
    return QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())).eval()


@pytest.mark.parametrize("method", ["jit-strip", "jit", "symbolic"])
@pytest.mark.parametrize(
    ("mode", "name"), [("NoFuse", "Conv2d"), (FuseMode.NoFuse, "Conv2d"), ("BNAddReLU", "ConvReLU2d")]
)
def test_fuse_modes_are_taken_by_name_too(method, mode, name) -> None:
    model = prepare(net(), X, method=method, qconfig_dict={"": get_default_qconfig()}, fuse_mode=mode, out_dir=None)
    assert type(model.module.get_submodule("0")).__name__ == name


def test_a_fuse_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fuse_mode must be one of FuseMode.BNAddReLU .*, got 'all'"):
        prepare(net(), X, qconfig_dict={"": get_default_qconfig()}, fuse_mode="all", out_dir=None)
    with pytest.raises(ValueError, match="fuse_mode"):
        fuse_fx(net(), fuse_mode="all")


def test_fuse_fx_can_leave_all_as_it_is() -> None:
    assert type(fuse_fx(net(), fuse_mode="NoFuse").module.get_submodule("0")) is nn.Conv2d


def test_verbose_prints_the_check(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_qat_fx(net(), {"": get_default_qconfig()}, example_inputs=(X,), verbose=1)
    assert (tmp_path / "model_check_result.txt").read_text().strip() in capsys.readouterr().out
    model = net()
    model.qconfig = get_default_qconfig()
    prepare_qat(model, example_inputs=(X,), verbose=1)
    assert "Each layer out qconfig" in capsys.readouterr().out
    with pytest.warns(QuantizationWarning, match="give example_inputs"):
        prepare_qat_fx(net(), {"": get_default_qconfig()}, verbose=1)


def test_the_first_generations_calibration() -> None:
    traced = prepare_calibration_fx(net())
    eager = net()
    eager.qconfig = get_default_qconfig()
    for model in (traced, prepare_calibration(eager)):
        quantizer = model.quant.activation_post_process
        assert quantizer.is_observing and not quantizer.is_quantizing and not model.training


def test_paths_that_the_guides_write_out() -> None:
    assert callable(horizon.utils.check_model.check_qat_model)
    assert callable(horizon.fx.jit_scheme.Tracer.dynamic_block)
