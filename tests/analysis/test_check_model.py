"""check_model: which operator of a converted model breaks which published limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch.analysis.limits import find_limits, operator_uses
from horizon_plugin_pytorch.errors import HorizonError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.operators.support import GROUPS, Support, TensorFact, Use, at_most, between, on
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    QuantWrapper,
    check_model,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare,
    prepare_qat,
)
from tests.routes import calibrate, prepared, qconfig

X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.pool, self.softmax = nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.conv(self.quant(x))) + 1.0
        return self.dequant(self.softmax(torch.cat([y, y * y], dim=1)).reshape(1, -1))


def _quantized(dtype: str = "qint8") -> Any:
    set_march(March.BAYES)
    return convert_fx(prepared(Net(), (X,), dtype))


def test_a_model_that_fits() -> None:
    quantized = _quantized()
    assert check_model(quantized, (X,)) == check_model(quantized, X, March.BAYES) == check_model(quantized, [X]) == 0


def test_every_operator_is_seen_once_and_not_what_it_is_made_of() -> None:
    uses = operator_uses(_quantized(), (X,))
    assert [use.operator for _, use in uses] == [
        "quant", "conv2d", "max_pool", "add_scalar", "mul", "cat", "softmax", "reshape", "dequant",
    ]  # fmt: skip
    conv = uses[1][1]
    assert conv.numbers("kernel_size") == (3, 3) and conv.numbers("C") == (4,)
    assert conv.place.startswith("`conv` (test_check_model.py:")


@pytest.mark.slow
def test_what_a_chip_does_not_have(capsys: pytest.CaptureFixture) -> None:
    assert check_model(_quantized(), (X,), "bernoulli2") == 1
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("softmax", "not on bernoulli2", "it runs on bayes", "4 axes", "NCHW", "This model breaks")
    )


def test_formats_and_limits_of_a_row() -> None:
    tight = on(bayes=Support(inputs=("qint8",), limits=(between("kernel_size", 1, 2, "use a smaller kernel"),)))
    row = Operator("tight", ScaleRule.OWN, marches=tight)
    use = Use("tight", "`a`", (TensorFact((1, 2, 3, 3), "qint16"),), attributes={"kernel_size": (3, 1)})
    from horizon_plugin_pytorch.analysis.limits import _format_findings

    found = list(_format_findings(row, use, March.BAYES))
    assert [(f.limit, f.advice) for f in found] == [
        ("input qint8", "give the producer of this tensor such a format"),
        ("1 <= kernel_size <= 2", "use a smaller kernel"),
    ]
    assert found[1].found == "kernel_size 3, 1 (inputs (1, 2, 3, 3))"


def test_limits_know_only_what_a_use_has() -> None:
    use = Use("x", "", (TensorFact((2, 3), "qint8"),))
    assert at_most("C", 1).holds(use) and at_most("kernel_size", 1).holds(use) and not at_most("rank", 1).holds(use)
    assert use.numbers("W") == (3,) and use.numbers("H") == (2,) and use.numbers("HW") == (6,) and not use.numbers("N")


def test_a_large_batch_on_bernoulli2() -> None:
    set_march(March.BERNOULLI2)
    x = torch.randn(129, 1, 2, 2)
    quantized = convert_fx(prepared(QuantWrapper(nn.Conv2d(1, 1, 1)), (x,)))
    assert {f.limit for f in find_limits(quantized, (x,), March.BERNOULLI2)} == {"N <= 128"}
    assert check_model(quantized, x[:128]) == 0  # the chip that the model was prepared for


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.shift = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.quant(x) + self.shift)


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_an_operand_that_a_generated_stub_quantizes_is_an_integer(method: str) -> None:
    set_march(March.NASH_M)
    qat = prepare(Shifted().eval(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    quantized = convert(calibrate(qat, (X,))) if method == "jit-strip" else convert_fx(calibrate(qat, (X,)))
    (add,) = [use for row, use in operator_uses(quantized, (X,)) if row.name == "add"]
    assert [x.format for x in add.inputs] == ["qint8", "qint8"] and check_model(quantized, (X,)) == 0


def test_eager_models_are_checked_too() -> None:
    set_march(March.BAYES)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid()))
    model.qconfig = default_qat_8bit_fake_quant_qconfig
    quantized = convert(calibrate(prepare_qat(model), (X,)))
    assert [use.operator for _, use in operator_uses(quantized, (X,))] == ["quant", "conv2d", "sigmoid", "dequant"]
    assert check_model(quantized, X) == 0


@pytest.mark.parametrize("kind", ["float", "qat", "traced"])
def test_other_models_are_refused(kind: str) -> None:
    set_march(March.BAYES)
    model: Any = {"float": Net, "qat": lambda: prepared(Net(), (X,)), "traced": lambda: torch.jit.trace(Net(), X)}[
        kind
    ]()
    with pytest.raises(HorizonError, match="convert"):
        check_model(model, (X,))


class Parts(nn.Module):
    """Code that takes a tensor apart, as the guide's `aten::unbind` error comes about, or as it should be."""

    def __init__(self, is_unbound: bool) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)
        self.is_unbound = is_unbound

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        parts = x.unbind(1) if self.is_unbound else x.split(2, 1)
        return self.dequant(parts[0])


