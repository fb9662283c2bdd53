"""How much the rounding of each site moves the outputs, for all sites at once.

A vector of random signs on the outputs has a gradient at every site; its product with the site's rounding error is, in
expectation over the signs, as large as what that error does to the outputs (to first order). One forward and a few
backwards thus stand for a forward per site. No labels are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, real_outputs, run
from horizon_plugin_pytorch.analysis.tuning.shrinkage import shrunk
from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, RoundingModel, Site
from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.rounding import clamped
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.runtime.results import own_tensors

Tell = Callable[[], None]


class Estimate(NamedTuple):
    """The squared relative error that a site gives alone, in its present format, and in int16."""

    error: float
    wide: float


def probe(
    mixed: RoundingModel,
    batches: Sequence[Any],
    wanted: Wanted,
    draws: int = 2,
    seed: int = 0,
    tell: Tell = lambda: None,
) -> dict[Site, Estimate]:
    """An estimate of the squared relative error that the rounding of each site alone gives.

    Sites that the estimate cannot see (no gradient reaches them, or their weight is no layer's) are left out.

    Args:
        batches: the data; a batch is a sample more for every row of its first axis.
        wanted: what the float model gives on them.
        draws: vectors of signs for each batch; two are enough to find the sites that matter.
        tell: called after each batch.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[Site, Estimate] = {}
    with mixed.in_float() as model, frozen(model):
        for batch, outputs in zip(batches, wanted.outputs, strict=True):
            samples = max(1, *(x.shape[0] if x.dim() else 1 for x in outputs))
            listener = _Listener(mixed, samples)
            with listener, torch.enable_grad():
                given = real_outputs(run_batch(model, own_tensors(batch)))
            counted = [(x, w) for x, w in zip(given, wanted.weights, strict=True) if w and x.requires_grad]
            for site, new in listener.squares(counted, draws, generator, is_last=True).items():
                before = found.get(site, Estimate(0.0, 0.0))
                found[site] = Estimate(before.error + new.error, before.wide + new.wide)
            tell()
    return found


def probe_each(
    mixed: RoundingModel,
    run: Callable[[nn.Module], Mapping[str, Tensor]],
    samples: int,
    draws: Callable[[int], int],
    seed: int = 0,
) -> Iterator[tuple[str, dict[Site, float]]]:
    """As `probe`, for each output by itself, in one forward for all: its mean squared error.

    Args:
        run: runs the model on a batch, and gives the outputs that are asked for, with their gradients.
        samples: how many there are in the batch.
        draws: how many vectors of signs for each output, by the number of outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    listener = _Listener(mixed, samples)
    with mixed.in_float() as model, frozen(model):
        with listener, torch.enable_grad():
            outputs = run(model)
        count = draws(len(outputs))
        for name, x in outputs.items():
            counted = [(x, max(x.numel(), 1) ** -0.5)]
            sums = listener.draw(counted, generator)
            for _ in range(count - 1):
                for site, new in listener.draw(counted, generator).items():
                    sums[site] = sums[site] + new if site in sums else new
            wholes, parts = ([float(of[i]) / count for of in sums.values()] for i in (0, 2))
            values = shrunk(wholes, parts, [site.kind for site in sums], listener.most_rows * count)
            yield name, dict(zip(sums, values, strict=True))


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """+1 or -1 for every number of a tensor."""
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return bits.to(like).mul_(2).sub_(1)


class frozen:  # noqa: N801
    """The parameters of a model want no gradients, in here: only those at the sites are needed."""

    def __init__(self, model: nn.Module) -> None:
        self._learning = [p for p in model.parameters() if p.requires_grad]

    def __enter__(self) -> None:
        for parameter in self._learning:
            parameter.requires_grad_(False)

    def __exit__(self, *exception: Any) -> None:
        for parameter in self._learning:
            parameter.requires_grad_(True)


class _Listener:
    """Hooks on the sites of a model while it runs: rounding errors on the way forward, products on the way back.

    Args:
        samples: how many there are in the batch; they do not depend on each other, so each counts by itself.
    """

    def __init__(self, mixed: RoundingModel, samples: int) -> None:
        self.samples, self.mixed = samples, mixed
        self.products: dict[Site, Tensor] = {}
        self.parts: dict[Site, Tensor] = {}
        self.most_rows = 1
        self._hooks = ExitStack()
        self._pending: dict[int, tuple[Site, Tensor]] = {}  # by quantizer: what its layer's weight does to its input
        for site in mixed.sites:
            for path, quantizer in mixed.at(site).items():
                owner = mixed.model.get_submodule(path.rpartition(".")[0])
                if site.kind == ACTIVATION:
                    hook = partial(self._activation, site, mixed.wide(path))
                    self._add(quantizer.register_forward_pre_hook(hook, with_kwargs=True))
                elif isinstance(owner, QATGemm):
                    self._add(owner.register_forward_pre_hook(partial(self._layer, site)))
                    if owner.activation_post_process is None:
                        self._add(owner.register_forward_hook(self._result))
                    else:
                        result = owner.activation_post_process
                        self._add(
                            result.register_forward_pre_hook(self._before_rounding, with_kwargs=True, prepend=True)
                        )

    def _add(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()

    def squares(
        self, outputs: Sequence[tuple[Tensor, float]], draws: int, generator: torch.Generator, is_last: bool
    ) -> dict[Site, Estimate]:
        """The mean over draws of the squared products at each site.

        Args:
            outputs: with what each counts.
            is_last: is the graph not needed any more?
        """
        total: dict[Site, Tensor] = {}
        for draw in range(draws if outputs else 0):
            for site, sums in self.draw(outputs, generator, not is_last or draw < draws - 1).items():
                total[site] = total.get(site, torch.zeros(3)) + sums / draws
        return {site: Estimate(*sums[:2].tolist()) for site, sums in total.items()}

    def draw(
        self, outputs: Sequence[tuple[Tensor, float]], generator: torch.Generator, keeps_graph: bool = True
    ) -> dict[Site, Tensor]:
        """One backward: the squared products at each site, those in int16, and the squares of the products' parts."""
        self.products.clear()
        self.parts.clear()
        signs = [random_signs(x, generator) * w for x, w in outputs]
        torch.autograd.backward([x for x, _ in outputs], signs, retain_graph=keeps_graph)
        return {
            site: torch.cat([products.double().square().sum(1), self.parts[site][None]])
            for site, products in self.products.items()
        }

    def _activation(
        self, site: Site, wide: FakeQuantize | None, quantizer: FakeQuantize, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        x, *rest = args
        x = tracked(x)
        limits = rest[0] if rest else kwargs.get("limits", NO_LIMITS)
        is_limited = limits != NO_LIMITS and not quantizer.is_quantizing
        given = _limited(x, limits) if is_limited else x
        with torch.no_grad():
            values = x.detach()
            plain = given.detach() if is_limited or limits == NO_LIMITS else clamped(values, limits, owned=False)
            errors = [one.round(values, limits).sub_(plain) for one in (quantizer, wide) if one is not None]
        self._listen(x, site, *errors)
        if not is_limited:
            return (x, *rest), kwargs
        return (given, NO_LIMITS, *rest[1:]), {name: value for name, value in kwargs.items() if name != "limits"}

    @torch.no_grad()
    def _layer(self, site: Site, layer: QATGemm, args: tuple) -> None:
        """What rounding a layer's weight does to its result; a hook on that adds the gradient."""
        x = real(args[0]).detach()
        result = layer.activation_post_process
        is_clamped = result is None and layer.limits != NO_LIMITS and len(args) < 2
        if type(layer).layer is QATGemm.layer and not is_clamped:  # linear in its weight
            error = layer.weight_fake_quant.round_weight(layer.weight).sub_(layer.weight)
            self._pending[id(layer if result is None else result)] = (site, layer.product(x, error, None))
            return
        quantizer = layer.weight_fake_quant
        plain = layer.layer(x)
        quantizer.enable_fake_quant()
        try:
            rounded = layer.layer(x)
        finally:
            quantizer.disable_fake_quant()
        if is_clamped:
            plain, rounded = plain.clamp(*layer.limits), rounded.clamp(*layer.limits)
        self._pending[id(layer if result is None else result)] = (site, rounded - plain)

    def _before_rounding(self, quantizer: FakeQuantize, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = tracked(args[0])
        self._meet(quantizer, x)
        return (x, *args[1:]), kwargs

    def _result(self, layer: QATGemm, args: tuple, out: Any) -> Any:
        x = tracked(out)
        self._meet(layer, x)
        return x

    def _meet(self, module: nn.Module, x: Tensor) -> None:
        pending = self._pending.pop(id(module), None)
        if pending is not None and pending[1].shape == x.shape:
            self._listen(x, *pending)

    def _listen(self, x: Tensor, site: Site, error: Tensor, wide: Tensor | None = None) -> None:
        """Add the products of a gradient that will come with an error, and with that in int16, sample by sample.

        Weights are never clipped, so theirs in int16 is that of the smaller step.
        """
        ratio = self.mixed.step_ratio(site)

        def add(gradient: Tensor) -> None:
            gradient = gradient.as_subclass(Tensor)
            by_channel = self._by_channel(gradient, error)
            self.parts[site] = self.parts.get(site, 0) + by_channel.double().square().sum()
            first = by_channel.sum(1)
            sums = torch.stack([first, first * ratio if wide is None else self._by_sample(gradient, wide)])
            before = self.products.get(site)
            if before is not None and before.shape != sums.shape:
                before, sums = before.sum(1, keepdim=True), sums.sum(1, keepdim=True)
            self.products[site] = sums if before is None else before + sums

        x.register_hook(add)

    def _by_sample(self, gradient: Tensor, error: Tensor) -> Tensor:
        shape = (self._rows(gradient), -1)
        return torch.linalg.vecdot(gradient.reshape(shape), error.reshape(shape))

    def _by_channel(self, gradient: Tensor, error: Tensor) -> Tensor:
        """The products of each sample in parts: by channel of images, by feature of sequences."""
        rows = self._rows(gradient)
        self.most_rows = max(rows, self.most_rows)
        if gradient.dim() > 3 and gradient.shape[0] == rows:
            return torch.linalg.vecdot(gradient.flatten(2), error.flatten(2))
        if gradient.dim() > 3:
            products = (gradient * error).reshape(rows, -1, gradient.shape[1], gradient[0, 0].numel())
            return products.sum((1, 3))
        if gradient.dim() > 1:
            shape = (rows, -1, gradient.shape[-1])
            return torch.linalg.vecdot(gradient.reshape(shape), error.reshape(shape), dim=1)
        return self._by_sample(gradient, error)[:, None]

    def _rows(self, gradient: Tensor) -> int:
        """The samples that a tensor can be split into."""
        return self.samples if gradient.dim() > 0 and gradient.shape[0] % self.samples == 0 else 1


def _limited(x: Tensor, limits: tuple[float, float]) -> Tensor:
    """Values inside of limits, as `clamp` gives them, whose backward takes several times as long."""
    if limits == (0.0, math.inf):
        return torch.relu(x)
    return F.hardtanh(x, *limits) if all(map(math.isfinite, limits)) else x.clamp(*limits)


def tracked(x: Tensor) -> Tensor:
    """A tensor that gradients reach."""
    x = x.as_subclass(Tensor)
    return x if x.requires_grad else x.detach().requires_grad_()


def measure(mixed: RoundingModel, site: Site, batches: Sequence[Any], wanted: Wanted) -> Tensor:
    """How far the outputs are off with the rounding of one site and no other: the documented sensitivity, a vector."""
    with mixed.rounding_only(site) as model:
        return wanted.difference(run(model, batches))
