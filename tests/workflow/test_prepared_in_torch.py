"""Prepared models inside torch's own tools: autocast, threads, DataParallel, DistributedDataParallel, compile."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.utils.checkpoint import checkpoint

from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.capture.test_prepare_by_running import MODELS, Stubs, X, _make
from tests.processes import START_METHOD
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig

pytestmark = pytest.mark.filterwarnings("ignore")


def _calibrated(name: str) -> tuple[nn.Module, tuple, dict]:
    model, args, kwargs = _make(name)
    qat = prepare(model, args, qconfig_dict={"": qconfig()}, example_kw_inputs=kwargs, out_dir=None).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        qat(*args, **kwargs)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat, args, kwargs


class Around(Stubs):
    """Float layers before and after, a matmul and a softmax inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(4, 4, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(self.before(x)))
        y = torch.matmul(y.softmax(-1), y)
        return self.after(self.dequant(y))


@pytest.mark.parametrize("state", [FakeQuantState.VALIDATION, FakeQuantState.QAT])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_leaves_the_quantized_part_alone(name: str, state: FakeQuantState) -> None:
    qat, args, kwargs = _calibrated(name)
    set_fake_quantize(qat, state)
    with torch.no_grad():
        wanted = as_numbers(qat(*args, **kwargs))
        with torch.autocast("cpu", torch.bfloat16):
            assert mismatches(as_numbers(qat(*args, **kwargs)), wanted) == 0
            if state is FakeQuantState.VALIDATION:
                assert mismatches(as_numbers(convert(qat)(*args, **kwargs)), wanted) == 0


def test_float_parts_run_in_the_type_of_autocast_and_training_works() -> None:
    torch.manual_seed(0)
    model = Around().eval()
    qat = calibrate(prepare(model, (X,), qconfig_dict={"": qconfig()}, out_dir=None), (X,))
    seen: list[torch.dtype] = []
    qat.before.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = qat(X)
    out.float().square().sum().backward()
    assert seen == [torch.bfloat16] and out.dtype == torch.bfloat16
    assert all(p.grad is not None for p in (qat.before.weight, qat.conv.weight, qat.after.weight))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(qat(X), convert(qat)(X))


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel(name: str) -> None:
    qat, args, kwargs = _calibrated(name)
    with torch.no_grad():
        assert mismatches(as_numbers(nn.DataParallel(qat)(*args, **kwargs)), as_numbers(qat(*args, **kwargs))) == 0


