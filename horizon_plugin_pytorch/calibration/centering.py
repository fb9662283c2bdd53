"""Channels of layer norms moved around zero; the biases of the layers that read them give back what that takes away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process
from horizon_plugin_pytorch.calibration.channel_pairs import WeightReaders, result_shape
from horizon_plugin_pytorch.calibration.float_rewrite import FloatRewrite, Outputs
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.errors import CalibrationWarning, warn
from horizon_plugin_pytorch.passes.inplace import asks_only, call_name
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.torch_functions import SAME_MEMORY, SAME_MEMORY_MODULES
from horizon_plugin_pytorch.watch import ModuleWatch, OperatorCall

_MOVING = SAME_MEMORY | {"clone", "roll"}  # not `pad`: a zero that is added is no channel's middle
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
    """

    norms: list[CenteredNorm] = field(default_factory=list)
    change: float = 0.0

    def __str__(self) -> str:
        rows = [
            [n.norm, ", ".join(n.readers), ", ".join(n.added), f"{n.before:.4g}", f"{n.after:.4g}"] for n in self.norms
        ]
        table = Table(["norm", "read by", "added to", "largest before", "after"], rows).text()
        return f"{table}\nThe outputs changed by {self.change:.2g} of their size."


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
    a layer has no bias, the norm stays as it is. Each norm is tried before anything is changed, and left as it is, with
    a warning, if the outputs would not be the same.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Raises:
        CalibrationError: data or outputs are not finite, or the outputs hang on rounding; the model stays as it was.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> _ = net[0].bias.data[1].add_(50)
    >>> x = torch.randn(8, 4)
    >>> before = net(x)
    >>> found = center_norms(net, [x]).norms[0]
    >>> found.before > 40, found.after < 4, torch.allclose(net(x), before, atol=1e-4)
    (True, True, True)
    """
    same = FloatRewrite(model, batches, batch_process_func, "center_norms")
    norms = _find(model, same.graphs())
    ranges, wanted = _measured(same, norms)

    def move(trial: nn.Module, norm: _Norm, generator: torch.Generator) -> None:
        low, high = ranges[norm]
        signs = torch.randint(0, 2, low.shape, generator=generator).mul_(2).sub_(1).to(low)
        norm.shift(trial, signs * (high - low) / 2)

    for norm in same.unsound([norm for norm in norms if norm in ranges], move, wanted):
        ranges.pop(norm)
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
    return CenteringResult(rows, same.finish(centered, wanted))


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
            bias.add_(weight @ by)
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
        rows = call.output.detach().flatten(0, -2)
        low, high = rows.amin(0), rows.amax(0)
        same.require_finite(high - low, call.path)
        known = found.get(call.path, (low, high))
        found[call.path] = (torch.minimum(low, known[0]), torch.maximum(high, known[1]))

    with ModuleWatch({norm.path: same.copied.get_submodule(norm.path) for norm in norms}, after=measure):
        outputs = list(same.outputs(same.copied))
    return {norm: found[norm.path] for norm in norms if norm.path in found}, outputs


def _find(model: nn.Module, graphs: Sequence[fx.Graph]) -> list[_Norm]:
    """Norms that can be moved in each of the graphs that call any of their modules."""
    readers = WeightReaders(model, graphs)
    found = [list(_Places(model, graph, readers).norms()) for graph in graphs]
    called = [{str(n.target) for n in graph.nodes if n.op == "call_module"} for graph in graphs]
    return [
        norm
        for norm in dict.fromkeys(norm for norms in found for norm in norms)
        if all(norm in norms or not norm.modules & paths for norms, paths in zip(found, called, strict=True))
    ]


class _Places:
    """Where the results of norms go in a graph."""

    def __init__(self, model: nn.Module, graph: fx.Graph, readers: WeightReaders) -> None:
        self._graph, self._readers = graph, readers
        self._modules: Mapping[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self._calls: dict[int, int] = {}
        for node in graph.nodes:
            if (module := self._module(node)) is not None:
                self._calls[id(module)] = self._calls.get(id(module), 0) + 1

    def norms(self) -> Iterator[_Norm]:
        for node in self._graph.nodes:
            norm = self._module(node)
            is_plain = type(norm) is nn.LayerNorm and norm.bias is not None and norm.bias.dim() == 1
            found = self._readers_of(node) if is_plain and self._is_own(norm) else None
            if found is not None:
                yield _Norm(str(node.target), *found)

    def _module(self, node: fx.Node) -> Any:
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def _is_own(self, module: nn.Module) -> bool:
        """Is a module called once, and does nobody else read its parameters?"""
        return self._calls.get(id(module)) == 1 and all(self._readers.is_alone(part) for part in module.modules())

    def _readers_of(self, norm: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The layers that read a result, and those that it is added to; None if anything else reads it."""
        readers: dict[str, None] = {}
        added: dict[str, None] = {}
        pending, seen = [norm], {norm}
        while pending:
            node = pending.pop()
            if not node.users:
                return None
            for user in node.users:
                if self._reads(user, node):
                    readers[str(user.target)] = None
                elif (giver := self._giver(user, node)) is not None:
                    added[giver] = None
                elif self._moves(user) and _keeps_channels(user, node):
                    if user not in seen:
                        seen.add(user)
                        pending.append(user)
                elif not asks_only(user):
                    return None
        return tuple(readers), tuple(added)

    def _moves(self, node: fx.Node) -> bool:
        module = self._module(node)
        return isinstance(module, SAME_MEMORY_MODULES) if module is not None else call_name(node) in _MOVING

    def _reads(self, user: fx.Node, source: fx.Node) -> bool:
        """Is it a layer that reads the result, and nobody else's?"""
        module = self._module(user)
        if type(module) is nn.MultiheadAttention:
            given = dict(zip(("query", "key", "value"), user.args, strict=False)) | user.kwargs
            is_self = all(given.get(name) is source for name in ("query", "key", "value"))
            return is_self and module.in_proj_bias is not None and module.in_proj_weight is not None
        return type(module) is nn.Linear and module.bias is not None and self._is_own(module)

    def _giver(self, add: fx.Node, source: fx.Node) -> str | None:
        """The layer whose result is added to that of a norm, if nothing else reads it on the way."""
        if add.op == "call_module" or call_name(add) not in _ADDS or add.kwargs:
            return None
        others = [arg for arg in add.args if arg is not source and isinstance(arg, fx.Node) and arg.op != "get_attr"]
        if len(others) != 1:
            return None
        node = others[0]
        while self._moves(node) and len(node.users) == 1 and node.all_input_nodes:
            if call_name(node) == "getitem" and node.args[1] != 0:  # of attention, the first is the result
                return None
            node = node.all_input_nodes[0]
        layer = self._module(node)
        is_layer = type(layer) in (nn.Linear, nn.MultiheadAttention) and _giving(layer) is not None
        before, after = result_shape(source), result_shape(add)
        has_channels = before is not None and after is not None and before[-1:] == after[-1:]
        return str(node.target) if is_layer and has_channels and len(node.users) == 1 and self._is_own(layer) else None


def _keeps_channels(node: fx.Node, source: fx.Node) -> bool:
    """Is the last axis still there? Whether it has the same channels is seen when the norm is tried."""
    before, after = result_shape(source), result_shape(node)
    return after is None or before is None or (bool(after) and after[-1] == before[-1])
