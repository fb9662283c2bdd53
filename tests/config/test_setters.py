"""Setters and templates: which formats they give, in which order they win, and what they say about it."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    QconfigSetter,
    QuantStub,
    convert,
    default_qat_8bit_fake_quant_qconfig,
    explain,
    fuse_modules,
    get_qconfig,
    prepare,
    prepare_qat_fx,
    qconfig_template,
    reason_of,
)
from horizon_plugin_pytorch.quantization.observer_v2 import (
    FixedScaleObserver,
    MinMaxObserver,
    MSEObserver,
    PercentileObserver,
)
from horizon_plugin_pytorch.quantization.qconfig import format_of, with_format
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
    canonicalize_rules,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    HighPrecisionOutputTemplate,
    ModuleNameQconfigSetter,
    QconfigSetterBase,
    TemplateQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_fixed_act_qconfig_setter,
    default_qat_qconfig_setter,
    qat_8bit_weight_16bit_fixed_act_qconfig_setter,
    sensitive_op_8bit_weight_16bit_act_calibration_setter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
)
from horizon_plugin_pytorch.utils.check_model import check_qat_model
from tests.routes import assert_one_arithmetic, calibrate

X = torch.linspace(-1, 1, 2 * 2 * 8 * 8).reshape(2, 2, 8, 8)
FP32 = torch.float32


@pytest.fixture(autouse=True)
def nash() -> None:
    set_march(March.NASH_M)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.bn = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv2(F.silu(self.conv1(x)))) + x


class Net(nn.Module):
    """A residual block, a product, and two outputs: one that can be in high precision and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.dequant2 = QuantStub(), DeQuantStub(), DeQuantStub()
        self.block, self.head = Residual(), nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(self.quant(x))
        return self.dequant(self.head(x)), self.dequant2(torch.sigmoid(x * x))


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.grid_quant, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.feature, self.offset, self.head = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor, base: Tensor) -> Tensor:
        x = self.quant(x)
        grid = torch.tanh(self.offset(F.relu(self.feature(x)))).permute(0, 2, 3, 1) + self.grid_quant(base)
        return self.dequant(self.head(F.grid_sample(x, grid, align_corners=False)))


def prepared(setter: Any, model: nn.Module | None = None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "outputs that are not in high precision", QuantizationWarning)
        return prepare_qat_fx(model or Net(), qconfig_setter=setter)


def formats(qat: nn.Module) -> dict[str, Any]:
    """Output formats of all operators with a scale of their own, by path; float32 is high precision."""
    found = {}
    for path, module in qat.named_modules():
        if hasattr(module, "weight_fake_quant") or isinstance(module, Float16):
            found[path] = FP32 if module.activation_post_process is None else module.activation_post_process.dtype
        elif isinstance(getattr(module, "activation_post_process", None), FakeQuantize):
            found[path] = module.activation_post_process.dtype
    return found


OPERATORS = [
    "quant", "block.conv1", "block._generated_silu_0", "block._generated_add_0", "head", "_generated_mul_0",
    "_generated_sigmoid_0",
]  # fmt: skip


def wanted(default: Any, **others: Any) -> dict[str, Any]:
    return dict.fromkeys(OPERATORS, default) | {"head": FP32} | {k.replace("__", "."): v for k, v in others.items()}


# -- the documented setters


@pytest.mark.parametrize(
    ("name", "dtype", "observer", "constant"),
    [
        ("default_calibration_qconfig_setter", qint8, MSEObserver, 0.01),
        ("default_qat_qconfig_setter", qint8, MinMaxObserver, 0.01),
        ("default_qat_fixed_act_qconfig_setter", qint8, MinMaxObserver, 0),
        ("calibration_8bit_weight_16bit_act_qconfig_setter", qint16, MSEObserver, 0.01),
        ("qat_8bit_weight_16bit_act_qconfig_setter", qint16, MinMaxObserver, 0.01),
        ("qat_8bit_weight_16bit_fixed_act_qconfig_setter", qint16, MinMaxObserver, 0),
    ],
)
def test_the_documented_setters(name: str, dtype: Any, observer: type, constant: float) -> None:
    qat = prepared(getattr(qconfig_template, name))
    assert formats(qat) == wanted(dtype)
    quantizer = qat.get_submodule("block.conv1.activation_post_process")
    assert type(quantizer.activation_post_process) is observer
    assert quantizer.activation_post_process.averaging_constant == constant
    assert qat.get_submodule("head").weight_fake_quant.dtype == qint8


def test_outputs_that_cannot_be_in_high_precision_are_named() -> None:
    with pytest.warns(QuantizationWarning, match=r"`_generated_sigmoid_0` \(sigmoid has none\)"):
        prepare_qat_fx(Net(), qconfig_setter=default_qat_qconfig_setter)


def test_a_layer_that_is_used_inside_too_is_not_in_high_precision() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.first = QuantStub(), DeQuantStub(), nn.Conv2d(2, 2, 1)
            self.second, self.flat = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.first(self.quant(x))
            return self.dequant(y), self.second(y), self.dequant(self.flat(y).flatten(1))

    with pytest.warns(QuantizationWarning, match=r"`first` \(second takes it too\), `flat` \(flatten is between\)"):
        qat = prepare_qat_fx(Both(), qconfig_setter=default_qat_qconfig_setter)
    assert formats(qat) == {"quant": qint8, "first": qint8, "second": FP32, "flat": qint8}


