"""`MatmulDtypeTemplate` on the products of matrices inside of attention."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QconfigSetter, QuantStub, explain, get_qconfig, prepare
from horizon_plugin_pytorch.quantization.qconfig_setter import MatmulDtypeTemplate, ModuleNameTemplate
from tests.routes import assert_one_arithmetic, calibrate
from tests.tiers import in_soak

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
SDPA = "_generated_scaled_dot_product_attention_0"


@pytest.fixture(autouse=True)
def nash() -> None:
    set_march(March.NASH_M)


class Net(nn.Module):
    def __init__(self, function: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.function, self.out = QuantStub(), DeQuantStub(), function, nn.Linear(16, 16)
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.out(self.function(self, self.quant(x))))


MODELS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "nn.MultiheadAttention": (
        lambda: Net(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(16, 2, batch_first=True)),
        "attn",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ),
    "our MultiheadAttention": (
        lambda: Net(lambda m, x: m.attn(x, x, x)[0], attn=hnn.MultiheadAttention(16, 2, batch_first=True)),
        "attn",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ),
    "a transformer layer": (
        lambda: Net(lambda m, x: m.layer(x), layer=nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)),
        "layer.self_attn",
        ("layer.self_attn.q_proj", "layer.self_attn.k_proj", "layer.self_attn.v_proj"),
    ),
    "scaled_dot_product_attention": (
        lambda: Net(
            lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)),
            q=nn.Linear(16, 16), k=nn.Linear(16, 16), v=nn.Linear(16, 16),
        ),
        SDPA,
        ("q", "k", "v"),
    ),
}  # fmt: skip


def formats(model: nn.Module, *paths: str) -> list[Any]:
    return [model.get_submodule(path).activation_post_process.dtype for path in paths]


FORMATS = [(qint16, (qint8, qint8)), (qint16, (qint8, qint16)), (qint8, (qint16, qint16)),
           (torch.float16, (qint8, qint8))]  # fmt: skip
METHODS = ("jit-strip", "symbolic")


def _cases() -> list[Any]:
    """Every model in all formats, by tracing or by running; `make soak` takes the other way too."""
    found: list[Any] = []
    for number, (name, formats) in enumerate(itertools.product(MODELS, FORMATS)):
        turn = (number + number // len(FORMATS)) % 2
        found += [(name, *formats, METHODS[turn]), *in_soak((name, *formats, METHODS[1 - turn]))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "around", "wanted", "method"), _cases())
def test_products_take_the_formats_asked_for(
    name: str, around: Any, wanted: tuple, method: str, tmp_path: Path
) -> None:
    make, path, operands = MODELS[name]
    net = make().eval()
    templates = [
        ModuleNameTemplate({"": around, "q": qint16, "k": qint16, "v": qint16} if path == SDPA else {"": around})
    ]
    setter = QconfigSetter(get_qconfig(), [*templates, MatmulDtypeTemplate(list(wanted))], save_dir=tmp_path)
    qat = calibrate(prepare(net, (X,), setter, method=method, out_dir=None), (X,))
    assert formats(qat, *operands) == [wanted[0], wanted[1], wanted[1]]
    assert formats(qat, f"{path}.attention.softmax") == [wanted[0]]
    told = f"{wanted[0]} and {wanted[1]} of the products inside"
    assert f"input {told}: MatmulDtypeTemplate" in explain(qat, path)[path]
    part = f"{path}.attention.softmax"
    assert f"part of `{path}`" in reason_of(qat, part) and "MatmulDtypeTemplate" in reason_of(qat, part)
    with torch.no_grad():
        assert float((qat(X) - net(X)).norm() / net(X).norm()) < 0.05
    if around is not torch.float16:
        assert_one_arithmetic(qat, (X,), tmp_path)
    written = ModuleNameTemplate(torch.load(tmp_path / "qconfig_dtypes.pt"))  # what was saved gives the same again
    again = prepare(net, (X,), QconfigSetter(get_qconfig(), [written], False, None), method=method, out_dir=None)
    assert formats(again, *operands, part) == formats(qat, *operands, part)


def test_an_operand_that_is_too_wide_gets_a_stub() -> None:
    make, _path, _ = MODELS["scaled_dot_product_attention"]
    templates = [ModuleNameTemplate({"": qint16, "q": torch.float16}), MatmulDtypeTemplate(qint8)]
    qat = prepare(make().eval(), (X,), QconfigSetter(get_qconfig(), templates, save_dir=None), out_dir=None)
    assert formats(qat, "_generated_quant_0") == [qint8]


def test_float16_products_inside_are_told() -> None:
    make, _path, _ = MODELS["nn.MultiheadAttention"]
    templates = [ModuleNameTemplate({"": qint16}), MatmulDtypeTemplate(torch.float16)]
    with pytest.warns(QuantizationWarning, match="products inside of `attn` are of integers"):
        prepare(make().eval(), (X,), QconfigSetter(get_qconfig(), templates, save_dir=None), out_dir=None)


def test_products_by_name() -> None:
    make, _path, operands = MODELS["nn.MultiheadAttention"]
    rule = ModuleNameTemplate({"": qint16, "attn": {"output": qint16, "products": [qint8, qint16]}})
    qat = prepare(make().eval(), (X,), QconfigSetter(get_qconfig(), [rule], save_dir=None), out_dir=None)
    assert formats(qat, *operands) == [qint8, qint16, qint16]
    with pytest.raises(QuantizationConfigError, match="two operands"):
        ModuleNameTemplate({"attn": {"products": [qint8] * 3}})
