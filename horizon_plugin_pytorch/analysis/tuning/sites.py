"""One prepared model in every mixture of int8 and int16: the places whose format can be chosen, and their switches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.route import written_route
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.located import PlacedModule

ACTIVATION, WEIGHT = "activation", "weight"
_FINER = 256.0  # steps of int16 in one of int8


@dataclass(frozen=True, order=True)
class Site:
    """What has a format of its own: the result of an operator, or its weight.

    Args:
        operator: the path of the operator's module.
        kind: ``"activation"`` or ``"weight"``.
    """

    operator: str
    kind: str

    def __str__(self) -> str:
        return self.operator if self.kind == ACTIVATION else f"{self.operator} (weight)"


class RoundingModel:
    """A calibrated model in the formats that it has, with the sites of which something is asked.

    Args:
        quantizers: the paths of the fake quantizers of each site, in the model's order.
    """

    def __init__(self, model: nn.Module, quantizers: Mapping[Site, tuple[str, ...]]) -> None:
        self.model, self.quantizers = model, dict(quantizers)

    @property
    def sites(self) -> list[Site]:
        """In the order of the model's modules."""
        return list(self.quantizers)

    def _set(self, state: FakeQuantState) -> None:
        """A state for all. Integer forms are kept, which `set_fake_quantize` would make anew for every mixture."""
        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, (FakeQuantize, DynamicFakeQuantize)):
                module.set_state(state)

    @contextmanager
    def in_float(self) -> Iterator[nn.Module]:
        """The model without any rounding, in here; afterwards it is in the VALIDATION state."""
        self._set(FakeQuantState._FLOAT)
        try:
            yield self.model
        finally:
            self._set(FakeQuantState.VALIDATION)

    @contextmanager
    def rounding_only(self, site: Site) -> Iterator[nn.Module]:
        """The model with the rounding of one site, in its present format, and no other."""
        with self.in_float() as model, written_route():
            for quantizer in self.at(site).values():
                quantizer.enable_fake_quant()
            yield model

    def at(self, site: Site) -> dict[str, FakeQuantize]:
        """The fake quantizers of a site as they are now, by path."""
        return {path: self.model.get_submodule(path) for path in self.quantizers[site]}  # type: ignore[misc]

    def wide(self, path: str) -> FakeQuantize | None:
        """The int16 form of the fake quantizer at a path, if there is one to choose."""
        return None

    def step_ratio(self, site: Site) -> float:
        """How large the scale of a site in int16 is in steps of its present format."""
        return 1.0