def test_a_shared_layer_is_in_high_precision_only_if_all_its_calls_are_outputs() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.conv(self.conv(self.quant(x))))

    with pytest.warns(QuantizationWarning, match="conv takes it too"):
        assert formats(prepare_qat_fx(Shared(), qconfig_setter=default_qat_qconfig_setter))["conv"] == qint8


def test_grids_are_int16_back_to_the_first_layer_or_stub() -> None:
    found = formats(prepared(default_calibration_qconfig_setter, Sampler()))
    assert found == {
        "quant": qint8, "feature": qint8, "offset": qint16, "_generated_tanh_0": qint16, "_generated_add_0": qint16,
        "grid_quant": qint16, "head": FP32,
    }  # fmt: skip


@pytest.mark.slow
def test_formats_by_a_setter_have_one_arithmetic(tmp_path: Path) -> None:
    base = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), [2, 2, 8, 8], align_corners=False)
    qat = calibrate(prepared(default_qat_fixed_act_qconfig_setter, Sampler()), (X, base))
    assert_one_arithmetic(qat, (X, base), tmp_path)


# -- priority


def test_the_first_setter_of_a_tuple_wins() -> None:
    by_name = ModuleNameQconfigSetter({"block.conv1": get_qconfig(out_dtype=qint16)})
    assert formats(prepared((by_name, default_qat_qconfig_setter))) == wanted(qint8, block__conv1=qint16)
    assert formats(prepared((default_qat_qconfig_setter, by_name))) == wanted(qint8)


def test_the_attribute_beats_setters_and_reaches_below() -> None:
    model = Net()
    model.block.qconfig = default_qat_8bit_fake_quant_qconfig
    model.head.qconfig = default_qat_8bit_fake_quant_qconfig
    with pytest.warns(QuantizationWarning):
        qat = prepare_qat_fx(model, qconfig_setter=qat_8bit_weight_16bit_fixed_act_qconfig_setter)
    inside = {path: qint8 for path in OPERATORS if path.startswith("block") or path == "head"}
    assert formats(qat) == wanted(qint16) | inside


def test_names_reach_into_containers_and_fused_modules() -> None:
    int16 = get_qconfig(out_dtype=qint16)
    found = formats(prepared((ModuleNameQconfigSetter({"block": int16}), default_qat_qconfig_setter)))
    assert found == wanted(qint8) | {path: qint16 for path in OPERATORS if path.startswith("block")}
    for member in ("block.conv2", "block.bn", "block._generated_add_0"):
        found = formats(prepared((ModuleNameQconfigSetter({member: int16}), default_qat_qconfig_setter)))
        assert found == wanted(qint8, block___generated_add_0=qint16)


def test_what_no_setter_names_stays_float() -> None:
    with pytest.warns(QuantizationWarning, match="no setter gives"):
        qat = prepare_qat_fx(Net(), qconfig_setter=ModuleNameQconfigSetter({"quant": get_qconfig()}))
    assert formats(qat) == {"quant": qint8}


def test_a_setter_of_ones_own() -> None:
    class Int16Stubs(QconfigSetterBase):
        def qconfig_for(self, operator: Any) -> Any:
            return get_qconfig(out_dtype=qint16) if operator.row.name == "quant" else None

    assert formats(prepared((Int16Stubs(), default_qat_qconfig_setter))) == wanted(qint8, quant=qint16)


def test_templates_can_be_composed() -> None:
    int16 = get_qconfig(MinMaxObserver, out_dtype=qint16)
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), DeQuantStub())
    for templates, last in (([HighPrecisionOutputTemplate()], FP32), ([], qint16)):
        assert formats(prepared(TemplateQconfigSetter(int16, templates), model)) == {"0": qint16, "1": last}


@pytest.mark.slow
def test_operators_in_a_wrapped_module_are_set_too() -> None:
    from horizon_plugin_pytorch.utils.fx_helper import wrap

    @wrap()
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.shape[0] else x

    model = nn.Sequential(QuantStub(), Opaque(), nn.Conv2d(2, 2, 1), DeQuantStub())
    assert formats(prepared(calibration_8bit_weight_16bit_act_qconfig_setter, model))["1.conv"] == qint16


# -- sensitivity

TABLE = [
    ["block.conv1", "activation", "<class 'Conv2d'>", 1.5, "qint8"],
    ["head", "weight", "<class 'Conv2d'>", 1.2, "qint8"],
    ["block._generated_add_0[add]", "activation", "<class 'ConvAdd2d'>", 0.9, "qint8"],
    ["quant", "activation", "<class 'QuantStub'>", 0.1, "qint8"],
]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"topk": 1}, ["block.conv1"]),
        ({"topk": 2}, ["block.conv1", "block._generated_add_0"]),
        ({"ratio": 0.34}, ["block.conv1", "block._generated_add_0"]),
        ({"ratio": 1.0}, ["block.conv1", "block._generated_add_0", "quant"]),
        ({"topk": 0}, []),
    ],
)
def test_the_most_sensitive_operators_are_int16(arguments: dict, names: list[str]) -> None:
    setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(TABLE, **arguments)
    assert formats(prepared((setter, default_calibration_qconfig_setter))) == wanted(qint8) | dict.fromkeys(
        names, qint16
    )


