"""Each operator, in each form, in int8 and int16: one arithmetic, close to float, with the right gradients."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantize,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.operators.cases import CASES, Case
from tests.operators.cases.base import Body
from tests.routes import assert_one_arithmetic, prepared
from tests.tiers import in_soak


class Run(NamedTuple):
    """A case in a format."""

    name: str
    dtype: str


BY_NAME = {case.name: case for case in CASES}
# Cases that give no values come last, so that a number stands for the same run in every test: pytest orders by it.
_BY_RESULT = sorted(CASES, key=lambda case: case.picks == ())
RUNS = [Run(case.name, dtype) for case in _BY_RESULT for dtype in case.formats]
WITH_VALUES = [run for run in RUNS if BY_NAME[run.name].picks != ()]
_SPELLING = re.compile(r"^(torch|Tensor|method|operator|functional)-")


# Rows of the operator table that have no other case in one of the formats.
_ONLY_CASES = (
    *("batch-norm", "batch-norm3d", "is-not-finite", "logical-xor", "mask-to-bool", "mask-to-integers", "median-dim"),
    *("min", "min-dim", "property-mt", "rnn-cell"),
)


def _in_turns(name: str, place: int) -> set[str]:
    """The formats of a case: both of the first case of a kind, one of the next, the other of the one after it."""
    formats = BY_NAME[name].formats
    if name in _ONLY_CASES or (place == 0 and not _SPELLING.match(name)):
        return set(formats)
    return {formats[place % len(formats)]}


def _sample() -> set[Run]:
    """The runs of `make test`: every case, the first of each kind (``conv``, ``conv-dilation``, ...) in both formats.

    `test_table_is_covered` says that each row of the operator table is met in both.
    """
    kinds: dict[str, list[str]] = {}
    for name in BY_NAME:
        kinds.setdefault(_SPELLING.sub("", name).partition("-")[0], []).append(name)
    return {
        Run(name, dtype)
        for names in kinds.values()
        for place, name in enumerate(names)
        for dtype in _in_turns(name, place)
    }


SAMPLE = _sample()


def of_each(runs: list[Run], *, in_one_format: bool = False) -> pytest.MarkDecorator:
    """All tests of a run come one after the other, so that they share a prepared model.

    Args:
        in_one_format: of each case one run, int8 of one and int16 of the next; `make soak` has the others.
    """
    chosen, broad = ([run for run in runs if (run in SAMPLE) is wanted] for wanted in (True, False))
    left = set(chosen)
    if in_one_format:
        of_case: dict[str, list[Run]] = {}
        for run in chosen:
            of_case.setdefault(run.name, []).append(run)
        left = {group[number % len(group)] for number, group in enumerate(of_case.values())}
    params = [run if run in left else in_soak((run,))[0] for run in (*chosen, *broad)]
    return pytest.mark.parametrize("run", params, ids=["-".join(run) for run in (*chosen, *broad)], scope="module")


def _on_grid(qat: nn.Module, inputs: tuple[Tensor, ...], count: int) -> list[Tensor]:
    """The inputs as the QuantStubs round them."""
    return [getattr(qat, f"quant_{i}")(x).dequantize() if i < count else x for i, x in enumerate(inputs)]


@functools.lru_cache(maxsize=1)
def _prepared(run: Run) -> nn.Module:
    """The QAT model of a run in VALIDATION, for all tests of it: they leave it as it is."""
    case = BY_NAME[run.name]
    return prepared(case.model(), case.inputs(), run.dtype)


@functools.lru_cache(maxsize=1)
def _with_room(run: Run) -> nn.Module:
    """Every observed range is 2 % wider: rounded inputs can push an inner value past what float data showed.

    It is one for all tests of the run; each sets the state that it needs.
    """
    qat = copy.deepcopy(_prepared(run))
    for path, module in qat.named_modules():
        if isinstance(module, FakeQuantize) and not path.endswith("weight_fake_quant"):
            module.activation_post_process.min_val.mul_(1.02)
            module.activation_post_process.max_val.mul_(1.02)
    set_fake_quantize(qat, FakeQuantState.QAT)
    with torch.no_grad():
        qat(*BY_NAME[run.name].inputs())  # an averaging constant of 0 keeps the ranges, and the scales follow them
    return qat


def _round_weights(model: nn.Module, qat: nn.Module) -> None:
    """Put every weight on its grid, also those that a layer takes from its owner's parameter."""
    rounded = copy.deepcopy(qat)
    for layer in rounded.modules():
        if isinstance(layer, QATGemm):
            layer.weight.copy_(layer.weight_fake_quant.round(layer.weight))
    found = rounded.state_dict()
    for name, tensor in model.state_dict().items():
        if name in found:
            tensor.copy_(found[name])


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.smoke_each("run.name")
@of_each(RUNS)
def test_all_routes_give_the_same_integers(run: Run, tmp_path: Any, record_property: Any) -> None:
    case, dtype = BY_NAME[run.name], run.dtype
    set_march(case.march)
    inputs, qat = case.inputs(), _prepared(run)
    other = case.inputs(seed=2)
    beyond = tuple(3 * x if i < len(case.shapes) else x for i, x in enumerate(other))  # saturates
    for value in _values(case, qat(*inputs)[0]):
        assert isinstance(value, QTensor) and value.dtype == (case.out_format or dtype)
    assert_one_arithmetic(qat, inputs, tmp_path, [beyond], record=lambda n: record_property("mismatches", n))


