"""check_model: which operator of a converted model breaks which published limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.deploy.check_model import find_limits, operator_uses
from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule
from horizon_plugin_pytorch.nn.support import GROUPS, Support, TensorFact, Use, at_most, between, on
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    QuantWrapper,
    check_model,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat,
)
from tests.routes import calibrate, prepared

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
        "quant", "conv2d", "max_pool", "add", "mul", "cat", "softmax", "reshape", "dequant",
    ]  # fmt: skip
    conv = uses[1][1]
    assert conv.numbers("kernel_size") == (3, 3) and conv.numbers("C") == (4,)
    assert conv.place.startswith("`conv` (test_check_model.py:")


def test_what_a_chip_does_not_have(capsys: pytest.CaptureFixture) -> None:
    assert check_model(_quantized(), (X,), "bernoulli2") == 1
    printed = capsys.readouterr().out
    assert all(
        word in printed for word in ("softmax", "not on bernoulli2", "it runs on bayes", "4 axes", "NCHW", "FAIL")
    )


def test_formats_and_limits_of_a_row() -> None:
    tight = on(bayes=Support(inputs=("qint8",), limits=(between("kernel_size", 1, 2, "use a smaller kernel"),)))
    row = Operator("tight", ScaleRule.OWN, marches=tight)
    use = Use("tight", "`a`", (TensorFact((1, 2, 3, 3), "qint16"),), attributes={"kernel_size": (3, 1)})
    from horizon_plugin_pytorch.deploy.check_model import _format_findings

    found = list(_format_findings(row, use, March.BAYES))
    assert [(f.limit, f.advice) for f in found] == [
        ("input qint8", "give the producer of this tensor such a format"),
        ("1 <= kernel_size <= 2", "use a smaller kernel"),
    ]
    assert found[1].found == "kernel_size 3, 1 (inputs (1, 2, 3, 3))"


def test_limits_know_only_what_a_use_has() -> None:
    use = Use("x", "", (TensorFact((2, 3), "qint8"),))
    assert at_most("C", 1).holds(use) and at_most("kernel_size", 1).holds(use) and not at_most("rank", 1).holds(use)


def test_a_large_batch_on_bernoulli2() -> None:
    set_march(March.BERNOULLI2)
    x = torch.randn(129, 1, 2, 2)
    quantized = convert_fx(prepared(QuantWrapper(nn.Conv2d(1, 1, 1)), (x,)))
    assert {f.limit for f in find_limits(quantized, (x,), March.BERNOULLI2)} == {"N <= 128"}
    assert check_model(quantized, x[:128]) == 0  # the chip that the model was prepared for


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


def test_every_march_is_in_one_group() -> None:
    assert sorted(m for members in GROUPS.values() for m in members) == sorted(March)