def test_a_sensitive_output_stays_in_high_precision() -> None:
    setter = sensitive_op_8bit_weight_16bit_act_calibration_setter([["head", "activation", "", 1.0, "qint8"]], topk=1)
    assert formats(prepared((setter, default_calibration_qconfig_setter))) == wanted(qint8)


@pytest.mark.parametrize("arguments", [{}, {"topk": 1, "ratio": 0.5}, {"topk": -1}, {"ratio": 2.0}, {"topk": 0.5}])
def test_a_table_needs_one_sensible_number(arguments: dict) -> None:
    with pytest.raises(QuantizationConfigError, match=r"topk|ratio"):
        sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(TABLE, **arguments)


def test_bad_tables_are_refused_and_unknown_names_are_warned_of() -> None:
    with pytest.raises(QuantizationConfigError, match="list of rows"):
        sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(["conv"], topk=1)
    setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter([["no.such", "activation", "", 1.0]], topk=1)
    with pytest.raises(QuantizationConfigError, match=r"names 'no.such', the model has 'quant'"):
        prepare_qat_fx(Net(), qconfig_setter=(setter, default_calibration_qconfig_setter))
    table = [["no.such", "activation", "", 1.0], ["head", "activation", "", 0.5]]
    setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, topk=2)
    with pytest.warns(QuantizationWarning, match=r"'no.such'.*does not have"):
        prepare_qat_fx(Net(), qconfig_setter=(setter, default_calibration_qconfig_setter))


@pytest.mark.slow
def test_tables_as_the_tools_write_them(tmp_path: Path) -> None:
    rows = [("block.conv1", 1.5), ("quant", 0.1)]
    for table in (rows, [[name, "activation", metric] for name, metric in rows], TABLE):
        path = tmp_path / "output_0_L1_sensitive_ops.pt"
        torch.save(table, path)
        for given in (torch.load(path, weights_only=True), path, str(path)):
            setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(given, topk=1)
            found = formats(prepared((setter, default_calibration_qconfig_setter)))
            assert found == wanted(qint8, block__conv1=qint16)


@pytest.mark.parametrize("name", [n for n in qconfig_template.__all__ if n.startswith("sensitive_op")])
def test_every_spelling_takes_a_table(name: str) -> None:
    function = getattr(qconfig_template, name)
    assert list(inspect.signature(function).parameters) == ["table", "topk", "ratio"]
    assert function(TABLE, ratio=0.5).rows[0].name == "block.conv1"


# -- what a chip does not have


def test_int16_falls_back_where_the_chip_takes_int8(tmp_path: Path) -> None:
    set_march(March.BAYES)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv, self.pool, self.fc = nn.Conv2d(2, 4, 1), nn.AvgPool2d(8), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.fc(self.pool(F.relu(self.conv(F.silu(self.quant(x))))).flatten(1)))

    qat = prepared(calibration_8bit_weight_16bit_act_qconfig_setter, Pooled())
    assert formats(qat) == {
        "quant": qint16, "_generated_silu_0": qint16, "conv": qint8, "pool": qint8, "fc": FP32,
    }  # fmt: skip
    chains = explain(qat)
    assert chains["conv"][-1] == "output qint8: pool (avg_pool2d) takes qint8 on bayes"
    assert chains["pool"][-1] == "output qint8: avg_pool2d gives qint8 on bayes"
    assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path)


def test_what_keeps_a_format_passes_the_limit_on() -> None:
    set_march(March.BAYES)
    model = nn.Sequential(
        QuantStub(), nn.Conv2d(2, 2, 1), nn.MaxPool2d(2), nn.SiLU(), nn.Conv2d(2, 2, 1), DeQuantStub()
    )
    found = formats(prepared(calibration_8bit_weight_16bit_act_qconfig_setter, model))
    assert found == {"0": qint16, "1": qint8, "3": qint16, "4": FP32}


def test_int16_weights_exist_on_nash_only() -> None:
    setter = QconfigSetter(get_qconfig(weight_dtype=qint16), save_dir=None)
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), DeQuantStub())
    assert prepared(setter, model).get_submodule("1").weight_fake_quant.dtype == qint16
    set_march(March.BAYES)
    qat = prepared(setter, model)
    assert qat.get_submodule("1").weight_fake_quant.dtype == qint8
    assert "weight qint8: bayes has no int16 weights" in explain(qat, "1")["1"]


# -- templates


def test_later_templates_override_earlier_ones() -> None:
    setter = QconfigSetter(
        get_qconfig(), [ModuleNameTemplate({"": qint16}), ModuleNameTemplate({"block": qint8})], save_dir=None
    )
    found = formats(prepared(setter))
    assert found == wanted(qint16) | {path: qint8 for path in OPERATORS if path.startswith("block")}


