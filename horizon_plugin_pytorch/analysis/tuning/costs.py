"""What a mixture of formats costs, as far as that is known without the chip: products by format, and bytes moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from horizon_plugin_pytorch.analysis.tuning.sites import operator_around
from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.nn.qat.attention import Attention
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.operators.table import Trait
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.watch import ModuleWatch, OperatorCall, Watch

_BYTES = {"int8": 1, "int16": 2, "float16": 2}
_HALVES = ("float16", "float16")


@dataclass
class Cost:
    """The cost of one forward.

    Args:
        products: multiply-accumulates by the formats of the operands, such as ``"int16 x int8"``.
        traffic: bytes that operators read and write.
        by_operator: multiply-accumulates of each operator.
    """

    products: dict[str, int] = field(default_factory=dict)
    traffic: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)

    @property
    def wide_share(self) -> float:
        """The share of the multiply-accumulates with an operand that is not int8."""
        total = sum(self.products.values())
        narrow = self.products.get("int8 x int8", 0)
        return (total - narrow) / total if total else 0.0


def cost_of(model: nn.Module, batch: Any) -> Cost:
    """Run a prepared model on a batch, and count; what attention and recurrent modules multiply inside is theirs."""
    cost, halves = Cost(), dict[int, Tensor]()  # what float16 operators gave, by its place in memory
    inner = {path: module for path, module in model.named_modules() if isinstance(module, (QATGemm, Attention))}
    outer = {path: operator_around(model, f"{path}.") for path in inner}

    def add(path: str, products: int, operands: tuple[str, str]) -> None:
        name = " x ".join(operands)
        cost.products[name] = cost.products.get(name, 0) + products
        cost.by_operator[path] = cost.by_operator.get(path, 0) + products

    def width(x: Tensor) -> int:
        if isinstance(x, QTensor):
            return _BYTES.get(_format(x), 4)
        return _BYTES["float16"] if x.untyped_storage().data_ptr() in halves else 0  # 0: it never is on the chip

    def count(call: OperatorCall) -> None:
        is_half = isinstance(call.module, Float16)
        if is_half:
            halves.update({x.untyped_storage().data_ptr(): x for x in call.outputs})
        cost.traffic += sum(x.numel() * width(x) for x in (*call.inputs, *call.outputs))
        is_product = call.row is not None and Trait.PRODUCT in call.row.traits
        if is_product and len(call.inputs) >= 2 and call.outputs:
            products = call.outputs[0].numel() * call.inputs[0].shape[-1]
            add(call.path, products, _HALVES if is_half else (_format(call.inputs[0]), _format(call.inputs[1])))
        elif is_half and (products := _half_products(call)):
            add(call.path, products, _HALVES)

    def count_inner(call: OperatorCall) -> None:
        products = _products(call)
        if products:
            add(outer[call.path], products, _operands(call))

    with torch.no_grad(), Watch(model, count), ModuleWatch(inner, after=count_inner):
        run_batch(model, own_tensors(batch))
    return cost


def _products(call: OperatorCall) -> int:
    """How many numbers a layer, or attention between its layers, multiplies and sums."""
    if isinstance(call.module, QATGemm):
        weight, is_transposed = call.module.weight, "Transpose" in type(call.module).__name__
        given = call.inputs[0] if is_transposed else next(iter(call.outputs), None)
        return 0 if given is None else given.numel() * weight[0].numel()
    query, key, value = (x.shape for x in call.inputs[:3])
    return query.numel() // query[-1] * key[-2] * (query[-1] + value[-1])


def _half_products(call: OperatorCall) -> int:
    """The same of a layer, attention or a recurrent module in float16, which are torch's own."""
    assert isinstance(call.module, Float16)
    for module in call.module._float.modules():
        if isinstance(module, nn.MultiheadAttention):
            return _attention_products(module, call)
        if isinstance(module, nn.RNNBase):  # each step multiplies all weights
            steps = call.inputs[0].numel() // call.inputs[0].shape[-1]
            return steps * sum(p.numel() for p in module.parameters() if p.dim() > 1)
        if isinstance(module, (nn.Linear, _ConvNd)):
            given = call.inputs[0] if "Transpose" in type(module).__name__ else call.outputs[0]
            return given.numel() * module.weight[0].numel()
    return 0


def _attention_products(module: nn.MultiheadAttention, call: OperatorCall) -> int:
    """Those of the four projections, and of the two products between them."""
    query, key, value = call.inputs[:3]
    tokens = query.numel() // query.shape[-1]
    length = key.shape[1 if module.batch_first and key.dim() > 2 else 0]
    projected = 2 * query.numel() + key.numel() + value.numel()
    return module.embed_dim * (projected + 2 * tokens * length)


def _operands(call: OperatorCall) -> tuple[str, str]:
    first = _format(call.inputs[0])
    if isinstance(call.module, QATGemm):
        dtype = getattr(call.module.weight_fake_quant, "dtype", torch.float16)
        return first, str(dtype).removeprefix("torch.").removeprefix("q")
    return first, _format(call.inputs[1])


def _format(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.").removeprefix("q")


def raising_costs(takers: Mapping[str, list[str]], cost: Cost) -> dict[str, int]:
    """For each operator, how many multiply-accumulates take its result: they become int16 with it."""
    return {path: sum(cost.by_operator.get(taker, 0) for taker in set(takes)) for path, takes in takers.items()}
