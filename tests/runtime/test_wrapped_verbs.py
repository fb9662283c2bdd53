"""Files, statistics, calibration and checks of models with code that tracing does not enter."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    auto_calibrate,
    calibrate,
    convert_fx,
    explain,
    get_default_qconfig,
    load_observer_params,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate, QconfigSetter
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import qconfig
from tests.runtime.wrapped_models import CODE, Code, Plain, Single, X, near


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


@pytest.mark.slow
def test_a_file_has_the_whole_model() -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    early = pickle.loads(pickle.dumps(qat))  # before any run
    for model in (qat, early):
        calibrate(model, [X], progress=False)
    assert torch.equal(qat(X), early(X))
    wanted = qat(X)
    for model in (qat, convert_fx(qat)):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(X), wanted)


def test_statistics_are_copied_to_a_model_that_has_not_run() -> None:
    net = Plain().eval()
    source, target = (prepare_qat_fx(net, {"": qconfig()}) for _ in range(2))
    calibrate(source, [X], progress=False)
    assert load_observer_params(source, target) == []
    target.eval()
    set_fake_quantize(target, FakeQuantState.VALIDATION)
    assert torch.equal(target(X), source(X))


def test_calibration_goes_on_in_a_model_that_has_not_run(tmp_path: Any) -> None:
    batches = [X * (i + 1) for i in range(4)]
    whole = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    calibrate(whole, batches, progress=False)

    def stop(model: nn.Module, batch: Tensor) -> None:
        if batch is batches[2]:
            raise KeyboardInterrupt
        model(batch)

    file = tmp_path / "state"
    broken = prepare_qat_fx(Plain().eval(), {"": qconfig()})
    broken.load_state_dict(whole.state_dict())
    fresh = copy.deepcopy(prepare_qat_fx(Plain().eval(), {"": qconfig()}))
    for model in (broken, fresh):
        model.load_state_dict({k: v for k, v in whole.state_dict().items() if "_generated_" not in k}, strict=False)
    with pytest.raises(KeyboardInterrupt):
        calibrate(broken, batches, forward=stop, state_file=file, progress=False)
    assert calibrate(fresh, batches, state_file=file, progress=False).steps == 4
    scales = {n: m.scale for n, m in whole.named_modules() if isinstance(m, FakeQuantize)}
    found = {n: m.scale for n, m in fresh.named_modules() if isinstance(m, FakeQuantize)}
    assert scales.keys() == found.keys() and all(torch.equal(found[n], scale) for n, scale in scales.items())


def test_the_check_and_explain_list_what_is_in_wrapped_code(tmp_path: Any) -> None:
    qat = prepare_qat_fx(Plain().eval(), {"": qconfig()}, example_inputs=X)
    check_qat_model(qat, X, save_results=True, out_dir=tmp_path)
    text = (tmp_path / "model_check_result.txt").read_text()
    name = next(n for n, _ in qat.named_modules() if "_generated_add" in n)
    assert name in text and "block.conv" in text and "conv" in text
    assert name in str(explain(qat))


# -- lines that run several times


def levels_of_functions(s: Any, x: Tensor) -> Tensor:
    low, high = [F.interpolate(v * f, scale_factor=2.0, mode="bilinear") for v, f in ((x, 1.0), (x, 30.0))]
    return low + high


def levels_of_a_module(s: Any, x: Tensor) -> Tensor:
    low, high = [s.conv(v) for v in (x, s.ff.mul(x, 30.0))]
    return low + high


def levels_of_a_functional(s: Any, x: Tensor) -> Tensor:
    low, high = [s.ff.mul(v, v) for v in (x, s.ff2.mul(x, 6.0))]
    return low + high


@pytest.mark.parametrize("is_trained", [False, True], ids=["calibrated", "trained"])
@pytest.mark.parametrize("code", [levels_of_functions, levels_of_a_module, levels_of_a_functional])
def test_calls_of_one_line_in_a_loop_are_one_batch_of_a_loop_of_the_users(code: Code, is_trained: bool) -> None:
    net = Single(code).eval()
    if is_trained:  # every call is a batch where `prepare_qat_fx` trains, as the guides print it
        setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})])
        qat = prepare(net, X, setter, method=PrepareMethod.SYMBOLIC).eval()
    else:
        qat = prepare_qat_fx(net, {"": get_default_qconfig()})
    set_fake_quantize(qat, FakeQuantState.QAT if is_trained else FakeQuantState.CALIBRATION)
    for _ in range(5):
        qat(X)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    near(net, qat, limit=0.04)
    copied = copy.deepcopy(qat)
    set_fake_quantize(copied, FakeQuantState.CALIBRATION)
    copied(X * 0.01)  # a batch of its own, not the rest of the last one
    assert any(m._batch is not None and m._batch[3].max() < 1 for m in copied.modules() if isinstance(m, ObserverBase))


@pytest.mark.slow
def test_threads_run_a_loop_that_is_met_for_the_first_time() -> None:
    for _ in range(5):
        qat = prepare_qat_fx(Single(CODE["loop"]).eval(), {"": qconfig()})
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(qat, [X] * 16))
        assert all(torch.equal(results[0], one) for one in results)


class _Queries(nn.Module):
    """A head whose queries are made of parameters alone, in code that tracing does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.embed, self.norm, self.mlp = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.unused = nn.Linear(4, 4)

    @wrap()
    def add(self, x: Tensor, is_more: bool = False) -> Tensor:
        return self.unused(x) if is_more else x + self.mlp(self.norm(self.embed.weight))[:1]

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.add(self.quant(x)))


@pytest.mark.parametrize("run", [calibrate, auto_calibrate])
def test_layers_that_compute_on_parameters_alone_are_said_to_stay_float(run: Callable) -> None:
    torch.manual_seed(0)
    model = prepare(_Queries(), (X[0, 0, :, :4],), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC)
    result = run(model, [X[0, i, :, :4] for i in range(4)])
    assert not result.unseen and result.left_float == ["embed", "norm", "mlp.0", "unused"]
    assert "No finite value" not in str(result) and "Nothing with a scale reached: embed, norm, mlp.0" in str(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = convert_fx(model)
        assert torch.equal(quantized(X[0, 0, :, :4]), model(X[0, 0, :, :4]))
    kinds = {type(quantized.get_submodule(path)) for path in result.left_float}
    assert kinds == {nn.Embedding, nn.LayerNorm, nn.Linear}


def test_layers_that_compute_on_parameters_alone_do_not_keep_calibration_from_settling() -> None:
    torch.manual_seed(0)
    net = _Queries()
    del net.unused
    model = prepare(net, (X[0, 0, :, :4],), default_calibration_qconfig_setter, method=PrepareMethod.SYMBOLIC)
    assert calibrate(model, [X[0, 0, :, :4]] * 20, patience=3).has_settled
