"""Whole models: one arithmetic, close to float, trainable, and the float model untouched."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.models import MobileNetV2, ResNet18
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    convert_fx,
    default_qat_out_8bit_fake_quant_qconfig,
    fuse_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.runtime.located import QUICK
from tests.models import ZOO, make, shake_norms
from tests.routes import assert_one_arithmetic, calibrate, prepared, qconfig


def _real(outputs: Any) -> list[Tensor]:
    return [x.dequantize() if isinstance(x, QTensor) else x for x in pytree.tree_leaves(outputs)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", ZOO)
def test_models_have_one_arithmetic(name: str, dtype: str, tmp_path: Any) -> None:
    model, inputs = make(name)
    qat = prepared(model, inputs, dtype)
    assert_one_arithmetic(qat, inputs, tmp_path, [tuple(torch.randn_like(x) * 2 for x in inputs)], name == "surrounded")


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", ZOO)
def test_models_stay_close_to_float(name: str, dtype: str) -> None:
    model, inputs = make(name)
    with torch.no_grad():
        wanted, found = _real(model(*inputs)), _real(prepared(model, inputs, dtype)(*inputs))
    for a, b in zip(wanted, found, strict=True):
        assert float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) > (0.99 if dtype == "qint8" else 0.9995)


@pytest.mark.parametrize("name", ZOO)
def test_models_train(name: str) -> None:
    model, inputs = make(name)
    qat = prepare_qat_fx(model, {"": qconfig()}).train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    with torch.no_grad():
        targets = [torch.randn_like(x) * 0.1 for x in _real(qat(*inputs))]
    optimizer = torch.optim.SGD(qat.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = sum(((x - t) ** 2).mean() for x, t in zip(_real(qat(*inputs)), targets, strict=True))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = [p.grad for p in qat.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert losses[-1] < losses[0]


def _snapshot(model: nn.Module) -> tuple:
    types = {path: type(m) for path, m in model.named_modules()}
    hooks = {path: (len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()}
    attributes = {path: sorted(m.__dict__.keys() - {QUICK}) for path, m in model.named_modules()}
    modes = {path: m.training for path, m in model.named_modules()}
    return types, hooks, attributes, modes, {k: v.clone() for k, v in model.state_dict().items()}


def _assert_same(before: tuple, after: tuple) -> None:
    assert before[:4] == after[:4]
    assert before[4].keys() == after[4].keys()
    for key, value in before[4].items():
        assert torch.equal(value, after[4][key]), key


VERBS = {
    "fuse_fx": fuse_fx,
    "prepare_qat_fx": lambda m: prepare_qat_fx(m, {"": qconfig()}),
    "prepare_qat": prepare_qat,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ZOO)
def test_the_input_model_is_not_changed(name: str, verb: str) -> None:
    model, inputs = make(name)
    before, wanted = _snapshot(model), _real(model(*inputs))
    changed = VERBS[verb](model).train()
    _assert_same(before, _snapshot(model))
    assert all(torch.equal(a, b) for a, b in zip(_real(model(*inputs)), wanted, strict=True))
    out = _real(changed(*inputs))
    sum(x.square().sum() for x in out).backward()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(1.0)
        for buffer in changed.buffers():
            if buffer.is_floating_point():
                buffer.add_(1.0)
    _assert_same(before, _snapshot(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_conversion_does_not_change_the_prepared_model(name: str) -> None:
    model, inputs = make(name)
    qat = prepared(model, inputs)
    with torch.no_grad():
        before, wanted = _snapshot(qat), _real(qat(*inputs))
        quantized = convert_fx(qat)
        for buffer in quantized.buffers():
            buffer.zero_()
        _assert_same(before, _snapshot(qat))
        assert all(torch.equal(a, b) for a, b in zip(_real(qat(*inputs)), wanted, strict=True))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize(
    ("cls", "last"), [(ResNet18, "fc"), (MobileNetV2, "classifier.1")], ids=["resnet18", "mobilenetv2"]
)
@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.AccumulatorWarning")
@pytest.mark.slow
def test_benchmark_models_have_one_arithmetic(cls: type, last: str, dtype: str, tmp_path: Any) -> None:
    model = shake_norms(cls(20)).eval()
    inputs = (torch.randn(1, 3, 64, 64),)
    names = [(last, default_qat_out_8bit_fake_quant_qconfig)]
    qat = calibrate(prepare_qat_fx(model, {"": qconfig(dtype), "module_name": names}), inputs)
    quantized = assert_one_arithmetic(qat, inputs, tmp_path, [(torch.randn(1, 3, 64, 64) * 3,)])
    with torch.no_grad():
        cosine = torch.cosine_similarity(quantized(*inputs).flatten(), model(*inputs).flatten(), 0)
    assert float(cosine) > 0.98


@pytest.mark.slow
def test_validation_follows_changed_weights() -> None:
    model, inputs = make("mobilenet")
    qat = prepared(model, inputs)
    last = qat.get_submodule("classifier.1")
    weight = last.weight
    with torch.no_grad():
        seen = [qat(*inputs)]
        weight.mul_(0.5)
        seen.append(qat(*inputs))
        weight.data = weight.data * 0.5
        seen.append(qat(*inputs))
        qat.load_state_dict({**qat.state_dict(), "classifier.1.weight": weight * 0.5})
        seen.append(qat(*inputs))
        last.weight_fake_quant.set_qparams(last.weight_fake_quant.scale * 3)
        seen.append(qat(*inputs))
        weight.data.mul_(0.5)  # torch does not count this one; switching the mode looks again
        qat.eval()
        seen.append(qat(*inputs))
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
        assert torch.equal(convert_fx(qat)(*inputs), seen[-1])


def test_a_copy_of_a_prepared_model_is_independent() -> None:
    model, inputs = make("mobilenet")
    qat = prepared(model, inputs)
    with torch.no_grad():
        wanted = qat(*inputs)
        twin = copy.deepcopy(qat)
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        assert torch.equal(qat(*inputs), wanted)
        assert not torch.equal(twin(*inputs), wanted)
