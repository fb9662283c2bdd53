"""What `prepare` knows of the operators of a model, noted while it prepares one."""

from __future__ import annotations

from horizon_plugin_pytorch.config.graph_view import GraphView
from horizon_plugin_pytorch.config.setters import QconfigSetterBase


class Survey(QconfigSetterBase):
    """A setter that changes nothing and looks.

    Attributes:
        operators: how many there are with a format of their own.
        names: the operator of each path.
        takers: who takes the result of each path.
        producers: whose results are the operand of each path.
        has_float16: paths of operators that the chip computes in float16.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.takers: dict[str, list[str]] = {}
        self.producers: dict[str, list[str]] = {}
        self.has_float16: set[str] = set()

    @property
    def operators(self) -> int:
        """How many operators have a format of their own."""
        return len(self.names)

    def finish(self, view: GraphView) -> None:
        for operator in view:
            if view.qconfig(operator) is None:
                continue
            path = operator.path
            self.names[path] = operator.row.name
            self.takers[path] = [taker.path for taker, _ in view.takers(operator)]
            self.producers[path] = [p.path for group in view.operand_producers(operator)[:1] for p in group]
            if view.march.family == "nash" and not operator.row.is_quant and not view.is_fixed(operator):
                self.has_float16.add(path)
