"""The quantized part of a graph as rules see it: operators, what feeds them, who takes their results, their choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.capture.region import (
    Region,
    called_path,
    is_fact,
    module_at,
    operands,
    row_of_node,
)
from horizon_plugin_pytorch.capture.wrapped import wrapped_modules
from horizon_plugin_pytorch.config.choice import GIVES_REAL, KEEPS_FORMAT, NO_SETTER, Choice, Step, step_between
from horizon_plugin_pytorch.config.resolve import check_qconfig
from horizon_plugin_pytorch.fake_quant.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.march import March, require_march
from horizon_plugin_pytorch.nn.intrinsic import FusedModule
from horizon_plugin_pytorch.nn.qat.gemm import has_integer_weight
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, row_of_module
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.runtime.located import FUSED_INTO
from horizon_plugin_pytorch.runtime.node_notes import notes

# What every module has before setters run, so that every function becomes a module; never what one ends with.
PLACEHOLDER = default_qat_8bit_fake_quant_qconfig._replace()


@dataclass(frozen=True, eq=False)
class OperatorView:
    """One operator with a format of its own.

    Args:
        path: where its module is; a function's is generated.
        row: its row in the operator table.
        module: the float module.
        nodes: its calls; several for a shared module, none inside a module that the graph does not look into.
        members: paths of what is fused into it, and its own.
    """

    path: str
    row: Operator
    module: nn.Module
    nodes: tuple[fx.Node, ...]
    members: tuple[str, ...]

    @property
    def node(self) -> fx.Node | None:
        """Its first call."""
        return self.nodes[0] if self.nodes else None

    @property
    def has_weight(self) -> bool:
        """Is it a layer with weights?"""
        return has_integer_weight(self.row)

    @property
    def has_add(self) -> bool:
        """Is it a layer with a sum fused into it?"""
        return isinstance(self.module, FusedModule) and self.module.form.has_add

    @property
    def is_gemm(self) -> bool:
        """Is it a convolution, a linear layer or a product of matrices?"""
        return self.has_weight or Trait.PRODUCT in self.row.traits

    @property
    def products_take(self) -> str:
        """What the products of matrices inside of it take: its ``"operands"``, its own ``"parts"``, or nothing."""
        return getattr(self.row.qat, "products_take", "")


@dataclass(frozen=True, eq=False)
class Consumer:
    """One call that takes an operator's result, perhaps after it was moved or reshaped."""

    node: fx.Node
    row: Operator | None
    path: str
    keeps_format: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or self.node.name


