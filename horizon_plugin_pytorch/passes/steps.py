"""The steps that the lists of passes are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from horizon_plugin_pytorch.passes.preparation import Preparation, RecordedPreparation, TracedPreparation


@dataclass(frozen=True)
class Pass:
    """One step of a prepare.

    Args:
        run: does it.
        only: the route that it is for; None means both.
    """

    run: Callable[[Any], None]
    only: type[Preparation] | None = None

    @property
    def name(self) -> str:
        """As the list has it."""
        return self.run.__name__

    def is_for(self, route: type[Preparation]) -> bool:
        """Is it a step of that route?"""
        return self.only is None or issubclass(route, self.only)


def traced(run: Callable[[TracedPreparation], None]) -> Pass:
    """A step for models that are traced."""
    return Pass(run, TracedPreparation)


def recorded(run: Callable[[RecordedPreparation], None]) -> Pass:
    """A step for models that keep their forward."""
    return Pass(run, RecordedPreparation)


def on_model(function: Callable[[Any], Any]) -> Callable[[Preparation], None]:
    """A step that looks at the model and its graph alone."""

    @functools.wraps(function)
    def run(prep: Preparation) -> None:
        function(prep.model)

    return run


def on_root(function: Callable[[Any], Any]) -> Callable[[Preparation], None]:
    """A step that looks at the modules alone."""

    @functools.wraps(function)
    def run(prep: Preparation) -> None:
        function(prep.root)

    return run


def run_steps(prep: Preparation, steps: Iterable[Pass]) -> None:
    """Run steps one after the other."""
    for step in steps:
        step.run(prep)