@pytest.mark.slow
def test_conv_inputs_come_in_the_format_asked_for(tmp_path: Path) -> None:
    setter = QconfigSetter(
        get_qconfig(),
        [ModuleNameTemplate({"": qint16}), ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint16)],
        save_dir=None,
    )
    qat = prepared(setter)
    # The sums and the product take int16 beside the layers, so that their inputs become int8 in between.
    int8 = ["block._generated_silu_0", "block._generated_quant_0", "_generated_quant_0"]
    assert formats(qat) == wanted(qint16) | dict.fromkeys(int8, qint8)
    assert qat.get_submodule("head").weight_fake_quant.dtype == qint16
    assert reason_of(qat, "block._generated_quant_0") == "int8: input of block.conv1: ConvDtypeTemplate"
    assert explain(qat)["block._generated_silu_0"][-1] == (
        "output qint8: input of block._generated_add_0: ConvDtypeTemplate"
    )
    assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.dequant, self.act = QuantStub(), QuantStub(), DeQuantStub(), nn.Sigmoid()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dequant(torch.matmul(self.act(self.a(x)), self.b(y).transpose(-1, -2)))


def test_operands_of_matmul_each_have_a_format(tmp_path: Path) -> None:
    setter = QconfigSetter(get_qconfig(), [MatmulDtypeTemplate(input_dtypes=[qint16, qint8])], save_dir=None)
    qat = prepared(setter, Product())
    assert formats(qat) == {"a": qint8, "b": qint8, "act": qint16}
    assert_one_arithmetic(calibrate(qat, (X, X)), (X, X), tmp_path)
    with pytest.raises(QuantizationConfigError, match="two operands"):
        MatmulDtypeTemplate([qint8])


def test_float16_everywhere_but_in_products() -> None:
    set_march(March.NASH_P)
    templates = [
        ModuleNameTemplate({"": torch.float16}),
        ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8),
        MatmulDtypeTemplate(input_dtypes=[qint16, qint8]),
    ]
    qat = prepared(QconfigSetter(get_qconfig(), templates, save_dir=None))
    found = formats(qat)
    assert found["_generated_mul_0"] == torch.float16 and found["head"] == FP32
    assert found["_generated_quant_0"] == qint8  # what the head takes
    assert qat(X)[0].shape == (2, 3, 8, 8)
    product = formats(prepared(QconfigSetter(get_qconfig(), templates, False, None), Product()))
    assert product["_generated_matmul_0"] == qint16  # integers, for float16 operators after it to take
    assert [product[name] for name in ("_generated_quant_0", "_generated_quant_1")] == [qint16, qint8]


def test_a_threshold_fixes_the_scale() -> None:
    rules = {
        "quant": {"dtype": qint16, "threshold": 2.0},
        "block.conv1": {"dtype": qint8, "threshold": {"output": 4.0}},
        "_generated_mul_0": {"threshold": 1.0},
    }
    qat = prepared(QconfigSetter(get_qconfig(), [ModuleNameTemplate(rules)], save_dir=None))
    found = {
        path: (module.dtype, float(module.scale))
        for path, module in qat.named_modules()
        if isinstance(module, FakeQuantize) and isinstance(module.activation_post_process, FixedScaleObserver)
    }
    assert found == {
        "quant.activation_post_process": (qint16, 2.0 / 32768),
        "block.conv1.activation_post_process": (qint8, 4.0 / 128),
        "_generated_mul_0.activation_post_process": (qint8, 1.0 / 128),
    }


def test_an_input_threshold_is_that_of_what_gives_the_input() -> None:
    rules = {"head": {"dtype": {"input": qint16}, "threshold": {"input": 3.0}}}
    qat = prepared(QconfigSetter(get_qconfig(), [ModuleNameTemplate(rules)], save_dir=None))
    found = formats(qat)
    assert found["block._generated_add_0"] == found["_generated_quant_0"] == qint16  # a product takes it, too
    assert float(qat.get_submodule("_generated_quant_0.activation_post_process").scale) == pytest.approx(3.0 / 32768)
    alone = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), DeQuantStub())
    qat = prepared(QconfigSetter(get_qconfig(), [ModuleNameTemplate({"2": rules["head"]})], save_dir=None), alone)
    quantizer = qat.get_submodule("1.activation_post_process")
    assert quantizer.dtype == qint16 and float(quantizer.scale) == pytest.approx(3.0 / 32768)


@pytest.mark.slow
def test_a_consumer_takes_another_format_than_its_producer_gives(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv, self.act = QuantStub(), DeQuantStub(), nn.Conv2d(2, 2, 1), nn.SiLU()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.act(self.quant(x))
            return self.dequant(self.conv(x)), self.dequant(torch.tanh(x) + x)

    asking = get_qconfig(in_dtype=qint8)
    by_name = (ModuleNameQconfigSetter({"conv": asking}), calibration_8bit_weight_16bit_act_qconfig_setter)
    by_attribute = Both()
    by_attribute.conv.qconfig = asking
    dictionary = {"": get_qconfig(in_dtype=qint8, out_dtype=qint16), "module_name": {"conv": asking}}
    for qat in (
        prepared(by_name, Both()),
        prepared(calibration_8bit_weight_16bit_act_qconfig_setter, by_attribute),
        prepare_qat_fx(Both(), dictionary),
    ):
        found = formats(qat)
        assert found.pop("_generated_quant_0") == found.pop("conv") == qint8
        assert set(found.values()) == {qint16}
        assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path)
        assert reason_of(qat, "_generated_quant_0").startswith("int8: input of conv")
    run = prepare(Both(), (X,), by_name, out_dir=None)  # by running: the user's forward stays
    assert formats(run)["_generated_quant_0"] == qint8
    calibrate(run, (X,))
    for found, expected in zip(run(X), convert(run)(X), strict=True):
        assert torch.equal(found, expected)


