"""`optimize_graph`: what an operator joins, such as `cat`, comes in the scale in which it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.capture.region import called_path, operands
from horizon_plugin_pytorch.config.graph_view import GraphView
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.qat.composite import PartedModule

UNIFY = "unify_inputs_scale"


@dataclass(frozen=True)
class TiedOperators:
    """Which operators have one scale for their operands and their result.

    Args:
        methods: of FloatFunctional; functions that became modules count as theirs.
        prefixes: beginnings of module paths.
        types: classes of modules.
    """

    methods: tuple[str, ...] = ("cat",)
    prefixes: tuple[str, ...] = ()
    types: tuple[type, ...] = ()

    @classmethod
    def of(cls, kwargs: Mapping[str, Any] | None, what: str) -> TiedOperators | None:
        """What `optimize_kwargs` asks for; None if it asks for nothing.

        Raises:
            QuantizationConfigError: for keys and values that nobody knows.
        """
        given = dict(kwargs or {})
        known = ("opt_types", "module_prefixes", "module_types", "functions", "methods")
        unknown = [key for key in given if key not in known]
        kinds = _listed(given.pop("opt_types", UNIFY))
        if unknown or any(kind != UNIFY for kind in kinds):
            raise QuantizationConfigError(
                f"{what}: optimize_kwargs takes {', '.join(known)}, and {UNIFY!r} as opt_types; got {kwargs}."
            )
        if not kinds:
            return None
        if not given:
            return cls()
        names = [getattr(function, "__name__", str(function)) for function in _listed(given.get("functions"))]
        return cls(
            (*_listed(given.get("methods")), *names),
            _listed(given.get("module_prefixes")),
            _listed(given.get("module_types")),
        )

    def has(self, view: GraphView, node: fx.Node) -> bool:
        """Is a node one of them?"""
        path, row = called_path(view.model, node), view.row(node)
        if path is None or row is None or node not in view.region:
            return False
        is_named = row.name in self.methods or (bool(self.prefixes) and path.startswith(self.prefixes))
        return is_named or isinstance(view.model.get_submodule(path), self.types)


def _listed(value: Any) -> tuple:
    return () if value is None else (value,) if isinstance(value, (str, type)) or callable(value) else tuple(value)


def is_effective(march: March, what: str) -> bool:
    """Does `optimize_graph` do anything on a chip? The documents give it to Bernoulli."""
    if march.family != "bernoulli":
        warn(
            f"{what}: optimize_graph ties the scales of cat on Bernoulli chips only, as documented; on {march} every "
            "operand keeps a scale of its own, and nothing changes.",
            QuantizationWarning,
        )
    return march.family == "bernoulli"


def tied_groups(view: GraphView, tied: TiedOperators) -> list[list[str]]:
    """The modules that are to have one scale, in groups, each with the joining operator first."""
    groups: list[list[str]] = []
    for node in view.graph.nodes:
        if not tied.has(view, node):
            continue
        sources = [operator for operand in operands(view.model, node) for operator in view.sources(operand)]
        members = dict.fromkeys([called_path(view.model, node) or "", *(operator.path for operator in sources)])
        met = [group for group in groups if any(path in members for path in group)]
        groups = [group for group in groups if group not in met]
        groups.append(list(dict.fromkeys(path for group in (list(members), *met) for path in group)))
    return [group for group in groups if len(group) > 1]


def tie_scales(root: nn.Module, groups: Iterable[list[str]]) -> None:
    """Give the modules of each group one fake quantizer, whose range covers the results of all."""
    for group in groups:
        owners = {path: _owner(root.get_submodule(path)) for path in group}
        quantizers = {path: owner.activation_post_process for path, owner in owners.items() if owner is not None}
        formats = {str(quantizer.dtype) for quantizer in quantizers.values()}
        fixed = [path for path, quantizer in quantizers.items() if quantizer.is_fixed]
        obstacles = [f"`{path}` has no scale of its own" for path in group if path not in quantizers]
        obstacles += [f"`{path}` has a fixed scale" for path in fixed]
        obstacles += [f"they have the formats {', '.join(sorted(formats))}"] if len(formats) > 1 else []
        if obstacles:
            warn(
                f"optimize_graph cannot give {', '.join(f'`{path}`' for path in group[:6])} one scale: "
                f"{'; '.join(obstacles[:3])}. They keep their own.",
                QuantizationWarning,
            )
            continue
        shared = quantizers[group[0]]
        shared.activation_post_process.counts_together = True
        shared.activation_post_process.joins_calibration = False  # it counts together in every state
        for owner in owners.values():
            assert owner is not None
            owner.activation_post_process = shared


def _owner(module: nn.Module) -> Any:
    """What has the fake quantizer of a module's result; None if nothing has."""
    owner = getattr(module, module.last) if isinstance(module, PartedModule) else module
    return owner if isinstance(getattr(owner, "activation_post_process", None), FakeQuantize) else None
