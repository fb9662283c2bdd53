"""What the table's cases cannot say of products, attention, recurrent cells and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig, prepare_qat_fx
from tests.operators.cases.base import Body, bench
from tests.routes import assert_one_arithmetic, prepared


@pytest.fixture(autouse=True)
def _on_bayes() -> None:
    set_march(March.BAYES)


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda x, y: torch.einsum("ii,ij->ij", x, y), "diagonal"),
        (lambda x, y: torch.einsum("ij,jk->k", x, y), "sums i of one operand"),
        (lambda x, y: torch.einsum("ij,jk,kl->il", x, y, x), "two operands"),
        (lambda x, y: torch.einsum("ij->ji", x) + y, "permute"),
        (lambda x, y: torch.addmm(x, x, y, alpha=-1.0), "x \\+ a @ b"),
    ],
)
def test_products_without_a_form_say_what_to_write(call: Callable[..., Any], advice: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=advice):
        prepare_qat_fx(bench(Body(call), 2), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_a_product_whose_sum_counts_for_nothing(dtype: str, tmp_path: Any) -> None:
    model = bench(Body(lambda x, a, b: torch.baddbmm(x, a, b, beta=0, alpha=0.125)), 3)
    inputs = (torch.randn(3, 5, 4), torch.randn(3, 5, 8), torch.randn(3, 8, 4))
    qat = prepared(model, inputs, dtype)
    assert_one_arithmetic(qat, inputs, tmp_path)
    found = qat(*inputs)[1]
    assert torch.allclose(found, 0.125 * inputs[1] @ inputs[2], atol=0.03)
