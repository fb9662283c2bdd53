"""Own activation scales for each call of a shared module: weights stay one."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, UnknownCallError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    load_calib_state_dict,
    load_observer_params,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig import get_qconfig
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    SensitiveOpQconfigSetter,
    default_calibration_qconfig_setter,
)
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, calibrate, mismatches, run_onnx

METHODS = ("jit-strip", "symbolic")
LEVELS = [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(k)) * s for k, s in enumerate((0.1, 1, 5))]


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    yield
    set_qat_mode(QATMode.FuseBN)


class Head(nn.Module):
    """Layers, a group to fuse, a FloatFunctional and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.out, self.skip = nn.Conv2d(4, 4, 1), FloatFunctional()
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.skip.add(self.relu(self.bn(self.conv(x))), x)
        return self.out(y) * x.tanh()


class Levels(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.head = QuantStub(), DeQuantStub(), head

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [self.dequant(self.head(self.quant(x))) for x in (a, b, c)]


class AnyLevels(Levels):
    def forward(self, *levels: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [self.dequant(self.head(self.quant(x))) for x in levels]


def _float(make: Callable[[], nn.Module] = lambda: Levels(Head())) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def _prepare(
    model: nn.Module, own_scales: Any = True, method: str = "jit-strip", setter: Any = (), **arguments: Any
) -> nn.Module:
    setters = (*setter, default_calibration_qconfig_setter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if own_scales:
            warnings.filterwarnings("error", "one scale must fit")
        return prepare(model, tuple(LEVELS), setters, method, own_scales=own_scales, out_dir=None, **arguments)


def _errors(model: nn.Module, prepared: nn.Module) -> list[float]:
    """Relative error of each level."""
    with torch.no_grad():
        pairs = zip(model(*LEVELS), prepared(*LEVELS), strict=True)
        return [float((a - b).norm() / a.norm()) for a, b in pairs]


def _to_integers(prepared: nn.Module) -> nn.Module:
    return convert_fx(prepared) if isinstance(prepared, torch.fx.GraphModule) else convert(prepared)


def _assert_one_arithmetic(prepared: nn.Module, tmp_path: Any) -> nn.Module:
    quantized = _to_integers(prepared)
    file = export_quantized_onnx(quantized, tuple(LEVELS), tmp_path / "model.onnx")
    with torch.no_grad():
        trained, integers = as_numbers(prepared(*LEVELS)), as_numbers(quantized(*LEVELS))
    assert mismatches(trained, integers) == 0
    assert mismatches(integers, run_onnx(file, LEVELS)) == 0
    return quantized


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_head_on_levels_of_other_ranges_is_as_good_as_three_heads(method: str, tmp_path: Any) -> None:
    model = _float()
    shared = calibrate(_prepare(model, False, method), LEVELS)
    own = calibrate(_prepare(model, True, method), LEVELS)
    before, after = _errors(model, shared), _errors(model, own)
    assert max(before) > 10 * max(after) and max(after) < 0.03, (before, after)
    _assert_one_arithmetic(own, tmp_path)


@pytest.mark.slow
def test_methods_agree() -> None:
    model = _float()
    one, other = (calibrate(_prepare(model, True, method), LEVELS) for method in METHODS)
    assert one.state_dict().keys() == other.state_dict().keys()
    with torch.no_grad():
        assert mismatches(as_numbers(one(*LEVELS)), as_numbers(other(*LEVELS))) == 0


def test_nothing_changes_without_the_option() -> None:
    prepared = _prepare(_float(), False)
    assert not [path for path, _ in prepared.named_modules() if "_call_" in path]


class Leaves(nn.Module):
    """One leaf in a loop."""

    def __init__(self, leaf: Callable[[], nn.Module], call: Callable = lambda leaf, x: leaf(x)) -> None:
        super().__init__()
        self.quant, self.dequant, self.leaf, self.call = QuantStub(), DeQuantStub(), leaf(), call

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        outs = []
        for x in (a, b, c):
            outs.append(self.dequant(self.call(self.leaf, self.quant(x))))
        return outs


def _twice(leaf: Any, x: Tensor) -> Tensor:
    return leaf.mul(leaf.add(x, x), x)


LEAVES = {
    "conv": (lambda: nn.Conv2d(4, 3, 3), ("leaf",)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3), ("leaf",)),
    "linear": (lambda: nn.Linear(6, 6), ("leaf",)),
    "batch norm": (lambda: nn.BatchNorm2d(4), ("leaf",)),
    "layer norm": (lambda: nn.LayerNorm(6), ("leaf",)),
    "softmax": (lambda: nn.Softmax(-1), ("leaf",)),
    "silu": (nn.SiLU, ("leaf",)),
    "sequential": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), ("leaf",)),
    "list": (lambda: nn.ModuleList([nn.Conv2d(4, 4, 1)]), ("leaf_0",), lambda leaf, x: leaf[0](x)),
    "functional": (FloatFunctional, ("leaf",), _twice),
}