class GraphView:
    """The operators of the quantized part, with their choices.

    Args:
        model: anything with ``graph`` and ``get_submodule``.
        graph: the graph of its calls.
        region: the quantized part.
        choices: the choice of each path; `set` changes it.
        march: the chip; None takes the current one.
        original: gives the path in the user's model of a module that was made for one call of it.
    """

    def __init__(
        self,
        model: Any,
        graph: fx.Graph,
        region: Region,
        choices: dict[str, Choice],
        march: March | None = None,
        original: Callable[[str], str] = str,
    ) -> None:
        self.model, self.graph, self.region, self.choices = model, graph, region, choices
        self.original = original
        self.march = require_march("a qconfig setter") if march is None else march
        self._fused: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for fused in vars(module).get(FUSED_INTO, ()):
                self._fused.setdefault(id(fused), []).append(path)
        self._operators = {found.path: found for found in self._find()}
        self._by_name = {name: found for found in self for name in found.members}

    def asking(self) -> GraphView:
        """A view with choices of its own: what is set there does not count."""
        return GraphView(self.model, self.graph, self.region, dict(self.choices), self.march, self.original)

    # -- operators

    def __iter__(self) -> Iterator[OperatorView]:
        return iter(self._operators.values())

    def __len__(self) -> int:
        return len(self._operators)

    def __getitem__(self, path: str) -> OperatorView:
        return self._operators[path]

    def named(self, name: str) -> OperatorView | None:
        """The operator at a path, or into which that is fused, or of which it is a part."""
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.rpartition(".")[0]
        return None

    def every(self, name: str) -> list[OperatorView]:
        """The same, for all calls of a shared module; the name of one call's own module gives that one."""
        first = self.named(name)
        return [] if first is None else [first, *(o for o in self if o is not first and self._is_call(o, first))]

    def _is_call(self, operator: OperatorView, first: OperatorView) -> bool:
        return self.original(operator.path) == first.path

    def names(self, operator: OperatorView) -> Iterator[str]:
        """The names that a rule may have for an operator, the most particular first."""
        own = (operator.path, *reversed(operator.members))
        for paths in (own, tuple(map(self.original, own))):
            yield from paths
            around = paths[0].rpartition(".")[0]
            while around:
                yield around
                around = around.rpartition(".")[0]
        yield ""

    def has_module(self, path: str) -> bool:
        """Does the model have a module at that path?"""
        try:
            self.model.get_submodule(path)
        except AttributeError:
            return False
        return True

    def may_come(self, path: str) -> bool:
        """Can a module be made there when the model meets a call in code that tracing does not enter?"""
        around, _, name = path.rpartition(".")
        is_generated = name.startswith("_generated_") and self.has_module(around)
        return is_generated and any(isinstance(module, LeafCode) for module in self.model.modules())

    def row(self, node: fx.Node) -> Operator | None:
        """The row of the operator that a node calls."""
        return row_of_node(self.model, node)

    def place(self, node: fx.Node) -> str:
        """What messages call a node."""
        return called_path(self.model, node) or node.name

    def _find(self) -> Iterator[OperatorView]:
        calls: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            path = called_path(self.model, node)
            if path is not None and node in self.region:
                calls.setdefault(path, []).append(node)
        for path, nodes in calls.items():
            row, module = row_of_node(self.model, nodes[0]), module_at(self.model, path)
            if row is not None and row.needs_qconfig:
                members = notes(nodes[0]).members or tuple(self._fused.get(id(module), ()))
                yield OperatorView(path, row, module, tuple(nodes), (*members, path))
            elif row is None:
                yield from self._inside(path, module)
            else:
                self._note(path, KEEPS_FORMAT)
        for path in wrapped_modules(self.model):
            row, module = row_of_module(type(module_at(self.model, path))), module_at(self.model, path)
            if path not in calls and row is not None and row.needs_qconfig:
                yield OperatorView(path, row, module, (), (*self._fused.get(id(module), ()), path))
        for node in self.graph.nodes:
            if node.op == "call_module" and self.is_exit(node):
                self._note(str(node.target), GIVES_REAL)

    def _note(self, path: str, why: str) -> None:
        """Say why a module has no format of its own."""
        if path in self.choices and not self.choices[path].is_fixed:
            self.choices[path] = replace(self.choices[path], steps=(Step(why),))

    def _inside(self, path: str, module: nn.Module) -> Iterator[OperatorView]:
        """Operators in a module that the graph does not look into."""
        for name, part in module.named_modules(prefix=path):
            row = row_of_module(type(part))
            if row is not None and row.needs_qconfig and name in self.choices:
                yield OperatorView(name, row, part, (), (*self._fused.get(id(part), ()), name))

    # -- neighbours

    def operand_producers(self, operator: OperatorView) -> list[list[OperatorView]]:
        """For each operand of an operator, the operators whose format it has."""
        found: list[list[OperatorView]] = []
        for node in operator.nodes:
            inputs = [source for source in operands(self.model, node) if self.region.has_scale(source)]
            for position, source in enumerate(inputs):
                if position == len(found):
                    found.append([])
                found[position] += [p for p in self.sources(source) if p not in found[position]]
        return found

    def producers(self, operator: OperatorView) -> list[OperatorView]:
        """The operators whose results an operator takes."""
        return list(dict.fromkeys(p for group in self.operand_producers(operator) for p in group))

    def sources(self, node: fx.Node) -> list[OperatorView]:
        """The operators that gave a node's result its format: itself, or what comes before nodes that keep it."""
        found: dict[OperatorView, None] = {}
        pending, seen = [node], {node}
        while pending:
            here = pending.pop()
            path = called_path(self.model, here)
            if path is not None and path in self._operators:
                found[self._operators[path]] = None
                continue
            for source in self._kept(here):
                if source not in seen and source in self.region:
                    seen.add(source)
                    pending.append(source)
        return list(found)

    def _kept(self, node: fx.Node) -> list[fx.Node]:
        """The inputs whose format a node's result has."""
        row = row_of_node(self.model, node)
        if is_fact(node) or (row is not None and row.scale_rule is not ScaleRule.INHERIT):
            return []
        if called_path(self.model, node) is not None and row is None:
            return []  # a module that the graph does not look into
        first: list[fx.Node] = []
        args = node.args[:1] or tuple(node.kwargs.values())[:1]
        fx.node.map_arg(args, lambda n: first.append(n) or n)  # type: ignore[func-returns-value]
        return first

    def takers(self, operator: OperatorView) -> list[tuple[OperatorView, int]]:
        """The operators that take a result, each with the position of the operand."""
        found: dict[tuple[OperatorView, int], None] = {}
        for consumer in self.consumers(operator):
            taker = self._operators.get(consumer.path)
            groups = [] if taker is None else self.operand_producers(taker)
            found.update({(taker, i): None for i, group in enumerate(groups) if taker and operator in group})
        return list(found)

    def is_seen(self, operator: OperatorView) -> bool:
        """Does a result also leave the quantized part, or meet what the graph does not look into?"""
        return any(not c.keeps_format and c.path not in self._operators for c in self.consumers(operator))

    def consumers(self, operator: OperatorView) -> list[Consumer]:
        """Who takes an operator's result; behind a call that keeps its format, also who takes that one's."""
        found: list[Consumer] = []
        pending, seen = list(operator.nodes), set(operator.nodes)
        while pending:
            here = pending.pop(0)
            for user in here.users:
                if is_fact(user):
                    continue
                path = called_path(self.model, user) or ""
                keeps = user in self.region and path not in self._operators and here in self._kept(user)
                found.append(Consumer(user, row_of_node(self.model, user), path, keeps))
                if keeps and user not in seen:
                    seen.add(user)
                    pending.append(user)
        return found

    def is_output(self, operator: OperatorView) -> bool:
        """Is its result taken by DeQuantStubs and the model's output only, as it is?"""
        takers = self.takers_as_it_is(operator)
        return bool(takers) and all(self.is_exit(taker.node) for taker in takers)

    def takers_as_it_is(self, operator: OperatorView) -> list[Consumer]:
        """Who takes an operator's result, but for calls that do nothing once the model is deployed."""
        found = self.consumers(operator)
        return [c for c in found if c.row is None or not c.row.does_nothing or not c.keeps_format]

    def is_exit(self, node: fx.Node) -> bool:
        """Is a node a DeQuantStub, or the model's output?"""
        row = row_of_node(self.model, node) if node.op == "call_module" else None
        return node.op == "output" or (row is not None and row.is_dequant)

    def has_real_output(self, operator: OperatorView) -> bool:
        """Can its accumulator leave as float (high-precision output)?"""
        rows = [row_of_node(self.model, node) for node in operator.nodes] or [operator.row]
        return all(row is not None and row.has_real_output for row in rows)

    # -- choices

    def qconfig(self, operator: OperatorView) -> Any:
        """An operator's qconfig so far; None before any setter gave it one, and where it stays float."""
        found = self._choice(operator).qconfig
        return None if found is PLACEHOLDER else found

    def is_fixed(self, operator: OperatorView) -> bool:
        """Did the user insist on its qconfig?"""
        return self._choice(operator).is_fixed

    def steps(self, operator: OperatorView) -> tuple[Step, ...]:
        """The rules that gave it its formats, oldest first."""
        choice = self._choice(operator)
        return () if choice.qconfig is PLACEHOLDER else choice.steps

    def set(self, operator: OperatorView, qconfig: Any, why: str, freeze: bool = False) -> bool:
        """Give an operator a qconfig, and say why; False if the user insists on another.

        Args:
            freeze: let no later rule change it.
        """
        if self.is_fixed(operator):
            return False
        check_qconfig(qconfig, f"{operator.path} ({why})")
        before, steps = self.qconfig(operator), self.steps(operator)
        step = step_between(before, qconfig, why)
        if before is None or not _same(before, qconfig) or step.input:
            steps = (*steps, step if operator.has_weight else replace(step, weight=""))
        self.choices[operator.path] = Choice(qconfig, True, steps, freeze, self.products(operator))
        return True

    def products(self, operator: OperatorView) -> tuple[Any, Any] | None:
        """The formats that somebody asked of the products of matrices inside of an operator."""
        return self._choice(operator).products

    def set_products(self, operator: OperatorView, formats: tuple[Any, Any], why: str) -> None:
        """Give the products of matrices inside of an operator formats of their operands, and say why."""
        if self.is_fixed(operator) or self.products(operator) == formats:
            return
        told = " and ".join(str(dtype).removeprefix("torch.") for dtype in formats)
        step = Step(why, input=f"{told} of the products inside")
        choice = self._choice(operator)
        self.choices[operator.path] = replace(choice, products=formats, steps=(*choice.steps, step))

    def finish(self) -> None:
        """Leave float what no setter gave a qconfig."""
        for operator in self:
            choice = self._choice(operator)
            if choice.qconfig is PLACEHOLDER:
                self.choices[operator.path] = Choice(None, False, (Step(NO_SETTER, output="float"),))

    def _choice(self, operator: OperatorView) -> Choice:
        return self.choices.get(operator.path, Choice(PLACEHOLDER))


class ModuleView(GraphView):
    """The modules of a model whose graph is not known: rules that look at neighbours find none."""

    def __init__(self, model: nn.Module, choices: dict[str, Choice], march: March | None = None) -> None:
        super().__init__(model, fx.Graph(), Region(), choices, march)

    def _find(self) -> Iterator[OperatorView]:
        return self._inside("", self.model)


def _same(one: Any, other: Any) -> bool:
    """Are two qconfigs equal? Those with given scales for each channel count as different."""
    try:
        return bool(one == other)
    except RuntimeError:  # tensors
        return one is other
