"""The ONNX file: standard operators, any opset of the range, names, and safe writing."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import warnings
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import files
from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_aten import ATEN
from horizon_plugin_pytorch.export.onnx_fixed_point import FIXED_POINT
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    prepare,
    prepare_qat,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.models import ZOO, make
from tests.operators.cases.base import Body
from tests.routes import (
    OPTIMIZATION,
    as_numbers,
    assert_one_arithmetic,
    calibrate,
    mismatches,
    prepared,
    qconfig,
    run_onnx,
)


def _converted(name: str, dtype: str = "qint8") -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = make(name)
    return convert_fx(prepared(model, inputs, dtype)), inputs


@pytest.mark.in_turns("name", "opset")
@pytest.mark.slow
@pytest.mark.parametrize("opset", [11, 12, 13, 15, 16, 18, 20, 21])
@pytest.mark.parametrize("name", ["unet", "vit", "detector"])
def test_every_opset_gives_the_same_integers(name: str, opset: int, tmp_path: Any) -> None:
    model, inputs = _converted(name, "qint16" if opset % 2 else "qint8")
    file = export_quantized_onnx(model, inputs, tmp_path / "m.onnx", opset_version=opset)
    onnx.checker.check_model(file, full_check=True)
    assert [(i.domain, i.version) for i in file.opset_import] == [("", opset)]
    with torch.no_grad():
        wanted = as_numbers(model(*inputs))
    for optimization in OPTIMIZATION:
        assert mismatches(run_onnx(file, inputs, optimization), wanted) == 0


@pytest.mark.parametrize("opset", [10, 22, 0])
def test_an_opset_outside_the_range_is_refused(opset: int, tmp_path: Any) -> None:
    model, inputs = _converted("mobilenet")
    with pytest.raises(ExportError, match=rf"\[11, 21\], got {opset}"):
        export_quantized_onnx(model, inputs, tmp_path / "m.onnx", opset_version=opset)


@pytest.mark.parametrize("name", ZOO)
def test_only_standard_operators(name: str, tmp_path: Any) -> None:
    model, inputs = _converted(name)
    file = export_quantized_onnx(model, inputs, tmp_path / "m.onnx")
    assert not file.functions and {node.domain for node in file.graph.node} == {""}
    for node in file.graph.node:
        onnx.defs.get_schema(node.op_type, 17, "")  # raises for an unknown one
    assert not {n.op_type for n in file.graph.node} & {"ConvInteger", "MatMulInteger", "QLinearMatMul"}
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    for node in (n for n in file.graph.node if n.op_type == "QLinearConv"):
        _, scale, zero, _, _, weight_zero, out_scale, out_zero = node.input[:8]
        assert constants[scale] == constants[out_scale] == 1  # so that the weight's scale is the whole factor
        assert constants[weight_zero] == (0 if constants[weight_zero].dtype == "int8" else 128)
        assert constants[zero] in (0, 128) and constants[out_zero] in (0, 128)


def test_default_names_and_types(tmp_path: Any) -> None:
    model, inputs = _converted("detector")
    file = export_quantized_onnx(model, inputs, tmp_path / "m.onnx")
    assert [i.name for i in file.graph.input] == ["input_0", "input_1"]
    assert [o.name for o in file.graph.output] == ["heads_0", "heads_1", "features_0"]
    types = [o.type.tensor_type.elem_type for o in file.graph.output]
    assert types == [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, onnx.TensorProto.INT8]


def test_given_names(tmp_path: Any) -> None:
    model, inputs = _converted("detector")
    names = dict(input_names=["image", "prior"], output_names=["boxes", "scores", "features"])
    file = export_quantized_onnx(model, inputs, tmp_path / "m.onnx", **names)
    assert [i.name for i in file.graph.input] == names["input_names"]
    assert [o.name for o in file.graph.output] == names["output_names"]
    assert mismatches(run_onnx(file, inputs), as_numbers(model(*inputs))) == 0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (dict(input_names=["image"]), ("input_names", "1", "2")),
        (dict(output_names=["a", "b"]), ("output_names", "2", "3")),
        (dict(input_names=["a", "a"]), ("input_names", "'a'")),
        (dict(input_names=["a", "b"], output_names=["a", "c", "d"]), ("'a'",)),
    ],
)
def test_names_that_do_not_fit(names: dict, words: tuple[str, ...], tmp_path: Any) -> None:
    model, inputs = _converted("detector")
    with pytest.raises(ExportError) as error:
        export_quantized_onnx(model, inputs, tmp_path / "m.onnx", **names)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.slow
def test_a_name_that_an_inner_value_could_have(tmp_path: Any) -> None:
    model, inputs = _converted("mobilenet")
    inner = [n.output[0] for n in export_quantized_onnx(model, inputs, tmp_path / "m.onnx").graph.node]
    file = export_quantized_onnx(model, inputs, tmp_path / "m.onnx", input_names=[inner[0]], output_names=[inner[3]])
    assert mismatches(run_onnx(file, inputs), as_numbers(model(*inputs))) == 0


@pytest.mark.slow
def test_writing_is_atomic(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _converted("mobilenet")
    path = tmp_path / "deep" / "m.onnx"
    export_quantized_onnx(model, inputs, path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        export_quantized_onnx(model, inputs, path, output_names=["other"])
    assert path.read_bytes() == before and os.listdir(path.parent) == ["m.onnx"]


@pytest.mark.slow
def test_a_file_object_and_a_string_path(tmp_path: Any) -> None:
    model, inputs = _converted("mobilenet")
    buffer = io.BytesIO()
    export_quantized_onnx(model, inputs, buffer)
    export_quantized_onnx(model, inputs, str(tmp_path / "m.onnx"))
    assert buffer.getvalue() == (tmp_path / "m.onnx").read_bytes()


@pytest.mark.slow
def test_export_is_deterministic_and_leaves_the_model_alone(tmp_path: Any) -> None:
    model, inputs = _converted("vit")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    files = [export_quantized_onnx(model, inputs, tmp_path / "m.onnx").SerializeToString() for _ in range(2)]
    assert files[0] == files[1] and model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_weights_are_stored_as_integers(tmp_path: Any) -> None:
    model, inputs = _converted("resnet")
    export_quantized_onnx(model, inputs, tmp_path / "m.onnx")
    weights = sum(b.numel() for k, b in model.state_dict().items() if k.endswith(".weight"))
    kinds = {t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer if len(t.dims) == 4}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert os.path.getsize(tmp_path / "m.onnx") < weights + 30_000


@pytest.mark.slow
def test_keyword_and_single_arguments(tmp_path: Any) -> None:
    model, inputs = _converted("mobilenet")
    a = export_quantized_onnx(model, inputs[0], tmp_path / "a.onnx")
    b = export_quantized_onnx(model, list(inputs), tmp_path / "b.onnx")
    assert a.SerializeToString() == b.SerializeToString()


class Post(nn.Module):
    """A float operator after the DeQuantStub."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv, self.post = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1), Body(function)

    def forward(self, x: Tensor) -> Any:
        return self.post(self.dequant(self.conv(self.quant(x))))