def test_a_later_output_overrides_what_was_asked_before() -> None:
    templates = [
        ModuleNameTemplate({"": qint8}),
        ConvDtypeTemplate(qint8, qint8),
        SensitivityTemplate([["block._generated_silu_0", "activation", "", 1.0, "qint8"]], 1),
    ]
    qat = prepared(QconfigSetter(get_qconfig(), templates, save_dir=None))
    assert formats(qat) == wanted(qint8, block___generated_silu_0=qint16)  # no stub makes it int8 again


def test_one_tensor_as_two_operands_in_two_formats(tmp_path: Path) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(torch.matmul(x, x))

    setter = QconfigSetter(get_qconfig(), [MatmulDtypeTemplate([qint16, qint8])], save_dir=None)
    qat = prepared(setter, Square())
    assert formats(qat) == {"quant": qint16, "_generated_quant_0": qint8}
    assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path)


def test_frozen_formats_stay() -> None:
    for freeze, last in ((True, qint8), (False, FP32)):
        templates = [ModuleNameTemplate({"head": qint8}, freeze=freeze), ModuleNameTemplate({"": qint16})]
        assert formats(prepared(QconfigSetter(get_qconfig(), templates, save_dir=None)))["head"] == last
    set_march(March.BAYES)
    model = nn.Sequential(QuantStub(), nn.AvgPool2d(2), nn.Conv2d(2, 2, 1), DeQuantStub())
    template = ModuleNameTemplate({"1": qint16}, freeze=True)
    assert formats(prepared(QconfigSetter(get_qconfig(), [template], save_dir=None), model))["1"] == qint16


def test_sensitivity_raises_activations_and_weights() -> None:
    for kind, activation, weight in (("activation", 16, 8), ("weight", 8, 16), ("both", 16, 16)):
        template = SensitivityTemplate(
            sensitive_table=TABLE, topk_or_ratio=1.0, sensitive_type=kind, low_precision_dtype=qint8,
            high_precision_dtype=qint16,
        )  # fmt: skip
        qat = prepared(QconfigSetter(get_qconfig(), [template], save_dir=None))
        assert formats(qat)["block.conv1"].bits == activation
        assert qat.get_submodule("head").weight_fake_quant.dtype.bits == weight
    with pytest.raises(QuantizationConfigError, match="sensitive_type"):
        SensitivityTemplate(TABLE, 1, "input")


def test_high_precision_is_the_common_templates() -> None:
    setter = QconfigSetter(get_qconfig(), enable_optimize=False, save_dir=None)
    assert formats(prepare_qat_fx(Net(), qconfig_setter=setter))["head"] == qint8


@pytest.mark.parametrize(
    ("value", "message"),
    [("qint4", "qint4"), ({"outputs": qint8}, "outputs"), ({"dtype": qint8, "scale": 1}, "scale"), ("int7", "int7")],
)
def test_rules_that_make_no_sense_are_refused(value: Any, message: str) -> None:
    with pytest.raises(QuantizationConfigError, match=message):
        canonicalize_rules({"conv": value})


# -- names, files, words


def test_unknown_names_are_refused_with_near_ones() -> None:
    for setter in (
        ModuleNameQconfigSetter({"block.conv11": get_qconfig()}),
        QconfigSetter(templates=[ModuleNameTemplate({"block.conv11": qint8})], save_dir=None),
    ):
        with pytest.raises(QuantizationConfigError, match=r"names 'block.conv11'.*Did you mean 'block.conv1'"):
            prepare_qat_fx(Net(), qconfig_setter=setter)
    with pytest.warns(QuantizationWarning, match="'dequant' has no operator"):
        prepare_qat_fx(
            Net(), qconfig_setter=(ModuleNameQconfigSetter({"dequant": get_qconfig()}), default_qat_qconfig_setter)
        )


@pytest.mark.parametrize(
    "setter", [QconfigSetterBase, sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter, get_qconfig(), "int8"]
)
def test_what_is_no_setter_is_refused(setter: Any) -> None:
    with pytest.raises(QuantizationConfigError, match="is not a setter"):
        prepare_qat_fx(Net(), qconfig_setter=(setter,))
    with pytest.raises(QuantizationConfigError, match="not a template"):
        QconfigSetter(templates=[ModuleNameTemplate])


def test_a_dictionary_and_a_setter_do_not_mix() -> None:
    with pytest.raises(QuantizationConfigError, match="not both"):
        prepare_qat_fx(Net(), {"": get_qconfig()}, qconfig_setter=default_qat_qconfig_setter)


