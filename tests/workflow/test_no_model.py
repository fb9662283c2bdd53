"""What is given in the place of a model (a file, a class, a state dict) is said by every function that takes one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.test_public_api import MODULES, module_at

GIVEN = {
    "'model.pt': load the file": "model.pt",
    "got None": None,
    "the class `ReLU`: make a model of it": nn.ReLU,
    "load a state dict into a model": {"weight": torch.ones(1)},
    "the function `relu`": torch.relu,
}
_OTHERWISE = {  # they take something else too, or say it in words of their own
    "get_output_annotation", "check_rank_hook", "require_module", "compile_model", "split_compilable_model",
    "get_hbir_input_flattener", "get_hbir_output_unflattener",
}  # fmt: skip
_SECOND = {"modules_to_fuse": ["conv"], "state_dict": {}, "batches": [torch.ones(1, 3, 4, 4)]}


def _verbs() -> dict[str, Callable]:
    found: dict[str, Callable] = {}
    for name in MODULES:
        module = module_at(name)
        for what, verb in inspect.getmembers(module, inspect.isfunction):
            first = next(iter(inspect.signature(verb).parameters), "")
            if first.endswith("model") or first in {"module", "graph_module"}:
                found.setdefault(what, verb)
    return {name: verb for name, verb in found.items() if not name.startswith("_")}


VERBS = {name: verb for name, verb in _verbs().items() if name not in _OTHERWISE}


def _call(verb: Callable, model: Any) -> None:
    needed = [p for p in inspect.signature(verb).parameters.values() if p.default is p.empty][1:]
    rest = [_SECOND.get(p.name, torch.ones(1, 3, 4, 4)) for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    verb(model, *rest)


@pytest.mark.parametrize("name", VERBS)
def test_what_is_no_model_is_said(name: str) -> None:
    set_march(March.NASH_E)
    for text, given in GIVEN.items():
        with pytest.raises(TypeError, match=f"^[a-z_]+ takes a .*{re.escape(text)}"):
            _call(VERBS[name], given)


def test_all_are_walked() -> None:
    assert {"prepare", "prepare_qat_fx", "calibrate", "convert", "export_quantized_onnx"} <= VERBS.keys()


def test_the_state_of_a_float_model_is_no_state() -> None:
    with pytest.warns(QuantizationWarning, match="`Linear` is a float model and has no states"):
        set_fake_quantize(nn.Linear(2, 2), FakeQuantState.VALIDATION)


def test_a_qconfig_is_no_dictionary_of_them() -> None:
    set_march(March.NASH_M)
    with pytest.raises(QuantizationConfigError, match="qconfig_dict is a QConfig, and must be a dictionary: `{'': qc"):
        prepare_qat_fx(nn.Linear(2, 2), get_default_qconfig())
