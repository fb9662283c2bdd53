"""Weights of a float model beside those of its QAT or quantized form."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.output import tensorboard_log, write_report
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction, largest_difference
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, require_module, warn
from horizon_plugin_pytorch.nn.intrinsic.folding import fold
from horizon_plugin_pytorch.nn.intrinsic.fused import FusedModule
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.pairing import OWN_CALL, fused_members

WEIGHT_FILE = "weight_comparison.txt"
_RECURRENT = re.compile(r"weight_(?P<part>ih|hh)(?:_(?P<step>l\d+(?:_reverse)?))?")  # in a cell without a step
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class WeightRow:
    """A weight of two models.

    Args:
        name: ``layer1.0.conv.weight``.
        similarity: of the float weight and the quantized one.
        atol: the largest difference.
    """

    name: str
    similarity: float
    atol: float


def compare_weights(
    float_model: nn.Module,
    qat_quantized_model: nn.Module,
    similarity_func: str | Callable[[Tensor, Tensor], Any] = "Cosine",
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike | None = None,
    out_dir: str | os.PathLike | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Compare the weights of a float model with those of its QAT or quantized form.

    The table is printed and written to ``weight_comparison.txt``. Weights of QAT models are those that are trained,
    before they are rounded; integer weights are compared as the real numbers that they stand for. Attention has one
    for each of its projections, which float models keep in one parameter; recurrent modules have two for each layer and
    direction, ``lstm.l0.ih.weight`` and ``lstm.l0.hh.weight``. Fuse the float model first (`fuse_fx`, `fuse_modules`),
    as batch norms change the weights that they are fused into.

    Args:
        float_model: a float model, fused as the other is.
        qat_quantized_model: a calibration, QAT or quantized model; nothing of either is changed.
        similarity_func: Cosine, MSE, L1, KL, SQNR, or a function of two tensors that gives a number.
        with_tensorboard: write histograms of both weights for tensorboard.
        tensorboard_dir: where to; None is ``runs/``.
        out_dir: the folder of the file; None is the current one.

    Returns:
        For each weight by its name ``{"float": weight, "quantized": weight}``.

    Raises:
        CheckError: both are one model, or have no weight in common.

    >>> import tempfile
    >>> from copy import deepcopy
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.Linear(4, 2))
    >>> qat = prepare_qat_fx(deepcopy(net), {"": get_default_qconfig()})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights = compare_weights(net, qat, out_dir=folder)
    +---------------+--------------+-----------+
    | Weight Name   | Similarity   | Atol      |
    |---------------+--------------+-----------|
    | module.weight | 1.0000000    | 0.0000000 |
    +---------------+--------------+-----------+
    >>> torch.equal(weights["module.weight"]["float"], net.module.weight)
    True
    """
    who = "compare_weights"
    require_module(float_model, who)
    require_module(qat_quantized_model, who)
    similarity = SimilarityFunction(similarity_func, who)
    pairs = weight_pairs(float_model, qat_quantized_model)
    rows = [
        WeightRow(name, similarity(pair["float"], pair["quantized"]), largest_difference(*pair.values()))
        for name, pair in pairs.items()
    ]
    body = [[row.name, f"{row.similarity:.7f}", f"{row.atol:.7f}"] for row in rows]
    text = Table(["Weight Name", "Similarity", "Atol"], body).text("psql")
    write_report(f"{text}\n", out_dir, WEIGHT_FILE, who)
    print(text)
    if with_tensorboard:
        with tensorboard_log(tensorboard_dir, who) as log:
            for name, pair in pairs.items():
                for kind, weight in pair.items():
                    log.add_histogram(f"{name}/{kind}", weight)
    return pairs


