"""Every argument that a verb accepts acts, or says that it does not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.quantization import (
    QuantWrapper,
    check_model,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.runtime.arguments import WithDefaults
from tests.routes import calibrate

INT8 = {"": get_default_qconfig()}
X = torch.randn(2, 4)


def wrapped() -> nn.Module:
    net = QuantWrapper(nn.Linear(4, 4))
    net.qconfig = get_default_qconfig()
    return net


def test_opset_versions() -> None:
    prepare_qat_fx(wrapped(), INT8, opset_version="hbdk3")
    with pytest.warns(QuantizationWarning, match="opset_version='hbdk4' changes nothing"):
        prepare_qat_fx(wrapped(), INT8, opset_version="hbdk4")
    with pytest.raises(QuantizationConfigError, match="opset_version must be"):
        prepare_qat_fx(wrapped(), INT8, opset_version="11")


def test_preserved_attributes() -> None:
    net = wrapped()
    net.anchors = torch.ones(3)
    kept = {"preserved_attributes": ["anchors"]}
    fused = fuse_fx(net, kept)
    model = prepare_qat_fx(fused, INT8, kept)
    calibrate(model, (X,))
    assert all(torch.equal(m.anchors, net.anchors) for m in (fused, model, convert_fx(model)))


@pytest.mark.parametrize("make", [get_default_qat_qconfig, get_default_qat_out_qconfig, get_default_calib_qconfig])
def test_backends_of_qconfigs_are_told(make: Any) -> None:
    make(backend="")
    with pytest.warns(QuantizationWarning, match="backend='qnnpack' changes nothing"):
        make(backend="qnnpack")


@pytest.mark.parametrize("option", [{"input_source": "pyramid"}, {"advice": 1}, {"check_quanti_param": False}])
def test_options_of_the_compiler_are_told(option: dict, capsys: pytest.CaptureFixture) -> None:
    model = convert_fx(calibrate(prepare_qat_fx(wrapped(), INT8), (X,)))
    with pytest.warns(QuantizationWarning, match=f"{next(iter(option))} changes nothing"):
        check_model(model, (X,), **option)


def test_arguments_of_which_some_are_defaults_are_copied_and_pickled() -> None:
    given = WithDefaults((torch.ones(1), torch.zeros(2)), {1})
    for copied in (copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert type(copied) is WithDefaults and copied.defaults == {1} and torch.equal(copied[1], given[1])