FLOAT_CODE: dict[str, Any] = {
    "arithmetic": lambda x: (1 - x * 2) / 3 + x.neg(),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + F.relu6(x),
    "sigmoid tanh exp": lambda x: torch.sigmoid(x) + torch.tanh(x) + torch.exp(-x),
    "silu gelu": lambda x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh"),
    "softmax": lambda x: F.softmax(x, 1),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "mean sum": lambda x: x.mean((2, 3)) + x.sum((2, 3)),
    "mean of all": lambda x: x.mean(),
    "max": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "max of an axis": lambda x: x.max(1)[0],
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear corners": lambda x: F.interpolate(x, size=(9, 5), mode="bilinear", align_corners=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "pools": lambda x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 3),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "comparison": lambda x: (x > 0.1) & (x <= 0.5),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "power": lambda x: x**2 + x.abs().sqrt() + x.square(),
    "casts": lambda x: x.to(torch.int32).float() + x.double().float(),
    "of its shape": lambda x: (
        torch.ones_like(x) + x * torch.full_like(x, 3.0) + x.new_ones(x.shape) + x.new_full((6,), 2)
    ),
    "booleans are counted": lambda x: ((x > 0).sum(1), (x > 0).cumsum(1), (x > 0).cumsum(1, dtype=torch.float32)),
    "integers meet float": lambda x: x + torch.arange(6) - x.argmax(1, keepdim=True) * x,
    "integers and a fraction": lambda x: (x.argmax(1) < 0.5, x.argmax(1) * 1.5, 0.5 - x.argmax(1), x.argmax(1) != 0.5),
    "choice between types": lambda x: torch.where(x > 0, x, torch.arange(6)),
    "limits as tensors": lambda x: (x.clamp(torch.tensor(-0.5), torch.tensor(0.5)), F.cosine_similarity(x, x + 1)),
    "fused kernels": lambda x: torch.logit(x.sigmoid()) + x.std((2, 3), keepdim=True) + torch.lerp(x, x * 2, 0.3),
    "angles": lambda x: torch.atan2(x, x.flip(1)),
    "angles of zeros": lambda x: torch.atan2((x * 0)[..., None], torch.tensor([0.0, -0.0, 1, -1]).view(1, 1, 1, 1, 4)),
    "signs": lambda x: x.sign() + torch.isnan(x),
}