@pytest.mark.in_turns("method", "name")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LEAVES)
def test_every_kind_of_module(name: str, method: str, tmp_path: Any) -> None:
    leaf, (path,), *call = LEAVES[name]
    model = _float(lambda: Leaves(leaf, *call))
    own = calibrate(_prepare(model, True, method), LEVELS)
    assert f"{path}_call_2" in dict(own.named_modules())
    assert max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


class FunctionsInLoops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        outs = []
        for x in (a, b, c):
            y = self.quant(x)
            outs.append(self.dequant(y * y.tanh()))
        return outs


def test_functions_of_a_line_that_runs_again_have_own_scales_too(tmp_path: Any) -> None:
    model = _float(FunctionsInLoops)
    own = calibrate(_prepare(model), LEVELS)
    assert {"_generated_mul_0", "_generated_mul_0_call_1", "_generated_mul_0_call_2"} <= dict(
        own.named_modules()
    ).keys()
    assert max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


# -- one set of weights


def test_the_state_dict_has_weights_once_and_scales_for_each_call() -> None:
    keys = _prepare(_float()).state_dict().keys()
    assert [key for key in keys if "weight" in key and "_call_" in key] == []
    for n in (1, 2):
        assert f"head_call_{n}.conv.activation_post_process.scale" in keys
    assert {"head.conv.weight", "head.conv.weight_fake_quant.scale"} <= keys


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_state_dict_loads_into_another_prepare(method: str) -> None:
    trained = calibrate(_prepare(_float(), True, method), LEVELS)
    with torch.no_grad():
        trained.head.conv.weight.mul_(1.5)
        wanted = as_numbers(trained(*LEVELS))
    torch.manual_seed(7)
    other = _prepare(Levels(Head()).eval(), True, method)
    other.load_state_dict(trained.state_dict(), strict=True)
    set_fake_quantize(other, FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert mismatches(wanted, as_numbers(other(*LEVELS))) == 0


@pytest.mark.slow
def test_a_state_dict_loads_inside_of_another_model() -> None:
    one, other = (nn.ModuleDict({"net": calibrate(_prepare(_float()), LEVELS)}) for _ in range(2))
    state = one.state_dict()
    assert "net.head.conv.weight" in state and "net.head_call_1.conv.weight" not in state
    other.load_state_dict(state, strict=True)


def test_statistics_of_a_model_without_own_scales_are_copied_to_all_calls() -> None:
    model = _float(lambda: Leaves(lambda: nn.Conv2d(4, 4, 1), lambda leaf, x: leaf(x) * x))
    shared, own = calibrate(_prepare(model, False), LEVELS), _prepare(model)
    assert load_observer_params(shared, own) == []
    assert torch.equal(own.leaf_call_2.activation_post_process.scale, shared.leaf.activation_post_process.scale)


def test_a_state_dict_without_own_scales_is_where_each_call_starts() -> None:
    model = _float(lambda: Leaves(lambda: nn.Conv2d(4, 4, 1), lambda leaf, x: leaf(x) * x))
    shared, own = calibrate(_prepare(model, False), LEVELS), _prepare(model)
    own.load_state_dict(shared.state_dict(), strict=True)
    scales = [m.activation_post_process.scale for m in (own.leaf, own.leaf_call_1, own.leaf_call_2)]
    assert all(torch.equal(scale, shared.leaf.activation_post_process.scale) for scale in scales)
    calibrated = _prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load_calib_state_dict(calibrated, shared.state_dict())
    assert torch.equal(calibrated.leaf_call_1.activation_post_process.scale, scales[0])


def test_a_state_dict_that_lacks_a_call_is_reported() -> None:
    own = _prepare(_float())
    state = {key: value for key, value in own.state_dict().items() if not key.startswith("head_call_1.out.")}
    with pytest.raises(RuntimeError, match="Missing key.*head_call_1.out.activation_post_process"):
        own.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", [QATMode.FuseBN, QATMode.WithBN])
def test_gradients_of_the_calls_add_up(method: str, mode: QATMode) -> None:
    set_qat_mode(mode)
    own = calibrate(_prepare(_float(), True, method), LEVELS)
    set_fake_quantize(own, FakeQuantState.QAT)
    for module in own.modules():
        if isinstance(module, ObserverBase):
            module.averaging_constant = 0.0  # one scale for all the runs below
    parts = []
    for level in range(3):
        own.zero_grad()
        own(*LEVELS)[level].sum().backward()
        parts.append(own.head.conv.weight.grad.clone())
    own.zero_grad()
    sum(out.sum() for out in own(*LEVELS)).backward()
    assert all(part.abs().sum() > 0 for part in parts)
    torch.testing.assert_close(own.head.conv.weight.grad, sum(parts))
    assert (
        len(list(own.parameters())) == len(set(own.parameters()))
        and own.head_call_1.conv.weight is own.head.conv.weight
    )


@pytest.mark.parametrize("mode", [QATMode.FuseBN, QATMode.WithBN])
@pytest.mark.parametrize("dtype", ["qint16", torch.float16])
def test_a_call_whose_weights_have_another_format_has_the_same_weights(dtype: Any, mode: QATMode) -> None:
    set_march(March.NASH_M)
    set_qat_mode(mode)
    other = ModuleNameQconfigSetter({"head_call_1.conv": get_qconfig(weight_dtype=dtype, out_dtype=dtype)})
    own = calibrate(_prepare(_float(), setter=(other,)), LEVELS)
    layer = own.head_call_1.conv
    assert getattr(layer, "weight_fake_quant", None) is not own.head.conv.weight_fake_quant
    assert getattr(layer, "conv", layer).weight is own.head.conv.weight
    own.load_state_dict(own.state_dict(), strict=True)
    assert len(list(own.parameters())) == len(list(_prepare(_float()).parameters()))


def test_statistics_of_a_batch_norm_are_one_also_when_the_model_moves() -> None:
    set_qat_mode(QATMode.WithBN)
    own = _prepare(_float()).to("cpu").train()
    own(*LEVELS)
    assert own.head_call_2.conv.bn.running_mean is own.head.conv.bn.running_mean
    assert int(own.head.conv.bn.num_batches_tracked) == 3
    copied = copy.deepcopy(own)
    copied(*LEVELS)
    assert int(copied.head_call_1.conv.bn.num_batches_tracked) == 6 and int(own.head.conv.bn.num_batches_tracked) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_copies_and_pickles_are_like_the_model(method: str) -> None:
    own = calibrate(_prepare(_float(), True, method), LEVELS)
    with torch.no_grad():
        wanted = as_numbers(own(*LEVELS))
        for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert mismatches(wanted, as_numbers(other(*LEVELS))) == 0
            assert other.head_call_1.conv.weight is other.head.conv.weight is not own.head.conv.weight
            assert other.state_dict().keys() == own.state_dict().keys()


@pytest.mark.parametrize("method", METHODS)
def test_a_converted_model_keeps_its_weights_once(method: str) -> None:
    quantized = _to_integers(calibrate(_prepare(_float(), True, method), LEVELS))
    assert quantized.head_call_1.conv.weight.data_ptr() == quantized.head.conv.weight.data_ptr()
    state = quantized.state_dict()
    assert "head.conv.weight" in state and "head_call_1.conv.weight" not in state
    quantized.load_state_dict(state, strict=True)


class NormOfEachLevel(Levels):
    """A shared convolution, and a batch norm of its own for each level."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [self.dequant(norm(self.head(self.quant(x)))) for norm, x in zip(self.norms, (a, b, c), strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_norm_of_each_level_stays_out_of_the_shared_weights(method: str, tmp_path: Any) -> None:
    model = _float(NormOfEachLevel)
    for factor, norm in enumerate(model.norms, 1):
        nn.init.constant_(norm.weight, factor)
    own = calibrate(_prepare(model, True, method), LEVELS)
    assert repr(own.norms[1]) != "Identity()" and torch.equal(own.head.weight, model.head.weight)
    assert max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


class AddedToEachLevel(Levels):
    """The first call is fused into the model's addition; the others are not."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 1))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        a, b, c = self.quant(a), self.quant(b), self.quant(c)
        return [self.dequant(self.head(a) + a), self.dequant(self.head(b).sigmoid()), self.dequant(self.head(c) + c)]


@pytest.mark.parametrize("method", METHODS)
def test_calls_that_are_fused_otherwise_have_one_weight(method: str, tmp_path: Any) -> None:
    model = _float(AddedToEachLevel)
    own = calibrate(_prepare(model, True, method), LEVELS)
    assert own._generated_add_0.weight is own._generated_add_1.weight is own.head_call_1.weight
    assert [key for key in own.state_dict() if key.endswith(".weight")] == ["_generated_add_0.weight"]
    own.load_state_dict(own.state_dict(), strict=True)
    assert max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


def test_the_check_says_where_own_scales_would_help(tmp_path: Any) -> None:
    with pytest.warns(QuantizationWarning):
        prepare(_float(), tuple(LEVELS), default_calibration_qconfig_setter, out_dir=tmp_path)
    text = (tmp_path / "model_check_result.txt").read_text()
    advice = (
        r"called 3 times, ranges [\d.]+ / [\d.]+ / [\d.]+: own_scales=\['{}'\] would give the smallest [\d.]+ more bits"
    )
    assert re.search(advice.format("head.conv"), text)
    assert re.search(advice.format("head"), text)  # for the function that head calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(
            _float(), tuple(LEVELS), default_calibration_qconfig_setter, own_scales=["head", "quant"], out_dir=tmp_path
        )
    after = (tmp_path / "model_check_result.txt").read_text()
    assert "would give" not in after and re.search(r"head_call_2.conv +1\b", after)


