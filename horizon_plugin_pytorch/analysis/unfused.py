"""Chains of modules that could be one module, in float models and in prepared ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.calls import CallRow, Recording, record_calls
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import HorizonError, require_module
from horizon_plugin_pytorch.nn.intrinsic.fused import FusedModule
from horizon_plugin_pytorch.nn.qat.batchnorm import QATBatchNorm
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.relu import ReLU
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.passes.fusion_rules import FUSION_RULES, Role, can_fold, fits_layer, role_of
from horizon_plugin_pytorch.tables import Table

ALL_FUSED = "All fusable modules are fused in model!"
_RULES = {rule.roles for rule in FUSION_RULES}


@dataclass(frozen=True)
class Member:
    """A module of a pattern that could be fused."""

    name: str
    type: type


def check_unfused_operations(model: nn.Module, example_inputs: Any, print_tabulate: bool = True) -> list[list[str]]:
    """Find modules of a float model that could be one module and are not, by running it.

    That is for eager mode, where the user fuses: `prepare` and `prepare_qat_fx` fuse all that can be. Whether a fusion
    computes what its members did, `featuremap_similarity` of the models before and after it says.

    Args:
        model: a float model, some of whose modules may be fused.
        example_inputs: the model's arguments, as `prepare` takes them.
        print_tabulate: print a table for each pattern.

    Returns:
        The names of the modules of each pattern, short patterns first; `(shared)` after those that run several times.

    Raises:
        CheckError: when the model fails on these inputs.

    >>> import torch
    >>> found = check_unfused_operations(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), torch.ones(1, 1, 2, 2))
    name    type
    ------  ------------------------------------------
    0       <class 'torch.nn.modules.conv.Conv2d'>
    1       <class 'torch.nn.modules.activation.ReLU'>
    >>> found
    [['0', '1']]
    """
    require_module(model, "check_unfused_operations", "a float model")
    if any(isinstance(m, (QATModule, QuantizedModule)) for m in model.modules()):
        raise HorizonError(
            f"check_unfused_operations takes a float model, and `{type(model).__name__}` is prepared or converted: "
            "`check_qat_model` says of a prepared one what could be fused."
        )
    recording = record_calls(model, example_inputs)
    recording.require_end("check_unfused_operations")
    patterns = sorted(unfused_patterns(recording), key=len)
    if print_tabulate:
        print(patterns_text(patterns))
    return [[member.name for member in members] for members in patterns]


def patterns_text(patterns: Sequence[Sequence[Member]]) -> str:
    """A table for each pattern."""
    if not patterns:
        return ALL_FUSED
    return "\n\n".join(Table(["name", "type"], [[m.name, str(m.type)] for m in members]).text() for members in patterns)


def unfused_patterns(recording: Recording) -> Iterator[tuple[Member, ...]]:
    """Chains of modules that could be one module, by the rules of fusion, each as long as it can be, and told once."""
    taken: set[int] = set()
    told: set[tuple[Member, ...]] = set()
    counts = recording.counts
    for start in recording.calls:
        roles = _roles(start)
        if roles[:1] != (Role.LAYER,):
            continue
        chain = [start]
        while recording.uses.get(chain[-1].index) == 1:
            after = recording.next_call(chain[-1])
            if after is None or after.index in taken:
                break
            more = _roles(after)
            if not more or (*roles, *more) not in _RULES or not _fits(start.module, after):
                break
            roles = (*roles, *more)
            chain.append(after)
        if len(chain) > 1:
            taken.update(call.index for call in chain)
            members = tuple(Member(c.path + ("(shared)" if counts[c.path] > 1 else ""), type(c.module)) for c in chain)
            if members not in told:  # of a chain that runs several times
                told.add(members)
                yield members


def _roles(call: CallRow) -> tuple[Role, ...]:
    """The parts that a call plays in fusion; several for a module that is fused already."""
    module = call.module
    if isinstance(module, (QATGemm, FusedModule)):
        form = module.form
        rest = ((Role.BN, form.has_bn), (Role.ADD, form.has_add), (Role.RELU, form.relu is not None))
        return (Role.LAYER, *(role for role, has in rest if has))
    if isinstance(module, QATBatchNorm):
        return (Role.BN,)
    if isinstance(module, ReLU):
        return (Role.RELU,)
    role = Role.ADD if isinstance(module, FloatFunctional) else role_of(module)
    if role is not Role.ADD:
        return () if role is None else (role,)
    is_sum = call.method == "add" and len(call.inputs) == 2 and call.inputs[0].producer != call.inputs[1].producer
    return (Role.ADD,) if is_sum else ()


def _fits(layer: nn.Module, call: CallRow) -> bool:
    """Can a batch normalisation be folded into the layer? Other calls fit."""
    if isinstance(call.module, QATBatchNorm):
        return isinstance(layer, QATGemm) and fits_layer(layer.float_class, layer, call.module)
    return role_of(call.module) is not Role.BN or can_fold(layer, call.module)


show_at("utils.quant_profiler", check_unfused_operations)
