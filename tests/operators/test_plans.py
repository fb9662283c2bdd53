"""Plans of quantized modules: found by all that they depend on, bounded in memory, safe under threads."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional, plans
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.plans import PlanCache
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert_fx,
    freeze_qat_module,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.operators.cases import CASES, Case
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig
from tests.tiers import in_soak

SCALE = 1 / 128


def _input(dtype: QuantDType, shape: tuple[int, ...], seed: int = 0, scale: float = SCALE) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randint(dtype.min, dtype.max + 1, shape, generator=generator).float()
    return integer_qtensor(grid, torch.tensor([scale]), dtype)


class _Functional(nn.Module):
    """A functional module and a call of it."""

    def __init__(self, call: Callable[..., Tensor], op: nn.Module | None = None) -> None:
        super().__init__()
        self.op, self.call = FloatFunctional() if op is None else op, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.op, x)


def _functional(call: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: _Functional(call)


BOTH = [(qint8, (2, 4)), (qint16, (2, 4))]
IMAGES = [(qint8, (1, 4, 4, 6)), (qint16, (1, 4, 4, 6)), (qint8, (1, 4, 3, 5))]
GRID = torch.rand(1, 3, 3, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
# Sizes and formats whose product is the same are among them: 256 * 128 == 1 * 32768.
INPUTS: dict[str, tuple[Callable[[], nn.Module], list[tuple[QuantDType, tuple[int, ...]]]]] = {
    "mean": (_functional(lambda op, x: op.mean(x, -1)), [(qint8, (2, 256)), (qint16, (2, 1)), (qint8, (2, 1))]),
    "sum": (_functional(lambda op, x: op.sum(x, -1)), [(qint8, (2, 256)), (qint16, (2, 1)), (qint8, (2, 2))]),
    "matmul": (
        _functional(lambda op, x: op.matmul(x, x, False, True)), [(qint8, (2, 256)), (qint16, (2, 1)), (qint8, (2, 1))],
    ),
    "mul": (_functional(lambda op, x: op.mul(x, x)), BOTH),
    "add": (_functional(lambda op, x: op.add(x, x)), BOTH),
    "cat": (_functional(lambda op, x: op.cat([x, x])), BOTH),
    "sigmoid": (nn.Sigmoid, BOTH),
    "softmax": (lambda: nn.Softmax(-1), [*BOTH, (qint8, (2, 9))]),
    "layer norm": (lambda: nn.LayerNorm(4), [*BOTH, (qint8, (3, 2, 4))]),
    "linear": (lambda: nn.Linear(4, 3), BOTH),
    "prelu": (nn.PReLU, BOTH),
    "average": (lambda: nn.AvgPool2d(2), [(qint8, (1, 2, 4, 4)), (qint16, (1, 2, 4, 4)), (qint8, (1, 2, 6, 4))]),
    "adaptive average": (
        lambda: nn.AdaptiveAvgPool2d(2), [(qint8, (1, 2, 4, 4)), (qint16, (1, 2, 4, 4)), (qint8, (1, 2, 6, 5))],
    ),
    "resize": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        [(qint8, (1, 2, 4, 4)), (qint16, (1, 2, 4, 4)), (qint8, (1, 2, 3, 5))],
    ),
    "correlation": (
        lambda: _Functional(lambda op, x: op(x, x), hnn.Correlation(max_displacement=1, pad_size=1)),
        [(qint8, (1, 256, 4, 4)), (qint16, (1, 1, 4, 4)), (qint8, (1, 1, 4, 4))],
    ),
    "a number": (_functional(lambda op, x: op.mul_scalar(x, 1.5)), BOTH),
    "maximum": (_functional(lambda op, x: op.maximum(x, x)), BOTH),
    "atan2": (lambda: _Functional(lambda op, x: op(x, x.flip(0)), hnn.Atan2()), BOTH),
    "where": (
        lambda: _Functional(lambda op, x: op(torch.tensor([True, False]), x, 0.25), hnn.Where()),
        [(qint8, (4, 2)), (qint16, (4, 2))],
    ),
    "prelu of channels": (lambda: nn.PReLU(4), IMAGES),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGES),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(4), IMAGES),
    "log softmax": (lambda: nn.LogSoftmax(-1), [*BOTH, (qint8, (2, 9))]),
    "convolution": (lambda: nn.Conv2d(4, 3, 3), IMAGES),
    "resize to a size": (lambda: nn.Upsample(size=(7, 5), mode="bilinear", align_corners=True), IMAGES),
    "sampling": (lambda: _Functional(lambda op, x: op(x, GRID), hnn.GridSample(align_corners=True)), IMAGES),
    "boxes of two maps": (
        lambda: _Functional(
            lambda op, x: op([x, x], [torch.tensor([[0.0, 0, 3, 3]])]), hnn.MultiScaleRoIAlign((2, 2), [4, 8], 2),
        ),
        IMAGES,
    ),
}  # fmt: skip


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_module_that_meets_several_inputs_plans_each_as_if_it_were_alone(name: str, dtype: str) -> None:
    set_march(March.NASH_M)
    make, inputs = INPUTS[name]
    torch.manual_seed(0)
    shape = inputs[0][1]
    net = make()
    body = convert_fx(prepared(QuantWrapper(net), (torch.randn(shape),), dtype)).module

    def run(module: Any, x: QTensor) -> Tensor:
        return (net.call(module.op, x) if isinstance(net, _Functional) else module(x)).int_repr()

    tensors = [_input(d, s, seed, scale) for seed, (d, s) in enumerate(inputs) for scale in (SCALE, SCALE / 3)]
    tensors += [integer_qtensor(tensors[0].int_repr().clamp(0, 100).float(), torch.tensor([SCALE]), inputs[0][0])]
    tensors[-1].set_range(0, 100)
    together = [run(body, x) for x in tensors + tensors[::-1]]
    alone = [run(copy.deepcopy(body), x) for x in tensors]  # a copy has no plans
    for got, wanted in zip(together, alone + alone[::-1], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "other",
    [
        _input(qint16, (2, 3)),
        _input(qint8, (2, 3), scale=0.1),
        integer_qtensor(torch.zeros(2, 3), torch.tensor([SCALE] * 3), qint8, 1),
        integer_qtensor(torch.zeros(3, 3), torch.tensor([SCALE] * 3), qint8, 0),
    ],
    ids=["format", "scale", "channels", "axis"],
)
def test_the_key_has_all_that_a_tensor_says_of_itself(other: QTensor) -> None:
    cache = PlanCache()
    x, narrow = _input(qint8, (2, 3)), _input(qint8, (2, 3))
    narrow.set_range(0, 5)
    names = [cache.get((t,), "key", lambda i=i: i) for i, t in enumerate((x, other, narrow))]
    assert names == [0, 1, 2]
    assert cache.get((_input(qint8, (7, 3)),), "key", lambda: 9) == 0  # sizes are for the caller to add
    assert cache.get((x,), "another", lambda: 9) == 9
    assert cache.get((x, x), "key", lambda: 8) == 8


def test_scales_of_channels_are_known_by_their_numbers() -> None:
    cache, scale = PlanCache(), torch.tensor([1.0, 2.0])
    assert cache.get((scale,), "key", lambda: "old") == "old"
    assert cache.get((scale.clone(),), "key", lambda: "new") == "old"
    scale.data[1] = 3
    assert cache.get((scale,), "key", lambda: "new") == "new"


@pytest.mark.slow
def test_plans_are_bounded_in_bytes_and_the_last_stays() -> None:
    cache, size = PlanCache(), plans._MOST_BYTES // 4 // 4
    for i in range(40):
        cache.get((), i, lambda: [torch.zeros(size)])
        cache.get((), i, lambda: pytest.fail("the newest plan must stay"))
        assert cache.size <= plans._MOST_BYTES * 5 // 4
    assert len(cache) == 5
    cache.get((), "large", lambda: torch.zeros(plans._MOST_BYTES))
    cache.get((), "large", lambda: pytest.fail("the newest plan must stay"))
    for i in range(9):
        cache.get((), ("large", i), lambda: torch.zeros(plans._MOST_BYTES))
    assert cache.size <= plans._MOST_BYTES * 4 * (1 + plans._MOST_TIMES)


def test_memory_that_plans_share_counts_once() -> None:
    cache, shared = PlanCache(), torch.zeros(plans._MOST_BYTES // 4)
    for i in range(plans._MOST_PLANS - 1):
        cache.get((), i, lambda: (shared, torch.zeros(2)))
    assert len(cache) == plans._MOST_PLANS - 1 and cache.size < plans._MOST_BYTES + 4096


def test_plans_are_bounded_in_number_and_the_one_in_use_stays() -> None:
    cache = PlanCache()
    for i in range(3 * plans._MOST_PLANS):
        cache.get((), i, lambda: 0)
        cache.get((), "in use", (lambda: 0) if i == 0 else (lambda: pytest.fail("it was used all the time")))
    assert len(cache) == plans._MOST_PLANS


@pytest.mark.slow
def test_a_frozen_layer_after_a_training_one_does_not_grow() -> None:
    """Each step of training gives it another input scale."""
    set_march(March.NASH_M)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    net = prepare_qat_fx(QuantWrapper(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512))), {"": qconfig("qint16")})
    calibrate(net, (x,))
    frozen = net.module[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            net.module[0].activation_post_process.scale.mul_(1 + 0.01 * step)
            freeze_qat_module(frozen) if step == 0 else None
            net(x).sum().backward()
            assert frozen.twin()._plans.size <= 4 * 20 * 512 * 512
    assert len(frozen.twin()._plans) > 1


def test_the_limit_of_a_table_is_for_its_largest_input() -> None:
    """A module that is called on several inputs: the last one that is new is not the largest."""
    set_march(March.NASH_M)
    body = convert_fx(prepared(QuantWrapper(nn.Sigmoid()), (torch.randn(2, 4),))).module
    for scale in (1e5, 0.5):
        body(_input(qint8, (2, 4), scale=scale))
    assert body.magnitude == pytest.approx(128e5)


def test_what_was_planned_in_inference_mode_can_be_trained_with() -> None:
    set_march(March.NASH_M)
    x = torch.randn(1, 2, 4, 4)
    net = prepared(QuantWrapper(nn.UpsamplingBilinear2d(scale_factor=2)), (x,))
    set_fake_quantize(net, FakeQuantState.QAT)
    net.eval()
    with torch.inference_mode():
        net(x)
    net(x.requires_grad_()).sum().backward()
    assert x.grad is not None and bool((x.grad > 0).all())


# -- twins -------------------------------------------------------------------------------------------------------------
def _kind(case: Case) -> tuple:
    """What the numbers of a case belong to."""
    model = case.model()
    return tuple(type(m).__name__ for m in model.body.modules()), tuple(n for n, _ in model.named_parameters())


MANY_STEPS = ("2-layers", "bidirectional", "state", "zeros")  # of what cells are tried for
WITH_NUMBERS = list(
    {_kind(c): c for c in CASES if _kind(c)[1] and not any(word in c.name for word in MANY_STEPS)}.values()
)


def _every_other(first: int) -> list[Any]:
    """Cases of one of the two tests below: what is in the soak for one is not for the other."""
    names = [case.name for case in WITH_NUMBERS]
    return [name if number % 2 == first else in_soak(name)[0] for number, name in enumerate(names)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _every_other(0))
def test_integers_follow_every_number_of_a_module(name: str) -> None:
    """Whatever is written to, by whatever means: VALIDATION is what would be converted."""
    case = next(c for c in WITH_NUMBERS if c.name == name)
    set_march(case.march)
    inputs = case.inputs()
    qat = prepared(case.model(), inputs, case.formats[0])
    with torch.no_grad():
        qat(*[x.clone() for x in inputs])
        for path, tensor in [*qat.named_parameters(), *qat.named_buffers()]:
            if (
                not tensor.is_floating_point()
                or "post_process.activation" in path
                or path.endswith(("min_val", "max_val"))
            ):
                continue
            tensor.data.mul_(1.25)
            got = qat(*[x.clone() for x in inputs])
            wanted = convert_fx(copy.deepcopy(qat))(*[x.clone() for x in inputs])
            assert not mismatches(as_numbers(got), as_numbers(wanted)), path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _every_other(1))
def test_a_converted_module_follows_every_number_of_its_own(name: str) -> None:
    """A broadcast, an average of weights or a hand that writes to its buffers: no plan is older than they are."""
    case = next(c for c in WITH_NUMBERS if c.name == name)
    set_march(case.march)
    inputs = case.inputs()
    quantized = convert_fx(prepared(case.model(), inputs, case.formats[0]))
    with torch.no_grad():
        quantized(*[x.clone() for x in inputs])
        for path, tensor in quantized.named_buffers():
            tensor.data.copy_(tensor * 1.25 if tensor.is_floating_point() else tensor.flip(0))
            got = quantized(*[x.clone() for x in inputs])
            wanted = copy.deepcopy(quantized)(*[x.clone() for x in inputs])  # a copy has no plans
            assert not mismatches(as_numbers(got), as_numbers(wanted)), path


def _write_numpy(net: Any, view: Any) -> None:
    view[0] = 0.3


UNSEEN: dict[str, Callable[[Any, Any], object]] = {
    "data": lambda net, view: net.weight.data.mul_(0.5),
    "bias data": lambda net, view: net.bias.data.add_(0.5),
    "an older numpy view": _write_numpy,
    "scale data": lambda net, view: net.activation_post_process.scale.data.mul_(0.5),
    "weight scale data": lambda net, view: net.weight_fake_quant.scale.data.mul_(0.5),
    "swap_tensors": lambda net, view: torch.utils.swap_tensors(net.weight, nn.Parameter(net.weight.detach() * 0.5)),
    "parametrized copy": lambda net, view: net._parameters.update(weight=nn.Parameter(net.weight.detach() * 0.5)),
    "lerp of data, as averages do": lambda net, view: net.weight.data.lerp_(torch.ones_like(net.weight), 0.1),
}


@pytest.mark.parametrize("is_inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("write", UNSEEN)
def test_writes_that_torch_does_not_count_reach_the_integers(write: str, is_frozen: bool, is_inference: bool) -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    qat = prepared(QuantWrapper(nn.Linear(8, 8)), (x,))
    layer = qat.module
    view = layer.weight.detach().numpy()
    if is_frozen:
        freeze_qat_module(layer)
    mode = torch.inference_mode() if is_inference else torch.no_grad()
    with mode:
        before = qat(x).clone()
        assert layer.twin() is layer.twin()
    UNSEEN[write](layer, view)
    with torch.inference_mode() if is_inference else torch.no_grad():
        after = qat(x).clone()
    with torch.no_grad():
        assert torch.equal(after, convert_fx(copy.deepcopy(qat))(x))
    assert not torch.equal(after, before)


def test_batch_norm_statistics_written_unseen_reach_the_integers() -> None:
    from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode

    set_march(March.NASH_M)
    set_qat_mode(QATMode.WithBN)
    try:
        x = torch.randn(2, 3, 5, 5)
        qat = prepared(QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), (x,))
        with torch.no_grad():
            before = qat(x).clone()
            for buffer in (b for n, b in qat.named_buffers() if n.endswith("running_mean")):
                buffer.data.add_(0.5)
            assert torch.equal(qat(x), convert_fx(copy.deepcopy(qat))(x))
            assert not torch.equal(qat(x), before)
    finally:
        set_qat_mode(QATMode.FuseBN)


def test_weights_that_training_writes_unseen_are_observed() -> None:
    """A fused optimizer counts no writes; the range of the weights follows them all the same."""
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net = prepare_qat_fx(QuantWrapper(nn.Linear(8, 8)), {"": qconfig()})
    for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT):
        set_fake_quantize(net, state)
        quantizer, x = net.module.weight_fake_quant, torch.randn(4, 8)
        with torch.no_grad():
            net(x)
            net(x)
            before = quantizer.scale.clone()
            net.module.weight.data.mul_(3)
            net(x)
        assert (quantizer.scale > before).all(), state


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_threads_run_one_model_while_its_twins_are_forgotten() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.AvgPool2d(1)) for _ in range(4)]
    inputs = [torch.randn(1, 4, size, size) for size in (4, 5, 6)]
    qat = prepared(QuantWrapper(nn.Sequential(*layers)), (inputs[0],))
    quantized = convert_fx(copy.deepcopy(qat))
    with torch.no_grad():
        wanted = [quantized(x) for x in inputs]
    failed: list[str] = []
    is_over = threading.Event()

    def run(model: nn.Module) -> None:
        try:
            with torch.no_grad():
                for _ in range(6):
                    for x, expected in zip(inputs, wanted, strict=True):
                        if not torch.equal(model(x), expected):
                            failed.append("another result")
        except Exception as error:
            failed.append(repr(error))

    def forget() -> None:
        while not is_over.wait(0.001):
            set_fake_quantize(qat, FakeQuantState.VALIDATION)
            for module in quantized.modules():
                if isinstance(module, QuantizedModule):
                    module.forget_plans()

    threads = [threading.Thread(target=run, args=(model,)) for model in (qat, qat, quantized, quantized)]
    forgetting = threading.Thread(target=forget)
    for thread in (*threads, forgetting):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    forgetting.join()
    assert not failed, failed[0]


def test_threads_share_a_cache_that_is_full() -> None:
    cache, failed = PlanCache(), []

    def work(seed: int) -> None:
        for i in range(600):
            key = (i * (seed + 1)) % (2 * plans._MOST_PLANS)
            try:
                if cache.get((), key, lambda key=key: (key, torch.zeros(8)))[0] != key:
                    failed.append("another's plan")
            except Exception as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    assert len(cache) <= plans._MOST_PLANS
