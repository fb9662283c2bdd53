"""Channels of layer norms moved around zero; the biases of the layers that read them give back what that takes away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process
from horizon_plugin_pytorch.calibration.called_modules import CalledModules, found_in_all
from horizon_plugin_pytorch.calibration.float_rewrite import CHANGES, FloatRewrite, Outputs, told_left
from horizon_plugin_pytorch.calibration.norm_readers import (
    NORMS,
    SHARED,
    add_others,
    is_self_attention,
    moves,
    refusal,
)
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.errors import CalibrationWarning, warn
from horizon_plugin_pytorch.passes.inplace import call_name
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch import ModuleWatch, OperatorCall

_ADDS = {"add", "add_", "iadd", "__add__", "__radd__", "__iadd__"}


@dataclass(frozen=True)
class CenteredNorm:
    """What was done to one norm.

    Args:
        norm: its path.
        readers: paths of the layers that read its result.
        added: paths of the layers whose results are added to it.
        before, after: the largest magnitude of its result.
    """

    norm: str
    readers: tuple[str, ...]
    added: tuple[str, ...]
    before: float
    after: float


@dataclass
class CenteringResult:
    """What `center_norms` did; printing it gives a table.

    Args:
        norms: those that were changed.
        change: relative change (L2) of the model's outputs, which comes from rounding.
        left: why the other norms stay as they are, by path.
    """

    norms: list[CenteredNorm] = field(default_factory=list)
    change: float = 0.0
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [
            [n.norm, ", ".join(n.readers), ", ".join(n.added), f"{n.before:.4g}", f"{n.after:.4g}"] for n in self.norms
        ]
        table = Table(["norm", "read by", "added to", "largest before", "after"], rows).text()
        return f"{table}\nThe outputs changed by {self.change:.2g} of their size.{told_left(self.left)}"


@torch.no_grad()
def center_norms(
    model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None
) -> CenteringResult:
    """Move the channels that layer norms give around zero, without changing what a float model computes.

    A scale is for a range around zero, and the large channels of layer norms are often on one side of it: a channel
    from -1 to 28 needs twice the range of one from -14.5 to 14.5. The middle of each channel in the data is taken from
    the norm's bias; the linear layers that read the result get it back in their biases, multiplied by their weights,
    and so do those whose results are added to it. So it is for norms before attention and feed-forward parts (ViT,
    Swin, GPT) and for those after them (BERT), and no operator is added. Where anything else reads a norm's result, or
    a layer has no bias, the norm stays as it is, and the result says why. Each norm is tried before anything is
    changed, and left as it is, with a warning, if the outputs would not be the same.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Raises:
        CalibrationError: data or outputs are not finite, or rounding alone changes the outputs much; the model stays
            as it was.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> _ = net[0].bias.data[1].add_(50)
    >>> x = torch.randn(8, 4)
    >>> before = net(x)
    >>> found = center_norms(net, [x]).norms[0]
    >>> found.before > 40, found.after < 4, torch.allclose(net(x), before, atol=1e-4)
    (True, True, True)
    """
    same = FloatRewrite(model, batches, batch_process_func, "center_norms")
    left: dict[str, str] = {}
    graphs, modules = same.graphs(), same.modules
    norms = found_in_all(model, graphs, modules, lambda called: _norms(called, left))
    add_others(model, graphs, modules, [norm.path for norm in norms], left)
    ranges, wanted = _measured(same, norms)

    def move(trial: nn.Module, norm: _Norm, generator: torch.Generator) -> None:
        low, high = ranges[norm]
        signs = torch.randint(0, 2, low.shape, generator=generator).mul_(2).sub_(1).to(low)
        norm.shift(trial, signs * (high - low) / 2)

    for norm in same.unsound([norm for norm in norms if norm in ranges], move, wanted):
        ranges.pop(norm)
        left[norm.path] = CHANGES
        warn(
            f"center_norms: `{norm.path}` stays as it is: with its channels moved the model does not compute the same. "
            "Something else reads its result, or numbers are too coarse for it: do it in float32.",
            CalibrationWarning,
        )
    centered = copy_model(model, "center_norms")
    rows = []
    for norm, (low, high) in ranges.items():
        norm.shift(centered, (low + high) / 2)
        before, after = torch.maximum(low.abs(), high.abs()).max(), ((high - low) / 2).max()
        rows.append(CenteredNorm(norm.path, norm.readers, norm.added, float(before), float(after)))
    return CenteringResult(rows, same.finish(centered, wanted), left)


@dataclass(frozen=True)
class _Norm:
    """A norm, the layers that read its result and those that are added to it, by their paths."""

    path: str
    readers: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def modules(self) -> set[str]:
        return {self.path, *self.readers, *self.added}

    def shift(self, model: nn.Module, by: Tensor) -> None:
        """Take a number from each channel, and give it back where it is read."""
        norm: Any = model.get_submodule(self.path)
        norm.bias.sub_(by)
        for path in self.readers:
            weight, bias = _reading(model.get_submodule(path))
            bias.add_((weight.double() @ by.double()).to(bias))
        for path in self.added:
            _giving(model.get_submodule(path)).add_(by)


def _reading(layer: Any) -> tuple[Tensor, Any]:
    """The weight and the bias of what a layer does to its input."""
    if type(layer) is nn.MultiheadAttention:
        return layer.in_proj_weight, layer.in_proj_bias
    return layer.weight, layer.bias


def _giving(layer: Any) -> Any:
    """The bias of what a layer gives."""
    return layer.out_proj.bias if type(layer) is nn.MultiheadAttention else layer.bias


def _measured(same: FloatRewrite, norms: Sequence[_Norm]) -> tuple[dict[_Norm, tuple[Tensor, Tensor]], Outputs]:
    """The ends of each channel of the norms, and the model's outputs."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def measure(call: OperatorCall) -> None:
        rows = call.output.detach().reshape(-1, call.output.shape[-1])
        if not len(rows):  # a batch without samples
            return
        low, high = rows.amin(0), rows.amax(0)
        same.require_finite(high - low, call.path)
        known = found.get(call.path, (low, high))
        found[call.path] = (torch.minimum(low, known[0]), torch.maximum(high, known[1]))

    with ModuleWatch({norm.path: same.copied.get_submodule(norm.path) for norm in norms}, after=measure):
        outputs = list(same.outputs(same.copied))
    return {norm: found[norm.path] for norm in norms if norm.path in found}, outputs