def _values(case: Case, result: Any) -> list[Any]:
    return [result] if case.picks is None else [result[i] for i in case.picks]


def _rest(case: Case, result: Any) -> list[Tensor]:
    """Positions, booleans and real numbers among the results."""
    if case.picks is None:
        return []
    results = [result] if isinstance(result, Tensor) else list(result)
    return [x.int_repr() if isinstance(x, QTensor) else x for i, x in enumerate(results) if i not in case.picks]


@of_each(RUNS)
def test_integers_are_close_to_float_and_to_training(run: Run) -> None:
    case, dtype = BY_NAME[run.name], run.dtype
    set_march(case.march)
    inputs, model, qat = case.inputs(), case.model(), _with_room(run)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        exact = qat(*inputs)[0]
        on_grid = _on_grid(qat, inputs, len(case.shapes))
        if case.has_weight:  # what is left is the error of the arithmetic, not of the rounded weights
            _round_weights(model, qat)
        wanted = model.body.double()(*[x.double() if x.is_floating_point() else x for x in on_grid])
        set_fake_quantize(qat, FakeQuantState.QAT)
        trained = qat(*inputs)[0]
    for found, real, route in zip(*(_values(case, r) for r in (exact, wanted, trained)), strict=True):
        scale = float(found.scale)
        reachable = real.clamp(found.dtype.min * scale, found.dtype.max * scale)
        from_float = float((found.dequantize() - reachable).abs().max()) / scale
        from_training = int((route.int_repr().int() - found.int_repr().int()).abs().max())
        assert from_float <= (case.steps8 if dtype == "qint8" else case.steps16)
        assert torch.equal(route.scale, found.scale)
        assert from_training <= (case.train_steps if dtype == "qint8" else case.train_steps16)
    for found, real in zip(_rest(case, exact), _rest(case, wanted), strict=True):
        if found.is_floating_point():
            assert float((found - real).abs().max()) <= case.differing
        else:
            assert found.dtype == real.dtype
            assert float((found != real).double().mean()) <= case.differing


@of_each(WITH_VALUES, in_one_format=True)  # they do not depend on it
def test_gradients_follow_float(run: Run) -> None:
    case = BY_NAME[run.name]
    set_march(case.march)
    inputs, qat = case.inputs(), _with_room(run)
    wanted = _gradients(case.model(), inputs)
    for state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
        set_fake_quantize(qat, state)
        found = _gradients(qat, inputs)
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            assert torch.isfinite(gradient).all(), (state, key)
            if case.is_smooth and float(wanted[key].abs().max()) > 1e-6:
                cosine = float(torch.cosine_similarity(gradient.flatten().double(), wanted[key].flatten().double(), 0))
                size = float(gradient.norm() / wanted[key].norm())
                assert cosine > 0.98 and 0.9 < size < 1.1, (state, key)


def _gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = model(*[x * 1.0 if x.is_floating_point() else x for x in leaves])[1:]  # in place must not write to a leaf
    generator = torch.Generator().manual_seed(5)
    sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()
    found = {f"input {i}": x.grad for i, x in enumerate(leaves)}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {key: value for key, value in found.items() if value is not None}


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / True,
        lambda x: x + True,
        lambda x: (x > 0).type_as(x),
        lambda x: (x > 0).to(x),
        lambda x: x.max(),
        lambda x: x.max().max(0).values,
        lambda x: x.max().max(0).indices,
        lambda x: x.max().argmin(0),
        lambda x: x.max().amax(-1),
        lambda x: x.max().mean(-1),
        lambda x: x.max().sum(0),
        lambda x: x.argmax(1) / 3,
        lambda x: x.argmax(1) / (x.argmin(1) + 1),
        lambda x: torch.div(-x.argmax(1), 2, rounding_mode="trunc"),
        lambda x: torch.div(-x.argmax(1), 2, rounding_mode="floor"),
        lambda x: torch.relu(x.argmax(1) - 2),
        lambda x: (x > 0.1).tril().float(),
        lambda x: (x > 0.1).masked_fill(x > 0.5, False).float(),
    ],
)
def test_numbers_and_tensors_without_axes_on_every_route(function: Any, tmp_path: Any) -> None:
    qat = prepared(QuantWrapper(Body(function)), (X,))
    quantized = assert_one_arithmetic(qat, (X,), tmp_path, [(-2 * X,)])
    on_grid = quantized.get_submodule("quant")(X).dequantize()
    assert (quantized(X) - function(on_grid)).abs().max() < 0.03


class _Limited(nn.Module):
    """A ReLU6 that no layer is fused with, and a layer whose plan depends on how large its inputs can be."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(scale=1 / 10), nn.Conv2d(4, 64, 1)
        with torch.no_grad():
            self.conv.weight.mul_(torch.logspace(-6, 0, 64).reshape(-1, 1, 1, 1))
            self.conv.bias.fill_(1.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu6(F.max_pool2d(self.quant(x), 2)))


def test_a_wanted_gradient_changes_no_integers_behind_a_relu6() -> None:
    set_march(March.BAYES)
    torch.manual_seed(0)
    model, data = _Limited().eval(), torch.rand(32, 4, 16, 16) * 14 - 4
    qat = prepare_qat_fx(model, {"": get_default_qconfig()}).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(data)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        want = qat(data).int_repr()
    assert torch.equal(qat(data.requires_grad_()).int_repr(), want)