def test_files_say_what_was_chosen_and_why(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"block": qint16})], save_dir=folder)
    for _ in range(2):  # the second replaces the first
        prepared(setter)
    names = ["qconfig_changelogs.txt", "qconfig_dtypes.pt", "qconfig_dtypes.pt.py"]
    assert sorted(p.name for p in folder.iterdir()) == names
    found = torch.load(folder / "qconfig_dtypes.pt", weights_only=True)
    assert found["block.conv1"] == {"weight": "qint8", "output": "qint16"}
    assert found["head"] == {"weight": "qint8", "output": "float32"}
    readable: dict[str, Any] = {}
    exec((folder / "qconfig_dtypes.pt.py").read_text(), readable)
    assert readable["qconfig_dtypes"] == found
    lines = (folder / "qconfig_changelogs.txt").read_text().splitlines()
    at = lines.index("block.conv1 (conv2d)")
    assert lines[at + 1 : at + 3] == [
        "    output qint8, weight qint8: reference_qconfig",
        "    output qint16: ModuleNameTemplate 'block'",
    ]


def test_formats_that_were_written_can_be_given_again(tmp_path: Path) -> None:
    templates = [
        ModuleNameTemplate({"": qint16, "quant": {"dtype": qint16, "threshold": 2.0}}),
        ConvDtypeTemplate(qint8, qint16),
    ]
    first = prepared(QconfigSetter(get_qconfig(), templates, save_dir=tmp_path))
    written = torch.load(tmp_path / "qconfig_dtypes.pt", weights_only=True)
    assert written["quant"] == {"dtype": {"output": "qint16"}, "threshold": {"output": 2.0}}
    again = prepared(QconfigSetter(get_qconfig(), [ModuleNameTemplate(written)], False, save_dir=None))
    assert formats(again) == formats(first)
    quantizers = [model.get_submodule("quant.activation_post_process") for model in (first, again)]
    assert torch.equal(quantizers[0].scale, quantizers[1].scale)


def test_setters_print_as_what_they_are() -> None:
    assert repr(default_calibration_qconfig_setter) == "default_calibration_qconfig_setter"
    assert repr(sensitive_op_8bit_weight_16bit_act_calibration_setter(TABLE, topk=1)) == (
        "sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(block.conv1)"
    )
    assert repr(ModuleNameQconfigSetter({"a": None})) == "ModuleNameQconfigSetter({'a': None})"
    assert "ConvDtypeTemplate(input_dtype='qint8'" in repr(QconfigSetter(templates=[ConvDtypeTemplate(qint8)]))


def test_a_high_precision_output_is_what_the_chip_gives() -> None:
    for march, given in ((March.NASH_E, "int32"), (March.NASH_B, "float"), (March.BAYES, "int32")):
        set_march(march)
        qat = prepared(default_calibration_qconfig_setter)
        assert reason_of(qat, "head").startswith(f"float32: high-precision output ({given}); was int8")


def test_files_go_to_the_working_directory_or_a_warning_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared(QconfigSetter())
    assert (tmp_path / "qconfig_dtypes.pt").is_file()
    (tmp_path / "file").write_text("")
    with pytest.warns(QuantizationWarning, match="could not write"):
        prepare_qat_fx(Net(), qconfig_setter=QconfigSetter(save_dir=tmp_path / "file"))


def test_explain_gives_the_chain(capsys: pytest.CaptureFixture) -> None:
    setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(TABLE, topk=2)
    qat = prepared((setter, default_calibration_qconfig_setter))
    chain = explain(qat, "block.conv1")["block.conv1"]
    assert chain == (
        "output qint8, weight qint8: default_calibration_qconfig_setter",
        "output qint16: sensitivity table rank 1",
    )
    assert capsys.readouterr().out.splitlines() == ["block.conv1", f"    {chain[1]}", f"    before: {chain[0]}"]
    assert set(explain(qat, "block")) == {"block.conv1", "block._generated_silu_0", "block._generated_add_0"}
    assert set(explain(qat)) >= set(OPERATORS)
    with pytest.raises(ValueError, match="no.such"):
        explain(qat, "no.such")
    with pytest.raises(TypeError, match="prepared model"):
        explain(Net())


def test_explain_knows_the_dictionary_too(capsys: pytest.CaptureFixture) -> None:
    set_march(March.BAYES)
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), nn.ReLU(), DeQuantStub())
    int16 = get_qconfig(out_dtype=qint16)
    both = prepare_qat_fx(model, {"": get_qconfig(), "module_name": {"2": int16}})
    assert explain(both, "1")["1"] == (
        "output qint16, weight qint8: module_name 2",
        "taken from 2, which is fused into it",
    )
    with pytest.warns(QuantizationWarning, match="int16 weights on bayes: 1"):
        wide = prepare_qat_fx(model, {"": get_qconfig(weight_dtype=qint16)})
    assert explain(wide, "1")["1"] == ("output qint8, weight qint16: global",)
    assert reason_of(wide, "1") == "int8: global; weight int16: global"
    assert reason_of(wide, "3") == "gives real numbers"
    with pytest.raises(ValueError, match="no module 'no.such'"):
        reason_of(wide, "no.such")


def test_the_chain_in_one_line() -> None:
    setter = sensitive_op_8bit_weight_16bit_act_calibration_setter(TABLE, topk=2)
    qat = prepared((setter, default_calibration_qconfig_setter))
    assert reason_of(qat, "block.conv1") == (
        "int16: sensitivity table rank 1; was int8 from default_calibration_qconfig_setter; "
        "weight int8: default_calibration_qconfig_setter"
    )


# -- get_qconfig