@pytest.mark.parametrize("kind", ["converted", "traced"])
def test_unbind_is_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_march(March.BAYES)
    for is_unbound in (False, True):
        model: Any = convert_fx(prepared(Parts(is_unbound).eval(), (X,)))
        if kind == "traced":
            model = torch.jit.trace(model, X)
        assert check_model(model, (X,)) == int(is_unbound)
        out = capsys.readouterr().out
        assert ("unbind" in out and "split" in out) == is_unbound and "HBDK" not in out
        assert ("formats and limits of the chip are not checked" in out) == (kind == "traced" and not is_unbound)


def test_every_march_is_in_one_group() -> None:
    assert sorted(m for members in GROUPS.values() for m in members) == sorted(March)


class Called(nn.Module):
    """One function of quantized tensors and of a module or parameter."""

    def __init__(self, function: Callable[..., Any], count: int, part: Any = None) -> None:
        super().__init__()
        self.quants, self.dequant = nn.ModuleList(QuantStub() for _ in range(count)), DeQuantStub()
        self.function, self.part = function, part

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        tensors = [quant(v) for quant, v in zip(self.quants, (x, y), strict=False)]
        return self.dequant(self.function(*tensors, *([] if self.part is None else [self.part])))


def _limits(
    march: March, function: Callable[..., Any], *inputs: Tensor, part: Any = None, dtype: str = "qint8",
    **qconfig_dict: Any,
) -> set[str]:  # fmt: skip
    """The limits that one call breaks on a chip."""
    set_march(march)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 on BERNOULLI2
        quantized = convert_fx(prepared(Called(function, len(inputs), part), inputs, dtype, **qconfig_dict))
    return {f.limit for f in find_limits(quantized, inputs, march)}


B2, BAYES, NASH, NASH_P = March.BERNOULLI2, March.BAYES, March.NASH_E, March.NASH_P
_IN16, _OUT16 = {"input qint16"}, {"output qint16"}
_IN8, _OUT8 = {"input qint8"}, {"output qint8"}
GRID = torch.rand(1, 2, 2, 2)


@pytest.mark.parametrize("name", ["T", "mT", "mH"])
def test_axes_are_swapped_by_attributes_too(name: str) -> None:
    wanted = {"the batch axis stays first"} if name == "T" else set()
    assert _limits(BAYES, lambda x: getattr(x, name), X) == wanted
    with pytest.raises(UnsupportedOperatorError, match=r"test_check_model.py.*has no quantized form on bernoulli2"):
        _limits(B2, lambda x: getattr(x, name), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1.0,
        lambda x: 1 - x,
        lambda x: torch.sub(x, other=2),
        lambda x: x.mul_(2.0),
        lambda x: x + torch.tensor(1.0),
    ],
)
def test_numbers_are_refused_where_the_chip_has_none(function: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"with a number.*on bernoulli2: it is supported on bayes"):
        _limits(B2, function, X)
    assert _limits(BAYES, function, X) == set()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.ff = QuantStub(), DeQuantStub(), FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.ff.add_scalar(self.quant(x), 1.0))


def test_scalars_of_float_functional() -> None:
    set_march(B2)
    with pytest.raises(UnsupportedOperatorError, match=r"FloatFunctional.add_scalar.*on bernoulli2: it is supported"):
        prepared(Scalar(), (X,))
    set_march(BAYES)
    quantized = convert_fx(prepared(Scalar(), (X,)))
    assert check_model(quantized, X) == 0 and check_model(quantized, X, B2) == 1


def test_arguments_of_functions_that_run_as_they_are() -> None:
    assert _limits(B2, lambda x: F.max_pool2d(x, (1, 70), padding=(0, 35)), torch.randn(1, 1, 2, 70)) == {
        "1 <= kernel_size <= 64"
    }
    assert _limits(BAYES, lambda x: F.max_pool2d(x, 2), X) == set()