class MixedModel(RoundingModel):
    """A calibrated int8 model whose sites can be given the formats of a calibrated int16 one, and taken them again.

    Ranges are observed on float values, so a mixture has the scales that it would have if it were prepared and
    calibrated by itself: it runs to the same integers.

    The int16 model may have QuantStubs that make int8 of a result for those who take no other; where the result is int8
    itself they pass it on, as a mixture would have none there. And it may lack a part that brings a wide result to
    int8, as a GRU does for its state: a mixture has the part where the operator is int8.

    Args:
        narrow: prepared and calibrated in int8.
        wide: the same model, prepared and calibrated in int16 wherever the chip has it.
    """

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self._narrow, self._wide = quantizers_of(narrow), quantizers_of(wide)
        known = dict(narrow.named_modules())
        between = {path for path in self._wide if path.rpartition(".")[0] not in known}
        self.has_stubs_between = bool(between)
        for path in between:
            wide.get_submodule(path.rpartition(".")[0]).register_forward_hook(_pass_int8)
        self._parts = _parts_of(narrow, wide, self._narrow.keys() - self._wide.keys())
        if [p for p in self._narrow if p not in self._parts] != [p for p in self._wide if p not in between]:
            only = sorted(set(self._narrow) ^ (set(self._wide) - between))
            raise QuantizationConfigError(
                f"the int8 and the int16 model have other fake quantizers ({', '.join(only[:3])}): prepare the same "
                "model for both, without formats that its modules decide by themselves."
            )
        quantizers: dict[Site, tuple[str, ...]] = {}
        for path, quantizer in self._narrow.items():
            if path in self._parts or quantizer.dtype != self._wide[path].dtype:
                kind = WEIGHT if path.endswith("weight_fake_quant") else ACTIVATION
                site = Site(operator_around(narrow, path), kind)
                quantizers[site] = (*quantizers.get(site, ()), path)
        super().__init__(wide if between else narrow, quantizers)
        self.raised = frozenset(quantizers) if between else frozenset()
        self.leaders: Mapping[Site, frozenset[Site]] = {}  # of sites that are int16 if one of others is

    def raise_to(self, sites: Collection[Site]) -> nn.Module:
        """The model in the VALIDATION state, with int16 at these sites and those that follow them, int8 at others."""
        chosen = frozenset(sites)
        chosen |= {site for site, leaders in self.leaders.items() if leaders & chosen}
        for site in chosen ^ self.raised:
            for path in self.quantizers[site]:
                self._put(path, site in chosen)
        self.raised = chosen
        self._set(FakeQuantState.VALIDATION)
        return self.model

    def _put(self, path: str, is_wide: bool) -> None:
        """Let a fake quantizer be the one of int16 or that of int8."""
        if path in self._parts:
            owner, name, part = self._parts[path]
            module = self.model.get_submodule(owner)
            module.__dict__.pop(name, None)  # None, where the model was made without the part
            module._modules[name] = None if is_wide else part
            return
        owner, _, name = path.rpartition(".")
        self.model.get_submodule(owner)._modules[name] = (self._wide if is_wide else self._narrow)[path]

    def set_narrow(self, scales: Mapping[str, Tensor]) -> None:
        """Give the int8 forms of sites other scales."""
        for paths in self.quantizers.values():
            for path in paths:
                if path in scales and not self._narrow[path].is_fixed:
                    self._narrow[path].set_qparams(scales[path])
                    self._narrow[path].forget_scale()

    def at(self, site: Site) -> dict[str, FakeQuantize]:
        """The fake quantizers of a site as they are now, by path."""
        source = self._wide if site in self.raised else self._narrow
        return {path: source[path] for path in self.quantizers[site] if path in source}

    def wide(self, path: str) -> FakeQuantize | None:
        """The int16 form of the fake quantizer at a path; None where int16 has no such part."""
        return self._wide.get(path)

    def steps(self, site: Site) -> tuple[float, float]:
        """The largest scale of a site in int8, and in int16."""
        path = next((path for path in self.quantizers[site] if path in self._wide), None)
        if path is None:
            narrow = float(self._narrow[self.quantizers[site][0]].scale.max())
            return narrow, narrow / _FINER
        return float(self._narrow[path].scale.max()), float(self._wide[path].scale.max())

    def step_ratio(self, site: Site) -> float:
        """How large the scale of a site in int16 is in steps of its present format."""
        narrow, wide = self.steps(site)
        return 1.0 if site in self.raised else wide / narrow


def _parts_of(narrow: nn.Module, wide: nn.Module, paths: Collection[str]) -> dict[str, tuple[str, str, nn.Module]]:
    """For fake quantizers that only one of the models has: the module they are in, its owner's path and its name there.

    Only where the owner knows of the other form: it has None there.
    """
    found = {}
    there = dict(wide.named_modules())
    for path in paths:
        names = path.split(".")
        count = next(n for n in range(1, len(names) + 1) if ".".join(names[:n]) not in there)
        owner, name = ".".join(names[: count - 1]), names[count - 1]
        if getattr(there[owner], name, wide) is None:
            found[path] = owner, name, narrow.get_submodule(f"{owner}.{name}" if owner else name)
    return found


def _pass_int8(stub: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    """What a QuantStub between formats gives, or what it got where that is int8 already."""
    return args[0] if args and isinstance(args[0], QTensor) and args[0].dtype == qint8 else result


def quantizers_of(model: nn.Module) -> dict[str, FakeQuantize]:
    """The fake quantizers of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FakeQuantize)}


def operator_around(model: nn.Module, path: str) -> str:
    """The path of the outermost operator that a fake quantizer belongs to."""
    parts = path.split(".")[:-1]
    module: nn.Module = model
    for count, part in enumerate(parts, 1):
        module = module.get_submodule(part)
        if isinstance(module, PlacedModule):
            return ".".join(parts[:count])
    return ".".join(parts)