def test_get_qconfig() -> None:
    default = get_qconfig()
    assert [format_of(part) for part in default] == [qint8, qint8, qint8]
    assert get_qconfig(out_dtype=None).activation is None and get_qconfig(out_dtype=FP32).activation is None
    half = get_qconfig(in_dtype=torch.float16, weight_dtype=torch.float16, out_dtype=torch.float16)
    assert [format_of(part) for part in half] == [torch.float16] * 3
    fixed = get_qconfig(MinMaxObserver, fix_scale=True)
    assert fixed.activation().activation_post_process.averaging_constant == 0
    assert fixed.weight().activation_post_process.averaging_constant == 0.01
    cases: list[tuple[dict[str, Any], str]] = [
        ({"out_dtype": "qint32"}, "out_dtype='qint32'"),
        ({"in_dtype": "int7"}, "in_dtype='int7'"),
        ({"weight_dtype": 8}, "weight_dtype=8"),
        ({"observer": "mse"}, "observer class"),
        ({"observer": nn.Conv2d}, "observer class"),
        ({"weight_observer": "mse"}, "weight_observer must be an observer class"),
        ({"fix_scale": 2}, "fix_scale"),
    ]
    for arguments, message in cases:
        with pytest.raises(QuantizationConfigError, match=message):
            get_qconfig(**arguments)
    with pytest.raises(QuantizationConfigError, match="'conv' in ModuleNameQconfigSetter"):
        ModuleNameQconfigSetter({"conv": "qint8"})
    with pytest.raises(QuantizationConfigError, match="is no path"):
        ModuleNameQconfigSetter({nn.Conv2d: get_qconfig()})  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [qint8, qint16])
@pytest.mark.parametrize("observer", [None, MSEObserver, PercentileObserver])
def test_weights_have_a_better_scale_than_the_documented_one(observer: Any, dtype: Any) -> None:
    setter = TemplateQconfigSetter(get_qconfig(weight_observer=observer, weight_dtype=dtype))
    torch.manual_seed(0)
    layer = prepared(setter).get_submodule("head")
    layer.observe_weight()
    weight, half = layer.weight.detach(), -dtype.min - 0.5
    documented = weight.flatten(1).abs().amax(1) / half
    error = (layer.weight_fake_quant.round_weight(layer.weight) - weight).square().sum()
    steps = documented.reshape(-1, 1, 1, 1)
    plain = (weight / steps).round().clamp(dtype.min, dtype.max) * steps
    assert error < (plain - weight).square().sum()


def test_another_format_covers_the_same_fixed_range() -> None:
    part = FakeQuantize.with_args(observer=FixedScaleObserver, dtype=qint16, scale=2.0 / 32768)
    assert with_format(part, qint8).kwargs["scale"] == 2.0 / 128
    for threshold in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(QuantizationConfigError, match="threshold"):
            with_format(None, qint8, threshold)
    with pytest.raises(QuantizationConfigError, match="has none"):
        with_format(None, torch.float16, 1.0)


# -- what explains itself, and what is refused