@pytest.mark.parametrize(
    ("march", "function", "inputs", "wanted"),
    [
        (B2, lambda x: x.max(1, keepdim=True)[0] + x, (X,), {"only as output of the model"}),
        (B2, lambda x: x.amax(1, keepdim=True) * x, (X,), {"only as output of the model"}),
        (B2, lambda x: x.amax(1, keepdim=True), (X,), set()),
        (BAYES, lambda x: x.gather(1, x.max(1, keepdim=True)[1]), (X,), {"positions only as output of the model"}),
        (BAYES, lambda x: x.gather(1, x.argmax(1, keepdim=True).clone()), (X,),
         {"positions only as output of the model"}),
        (BAYES, lambda x: x.max(1, keepdim=True)[0] + x, (X,), set()),
        (BAYES, lambda x: x.gather(1, x.topk(2, 1)[1]), (X,), set()),
        (BAYES, lambda x, y: F.grid_sample(x, y, padding_mode="reflection", align_corners=False), (X, GRID),
         {"padding_mode zeros or border"}),
        (BAYES, lambda x, y: F.grid_sample(x, y, padding_mode="border", align_corners=False), (X, GRID), set()),
        (BAYES, lambda x, y: x / y, (X, X.abs() + 1), _IN16 | _OUT16),
        (NASH, lambda x: torch.where(torch.all(x, 1, keepdim=True), x, x * x), (X,), {"input qbool"}),
        (NASH, lambda x: torch.where(torch.all(x > 0, 1, keepdim=True), x, x * x), (X,), set()),
        (NASH_P, lambda x: torch.where(torch.any(x), x, x * x), (torch.randn(70000),), {"65535 elements a result"}),
        (BAYES, lambda x: torch.where(torch.any(x), x, x * x), (torch.randn(70000),), {"W <= 65536"}),
        (BAYES, lambda x, y: x @ y, (torch.randn(2, 1, 9000), torch.randn(2, 9000, 1)), {"W <= 8192", "H <= 8192"}),
        (BAYES, lambda x, y: torch.cat([x, y], 1), (torch.randn(1, 20, 80, 80),) * 2, set()),
    ],
)  # fmt: skip
def test_limits_of_functions(march: March, function: Any, inputs: tuple[Tensor, ...], wanted: set[str]) -> None:
    assert _limits(march, function, *inputs) == wanted


@pytest.mark.parametrize(
    ("march", "function", "wanted"),
    [
        (B2, F.relu, _IN8 | _OUT8), (B2, F.relu6, _IN8 | _OUT8), (BAYES, F.relu, set()),
        (BAYES, lambda x: x / (x * x), set()),
        (BAYES, lambda x: x @ x.transpose(2, 3), _IN8), (NASH, lambda x: x @ x.transpose(2, 3), set()),
        (BAYES, lambda x: x.softmax(1), _IN8), (NASH, lambda x: x.softmax(1), set()),
        (NASH, lambda x: F.max_pool2d(x, 2), set()), (NASH, lambda x: F.avg_pool2d(x, 2), set()),
        (NASH, lambda x: F.interpolate(x, size=(4, 4)), set()), (NASH, lambda x: F.layer_norm(x, (8,)), set()),
    ],
)  # fmt: skip
def test_int16(march: March, function: Any, wanted: set[str]) -> None:
    assert _limits(march, function, X, dtype="qint16") == wanted


@pytest.mark.parametrize(
    ("march", "layer", "x", "wanted"),
    [
        (BAYES, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), X, {"padding_mode is not reflect"}),
        (B2, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), X, {"padding_mode is not reflect"}),
        (B2, nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"), X, set()),
        (B2, nn.Conv2d(3, 4, 7), torch.randn(1, 3, 224, 224), set()),
        (B2, nn.Conv2d(1000, 1, 7), torch.randn(1, 1000, 7, 7), {"weights of an output channel <= 32768"}),
        (BAYES, nn.Conv2d(1, 9000, 1), torch.randn(1, 1, 2, 2), set()),
        (BAYES, nn.Sequential(nn.Conv2d(1, 9000, 1), nn.Dropout()), torch.randn(1, 1, 2, 2), set()),
        (BAYES, nn.Sequential(nn.Conv2d(1, 9000, 1), nn.Sigmoid()), torch.randn(1, 1, 2, 2),
         {"out_channels <= 8192, as output of the model 16384"}),
        (BAYES, nn.UpsamplingBilinear2d(scale_factor=2), X, set()),
        (BAYES, nn.UpsamplingNearest2d(scale_factor=2), X, set()),
        (BAYES, nn.Upsample(scale_factor=2), X, {"recompute_scale_factor=True with scale_factor"}),
    ],
)  # fmt: skip
def test_limits_of_layers(march: March, layer: nn.Module, x: Tensor, wanted: set[str]) -> None:
    assert _limits(march, lambda x, layer: layer(x), x, part=layer) == wanted