# -- which call is which


class Nested(nn.Module):
    """A head that calls its convolution twice, and is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).relu())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("own_scales", "copies"),
    [
        (True, {"quant_call_1", "head_call_1", "head_call_1.conv_call_1", "head.conv_call_1"}),
        (["head"], {"head_call_1", "head_call_1.conv_call_1", "head.conv_call_1"}),
        (["head.conv"], {f"head.conv_call_{n}" for n in range(1, 6)}),
    ],
)
def test_shared_modules_inside_shared_modules(own_scales: Any, copies: set[str], method: str, tmp_path: Any) -> None:
    model = _float(lambda: Levels(Nested()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the quant stub stays shared
        own = prepare(
            model, tuple(LEVELS), default_calibration_qconfig_setter, method, own_scales=own_scales, out_dir=None
        )
    assert copies <= dict(own.named_modules()).keys()
    assert ("quant_call_1" in dict(own.named_modules())) == (own_scales is True)
    calibrate(own, LEVELS)
    assert own_scales is not True or max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_further_names_of_a_module_are_calls_of_their_own(method: str, tmp_path: Any) -> None:
    class Names(Levels):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([Head()] * 3))

        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            pairs = zip(self.head, (a, b, c), strict=True)
            return [self.dequant(head(self.quant(x))) for head, x in pairs]

    model = _float(Names)
    own = calibrate(_prepare(model, True, method), LEVELS)
    assert own.head[0].conv.weight is own.head[2].conv.weight
    assert not torch.equal(*(own.head[n].conv.activation_post_process.scale for n in (0, 2)))
    shared = _prepare(model, False, method).state_dict()
    assert {key for key in shared if key.endswith("conv.weight")} <= own.state_dict().keys()
    assert max(_errors(model, own)) < 0.03
    _assert_one_arithmetic(own, tmp_path)


def test_more_calls_than_recorded_are_an_error_with_line_and_remedy() -> None:
    own = calibrate(_prepare(_float(lambda: AnyLevels(Head()))), LEVELS)
    with torch.no_grad():
        wanted = as_numbers(own(*LEVELS))
        with pytest.raises(
            UnknownCallError, match=r"`quant` \(called at test_own_scales.py:\d+\).*ran 3 times.*own_scales"
        ):
            own(*LEVELS, LEVELS[0])
        assert mismatches(wanted[:2], as_numbers(own(*LEVELS[:2]))) == 0  # and an error leaves no trace
        assert mismatches(wanted, as_numbers(own(*LEVELS))) == 0


def test_a_call_that_was_not_recorded_is_an_error_with_line_and_remedy() -> None:
    class Branches(Levels):
        is_new = False

        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            if self.is_new:
                return [self.dequant(self.head(self.quant(a)))]
            return [self.dequant(self.head(self.quant(x))) for x in (a, b, c)]

    own = calibrate(_prepare(_float(lambda: Branches(Head()))), LEVELS)
    own.is_new = True
    with pytest.raises(UnknownCallError, match=r"`quant`.*test_own_scales.py:\d+ was not met.*own_scales"):
        own(*LEVELS)


def test_branches_of_the_training_mode_call_the_same_modules_in_order() -> None:
    class Modes(Levels):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            if self.training:
                return [self.dequant(self.head(self.quant(x))) for x in (a, b, c)]
            outs = [self.head(self.quant(x)) for x in (a, b, c)]
            return [self.dequant(out) for out in outs]

    own = calibrate(_prepare(_float(lambda: Modes(nn.Conv2d(4, 4, 1)))), LEVELS)
    with torch.no_grad():
        wanted = as_numbers(own(*LEVELS))
        own.train()
        set_fake_quantize(own, FakeQuantState.VALIDATION)
        assert mismatches(wanted, as_numbers(own(*LEVELS))) == 0


def test_a_part_can_be_called_by_itself() -> None:
    own = calibrate(_prepare(_float()), LEVELS)
    with torch.no_grad():
        assert torch.equal(own.dequant(own.head(own.quant(LEVELS[0]))), own(*LEVELS)[0])


# -- names


def _dtypes(model: nn.Module, path: str) -> list[str]:
    paths = (f"head.{path}", f"head_call_1.{path}", f"head_call_2.{path}")
    return [str(model.get_submodule(p).activation_post_process.dtype) for p in paths]


int16 = get_qconfig(out_dtype="qint16")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("names", "dtypes"),
    [
        (["head.conv"], ["qint16", "qint16", "qint16"]),
        (["head.bn"], ["qint16", "qint16", "qint16"]),
        (["head"], ["qint16", "qint16", "qint16"]),
        (["head_call_1.conv"], ["qint8", "qint16", "qint8"]),
        (["head_call_2"], ["qint8", "qint8", "qint16"]),
    ],
)
def test_a_name_means_all_calls_and_a_call_has_its_own_name(names: list[str], dtypes: list[str], method: str) -> None:
    by_name = ModuleNameQconfigSetter(dict.fromkeys(names, int16))
    assert _dtypes(_prepare(_float(), True, method, (by_name,)), "conv") == dtypes
    table = [[name, "activation", "Conv2d", 1.0, "qint8"] for name in names if name not in ("head", "head_call_2")]
    if table:
        sensitive = SensitiveOpQconfigSetter(int16, table, topk=1)
        assert _dtypes(_prepare(_float(), True, method, (sensitive,)), "conv") == dtypes


def test_a_qconfig_dict_names_calls_as_setters_do() -> None:
    int8 = get_qconfig()
    for name, dtypes in {"head.skip": ["qint16"] * 3, "head_call_2.skip": ["qint8", "qint8", "qint16"]}.items():
        own = prepare_qat_fx(_float(), {"": int8, "module_name": [(name, int16)]}, own_scales=True)
        assert _dtypes(own, "skip") == dtypes


def test_names_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(QuantizationConfigError, match="own_scales names 'heads'"):
        _prepare(_float(), ["heads"])
    with pytest.raises(NotImplementedError, match="EAGER"):
        prepare(_float(), tuple(LEVELS), method="eager", own_scales=True, out_dir=None)


def test_a_name_without_shared_calls_is_worth_a_warning() -> None:
    model = _float(lambda: Levels(nn.Sequential(nn.Conv2d(4, 4, 1))))
    with pytest.warns(QuantizationWarning, match="own_scales names 'dequant': nothing"):
        prepare(model, tuple(LEVELS), default_calibration_qconfig_setter, own_scales=["dequant", "head"], out_dir=None)


def test_the_warning_of_shared_scales_names_the_option() -> None:
    with pytest.warns(QuantizationWarning, match="own_scales=True"):
        prepare(_float(), tuple(LEVELS), default_calibration_qconfig_setter, out_dir=None)