def _norms(called: CalledModules, left: dict[str, str]) -> Iterator[_Norm]:
    """The norms of a graph that can be moved; why others cannot comes into `left`."""
    for node in called.graph.nodes:
        norm = called.at(node)
        if not isinstance(norm, NORMS):
            continue
        readers: dict[str, None] = {}
        added: dict[str, None] = {}
        if type(norm) is not nn.LayerNorm or norm.bias is None or norm.bias.dim() != 1:
            why = f"{type(norm).__name__} has no bias by channel that is known to be added at last"
        else:
            why = _refusal(node, called, readers, added) if called.is_own(norm) else SHARED
        if why:
            left.setdefault(str(node.target), why)
        else:
            yield _Norm(str(node.target), tuple(readers), tuple(added))


def _refusal(norm: fx.Node, called: CalledModules, readers: dict[str, None], added: dict[str, None]) -> str:
    """Who reads a result and cannot give back what is taken from it; the layers that can are noted."""
    channels = called.at(norm).bias.numel()

    def takes(user: fx.Node, source: fx.Node) -> bool:
        if _reads(user, source, called, channels):
            readers[str(user.target)] = None
        elif (giver := _giver(user, source, called, channels)) is not None:
            added[giver] = None
        else:
            return False
        return True

    return refusal(norm, called, takes)


def _reads(user: fx.Node, source: fx.Node, called: CalledModules, channels: int) -> bool:
    """Is it a layer that reads all channels of the result, and nobody else's?"""
    layer = called.at(user)
    if type(layer) not in (nn.Linear, nn.MultiheadAttention) or not called.is_own(layer):
        return False
    if type(layer) is nn.MultiheadAttention and not is_self_attention(user, source):
        return False
    weight, bias = _reading(layer)
    return weight is not None and bias is not None and weight.shape[1] == channels


def _giver(add: fx.Node, source: fx.Node, called: CalledModules, channels: int) -> str | None:
    """The layer whose result is added to that of a norm, if nothing else reads it on the way."""
    if add.op == "call_module" or call_name(add) not in _ADDS or add.kwargs:
        return None
    others = [arg for arg in add.args if arg is not source and isinstance(arg, fx.Node) and arg.op != "get_attr"]
    if len(others) != 1:
        return None
    node = others[0]
    while moves(node, called) and len(node.users) == 1 and node.all_input_nodes:
        if call_name(node) == "getitem" and node.args[1] != 0:  # of attention, the first is the result
            return None
        node = node.all_input_nodes[0]
    layer = called.at(node)
    bias = _giving(layer) if type(layer) in (nn.Linear, nn.MultiheadAttention) else None
    if bias is None or bias.numel() != channels or len(node.users) != 1:
        return None
    before, after = notes(source).shape, notes(add).shape
    has_channels = before is not None and after is not None and before[-1:] == after[-1:]
    return str(node.target) if has_channels and called.is_own(layer) else None