@pytest.mark.parametrize("name", FLOAT_CODE)
def test_float_code_around_the_quantized_part(name: str, tmp_path: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = convert_fx(prepared(Post(FLOAT_CODE[name]).eval(), (x,)))
    file = export_quantized_onnx(model, x, tmp_path / "m.onnx")
    with torch.no_grad():
        wanted = as_numbers(model(x))
    for optimization in OPTIMIZATION:
        for a, b in zip(run_onnx(file, (x,), optimization), wanted, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.allclose(a, b, atol=1e-5, rtol=1e-5) if a.is_floating_point() else torch.equal(a, b)


def _moved(x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    first = x + start
    start += 1
    return first, x + start


def _filled(x: Tensor, start: Tensor) -> list[Tensor]:
    return [x + start.fill_(i) for i in range(3)]


def _set_in_parts(x: Tensor, start: Tensor) -> list[Tensor]:
    results = []
    for i in range(3):
        start[i] = i + 1.0
        results.append(x * start)
    return results


def _added_to(x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    total = start.expand(x.shape).clone()
    before = total * x
    total += x
    return before, total


WRITES = {"moved": _moved, "filled": _filled, "in parts": _set_in_parts, "by data": _added_to}


@pytest.mark.parametrize("route", ["tracing", "running"])
@pytest.mark.parametrize("name", WRITES)
def test_a_constant_that_is_written_between_two_reads_has_both_values(name: str, route: str, tmp_path: Any) -> None:
    """Offsets of one level after the other, say, in one tensor that moves on."""
    x, net = torch.randn(2, 3, 6, 6), Post(lambda x: WRITES[name](x, torch.zeros(6))).eval()
    method = PrepareMethod.SYMBOLIC if route == "tracing" else PrepareMethod.JIT_STRIP
    qat = calibrate(prepare(net, x, qconfig_dict={"": qconfig()}, method=method, out_dir=None), (x,))
    with torch.no_grad():
        for found, wanted in zip(qat(x), net(x), strict=True):
            assert (found - wanted).abs().max() < 0.1
    assert_one_arithmetic(qat, (x,), tmp_path)


def test_a_float_operator_without_onnx_form_is_named(tmp_path: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = convert_fx(prepared(Post(lambda x: torch.special.bessel_j0(x)).eval(), (x,)))
    with pytest.raises(ExportError, match="bessel_j0.*post-processing"):
        export_quantized_onnx(model, x, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def _box(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2] = y[:, :2] * 2
    return y


def _double(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2].mul_(2)
    return y + 1


def _canvas(x: Tensor) -> Tensor:
    out = torch.full((2, 4, 8, 8), 0.5)
    out[:, :, 1:7, 1:7] = x
    out[:, 0].zero_()
    out[:, 1, ::2].fill_(3)
    return out


def _integers(x: Tensor) -> Tensor:
    counts = torch.zeros(2, 4, 6, 6, dtype=torch.int32)
    counts[:, 1:3] = (x[:, :1] * 10).round()
    return counts


@pytest.mark.parametrize("function", [_box, _double, _canvas, _integers])
def test_writing_into_a_part_of_a_tensor_is_exported(function: Any, tmp_path: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = convert_fx(prepared(_Boxed(function).eval(), (x,)))
    file = export_quantized_onnx(model, x, tmp_path / "m.onnx")
    for optimization in OPTIMIZATION:
        assert mismatches(run_onnx(file, (x,), optimization), as_numbers(model(x))) == 0


class _Boxed(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = QuantWrapper(nn.Conv2d(3, 4, 1)), _leaf(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


def _leaf(function: Any) -> nn.Module:
    from horizon_plugin_pytorch.utils.fx_helper import wrap

    @wrap()
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Leaf()


def test_eager_models_export(tmp_path: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid())).eval()
    model.qconfig = qconfig()
    quantized = convert(calibrate(prepare_qat(model), (x,)))
    file = export_quantized_onnx(quantized, x, tmp_path / "m.onnx")
    assert mismatches(run_onnx(file, (x,)), as_numbers(quantized(x))) == 0


def test_an_output_that_is_an_input_or_a_constant(tmp_path: Any) -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = QuantWrapper(nn.Conv2d(3, 4, 1))
            self.register_buffer("anchors", torch.arange(6.0))

        def forward(self, x: Tensor) -> tuple:
            y = self.inner(x)
            return x, y, y, self.anchors

    x = torch.randn(2, 3, 6, 6)
    model = convert_fx(prepared(Echo().eval(), (x,)))
    file = export_quantized_onnx(model, x, tmp_path / "m.onnx")
    assert mismatches(run_onnx(file, (x,), "on"), as_numbers(model(x))) == 0


def test_every_fixed_point_operator_has_a_lowering() -> None:
    names = {str(name) for name in torch._C._dispatch_get_all_op_names() if str(name).startswith("horizon::")}
    assert names == set(FIXED_POINT)
    for name in ATEN:
        assert hasattr(torch.ops.aten, name.removeprefix("aten::")), name


def test_export_is_quiet(tmp_path: Any) -> None:
    model, inputs = _converted("unet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_quantized_onnx(model, inputs, tmp_path / "m.onnx")


@dataclasses.dataclass(frozen=True)
class Batch:
    image: Tensor
    others: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1)

    def forward(self, batch: Batch) -> list[Batch]:
        y = self.dequant(self.conv(self.quant(batch.image)))
        return [Batch(y, {"none": None, "sum": y + batch.others["shift"]})]


def test_dataclasses_in_and_out() -> None:
    set_march(March.NASH_E)
    batch = Batch(torch.randn(1, 3, 4, 4), {"shift": torch.ones(1)})
    qat = prepare(Nested().eval(), (batch,), qconfig_dict={"": qconfig()}, out_dir=None)
    quantized = convert(calibrate(qat, (batch,)))
    proto = export_quantized_onnx(quantized, (batch,), io.BytesIO())
    assert [x.name for x in proto.graph.input] == ["image", "others_shift"]
    assert [x.name for x in proto.graph.output] == ["output_0_image", "others_sum"]
    quantized.forward = lambda batch: []
    with pytest.raises(ExportError, match="gives no tensor"):
        export_quantized_onnx(quantized, (batch,), io.BytesIO())


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_bias_that_does_not_fit_beside_its_products_is_exact_in_onnx(is_wide: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 16, 3)
    with torch.no_grad():
        conv.weight *= 1e-3
        conv.bias.normal_()
    x = torch.randn(4, 1, 20, 20)
    model = QuantWrapper(conv)
    narrow, wide = default_qat_8bit_fake_quant_qconfig, default_qat_8bit_weight_16bit_act_fake_quant_qconfig
    model.module.qconfig = wide if is_wide else narrow
    quantized = convert_fx(prepared(model, (x,)))
    assert torch.equal(run_onnx(export_quantized_onnx(quantized, x, tmp_path / "m.onnx"), (x,), "on")[0], quantized(x))


def test_indices_that_onnx_cannot_give_are_refused(tmp_path: Any) -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> Any:
            return F.max_pool2d(self.dequant(self.quant(x)), 2, return_indices=True)

    quantized = convert_fx(prepared(Pool(), (X,)))
    with pytest.raises(ExportError, match="indices of max pooling"):
        export_quantized_onnx(quantized, X, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "take",
    [
        lambda x, i: x.select(1, i),
        lambda x, i: x.narrow(1, i, 1),
        lambda x, i: x.roll(i, 1),
        lambda x, i: x[:, i.item()],
    ],
)
def test_a_computed_position_is_not_exported_as_a_constant(take: Any, tmp_path: Any) -> None:
    model = QuantWrapper(Body(lambda x: take(x, x.flatten().argmax() % 4)))
    quantized = convert_fx(prepared(model, (X,)))
    with pytest.raises(ExportError, match="reads a number out of a computed tensor .*index_select"):
        export_quantized_onnx(quantized, X, tmp_path / "model.onnx")


class _Classes(nn.Module):
    """The largest class of each position, as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return F.one_hot(self.dequant(self.quant(x)).argmax(1), num_classes=X.shape[1]).float() * 2


@pytest.mark.parametrize("level", OPTIMIZATION)
def test_one_hot_of_computed_positions_is_exported(level: str, tmp_path: Any) -> None:
    quantized = convert_fx(prepared(_Classes(), (X,)))
    export_quantized_onnx(quantized, X, tmp_path / "model.onnx")
    other = X.flip(1)
    assert torch.equal(run_onnx(onnx.load(tmp_path / "model.onnx"), (other,), level)[0], quantized(other))


def test_one_hot_without_a_count_is_refused_with_what_to_give(tmp_path: Any) -> None:
    model = QuantWrapper(Body(lambda x: F.one_hot(x.argmax(1))))
    quantized = convert_fx(prepared(model, (X,)))
    with pytest.raises(
        ExportError, match=r"test_onnx_export.py:\d+.*`F.one_hot` looks for .*`F.one_hot\(x, num_classes\)`"
    ):
        export_quantized_onnx(quantized, X, tmp_path / "model.onnx")


def test_a_scatter_of_no_pillars_is_not_exported(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.scatter = QuantStub(), hnn.PointPillarsScatter((1, 3, 4, 4))

        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            return self.scatter(self.quant(x), coords)

    set_march(March.BAYES)
    quantized = convert_fx(prepared(Net(), (torch.randn(2, 3), torch.tensor([[0, 0, 1, 1], [0, 0, 2, 3]]))))
    with pytest.raises(ExportError, match="no pillars"):
        export_quantized_onnx(quantized, (torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int64)), tmp_path / "m.onnx")