@pytest.mark.slow
def test_constant_operands() -> None:
    weight, advice = nn.Parameter(torch.randn(1, 4, 1, 1)), {"two tensors, no constant"}
    assert _limits(B2, lambda x, w: x + w, X, part=weight) == advice
    assert _limits(B2, lambda x, w: x * w[:, :4].abs(), X, part=weight) == advice
    assert _limits(B2, lambda x: x + x, X) == set()
    assert _limits(BAYES, lambda x, w: x + w, X, part=weight) == set()


def test_formats_of_nash() -> None:
    wide = {"module_name": [("quants.1", qconfig("qint16"))]}
    assert _limits(NASH, lambda x, y: x + y, X, X, **wide) == {"operands and result of one format"}
    assert _limits(BAYES, lambda x, y: x + y, X, X, **wide) == set()
    narrow = {"module_name": [("quants.0", qconfig("qint8"))]}
    assert _limits(NASH, torch.atan, X, dtype="qint16", **narrow) == {"qint16 output from qint16 input only"}
    assert _limits(NASH, torch.atan, X, dtype="qint16") == set()


class Tail(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.permute(1, 0, 2, 3)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.pool, self.tail = QuantStub(), DeQuantStub(), nn.MaxPool2d(1, 300), Tail()

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        return self.dequant(self.tail(x)), self.pool(x), self.pool(x)


@pytest.mark.parametrize("way", ["fx", "eager"])
def test_where_a_limit_is_broken(way: str) -> None:
    set_march(March.BAYES)
    model = Places()
    if way == "fx":
        quantized: Any = convert_fx(prepared(model, (X,)))
    else:
        model.qconfig = qconfig()  # type: ignore[assignment]
        quantized = convert(calibrate(prepare_qat(model), (X,)))
    places = {f.operator: f.place for f in find_limits(quantized, (X,), March.BAYES)}
    file = "test_check_model.py"
    tail, forward = (f.__code__.co_firstlineno for f in (Tail.forward, Places.forward))
    assert places == {"permute": f"`tail` ({file}:{tail + 1})", "max_pool": f"`pool` ({file}:{forward + 2})"}


@pytest.mark.parametrize("call", [lambda op, y: op.sum(y, 0, True), lambda op, y: op.mean(y, (0, 1), keepdim=True)])
def test_positional_axes_of_a_float_functional_are_read(call: Any) -> None:
    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.op = QuantStub(), DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(call(self.op, self.quant(x)))

    set_march(March.BAYES)
    found = find_limits(convert_fx(prepared(Reduced(), (X,))), (X,), March.BAYES)
    assert [f.limit for f in found] == ["over C, H and W only"]


def test_magnitudes_under_the_name_of_the_guides() -> None:
    assert _limits(BAYES, horizon.abs, X) == set()
    with pytest.raises(UnsupportedOperatorError, match=r"abs.*on bernoulli2"):
        _limits(B2, horizon.abs, X)


def test_inputs_by_name() -> None:
    assert check_model(_quantized(), {"x": X}) == 0


@pytest.mark.parametrize("activation", [F.relu, torch.relu, Tensor.relu, F.relu6, nn.functional.relu_])
def test_functions_that_are_fused_into_a_layer_are_a_part_of_it(activation) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv, self.norm, self.last = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            y = activation(self.norm(self.conv(x)))
            return self.dequant(activation(self.last(y) + x))

    set_march(March.BAYES)
    model = convert(calibrate(prepare(Fused().eval(), (X,), qconfig_dict={"": qconfig("qint8")}, out_dir=None), (X,)))
    assert [row.name for row, _ in operator_uses(model, (X,))].count("relu") == 0
    assert check_model(model, (X,)) == 0


def test_a_function_that_is_fused_with_a_sum_is_a_part_of_it() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.weight = nn.Parameter(torch.randn(4, 4, 1, 1, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(torch.relu(F.conv2d(x, self.weight) + x))

    set_march(March.BAYES)
    model = convert(calibrate(prepare(Summed().eval(), (X,), qconfig_dict={"": qconfig("qint8")}, out_dir=None), (X,)))
    assert check_model(model, (X,)) == 0