def test_two_threads_run_two_models() -> None:
    models = [_calibrated("loops")[0], _calibrated("constants")[0]]
    wrong: list[str] = []

    @torch.no_grad()
    def run(model: nn.Module, wanted: list[Tensor]) -> None:
        for _ in range(5):
            if mismatches(as_numbers(model(X)), wanted):
                wrong.append(type(model).__name__)

    with torch.no_grad():
        threads = [threading.Thread(target=run, args=(model, as_numbers(model(X)))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def _train(rank: int, place: str, file: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    set_march(March.NASH_E)
    model, args, _ = _make("loops")
    qat = prepare(model, args, qconfig_dict={"": qconfig()}, out_dir=None).train()
    wrapped = nn.parallel.DistributedDataParallel(qat, find_unused_parameters=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(X + rank).square().sum().backward()
        optimizer.step()
    torch.save(copy.deepcopy(qat).state_dict(), f"{file}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_distributed_training_keeps_the_weights_together(tmp_path: Path) -> None:
    file = str(tmp_path / "state")
    multiprocessing.start_processes(_train, (f"file://{tmp_path / 'place'}", file), nprocs=2, start_method=START_METHOD)
    first, second = (torch.load(f"{file}.{rank}", weights_only=True) for rank in (0, 1))
    before = dict(_make("loops")[0].named_parameters())
    assert not torch.equal(first["conv.weight"], before["conv.weight"])
    for name in ("conv.weight", "conv.bias", "fc.weight", "fc.bias"):
        assert torch.equal(first[name], second[name])


class Layers(Stubs):
    """Modules only, for eager mode."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.quant(x)))


class Sums(Stubs):
    """Functions, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(torch.relu(self.bn(self.conv(x))) + torch.sigmoid(x))


class Wrapped(nn.Module):
    """Float code around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.before = model, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.before(x)).sigmoid()


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


HAS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.mark.slow
def test_a_graph_of_ours_stays_out_of_compiled_code(compiler: None) -> None:
    qat = calibrate(prepare(Sums().eval(), (X,), method="symbolic", qconfig_dict={"": qconfig()}, out_dir=None), [X])
    for model in (qat, convert_fx(qat)):
        for whole in (model, Wrapped(model).eval()):
            with torch.no_grad():
                wanted, found = whole(X), torch.compile(whole, backend="eager")(X)
            assert torch.equal(found, wanted)
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported):  # there is no full graph
            torch.compile(Wrapped(model), backend="eager", fullgraph=True)(X)


@HAS_COMPILER
@pytest.mark.slow
def test_the_float_code_around_a_graph_of_ours_is_compiled(compiler: None) -> None:
    qat = calibrate(prepare(Sums().eval(), (X,), method="symbolic", qconfig_dict={"": qconfig()}, out_dir=None), [X])
    whole = Wrapped(convert_fx(qat)).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(whole, backend="inductor")(X), whole(X))


@pytest.mark.slow
def test_a_graph_of_ours_trains_in_compiled_code(compiler: None) -> None:
    def gradient(is_compiled: bool) -> Tensor:
        torch.manual_seed(0)
        model = prepare(Sums().train(), (X,), method="symbolic", qconfig_dict={"": qconfig()}, out_dir=None)
        (torch.compile(model, backend="eager") if is_compiled else model)(X).square().sum().backward()
        return model.conv.weight.grad  # type: ignore[return-value]

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jit-strip", "jit", "eager"])
def test_a_forward_of_the_user_is_refused_in_compiled_code(compiler: None, method: str) -> None:
    net = Layers().eval() if method == "eager" else Sums().eval()
    net.qconfig = qconfig()
    qat = calibrate(prepare(net, (X,), method=method, out_dir=None), [X])
    wanted = qat(X)
    for model in (qat, convert(qat)):
        for whole in (model, Wrapped(model).eval()):
            with torch.no_grad(), pytest.raises(TraceError, match=r"cannot be compiled.*torch\.compiler\.disable"):
                torch.compile(whole, backend="eager")(X)
        torch._dynamo.reset()
        kept = Wrapped(torch.compiler.disable(model)).eval()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(kept, backend="eager")(X), kept(X))
    assert torch.equal(qat(X), wanted)  # an attempt leaves nothing behind


@pytest.mark.processes
def test_the_compiler_is_not_imported_before_somebody_uses_it() -> None:
    code = (
        "import sys, torch; from torch import nn\n"
        "from horizon_plugin_pytorch.march import set_march; set_march('bayes')\n"
        "from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig\n"
        "from horizon_plugin_pytorch.quantization.prepare import prepare\n"
        "x, settings = torch.ones(1, 2), {'qconfig_dict': {'': get_default_qconfig()}, 'out_dir': None}\n"
        "for method in ('jit', 'symbolic'):\n"
        "    prepare(QuantWrapper(nn.Linear(2, 2)), (x,), method=method, **settings)(x)\n"
        "assert 'torch._dynamo.eval_frame' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.slow
def test_compiled_float_code_may_call_a_model_that_is_kept_out_of_it() -> None:
    qat, _, _ = _calibrated("constants")
    for model in (qat, convert(qat)):
        kept = torch.compiler.disable(model)

        def run(x: Tensor, kept: nn.Module = kept) -> Tensor:
            return kept(x * 0.5).sigmoid()

        with torch.no_grad():
            assert torch.equal(torch.compile(run, backend="eager")(X), run(X))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x)) * 2 + x


class _Around(nn.Module):
    """A block, run as a function says."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.block, self.run = nn.Conv2d(4, 4, 1), _Block(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.run(self.block, self.conv(self.quant(x))))


_BLOCK_INPUT = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def _step(run: Any, state: FakeQuantState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    qat = prepare(_Around(run), (_BLOCK_INPUT,), qconfig_dict={"": qconfig()}, out_dir=None)
    calibrate(qat, (_BLOCK_INPUT,))
    set_fake_quantize(qat.train(), state)
    qat(_BLOCK_INPUT).square().mean().backward()
    return {name: p.grad for name, p in qat.named_parameters() if p.grad is not None}, dict(qat.named_buffers())


@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION])
def test_a_checkpointed_module_learns_and_observes_as_without(state: FakeQuantState) -> None:
    grads, buffers = _step(lambda block, x: checkpoint(block, x, use_reentrant=False), state)
    plain_grads, plain_buffers = _step(lambda block, x: block(x), state)
    assert grads.keys() == plain_grads.keys() and all(torch.equal(grads[k], plain_grads[k]) for k in grads)
    assert all(torch.equal(buffers[k], plain_buffers[k]) for k in plain_buffers)


@pytest.mark.parametrize(
    "run",
    [
        lambda block, x: checkpoint(lambda y: block(y) * 2, x, use_reentrant=False),
        lambda block, x: checkpoint(block, x, use_reentrant=True),
    ],
)
def test_other_checkpoints_are_refused_with_a_line(run: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"test_prepared_in_torch.py:\d+\) runs again in the backward pass"):
        _step(run, FakeQuantState.QAT)


@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION])
def test_an_autograd_function_gives_its_own_gradient(state: FakeQuantState) -> None:
    grads, _ = _step(lambda block, x: _Swish.apply(x), state)
    wanted, _ = _step(lambda block, x: x * torch.sigmoid(x), state)
    assert all((grads[k] - wanted[k]).norm() < 0.02 * wanted[k].norm() for k in grads)


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_autocast_does_not_change_integers(dtype: str) -> None:
    x = torch.randn(2, 4, 6, 6)
    qat = prepared(QuantWrapper(nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))), (x,), dtype)
    quantized = convert_fx(qat)
    with torch.no_grad():
        expected = quantized(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(quantized(x), expected) and torch.equal(qat(x), expected)


def test_preparing_in_inference_mode() -> None:
    x = torch.randn(2, 4, 6, 6)
    with torch.inference_mode():
        qat = prepared(QuantWrapper(nn.Conv2d(4, 4, 1)), (x,))
        assert torch.equal(qat(x), convert_fx(qat)(x))


def test_functional_call_takes_the_state_of_a_model() -> None:
    net = nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 3), nn.ReLU(), DeQuantStub())
    model = calibrate(prepare(net, (X,), qconfig_dict={"": qconfig()}, out_dir=None), (X,))
    set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
    for one in (model, convert(model)):
        state = dict(one.state_dict())
        assert torch.equal(torch.func.functional_call(one, state, (X,)), one(X))
    halved = {name: x * 0.5 if name == "1.weight" else x for name, x in model.state_dict().items()}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("1.weight").mul_(0.5)
    assert torch.equal(torch.func.functional_call(model, halved, (X,)), other(X))
    wrong = {**halved, "1.activation_post_process.quant_range": torch.tensor([0, 255])}
    with pytest.raises(ValueError, match=r"quant_range.*is \[-128, 127\] by its qconfig"):
        torch.func.functional_call(model, wrong, (X,))