def weight_pairs(float_model: nn.Module, other: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Copies of both forms of each weight that both models have, in the order of the second."""
    return {
        pair.name: {
            kind: weight.detach().to("cpu", copy=True)
            for kind, weight in (("float", pair.first), ("quantized", pair.second))
        }
        for pair in paired_weights(float_model, other)
    }


@dataclass(frozen=True, eq=False)
class PairedWeight:
    """A weight in two models.

    Args:
        path, module: of the layer in the second model.
        first, second: real numbers; nobody may write to them.
        is_rounded: is the second one on its grid?
    """

    path: str
    name: str
    module: nn.Module
    first: Tensor
    second: Tensor
    is_rounded: bool


def paired_weights(float_model: nn.Module, other: nn.Module, tells: bool = True) -> Iterator[PairedWeight]:
    """Both forms of each weight that both models have, one after the other, in the order of the second.

    Args:
        tells: warn, at the end, of weights that are not compared.

    Raises:
        CheckError: both are one model, or have no weight in common.
    """
    if float_model is other:
        raise CheckError(
            "compare_weights: both arguments are one model, so all weights would be equal. Preparation and conversion "
            "may change the model that they are given: keep `copy.deepcopy(model)` from before."
        )
    mine, theirs = dict(_weighted_modules(float_model)), dict(_weighted_modules(other))
    unfused = set(_unfused(float_model, other))
    has_pairs = False
    shapes, shared, alone = [], [], []
    for path, module in theirs.items():
        partner = mine.get(path, mine.get(OWN_CALL.sub("", path)))
        if partner is None:
            alone.append(path)
            continue
        name = f"{path}.weight" if path else "weight"
        has_bn = _has_bn(module) and (path in unfused or _has_bn(partner))  # if only one has, its weight is folded
        unfused -= {path} if has_bn else set()
        first, second = _weight(partner, has_bn), _weight(module, has_bn)
        if first.shape != second.shape:
            shapes.append(name)
            continue
        if partner is module or _is_same_memory(first, second):
            shared.append(name)
        has_pairs = True
        layer = module.module if isinstance(module, _Packed) else module
        yield PairedWeight(path, name, layer, first.detach(), second.detach(), isinstance(layer, QuantizedModule))
    alone += [path for path in mine if path not in theirs and not _has_other_numbers(other, path)]
    if not has_pairs:
        raise CheckError(
            f"compare_weights: `{type(float_model).__name__}` and `{type(other).__name__}` have no weight in common. "
            "Give a float model, and the QAT or quantized model that was made of it; if layers are fused into an add, "
            "they have its name: fuse the float model too, with `fuse_fx` or `fuse_modules`."
        )
    if tells:
        _tell(alone, sorted(unfused), shapes, shared)


def _has_other_numbers(model: nn.Module, path: str) -> bool:
    """Is a module there and converted, but without a weight, as a batch norm on its own is?"""
    try:
        return isinstance(model.get_submodule(path), QuantizedModule)
    except AttributeError:
        return False


def _tell(alone: list[str], unfused: list[str], shapes: list[str], shared: list[str]) -> None:
    """Say which weights are not compared, or not as one would expect."""
    if shared:
        warn(
            f"compare_weights: both models hold the same memory for {listed(shared)}, so these are always equal. "
            "The one was made of the other: keep `copy.deepcopy(model)` from before.",
            QuantizationWarning,
        )
    if shapes:
        warn(
            f"compare_weights: {listed(shapes)} differ in shape between the models and are not compared: these are "
            "other layers. Give models that were made of one float model.",
            QuantizationWarning,
        )
    if alone or unfused:
        parts = (
            [f"the weights of {listed(alone)} have no partner in the other model and are not compared"] if alone else []
        )
        parts += [f"batch norms are folded into {listed(unfused)} in one model only"] if unfused else []
        warn(
            f"compare_weights: {'; '.join(parts)}. Fuse the float model as the other is, before you compare: "
            "`fuse_fx(model)`, or `fuse_modules` in eager mode.",
            QuantizationWarning,
        )


@dataclass(frozen=True, eq=False)
class _Packed:
    """A layer inside of attention or of a recurrent module, which has its weight; converted, it has its own.

    Args:
        module: the layer that rounds the weight; in float models the module around it.
    """

    module: nn.Module
    weight: Tensor


def _packed(path: str, module: nn.Module) -> Iterator[tuple[str, _Packed]]:
    """The layers inside of a module whose weights are its own parameters, by the paths that they have in QAT models."""
    for name, weight in (*_projections(module), *_recurrences(module)):
        is_float = name.partition(".")[0] not in module._modules
        layer = module if is_float else module.get_submodule(name)
        yield f"{path}.{name}" if path else name, _Packed(layer, weight)


def _projections(attention: nn.Module) -> Iterator[tuple[str, Tensor]]:
    weight, size = attention._parameters.get("in_proj_weight"), getattr(attention, "embed_dim", None)
    if isinstance(weight, Tensor) and size is not None and weight.shape[0] == 3 * size:
        yield from zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3), strict=True)


def _recurrences(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in module._parameters.items():
        parsed = _RECURRENT.fullmatch(name)
        if parsed and isinstance(weight, Tensor):
            yield f"{parsed['step'] or 'step'}.{parsed['part']}", weight


def _weighted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module | _Packed]]:
    """Modules that have a weight, by path: of a fused module the layer's weight is its own."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        if isinstance(module, (FusedModule, QATGemm)):
            inside = (*inside, f"{path}." if path else "")
        if isinstance(module, FusedModule) or _has_weight(module):
            yield path, module
        yield from _packed(path, module)


def _has_weight(module: nn.Module) -> bool:
    stored = module._parameters.get("weight"), module._buffers.get("weight")
    is_computed = "parametrizations" in module._modules and hasattr(module.parametrizations, "weight")
    return is_computed or any(isinstance(x, Tensor) for x in stored)


def _has_bn(module: nn.Module | _Packed) -> TypeGuard[FusedModule | QATGemm]:
    return isinstance(module, (FusedModule, QATGemm)) and module.form.has_bn


@torch.no_grad()
def _weight(module: nn.Module | _Packed, has_bn: bool) -> Tensor:
    """A weight in real numbers; with the batch norm that belongs to it, unless the partner's has one too."""
    if isinstance(module, _Packed):
        return module.weight
    if isinstance(module, QuantizedModule):
        stored = module._buffers["weight"]
        assert stored is not None
        return stored if stored.is_floating_point() else module.real_weight()
    if _has_bn(module) and not has_bn:
        return module.deployed()[0] if isinstance(module, QATGemm) else fold(module.conv, module.bn)[0]
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.dequantize() if weight.is_quantized else weight


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _unfused(float_model: nn.Module, other: nn.Module) -> Iterator[str]:
    """Layers of the other model with a batch norm folded into them that is a module of its own in the float model."""
    mine = dict(float_model.named_modules())
    for path, members in fused_members(other).items():
        if any(isinstance(mine.get(member), _BATCH_NORMS) for member in members) and path in mine:
            yield path


show_at("utils.quant_profiler", compare_weights)
