"""The state of a prepare, as one object that every pass takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from horizon_plugin_pytorch.capture.recorder import LoggedCall
from horizon_plugin_pytorch.capture.region import Region, called_path
from horizon_plugin_pytorch.capture.wrapped import called_by_code_too
from horizon_plugin_pytorch.config.choice import Choice
from horizon_plugin_pytorch.config.graph_view import GraphView
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.passes.unread import drop_unread
from horizon_plugin_pytorch.runtime.call_site import CallSite, Variant
from horizon_plugin_pytorch.runtime.dispatch import Dispatcher
from horizon_plugin_pytorch.runtime.located import FusedAway, Identity
from horizon_plugin_pytorch.runtime.node_notes import notes

if TYPE_CHECKING:  # whose files have passes, too
    from horizon_plugin_pytorch.passes.hybrid import HybridConfig
    from horizon_plugin_pytorch.passes.own_scales import OwnScales
    from horizon_plugin_pytorch.passes.tied_scales import TiedOperators


@dataclass
class Preparation(ABC):
    """What passes read and change. What differs between the two routes is a method of the subclasses.

    Args:
        model: what has the graph and the modules.
        march: the chip.
        own: which calls of shared modules have scales of their own.
        region: the quantized part of the graph.
        choices: the qconfig of every module path, with the reason for it.
        name: of the user's model, for messages.
        qconfig_dict, qconfig_setter: who chooses; at most one of them.
        hybrid: which operators run on the CPU; None: none do.
        is_fused: fuse layers with what follows them.
        joins_calls: let all calls of a module in one forward count as one batch, while training too.
        tied: operators that have one scale with what they take.
        counters: how many modules were generated, by scope and operator.
        sites: the modules that were made for the call sites of functions.
        lines: the modules that become QAT modules, with the lines that call them.
        stubbed: calls of code that is not in the graph and has QuantStubs inside.
        runs: the calls of modules in recorded runs: a model that keeps its forward has to find them again.
        groups: modules that are to have one scale.
    """

    model: Any
    march: March
    own: OwnScales
    region: Region = field(default_factory=Region)
    choices: dict[str, Choice] = field(default_factory=dict)
    name: str = ""
    qconfig_dict: dict[str, Any] | None = None
    qconfig_setter: Any = None
    hybrid: HybridConfig | None = None
    is_fused: bool = True
    joins_calls: bool = True
    tied: TiedOperators | None = None
    counters: dict[tuple[str, str], int] = field(default_factory=dict)
    sites: dict[CallSite, list[Variant]] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    stubbed: Set[fx.Node] = frozenset()
    runs: Iterable[list[LoggedCall]] = ()
    groups: list[list[str]] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        """The graph of the model's calls."""
        return self.model.graph

    @property
    def root(self) -> nn.Module:
        """The module tree that the QAT modules are put into."""
        return self.model.get_submodule("")

    def view(self) -> GraphView:
        """The graph as setters see it."""
        return GraphView(self.model, self.graph, self.region, self.choices, self.march, self.own.original)

    def variants(self, node: fx.Node) -> list[Variant]:
        """The modules that were made for the call site of a node; none for nodes that were traced."""
        site = notes(node).site
        return [] if site is None else self.sites.setdefault(site, [])

    @property
    @abstractmethod
    def has_stubs_first(self) -> bool:
        """Is the stub after an operator of the CPU before what moves its result? So the guide's structure has it."""

    @abstractmethod
    def known_stub(self, node: fx.Node, place: int) -> str:
        """The path of the stub that was made before for that argument of the same call; empty if there is none."""

    @abstractmethod
    def keep_stub(self, node: fx.Node, place: int, path: str) -> None:
        """A stub was made for that argument of a call."""

    @abstractmethod
    def call_of(self, node: fx.Node) -> Any:
        """What several nodes have in common if they are one call of the user's code."""

    @abstractmethod
    def called_unseen(self, is_certain: bool) -> Mapping[int, str]:
        """Modules that code calls, or may call, whose calls are not in the graph: ids, with the line of that code."""

    @abstractmethod
    def drop_unread(self) -> None:
        """Take out of the graph what nobody reads."""

    @abstractmethod
    def left_of_fused(self) -> nn.Module:
        """What stays where a module was that is fused into another."""


@dataclass
class TracedPreparation(Preparation):
    """By symbolic trace: the graph becomes the model's forward, and every node is a call of its own.

    Args:
        code: the calls of code that tracing does not enter.
        float_forms: the modules before they become QAT modules, by path.
    """

    code: list[fx.Node] = field(default_factory=list)
    float_forms: dict[str, nn.Module] = field(default_factory=dict)

    has_stubs_first = True

    def known_stub(self, node: fx.Node, place: int) -> str:
        return ""

    def keep_stub(self, node: fx.Node, place: int, path: str) -> None:
        pass

    def call_of(self, node: fx.Node) -> Any:
        return node

    def called_unseen(self, is_certain: bool) -> Mapping[int, str]:
        return called_by_code_too(self.model, is_certain)

    def drop_unread(self) -> None:
        drop_unread(self.model)

    def left_of_fused(self) -> nn.Module:
        return Identity()


@dataclass
class RecordedPreparation(Preparation):
    """By running: the model keeps its forward, and a line that runs again is one call.

    Args:
        stubs: the stub for an argument of the call of a module.
        children: names of the children of each module of the user's model.
        casts, met, called: which casts, functions and modules the runs met.
        scopes: the modules whose forwards are the user's.
        deployed: the functions that they call in eval mode.
        dispatcher: what the prepared model keeps, once it is made.
    """

    stubs: dict[tuple[str | None, int], str] = field(default_factory=dict)
    children: Mapping[str, Collection[str]] = field(default_factory=dict)
    casts: frozenset[CallSite] = frozenset()
    met: frozenset[CallSite] = frozenset()
    called: frozenset[str] = frozenset()
    scopes: list[tuple[str, nn.Module]] = field(default_factory=list)
    deployed: list[CallSite] = field(default_factory=list)
    dispatcher: Dispatcher | None = None

    has_stubs_first = False  # what moves it is the user's code

    def known_stub(self, node: fx.Node, place: int) -> str:
        return self.stubs.get((called_path(self.model, node), place), "")

    def keep_stub(self, node: fx.Node, place: int, path: str) -> None:
        self.stubs[called_path(self.model, node), place] = path

    def call_of(self, node: fx.Node) -> Any:
        return called_path(self.model, node) or notes(node).site or node

    def called_unseen(self, is_certain: bool) -> Mapping[int, str]:
        return {}  # what such code calls was recorded

    def drop_unread(self) -> None:
        pass  # all of it was computed when the model ran

    def left_of_fused(self) -> nn.Module:
        return FusedAway()  # which the user's forward calls