class Surrounded(nn.Module):
    """Layers before, in and after the quantized part, one that nothing calls, and one fused into an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.relu = QuantStub(), DeQuantStub(), nn.ReLU()
        self.pre, self.conv, self.last, self.post, self.unused = (nn.Conv2d(2, 2, 1) for _ in range(5))
        self.bn = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(self.pre(x))
        return self.post(self.dequant(self.last(self.relu(self.bn(self.conv(x)) + x))))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("by", ["setter", "dictionary"])
def test_every_module_says_where_its_format_comes_from(method: str, by: str) -> None:
    set_march(March.NASH_M)
    int16 = get_qconfig(out_dtype=qint16)
    given: Any = {"qconfig_setter": TemplateQconfigSetter(int16)} if by == "setter" else {"qconfig_dict": {"": int16}}
    qat = prepare(Surrounded().eval(), (X,), method=method, out_dir=None, **given)
    rule = "TemplateQconfigSetter" if by == "setter" else "global"
    fused = f"fused into `_generated_add_0`: int16: {rule}; weight int8: {rule}"
    assert {path: reason_of(qat, path) for path in ("conv", "bn", "relu")} == dict.fromkeys(
        ("conv", "bn", "relu"), fused
    )
    assert reason_of(qat, "pre") == "float: before the QuantStub"
    assert reason_of(qat, "post") == "float: after the DeQuantStub"
    assert reason_of(qat, "unused") == "float: never called" and reason_of(qat, "") == "has no format of its own"
    assert explain(qat, "bn") == {"bn": (fused,)} and "bn" not in explain(qat)


@pytest.mark.parametrize("name", ["conv", "bn", "relu"])
def test_names_of_modules_that_were_fused_by_hand_reach_the_fused_one(name: str) -> None:
    set_march(March.NASH_M)
    model = nn.ModuleDict(
        {"quant": QuantStub(), "conv": nn.Conv2d(2, 2, 1), "bn": nn.BatchNorm2d(2), "relu": nn.ReLU(), "end": nn.SiLU()}
    )
    inner = nn.Sequential(*model.values()).eval()
    index = str(list(model).index(name))
    fused = fuse_modules(inner, ["1", "2", "3"])
    setter = (ModuleNameQconfigSetter({index: get_qconfig(out_dtype=qint16)}), default_calibration_qconfig_setter)
    qat = prepare(fused, (X,), setter, "eager", out_dir=None)
    assert qat[1].activation_post_process.dtype == qint16
    if name != "conv":
        assert reason_of(qat, index).startswith(f"fused into `1`: int16: ModuleNameQconfigSetter '{index}'")


class SharedTaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.a, self.b, self.last = nn.Conv2d(2, 2, 1), nn.SiLU(), nn.Sigmoid(), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.conv(self.b(self.conv(self.a(self.quant(x)))))))


@pytest.mark.parametrize("wide", ["a", "b"])
def test_the_written_formats_of_a_shared_module_give_the_same_model(wide: str, tmp_path: Path) -> None:
    set_march(March.NASH_M)

    def formats(*templates: Any) -> tuple[dict[str, Any], dict[str, str]]:
        setter = QconfigSetter(get_qconfig(), templates, save_dir=tmp_path)
        qat = prepare(SharedTaker().eval(), (X,), setter, out_dir=None)
        found = {p: str(m.dtype) for p, m in qat.named_modules() if isinstance(m, FakeQuantize)}
        return torch.load(tmp_path / "qconfig_dtypes.pt", weights_only=True), found

    frozen = ModuleNameTemplate({"last": {"weight": qint16}}, freeze=True)
    rules, found = formats(ConvDtypeTemplate(qint8), ModuleNameTemplate({wide: qint16}), frozen)
    assert rules["conv"] == {"weight": "qint8", "output": "qint8"}  # its calls get int8 and int16
    assert rules["last"]["freeze"] is True
    assert formats(ModuleNameTemplate(rules), ConvDtypeTemplate(weight_dtype=qint8)) == (rules, found)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SensitivityTemplate(None, 1), "list of rows"),  # type: ignore[arg-type]
        (lambda: SensitivityTemplate(TABLE, "a"), "topk_or_ratio"),  # type: ignore[arg-type]
        (lambda: SensitivityTemplate([["conv", "activations", "", 1.0, ""]], 1), "'activations'"),
        (lambda: sensitive_op_8bit_weight_16bit_act_calibration_setter(5, topk=1), "list of rows"),  # type: ignore[arg-type]
        (lambda: sensitive_op_8bit_weight_16bit_act_calibration_setter(TABLE, ratio="a"), "ratio"),  # type: ignore[arg-type]
        (lambda: ModuleNameTemplate([("conv", qint8)]), "dictionary of paths"),  # type: ignore[arg-type]
        (lambda: ModuleNameTemplate({1: qint8}), "dictionary of paths"),  # type: ignore[dict-item]
        (lambda: ModuleNameTemplate({"conv": {"threshold": "a"}}), "largest magnitude"),
        (lambda: ModuleNameTemplate({"conv": {"weight": FP32}}), "float32 weight"),
        (lambda: QconfigSetter(templates=ConvDtypeTemplate(qint8)), "list of templates"),  # type: ignore[arg-type]
        (lambda: TemplateQconfigSetter(get_qconfig(), [HighPrecisionOutputTemplate]), "the class HighPrecision"),
    ],
)
def test_wrong_arguments_of_rules_are_named(make: Any, words: str) -> None:
    with pytest.raises(QuantizationConfigError, match=words):
        make()


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_file_that_is_no_sensitivity_table_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "table.pt").write_bytes(content)
    with pytest.raises(QuantizationConfigError, match=r"table.pt' cannot be read"):
        SensitivityTemplate(str(tmp_path / "table.pt"), 1)


def test_warnings_of_setters_say_what_is_missing_and_point_to_the_caller() -> None:
    set_march(March.BAYES)
    wide = ModuleNameQconfigSetter({"conv": get_qconfig(weight_dtype=qint16)})
    with pytest.warns(QuantizationWarning, match="weights are qint8 on bayes.*Made qint8: conv") as caught:
        prepare(SharedTaker(), (X,), (wide, default_calibration_qconfig_setter), out_dir=None)
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.warns(QuantizationWarning, match="no setter gives.*needs one for all others behind it"):
        prepare(SharedTaker(), (X,), ModuleNameQconfigSetter({"last": get_qconfig()}), out_dir=None)
    with pytest.warns(QuantizationWarning, match="Give a setter, such as `qconfig_setter="):
        prepare(SharedTaker(), (X,), out_dir=None)


def test_a_threshold_of_a_layer_that_is_fused_with_an_addition_is_told() -> None:
    set_march(March.NASH_M)
    setter = QconfigSetter(templates=[ModuleNameTemplate({"conv": {"threshold": 1.0}})], save_dir=None)
    with pytest.warns(QuantizationWarning, match="'conv' is fused with the addition `_generated_add_0`"):
        prepare(Surrounded().eval(), (X,), setter, out_dir=None)


def test_results_that_cannot_be_written_do_not_lose_the_model(tmp_path: Path) -> None:
    set_march(March.NASH_M)
    (tmp_path / "file").touch()
    with pytest.warns(QuantizationWarning, match="could not write fx_graph.txt and model_check_result.txt"):
        qat = prepare(SharedTaker(), (X,), default_calibration_qconfig_setter, out_dir=tmp_path / "file")
    with pytest.raises(CheckError, match="could not write model_check_result.txt"):
        check_qat_model(qat, X, out_dir=tmp_path / "file")
