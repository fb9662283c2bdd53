"""Calls in code that tracing does not enter: when their modules are made, in which formats, and what is refused."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import (
    ExportError,
    QuantizationWarning,
    UnknownCallError,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import qconfig
from tests.runtime.wrapped_models import CODE, Code, Head, Parts, Plain, Single, X, near


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


def test_a_call_that_never_ran_while_the_model_learnt_is_an_error() -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if x.shape[0] > 2 else x + 1

    qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with pytest.raises(UnknownCallError, match=r"`add` at `_leaf_inner` \(test_wrapped_calls.py:\d+\).*example_inputs"):
        qat(X)
    calibrate(qat, [X], progress=False)
    more = torch.cat([X, X])
    for model in (qat, convert_fx(qat)):
        model(X)
        with pytest.raises(UnknownCallError, match="`sigmoid` at `_leaf_inner`.*CALIBRATION or QAT"):
            model(more)
    state = qat.state_dict()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(more)  # both branches now
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert torch.equal(convert_fx(qat)(more), qat(more)) and state.keys() < qat.state_dict().keys()


def test_names_do_not_depend_on_the_order_in_which_calls_are_met() -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) * 2 if x.shape[0] == 2 else torch.cat([x, x], 2) * 3

    models = [prepare_qat_fx(Single(code).eval(), {"": qconfig()}) for _ in range(2)]
    inputs = (X, torch.cat([X, X]) * 4)
    for model, order in zip(models, (inputs, inputs[::-1]), strict=True):
        calibrate(model, list(order), progress=False)
    first, second = models
    assert first.state_dict().keys() == second.state_dict().keys()
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(first(x), second(x)) for x in inputs)


def test_a_module_of_the_user_may_be_called_like_a_generated_one() -> None:
    class Net(Parts):
        def __init__(self) -> None:
            super().__init__()
            self._generated_add_0 = Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self._generated_add_0(self.quant(x)))

    torch.manual_seed(0)
    net, data = Net().eval(), torch.randn(1, 4, 6, 6)
    first, second = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(first, [data], progress=False)
    second.load_state_dict(first.state_dict())
    set_fake_quantize(second.eval(), FakeQuantState.VALIDATION)
    assert torch.equal(first(data), second(data))


def test_a_line_that_runs_with_other_settings_has_a_module_for_each() -> None:
    net = Single(lambda s, x: sum(torch.softmax(x, dim) for dim in (1, 2))).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    assert sum("_generated_softmax" in name and name.count(".") == 1 for name, _ in qat.named_modules()) == 2
    near(net, qat)
    assert torch.equal(convert_fx(qat)(X), qat(X))


@pytest.mark.parametrize("name", ["functions", "module of the user's", "float inside", "layer as a function"])
def test_with_example_inputs_everything_is_there_at_once(name: str) -> None:
    net = Single(CODE[name]).train()
    one = prepare_qat_fx(net, {"": qconfig()}, example_inputs=(X,))
    other = prepare(net, (X,), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC, out_dir=None)
    for model in (one, other):
        keys = list(model.state_dict())
        quantizers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantize)}
        seen = [n for n, m in quantizers.items() if m.has_statistics and not m.is_fixed and "weight_fake" not in n]
        assert model.training and not seen
        assert all(m.is_observing and m.is_quantizing for m in quantizers.values())
        calibrate(model, [X], progress=False)
        assert list(model.state_dict()) == keys
        near(net.eval(), model)
        net.train()


def test_a_trained_scale_that_comes_after_the_optimizer_is_told() -> None:
    lsq = get_default_qconfig(activation_fake_quant="lsq", weight_fake_quant="lsq")
    net = Single(CODE["functions"]).train()
    late = prepare_qat_fx(net, {"": lsq})
    set_fake_quantize(late, FakeQuantState.QAT)
    with pytest.warns(QuantizationWarning, match=r"`sigmoid` at `_leaf_inner`.*optimizer.*example_inputs"):
        late(X)
    early = prepare_qat_fx(net, {"": lsq}, example_inputs=(X,))
    set_fake_quantize(early, FakeQuantState.QAT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        early(X)
    assert len(list(early.parameters())) == len(list(late.parameters()))


# -- formats


def formats(model: nn.Module) -> dict[str, str]:
    return {n.removesuffix(".activation_post_process"): str(m.dtype) for n, m in model.named_modules()
            if isinstance(m, FakeQuantize) and n.endswith("activation_post_process")}  # fmt: skip


@pytest.mark.slow
def test_formats_reach_modules_and_functions_in_wrapped_code() -> None:
    net = Single(lambda s, x: torch.sigmoid(s.fc(x)) + x).eval()
    wide = prepare_qat_fx(net, {"": qconfig(), "module_name": [("fc", qconfig("qint16"))]}, example_inputs=X)
    found = formats(wide)
    assert found.pop("fc") == "qint16" and set(found.values()) == {"qint8"}
    name = next(n for n in found if "_generated_add" in n)
    named = prepare_qat_fx(net, {"": qconfig(), "module_name": {name: qconfig("qint16")}}, example_inputs=X)
    assert formats(named)[name] == "qint16"
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8, "fc": qint16, name: qint16})], save_dir=None)
    chosen = formats(prepare_qat_fx(net, qconfig_setter=setter, example_inputs=X))
    assert chosen["fc"] == chosen[name] == "qint16" and sorted(chosen.values()).count("qint8") == 2
    late = prepare_qat_fx(net, qconfig_setter=setter)
    calibrate(late, [X], progress=False)
    assert formats(late) == chosen
    assert torch.equal(convert_fx(late)(X), late(X))


def test_code_without_a_qconfig_refuses_quantized_tensors() -> None:
    net = nn.Sequential(QuantStub(), Head(), Head(), DeQuantStub()).eval()
    net[2].qconfig = None
    qat = prepare_qat_fx(net, {"": qconfig()})
    with pytest.raises(NotImplementedError, match=r"`Conv2d` at `2.conv` \(wrapped_models.py.*no qconfig"):
        qat(X)


def test_what_the_chip_does_not_have_is_refused_with_its_line() -> None:
    set_march(March.BERNOULLI2)
    for code in (lambda s, x: s.head(x), lambda s, x: x.softmax(1)):
        qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
        with pytest.raises(UnsupportedOperatorError, match=r"softmax.*test_wrapped_calls.py:\d+.*supported on bayes"):
            calibrate(qat, [X], progress=False)
        with pytest.raises(UnsupportedOperatorError, match=r"softmax.*supported on bayes"):
            prepare_qat_fx(Single(code).eval(), {"": qconfig()}, example_inputs=X)


def test_values_that_code_reads_are_real_and_cannot_be_exported(tmp_path: Any) -> None:
    def code(s: Any, x: Tensor) -> Tensor:
        return s.conv(x) if float(x.max()) > 0 and bool(x.mean() < 10) and x[0, 0, 0, 0].item() < 9 else x

    net = Single(code).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    quantized = convert_fx(qat)
    assert torch.equal(quantized(X), qat(X))
    with pytest.raises(ExportError, match="reads a number out of a computed tensor"):
        export_quantized_onnx(quantized, (X,), tmp_path / "model.onnx")


PASSED_BY: dict[str, Code] = {
    "torch.tensor": lambda s, x: x * torch.tensor(x.mean()),
    "torch.asarray": lambda s, x: x * torch.asarray(x.mean(), copy=True),
    "torch.Tensor.new_tensor": lambda s, x: x * s.shift.new_tensor(x.mean()),
    "torch.full": lambda s, x: x + torch.full((8,), fill_value=x.max()),
    "torch.full_like": lambda s, x: x + torch.full_like(x, x.max()),
    "torch.add": lambda s, x: x + torch.add(s.shift, s.shift, alpha=x.max()),
    "torch.arange": lambda s, x: x + torch.arange(0, x.max()).sum(),
    "torch.nn.functional.leaky_relu": lambda s, x: x + F.leaky_relu(s.shift, x.max()),
}


@pytest.mark.parametrize("name", PASSED_BY)
def test_a_tensor_that_torch_takes_for_a_number_is_refused_with_its_line(name: str) -> None:
    code = PASSED_BY[name]
    qat = prepare_qat_fx(Single(code).eval(), {"": qconfig()})
    line = f"test_wrapped_calls.py:{code.__code__.co_firstlineno}"
    with pytest.raises(UnsupportedOperatorError, match=f"`{name}` at `_leaf_inner` .{line}. takes a quantized tensor"):
        calibrate(qat, [X], progress=False)


def test_a_tensor_stays_one_and_numbers_are_real_where_torch_makes_tensors() -> None:
    said: list[str] = []

    def code(s: Any, x: Tensor) -> Tensor:
        said.append(f"{x.max():.1f}")
        return torch.as_tensor(x) * torch.tensor([x.max(), float(x.mean())])[0] + torch.full((8,), x.max().item())

    net = Single(code).eval()
    qat = prepare_qat_fx(net, {"": qconfig()})
    calibrate(qat, [X], progress=False)
    near(net, qat)
    assert torch.equal(convert_fx(qat)(X), qat(X))
    assert set(said) == {f"{X.max():.1f}"}


def test_weights_of_functions_are_loaded_once() -> None:
    net = Single(CODE["layer as a function"]).eval()
    first, second = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(first, [X], progress=False)
    second.load_state_dict(first.state_dict())
    second.weight.data.mul_(0.5)  # as an average of models does, before it has run
    wanted = second.weight.detach().clone()
    set_fake_quantize(second.eval(), FakeQuantState.VALIDATION)
    second(X)
    assert torch.equal(second.weight, wanted)


def test_threads_meet_calls_at_once() -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(qat, [X] * 8))
    assert all(torch.equal(results[0], one) for one in results)
    names = [name for name, _ in qat.named_modules() if name.rpartition(".")[2].startswith("_generated_")]
    assert len(names) == len({name.rstrip("_") for name in names}) == 5
